"""Many workers behind proxies that lose, hold, repeat and cut at random; the promises are checked at the end.

``NATSRECEIPTS_CHAOS_SEED`` repeats the choices of a run, which it prints (not the timing).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
import random
import secrets
from contextlib import AsyncExitStack

import pytest
from support import toolkit_of, writes_to

from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    LeaseLost,
    NotApplied,
    NotClaimed,
    NotRecorded,
)
from natsreceipts.testing import FaultProxy

# nats-py leaves sockets to the garbage collector where a connection is cut while it reconnects
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LEASE = 0.5
WORKERS = 3
TASKS = 4
FAULTS = ("drop_answer", "cut_after_store", "drop", "delay", "duplicate")


class Refused(Exception):
    pass


class World:
    """What is outside: every entry of an effect, and how it ended."""

    def __init__(self):
        self.entries = collections.defaultdict(list)
        self.told = collections.defaultdict(list)
        self.begun = 0
        self.lost = collections.Counter()
        self.outcomes = collections.Counter()

    def effect(self, key, dice):
        async def body():
            entry = [secrets.token_hex(6), "entered"]
            self.entries[key].append(entry)
            await asyncio.sleep(dice.choice((0, 0.002, 0.02, 0.3)) * dice.random())
            luck = dice.random()
            if luck < 0.1:
                entry[1] = "not applied"
                raise NotApplied("refused")
            if luck < 0.15:
                raise Refused
            entry[1] = "returned"
            return entry[0]

        return body


async def _disturb(proxy, namespace, dice, ghosts):
    """One fault after another until this is cancelled."""
    while True:
        kind = dice.choice((*FAULTS, *FAULTS, "cut", "stall", "reads"))
        if kind == "cut":
            await proxy.cut()
        elif kind == "stall":
            direction = dice.choice(("both", "to_server", "to_client"))
            await proxy.stall(direction)
            try:
                await asyncio.sleep(dice.uniform(0, LEASE))
            finally:
                await proxy.resume()
        else:
            match = "$JS.API.>" if kind == "reads" else writes_to(namespace)
            name = "drop" if kind == "reads" else kind
            rule = getattr(proxy, name)(match, nth=dice.randint(1, 3), count=dice.randint(1, 3))
            if kind == "delay":
                ghosts.append(rule)
            await asyncio.sleep(dice.uniform(0, 0.15))
            rule.cancel()
        for ghost in ghosts:
            if ghost.held and dice.random() < 0.3:
                await ghost.release()
        await asyncio.sleep(dice.uniform(0, 0.05))


async def _work(run, world, dice, stop):
    """One task of a worker: calls that others make too, until told to stop."""
    while not stop.is_set():
        if dice.random() < 0.3 or not world.begun:
            world.begun += 1
        m = dice.randrange(max(0, world.begun - 12), world.begun)
        kind = _kind(m)
        key = run.key(kind, {"n": m}).kv_key
        call = run.execute(kind, {"n": m}, world.effect(key, dice), effect=kind, wait=dice.choice((0.0, 1.0)))
        try:
            async with asyncio.timeout(dice.choice((None, None, None, 0.1)) and dice.random() * 0.1):
                world.told[key].append(await call)
            world.outcomes["result"] += 1
        except (AmbiguousCall, CallInFlight, NotClaimed, NotRecorded, NotApplied, Refused, TimeoutError) as error:
            world.outcomes[type(error).__name__] += 1
        except LeaseLost:
            world.lost[key] += 1


def _kind(m):
    return ("opaque", "idempotent", "opaque")[m % 3]


async def _chaos(server, namespace, monkeypatch, *, seconds):
    seed = int(os.environ.get("NATSRECEIPTS_CHAOS_SEED", secrets.randbits(32)))
    print(f"NATSRECEIPTS_CHAOS_SEED={seed}")
    world, stop = World(), asyncio.Event()
    async with AsyncExitStack() as stack:
        direct = await stack.enter_async_context(toolkit_of(server.url, namespace, lease=LEASE))
        work, disturbers, ghosts = [], [], []
        impatience = stack.enter_context(monkeypatch.context())
        impatience.setattr("natsreceipts.guard._SETTLE_PATIENCE", 3.0)
        impatience.setattr("natsreceipts.entering.CLAIM_PATIENCE", 2.0)
        impatience.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 2.0)
        impatience.setattr("natsreceipts.guard._HURRIED", 1.0)
        for w in range(WORKERS):
            proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", server.port))
            toolkit = await stack.enter_async_context(toolkit_of(proxy.url, namespace, lease=LEASE, worker=f"w{w}"))
            run = toolkit.run("acme", "run-1")
            for t in range(TASKS):
                dice = random.Random(f"{seed} {w} {t}")
                work.append(asyncio.create_task(_work(run, world, dice, stop)))
            dice = random.Random(f"{seed} {w} faults")
            ghosts.append([])
            disturbers.append(asyncio.create_task(_disturb(proxy, namespace, dice, ghosts[-1])))
        try:
            await asyncio.wait([*work, *disturbers], return_when=asyncio.FIRST_EXCEPTION, timeout=seconds)
            for task in disturbers:
                task.cancel()
            ended = await asyncio.gather(*disturbers, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
            stop.set()
            async with asyncio.timeout(60):  # all that is under way comes to an end
                await asyncio.gather(*work)
        finally:
            for task in [*work, *disturbers]:
                task.cancel()
            await asyncio.gather(*work, *disturbers, return_exceptions=True)
        for ghost in itertools.chain(*ghosts):  # every ghost lands in the end, if the server takes it
            while ghost.held:
                await ghost.release()
        impatience.undo()
        await _check(direct.run("acme", "run-1"), direct, world)
    print(
        world.begun,
        "calls:",
        dict(world.outcomes),
        sum(world.lost.values()),
        "lost,",
        sum(map(len, world.entries.values())),
        "effects",
    )
    assert world.outcomes["result"] > 0


async def _check(run, toolkit, world):
    dice = random.Random(1)
    for m in range(world.begun):
        kind = _kind(m)
        key = run.key(kind, {"n": m})
        assert kind == "idempotent" or not world.lost[key.kv_key]  # nobody else may run an opaque call
        for _ in range(20):
            with contextlib.suppress(AmbiguousCall, NotApplied, Refused):
                world.told[key.kv_key].append(
                    await run.execute(kind, {"n": m}, world.effect(key.kv_key, dice), effect=kind)
                )
                break
            if (await toolkit.receipts.get(key)).status == "ambiguous":
                break
        receipt = await toolkit.receipts.get(key)
        entries, told = world.entries[key.kv_key], world.told[key.kv_key]
        if kind == "opaque":
            assert receipt.status in ("completed", "ambiguous"), (receipt, entries)
            assert [end for _, end in entries[:-1]] == ["not applied"] * (len(entries) - 1), (receipt, entries)
        else:
            assert receipt.status == "completed", (receipt, entries)
        if receipt.status == "completed":
            assert receipt.result in [token for token, end in entries if end == "returned"], (receipt, entries)
            assert set(told) <= {receipt.result}, (receipt, told)
        else:
            assert not told, (receipt, told)


async def test_chaos(server, namespace, bucket, monkeypatch):
    await _chaos(server, namespace, monkeypatch, seconds=4)


@pytest.mark.faults
@pytest.mark.timeout(300)
async def test_long_chaos(server, namespace, bucket, monkeypatch):
    await _chaos(server, namespace, monkeypatch, seconds=90)
