"""Many callers of one key, over several connections: one executes, the others follow."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

import nats.js.errors
import pytest
from scenes import stand
from support import LEASE, Effect, put, record_of, revisions, toolkit_of

from natsreceipts import CallInFlight, NotApplied
from natsreceipts._jetstream.bucket import _SubjectHint

CALLERS = 32
CONNECTIONS = 4
ROUNDS = 10


@pytest.fixture
async def runs(server, namespace, bucket):
    """One run over four connections."""
    async with AsyncExitStack() as stack:
        toolkits = [
            await stack.enter_async_context(toolkit_of(server.url, namespace, worker=f"w{n}"))
            for n in range(CONNECTIONS)
        ]
        yield [toolkit.run("acme", "run-1") for toolkit in toolkits]


def _callers(runs, args, effect, **options):
    """Each with a body of its own: the calls of one process would share an execution otherwise."""

    async def one(n):
        run = runs[n % CONNECTIONS]
        async with run.call("send", args, **options) as call:
            if not call.replayed:
                await effect()
                call.result = f"by caller {n}"
        return call.result

    return [asyncio.create_task(one(n)) for n in range(CALLERS)]


async def test_one_of_many_executes_and_the_others_replay(runs, nc, namespace):
    for turn in range(ROUNDS):
        effect = Effect()
        results = await asyncio.gather(*_callers(runs, {"turn": turn}, effect, wait=30))
        assert effect.entered == 1
        assert len(set(results)) == 1
        records = await revisions(nc, namespace, runs[0].key("send", {"turn": turn}))
        assert [record["status"] for record in records] == ["running", "completed"]


async def test_who_does_not_wait_is_told_so(runs):
    for turn in range(ROUNDS):
        effect = Effect(hold=True)
        tasks = _callers(runs, {"turn": turn}, effect, wait=0)
        await effect.started.wait()
        done, pending = set(), set(tasks)
        while len(pending) > 1:
            finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            done |= finished
        for task in done:
            error = task.exception()
            assert isinstance(error, CallInFlight)
            assert 0 < error.retry_after <= LEASE + 2.0  # and the margin
            assert error.key == runs[0].key("send", {"turn": turn})
        effect.go.set()
        (winner,) = pending
        result = await winner
        assert effect.entered == 1
        again = await asyncio.gather(*_callers(runs, {"turn": turn}, effect, wait=0))
        assert set(again) == {result}


async def test_executions_of_many_connections(runs):
    for turn in range(ROUNDS):
        effect = Effect(turn)
        calls = [runs[n % CONNECTIONS].execute("send", {"turn": turn}, effect) for n in range(CALLERS)]
        assert await asyncio.gather(*calls) == [turn] * CALLERS
        assert effect.entered == 1


async def test_many_retry_what_was_not_applied(runs, nc, namespace):
    """The first three attempts are refused outside; whoever comes next takes over, one at a time."""
    inside = 0
    entered = 0

    async def body():
        nonlocal inside, entered
        inside += 1
        entered += 1
        assert inside == 1
        try:
            await asyncio.sleep(0)
            if entered <= 3:
                raise NotApplied("refused")
        finally:
            inside -= 1
        return entered

    async def persistent(run):
        while True:
            try:
                async with run.call("send", {}) as call:
                    if not call.replayed:
                        call.result = await body()
                return call.result
            except NotApplied:
                continue

    results = await asyncio.gather(*(persistent(runs[n % CONNECTIONS]) for n in range(16)))
    assert results == [4] * 16
    assert entered == 4
    records = await revisions(nc, namespace, runs[0].key("send", {}))
    assert [record["attempts"] for record in records] == [1, 1, 2, 2, 3, 3, 4, 4]


async def test_a_waiter_hears_of_the_end_at_once(runs):
    """It does not sleep through to its next look, which is a third of the lease away (10 s)."""
    effect = Effect(hold=True)
    first = asyncio.create_task(runs[0].execute("send", {}, effect))
    await effect.started.wait()
    second = asyncio.create_task(runs[1].execute("send", {}, Effect("wrong")))
    await asyncio.sleep(0.1)  # so that it waits by now; if it does not yet, it replays without waiting
    loop = asyncio.get_running_loop()
    effect.go.set()
    assert await first == "done"
    settled = loop.time()
    assert await second == "done"
    assert loop.time() - settled < LEASE / 4


async def test_a_sign_that_comes_before_its_write_is_stored(runs, nc, namespace, monkeypatch):
    """A server may pass a write on to a waiter first and store it then: the waiter's look at once does not show it."""
    key = runs[0].key("send", {})
    revision = await stand(nc, namespace, key, "running", leaseMs=60_000)
    heard = asyncio.Event()
    listen = _SubjectHint.on_message

    async def only_the_first(hint, message):
        if not heard.is_set():
            heard.set()
            await listen(hint, message)

    monkeypatch.setattr(_SubjectHint, "on_message", only_the_first)
    waiting = asyncio.create_task(runs[0].execute("send", {}, Effect("wrong"), wait=60))
    while not heard.is_set():
        with contextlib.suppress(nats.js.errors.APIError):  # a write that is refused is a sign, and nothing is stored
            await put(nc, namespace, key, record_of(key), last=revision + 1)
    await stand(nc, namespace, key, "completed")
    async with asyncio.timeout(15):  # and not after a third of the lease that it waits for
        assert await waiting == "theirs"


async def test_a_wait_ends_when_it_is_over(runs):
    effect = Effect(hold=True)
    first = asyncio.create_task(runs[0].execute("send", {}, effect))
    await effect.started.wait()
    started = asyncio.get_running_loop().time()
    with pytest.raises(CallInFlight) as caught:
        await runs[1].execute("send", {}, Effect("wrong"), wait=0.3)
    assert 0.3 <= asyncio.get_running_loop().time() - started < LEASE / 4  # and not at its next look
    assert caught.value.retry_after > 0
    effect.go.set()
    assert await first == "done"
