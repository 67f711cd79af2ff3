"""The decision table, written out once more, and everything that it refuses."""

from __future__ import annotations

import dataclasses
import pickle
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natsreceipts.decision import (
    Absent,
    Ambiguous,
    Completed,
    Effect,
    Execute,
    Failed,
    Landed,
    NotLanded,
    Replay,
    Running,
    Unknown,
    Wait,
    decide,
    stricter,
)

READ, IDEMPOTENT, RESUMABLE, OPAQUE = Effect
FOUND = [
    Absent(),
    Completed(),
    *(Failed(n) for n in (1, 2, 7)),
    *(Running(n, lease_expired=expired) for n in (1, 2, 7) for expired in (False, True)),
]


@pytest.mark.parametrize(
    ("state", "opaque", "others"),
    [
        (Absent(), "execute 1", "execute 1"),
        (Completed(), "replay", "replay"),
        (Failed(1), "execute 2", "execute 2"),
        (Failed(7), "execute 8", "execute 8"),
        (Running(1, lease_expired=False), "wait", "wait"),
        (Running(7, lease_expired=False), "wait", "wait"),
        (Running(1, lease_expired=True), "ambiguous", "execute 2"),
        (Running(7, lease_expired=True), "ambiguous", "execute 8"),
    ],
)
def test_the_table(state, opaque, others):
    def said(effect):
        decision = decide(state, effect)
        return f"execute {decision.attempt}" if decision.kind == "execute" else decision.kind

    assert said(OPAQUE) == opaque
    assert said(RESUMABLE) == others
    assert said(IDEMPOTENT) == others
    assert said(READ) == "execute 1"


@pytest.mark.parametrize(("state", "effect"), list(product(FOUND, Effect)))
def test_every_state_and_effect_has_one_decision(state, effect):
    decision = decide(state, effect)
    assert type(decision) in (Execute, Replay, Wait, Ambiguous)
    assert decide(state, effect.value) == decision
    if isinstance(decision, Wait | Ambiguous):
        assert str(state.attempts) in decision.reason


@given(n=st.integers(min_value=1), expired=st.booleans())
def test_an_opaque_call_that_was_claimed_and_did_not_say_how_it_ended_is_never_executed(n, expired):
    assert decide(Running(n, lease_expired=expired), OPAQUE).kind in ("wait", "ambiguous")


@pytest.mark.parametrize("effect", list(Effect))
@pytest.mark.parametrize("attempts", [0, -1, True, False, 1.0, "1", None])
def test_attempts_is_an_int_from_1(attempts, effect):
    for state in (
        Failed(attempts),
        Running(attempts, lease_expired=True),
        Running(attempts, lease_expired=False),
    ):
        with pytest.raises(ValueError, match="attempts"):
            decide(state, effect)


@pytest.mark.parametrize("expired", [None, 0, 1, "false"])
def test_a_lease_has_expired_or_not(expired):
    with pytest.raises(ValueError, match="lease_expired"):
        decide(Running(1, lease_expired=expired), OPAQUE)


@pytest.mark.parametrize("effect", ["", "write", "OPAQUE", "Opaque", None, 1, ["opaque"]])
def test_an_unknown_effect_is_refused(effect):
    with pytest.raises(ValueError, match="not a valid Effect"):
        decide(Absent(), effect)


@pytest.mark.parametrize("state", [None, "absent", Execute(1), Absent])
def test_an_unknown_state_is_refused(state):
    for effect in Effect:
        with pytest.raises(ValueError, match="not a receipt state"):
            decide(state, effect)


def test_the_stricter_effect():
    order = [READ, IDEMPOTENT, RESUMABLE, OPAQUE]
    for a, b in product(order, order):
        assert stricter(a, b) is order[max(order.index(a), order.index(b))]
    assert stricter("read", "resumable") is RESUMABLE
    assert [effect.value for effect in order] == ["read", "idempotent", "resumable", "opaque"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Absent(), "absent"),
        (Completed(), "completed"),
        (Failed(1), "failed"),
        (Running(1, lease_expired=True), "running"),
        (Execute(1), "execute"),
        (Replay(), "replay"),
        (Wait("w"), "wait"),
        (Ambiguous("a"), "ambiguous"),
        (Landed({"id": 1}), "landed"),
        (NotLanded(), "not_landed"),
        (Unknown(), "unknown"),
    ],
)
def test_values_are_plain_and_frozen(value, kind):
    assert value.kind == kind
    assert pickle.loads(pickle.dumps(value)) == value
    assert not hasattr(value, "__dict__")
    for name in [f.name for f in dataclasses.fields(value)]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 2)


def test_what_landed_carries_its_result():
    assert Landed({"id": 1}).result == {"id": 1}
    assert Landed(None) != NotLanded()
