"""A worker with very many calls open at once, in a process of its own, so that its memory is theirs.

    python many_calls.py URL NAMESPACE CALLS

Half of the bodies wait until all that wait are open; some fail in ways that have a name. Prints what came of it, JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections import Counter

from natsreceipts import AmbiguousCall, NotApplied, connect


async def main(url: str, namespace: str, calls: int) -> None:
    done: Counter[int] = Counter()
    came: Counter[str] = Counter()
    open_now = 0
    all_open = asyncio.Event()

    async with connect(url, namespace=namespace, provision=True) as toolkit:
        run = toolkit.run("acme", "many")

        async def effect(number: int) -> dict[str, int]:
            nonlocal open_now
            done[number] += 1
            if number % 2:
                open_now += 1
                if open_now == calls // 2:
                    all_open.set()
                await all_open.wait()
            if number % 10 == 4:
                raise NotApplied("the provider said no")
            if number % 10 == 6:
                raise ConnectionResetError("who knows")
            return {"number": number}

        async def call(number: int) -> None:
            try:
                result = await run.execute("send", {"to": number}, lambda: effect(number))
                came["right" if result == {"number": number} else "wrong"] += 1
            except Exception as error:
                came[type(error).__name__] += 1

        await asyncio.gather(*[call(number) for number in range(calls)])
        # All of them again, at once: the results come from the receipts, what is not known is said to be.
        first, again = came.copy(), Counter[str]()
        came.clear()

        async def replay(number: int) -> None:
            try:
                result = await run.execute("send", {"to": number}, lambda: effect(number))
                again["right" if result == {"number": number} else "wrong"] += 1
            except AmbiguousCall as error:
                again[type(error).__name__] += 1

        await asyncio.gather(*[replay(number) for number in range(calls) if number % 10 != 4])
        statuses = Counter([receipt.status async for receipt in toolkit.receipts.list(run="many")])
        left = len(asyncio.all_tasks())
    print(
        json.dumps(
            {
                "first": first,
                "again": again,
                "statuses": statuses,
                "twice": sum(times > 1 for times in done.values()),
                "entered": len(done),
                "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "tasks": left,
            }
        )
    )


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
