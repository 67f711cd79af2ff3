"""Blocking tools in threads, which nobody can cancel: what they came to is written down when they end."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest
from scenes import history, resolved_over, stand
from support import Effect, put, revisions, settled_as, stored, toolkit_of, until

from natsreceipts import AmbiguousCall, CallInFlight, CallTimedOut, LeaseLost, NotApplied, NotRecorded, tool

STATUS = {"opaque": "ambiguous", "idempotent": "failed", "resumable": "failed"}


class Blocking:
    """A blocking function that says when it starts, and goes on when told."""

    def __init__(self, outcome="in the end"):
        self.outcome = outcome
        self.entered = 0
        self.ended = threading.Event()
        self.started = threading.Event()
        self.go = threading.Event()

    def __call__(self):
        self.entered += 1
        self.started.set()
        assert self.go.wait(60)
        self.ended.set()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    async def has_started(self):
        async with asyncio.timeout(60):
            while not self.started.is_set():
                await asyncio.sleep(0.005)


@pytest.fixture
def work():
    work = Blocking()
    yield work
    work.go.set()


@pytest.fixture
def key(run):
    return run.key("work", {})


def tool_of(work, **options):
    @tool(name="work", **options)
    def blocking():
        return work()

    return blocking


async def renewed(nc, namespace, key):
    """Wait until the lease of the call has been renewed."""

    async def once():
        return len(await revisions(nc, namespace, key)) > 1

    await until(once)


@asynccontextmanager
async def cancelled_in(run, blocking, work):
    """A turn in the run, cancelled over its thread. Ends when the turn has ended."""

    async def turn():
        async with run:
            return await blocking()

    task = asyncio.create_task(turn())
    await work.has_started()
    task.cancel()
    try:
        yield task
    finally:
        work.go.set()
        await asyncio.wait([task])


async def test_a_cancelled_opaque_tool_is_ambiguous_at_once_and_completed_late(run, toolkit, work, key, nc, namespace):
    blocking = tool_of(work)
    async with cancelled_in(run, blocking, work) as task:
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not work.ended.is_set()
        assert (await toolkit.receipts.get(key)).status == "ambiguous"
        async with run:
            with pytest.raises(AmbiguousCall):
                await blocking()
        work.go.set()
        await settled_as(toolkit, key, "completed")
    async with run:
        assert await blocking() == "in the end"
    assert work.entered == 1
    kept = await revisions(nc, namespace, key)
    assert [record["status"] for record in kept] == ["running", "ambiguous", "completed"]
    assert len({record["holder"]["token"] for record in kept}) == 1
    assert "error" not in kept[-1]


@pytest.mark.parametrize("effect", ["idempotent", "resumable"])
async def test_a_cancelled_resumable_tool_waits_for_its_thread(server, run, toolkit, work, key, nc, namespace, effect):
    blocking = tool_of(work, effect=effect, lease=3)
    async with cancelled_in(run, blocking, work) as task:
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
            assert (await toolkit.receipts.get(key)).status == "running"
        await renewed(nc, namespace, key)  # as it is all the while
        async with toolkit_of(server.url, namespace) as other:
            with pytest.raises(CallInFlight):
                await other.run("acme", "run-1").execute("work", {}, Effect("wrong"), effect=effect, wait=0)
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    receipt = await toolkit.receipts.get(key)
    assert (receipt.status, receipt.result, receipt.attempts) == ("completed", "in the end", 1)
    assert work.entered == 1


@pytest.mark.parametrize("effect", STATUS)
async def test_a_thread_that_raises_late(run, toolkit, work, key, nc, namespace, effect):
    work.outcome = OSError("in the thread")
    blocking = tool_of(work, effect=effect)
    async with cancelled_in(run, blocking, work) as task:
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    receipt = await toolkit.receipts.get(key)
    assert (receipt.status, receipt.error.type) == (STATUS[effect], "OSError")
    assert not receipt.error.not_applied


@pytest.mark.parametrize("outcome", [NotApplied("refused"), ConnectionRefusedError()], ids=["NotApplied", "listed"])
@pytest.mark.parametrize("effect", STATUS)
async def test_a_thread_that_raises_not_applied_late(run, toolkit, work, key, nc, namespace, effect, outcome):
    """It did not happen after all: the next call tries again."""
    work.outcome = outcome
    blocking = tool_of(work, effect=effect, not_applied=ConnectionRefusedError)
    async with cancelled_in(run, blocking, work) as task:
        if effect == "opaque":
            await settled_as(toolkit, key, "ambiguous")
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    receipt = await toolkit.receipts.get(key)
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)
    work.outcome = "again"
    async with run:
        assert await blocking() == "again"
    assert (await toolkit.receipts.get(key)).attempts == 2


async def test_a_thread_that_returns_what_cannot_be_recorded_late(run, toolkit, work, key):
    work.outcome = object()
    async with cancelled_in(run, tool_of(work), work) as task:
        await settled_as(toolkit, key, "ambiguous")
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    receipt = await toolkit.receipts.get(key)
    assert receipt.status == "ambiguous"
    assert "cannot be recorded" in receipt.error.message


async def test_the_toolkit_waits_for_threads_at_its_end(server, namespace, bucket, nc, work):
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        key = run.key("work", {})
        async with cancelled_in(run, tool_of(work), work) as task:
            with pytest.raises(asyncio.CancelledError):
                await task
            closing = asyncio.create_task(toolkit.close())
            await asyncio.sleep(0.05)
            assert not closing.done()
            work.go.set()
            await closing
        assert (await stored(nc, namespace, key))["status"] == "completed"


async def test_a_toolkit_that_is_left_with_a_thread_inside(server, namespace, bucket, nc, work):
    """By the context's own end, and while it is cancelled too."""

    async def worker():
        async with toolkit_of(server.url, namespace) as toolkit, toolkit.run("acme", "run-1"):
            await tool_of(work)()

    task = asyncio.create_task(worker())
    await work.has_started()
    task.cancel()
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    work.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with toolkit_of(server.url, namespace) as toolkit:
        receipts = [r async for r in toolkit.receipts.list()]
    assert [(r.status, r.result) for r in receipts] == [("completed", "in the end")]


@pytest.mark.parametrize("effect", STATUS)
async def test_a_time_out_over_a_thread(run, toolkit, work, key, nc, namespace, effect):
    blocking = tool_of(work, effect=effect, timeout=0.1)

    async def turn():
        async with run:
            return await blocking()

    task = asyncio.create_task(turn())
    await work.has_started()
    if effect == "opaque":
        with pytest.raises(CallTimedOut) as caught:
            await task
        assert caught.value.status == "ambiguous"
        assert (await toolkit.receipts.get(key)).status == "ambiguous"
        work.go.set()
        await settled_as(toolkit, key, "completed")
    else:
        await asyncio.sleep(0.25)
        assert not task.done()
        assert (await toolkit.receipts.get(key)).status == "running"
        work.go.set()
        with pytest.raises(CallTimedOut) as caught:
            await task
        assert caught.value.status == "completed"
        assert (await toolkit.receipts.get(key)).status == "completed"
    async with run:
        assert await blocking() == "in the end"
    assert work.entered == 1


@pytest.mark.parametrize("effect", STATUS)
async def test_a_thread_that_hangs_beyond_its_lease_after_a_time_out(
    server, run, toolkit, work, key, nc, namespace, effect
):
    """A thread that hangs on: nobody repeats a resumable one while it runs, since its lease is renewed."""
    blocking = tool_of(work, effect=effect, timeout=0.05, lease=3)

    async def turn():
        async with run:
            return await blocking()

    task = asyncio.create_task(turn())
    await work.has_started()
    try:
        if effect == "opaque":
            await settled_as(toolkit, key, "ambiguous")
        else:
            await renewed(nc, namespace, key)  # which is due long after the time-out
            assert (await stored(nc, namespace, key))["status"] == "running"
            # Its thread runs, so nobody else may: that needs a lease that is alive.
            async with toolkit_of(server.url, namespace) as other:
                with pytest.raises(CallInFlight):
                    await other.run("acme", "run-1").execute("work", {}, Effect("by another"), effect=effect, wait=0)
    finally:
        work.go.set()
        with pytest.raises(CallTimedOut):
            await task
    await toolkit.close()
    assert (await toolkit.receipts.get(key)).status == "completed"


async def test_a_late_completion_over_a_resolvers_failed(run, toolkit, work, key, nc, namespace):
    """A person said that it did not land, and it has: as long as no new attempt was granted, its result stands."""
    blocking = tool_of(work)
    async with cancelled_in(run, blocking, work) as task:
        receipt = await settled_as(toolkit, key, "ambiguous")
        await toolkit.receipts.resolve(key, revision=receipt.revision, not_applied=True, by="ann", reason="looked")
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    assert await history(nc, namespace, key) == ["running", "ambiguous", "failed", "completed"]
    async with run:
        assert await blocking() == "in the end"
    assert work.entered == 1


async def test_a_resolvers_failed_over_a_thread_that_runs(run, toolkit, work, key, nc, namespace):
    """The heartbeat finds it, the caller hears that the call is lost; the thread's end still goes over it."""
    blocking = tool_of(work, lease=0.4)

    async def turn():
        async with run:
            return await blocking()

    task = asyncio.create_task(turn())
    await work.has_started()
    await resolved_over(toolkit, key, not_applied=True)
    with pytest.raises(LeaseLost):
        await task
    work.go.set()
    await toolkit.close()
    assert (await history(nc, namespace, key))[-2:] == ["failed", "completed"]
    async with run:
        assert await blocking() == "in the end"
    assert work.entered == 1


async def test_a_late_completion_after_a_new_attempt(run, toolkit, work, key, nc, namespace, caplog):
    blocking = tool_of(work)
    async with cancelled_in(run, blocking, work) as task:
        receipt = await settled_as(toolkit, key, "ambiguous")
        await toolkit.receipts.resolve(key, revision=receipt.revision, not_applied=True, by="ann", reason="looked")
        assert await run.execute("work", {}, Effect("second")) == "second"
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    assert (await toolkit.receipts.get(key)).result == "second"
    assert "moved on" in caplog.text


async def test_a_late_completion_after_a_resolvers_completed(run, toolkit, work, key, nc, namespace, caplog):
    blocking = tool_of(work)
    async with cancelled_in(run, blocking, work) as task:
        receipt = await settled_as(toolkit, key, "ambiguous")
        await toolkit.receipts.resolve(key, revision=receipt.revision, completed="seen", by="ann", reason="looked")
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    async with run:
        assert await blocking() == "seen"
    assert await history(nc, namespace, key) == ["running", "ambiguous", "completed"]


async def test_a_call_that_is_lost_over_its_thread(run, toolkit, work, key, nc, namespace):
    """Another attempt owns it: the thread is told nothing, and its result is not on record."""
    blocking = tool_of(work, effect="idempotent", lease=0.4)

    async def turn():
        async with run:
            return await blocking()

    task = asyncio.create_task(turn())
    await work.has_started()
    await stand(nc, namespace, key, "completed", effect="idempotent", attempts=2)
    await asyncio.sleep(0.25)  # a heartbeat has found out, and the thread is waited for
    assert not task.done()
    work.go.set()
    with pytest.raises(LeaseLost):
        await task
    async with run:
        assert await blocking() == "theirs"


async def test_an_opaque_call_that_is_lost_over_its_thread(run, toolkit, work, key, nc, namespace):
    blocking = tool_of(work, lease=0.4)

    async def turn():
        async with run:
            return await blocking()

    task = asyncio.create_task(turn())
    await work.has_started()
    await stand(nc, namespace, key, "running", attempts=2, leaseMs=60_000)
    with pytest.raises(LeaseLost):
        await task
    work.go.set()
    await toolkit.close()
    assert (await stored(nc, namespace, key))["write"] == "0" * 24


async def test_a_judged_thread_takes_its_call_back(run, toolkit, work, key, nc, namespace):
    blocking = tool_of(work)
    async with cancelled_in(run, blocking, work) as task:
        receipt = await settled_as(toolkit, key, "ambiguous")
        record = await stored(nc, namespace, key)
        await put(nc, namespace, key, record | {"write": "9" * 24, "fences": {"s": 1}}, last=receipt.revision)
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    record = await stored(nc, namespace, key)
    assert (record["status"], record["fences"]) == ("completed", {"s": 1})


async def test_a_thread_that_ends_at_the_moment_of_the_cancellation(run, toolkit, nc, namespace):
    """Cancelled around its end, a little later each time: completed, or ambiguous and then completed; never lost."""
    for n in range(25):

        @tool(name="work")
        def blocking(n=n):
            time.sleep(0.002)
            return n

        async def turn(blocking=blocking):
            async with run:
                return await blocking()

        task = asyncio.create_task(turn())
        await asyncio.sleep(n * 0.0005)
        task.cancel()
        await asyncio.wait([task])
        await toolkit.close()
        receipt = await toolkit.receipts.get(run.key("work", {"n": n}))
        if receipt is None or receipt.status == "failed":
            assert receipt is None or receipt.error.not_applied
        else:
            assert (receipt.status, receipt.result) == ("completed", n)


async def test_context_reaches_the_thread(run):
    where = ContextVar("where")
    where.set("outside")

    @tool(name="work")
    def blocking():
        return where.get()

    async with run:
        assert await blocking() == "outside"


async def test_blocking_tools_at_once(run):
    gate = threading.Barrier(4, timeout=60)

    @tool(name="work")
    def blocking(n):
        gate.wait()
        return n

    async with run:
        assert await asyncio.gather(*(blocking(n) for n in range(4))) == [0, 1, 2, 3]


async def test_a_result_that_cannot_be_recorded(run, toolkit, work, key):
    work.outcome = object()
    work.go.set()
    async with run:
        with pytest.raises(NotRecorded) as caught:
            await tool_of(work)()
    assert caught.value.result is work.outcome
    assert (await toolkit.receipts.get(key)).status == "ambiguous"


async def test_a_large_late_result(run, toolkit, work, key):
    work.outcome = "x" * 1_000_000
    blocking = tool_of(work)
    async with cancelled_in(run, blocking, work) as task:
        await settled_as(toolkit, key, "ambiguous")
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await toolkit.close()
    async with run:
        assert await blocking() == "x" * 1_000_000
