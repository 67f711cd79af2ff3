"""Worker processes that are killed with -9: no opaque effect is entered twice, and no outcome is made up.

``NATSRECEIPTS_CRASH_SEED`` repeats the times of a run of random kills, which it prints (not the processes' own
timing). Kill -9 leaves what was written to the operating system; a power failure is not tested here.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
import secrets
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from natsreceipts import connect

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kill -9 and SIGSTOP")

LEASE = 0.4
CALLS = 10


class Yard:
    """Workers on one bucket, and the files that their effects and their reports go to."""

    def __init__(self, url, namespace, folder):
        self.url = url
        self.namespace = namespace
        self.effects = folder / "effects"
        self.told = folder / "told"

    @asynccontextmanager
    async def worker(self, **options):
        arguments = {"url": self.url, "namespace": self.namespace, "effects": self.effects, "told": self.told}
        given = (arguments | {"lease": LEASE, "calls": CALLS} | options).items()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("worker.py")),
            *(text for name, value in given for text in (f"--{name.replace('_', '-')}", str(value))),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def to_its_end(self, **options):
        """Run a worker that nobody kills, and return its exit status."""
        async with self.worker(**options) as process:
            async with asyncio.timeout(100):
                await process.communicate()
            return process.returncode

    def lines(self):
        """How often each call's effect was entered, with which tokens."""
        entered = collections.defaultdict(list)
        if self.effects.exists():
            for line in self.effects.read_text().splitlines():
                key, token = line.split()
                entered[key].append(token)
        return entered

    def reports(self):
        """What workers were told about each call."""
        told = collections.defaultdict(set)
        if self.told.exists():
            for line in self.told.read_text().splitlines():
                key, status, token = line.split()
                told[key].add((status, token))
        return told

    async def check(self, toolkit, *, runs):
        """The promises, for every call of these runs. Returns how many calls ended in which status."""
        entered, told = self.lines(), self.reports()
        ends = collections.Counter()
        for number in range(runs):
            run = toolkit.run("acme", f"run-{number}")
            for n in range(CALLS):
                kind = ("opaque", "idempotent")[n % 2]
                key = run.key(kind, {"n": n})
                receipt = await toolkit.receipts.get(key)
                assert receipt is not None, key
                ends[kind, receipt.status] += 1
                tokens = entered[key.kv_key]
                results = {token for status, token in told[key.kv_key] if status == "completed"}
                assert receipt.status in ("completed", "ambiguous"), receipt
                if receipt.status == "completed":
                    assert results <= {receipt.result}, (receipt, results)  # every caller was told the same
                    assert receipt.result in tokens
                    assert kind == "idempotent" or len(tokens) == 1, (receipt, tokens)
                else:
                    assert kind == "opaque", receipt
                    assert len(tokens) <= 1, (receipt, tokens)
                    assert not results, (receipt, results)
                assert kind == "idempotent" or receipt.attempts == 1
        return ends


@pytest.fixture
async def yard(server, namespace, tmp_path, request):
    partitions = getattr(request, "param", 1)
    async with connect(server.url, namespace=namespace, provision=True, lease=LEASE, partitions=partitions):
        pass
    return Yard(server.url, namespace, tmp_path)


@pytest.fixture
async def toolkit(server, namespace, yard):
    async with connect(server.url, namespace=namespace, lease=LEASE) as connected:
        yield connected


PARTITIONS = pytest.mark.parametrize("yard", [1, pytest.param(4, marks=pytest.mark.faults)], indirect=True)

POINTS = {
    # where it is killed: (opaque: status, lines; idempotent: attempts, lines)
    "before the claim": (("completed", 1), (1, 1)),
    "after the claim": (("ambiguous", 0), (2, 1)),
    "in the effect": (("ambiguous", 1), (2, 2)),
    "after the effect": (("ambiguous", 1), (2, 2)),
    "in the settle": (None, None),
    "after the settle": (("completed", 1), (1, 1)),
}


@PARTITIONS
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
async def test_a_worker_that_dies_at(yard, toolkit, point, kind):
    on = 2 if kind == "opaque" else 3
    assert await yard.to_its_end(die_at=point, die_on=on) == -signal.SIGKILL
    assert await yard.to_its_end(lease=30) == 0
    assert await yard.to_its_end(lease=30) == 0
    ends = await yard.check(toolkit, runs=1)
    assert sum(ends.values()) == CALLS
    key = toolkit.run("acme", "run-0").key(kind, {"n": on})
    receipt = await toolkit.receipts.get(key)
    lines = len(yard.lines()[key.kv_key])
    opaque, idempotent = POINTS[point]
    if point == "in the settle":  # it may have got through
        assert (receipt.status, lines) in {("completed", 1), ("ambiguous", 1), ("completed", 2)}
    elif kind == "opaque":
        assert (receipt.status, lines) == opaque
    else:
        assert (receipt.status, receipt.attempts, lines) == ("completed", *idempotent)
    others = [tokens for other, tokens in yard.lines().items() if other != key.kv_key]
    assert [len(tokens) for tokens in others] == [1] * (CALLS - 1)


@PARTITIONS
async def test_two_workers_race_over_a_run_and_nobody_dies(yard, toolkit):
    ended = await asyncio.gather(*(yard.to_its_end(runs=3, pause=0.0, lease=30) for _ in range(2)))
    assert ended == [0, 0]
    ends = await yard.check(toolkit, runs=3)
    assert set(ends) == {("opaque", "completed"), ("idempotent", "completed")}
    assert {len(tokens) for tokens in yard.lines().values()} == {1}
    assert all(len(told) == 1 for told in yard.reports().values())


async def _kills(yard, toolkit, *, kills):
    """Two workers over the same runs, each killed (one time in five frozen first) at random times and begun again."""
    seed = int(os.environ.get("NATSRECEIPTS_CRASH_SEED", secrets.randbits(32)))
    print(f"NATSRECEIPTS_CRASH_SEED={seed}")
    left = kills
    frozen = 0

    async def begun_again(random_times):
        nonlocal left, frozen
        while left > 0:
            async with yard.worker(runs=10_000) as process:
                assert await process.stdout.readline() == b"ready\n"
                if random_times.random() < 0.2:
                    await asyncio.sleep(random_times.uniform(0, 0.2))
                    assert process.returncode is None, "the worker ended by itself: see what it said"
                    process.send_signal(signal.SIGSTOP)
                    frozen += 1
                    await asyncio.sleep(random_times.uniform(0.3, 1.2) * LEASE * 2)
                    process.send_signal(signal.SIGCONT)
                await asyncio.sleep(random_times.expovariate(1 / 0.25))
                assert process.returncode is None, "the worker ended by itself: see what it said"
                process.kill()
                await process.wait()
                assert process.returncode == -signal.SIGKILL
                left -= 1

    async with asyncio.TaskGroup() as group:
        for n in range(2):
            group.create_task(begun_again(random.Random(f"{seed} {n}")))
    runs = 1 + max(int(key.split(".")[1].removeprefix("run-")) for key in yard.lines())
    for _ in range(2):  # one to bring everything to its end, one to be told about everything
        assert await yard.to_its_end(runs=runs) == 0
    ends = await yard.check(toolkit, runs=runs)
    entered = sum(len(tokens) for tokens in yard.lines().values())
    print(f"{kills} kills, {frozen} freezes, {runs} runs, {entered} effects: {dict(ends)}")
    assert sum(ends.values()) == runs * CALLS
    return ends


async def test_random_kills(yard, toolkit):
    await _kills(yard, toolkit, kills=30)


@pytest.mark.parametrize("yard", [1, 4], indirect=True)
@pytest.mark.faults
@pytest.mark.timeout(600)
async def test_many_random_kills(yard, toolkit):
    ends = await _kills(yard, toolkit, kills=120)
    assert ends["opaque", "ambiguous"] > 0
