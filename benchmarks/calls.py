"""What a fresh guarded call costs beside nats-py's own KV create and update, in alternating rounds of one run.

    python benchmarks/calls.py [--rounds 9] [--calls 400]

Prints ratios of medians: time per call one at a time, and throughput with 64 in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import nats
import nats.js.api

import natsreceipts

ARGS = {
    "to": ["ada@example.com", "grace@example.com"],
    "subject": "Your order has shipped",
    "body": "Hello, your order 42 is on its way and will be with you soon.",
    "urgent": False,
    "tries": 3,
}
RESULT = {"id": "m-0123456789", "status": "sent", "at": 1764496800.5, "to": ARGS["to"], "note": "x" * 80}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=400)
    chosen = parser.parse_args()
    async with natsreceipts.embedded() as server, natsreceipts.connect(server.url, provision=True) as toolkit:
        client = await nats.connect(server.url)
        js = client.jetstream()
        kv = await js.create_key_value(nats.js.api.KeyValueConfig(bucket="floor", history=8, direct=True))
        run = toolkit.run("acme", "bench")
        claim = json.dumps({"status": "running", "pad": "x" * 330}).encode()
        settle = json.dumps({"status": "completed", "result": RESULT, "pad": "x" * 330}).encode()
        counter = iter(range(10**9))

        async def floor() -> None:
            key = f"acme.bench.send_email.{next(counter):064d}"
            revision = await kv.create(key, claim)
            await kv.update(key, settle, last=revision)

        async def send() -> dict[str, object]:
            return RESULT

        async def execute() -> None:
            await run.execute("send_email", {**ARGS, "n": next(counter)}, send)

        async def call() -> None:
            async with run.call("send_email", {**ARGS, "n": next(counter)}) as guarded:
                if not guarded.replayed:
                    guarded.result = RESULT

        async def one_at_a_time(work, calls: int) -> float:
            started = time.perf_counter()
            for _ in range(calls):
                await work()
            return (time.perf_counter() - started) / calls

        async def at_once(work, calls: int, width: int = 64) -> float:
            left = iter(range(calls))

            async def worker() -> None:
                for _ in left:
                    await work()

            started = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(width)))
            return (time.perf_counter() - started) / calls

        @natsreceipts.tool
        async def send_email(to: list[str], subject: str, body: str, urgent: bool, tries: int, n: int) -> object:
            return RESULT

        async def tool() -> None:
            await send_email(**ARGS, n=next(counter))

        ways = {"kv create + update": floor, "run.call": call, "run.execute": execute, "@tool": tool}
        times: dict[tuple[str, str], list[float]] = {}
        async with run:
            for mode, measure, calls in (("1", one_at_a_time, chosen.calls), ("64", at_once, chosen.calls * 8)):
                for work in ways.values():
                    await measure(work, calls // 4)
                for _ in range(chosen.rounds):
                    for name, work in ways.items():
                        times.setdefault((mode, name), []).append(await measure(work, calls))
        await client.close()
    print(f"{'':20} {'one at a time':>24} {'64 in flight':>28}")
    for name in ways:
        one, many = (statistics.median(times[mode, name]) for mode in ("1", "64"))
        one_floor, many_floor = (statistics.median(times[mode, "kv create + update"]) for mode in ("1", "64"))
        print(
            f"{name:20} {one * 1e6:10.0f} us {one / one_floor:6.2f} x time"
            f" {1 / many:13,.0f} /s {many_floor / many:6.2f} x rate"
        )


if __name__ == "__main__":
    asyncio.run(main())
