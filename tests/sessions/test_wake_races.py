"""Wakers beside each other and beside workers: one close for a call, and no "never started" for an effect that ran."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import json
import pickle
import random
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from session_support import subject_of
from support import Effect, bucket_of, newest, put, revisions, toolkit_of

from natsreceipts import CallWithdrawn, NotApplied, ReceiptErased, SessionBusy, SessionConflict
from natsreceipts.attempts import Attempts
from natsreceipts.testing import FaultProxy

NEVER, UNKNOWN = "interrupted_never_started", "interrupted_outcome_unknown"
ARGS = {"to": "ada"}


@pytest.fixture
async def far(proxy, namespace, toolkit):
    """A toolkit behind the proxy."""
    async with toolkit_of(proxy.url, namespace) as connected:
        yield connected


def apart(work):
    """A task in which no entry is ambient."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def receipt_write(desk, args, status):
    """Writes of this call's receipt with this status."""

    def matches(message):
        subject = f"$KV.{bucket_of(desk.namespace)}.{desk.key('send', args).kv_key}"
        return message.subject == subject and json.loads(message.payload)["status"] == status

    return matches


def appends(namespace, session="chat"):
    return subject_of(namespace, session)


async def fences_only_rise(desk, args):
    before = {}
    for record in await revisions(desk.nc, desk.namespace, desk.key("send", args)):
        fences = record.get("fences") or {}
        assert before.keys() <= fences.keys(), (before, fences)
        assert all(fences[session] >= place for session, place in before.items()), (before, fences)
        before = fences
    return before


async def answers(desk):
    """The ids that entries with a close or the word of a receipt are about, and how often."""
    found = collections.Counter()
    for entry in await desk.entries():
        if entry.get("receipt") or entry.get("close"):
            found[(entry.get("receipt") or {}).get("toolCallId") or entry["close"]["toolCallId"]] += 1
    return found


# ---------------------------------------------------------------- two wakers


STATES = [None, ("completed", {}), ("ambiguous", {}), ("running", {"leaseMs": 1}), None]


async def test_two_wakes_of_one_log(desk):
    """Two tasks share a log: each call is closed once."""
    for turn in range(5):
        mine = desk("anthropic", session=f"chat-{turn}")
        calls = {f"t{n}": {"turn": turn, "n": n} for n in range(len(STATES))}
        await mine.asks(*((call_id, "send", args) for call_id, args in calls.items()))
        for state, args in zip(STATES, calls.values(), strict=True):
            if state is not None:
                await mine.stands("send", args, state[0], **state[1])
        reports = await asyncio.gather(*(mine.wakes("send") for _ in range(3)), mine.hears("in between"))
        told = [each.tool_call_id for report in reports[:3] for each in report.recovered]
        assert sorted(told) == sorted(calls)
        assert await answers(mine) == dict.fromkeys(calls, 1)
        await mine.context()


@pytest.mark.parametrize("dialect", ["anthropic", "openai-chat"])
async def test_two_wakers_close_every_call_once(desk, other, dialect):
    for turn in range(10):
        mine = desk(dialect, session=f"chat-{turn}")
        calls = {f"t{n}": {"turn": turn, "n": n} for n in range(len(STATES))}
        await mine.hears()
        await mine.asks(*((call_id, "send", args) for call_id, args in calls.items()))
        for state, args in zip(STATES, calls.values(), strict=True):
            if state is not None:
                await mine.stands("send", args, state[0], **state[1])
        wakers = [mine.at(mine.toolkit), mine.at(other), mine.at(other)]
        reports = await asyncio.gather(*(waker.wakes("send") for waker in wakers))
        told = [(each.tool_call_id, each.entry_id) for report in reports for each in report.recovered]
        assert collections.Counter(call_id for call_id, _ in told) == dict.fromkeys(calls, 1)
        assert await answers(mine) == dict.fromkeys(calls, 1)
        ids = {entry["id"] for entry in await mine.entries()}
        assert {entry_id for _, entry_id in told} <= ids
        # What one has told, the others read.
        found = [await waker.context() for waker in wakers]
        assert found[0] == found[1] == found[2]
        last = {report.last_seq for report in reports}
        assert max(last) == (await mine.entries())[-1]["seq"]
        for args in calls.values():
            await fences_only_rise(mine, args)
        async with mine.quiet():
            for waker in wakers:
                assert (await waker.wakes("send")).recovered == ()


async def test_wakers_of_two_sessions_with_the_same_call(desk, other):
    """Both fence the same receipt: neither loses the other's fence."""
    for turn in range(10):
        one, two = desk(session=f"a-{turn}"), desk(session=f"b-{turn}").at(other)
        args = {"turn": turn}
        first = await one.asks(("t1", "send", args))
        second = await two.asks(("t1", "send", args))
        (a,), (b,) = (report.recovered for report in await asyncio.gather(one.wakes("send"), two.wakes("send")))
        assert (a.error_kind, b.error_kind) == (NEVER, NEVER)
        fences = await fences_only_rise(one, args)
        assert fences.keys() == {one.session, two.session}
        for run, entry in ((one.run, first), (two.run, second)):
            with pytest.raises(CallWithdrawn):
                await run.execute("send", args, Effect(), entry=entry)


# ---------------------------------------------------------------- a waker and a live worker, in a known order
# Each waits two seconds for an answer that does not come, so they wait together, each in a session of its own.


async def a_claim_that_comes_after_the_fence(near, far, proxy, args):
    """The worker's claim is under way when the model is told "never started": it is refused, and so is every other."""
    worker, waker = far, near
    entry = await worker.asks(("t1", "send", args))
    effect = Effect()
    claim = proxy.delay(receipt_write(near, args, "running"))
    working = asyncio.create_task(worker.run.execute("send", args, effect))
    await claim.hit()
    (recovered,) = (await waker.wakes("send")).recovered
    assert recovered.error_kind == NEVER
    assert b"10071" in (await claim.release()).payload
    with pytest.raises(CallWithdrawn):
        await working
    with pytest.raises(CallWithdrawn):
        await worker.run.execute("send", args, effect, entry=entry)
    assert effect.entered == 0


async def a_fence_that_comes_after_the_claim(near, far, proxy, args):
    """The waker found nothing, and meanwhile the worker has claimed: it is busy, and nobody is told anything."""
    worker, waker = near, far
    await worker.asks(("t1", "send", args))
    fence = proxy.delay(receipt_write(near, args, "withdrawn"))
    waking = asyncio.create_task(waker.wakes("send"))
    await fence.hit()
    effect = Effect("ran", hold=True)
    working = asyncio.create_task(worker.run.execute("send", args, effect))
    await effect.started.wait()
    assert b"10071" in (await fence.release()).payload
    with pytest.raises(SessionBusy):
        await waking
    assert await answers(waker) == {}
    effect.go.set()
    assert await working == "ran"
    (recovered,) = (await waker.wakes("send")).recovered
    assert recovered.text == "ran"


async def a_ghost_of_a_fence_does_no_harm(near, far, proxy, args):
    """It lands after its waker was cancelled; the worker that goes on is refused, wakes, and the new call runs."""
    worker, waker = near, far
    await worker.asks(("t1", "send", args))
    fence = proxy.delay(receipt_write(near, args, "withdrawn"))
    waking = asyncio.create_task(waker.wakes("send"))
    await fence.hit()
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waking
    assert b'"seq"' in (await fence.release()).payload
    effect = Effect("ran")
    with pytest.raises(CallWithdrawn):
        await worker.run.execute("send", args, effect)
    (recovered,) = (await worker.wakes("send")).recovered
    assert recovered.error_kind == NEVER
    await worker.asks(("t2", "send", args))
    assert await worker.run.execute("send", args, effect) == "ran"
    assert effect.entered == 1


async def a_result_that_comes_before_the_close(near, far, proxy, args):
    """The worker appends its result while the close is under way: the waker is refused, looks again, and is done."""
    worker, waker = near, far
    await worker.asks(("t1", "send", args))
    await worker.stands("send", args, "ambiguous")
    close = proxy.delay(appends(near.namespace, near.session))
    waking = asyncio.create_task(waker.wakes("send"))
    await close.hit()
    await worker.gets("t1", "after all")
    assert b"10071" in (await close.release()).payload
    assert (await waking).recovered == ()
    assert await waker.context() == [("t1", "after all")]
    assert await answers(waker) == {}


async def the_log_moves_between_the_fence_and_the_close(near, far, proxy, args):
    """The fence is raised to what the waker has read when it tells."""
    host, waker = near, far
    await host.asks(("t1", "send", args))
    close = proxy.delay(appends(near.namespace, near.session))
    waking = asyncio.create_task(waker.wakes("send"))
    await close.hit()
    low = await host.fence("send", args)
    later = await host.asks(("t1", "send", args))  # the same id and arguments, behind the fence
    await close.release()
    (recovered,) = (await waking).recovered
    assert recovered.error_kind == NEVER
    assert await host.fence("send", args) >= later.seq > low
    with pytest.raises(CallWithdrawn):
        await host.run.execute("send", args, Effect(), entry=later)
    await fences_only_rise(host, args)


async def a_busy_waker_has_told_nobody(near, far, proxy, args):
    """One call is fenced, another is claimed meanwhile: no close is appended, and the next wake says it right."""
    worker, waker = near, far
    args = [args | {"n": n} for n in range(2)]
    await worker.asks(("t0", "send", args[0]), ("t1", "send", args[1]))
    fence = proxy.delay(receipt_write(worker, args[1], "withdrawn"))
    waking = asyncio.create_task(waker.wakes("send"))
    await fence.hit()
    effect = Effect("ran", hold=True)
    working = asyncio.create_task(worker.run.execute("send", args[1], effect))
    await effect.started.wait()
    await fence.release()
    with pytest.raises(SessionBusy):
        await waking
    assert await answers(worker) == {}
    # The worker that is at it is told to wake first, before a call of which nobody was told anything yet.
    with contextlib.suppress(CallWithdrawn):
        await worker.run.execute("send", args[0], Effect("ran too"))
    effect.go.set()
    assert await working == "ran"
    recovered = (await waker.wakes("send")).recovered
    assert recovered[1].text == "ran"
    assert (recovered[0].error_kind == NEVER) == ((await worker.receipt("send", args[0]))["status"] == "withdrawn")


ORDERS = [
    a_busy_waker_has_told_nobody,
    a_claim_that_comes_after_the_fence,
    a_fence_that_comes_after_the_claim,
    a_ghost_of_a_fence_does_no_harm,
    a_result_that_comes_before_the_close,
    the_log_moves_between_the_fence_and_the_close,
]


async def test_a_waker_and_a_worker_in_a_known_order(desk, server, namespace):
    async def played(order):
        near = desk("anthropic", session=order.__name__)
        port = urlsplit(server.url).port
        async with FaultProxy("127.0.0.1", port) as proxy, toolkit_of(proxy.url, namespace) as toolkit:
            await order(near, near.at(toolkit), proxy, {"order": order.__name__})

    async with asyncio.TaskGroup() as group:
        for order in ORDERS:
            group.create_task(played(order))


FAULTS = ["drop_answer", "cut_after_store", "drop", "duplicate"]


@asynccontextmanager
async def behind_a_fault(desk, server, fault, match, **which):
    """The same session with a worker of its own, one of whose writes is lost."""
    async with (
        FaultProxy("127.0.0.1", urlsplit(server.url).port) as proxy,
        toolkit_of(proxy.url, desk.namespace) as toolkit,
    ):
        getattr(proxy, fault)(match, **which)
        yield desk.at(toolkit)


async def test_writes_of_a_wake_whose_answers_are_lost(desk, server, namespace):
    """Each of its fences and closes is there once. All at once: most of them wait two seconds for an answer."""

    async def fence(fault):
        host = desk(session=f"fence-{fault}")
        args = {"fault": fault}
        await host.asks(("t1", "send", args))
        async with behind_a_fault(host, server, fault, receipt_write(host, args, "withdrawn")) as waker:
            (recovered,) = (await waker.wakes("send")).recovered
        assert recovered.error_kind == NEVER
        assert recovered.revision == (await newest(host.nc, namespace, host.key("send", args))).seq
        assert await answers(host) == {"t1": 1}
        assert await host.fence("send", args) is not None

    async def close(dialect, fault, nth):
        host = desk(dialect, session=f"{dialect}-{fault}-{nth}")
        calls = [(f"t{n}", "send", {"fault": fault, "nth": nth, "n": n}) for n in range(2)]
        await host.asks(*calls)
        async with behind_a_fault(host, server, fault, appends(namespace, host.session), nth=nth) as waker:
            recovered = (await waker.wakes("send")).recovered
        assert [each.tool_call_id for each in recovered] == ["t0", "t1"]
        assert await answers(host) == {"t0": 1, "t1": 1}
        assert [each.entry_id for each in recovered] == [entry["id"] for entry in (await host.entries())[-2:]]
        await host.context()

    async with asyncio.TaskGroup() as group:
        for fault in FAULTS:
            group.create_task(fence(fault))
            for nth in (1, 2):
                for dialect in ("neutral", "openai-responses"):
                    group.create_task(close(dialect, fault, nth))


async def test_a_worker_that_appends_its_result_after_the_close(desk, other):
    """Its log has not read the close: it is told, and what it appends then counts."""
    worker, waker = desk("openai-chat"), desk("openai-chat").at(other)
    await worker.asks(("t1", "send", ARGS))
    await worker.stands("send", ARGS, "ambiguous")
    (recovered,) = (await waker.wakes("send")).recovered
    with pytest.raises(SessionConflict) as caught:
        await worker.gets("t1", "after all")
    assert [entry.id for entry in caught.value.missed] == [recovered.entry_id]
    await worker.gets("t1", "after all")
    assert await worker.context() == [("t1", "after all")]
    assert await waker.context() == [("t1", "after all")]


async def test_a_receipt_that_moves_while_it_is_judged(desk, nc, namespace, other):
    """Between the two looks the holder comes back: nobody is told that it is unknown."""
    host, waker = desk(), desk().at(other)
    await host.asks(("t1", "send", ARGS))
    # A lease that is over, of which a third and the margin are 2.2 s: the judge waits that long for a sign of life.
    revision = await host.stands("send", ARGS, "running", leaseMs=6000)
    record = await host.receipt("send", ARGS)
    waking = asyncio.create_task(_patiently(waker))
    renewed = await put(nc, namespace, host.key("send", ARGS), record | {"write": "1" * 24}, last=revision)
    settled = record | {"write": "2" * 24, "status": "completed", "result": {"json": "landed"}}
    await put(nc, namespace, host.key("send", ARGS), settled, last=renewed)
    (recovered,) = (await waking).recovered
    assert recovered.text == "landed"


@pytest.mark.parametrize(
    ("value", "headers", "said"), [(b"", {"KV-Operation": "DEL"}, "erased"), (b"x", None, "unreadable")]
)
async def test_a_receipt_that_is_taken_away_while_it_is_judged(desk, nc, namespace, monkeypatch, value, headers, said):
    """Between the two looks: what stands there then counts, and it is no error of the wake."""
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "running", leaseMs=600)
    await asyncio.sleep(1.0)  # its lease is over, so that it is judged at once, by two looks that are 0.2 s apart
    condemn = Attempts.condemn

    async def condemned(self, attempt, blocked):
        await put(nc, namespace, attempt.kv_key, value, headers=headers)
        return await condemn(self, attempt, blocked)

    monkeypatch.setattr(Attempts, "condemn", condemned)
    (recovered,) = (await _patiently(desk)).recovered
    assert (recovered.error_kind, recovered.said) == (UNKNOWN, said)


async def _patiently(desk, *, most=10.0, **options):
    """Wake as a worker's loop does: come back when it is busy."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await desk.wakes("send", **options)
            except SessionBusy as busy:
                await asyncio.sleep(min(busy.retry_after, most))


async def test_a_worker_that_settles_between_the_two_looks(desk, far, other, proxy):
    """Frozen beyond its lease, as it seems to the judge, it comes back before the second look."""
    host, waker = desk().at(far), desk().at(other)
    await host.asks(("t1", "send", ARGS))
    effect = Effect("landed", hold=True)
    working = asyncio.create_task(host.run.execute("send", ARGS, effect, lease=1.5))
    await effect.started.wait()
    await proxy.stall()
    waking = asyncio.create_task(_patiently(waker, most=0.3))
    await asyncio.sleep(1.7)  # the lease and its margin are over, and the second look is half a second away
    effect.go.set()
    await proxy.resume()
    assert await working == "landed"
    (recovered,) = (await waking).recovered
    # Either it came in time, or it was judged first and the log says so; in both cases the model reads the truth.
    assert recovered.said in ("completed", "ambiguous")
    assert await waker.context() == [("t1", "landed")]


# ---------------------------------------------------------------- a waker and a live worker, in any order


async def _works(desk, entry, calls, effects, order):
    """A worker goes through the calls of its turn, and stops where it is told that the session moved on."""
    for call_id, args in calls.items():
        await asyncio.sleep(order.random() * 0.004)

        async def effect(call_id=call_id):
            effects[call_id] += 1
            await asyncio.sleep(order.random() * 0.004)
            return f"by the worker: {call_id}"

        result = await desk.run.execute("send", args, effect, entry=entry)
        with contextlib.suppress(SessionConflict):
            await desk.gets(call_id, result)


@pytest.mark.parametrize("seed", range(20))
async def test_a_worker_and_wakers_in_any_order(desk, other, seed):
    order = random.Random(seed)
    worker = desk("anthropic")
    calls = {f"t{n}": {"n": n} for n in range(4)}
    await worker.hears()
    entry = await worker.asks(*((call_id, "send", args) for call_id, args in calls.items()))
    effects = collections.Counter()
    at_first = worker.at(other)

    async def wakes():
        waker = worker.at(other)
        await asyncio.sleep(order.random() * 0.02)
        return (await _patiently(waker, most=0.01)).recovered

    working = asyncio.create_task(_works(worker, entry, calls, effects, order))
    told = [each for report in await asyncio.gather(wakes(), wakes()) for each in report]
    with contextlib.suppress(CallWithdrawn):
        await working
    told += (await at_first.wakes("send")).recovered
    assert all(count == 1 for count in effects.values())
    never = {each.tool_call_id for each in told if each.error_kind == NEVER}
    assert not never & effects.keys(), "told that it never started, and its effect ran"
    found = dict(await at_first.context())
    assert found.keys() == calls.keys()
    for call_id in calls:
        assert (call_id in effects) == (found[call_id] == f"by the worker: {call_id}"), (call_id, found)
    # The turn goes on: what never started is asked for anew, and runs.
    if never:
        renewed = await at_first.asks(*((f"u{call_id}", "send", calls[call_id]) for call_id in sorted(never)))
        for call_id in never:
            assert await at_first.run.execute("send", calls[call_id], Effect("new"), entry=renewed) == "new"


# ---------------------------------------------------------------- the worker that stalled


class Stalled:
    """A worker that has its entry, and comes back after the session was woken without it."""

    def __init__(self, desk, entry):
        self.desk = desk
        self.entry = entry
        self.effect = Effect("by the stalled worker")

    async def comes_back(self, args=ARGS, **options):
        return await self.desk.run.execute("send", args, self.effect, entry=self.entry, **options)


async def test_a_stalled_worker_after_never_started(desk, other):
    host = desk("anthropic")
    stalled = Stalled(desk("anthropic").at(other), await host.asks(("t1", "send", ARGS)))
    (recovered,) = (await host.wakes("send")).recovered
    assert recovered.error_kind == NEVER
    with pytest.raises(CallWithdrawn):
        await stalled.comes_back()
    await host.asks(("t2", "send", ARGS))
    with pytest.raises(CallWithdrawn):
        await stalled.comes_back()
    assert await host.run.execute("send", ARGS, Effect("new")) == "new"
    assert await stalled.comes_back() == "new"  # completed: whoever asks is told
    assert stalled.effect.entered == 0


async def test_a_stalled_worker_while_the_new_call_runs(desk, other):
    host = desk()
    stalled = Stalled(desk().at(other), await host.asks(("t1", "send", ARGS)))
    await host.wakes("send")
    await host.asks(("t2", "send", ARGS))
    effect = Effect("new", hold=True)
    working = asyncio.create_task(host.run.execute("send", ARGS, effect))
    await effect.started.wait()
    with pytest.raises(CallWithdrawn):
        await stalled.comes_back(wait=0)
    effect.go.set()
    assert await working == "new"


@pytest.mark.parametrize("told", ["never started", "an error"])
@pytest.mark.parametrize("between", ["nothing", "refused", "died", "two turns"])
@pytest.mark.parametrize("ids", ["fresh ids", "reused ids"])
async def test_a_stalled_worker_is_refused_whatever_ran_in_between(desk, other, told, between, ids):
    """A call of equal arguments failed, or was cut off, since then; ids may have been used again."""
    host = desk("openai-chat")

    def name(turn):
        return "call_0" if ids == "reused ids" else f"t{turn}"

    entry = await host.asks((name(1), "send", ARGS))
    if told == "an error":
        with pytest.raises(NotApplied):
            await host.run.execute("send", ARGS, Effect(NotApplied("refused")))
    log_of_the_stalled = desk("openai-chat").at(other)
    await log_of_the_stalled.log.load()
    stalled = Stalled(log_of_the_stalled, entry)
    (recovered,) = (await host.wakes("send")).recovered
    assert recovered.error_kind == (NEVER if told == "never started" else None)
    turn = 1
    for _ in range({"nothing": 0, "refused": 1, "died": 1, "two turns": 2}[between]):
        turn += 1
        await host.hears(f"turn {turn}")
        await host.asks((name(turn), "send", ARGS))
        with pytest.raises(NotApplied):
            await host.run.execute("send", ARGS, Effect(NotApplied("refused")))
        if between == "died":
            key = host.key("send", ARGS)
            last = (await newest(host.nc, host.namespace, key)).seq
            record = await host.receipt("send", ARGS)
            record |= {"status": "running", "leaseMs": 1, "attempts": record["attempts"] + 1}
            record.pop("error")
            await put(host.nc, host.namespace, key, record, last=last)
        await host.wakes("send")
    with pytest.raises(CallWithdrawn):
        await stalled.comes_back()
    with pytest.raises(CallWithdrawn):
        # By what its own log says, which has not read on.
        await stalled.desk.run.execute("send", ARGS, stalled.effect, entry=await stalled.desk.log.entry_of(name(1)))
    assert stalled.effect.entered == 0
    turn += 1
    await host.asks((name(turn), "send", ARGS))
    if between == "died":
        receipt = await host.toolkit.receipts.get(host.key("send", ARGS))
        await host.toolkit.receipts.resolve(
            receipt.key, revision=receipt.revision, not_applied=True, by="ada", reason="looked"
        )
    assert await host.run.execute("send", ARGS, Effect("new")) == "new"
    await fences_only_rise(host, ARGS)
    await host.gets(name(turn), "new")
    found = await host.context()
    assert found[-1] == (found[-1][0], "new")


async def test_a_stalled_worker_that_names_no_entry(desk, other):
    host = desk()
    await host.asks(("t1", "send", ARGS))
    await host.wakes("send")
    effect = Effect()
    with pytest.raises(CallWithdrawn):
        await apart(host.at(other).run.execute("send", ARGS, effect))
    assert effect.entered == 0


@pytest.mark.parametrize("name", ["x" * 300, "a.b c", "ä"])
async def test_a_stalled_worker_of_a_session_whose_name_is_no_token(desk, other, name):
    host = desk(session=name)
    entry = await host.asks(("t1", "send", ARGS))
    (recovered,) = (await host.wakes("send")).recovered
    assert recovered.error_kind == NEVER
    entry = pickle.loads(pickle.dumps(entry))  # handed to it with its job
    with pytest.raises(CallWithdrawn):
        await apart(host.at(other).run.execute("send", ARGS, Effect(), entry=entry))
    again = await host.asks(("t2", "send", ARGS))
    entry = pickle.loads(pickle.dumps(again))
    assert await apart(host.at(other).run.execute("send", ARGS, Effect("new"), entry=entry)) == "new"


async def test_a_stalled_worker_from_behind_the_branch_that_was_woken(desk, other):
    """A host goes back to an older branch and wakes that: the fence is the last place of the log, not of the branch."""
    host = desk()
    one = await host.asks(("t1", "send", ARGS))
    await host.log.branch(None)
    two = await host.asks(("t2", "send", ARGS))  # an equal call, on a branch that is left again
    await host.log.branch(one)
    (recovered,) = (await host.wakes("send")).recovered
    assert (recovered.tool_call_id, recovered.error_kind) == ("t1", NEVER)
    assert await host.fence("send", ARGS) >= two.seq
    effect = Effect()
    for entry in (one, two):
        with pytest.raises(CallWithdrawn):
            await host.at(other).run.execute("send", ARGS, effect, entry=entry)
    assert effect.entered == 0


async def test_a_stalled_worker_on_another_branch(desk, other):
    """The fence is a place in the whole log, not of the branch that was woken."""
    host = desk()
    start = await host.hears()
    one = await host.asks(("t1", "send", ARGS))
    await host.log.branch(start)
    two = await host.asks(("t2", "send", ARGS))
    await host.wakes("send")  # of the second branch
    for entry in (one, two):
        with pytest.raises(CallWithdrawn):
            await host.at(other).run.execute("send", ARGS, Effect(), entry=entry)


async def test_a_resumed_call_is_claimed_from_its_resume(desk, other):
    """A batch was on hold while another equal call was closed: the person's yes lets it run, and nobody else."""
    host = desk()
    called = await host.asks(("t1", "send", ARGS))
    await host.log.suspend(["t1"])
    await host.asks(("t2", "send", ARGS))
    (recovered,) = (await host.wakes("send")).recovered
    assert (recovered.tool_call_id, recovered.error_kind) == ("t2", NEVER)
    resumed = await host.log.resume(["t1"])
    with pytest.raises(CallWithdrawn):
        await host.run.execute("send", ARGS, Effect(), entry=called)
    assert await host.run.execute("send", ARGS, Effect("on a person's word")) == "on a person's word"
    await host.gets("t1", "on a person's word")
    assert (await host.wakes("send")).recovered == ()
    assert resumed.seq > called.seq


async def test_a_stalled_worker_after_a_person_said_that_it_did_not_land(desk, other):
    """What the model has read must stay true: either it is not told that yet, or nobody from before can run it."""
    host = desk()
    entry = await host.asks(("t1", "send", ARGS))
    await host.stands("send", ARGS, "ambiguous")
    stalled = Stalled(desk().at(other), entry)
    (recovered,) = (await host.wakes("send")).recovered
    by = {"by": "ada", "reason": "it is not in the outbox"}
    await host.toolkit.receipts.resolve(host.key("send", ARGS), revision=recovered.revision, not_applied=True, **by)
    for _ in range(2):  # the host's loop: wake, then ask the model
        await host.wakes("send")
        ((_, told),) = await host.context()
    with contextlib.suppress(CallWithdrawn):
        await stalled.comes_back()
    if "not carried out" in told:
        assert stalled.effect.entered == 0, "the model has read that it was not carried out, and then it was"
    ((_, told),) = await host.context()
    if stalled.effect.entered:
        assert "not carried out" not in told


async def test_a_receipt_that_was_deleted_by_hand_keeps_its_fences(desk, other, nc):
    host = desk()
    entry = await host.asks(("t1", "send", ARGS))
    stalled = Stalled(desk().at(other), entry)
    assert (await host.wakes("send")).recovered[0].error_kind == NEVER
    key = host.key("send", ARGS)
    bucket = await nc.jetstream().key_value(bucket_of(host.namespace))
    await bucket.delete(key.kv_key)
    with pytest.raises(ReceiptErased) as erased:
        await host.toolkit.receipts.get(key)
    await host.toolkit.receipts.resolve(
        key, revision=erased.value.revision, not_applied=True, by="ada", reason="looked"
    )
    with pytest.raises(CallWithdrawn):
        await stalled.comes_back()
    assert stalled.effect.entered == 0


async def test_the_models_new_call_after_a_person_said_that_it_did_not_land(desk):
    host = desk()
    await host.asks(("t1", "send", ARGS))
    await host.stands("send", ARGS, "ambiguous")
    (recovered,) = (await host.wakes("send")).recovered
    await host.toolkit.receipts.resolve(
        host.key("send", ARGS), revision=recovered.revision, not_applied=True, by="ada", reason="looked"
    )
    await host.wakes("send")
    await host.asks(("t2", "send", ARGS))
    assert await host.run.execute("send", ARGS, Effect("new")) == "new"
    await host.gets("t2", "new")
    found = dict(await host.context())
    assert found["t2"] == "new"
    assert found["t1"] != "new"


async def test_a_stalled_worker_that_used_another_session_of_the_run(desk, other):
    """Its first call is an agent with a session of its own, in the same run; then it stalls, and is woken without."""
    outer, inner = desk(session="outer"), desk(session="inner")
    await outer.asks(("t1", "ask_agent", {}), ("t2", "send", ARGS))
    await inner.asks(("u1", "look", {}))
    await inner.run.execute("look", {}, Effect("seen"))
    await inner.gets("u1", "seen")
    told = {each.tool_call_id: each.error_kind for each in (await outer.at(other).wakes("ask_agent", "send")).recovered}
    assert told["t2"] == NEVER
    effect = Effect()
    with pytest.raises(CallWithdrawn):
        await outer.run.execute("send", ARGS, effect)
    assert effect.entered == 0
