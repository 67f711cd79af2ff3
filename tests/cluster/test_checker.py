"""The checker finds each kind of violation, in histories made by hand; and none in histories that are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from checker import RULES, check
from history import Deed, History, Operation, Stored, deeds_of, operations_of

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "acme.run-1.opaque.abc"


class Story:
    """A history in the making: who writes, enters and is told what, in this order."""

    def __init__(self, *, effect: str = "opaque") -> None:
        self.history = History()
        self.effect = effect
        self.at = 100.0
        self.last: dict[str, Stored] = {}
        self.count = 0

    def tick(self, seconds: float = 0.01) -> float:
        self.at += seconds
        return self.at

    # ------------------------------------------------------------------ what is stored

    def stored(self, where: str, key: str, value: dict[str, Any], *, on: int | None = None) -> int:
        before = self.last.get(key)
        expected = (before.revision if before else 0) if on is None else on
        self.count += 1
        one = Stored(key=key, revision=self.count, time=self.tick(), expected=expected, value=value)
        getattr(self.history, where).append(one)
        self.last[key] = one
        return one.revision

    def write(self, status: str, *, on: int | None = None, key: str = KEY, **fields: Any) -> int:
        """A revision of the receipt: as the one before it, but for what is given."""
        before = self.last[key].value if key in self.last else {"attempts": 1, "leaseMs": 2000, "effect": self.effect}
        kept = ("attempts", "leaseMs", "effect", "holder", "steps", "fences", "open")
        value = {name: before[name] for name in kept if name in before}
        return self.stored("receipts", key, value | {"write": f"nonce-{self.count}", "status": status} | fields, on=on)

    def claim(self, worker: str = "w1", attempt: int = 1, **fields: Any) -> int:
        return self.write(
            "running", attempts=attempt, holder={"token": f"attempt-{self.count}", "worker": worker}, **fields
        )

    def complete(self, result: str = "r1", **fields: Any) -> int:
        return self.write("completed", result={"json": result}, **fields)

    def refuse(self, **fields: Any) -> int:
        return self.write("failed", error={"type": "NotApplied", "message": "", "notApplied": True}, **fields)

    def judge(self, *, after: float = 2.5) -> int:
        self.tick(after)
        return self.write("ambiguous", error={"type": "LeaseExpired", "message": "", "notApplied": False})

    # ------------------------------------------------------------------ what happens, and what is told

    def deed(self, phase: str, op: str = "w1:1", **fields: Any) -> None:
        revision = fields.pop("revision", self.last[KEY].revision if KEY in self.last else 0)
        worker = op.partition(":")[0]
        self.history.deeds.append(
            Deed(
                at=self.tick(),
                op=op,
                worker=worker,
                key=KEY,
                phase=phase,
                effect=self.effect,
                revision=revision,
                **fields,
            )
        )

    def told(
        self,
        do: str,
        op: str = "w1:1",
        outcome: str = "ok",
        *,
        key: str = KEY,
        error: str = "",
        asked: dict[str, Any] | None = None,
        began: float = 0.5,
        **said: Any,
    ) -> None:
        asked = asked if asked is not None else ({"effect": self.effect} if do == "call" else {})
        start = self.at - began
        self.history.operations.append(
            Operation(
                id=op,
                worker=op.partition(":")[0],
                do=do,
                key=key,
                began=start,
                ended=self.tick(),
                outcome=outcome,
                error=error,
                asked=asked,
                said=said,
            )
        )

    def executed(self, *, result: str = "r1", op: str = "w1:1", attempt: int = 1, worker: str = "w1") -> Story:
        """A call from its claim to its caller."""
        self.claim(worker, attempt)
        self.deed("entered", op)
        self.deed("landed", op, token=result)
        self.told("call", op, result=result, revision=self.complete(result))
        return self

    def say(self, session: str, entry: str, mark: str = "", **fields: Any) -> int:
        key = f"acme.{session}"
        before = self.last.get(key)
        body = fields.pop("body", {"role": "user", "content": f"turn by-op {mark} " if mark else "turn"})
        parent = before.value["id"] if before else None
        return self.stored("sessions", key, {"id": entry, "parentId": parent, "body": body} | fields)

    def found(self) -> set[str]:
        return {violation.rule for violation in check(self.history)}


# ---------------------------------------------------------------- histories that are right


def _a_call_and_its_replays(story: Story) -> None:
    story.executed()
    story.told("call", "w2:1", result="r1", revision=2)
    story.told("call", "w2:2", "failed", error="CallInFlight", began=5.0)
    story.told("read", "w2:3", revision=2, status="completed")
    story.told("read", "w2:4", revision=0)


def _a_dead_attempt_that_is_settled(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.deed("landed", token="r1")
    revision = story.judge()
    story.told("call", "w2:1", "failed", error="AmbiguousCall", revision=revision)
    revision = story.complete(resolved={"by": "w3:1", "reason": ""})
    story.told("resolve", "w3:1", revision=revision, status="completed")


def _an_ambiguity_that_a_deposed_leader_tells_of(story: Story) -> None:
    _a_dead_attempt_that_is_settled(story)
    story.told("call", "w2:2", result="r1")
    story.tick(3)
    story.told("call", "w2:3", "failed", error="AmbiguousCall", revision=2)


def _a_refusal_and_a_second_attempt(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.deed("refused")
    story.refuse()
    story.told("call", "w1:1", "unknown", error="NotApplied")
    story.executed(op="w2:1", attempt=2, worker="w2")


def _an_attempt_that_was_judged_and_comes_back(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.judge()
    story.write("running")
    story.deed("landed", token="r1", revision=1)
    story.told("call", result="r1", revision=story.complete())


def _a_claim_that_its_own_worker_gave_up(story: Story) -> None:
    story.claim("w1")
    story.executed(attempt=2, worker="w1")


def _an_operation_that_was_cut_off(story: Story) -> None:
    story.claim()
    story.deed("entered")
    line = '{"id": "w1:1", "worker": "w1", "do": "call", "key": "k", "began": 1.0, "asked": {"effect": "opaque"}}\n'
    story.history.operations += operations_of([line])
    assert story.history.operations[0].outcome == "unknown"


def _a_resumable_call_that_goes_on(story: Story) -> None:
    story.effect = "resumable"
    story.claim()
    story.deed("entered")
    story.deed("step", step="one")
    story.write("running", steps={"one": {"json": "one"}})
    story.tick(2.5)
    story.claim("w2", 2, open=True)
    story.deed("entered", "w2:1")
    story.deed("step", "w2:1", step="two")
    story.deed("landed", "w2:1", token="r2")
    story.told("call", "w2:1", result="r2", revision=story.complete("r2"))


def _a_notice_with_one_reader(story: Story) -> None:
    story.stored("notices", "n.spec", {"step": "s"})
    story.stored("notices", "n.status", {"by": "turn-1"})
    story.told("file", key="n", asked={"step": "s"})
    story.told("consume", "w1:2", key="n", asked={"by": "turn-1"})
    story.told("consume", "w2:1", "failed", key="n", error="AlreadyConsumed", asked={"by": "turn-2"}, by="turn-1")


def _a_session_that_was_woken(story: Story) -> None:
    seq = story.say("s", "e1", "w1:1")
    story.told("append", "w1:1", key="acme.s", seq=seq)
    story.told("append", "w2:1", "failed", key="acme.s", error="SessionConflict")
    call = {"role": "assistant", "content": [{"type": "toolCall", "id": "c", "name": "t", "arguments": {}}]}
    fence = story.say("s", "e2", body=call)
    revision = story.write("withdrawn", attempts=0, effect=None, leaseMs=None, fences={"s": fence})
    never = {"toolCallId": "c", "errorKind": "interrupted_never_started"}
    story.say("s", "e3", close=never, receipt={"toolCallId": "c", "key": KEY, "revision": revision})
    story.told("wake", "w2:2", key="acme.s", entries=["e3"])
    seq = story.say("s", "e4", body=call)
    story.write("running", attempts=1, holder={"token": "t", "worker": "w1"}, effect="opaque", leaseMs=2000)
    story.deed("entered", session="s", entry=seq)


RIGHT = [
    _a_call_and_its_replays,
    _a_dead_attempt_that_is_settled,
    _an_ambiguity_that_a_deposed_leader_tells_of,
    _a_refusal_and_a_second_attempt,
    _an_attempt_that_was_judged_and_comes_back,
    _a_claim_that_its_own_worker_gave_up,
    _an_operation_that_was_cut_off,
    _a_resumable_call_that_goes_on,
    _a_notice_with_one_reader,
    _a_session_that_was_woken,
]


@pytest.mark.parametrize("tell", RIGHT, ids=lambda tell: tell.__name__.strip("_"))
def test_nothing_is_found_in_what_is_right(tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    assert check(story.history) == []


# ---------------------------------------------------------------- histories that are wrong

WRONG: list[tuple[str, Callable[[Story], None]]] = []


def wrong(rule: str) -> Callable[[Callable[[Story], None]], Callable[[Story], None]]:
    assert rule in RULES

    def note(tell: Callable[[Story], None]) -> Callable[[Story], None]:
        WRONG.append((rule, tell))
        return tell

    return note


@wrong("chain")
def _a_write_on_an_older_revision(story: Story) -> None:
    story.claim()
    story.write("running")
    story.write("running", on=1)


@wrong("chain")
def _a_write_that_expected_nothing(story: Story) -> None:
    story.claim()
    story.history.receipts[0] = Stored(**{**vars_of(story.history.receipts[0]), "expected": None})


@wrong("chain")
def _one_write_that_is_stored_twice(story: Story) -> None:
    story.claim()
    story.write("running", write=story.last[KEY].value["write"])


@wrong("chain")
def _a_session_entry_behind_what_was_not_read(story: Story) -> None:
    story.say("s", "e1")
    story.stored("sessions", "acme.s", {"id": "e2", "parentId": "e1", "body": {}}, on=0)


@wrong("transition")
def _a_completed_call_that_runs_again(story: Story) -> None:
    story.executed()
    story.write("running")


@wrong("transition")
def _a_first_record_that_is_no_claim(story: Story) -> None:
    story.write("failed", holder={"token": "t", "worker": "w1"})


@wrong("transition")
def _a_write_after_the_next_attempt(story: Story) -> None:
    story.claim()
    first = story.last[KEY].value["holder"]
    story.refuse()
    story.claim("w2", 2)
    story.write("failed", attempts=1, holder=first)


@wrong("transition")
def _an_opaque_call_claimed_over_a_dead_attempt(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.tick(3)
    story.claim("w2", 2)


@wrong("transition")
def _a_fence_that_is_dropped(story: Story) -> None:
    story.claim(fences={"s": 3})
    story.write("running", fences={})


@wrong("transition")
def _an_effect_that_becomes_looser(story: Story) -> None:
    story.claim()
    story.write("running", effect="idempotent")


@wrong("transition")
def _a_recorded_step_that_is_dropped(story: Story) -> None:
    story.effect = "resumable"
    story.claim(steps={"one": {"json": 1}})
    story.tick(3)
    story.claim("w2", 2, steps={})


@wrong("transition")
def _an_open_attempt_that_is_forgotten(story: Story) -> None:
    story.effect = "idempotent"
    story.claim(open=True)
    story.write("running", open=False)


@wrong("transition")
def _a_failed_call_that_completes_itself(story: Story) -> None:
    story.effect = "idempotent"
    story.claim()
    story.deed("entered")
    story.deed("landed", token="r1")
    story.write("failed", error={"type": "Broke", "message": ""})
    story.complete()


@wrong("two holders")
def _a_live_attempt_that_is_judged_dead(story: Story) -> None:
    story.claim()
    story.judge(after=0.5)


@wrong("two holders")
def _a_second_holder_beside_the_first(story: Story) -> None:
    story.effect = "idempotent"
    story.claim()
    story.deed("entered")
    story.tick(0.5)
    story.claim("w2", 2, open=True)


@wrong("two holders")
def _a_claim_given_up_although_it_was_entered(story: Story) -> None:
    story.effect = "idempotent"
    story.claim("w1")
    story.deed("entered")
    story.claim("w1", 2)


@wrong("opaque twice")
def _an_opaque_effect_that_is_entered_by_a_second_attempt(story: Story) -> None:
    story.claim("w1")
    story.deed("entered")
    story.claim("w1", 2)
    story.deed("entered", "w1:2")


@wrong("opaque twice")
def _one_attempt_that_enters_twice(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.deed("entered", "w1:2")


@wrong("executed again")
def _a_completed_call_that_is_entered(story: Story) -> None:
    story.executed()
    story.claim("w2", 2)
    story.deed("entered", "w2:1")


@wrong("executed again")
def _a_call_made_after_completion_that_enters_a_late_claim(story: Story) -> None:
    story.effect = "idempotent"
    story.executed()
    story.deed("entered", "w2:1", revision=1)
    story.told("call", "w2:1", "unknown", error="LeaseLost", began=0.005)


@wrong("executed again")
def _a_recorded_step_that_is_executed(story: Story) -> None:
    _a_resumable_call_that_goes_on(story)
    story.deed("step", "w2:1", step="one", revision=3)


@wrong("untrue")
def _a_result_that_never_landed(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.complete("r9")


@wrong("never started")
def _not_applied_of_what_landed(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.deed("landed", token="r1")
    story.refuse()


@wrong("never started")
def _a_call_that_runs_from_before_its_fence(story: Story) -> None:
    _a_session_that_was_woken(story)
    story.deed("entered", "w3:1", session="s", entry=2)


@wrong("never started")
def _a_close_without_a_fence(story: Story) -> None:
    story.say("s", "e1")
    revision = story.write("withdrawn", attempts=0, effect=None)
    never = {"toolCallId": "c", "errorKind": "interrupted_never_started"}
    story.say("s", "e2", close=never, receipt={"toolCallId": "c", "key": KEY, "revision": revision})


@wrong("lost")
def _a_completion_that_is_gone(story: Story) -> None:
    story.executed()
    story.history.receipts.pop()


@wrong("lost")
def _a_receipt_that_is_gone(story: Story) -> None:
    story.executed()
    story.history.receipts.clear()


@wrong("lost")
def _a_claim_that_is_gone(story: Story) -> None:
    story.claim()
    story.deed("entered", revision=77)


@wrong("lost")
def _a_read_of_what_was_never_there(story: Story) -> None:
    story.claim()
    story.told("read", revision=9, status="running")


@wrong("lost")
def _a_resolution_that_is_gone(story: Story) -> None:
    story.claim()
    story.judge()
    story.told("resolve", revision=3, status="failed")


@wrong("lost")
def _a_completed_call_that_is_told_as_ambiguous(story: Story) -> None:
    _a_dead_attempt_that_is_settled(story)
    story.told("call", "w2:2", result="r1")
    story.tick(30)
    story.told("call", "w2:3", "failed", error="AmbiguousCall", revision=2)


@wrong("told")
def _another_result_than_the_recorded_one(story: Story) -> None:
    story.executed()
    story.told("call", "w2:1", result="r2")


@wrong("told")
def _not_claimed_and_entered_all_the_same(story: Story) -> None:
    story.claim()
    story.deed("entered")
    story.told("call", "w1:1", "failed", error="NotClaimed")


@wrong("told")
def _an_ambiguity_that_is_not_on_record(story: Story) -> None:
    story.claim()
    story.told("call", "w2:1", "failed", error="AmbiguousCall", revision=1)


@wrong("told")
def _a_resolution_told_as_overtaken_and_stored(story: Story) -> None:
    story.claim()
    story.judge()
    story.refuse(resolved={"by": "w3:1", "reason": ""})
    story.told("resolve", "w3:1", "failed", error="StaleRevision")


@wrong("told")
def _the_resolution_of_somebody_else(story: Story) -> None:
    story.claim()
    story.judge()
    revision = story.refuse(resolved={"by": "w4:1", "reason": ""})
    story.told("resolve", "w3:1", revision=revision, status="failed")


@wrong("error")
def _an_error_of_another_library(story: Story) -> None:
    story.told("call", "w1:1", "unknown", error="NoStreamResponseError")


@wrong("error")
def _a_bucket_that_was_not_replaced(story: Story) -> None:
    story.told("call", "w1:1", "failed", error="BucketReplaced")


@wrong("notice")
def _a_notice_that_is_gone(story: Story) -> None:
    story.told("file", key="n", asked={"step": "s"})


@wrong("notice")
def _a_notice_that_two_turns_carry(story: Story) -> None:
    _a_notice_with_one_reader(story)
    story.told("consume", "w3:1", key="n", asked={"by": "turn-3"})


@wrong("notice")
def _a_consumption_that_is_written_over(story: Story) -> None:
    _a_notice_with_one_reader(story)
    story.stored("notices", "n.status", {"by": "turn-2"})


@wrong("notice")
def _a_turn_that_is_told_of_the_wrong_one(story: Story) -> None:
    _a_notice_with_one_reader(story)
    story.told("consume", "w3:1", "failed", key="n", error="AlreadyConsumed", asked={"by": "turn-3"}, by="turn-2")


@wrong("session")
def _an_entry_that_is_gone(story: Story) -> None:
    story.told("append", key="acme.s", seq=4)


@wrong("session")
def _an_entry_that_is_there_twice(story: Story) -> None:
    story.say("s", "e1", "w1:1")
    story.say("s", "e2", "w1:1")
    story.told("append", "w1:1", "unknown", key="acme.s", error="Unreachable")


@wrong("session")
def _an_entry_id_that_is_there_twice(story: Story) -> None:
    story.say("s", "e1")
    story.say("s", "e1")


@wrong("session")
def _an_entry_told_as_refused_and_stored(story: Story) -> None:
    story.say("s", "e1", "w1:1")
    story.told("append", "w1:1", "failed", key="acme.s", error="SessionConflict")


@wrong("session")
def _a_call_that_is_closed_twice(story: Story) -> None:
    _a_session_that_was_woken(story)
    unknown = {"toolCallId": "c", "errorKind": "interrupted_outcome_unknown"}
    story.say("s", "e5", close=unknown)
    story.say("s", "e6", close=unknown)


@wrong("session")
def _a_close_that_was_told_and_is_gone(story: Story) -> None:
    story.told("wake", key="acme.s", entries=["e9"])


def vars_of(stored: Stored) -> dict[str, Any]:
    return {name: getattr(stored, name) for name in Stored.__dataclass_fields__}


@pytest.mark.parametrize(("rule", "tell"), WRONG, ids=[tell.__name__.strip("_") for _, tell in WRONG])
def test_each_violation_is_found(rule: str, tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    assert rule in story.found(), check(story.history)


def test_every_rule_is_shown() -> None:
    assert {rule for rule, _ in WRONG} == set(RULES)


# ---------------------------------------------------------------- a bucket that was replaced


def test_of_a_replaced_bucket_only_what_is_promised_then_is_asked() -> None:
    story = Story()
    story.executed()
    story.told("call", "w1:2", "unknown", error="BucketReplaced")
    story.history.receipts.clear()
    story.history.replaced = True
    assert check(story.history) == []
    story.deed("entered", "w2:1", revision=1)
    assert story.found() == {"opaque twice"}


@pytest.mark.parametrize("phase", ["refused", "broke"])
def test_an_effect_that_ended_without_landing_may_be_entered_again_in_a_replaced_bucket(phase: str) -> None:
    story = Story()
    story.history.replaced = True
    story.deed("entered", "w1:1", revision=1)
    story.deed(phase, "w1:1", revision=1)
    story.deed("entered", "w1:2", revision=4)
    assert check(story.history) == []


# ---------------------------------------------------------------- reading what was written down


def test_a_line_that_was_cut_off_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="cut off"):
        deeds_of('{"at": 1.0, "op": "w1')


def test_an_operation_that_ends_twice_is_not_passed_over() -> None:
    begun = '{"id": "w1:1", "worker": "w1", "do": "read", "key": "k", "began": 1.0, "asked": {}}\n'
    ended = '{"id": "w1:1", "ended": 2.0, "outcome": "ok", "error": "", "said": {}}\n'
    (read,) = operations_of([begun + ended])
    assert (read.outcome, read.ended) == ("ok", 2.0)
    with pytest.raises(ValueError, match="ended twice"):
        operations_of([begun + ended + ended])
