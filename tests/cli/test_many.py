"""Ten thousand receipts: the first line comes soon, and memory does not grow with them."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import pytest
from program import program
from support import bucket_of, put, record_of

from natsreceipts import ReceiptKey

COUNT = 10_000


@pytest.mark.faults
async def test_ten_thousand(server, namespace, toolkit, nc, tmp_path):
    key = ReceiptKey.of("acme", "order-1", "send", [])
    for n in range(COUNT):
        key = ReceiptKey.of("acme", f"order-{n % 100}", "send", [n])
        record = record_of(key, status="completed", result={"json": "x" * 1000})
        await nc.publish(f"$KV.{bucket_of(namespace)}.{key.kv_key}", json.dumps(record).encode())
        if n % 1000 == 0:
            await nc.flush()
    await put(nc, namespace, key, record_of(key, status="ambiguous"))
    where = ("--server", server.url, "--namespace", namespace)
    script = tmp_path / "measured.py"
    script.write_text(
        "import resource, sys\n"
        "from natsreceipts.cli.app import app\n"
        "from natsreceipts.cli.edge import run\n"
        "code = run(app, sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    for verb in (("ls",), ("ls", "--json"), ("ls", "--ambiguous"), ("stats",)):
        ended = await program("receipts", *verb, *where, command=(sys.executable, script))
        assert ended.code == 0
        assert len(ended.lines) == (COUNT if verb in (("ls",), ("ls", "--json")) else len(ended.lines))
        kilobytes = int(ended.err) // (1024 if sys.platform == "darwin" else 1)
        assert kilobytes < 200_000
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, "receipts", "ls", *where),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    started = time.monotonic()
    assert await process.stdout.readline()
    first = time.monotonic() - started
    await process.communicate()
    assert first < 10.0, "a second on a machine of its own (benchmarks/listing.py)"
