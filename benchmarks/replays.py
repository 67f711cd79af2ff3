"""What a replay costs beside nats-py's reads, in alternating rounds of one run.

    python benchmarks/replays.py [--rounds 9] [--calls 200]

Prints ratios of medians: a prefetched run beside single ``kv.get``, and single replays (claim first, and read first
as on a redelivery) beside one raw direct get.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import nats
from calls import ARGS, RESULT

import natsreceipts
from natsreceipts.run import delivered


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200)
    chosen = parser.parse_args()
    async with natsreceipts.embedded() as server, natsreceipts.connect(server.url, provision=True) as toolkit:
        client = await nats.connect(server.url)
        js = client.jetstream()
        kv = await js.key_value("receipts")
        run = toolkit.run("acme", "bench")
        all_args = [{**ARGS, "n": n} for n in range(chosen.calls)]
        keys = [run.key("send_email", args).kv_key for args in all_args]
        executed = 0

        async def send() -> object:
            nonlocal executed
            executed += 1
            return RESULT

        async def execute() -> None:
            for args in all_args:
                await run.execute("send_email", args, send)

        async def call() -> None:
            for args in all_args:
                async with run.call("send_email", args) as guarded:
                    assert guarded.replayed

        async def prefetched() -> None:
            async with run:
                await execute()

        async def redelivered(work) -> None:
            scope = delivered.set(2)
            try:
                await work()
            finally:
                delivered.reset(scope)

        async def kv_get() -> None:
            for key in keys:
                await kv.get(key)

        async def direct_get() -> None:
            for key in keys:
                await js.get_msg("KV_receipts", subject=f"$KV.receipts.{key}", direct=True)

        ways = {
            "kv.get": kv_get,
            "prefetched run, execute": prefetched,
            "raw direct get": direct_get,
            "read first, execute": lambda: redelivered(execute),
            "read first, call": lambda: redelivered(call),
            "claim first, execute": execute,
            "claim first, call": call,
        }
        await execute()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(chosen.rounds):
            for name, work in ways.items():
                started = time.perf_counter()
                await work()
                times[name].append((time.perf_counter() - started) / chosen.calls)
        assert executed == chosen.calls
        await client.close()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        floor = "kv.get" if name in ("kv.get", "prefetched run, execute") else "raw direct get"
        print(f"{name:26} {median * 1e6:8.0f} us {median / medians[floor]:6.2f} of {floor}")
    print(
        f"a prefetched run replays {medians['kv.get'] / medians['prefetched run, execute']:.1f} times as fast as kv.get"
    )


if __name__ == "__main__":
    asyncio.run(main())
