"""Steps of a resumable effect: recorded under the fence, skipped by the next attempt, and never claimed in vain."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from scenes import counted_writes, history, no_writes, stand
from support import newest, put, revisions, said, stored, toolkit_of, until

from natsreceipts import (
    InvalidName,
    InvalidSetting,
    LeaseLost,
    NatsReceiptsError,
    NotRecorded,
    PayloadMissing,
    StepRepeated,
)

ARGS = {"to": "a@b.c"}
SHORT = 0.3
"""Seconds that a lost answer is waited for."""

BEATING = 3.0
"""Seconds: a lease of which heartbeats come soon."""


class Log:
    """A step that counts how often it ran, by name."""

    def __init__(self):
        self.ran = []

    def of(self, name, output=None):
        async def step():
            self.ran.append(name)
            if isinstance(output, BaseException):
                raise output
            return output if output is not None else f"output of {name}"

        return step


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "run-1", effect="resumable")


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


async def test_a_failed_attempts_steps_are_skipped(run, key, log, nc, namespace):
    async def body(call):
        outputs = [await call.step("upload", log.of("upload")), await call.step("sync", lambda: {"n": (1, 2)})]
        if call.attempt < 3:
            raise OSError("halfway")
        return [*outputs, await call.step("publish", log.of("publish"))]

    for _ in range(2):
        with pytest.raises(OSError, match="halfway"):
            await run.execute("send", ARGS, body)
        record = await stored(nc, namespace, key)
        assert record["status"] == "failed"
        assert record["steps"] == {"upload": {"json": "output of upload"}, "sync": {"json": {"n": [1, 2]}}}
    assert await run.execute("send", ARGS, body) == ["output of upload", {"n": [1, 2]}, "output of publish"]
    assert log.ran == ["upload", "publish"]
    record = await stored(nc, namespace, key)
    assert (record["status"], record["attempts"], list(record["steps"])) == (
        "completed",
        3,
        ["upload", "sync", "publish"],
    )


async def test_a_step_costs_one_write_and_a_skipped_one_none(run, log, nc, namespace):
    async def body(call):
        await call.step("a", log.of("a"))
        await call.step("b", log.of("b"))
        if call.attempt == 1:
            raise OSError

    async with counted_writes(nc, namespace, least=4) as writes:
        with pytest.raises(OSError):
            await run.execute("send", ARGS, body)
    assert len(writes) == 4  # claim, two steps, failed
    async with counted_writes(nc, namespace, least=3) as writes:
        await run.execute("send", ARGS, body)
    assert len(writes) == 3  # a claim that is refused, the claim, completed


async def test_the_first_attempt_gets_what_a_later_one_would(run, log):
    output = {"t": (1, 2), "raw": bytearray(b"x"), "keys": {1: {2}}}
    seen = []

    async def body(call):
        seen.append(await call.step("a", log.of("a", output)))
        if call.attempt == 1:
            raise OSError
        return "done"

    with pytest.raises(OSError):
        await run.execute("send", ARGS, body)
    await run.execute("send", ARGS, body)
    assert seen[0] == seen[1] == {"t": [1, 2], "raw": b"x", "keys": {1: {2}}}
    assert log.ran == ["a"]


WORKER = """
import asyncio, sys
from natsreceipts import connect

async def main():
    async with connect(sys.argv[1], namespace=sys.argv[2], lease=2.0) as toolkit:
        run = toolkit.run("acme", "run-1", effect="resumable")
        async def body(call):
            for name in ("one", "two", "three"):
                await call.step(name, lambda: print("ran", name, flush=True) or f"{name} by the worker")
                print("after", name, flush=True)
                await asyncio.to_thread(sys.stdin.readline)
        await run.execute("send", {"to": "a@b.c"}, body)

asyncio.run(main())
"""


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_worker_that_is_killed_between_steps(server, namespace, bucket, run, log, nc, key, steps):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, server.url, namespace),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        async with asyncio.timeout(60):
            for name in ("one", "two")[:steps]:
                assert await process.stdout.readline() == f"ran {name}\n".encode()
                assert await process.stdout.readline() == f"after {name}\n".encode()
                if name != ("one", "two")[steps - 1]:
                    process.stdin.write(b"\n")
    finally:
        process.kill()
        await process.communicate()

    async def body(call):
        assert call.attempt == 2
        return [await call.step(name, log.of(name)) for name in ("one", "two", "three")]

    by_the_worker = [f"{name} by the worker" for name in ("one", "two")[:steps]]
    assert await run.execute("send", ARGS, body) == by_the_worker + [f"output of {n}" for n in log.ran]
    assert log.ran == ["one", "two", "three"][steps:]
    assert (await stored(nc, namespace, key))["open"] is True  # the worker's attempt may have gone further


async def test_the_same_name_twice(run, key, log, nc, namespace):
    async def body(call):
        await call.step("a", log.of("a"))
        before = await revisions(nc, namespace, key)
        for _ in range(2):
            with pytest.raises(StepRepeated) as caught:
                await call.step("a", log.of("again"))
            assert (caught.value.step, caught.value.key) == ("a", key)
        assert await revisions(nc, namespace, key) == before
        return "done"

    assert await run.execute("send", ARGS, body) == "done"
    assert log.ran == ["a"]


async def test_the_same_name_twice_on_a_reclaim(run, log):
    async def body(call):
        await call.step("a", log.of("a"))
        if call.attempt == 1:
            raise OSError
        with pytest.raises(StepRepeated):
            await call.step("a", log.of("again"))

    with pytest.raises(OSError):
        await run.execute("send", ARGS, body)
    await run.execute("send", ARGS, body)
    assert log.ran == ["a"]


async def test_the_same_name_twice_at_once(run, log):
    async def body(call):
        go = asyncio.Event()

        async def held():
            await go.wait()
            return 1

        first = asyncio.create_task(call.step("a", held))
        await asyncio.sleep(0)
        with pytest.raises(StepRepeated):
            await call.step("a", log.of("again"))
        go.set()
        return await first

    assert await run.execute("send", ARGS, body) == 1
    assert log.ran == []


async def test_a_step_that_raises(run, key, log, nc, namespace):
    class Refused(Exception):
        pass

    error = Refused("no")

    async def body(call):
        await call.step("a", log.of("a"))
        try:
            await call.step("b", log.of("b", error if call.attempt == 1 else None))
        except Refused:
            assert list((await stored(nc, namespace, key))["steps"]) == ["a"]
            raise
        return "done"

    with pytest.raises(Refused) as caught:
        await run.execute("send", ARGS, body)
    assert caught.value is error
    assert await run.execute("send", ARGS, body) == "done"
    assert log.ran == ["a", "b", "b"]


@pytest.mark.parametrize("output", [object(), {1: object()}, asyncio.Event()], ids=["object", "deep", "event"])
async def test_an_output_that_cannot_be_recorded(run, key, log, nc, namespace, output):
    """The step ran: its output is handed out, nothing is recorded, and a later attempt repeats it."""

    async def body(call):
        await call.step("a", log.of("a"))
        await call.step("b", log.of("b", output if call.attempt == 1 else "fine"))
        return "done"

    with pytest.raises(NotRecorded) as caught:
        await run.execute("send", ARGS, body)
    assert (caught.value.has_result, caught.value.result) == (True, output)
    record = await stored(nc, namespace, key)
    assert (record["status"], list(record["steps"])) == ("failed", ["a"])
    assert await run.execute("send", ARGS, body) == "done"
    assert log.ran == ["a", "b", "b"]


@pytest.mark.parametrize("name", ["", None, 7, "a\nb", "\x00", "\ud800", b"a"])
async def test_names_that_cannot_be_used(run, log, nc, namespace, key, name):
    async def body(call):
        with pytest.raises(InvalidName):
            await call.step(name, log.of("a"))
        return "done"

    assert await run.execute("send", ARGS, body) == "done"
    assert log.ran == []


@pytest.mark.parametrize("name", ["é", "a b", "$.x", '"', "x" * 1000, "result", "toolName"])
async def test_odd_names(run, toolkit, log, key, name):
    async def body(call):
        await call.step(name, log.of(name))
        if call.attempt == 1:
            raise OSError
        return "done"

    with pytest.raises(OSError):
        await run.execute("send", ARGS, body)
    await run.execute("send", ARGS, body)
    assert log.ran == [name]
    assert (await toolkit.receipts.get(key)).steps == (name,)


async def test_large_outputs(run, key, log, nc, namespace, toolkit):
    big = "x" * 1_500_000

    async def body(call):
        outputs = [await call.step(name, log.of(name, name + big)) for name in "ab"]
        assert [output[0] for output in outputs] == ["a", "b"]
        if call.attempt == 1:
            raise OSError
        return [len(output) for output in outputs]

    with pytest.raises(OSError):
        await run.execute("send", ARGS, body)
    assert await run.execute("send", ARGS, body) == [1_500_001] * 2
    assert log.ran == ["a", "b"]
    record = await stored(nc, namespace, key)
    assert all(payload.keys() == {"object"} for payload in record["steps"].values())
    assert len((await newest(nc, namespace, key)).data) < 3000


async def test_a_large_output_that_is_gone(run, key, log, nc, namespace):
    """It is not known what the step gave: it is not repeated behind the body's back."""

    async def body(call):
        await call.step("a", log.of("a", "x" * 400_000))
        raise OSError

    with pytest.raises(OSError):
        await run.execute("send", ARGS, body)
    await nc.jetstream().purge_stream(f"OBJ_{namespace}-receipt-payloads")
    with pytest.raises(PayloadMissing):
        await run.execute("send", ARGS, body)
    assert log.ran == ["a"]


async def test_steps_at_once(run, key, log, nc, namespace):
    """In a task group: every one is on record, whatever order they end in."""
    names = [f"step {n}" for n in range(12)]

    async def body(call):
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(call.step(name, log.of(name)))
        if call.attempt == 1:
            raise OSError
        return "done"

    with pytest.raises(OSError):
        await run.execute("send", ARGS, body)
    assert set((await stored(nc, namespace, key))["steps"]) == set(names)
    assert await run.execute("send", ARGS, body) == "done"
    assert sorted(log.ran) == sorted(names)


async def test_one_of_several_steps_at_once_fails(run, key, log, nc, namespace):
    started = asyncio.Event()

    async def body(call):
        async def slow():
            started.set()
            await asyncio.sleep(0 if call.attempt > 1 else 60)
            return "slow"

        async with asyncio.TaskGroup() as group:
            group.create_task(call.step("slow", slow))
            await call.step("fine", log.of("fine"))
            await started.wait()
            if call.attempt == 1:
                await call.step("bad", log.of("bad", OSError()))
        return "done"

    with pytest.raises(ExceptionGroup):
        await run.execute("send", ARGS, body)
    assert list((await stored(nc, namespace, key))["steps"]) == ["fine"]
    assert await run.execute("send", ARGS, body) == "done"
    assert log.ran == ["fine", "bad"]


# A call that is lost


@pytest.mark.parametrize("by", ["a new attempt", "a resolver's failed", "completed"])
async def test_a_step_after_the_call_was_lost(run, key, log, nc, namespace, by):
    caught = []

    async def body(call):
        await call.step("a", log.of("a"))
        others = {
            "a new attempt": {"attempts": 2, "status": "running", "leaseMs": 60_000},
            "a resolver's failed": {
                "status": "failed",
                "resolved": {"by": "ann", "reason": "r"},
                "error": {"type": "NotApplied", "message": "r", "notApplied": True},
            },
            "completed": {"status": "completed", "attempts": 2, "result": {"json": "theirs"}},
        }[by]
        await stand(nc, namespace, key, others.pop("status"), effect="resumable", **others)
        for name in ("b", "c"):
            try:
                await call.step(name, log.of(name))
            except LeaseLost as lost:
                caught.append((name, lost.has_result))
        assert call.lost
        return "too late"

    with pytest.raises(LeaseLost):
        await run.execute("send", ARGS, body)
    # The step that finds out has run; no further one does.
    assert log.ran == ["a", "b"]
    assert caught == [("b", False), ("c", False)]  # the body has returned nothing yet
    assert (await stored(nc, namespace, key))["write"] == "0" * 24


async def test_a_resolvers_completed_is_replayed_over_a_step(run, key, log, nc, namespace, caplog):
    """As over a heartbeat or a settle: a holder that finds it under its own token replays it, with a warning."""

    async def body(call):
        record = await stored(nc, namespace, key)
        record |= {"status": "completed", "write": "8" * 24, "result": {"json": "theirs"}}
        record["resolved"] = {"by": "ann", "reason": "saw it"}
        await put(nc, namespace, key, record)
        await call.step("a", log.of("a"))
        return "mine"

    assert await run.execute("send", ARGS, body) == "theirs"
    assert "that result stands" in caplog.text


async def test_a_step_of_a_call_that_was_judged_takes_it_back(run, key, log, nc, namespace):
    async def body(call):
        record = await stored(nc, namespace, key)
        await put(nc, namespace, key, record | {"status": "ambiguous", "write": "8" * 24})
        return await call.step("a", log.of("a"))

    assert await run.execute("send", ARGS, body) == "output of a"
    assert await history(nc, namespace, key) == ["running", "ambiguous", "running", "completed"]


async def test_fences_that_land_between_steps_are_kept(run, key, log, nc, namespace):
    async def body(call):
        for n, name in enumerate("abc"):
            record = await stored(nc, namespace, key)
            await put(nc, namespace, key, record | {"fences": {"s": n + 1}, "write": f"{n}" * 24})
            await call.step(name, log.of(name))
        return "done"

    assert await run.execute("send", ARGS, body) == "done"
    record = await stored(nc, namespace, key)
    assert (record["fences"], list(record["steps"])) == ({"s": 3}, ["a", "b", "c"])


# Lost answers


@pytest.fixture
async def far(proxy, namespace, bucket, monkeypatch):
    monkeypatch.setattr("natsreceipts.fence._SHORTEST_TRY", SHORT)
    async with toolkit_of(proxy.url, namespace) as toolkit:
        yield toolkit.run("acme", "run-1", effect="resumable")


def step_writes(message):
    return message.subject.startswith("$KV.") and said(message)["status"] == "running" and "steps" in said(message)


@pytest.mark.parametrize("fault", ["drop_answer", "cut_after_store", "drop", "duplicate"])
async def test_a_steps_lost_answer(far, proxy, key, log, nc, namespace, fault):
    lost = getattr(proxy, fault)(step_writes)

    async def body(call):
        for name in "ab":
            assert await call.step(name, log.of(name)) == f"output of {name}"
            assert name in (await stored(nc, namespace, key))["steps"]
        if call.attempt == 1:
            raise OSError
        return "done"

    with pytest.raises(OSError):
        await far.execute("send", ARGS, body)
    assert len(lost.hits) == 1
    assert await far.execute("send", ARGS, body) == "done"
    assert log.ran == ["a", "b"]
    assert not any(record["attempts"] == 1 and record.get("open") for record in await revisions(nc, namespace, key))


async def test_a_step_that_cannot_be_written(far, proxy, key, log, nc, namespace):
    """Nobody answers for a whole lease: the output is handed out and not claimed to be on record."""
    proxy.drop(step_writes, count=None)

    async def body(call):
        await call.step("a", log.of("a"))

    with pytest.raises((NotRecorded, LeaseLost)) as caught:
        await far.execute("send", ARGS, body, lease=0.9)
    assert caught.value.__cause__ is not None
    assert "steps" not in await stored(nc, namespace, key)


async def test_a_heartbeat_that_lands_in_between(far, proxy, key, log, nc, namespace):
    """Heartbeat and step go through one lock; what the heartbeat rebased on keeps the steps."""

    async def body(call):
        await call.step("a", log.of("a"))
        beats = len(await revisions(nc, namespace, key))
        held = proxy.delay(lambda m: m.subject.startswith("$KV."))  # the next write: a heartbeat
        step = asyncio.create_task(call.step("b", log.of("b")))
        await held.hit()
        await held.release()
        assert await step == "output of b"
        await until(lambda: more(beats + 2))
        await call.step("c", log.of("c"))
        return "done"

    async def more(n):
        return len(await revisions(nc, namespace, key)) >= n

    assert await far.execute("send", ARGS, body, lease=BEATING) == "done"
    assert list((await stored(nc, namespace, key))["steps"]) == ["a", "b", "c"]
    assert log.ran == ["a", "b", "c"]


async def test_heartbeats_during_a_long_step(far, key, log, nc, namespace):
    """The lease is renewed while a step runs: nobody else is let in."""

    async def slow():
        before = len(await revisions(nc, namespace, key))

        async def two_more():
            return len(await revisions(nc, namespace, key)) >= before + 2

        await until(two_more)
        return "slow"

    async def body(call):
        await call.step("a", log.of("a"))
        return await call.step("slow", slow)

    assert await far.execute("send", ARGS, body, lease=BEATING) == "slow"
    record = await stored(nc, namespace, key)
    assert (list(record["steps"]), record["attempts"]) == (["a", "slow"], 1)


async def test_a_ghost_of_a_renewal_that_lands_under_a_step(far, proxy, key, log, nc, namespace):
    """The step's write is lost, and what is read back under its own token is an older write, without the step."""

    async def body(call):
        ghost = proxy.delay(lambda m: m.subject.startswith("$KV."))
        renewal = asyncio.create_task(call.renew())
        await ghost.hit()
        renewal.cancel()
        lost = proxy.drop(step_writes)
        step = asyncio.create_task(call.step("a", log.of("a")))
        await lost.hit()
        assert b'"seq"' in (await ghost.release()).payload
        assert await step == "output of a"
        assert "a" in (await stored(nc, namespace, key))["steps"]
        if call.attempt == 1:
            raise OSError
        return "done"

    with pytest.raises(OSError):
        await far.execute("send", ARGS, body)
    assert list((await stored(nc, namespace, key))["steps"]) == ["a"]
    assert log.ran == ["a"]


# Where steps do not belong


@pytest.mark.parametrize("effect", ["opaque", "idempotent", "read"])
async def test_steps_are_for_resumable_effects(run, log, effect):
    async def body(call):
        with pytest.raises(InvalidSetting, match="resumable"):
            await call.step("a", log.of("a"))
        return "done"

    assert await run.execute("send", ARGS, body, effect=effect) == "done"
    assert log.ran == []


async def test_a_step_outside_of_a_body(run, log, nc, namespace):
    call = run.call("send", ARGS)
    async with no_writes(nc, namespace):
        with pytest.raises(InvalidSetting):
            await call.step("a", log.of("a"))
    async with call:
        call.result = 1
    with pytest.raises(InvalidSetting):
        await call.step("a", log.of("a"))
    async with run.call("send", ARGS) as again:
        with pytest.raises(InvalidSetting):
            await again.step("a", log.of("a"))
    assert log.ran == []


async def test_steps_over_a_resolve(run, key, toolkit, log, nc, namespace):
    """A person says that it did not land: the next attempt skips what is on record."""
    revision = await stand(
        nc, namespace, key, "ambiguous", effect="resumable", steps={"a": {"json": "theirs"}}, attempts=4
    )
    await toolkit.receipts.resolve(key, revision=revision, not_applied=True, by="ann", reason="looked")

    async def body(call):
        assert call.attempt == 5
        return [await call.step(name, log.of(name)) for name in "ab"]

    assert await run.execute("send", ARGS, body) == ["theirs", "output of b"]
    assert log.ran == ["b"]


async def test_a_cancelled_step_is_repeated(run, key, log, nc, namespace):
    started = asyncio.Event()

    async def hangs():
        started.set()
        await asyncio.sleep(60)

    async def body(call):
        await call.step("a", log.of("a"))
        await call.step("b", hangs if call.attempt == 1 else log.of("b"))
        return "done"

    task = asyncio.create_task(run.execute("send", ARGS, body))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    record = await stored(nc, namespace, key)
    assert (record["status"], list(record["steps"])) == ("failed", ["a"])
    assert await run.execute("send", ARGS, body) == "done"
    assert log.ran == ["a", "b"]


async def test_a_step_cancelled_while_it_is_written(far, proxy, key, log, nc, namespace):
    """It ran and its write is in flight: the next attempt either skips it or repeats it, and both are on record."""
    held = proxy.delay(step_writes)

    async def body(call):
        await call.step("a", log.of("a"))
        return "done"

    task = asyncio.create_task(far.execute("send", ARGS, body))
    await held.hit()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answer = await held.release()
    assert b"10071" in answer.payload  # the attempt's end went before it
    assert (await stored(nc, namespace, key))["status"] == "failed"
    assert await far.execute("send", ARGS, body) == "done"
    assert log.ran == ["a", "a"]


async def test_a_step_that_steps(run, log):
    async def body(call):
        async def outer():
            return [await call.step("inner", log.of("inner")), "outer"]

        return await call.step("outer", outer)

    async with asyncio.timeout(60):
        assert await run.execute("send", ARGS, body) == ["output of inner", "outer"]


# Steps and renewals that outlive their call


@pytest.mark.parametrize("ends", ["completed", "failed"])
async def test_a_step_that_ends_after_its_call(run, key, log, nc, namespace, ends):
    """It was started in the body and not waited for: how the call ended stands, completed is final."""
    go, left = asyncio.Event(), []

    async def slow():
        await go.wait()
        return "slow"

    async def body(call):
        left.append(asyncio.create_task(call.step("slow", slow)))
        await asyncio.sleep(0)
        if ends == "failed":
            raise OSError
        return "done"

    if ends == "failed":
        with pytest.raises(OSError):
            await run.execute("send", ARGS, body)
    else:
        assert await run.execute("send", ARGS, body) == "done"
    before = await history(nc, namespace, key)
    assert before[-1] == ends
    go.set()
    await asyncio.wait(left)
    assert await history(nc, namespace, key) == before
    assert isinstance(left[0].exception(), NatsReceiptsError)
    if ends == "completed":
        assert await run.execute("send", ARGS, body) == "done"


@pytest.mark.parametrize("what", ["renew", "step"])
@pytest.mark.parametrize("effect", ["resumable", "opaque"])
async def test_a_renewal_that_waits_behind_the_end_of_its_call(far, proxy, key, nc, namespace, what, effect):
    """Begun in the body, and due when the settle has been written."""
    if what == "step" and effect == "opaque":
        effect = "resumable"
    left = []
    held = proxy.delay(lambda m: m.subject.startswith("$KV.") and said(m)["status"] == "completed")

    async def body(call):
        async def later():
            await held.hit()  # the settle is on its way
            if what == "renew":
                await call.renew()
            else:
                await call.step("late", lambda: 1)

        left.append(asyncio.create_task(later()))
        return "done"

    task = asyncio.create_task(far.execute("send", ARGS, body, effect=effect))
    await held.hit()
    await asyncio.sleep(0.05)
    await held.release()
    assert await task == "done"
    await asyncio.wait(left)
    assert (await history(nc, namespace, key))[-1] == "completed"
    assert isinstance(left[0].exception(), NatsReceiptsError | None)


async def test_a_renewal_in_flight_at_the_end_of_its_call(far, proxy, key, nc, namespace):
    """The renewal's answer is late, and the call ends behind it: both are written, in order."""
    left = []
    held = proxy.delay(lambda m: m.subject.startswith("$KV.") and said(m)["status"] == "running", nth=2)

    async def body(call):
        left.append(asyncio.create_task(call.renew()))
        await held.hit()
        return "done"

    task = asyncio.create_task(far.execute("send", ARGS, body))
    await held.hit()
    await asyncio.sleep(0.02)
    await held.release()
    assert await task == "done"
    await asyncio.wait(left)
    assert (await history(nc, namespace, key))[-1] == "completed"
    left[0].exception()
