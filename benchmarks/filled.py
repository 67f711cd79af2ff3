"""A bucket that is filled with receipts, and what they take of the server's memory and disk."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import nats

import natsreceipts


def key_of(number: int) -> natsreceipts.ReceiptKey:
    """Ten to a run, and a hundred runs to a tenant."""
    tenant, run = f"tenant-{number // 1_000}", f"run-{number // 10}"
    return natsreceipts.ReceiptKey.of(tenant, run, "send_email", {"n": number})


async def fill(url: str, toolkit: natsreceipts.Toolkit, namespace: str, count: int, result: Any) -> None:
    """Put receipts there as calls would leave them: the two records of a call that is made, with other names."""
    run = toolkit.run("acme", "made")
    await run.execute("send_email", {}, lambda: result)
    bucket = f"{namespace}-receipts"
    records = [json.loads(revision.value) for revision in await toolkit.receipts.revisions(run.key("send_email", {}))]
    async with await nats.connect(url) as client:
        for number in range(count):
            key = key_of(number)
            subject = f"$KV.{bucket}.{key.kv_key}"
            names = {"tenantId": key.tenant, "runId": key.run, "argsHash": key.args_hash}
            claim, settle = (json.dumps(record | names, separators=(",", ":")).encode() for record in records)
            await client.publish(subject, claim)
            if number % 1_000 and number < count - 1:
                await client.publish(subject, settle)
            else:  # acknowledged, so all before it were taken: a stream drops what it cannot queue
                await client.jetstream().publish(subject, settle, timeout=60)
        stored = (await client.jetstream().stream_info(f"KV_{bucket}")).state.messages
        if stored != 2 * count + 2:
            raise RuntimeError(f"{stored:,} records were stored, of {2 * count + 2:,}")


def resident(pid: int | None) -> int:
    """Bytes of memory that a process has; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def on_disk(folder: Path) -> int:
    """Bytes that the files in a folder take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
