"""How soon `natsreceipts receipts ls` prints its first line, how long it takes in all, and in how much memory.

    python benchmarks/listing.py [RECEIPTS]

Beside it the `nats` CLI's list of the keys alone, where it is on the PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time

import nats

from natsreceipts import ReceiptKey, connect, embedded

MEASURED = """
import resource, sys
from natsreceipts.cli.app import app
from natsreceipts.cli.edge import run
code = run(app, sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


async def fill(url: str, count: int) -> None:
    async with connect(url, provision=True), await nats.connect(url) as client:
        for n in range(count):
            key = ReceiptKey.of("acme", f"order-{n % 100}", "send", [n])
            record = {
                "v": 1,
                "write": "0" * 24,
                "status": "completed",
                "tenantId": key.tenant,
                "runId": key.run,
                "toolName": key.tool,
                "argsHash": key.args_hash,
                "effect": "opaque",
                "attempts": 1,
                "leaseMs": 30_000,
                "holder": {"token": "0" * 24, "worker": "w"},
                "result": {"json": "x" * 300},
            }
            await client.publish(f"$KV.receipts.{key.kv_key}", json.dumps(record).encode())
            if n % 1000 == 0:
                await client.flush()
        await client.flush()


async def measure(name: str, url: str, *command: str) -> None:
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "NATS_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    first = time.monotonic() - started
    _, err = await process.communicate()
    memory = f", {int(err) / 1024:.0f} MB" if err.strip().isdigit() else ""
    print(f"{name:<22} first line {first:.2f} s, all {time.monotonic() - started:.2f} s{memory}")


async def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    async with embedded() as server:
        await fill(server.url, count)
        print(f"{count:,} receipts")
        for verb in (["ls"], ["ls", "--json"], ["ls", "--ambiguous"], ["stats"]):
            await measure(" ".join(verb), server.url, sys.executable, "-c", MEASURED, "receipts", *verb)
        if nats_cli := shutil.which("nats"):
            await measure("nats kv ls", server.url, nats_cli, "kv", "ls", "receipts")


asyncio.run(main())
