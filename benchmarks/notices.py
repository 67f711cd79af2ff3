"""What listing costs as notices become many, and what filing and consuming cost beside bare creates.

    python benchmarks/notices.py [--rounds 7] [--few 500] [--many 5000]

Prints ratios of medians, in alternating rounds of one run. A list of ten times as many should cost about ten times
as much, and has to stay within 15 times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import nats

import natsreceipts

AGENT = "local.planner-1"
FACT = {"decision": "build", "outcome": "ok", "detail": {"by": "ann", "n": 1}}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--few", type=int, default=500)
    parser.add_argument("--many", type=int, default=5000)
    chosen = parser.parse_args()
    async with natsreceipts.embedded() as server, natsreceipts.connect(server.url, provision=True) as toolkit:
        board = toolkit.notices
        client = await nats.connect(server.url)
        kv = await client.jetstream().key_value("notices")

        async def fill(run: str, count: int) -> None:
            for first in range(0, count, 100):
                files = [
                    board.file(run=run, step="/n#0", request_id=str(n), addressee=AGENT, fact=FACT, at=n)
                    for n in range(first, min(first + 100, count))
                ]
                await asyncio.gather(*files)

        async def listed(run: str, count: int) -> None:
            assert len(await board.list(run=run, addressee=AGENT)) == count

        async def file_and_consume(n: int) -> None:
            filed = await board.file(run="one", step="/n#0", request_id=f"{n}", addressee=AGENT, fact=FACT, at=n)
            await board.consume(run="one", addressee=AGENT, notice_id=filed.notice_id, by="turn-1", at=n)

        async def create_twice(n: int) -> None:
            for half in ("spec", "status"):
                await kv.create(f"raw.{n}.{half}", json.dumps(FACT).encode())

        async def timed(work) -> float:
            started = time.perf_counter()
            await work
            return time.perf_counter() - started

        await fill("few", chosen.few)
        await fill("many", chosen.many)
        times: dict[str, list[float]] = {"few": [], "many": [], "file and consume": [], "kv.create twice": []}
        for n in range(chosen.rounds):
            times["few"].append(await timed(listed("few", chosen.few)))
            times["many"].append(await timed(listed("many", chosen.many)))
            for name, work in (("file and consume", file_and_consume), ("kv.create twice", create_twice)):
                times[name] += [await timed(work(n * 100 + m)) for m in range(100)]
        await client.close()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        print(f"{name:18} {median * 1e3:8.2f} ms")
    ratio = medians["many"] / medians["few"]
    print(f"a list of {chosen.many} costs {ratio:.1f} times one of {chosen.few}")
    print(f"file and consume cost {medians['file and consume'] / medians['kv.create twice']:.2f} of two kv.create")


if __name__ == "__main__":
    asyncio.run(main())
