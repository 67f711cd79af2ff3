"""The rate of fresh guarded calls with 64 in flight, and with all of them at once, and the memory that takes.

    python benchmarks/overload.py [CALLS]

Both ways make all calls as tasks at once; in the first a semaphore lets 64 through. Rounds alternate; the ratio is
that of the best rounds.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time

from natsreceipts import Toolkit, connect, embedded

ROUNDS = 5


async def rate(toolkit: Toolkit, name: str, calls: int, width: int) -> float:
    run = toolkit.run("acme", name)
    room = asyncio.Semaphore(width)

    async def effect() -> dict[str, str]:
        return {"id": "m-1"}

    async def call(number: int) -> None:
        async with room:
            await run.execute("send", {"to": number}, effect)

    began = time.perf_counter()
    await asyncio.gather(*[call(number) for number in range(calls)])
    return calls / (time.perf_counter() - began)


async def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    narrow, wide = 0.0, 0.0
    async with embedded() as server, connect(server.url, provision=True) as toolkit:
        await rate(toolkit, "warm", 1000, 64)
        for turn in range(ROUNDS):
            narrow = max(narrow, await rate(toolkit, f"narrow-{turn}", calls, 64))
            wide = max(wide, await rate(toolkit, f"wide-{turn}", calls, calls))
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{calls:,} calls: {narrow:,.0f} a second with 64 in flight, {wide:,.0f} with all of them: {wide / narrow:.2f}"
    )
    print(f"{megabytes:.0f} MB at most")


if __name__ == "__main__":
    asyncio.run(main())
