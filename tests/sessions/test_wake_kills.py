"""Agents that are killed with -9 at any point of a turn, woken, and carried to their end.

``NATSRECEIPTS_CRASH_SEED`` repeats where a run of random kills strikes, which it prints (not the processes' timing).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import sys
from pathlib import Path

import pytest
import session_worker
from session_support import DIALECTS, Desk
from vendor_rules import RULES

from natsreceipts import SessionBusy, connect
from natsreceipts.transcript import tool_calls_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kill -9 and fork")

LEASE = 0.6
TURNS = 8
NEVER, UNKNOWN = "interrupted_never_started", "interrupted_outcome_unknown"


class Nursery:
    """Forks workers, and tells how each of them ended."""

    def __init__(self, process):
        self._process = process
        self._ids = itertools.count()
        self._ends = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls):
        here = Path(__file__).parent
        paths = [
            here,
            here.parent / "server",
            here.parent / "sessions_pure",
            *os.environ.get("PYTHONPATH", "").split(":"),
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(here / "session_worker.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": ":".join(map(str, filter(None, paths)))},
        )
        nursery = cls(process)
        try:
            yield nursery
        finally:
            process.stdin.close()
            await nursery._reader
            await process.wait()

    async def _read(self):
        while line := await self._process.stdout.readline():
            number, status = line.split()
            end = self._ends.pop(int(number))
            if not end.done():
                end.set_result(int(status))
        for end in self._ends.values():
            if not end.done():
                end.set_exception(RuntimeError("the nursery has ended: see what it said"))

    async def works(self, **options):
        """Let a worker run to its end or its death: its exit status."""
        number = next(self._ids)
        end = self._ends[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps(options | {"id": number}).encode() + b"\n")
        async with asyncio.timeout(90):
            return await end


class Lane:
    """One session, in one dialect, whose workers are killed again and again."""

    def __init__(self, nursery, desk, effects, order, options):
        self.nursery = nursery
        self.desk = desk
        self.effects = effects
        self.order = order
        self.options = options | {"session": desk.session, "dialect": desk.dialect, "effects": str(effects)}
        self.kills = self.ends = 0
        self.kinds = collections.Counter()

    async def worker(self, die_at):
        seed = self.order.randrange(2**32)
        status = await self.nursery.works(**self.options, die_at=die_at, seed=seed, turns=TURNS)
        assert status in (0, -signal.SIGKILL), "the worker failed: see what it said"
        return status

    async def killed(self, kills):
        """Kill workers at random points; in between the session is woken here, or by the next worker."""
        while self.kills < kills and not self.ends:
            status = await self.worker(self.order.randrange(1, 32))
            if status == 0:
                self.ends += 1
                break
            self.kills += 1
            desk = self.desk.at(self.desk.toolkit)
            if self.order.random() < 0.6:
                await self.wakes(desk)
            # Whether it was woken or not, what goes to a model is what its API takes.
            view = await desk.log.context()
            RULES[desk.dialect](view.messages)
            await self.check(desk)

    async def wakes(self, desk):
        while True:
            try:
                report = await desk.log.wake(guarded=session_worker.guarded())
                break
            except SessionBusy as busy:
                await asyncio.sleep(busy.retry_after)
        for each in report.recovered:
            self.kinds[each.said, each.error_kind and each.error_kind.value] += 1
        view = await desk.log.context()
        assert view.closed == ()
        async with asyncio.timeout(30):
            assert (await desk.log.wake(guarded=session_worker.guarded())).recovered == ()

    def lines(self):
        """By receipt and by place and id: the tokens of the effects that were entered."""
        by_key, by_site = collections.defaultdict(list), collections.defaultdict(list)
        if self.effects.exists():
            for line in self.effects.read_text().splitlines():
                key, place, call_id, token = line.split()
                by_key[key].append(token)
                by_site[int(place), call_id].append(token)
        return by_key, by_site

    async def check(self, desk):
        """The promises, for everything that is in the log."""
        by_key, by_site = self.lines()
        assert all(len(tokens) == 1 for tokens in by_key.values()), "an effect ran twice"
        latest, told = {}, collections.defaultdict(list)
        for entry in (await desk.log.load()).all_entries:
            for call in tool_calls_of(entry.body, dialect=desk.dialect):
                latest[call.id] = (entry.seq, call)
            receipt = entry.receipt
            if receipt is None and entry.close is None:
                continue
            call_id = receipt.tool_call_id if receipt else entry.close.tool_call_id
            place, call = latest[call_id]
            kind = entry.close.error_kind.value if entry.close is not None else None
            told[place, call_id].append(kind)
            if kind == NEVER:
                assert (place, call_id) not in by_site, "told that it never started, and its effect ran"
            if kind is None:
                key = self.desk.toolkit.run("acme", f"run-{desk.session}").key(call.name, call.arguments)
                assert by_key[key.kv_key], "told of a result, and no effect ran"
        assert all(len(kinds) == 1 for kinds in told.values()), told

    async def ends_well(self):
        """Nobody is killed any more: the turns go on to their end, and every effect is accounted for."""
        assert await self.worker(0) == 0
        desk = self.desk.at(self.desk.toolkit)
        await self.check(desk)
        view = await desk.log.context()
        RULES[desk.dialect](view.messages)
        assert view.closed == ()
        loaded = await desk.log.load()
        turn, items, ended = session_worker.state_of(loaded, desk.dialect)
        assert (turn, ended, items.keys()) == (TURNS - 1, True, {*range(session_worker.CALLS)})
        text = json.dumps(view.messages)
        run = desk.toolkit.run("acme", f"run-{desk.session}")
        by_key, _ = self.lines()
        for turn in range(TURNS):
            for n in range(session_worker.CALLS):
                key = run.key(session_worker.TOOL, {"turn": turn, "n": n})
                receipt = await desk.toolkit.receipts.get(key)
                assert receipt.status in ("completed", "ambiguous")
                if receipt.status == "completed":
                    assert by_key[key.kv_key] == [receipt.result]
                    assert receipt.result in text, "there is a result, and the model does not read it"
        return self


@pytest.fixture
async def nursery():
    async with Nursery.opened() as opened:
        yield opened


async def _kills(nursery, server, namespace, nc, tmp_path, *, kills, beside):
    seed = int(os.environ.get("NATSRECEIPTS_CRASH_SEED", secrets.randbits(32)))
    print(f"NATSRECEIPTS_CRASH_SEED={seed}")
    done = collections.Counter()
    total = 0
    async with connect(server.url, namespace=namespace, lease=LEASE) as toolkit:

        async def lane(dialect, number, kills):
            nonlocal total
            desk = Desk(toolkit, nc, namespace, dialect, f"{dialect}-{number}")
            options = {"url": server.url, "namespace": namespace, "lease": LEASE}
            order = random.Random(f"{seed} {dialect} {number}")
            lane = Lane(nursery, desk, tmp_path / f"{dialect}-{number}", order, options)
            await lane.killed(kills)
            await lane.ends_well()
            done.update(lane.kinds)
            total += lane.kills
            return lane.kills

        left = collections.Counter(dict.fromkeys(DIALECTS, kills))
        numbers = itertools.count()

        async def lanes(dialect):
            while left[dialect] > 0:
                most = min(-(-kills // beside), left[dialect])
                left[dialect] -= most
                struck = await lane(dialect, next(numbers), most)
                left[dialect] += most - struck

        async with asyncio.TaskGroup() as group:
            for dialect in [*DIALECTS] * beside:
                group.create_task(lanes(dialect))
    print(f"{total} kills: {dict(done)}")
    return total, done


@pytest.fixture
async def provisioned(server, namespace, bucket):
    async with connect(server.url, namespace=namespace, provision=True, lease=LEASE):
        yield


async def test_wakes_after_kills(nursery, provisioned, server, namespace, nc, tmp_path):
    total, _ = await _kills(nursery, server, namespace, nc, tmp_path, kills=4, beside=1)
    assert total >= 24


@pytest.mark.faults
@pytest.mark.timeout(600)
async def test_a_hundred_wakes_after_kills(nursery, provisioned, server, namespace, nc, tmp_path):
    total, done = await _kills(nursery, server, namespace, nc, tmp_path, kills=20, beside=2)
    assert total >= 100
    assert {kind for _, kind in done} == {NEVER, UNKNOWN, None}
