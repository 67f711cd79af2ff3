"""Notices that calls give rise to: an operator hears of what needs a person, an agent of what a person settled."""

from __future__ import annotations

import asyncio
import logging

import pytest
from notice_scenes import keys_of, last_sequence, subjects
from scenes import ambiguous_call, stand
from support import Effect, Message, toolkit_of, writes_to

from natsreceipts import (
    AmbiguousCall,
    BucketReplaced,
    CallInFlight,
    CallWithdrawn,
    CorruptRecord,
    InvalidName,
    LeaseLost,
    NotRecorded,
    PayloadMissing,
    ReceiptErased,
    ReceiptKey,
    RunNoticeFact,
    UnsupportedRecord,
)

ARGS = {"to": "a@b.c"}
KEY = ReceiptKey("acme", "run-1", "send", "0" * 64)
BY = {"by": "ann", "reason": "looked at the outbox"}


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


async def turn(toolkit, run, number=1, *, operator="ops", **options):
    """A delivery in which the call is made and found ambiguous; the error and what became of the message."""
    message = Message(number)
    with pytest.raises(AmbiguousCall) as caught:
        async with toolkit.delivery(message, operator=operator, **options):
            await run.execute("send", ARGS, Effect("wrong"))
    return caught.value, message.calls


# The operator


async def test_an_operator_hears_once_of_an_ambiguous_call(toolkit, run, key, nc, namespace):
    revision = await ambiguous_call(run, ARGS)
    for number in (1, 2, 3):
        error, calls = await turn(toolkit, run, number)
        assert error.revision == revision
        assert [verb for verb, _ in calls] == ["nak"]
    (notice,) = await run.notices.list(addressee="ops")
    assert notice.spec.fact == RunNoticeFact(
        "ambiguous-call",
        "needs-a-person",
        {"attempt": 1, "revision": revision, "args-hash": key.args_hash, "tool": "send"},
    )
    assert (notice.spec.step, notice.spec.run, notice.consumed) == (key.kv_key, "run-1", None)
    assert len(await keys_of(nc, namespace)) == 1
    # What it says is enough to settle the call.
    await toolkit.receipts.resolve(
        notice.spec.step, revision=notice.spec.fact.detail["revision"], not_applied=True, **BY
    )
    # The next attempt is another ambiguity.
    await ambiguous_call(run, ARGS)
    await turn(toolkit, run)
    attempts = [n.spec.fact.detail["attempt"] for n in await run.notices.list(addressee="ops")]
    assert attempts == [1, 2]


async def test_several_workers_find_it_at_once(server, namespace, toolkit, run, nc):
    await ambiguous_call(run, ARGS)
    async with toolkit_of(server.url, namespace) as other:
        turns = [turn(at, at.run("acme", "run-1")) for at in (toolkit, other) for _ in range(8)]
        await asyncio.gather(*turns)
    assert len(await keys_of(nc, namespace)) == 1


async def test_without_an_operator_nothing_is_filed(toolkit, run, nc, namespace):
    await ambiguous_call(run, ARGS)
    await turn(toolkit, run, operator=None)
    message = Message()
    with pytest.raises(CallInFlight):
        async with toolkit.delivery(message, operator="ops"):
            raise CallInFlight(KEY, retry_after=1.0)
    async with toolkit.delivery(message, operator="ops"):
        await run.execute("send", [2], Effect())
    assert await keys_of(nc, namespace) == {}


async def test_it_is_filed_before_the_message_is_given_up(toolkit, run):
    await ambiguous_call(run, ARGS)
    _, calls = await turn(toolkit, run, terminate=True)
    assert calls == ["term"]
    assert len(await run.notices.list(addressee="ops")) == 1


@pytest.mark.parametrize("tool", ["x" * 129, "a\nb", "\u2028"], ids=ascii)
async def test_a_tool_that_does_not_fit_the_bound_is_left_out(toolkit, run, tool):
    key = ReceiptKey("acme", "run-1", tool, "0" * 64)
    with pytest.raises(AmbiguousCall):
        async with toolkit.delivery(Message(), operator="ops"):
            raise AmbiguousCall(key, revision=7, attempts=2)
    (notice,) = await run.notices.list(addressee="ops")
    assert notice.spec.fact.detail == {"attempt": 2, "revision": 7, "args-hash": "0" * 64}
    assert notice.spec.step == key.kv_key


OTHERS = [
    (NotRecorded(KEY, "why"), "call-not-recorded", {}),
    (PayloadMissing(KEY, store="s", name="n"), "payload-missing", {}),
    (ReceiptErased(KEY, bucket="b", revision=3), "receipt-erased", {"revision": 3}),
    (CorruptRecord("b", KEY, 3, "why"), "receipt-corrupt", {"revision": 3}),
    (CorruptRecord("b", KEY.kv_key, 3, "why"), "receipt-corrupt", {"revision": 3}),
    (UnsupportedRecord("b", KEY, 3, 2), "receipt-unsupported", {"revision": 3}),
]


@pytest.mark.parametrize(("error", "decision", "detail"), OTHERS, ids=lambda value: type(value).__name__)
async def test_what_else_needs_a_person(toolkit, run, error, decision, detail):
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            async with toolkit.delivery(Message(), operator="ops"):
                raise error
        assert caught.value is error
    notices = await run.notices.list(addressee="ops")
    assert len(notices) == (2 if isinstance(error, NotRecorded) else 1)
    fact = RunNoticeFact(decision, "needs-a-person", {**detail, "args-hash": KEY.args_hash, "tool": "send"})
    assert {notice.spec.fact for notice in notices} == {fact}


async def test_an_outcome_that_is_kept_is_told_of_once(proxy, toolkit, namespace, monkeypatch):
    """As often as it is tried again to record it: it is one execution. The next one is another."""
    monkeypatch.setattr("natsreceipts.guard._SETTLE_PATIENCE", 0.5)
    monkeypatch.setattr("natsreceipts.entering.CLAIM_PATIENCE", 0.5)
    monkeypatch.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 0.5)
    lost = []

    async def effect():
        lost.append(proxy.drop(writes_to(namespace), count=None))
        return len(lost)

    async with toolkit_of(proxy.url, namespace) as far:
        run = far.run("acme", "run-1")
        for executions, args in enumerate((ARGS, [2]), 1):
            for number in (1, 2, 3):
                message = Message(number)
                with pytest.raises(NotRecorded) as caught:
                    async with far.delivery(message, operator="ops", progress=600):
                        await run.execute("send", args, effect)
                assert (caught.value.attempts, caught.value.kept) == (1, True)
                assert [verb for verb, _ in message.calls] == ["nak"]
            assert len(lost) == executions
            lost[-1].cancel()
            assert await run.execute("send", args, effect) == executions
    notices = await toolkit.run("acme", "run-1").notices.list(addressee="ops")
    assert [notice.spec.fact.decision for notice in notices] == ["call-not-recorded"] * 2
    assert {notice.spec.fact.detail["attempt"] for notice in notices} == {1}


# Errors in groups


def needy(tool, attempts=1):
    return AmbiguousCall(ReceiptKey("acme", "run-1", tool, "0" * 64), revision=7, attempts=attempts)


GROUPS = [
    ([needy("a"), needy("b")], ["a", "b"], ("nak", 30.0)),
    ([needy("a"), RuntimeError(), CallInFlight(KEY, retry_after=5.0)], ["a"], ("nak", 30.0)),
    ([ExceptionGroup("", [RuntimeError(), ExceptionGroup("", [needy("b")])]), needy("a")], ["a", "b"], ("nak", 30.0)),
    ([asyncio.CancelledError(), needy("a")], ["a"], ("nak", 30.0)),
    ([CallWithdrawn(KEY), LeaseLost(KEY, "why")], [], ("nak", 30.0)),
    ([CallInFlight(KEY, retry_after=9.0), LeaseLost(KEY, "why"), RuntimeError()], [], ("nak", 9.0)),
    ([CallInFlight(KEY, retry_after=90.0), needy("a")], ["a"], ("nak", 90.0)),
    ([RuntimeError(), RuntimeError()], [], ("nak", 1.0)),
    ([asyncio.CancelledError()], [], ("nak", None)),
]


@pytest.mark.parametrize(("errors", "tools", "call"), GROUPS)
async def test_errors_in_a_group(toolkit, run, errors, tools, call):
    """A notice of each that needs a person, and the delay of the gravest."""
    for terminate in (False, True):
        message = Message()
        group = BaseExceptionGroup("calls made side by side", errors)
        with pytest.raises(BaseExceptionGroup) as caught:
            async with toolkit.delivery(message, operator="ops", terminate=terminate):
                raise group
        assert caught.value is group
        assert message.calls == (["term"] if terminate and tools else [call])
    notices = await run.notices.list(addressee="ops")
    assert sorted(notice.spec.fact.detail["tool"] for notice in notices) == tools


async def test_calls_made_side_by_side(toolkit, run):
    await ambiguous_call(run, ARGS)
    message = Message()
    with pytest.raises(ExceptionGroup):
        async with toolkit.delivery(message, operator="ops"), asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(run.execute("send", ARGS, Effect("wrong")))
    assert message.calls == [("nak", 30.0)]
    assert len(await run.notices.list(addressee="ops")) == 1


@pytest.mark.parametrize("operator", ["", "a\nb", "\ud800", 7, "x" * 1025])
async def test_an_operator_without_a_name_is_refused_when_the_delivery_is_opened(toolkit, operator):
    message = Message()
    with pytest.raises(InvalidName, match="operator"):
        toolkit.delivery(message, operator=operator)
    assert message.calls == []


async def test_a_run_without_room_is_refused_before_anything_is_executed(toolkit):
    before = toolkit.run("acme", "order 42")
    effect = Effect()
    with pytest.raises(InvalidName, match="run"):
        async with toolkit.delivery(Message(), operator="ops"):
            toolkit.run("acme", "order 42")
    with pytest.raises(InvalidName, match="run"):
        async with toolkit.delivery(Message(), operator="ops"), before:
            await before.execute("send", ARGS, effect)
    assert effect.entered == 0
    with pytest.raises(InvalidName, match="run"):
        async with toolkit.delivery(Message(), operator="ops"):
            await before.execute("send", ARGS, effect)
    with pytest.raises(InvalidName, match="run"):
        async with toolkit.delivery(Message(), operator="ops"), before.call("send", ARGS):
            await effect()
    assert effect.entered == 0
    async with toolkit.delivery(Message()), toolkit.run("acme", "order 42") as run:
        await run.execute("send", ARGS, effect)
    assert effect.entered == 1


def said_of(caplog, *words):
    return [r for r in caplog.records if all(word in r.getMessage() for word in words)]


async def test_a_notice_that_cannot_be_filed_hides_nothing(proxy, server, namespace, run, caplog, monkeypatch):
    monkeypatch.setattr("natsreceipts.notice_store._WRITE_PATIENCE", 0.3)
    await ambiguous_call(run, ARGS)
    async with toolkit_of(proxy.url, namespace) as far:
        proxy.drop(subjects(namespace), count=None)
        with caplog.at_level(logging.WARNING, logger="natsreceipts"):
            _, calls = await turn(far, far.run("acme", "run-1"))
    assert [verb for verb, _ in calls] == ["nak"]
    (record,) = said_of(caplog, "ambiguous-call", "ops", "send")
    assert record.levelno == logging.WARNING


async def test_a_notice_that_nobody_can_be_told_of_is_logged(toolkit, caplog):
    """No call in the error, hashed names, or a call of a run without room (made by a task from before)."""
    errors = [
        BucketReplaced("b", "why"),
        CorruptRecord("b", ReceiptKey("acme", "x" * 200, "send", "0" * 64).kv_key, 1, "why"),
        AmbiguousCall(ReceiptKey("acme", "order 42", "send", "0" * 64), revision=1, attempts=1),
    ]
    for error in errors:
        caplog.clear()
        message = Message()
        with pytest.raises(type(error)) as caught:
            async with toolkit.delivery(message, operator="ops"):
                raise error
        assert caught.value is error
        assert message.calls[0][0] == "nak"
        assert len(said_of(caplog, "no notice", "ops")) == 1


async def test_a_cancellation_while_it_is_filed(proxy, server, namespace, run, nc):
    """The notice is seen through, and the message given back."""
    await ambiguous_call(run, ARGS)
    async with toolkit_of(proxy.url, namespace) as far:
        held = proxy.delay(subjects(namespace))
        message = Message()

        async def work():
            async with far.delivery(message, operator="ops"):
                await far.run("acme", "run-1").execute("send", ARGS, Effect("wrong"))

        task = asyncio.create_task(work())
        await held.hit()
        task.cancel()
        await asyncio.sleep(0)
        await held.release()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [call[0] for call in message.calls] == ["nak"]
    assert len(await keys_of(nc, namespace)) == 1


# The agent whose call it was


@pytest.mark.parametrize("outcome", [{"completed": "m-1"}, {"not_applied": True}])
async def test_an_agent_hears_that_its_call_was_settled(toolkit, run, key, outcome):
    revision = await ambiguous_call(run, ARGS)
    receipt = await toolkit.receipts.resolve(key, revision=revision, notify="local.planner-1", **outcome, **BY)
    (notice,) = await run.notices.pending(addressee="local.planner-1")
    assert notice.spec.fact == RunNoticeFact(
        "call-resolved",
        "completed" if "completed" in outcome else "not-applied",
        {"attempt": 1, "revision": receipt.revision, "by": "ann", "args-hash": key.args_hash, "tool": "send"},
    )
    assert notice.spec.step == key.kv_key


async def test_a_resolver_that_does_not_fit_the_bound_is_left_out(toolkit, run, key):
    revision = await ambiguous_call(run, ARGS)
    await toolkit.receipts.resolve(key, revision=revision, completed=1, notify="a", by="x" * 200, reason="seen")
    (notice,) = await run.notices.list(addressee="a")
    assert "by" not in notice.spec.fact.detail


async def test_an_erased_call_is_settled_by_its_kv_key(toolkit, run, key, nc, namespace):
    await run.execute("send", ARGS, Effect())
    await (await nc.jetstream().key_value(f"{namespace}-receipts")).delete(key.kv_key)
    await toolkit.receipts.resolve(key.kv_key, revision=3, completed=1, notify="a", **BY)
    (notice,) = await run.notices.list(addressee="a")
    assert notice.spec.fact.outcome == "completed"


async def test_who_cannot_be_notified_is_refused_before_anything_is_written(toolkit, run, key, nc, namespace):
    revision = await ambiguous_call(run, ARGS)
    for notify in ("", "a\nb", 7):
        with pytest.raises(InvalidName, match="notify"):
            await toolkit.receipts.resolve(key, revision=revision, completed=1, notify=notify, **BY)
    other = toolkit.run("acme", "order 42").key("send", ARGS)
    at = await stand(nc, namespace, other, "ambiguous")
    with pytest.raises(InvalidName, match="run"):
        await toolkit.receipts.resolve(other, revision=at, completed=1, notify="a", **BY)
    for one in (key, other):
        assert (await toolkit.receipts.get(one)).status == "ambiguous"
    assert await last_sequence(nc, namespace) == 0
    await toolkit.receipts.resolve(other, revision=at, completed=1, **BY)  # without a notice it can be settled


async def test_a_settled_call_stays_settled_when_its_notice_cannot_be_filed(
    proxy, server, namespace, run, key, caplog, monkeypatch
):
    monkeypatch.setattr("natsreceipts.notice_store._WRITE_PATIENCE", 0.3)
    revision = await ambiguous_call(run, ARGS)
    async with toolkit_of(proxy.url, namespace) as far:
        proxy.drop(subjects(namespace), count=None)
        receipt = await far.receipts.resolve(key, revision=revision, completed="m-1", notify="planner", **BY)
    assert (receipt.status, receipt.result) == ("completed", "m-1")
    assert len(said_of(caplog, "call-resolved", "planner")) == 1
