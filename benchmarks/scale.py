"""How a call's cost changes with partitions, processes, keys and the size of results, and what a receipt takes.

    python benchmarks/scale.py [--rounds 7] [--seconds 1] [--only keys,processes] [--million]

One nats-server on this machine, which the callers share. All ways of a section are measured side by side, for some
seconds each in every round, in an order that turns; what counts are the ratios: medians, over the rounds, of the
ratio to the section's first way in the same round, with the lowest and the highest. Memory is the server's resident
set, as Linux tells it. The last section computes what a cluster should hold from what was measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import os
import platform
import statistics
import sys
import time
from typing import Any, Self

import nats
from filled import fill, key_of, on_disk, resident
from sides import Sides, load, taken

import natsreceipts

ARGS = {"to": ["ada@example.com", "grace@example.com"], "subject": "Your order has shipped", "urgent": False}
ALWAYS = "jetstream { sync_interval: always }"
SYNCS = {"default sync": None, "sync always": ALWAYS}
COUNTER = itertools.count()


def result_of(size: int) -> dict[str, str]:
    return {"id": "m-0123456789", "note": "x" * (size - 34)}


RESULT = result_of(200)


async def send() -> dict[str, str]:
    return RESULT


async def fresh(toolkit: natsreceipts.Toolkit) -> None:
    """A call that was never made, in one of many runs."""
    number = next(COUNTER)
    run = toolkit.run("acme", f"order-{os.getpid()}-{number % 512}")
    await run.execute("send_email", {**ARGS, "n": number}, send)


class Bench:
    """What was asked for, and what the model is made of."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.rounds: int = chosen.rounds
        self.seconds: float = chosen.seconds
        self.million: bool = chosen.million
        self.synced_rates: dict[int, float] = {}
        """Calls a second with ``sync_interval: always``, by the number of partitions."""
        self.disk = self.memory = 0.0
        """Bytes a receipt."""

    async def partitions(self) -> None:
        """64 in flight in one process, spread over 1, 2, 4 and 8 buckets."""
        for sync, config in SYNCS.items():
            sides = Sides(f"Partitions: fresh calls, 64 in flight, one process, {sync}")
            async with contextlib.AsyncExitStack() as stack:
                server = await stack.enter_async_context(natsreceipts.embedded(config=config))
                for number in (1, 2, 4, 8):
                    toolkit = await stack.enter_async_context(
                        natsreceipts.connect(server.url, namespace=f"p{number}", provision=True, partitions=number)
                    )

                    def way(toolkit: natsreceipts.Toolkit = toolkit) -> Any:
                        return taken(lambda: fresh(toolkit), seconds=self.seconds, width=64)

                    sides.add(f"{number} partition{'s' if number > 1 else ''}", way)
                await sides.measure(self.rounds)
            sides.print(rates=True)
            if config:
                rates = {name: 1 / statistics.median(times) for name, times in sides.times.items()}
                self.synced_rates = {int(name.split()[0]): rate for name, rate in rates.items()}

    async def processes(self) -> None:
        """1, 2 and 4 processes with 16 in flight each, on one bucket and on four."""
        for sync, config in SYNCS.items():
            for partitions in (1, 4):
                parts = f"{partitions} partition{'s'[: partitions > 1]}"
                sides = Sides(f"Processes: fresh calls, 16 in flight in each, {parts}, {sync}")
                async with contextlib.AsyncExitStack() as stack:
                    server = await stack.enter_async_context(natsreceipts.embedded(config=config))
                    settings = {"provision": True, "partitions": partitions}
                    await stack.enter_async_context(natsreceipts.connect(server.url, **settings))
                    workers = [await stack.enter_async_context(Worker(server.url)) for _ in range(4)]
                    for number in (1, 2, 4):

                        async def way(busy: list[Worker] = workers[:number]) -> float:
                            rates = await asyncio.gather(*(worker.rate(self.seconds) for worker in busy))
                            return 1 / sum(rates)

                        sides.add(f"{number} process{'es' if number > 1 else ''}", way)
                    await sides.measure(self.rounds)
                sides.print(rates=True)

    async def keys(self) -> None:
        """The same calls on buckets with many keys, and what these take."""
        sizes = (1_000, 100_000, *((1_000_000,) if self.million else ()))
        ways: dict[str, Sides] = {
            "fresh, one at a time": Sides("Keys: a fresh call, one at a time"),
            "fresh, 64 in flight": Sides("Keys: fresh calls, 64 in flight"),
            "get": Sides("Keys: one receipt is read from the leader"),
            "run": Sides("Keys: a run of 10 receipts is listed"),
        }
        takes: list[str] = []
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(natsreceipts.embedded())
            toolkits = [
                await stack.enter_async_context(
                    natsreceipts.connect(server.url, namespace=f"k{size}", provision=True, connect_timeout=60)
                )
                for size in sizes
            ]
            for size, toolkit in zip(sizes, toolkits, strict=True):
                memory, disk = resident(server.pid), on_disk(server.store_dir)
                await fill(server.url, toolkit, f"k{size}", size, RESULT)
                filled, disk = resident(server.pid), on_disk(server.store_dir) - disk
                if size >= 100_000:
                    started = time.perf_counter()
                    await server.restart()
                    again = time.perf_counter() - started
                    await toolkit.receipts.server_time()
                    after, first, next_one = resident(server.pid), *await cold(toolkit, size)
                    self.memory, self.disk = max(filled - memory, 0) / size, disk / size
                    takes.append(
                        f"  {size:,} receipts of two revisions, results of 200 B: {self.disk:,.0f} B on disk each; "
                        f"the server's memory {memory / 1e6:,.0f} MB before, {filled / 1e6:,.0f} MB after, "
                        f"{self.memory:,.0f} B each; {after / 1e6:,.0f} MB after a restart, which took {again:.2f} s; "
                        f"then a receipt is read the first time in {first * 1e6:,.0f} us, and next in "
                        f"{next_one * 1e6:,.0f} us"
                    )
                name = f"{size:,} keys"

                def replayed(toolkit: natsreceipts.Toolkit = toolkit, size: int = size) -> Any:
                    number = next(COUNTER) * 7919 % size
                    return toolkit.receipts.get(key_of(number))

                async def listed(toolkit: natsreceipts.Toolkit = toolkit, size: int = size) -> None:
                    key = key_of(next(COUNTER) * 7919 % size)
                    found = [receipt async for receipt in toolkit.receipts.list(tenant=key.tenant, run=key.run)]
                    assert len(found) == 10

                def called(toolkit: natsreceipts.Toolkit = toolkit) -> Any:
                    return fresh(toolkit)

                for way, (work, width) in {
                    "fresh, one at a time": (called, 1),
                    "fresh, 64 in flight": (called, 64),
                    "get": (replayed, 1),
                    "run": (listed, 1),
                }.items():
                    ways[way].add(name, lambda w=work, n=width: taken(w, seconds=self.seconds / 2, width=n))
            for sides in ways.values():
                await sides.measure(self.rounds)
        for way, sides in ways.items():
            sides.print(rates=way.startswith("fresh, 64"))
        print("\nWhat receipts take")
        print("\n".join(takes))

    async def results(self) -> None:
        """Results of 200 B, 10 KB and 500 KB; the last go to the object store."""
        sizes = {"200 B": 200, "10 KB": 10_000, "500 KB": 500_000}
        calls, replays = (
            Sides("Results: a fresh call, one at a time"),
            Sides("Results: a replay, claim first, one at a time"),
        )
        takes: list[str] = []
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(natsreceipts.embedded())
            client = await stack.enter_async_context(await nats.connect(server.url))
            made: dict[str, int] = {}
            for name, size in sizes.items():
                toolkit = await stack.enter_async_context(
                    natsreceipts.connect(server.url, namespace=f"r{size}", provision=True)
                )
                run, result = toolkit.run("acme", "order"), result_of(size)
                made[name] = 0

                async def call(run: Any = run, result: Any = result, name: str = name) -> None:
                    await run.execute("send_email", {**ARGS, "n": next(COUNTER)}, lambda: result)
                    made[name] += 1

                async def replay(run: Any = run, result: Any = result) -> None:
                    got = await run.execute("send_email", ARGS, send)
                    assert len(got["note"]) == len(result["note"])

                await run.execute("send_email", ARGS, lambda result=result: result)
                calls.add(name, lambda work=call: taken(work, seconds=self.seconds / 2))
                replays.add(name, lambda work=replay: taken(work, seconds=self.seconds / 2))
            await calls.measure(self.rounds)
            await replays.measure(self.rounds)
            for name, size in sizes.items():
                streams = [
                    await client.jetstream().stream_info(stream)
                    for stream in (f"KV_r{size}-receipts", f"OBJ_r{size}-receipt-payloads")
                ]
                each = [info.state.bytes / (made[name] + 1) for info in streams]
                takes.append(
                    f"  {name}: {each[0]:,.0f} B a receipt in the bucket, {each[1]:,.0f} B in the object store"
                )
        calls.print()
        replays.print()
        print("\nWhat results take")
        print("\n".join(takes))

    async def contention(self) -> None:
        """32 callers that want one call, each on a connection of its own."""
        sides = Sides("Contention: 32 callers on 32 connections, until the last one has its result")
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(natsreceipts.embedded())
            toolkits = [
                await stack.enter_async_context(natsreceipts.connect(server.url, provision=True)) for _ in range(32)
            ]
            entered = 0

            async def effect() -> dict[str, str]:
                nonlocal entered
                entered += 1
                return RESULT

            async def together(*, keys: int) -> float:
                nonlocal entered
                entered, number = 0, next(COUNTER)

                async def one(place: int, toolkit: natsreceipts.Toolkit) -> Any:
                    args = {**ARGS, "n": number, "key": place % keys}
                    return await toolkit.run("acme", "order").execute("send_email", args, effect, wait=60.0)

                started = time.perf_counter()
                got = await asyncio.gather(*(one(place, toolkit) for place, toolkit in enumerate(toolkits)))
                ended = time.perf_counter() - started
                assert entered == keys
                assert got == [RESULT] * 32
                return ended

            async def often(keys: int) -> float:
                return statistics.median([await together(keys=keys) for _ in range(5)])

            sides.add("a key for each", lambda: often(32))
            sides.add("one key for all", lambda: often(1))
            await sides.measure(self.rounds)
        sides.print()

    async def prefetched(self) -> None:
        """A run of 500 calls that is made again."""
        size = 500
        sides = Sides(f"Prefetched: a run of {size} calls is made again, per call")
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(natsreceipts.embedded())
            for partitions in (1, 4):
                toolkit = await stack.enter_async_context(
                    natsreceipts.connect(server.url, namespace=f"f{partitions}", provision=True, partitions=partitions)
                )
                run = toolkit.run("acme", "order")
                arguments = [{**ARGS, "n": n} for n in range(size)]
                for args in arguments:
                    await run.execute("send_email", args, send)

                async def ahead(run: Any = run, arguments: Any = arguments) -> float:
                    started = time.perf_counter()
                    async with run:
                        for args in arguments:
                            await run.execute("send_email", args, send)
                    return (time.perf_counter() - started) / size

                async def inside(run: Any = run, arguments: Any = arguments) -> float:
                    async with run:
                        started = time.perf_counter()
                        for args in arguments:
                            await run.execute("send_email", args, send)
                        return (time.perf_counter() - started) / size

                async def singly(run: Any = run, toolkit: Any = toolkit, arguments: Any = arguments) -> float:
                    started = time.perf_counter()
                    for args in arguments:
                        await toolkit.receipts.get(run.key("send_email", args))
                    return (time.perf_counter() - started) / size

                where = f", {partitions} partition{'s'[: partitions > 1]}"
                sides.add("a request for each" + where, singly)
                sides.add("prefetched" + where, ahead)
                sides.add("prefetched, without the request" + where, inside)
            await sides.measure(self.rounds)
        sides.print(rates=True)

    def model(self) -> None:
        """What a cluster should hold, from what was measured."""
        if not (self.synced_rates and self.disk):
            return
        best = max(self.synced_rates, key=lambda number: self.synced_rates[number])
        rate = self.synced_rates[best]
        print("\nModel (not measured): three replicas, each synced before a write is acknowledged")
        print("  Each write is made on 3 servers: S of them make S/3 of what one makes, and each holds 3/S of all.")
        print("  Raft's own log and the network are not in it, so it says what a cluster makes at most.")
        print(f"  1 server, measured: {rate:,.0f} calls a second with {best} partitions, {self.disk:,.0f} B a receipt")
        for servers in (3, 6, 9):
            share = 100_000_000 * 3 / servers
            print(
                f"  {servers} servers: at most {rate * servers / 3:,.0f} calls a second, with {best * servers // 3} "
                f"partitions; of 100,000,000 receipts each holds {share * self.disk / 1e9:,.0f} GB on disk and "
                f"{share * self.memory / 1e9:,.1f} GB in memory"
            )
        print(
            f"  1,000,000 calls a day that are kept for 90 days: {90e6 * self.disk / 1e9:,.0f} GB on disk and "
            f"{90e6 * self.memory / 1e9:,.1f} GB in memory, on each of 3 servers"
        )


async def cold(toolkit: natsreceipts.Toolkit, size: int) -> list[float]:
    """Seconds, medians, that receipts far from each other take to be read, once and again at once."""
    taken_by: list[list[float]] = [[], []]
    for number in range(50):
        for times in taken_by:
            started = time.perf_counter()
            assert await toolkit.receipts.get(key_of(number * size // 50)) is not None
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in taken_by]


class Worker:
    """Another process with a toolkit of its own, which makes fresh calls when it is told to."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            *("--worker", self._url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._said()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()

    async def rate(self, seconds: float) -> float:
        """Calls a second."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        return float(await self._said())

    async def _said(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker process ended")
        return line.decode().strip()


async def work(url: str) -> None:
    """What a worker process does."""
    async with natsreceipts.connect(url) as toolkit:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(1 / await taken(lambda: fresh(toolkit), seconds=float(line), width=16), flush=True)


SECTIONS = ("partitions", "processes", "keys", "results", "contention", "prefetched")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--million", action="store_true", help="also a bucket of 1,000,000 keys")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        await work(chosen.worker)
        return
    async with natsreceipts.embedded() as server, await nats.connect(server.url) as client:
        client_version = importlib.metadata.version("nats-py")
        print(
            f"{str(client.connected_server_version).strip('<>')}, nats-py {client_version}, Python "
            f"{platform.python_version()}, {os.cpu_count()} cores, load {load()}; {chosen.rounds} rounds of "
            f"{chosen.seconds:g} s"
        )
    bench = Bench(chosen)
    for section in chosen.only.split(","):
        await getattr(bench, section)()
    bench.model()
    print(f"\nload at the end: {load()}")


if __name__ == "__main__":
    asyncio.run(main())
