"""Cancelled at every await: the error goes through, what stands is legal, nothing runs on, and the next call goes on.

`Steps` drives a coroutine and sees each of its suspensions. A path is run once to count them, and once for each of
them with a cancellation at that very place. The counts are asserted, so that a new await is not forgotten here.
"""

from __future__ import annotations

import asyncio
import contextlib
import types

import pytest
from scenes import check_history, stand
from support import put, record_of, revisions, stored, toolkit_of

from natsreceipts import AmbiguousCall, Landed, NotLanded


class Steps:
    """Awaits a coroutine and counts where it is suspended; at the ``at``-th suspension its task is cancelled."""

    def __init__(self, coroutine, at=None, then=None):
        self._coroutine = coroutine
        self._at = at
        self._then = then
        self.count = 0

    def __await__(self):
        sent, thrown = None, None
        while True:
            try:
                if thrown is None:
                    waited_for = self._coroutine.send(sent)
                else:
                    error, thrown = thrown, None
                    waited_for = self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self._at:
                asyncio.current_task().cancel()
            elif self._then is not None:
                self._then(self.count)
            try:
                sent = yield waited_for
            except BaseException as error:  # handed on to the coroutine, as a task does
                thrown = error


async def drive(steps):
    return await steps


@types.coroutine
def one_turn():
    """Exactly one suspension."""
    yield


class Body:
    """An effect with one await between its beginning and its end."""

    def __init__(self, result="mine"):
        self.entered = self.finished = 0
        self.result = result

    async def __call__(self, call=None):
        self.entered += 1
        await one_turn()
        self.finished += 1
        return self.result


class Path:
    """One way through the library: what is there before, and the coroutine that is cancelled."""

    count = None
    """How often a path is suspended; None where that depends on how messages come."""

    effect = "opaque"

    def __init__(self, toolkit, nc, namespace, args):
        self.toolkit = toolkit
        self.nc = nc
        self.namespace = namespace
        self.args = args
        self.run = toolkit.run("acme", "run-1", effect=self.effect)
        self.key = self.run.key("send", args)
        self.body = Body()
        self.inside = False  # whether the body of the call was entered, with or without its effect

    async def before(self):
        """Make what the path needs."""

    async def go(self):
        async with self.run.call("send", self.args) as call:
            if not call.replayed:
                self.inside = True
                call.result = await self.body(call)
        return call.result

    async def after(self):
        """Clear away what `before` left running."""


class Fresh(Path):
    count = 3  # claim, body, settle


class FreshIdempotent(Fresh):
    effect = "idempotent"


class FreshArgs(Path):
    count = 3

    async def go(self):
        async with self.run.call("send", self.args, store_args=True) as call:
            self.inside = True
            call.result = await self.body(call)
        return call.result


class Replay(Path):
    count = 2  # a claim that is refused, a read

    async def before(self):
        await stand(self.nc, self.namespace, self.key, "running", write="1" * 24)
        await stand(self.nc, self.namespace, self.key, "completed", result={"json": "mine"})


class Step(Path):
    effect = "resumable"
    count = 7  # claim; a step and its record, twice; body; settle

    async def go(self):
        async with self.run.call("send", self.args) as call:
            self.inside = True
            await call.step("a", one_turn)
            await call.step("b", one_turn)
            call.result = await self.body(call)
        return call.result


class Renew(Path):
    count = 4  # claim, renewal, body, settle

    async def go(self):
        async with self.run.call("send", self.args) as call:
            self.inside = True
            await call.renew()
            call.result = await self.body(call)
        return call.result


class Reclaim(Path):
    effect = "idempotent"
    count = 7  # a refused claim, a quick read, one from the leader, the clock, the claim, body, settle

    async def before(self):
        await stand(self.nc, self.namespace, self.key, "running", effect="idempotent", leaseMs=1)
        await asyncio.sleep(0.005)


class Retry(Path):
    count = 6  # a refused claim, a quick read, one from the leader, the claim, body, settle

    async def before(self):
        await stand(self.nc, self.namespace, self.key, "running", write="1" * 24)
        await stand(self.nc, self.namespace, self.key, "not applied")


class Large(Path):
    """The result goes to the object store first."""

    count = 6  # claim, body, two chunks, meta, settle

    def __init__(self, *args):
        super().__init__(*args)
        self.body = Body("x" * 262_000)


class Judge(Path):
    """Ambiguous in the end, by a judgement of its own."""

    async def before(self):
        await stand(self.nc, self.namespace, self.key, "running", leaseMs=30)
        await asyncio.sleep(0.04)


class Verified(Judge):
    answer = NotLanded()

    async def go(self):
        async def verify():
            await one_turn()
            return self.answer

        async with self.run.call("send", self.args, verify=verify) as call:
            if not call.replayed:
                self.inside = True
                call.result = await self.body(call)
        return call.result


class VerifiedLanded(Verified):
    answer = Landed("mine")


class Wait(Path):
    """Waits for another attempt, which completes while it does."""

    async def before(self):
        self.revision = await stand(self.nc, self.namespace, self.key, "running", leaseMs=60_000)

    def then(self, count):
        if count == 6:  # by then it waits for a sign
            record = record_of(self.key, status="completed", result={"json": "mine"}, write="6" * 24)
            self.other = asyncio.create_task(put(self.nc, self.namespace, self.key, record, last=self.revision))

    async def after(self):
        if hasattr(self, "other"):
            await self.other


class Execute(Path):
    async def go(self):
        async def body():
            self.inside = True
            return await self.body()

        return await self.run.execute("send", self.args, body)


class Entered(Path):
    """The run is entered too: one request more."""

    count = 4

    async def go(self):
        async with self.run:
            return await super().go()


class Raises(Path):
    count = 3

    async def go(self):
        async with self.run.call("send", self.args):
            self.inside = True
            await self.body()
            raise LookupError("by the body")


class Beating(Path):
    """A call whose heartbeat is under way at its end, which is waited for."""

    async def go(self):
        async with self.run.call("send", self.args) as call:
            self.inside = True
            call.start_heartbeat()
            await one_turn()
            call.result = await self.body(call)
        return call.result


class BeatingSlowly(Beating):
    effect = "resumable"


PATHS = {
    path.__name__: path
    for path in (
        *(Fresh, FreshIdempotent, FreshArgs, Replay, Step, Renew, Reclaim, Retry, Large, Judge, Verified),
        *(VerifiedLanded, Wait, Execute, Entered, Raises, Beating, BeatingSlowly),
    )
}


@pytest.fixture
async def near(server, namespace, bucket):
    async with toolkit_of(server.url, namespace) as toolkit:
        yield toolkit


async def played(path, at=None):
    """Run a path, cancelled at its ``at``-th suspension: what it came to, and how often it was suspended."""
    await path.before()
    tasks = asyncio.all_tasks()
    steps = Steps(path.go(), at, getattr(path, "then", None))
    task = asyncio.create_task(drive(steps))
    try:
        outcome = await task
    except BaseException as error:
        if asyncio.current_task().cancelling():
            raise
        outcome = error
    await path.after()
    for _ in range(5):  # callbacks of what has ended
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - tasks - {task}
    assert not left, left
    return outcome, steps.count


@pytest.mark.parametrize("name", PATHS)
async def test_every_await(near, nc, namespace, name):
    path = PATHS[name](near, nc, namespace, [name])
    _, count = await played(path)
    if path.count is not None:
        assert count == path.count, "a path has another number of awaits than before: see that each is cancelled well"
    else:  # the fewest of some times: a machine that stood still makes it look once more
        for n in range(3):
            _, again = await played(PATHS[name](near, nc, namespace, [name, "again", n]))
            count = min(count, again)
    assert count >= (1 if name == "Execute" else 2)
    cancelled = 0
    for at in range(1, count + 1):
        for n in range(3):
            path = PATHS[name](near, nc, namespace, [name, at, n])
            outcome, reached = await played(path, at)
            if path.count is not None or reached >= at:
                break
        else:
            continue  # its messages came in another way each time
        try:
            assert isinstance(outcome, asyncio.CancelledError), repr(outcome)
            cancelled += 1
            await check(path, near)
        except Exception as error:
            error.add_note(f"cancelled at await {at} of {count}")
            raise
    assert cancelled >= (count if path.count else count - 2)


async def check(path, near):
    """What stands is legal, says no more and no less than what happened, and a further call goes on from it."""
    records = await revisions(path.nc, path.namespace, path.key)
    record = records[-1] if records else None
    status = record["status"] if record else "absent"
    seeded = bool(records) and records[0]["holder"]["token"] == "another"
    mine = [r for r in records if r.get("holder", {}).get("token") != "another"]
    entered = path.body.entered
    assert entered <= 1
    check_history(records)
    opaque = path.effect == "opaque"
    if not mine:
        assert not path.inside
    elif status == "failed":
        # Either nothing happened, or the effect may be repeated.
        assert record["error"]["notApplied"] == (not path.inside and not record.get("open"))
        assert not (path.inside and opaque)
    elif status == "completed":
        assert path.body.finished == 1
    else:
        assert (status, opaque, path.inside) == ("ambiguous", True, True), status

    again = Body("again")
    run = near.run("acme", "run-1", effect=path.effect)
    call = run.execute("send", path.args, again, wait=0.3)
    if status == "completed":
        assert await call == (record["result"].get("json") or path.body.result)
    elif status == "ambiguous":
        with pytest.raises(AmbiguousCall):
            await call
    elif status == "running":  # another's
        assert seeded
        with contextlib.suppress(Exception):
            await call
        assert again.entered == (not opaque)
        return
    else:
        assert await call == "again"
    assert again.entered == (status in ("absent", "failed"))
    if opaque:
        assert path.body.entered + again.entered <= 1
    check_history(await revisions(path.nc, path.namespace, path.key))


@pytest.mark.parametrize("name", ["Fresh", "Step", "Retry", "Reclaim", "Raises", "Large"])
async def test_every_await_twice(near, nc, namespace, name):
    """Cancelled, and cancelled again while it clears up: it still does, and still lets the cancellation through."""
    path = PATHS[name](near, nc, namespace, [name])
    _, count = await played(path)
    for at in range(1, count + 1):
        path = PATHS[name](near, nc, namespace, [name, at])
        await path.before()
        loop = asyncio.get_running_loop()

        def again(_, loop=loop):
            task = asyncio.current_task()
            loop.call_soon(task.cancel)

        steps = Steps(path.go(), at)
        task = asyncio.create_task(drive(steps))

        def hook(count, at=at, again=again):
            if count > at:
                again(count)

        steps._then = hook
        await asyncio.wait([task])
        assert task.cancelled(), (at, task)
        await check(path, near)


async def test_every_await_of_an_execution_of_its_own(near, nc, namespace):
    """`execute` works in a task of its own: the caller is cancelled at every suspension of that task too."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    driven = []

    def factory(loop, coroutine, **kwargs):
        if getattr(coroutine, "__qualname__", "").endswith("Run._carried_out"):
            steps = Steps(coroutine, None, lambda count: count == at and caller.cancel())
            driven.append(steps)
            coroutine = drive(steps)
        return asyncio.Task(coroutine, loop=loop, **kwargs)

    loop.set_task_factory(factory)
    try:
        for at in range(4):
            driven.clear()
            path = Execute(near, nc, namespace, ["execute", at])
            caller = asyncio.create_task(path.go())
            await asyncio.wait([caller])
            if at == 0:
                assert caller.result() == "mine"
                assert [steps.count for steps in driven] == [3]
                continue
            assert caller.cancelled(), at
            assert len(driven) == 1
            await check(path, near)
    finally:
        loop.set_task_factory(before)


@pytest.mark.parametrize("at", [1, 3])
async def test_a_cancellation_whose_write_is_lost(proxy, namespace, bucket, nc, at):
    """The write that the cancelled await had sent never gets through, or its answer does not."""
    async with toolkit_of(proxy.url, namespace, lease=0.9) as far:
        for n, fault in enumerate(["drop", "drop_answer", "duplicate"]):
            path = Fresh(far, nc, namespace, [n])
            getattr(proxy, fault)(lambda m: m.subject.startswith("$KV."), nth=1 if at == 1 else 2)
            outcome, _ = await played(path, at)
            assert isinstance(outcome, asyncio.CancelledError)
            record = await stored(nc, namespace, path.key)
            if path.inside:
                assert record["status"] in ("completed", "ambiguous")
            else:
                assert record is None or record["status"] == "failed"
            await check(path, far)


async def test_cancelled_by_a_time_out_of_the_hosts(near, nc, namespace):
    """asyncio.timeout around a call: the host gets its own TimeoutError, wherever it strikes."""
    for at in (1, 2, 3):
        path = Fresh(near, nc, namespace, ["timeout", at])

        async def within(path=path, at=at):
            async with asyncio.timeout(None) as limit:
                loop = asyncio.get_running_loop()
                await Steps(path.go(), None, lambda count: count == at and limit.reschedule(loop.time()))

        with pytest.raises(TimeoutError):
            await within()
        await check(path, near)
