"""Ids, endpoints, the bound of a fact and the records: golden vectors, and the laws that hold for all of them."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natsreceipts import (
    CorruptRecord,
    InvalidFact,
    InvalidName,
    InvalidSetting,
    NoticeConflict,
    NoticeSpec,
    NoticeStatus,
    RunNoticeFact,
    UnsupportedRecord,
    notice_addressee_id,
    run_notice_id,
)
from natsreceipts.notice import check_endpoint, check_instant, check_notice_id, check_run, check_text, endpoint_of
from natsreceipts.notice_record import read_spec, read_status

VECTORS = Path(__file__).parents[1] / "vectors"
IDS = json.loads((VECTORS / "notice_ids.json").read_text("utf-8"))
FACTS = json.loads((VECTORS / "notice_facts.json").read_text("utf-8"))["cases"]

quick = settings(max_examples=200, deadline=None)

# Ids


@pytest.mark.parametrize("vector", IDS["addressee"], ids=lambda v: ascii(v["agent"][:20]))
def test_addressee_vectors(vector):
    assert notice_addressee_id(vector["agent"]) == vector["id"]


@pytest.mark.parametrize("vector", IDS["notice"], ids=lambda v: ascii(f"{v['requestId'][:8]} {v['addressee']}"))
def test_notice_vectors(vector):
    assert run_notice_id(vector["requestId"], vector["addressee"]) == vector["id"]


@quick
@given(st.text(min_size=1), st.text())
def test_ids_are_tokens(agent, request_id):
    for one in (notice_addressee_id(agent), run_notice_id(request_id, agent)):
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", one)
        check_notice_id(one)


@pytest.mark.parametrize("agent", ["", "\ud800", None, 7, b"a"])
def test_agents_without_an_id(agent):
    with pytest.raises(InvalidName):
        notice_addressee_id(agent)


@pytest.mark.parametrize(("request_id", "agent"), [("\udfff", "a"), ("a", "\udfff"), (None, "a"), ("a", 7)])
def test_notices_without_an_id(request_id, agent):
    with pytest.raises(InvalidName):
        run_notice_id(request_id, agent)


# Endpoints, and the other names


@pytest.mark.parametrize("endpoint", ["local", "a", "0", "a-b", "prod_acme", "a" * 64, "x-1_y--2"])
def test_endpoints(endpoint):
    check_endpoint(endpoint)
    assert (endpoint_of(endpoint) == endpoint) is (endpoint != "local")


@pytest.mark.parametrize(
    "endpoint",
    ["", "A", "a.b", "-a", "a-", "_a", "a_", "a__b", "a_-b", "a" * 65, "ä", "a b", "a\n", "*", ">", None, 7],
)
def test_no_endpoints(endpoint):
    with pytest.raises(InvalidName, match="endpoint"):
        check_endpoint(endpoint)


@quick
@given(st.text(min_size=1))
def test_every_tenant_has_an_endpoint(tenant):
    check_endpoint(endpoint_of(tenant))
    assert endpoint_of(tenant) != "local"


def test_tenants_do_not_meet():
    assert endpoint_of("acme") == "acme"
    assert endpoint_of("local") == f"x-{hashlib.sha256(b'local').hexdigest()[:40]}"
    assert endpoint_of("Äcme Corp") == f"x-{hashlib.sha256('Äcme Corp'.encode()).hexdigest()[:40]}"
    names = ["local", "Acme", "acme", "a.b", "a_b", "a b", endpoint_of("Acme"), endpoint_of(endpoint_of("Acme"))]
    assert len({endpoint_of(name) for name in names}) == len(names)


@pytest.mark.parametrize("run", ["", "a.b", "a b", "a" * 65, "ä", "*", "a\n", None])
def test_runs_without_room(run):
    with pytest.raises(InvalidName, match="run"):
        check_run(run)


def test_runs_with_room():
    for run in ("a", "A-9_z", "-", "a" * 64):
        check_run(run)


@pytest.mark.parametrize("text", ["", "a\nb", "\x00", "\x7f", "\x85", "\u2028", "\ud800", "x" * 1025, None, 7])
def test_names_that_no_record_holds(text):
    with pytest.raises(InvalidName, match="step"):
        check_text("step", text)


@pytest.mark.parametrize("at", [-1, 2**53, 1.0, True, None, "0", float("nan")])
def test_no_instants(at):
    with pytest.raises(InvalidSetting, match="at="):
        check_instant("at", at)


@pytest.mark.parametrize("at", [0, 1, 2**53 - 1])
def test_instants(at):
    check_instant("at", at)


# The bound

FIELD = {
    "not_record": "fact",
    "decision_not_token": "decision",
    "detail_not_record": "detail",
    "too_long": "detail.a",
    "control_char": "detail.a",
    "not_scalar": "detail.a",
    "bad_detail_key": "detail.",
}


@pytest.mark.parametrize("case", FACTS, ids=lambda case: ascii(case["fact"])[:60])
def test_fact_vectors(case):
    if case["refused"] is None:
        fact = RunNoticeFact.of(case["fact"])
        assert fact.fields() == case["fact"]
    else:
        with pytest.raises(InvalidFact) as caught:
            RunNoticeFact.of(case["fact"])
        assert caught.value.field.startswith(FIELD[case["refused"]])
        assert caught.value.limit


GOOD = {"decision": "build", "outcome": "ok"}


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({}, "decision"),
        ({"decision": "a"}, "outcome"),
        (GOOD | {"outcome": ""}, "outcome"),
        (GOOD | {"outcome": "-a"}, "outcome"),
        (GOOD | {"outcome": "a\n"}, "outcome"),
        (GOOD | {"outcome": "a" * 65}, "outcome"),
        (GOOD | {"decision": 7}, "decision"),
        (GOOD | {"more": 1}, "more"),
        (GOOD | {1: 1}, "int"),
        (GOOD | {"detail": None}, "detail"),
        (GOOD | {"detail": "x"}, "detail"),
        (GOOD | {"detail": {f"k{n}": n for n in range(9)}}, "detail"),
        (GOOD | {"detail": {"A": 1}}, "detail.A"),
        (GOOD | {"detail": {"a_b": 1}}, "detail.a_b"),
        (GOOD | {"detail": {"a-": 1}}, "detail.a-"),
        (GOOD | {"detail": {"a\n": 1}}, "detail.a\n"),
        (GOOD | {"detail": {1: 1}}, "detail.int"),
        (GOOD | {"detail": {"a": float("nan")}}, "detail.a"),
        (GOOD | {"detail": {"a": float("inf")}}, "detail.a"),
        (GOOD | {"detail": {"a": -float("inf")}}, "detail.a"),
        (GOOD | {"detail": {"a": 10**309}}, "detail.a"),
        (GOOD | {"detail": {"a": [1]}}, "detail.a"),
        (GOOD | {"detail": {"a": {}}}, "detail.a"),
        (GOOD | {"detail": {"a": b"x"}}, "detail.a"),
        (GOOD | {"detail": {"a": 1j}}, "detail.a"),
        (GOOD | {"detail": {"a": "\u2029"}}, "detail.a"),
        (GOOD | {"detail": {"a": "\x00"}}, "detail.a"),
        (GOOD | {"detail": {"a": "\x1f"}}, "detail.a"),
        (GOOD | {"detail": {"a": "\x9f"}}, "detail.a"),
        (GOOD | {"detail": {"a": "\U0001f600" * 64 + "x"}}, "detail.a"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_beyond_the_bound(given_, field):
    with pytest.raises(InvalidFact) as caught:
        RunNoticeFact.of(given_)
    assert caught.value.field == field
    assert str(caught.value).startswith(field if field.isprintable() else ascii(field))


@pytest.mark.parametrize(
    "detail",
    [
        {},
        {f"k{n}": n for n in range(8)},
        {"0": True, "a--b": -0.0, "x" * 32: 1e308},
        {"a": 10**300, "b": -(10**300)},
        {"a": "\xa0", "b": "\u202f", "c": "x" * 128, "d": '|`<>\\"'},
    ],
    ids=ascii,
)
def test_within_the_bound(detail):
    fact = RunNoticeFact("a" * 64, "0", detail)
    assert fact.detail == detail
    assert RunNoticeFact.of(fact) is fact


TOKENS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?", fullmatch=True)
KEYS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cc", "Zl", "Zp")), max_size=64)
SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
DETAILS = st.none() | st.dictionaries(KEYS, SCALARS, max_size=8)
FACT = st.builds(RunNoticeFact, TOKENS, TOKENS, DETAILS)


def spec_of(fact, **given_):
    said = {"run": "run-1", "step": "/n#0", "addressee": "local.planner-1", "fact": fact, "at": 1}
    return NoticeSpec(**said | given_)


def key_of(spec, half="spec"):
    return f"notice.local.{spec.run}.{notice_addressee_id(spec.addressee)}.{'i' * 43}.{half}"


@quick
@given(FACT, st.integers(0, 2**53 - 1))
def test_a_record_says_what_was_filed(fact, at):
    spec = spec_of(fact, at=at)
    again = read_spec("b", key_of(spec), 1, spec.to_bytes())
    assert again == spec
    assert again.to_bytes() == spec.to_bytes()
    assert again.fact == pickle.loads(pickle.dumps(fact)) == copy.deepcopy(fact)
    assert hash(again.fact) == hash(fact)
    assert list(json.loads(spec.to_bytes())) == ["v", "run", "step", "addressee", "fact", "at"]


@quick
@given(st.dictionaries(st.text() | st.integers(), st.none() | SCALARS | st.binary(), max_size=10), st.text(), st.text())
def test_what_is_not_refused_reads_back(detail, decision, outcome):
    """Whatever the bound lets through, a reader takes: no record can poison a list."""
    try:
        fact = RunNoticeFact(decision, outcome, detail)
    except InvalidFact:
        return
    spec = spec_of(fact)
    assert read_spec("b", key_of(spec), 1, spec.to_bytes()) == spec


def test_equal_facts():
    one = RunNoticeFact("a", "b", {"x": 1, "y": 2})
    assert one == RunNoticeFact("a", "b", {"y": 2.0, "x": 1.0})
    assert one != RunNoticeFact("a", "b", {"x": True, "y": 2})
    assert one != RunNoticeFact("a", "b")
    assert RunNoticeFact("a", "b") != RunNoticeFact("a", "b", {})
    assert one != "a"


def test_a_fact_is_not_changed_by_its_maker():
    detail = {"x": 1}
    fact = RunNoticeFact("a", "b", detail)
    detail["x"] = "\n"
    assert fact.detail == {"x": 1}


# Records


def test_the_fields_of_the_wire():
    spec = spec_of(RunNoticeFact("build", "ok", {"n": 1.0}))
    assert json.loads(spec.to_bytes()) == {
        "v": 1,
        "run": "run-1",
        "step": "/n#0",
        "addressee": "local.planner-1",
        "fact": {"decision": "build", "outcome": "ok", "detail": {"n": 1}},
        "at": 1,
    }
    assert b'"n":1}' in spec.to_bytes()  # as JavaScript writes it
    status = NoticeStatus(consumed_at=2, by="turn-1", observed_spec_revision=3)
    written = {"v": 1, "consumedAt": 2, "by": "turn-1", "observedSpecRevision": 3}
    assert json.loads(status.to_bytes()) == written
    assert list(json.loads(status.to_bytes())) == list(written)
    assert read_status("b", "k.status", 1, status.to_bytes()) == status


def test_the_order_of_the_wire():
    """That of JSON.stringify over the same object, so that both systems write the same bytes."""
    detail = {"n": 1, "by": "ann", "10": 2, "9": True, "09": "x", "4294967295": 0}
    spec = spec_of(RunNoticeFact.of({"detail": detail, "outcome": "ok", "decision": "build"}))
    assert spec.to_bytes() == (
        b'{"v":1,"run":"run-1","step":"/n#0","addressee":"local.planner-1","fact":{"decision":"build","outcome":"ok",'
        b'"detail":{"9":true,"10":2,"n":1,"by":"ann","09":"x","4294967295":0}},"at":1}'
    )
    assert read_spec("b", key_of(spec), 1, spec.to_bytes()).to_bytes() == spec.to_bytes()


@pytest.mark.parametrize("at", [10**5000, "x" * 100_000, -(10**5000), "\ud800"], ids=lambda at: type(at).__name__)
def test_what_is_no_instant_is_shown_in_short(at):
    with pytest.raises(InvalidSetting) as caught:
        check_instant("at", at)
    assert len(str(caught.value).encode()) < 200


@pytest.mark.parametrize("name", ["\ud800", "k\n", "\x1b[2J", "x" * 100_000], ids=lambda name: ascii(name)[:20])
def test_a_field_that_does_not_print_is_shown_as_it_would_be_written(name):
    for given_ in (GOOD | {name: 1}, GOOD | {"detail": {name: 1}}):
        with pytest.raises(InvalidFact) as caught:
            RunNoticeFact.of(given_)
        text = str(caught.value)
        assert len(text.encode()) < 300
        assert text.isprintable()


def test_why_a_record_does_not_read_says_nothing_of_writing():
    for value in (raw(fact={"decision": "build", "outcome": "ok", "x": 1}), raw(addressee="")):
        with pytest.raises(CorruptRecord) as caught:
            read_spec("b", KEY, 7, value)
        text = str(caught.value)
        assert f"nats kv get b {KEY} --revision 7" in text
        assert f"nats kv del b {KEY}" in text
        assert "never cut" not in text
        assert "executed" not in text


def raw(**changes):
    spec = spec_of(RunNoticeFact("build", "ok"))
    record = json.loads(spec.to_bytes()) | changes
    return json.dumps({name: value for name, value in record.items() if value is not ...}).encode()


KEY = key_of(spec_of(RunNoticeFact("build", "ok")))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        raw(v=...),
        raw(v="1"),
        raw(v=True),
        raw(v=0),
        raw(run="run-2"),
        raw(run=...),
        raw(addressee="another"),
        raw(addressee=""),
        raw(addressee=7),
        raw(addressee="\ud800"),
        raw(step=...),
        raw(step=7),
        raw(at=...),
        raw(at=-1),
        raw(at=1.5),
        raw(at=True),
        raw(at=2**53),
        raw(fact=...),
        raw(fact={"decision": "a"}),
        raw(fact={"decision": "a", "outcome": "b", "detail": {"x": "\n"}}),
        raw(fact={"decision": "a", "outcome": "b", "detail": {"x": float("inf")}}),
    ],
    ids=lambda value: ascii(value[:60]),
)
def test_corrupt_specs(value):
    with pytest.raises(CorruptRecord) as caught:
        read_spec("bucket", KEY, 7, value)
    assert (caught.value.bucket, caught.value.key, caught.value.revision) == ("bucket", KEY, 7)


def test_specs_of_others():
    """What they may write beyond our own checks, and fields of a later minor version."""
    read = read_spec("bucket", KEY, 7, raw(step="", extra=[1], fact={"decision": "a", "outcome": "b", "detail": {}}))
    assert (read.step, read.fact) == ("", RunNoticeFact("a", "b", {}))


@pytest.mark.parametrize("read", [read_spec, read_status])
def test_newer_records(read):
    with pytest.raises(UnsupportedRecord) as caught:
        read("bucket", KEY, 7, b'{"v":2}')
    assert caught.value.version == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"by": ""},
        {"by": 7},
        {"by": None},
        {"consumedAt": -1},
        {"consumedAt": "1"},
        {"observedSpecRevision": None},
        {"observedSpecRevision": 1.5},
        {"v": None},
    ],
    ids=str,
)
def test_corrupt_statuses(changes):
    record = {"v": 1, "consumedAt": 2, "by": "turn-1", "observedSpecRevision": 3} | changes
    with pytest.raises(CorruptRecord):
        read_status("bucket", "k.status", 7, json.dumps(record).encode())


def test_a_conflict_pickles_with_both():
    one, other = spec_of(RunNoticeFact("a", "b", {"x": 1})), spec_of(RunNoticeFact("a", "c"))
    again = pickle.loads(pickle.dumps(NoticeConflict("k", existing=one, refused=other)))
    assert (again.existing, again.refused, again.key) == (one, other, "k")
