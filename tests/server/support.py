"""What the tests of the write path share: toolkits in a namespace, and the records as they stand in the bucket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.js.errors
from nats.js.api import StreamConfig

from natsreceipts import connect
from natsreceipts._jetstream import partition_of
from natsreceipts._jetstream.connection import close_client

LEASE = 30.0
"""Seconds: of calls in which no lease ends and no heartbeat is due, even on a machine that stands still for a while."""

PATIENCE = 30.0
"""Seconds that a test waits for what must come: a machine that is busy or stands still is not at fault."""


PARTITIONS = int(os.environ.get("NATSRECEIPTS_PARTITIONS") or 1)
"""In how many buckets the receipts of a test are."""


def toolkit_of(where, namespace, **settings):
    """A toolkit on the bucket of a namespace, which is made if it is missing."""
    made = {"namespace": namespace, "provision": True, "lease": LEASE, "partitions": PARTITIONS}
    return connect(where, **made | settings)


@asynccontextmanager
async def client_of(url, **settings):
    """A plain nats-py client that says nothing."""
    client = await nats.connect(
        url, **{"error_cb": _ignore, "reconnect_time_wait": 0.05, "max_reconnect_attempts": -1} | settings
    )
    try:
        yield client
    finally:
        await close_client(client)


async def flushed(client):
    """Wait until a server has taken all that a client has sent: nats-py's first PING overtakes what it has buffered."""
    for _ in range(2):
        await client.flush(timeout=30)


async def _ignore(_error):
    pass


def bucket_of(namespace, run="acme.run-1"):
    """The bucket of a run's receipts."""
    return f"{namespace}-receipts" + (f"-{partition_of(run, PARTITIONS)}" if PARTITIONS > 1 else "")


def writes_to(namespace):
    """The subjects of a bucket, as a rule of the proxy takes them."""
    return f"$KV.{bucket_of(namespace)}.>"


def said(message):
    """The record in a write that went through the proxy."""
    return json.loads(message.payload)


async def stored(nc, namespace, key):
    """The newest record of a key, as raw JSON; None where there is none."""
    found = await revisions(nc, namespace, key)
    return found[-1] if found else None


async def revisions(nc, namespace, key):
    """Every revision of a key that the bucket keeps, oldest first, as raw JSON."""
    kv_key = key if isinstance(key, str) else key.kv_key
    stream, subject = f"KV_{bucket_of(namespace)}", f"$KV.{bucket_of(namespace)}.{kv_key}"
    found, sequence = [], 1
    while True:
        try:
            message = await nc.jetstream().get_msg(stream, seq=sequence, subject=subject, next=True)
        except nats.js.errors.NotFoundError:
            return found
        found.append(json.loads(message.data))
        sequence = message.seq + 1


async def newest(nc, namespace, key):
    """The newest revision of a key as nats-py's raw message."""
    kv_key = key if isinstance(key, str) else key.kv_key
    bucket = bucket_of(namespace)
    return await nc.jetstream().get_msg(f"KV_{bucket}", subject=f"$KV.{bucket}.{kv_key}")


async def put(nc, namespace, key, value, *, last=None, headers=None):
    """Write a value behind the library's back, and return its revision."""
    kv_key = key if isinstance(key, str) else key.kv_key
    headers = dict(headers or {})
    if last is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(last)
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    ack = await nc.jetstream().publish(f"$KV.{bucket_of(namespace)}.{kv_key}", data, headers=headers or None)
    return ack.seq


def record_of(key, **fields):
    """A record of a call as another worker might have written it."""
    return {
        "v": 1,
        "write": "0" * 24,
        "status": "running",
        "tenantId": key.tenant,
        "runId": key.run,
        "toolName": key.tool,
        "argsHash": key.args_hash,
        "effect": "opaque",
        "attempts": 1,
        "leaseMs": 600,
        "holder": {"token": "another", "worker": "elsewhere/1"},
    } | fields


async def lax_bucket(nc, namespace):
    """A bucket that lets keys be purged and deleted, as nats-py makes it."""
    bucket = bucket_of(namespace)
    config = StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        max_msgs_per_subject=8,
        allow_rollup_hdrs=True,
        allow_direct=True,
    )
    await nc.jetstream().add_stream(config)


@asynccontextmanager
async def signs(nc, namespace):
    """A queue of all writes to a bucket, refused ones too: the event to wait for."""
    seen = asyncio.Queue()

    async def take(message):
        seen.put_nowait(message)

    subscription = await nc.subscribe(writes_to(namespace), cb=take)
    await flushed(nc)
    try:
        yield seen
    finally:
        await subscription.unsubscribe()


async def until(check, *, timeout=PATIENCE):
    """Wait until an async check gives something true, where there is no event to wait for."""
    async with asyncio.timeout(timeout):
        while not (found := await check()):
            await asyncio.sleep(0.01)
        return found


async def settled_as(toolkit, key, *statuses, timeout=PATIENCE):
    """Wait until a receipt says one of these statuses, and return it."""

    async def look():
        receipt = await toolkit.receipts.get(key)
        return receipt if receipt is not None and receipt.status in statuses else None

    return await until(look, timeout=timeout)


class Effect:
    """A side effect that counts how often it was entered, and can be held in its middle."""

    def __init__(self, result="done", *, hold=False):
        self.entered = 0
        self.finished = 0
        self.result = result
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        if not hold:
            self.go.set()

    async def __call__(self):
        self.entered += 1
        self.started.set()
        await self.go.wait()
        self.finished += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class Holder:
    """A worker process in the middle of a guarded call (holder.py), which can be frozen and thawed."""

    def __init__(self, process):
        self._process = process

    @classmethod
    @asynccontextmanager
    async def of(cls, url, namespace, args, **options):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("holder.py")),
            *(url, namespace, json.dumps(options), json.dumps(args)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        holder = cls(process)
        try:
            yield holder
        finally:
            if process.returncode is None:
                process.kill()
            process.stdin.close()
            await process.wait()

    async def says(self, timeout=PATIENCE):
        """The next line that it prints."""
        async with asyncio.timeout(timeout):
            return (await self._process.stdout.readline()).decode().strip()

    def freeze(self):
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        self._process.kill()

    def finish(self):
        """Let the body end."""
        self._process.stdin.write(b"\n")


class Message:
    """Stands for nats-py's message where the delay of a nak is looked at, which a server does not show."""

    def __init__(self, number=1):
        self.calls = []
        self.metadata = self
        self.num_delivered = number

    async def ack(self):
        self.calls.append("ack")

    async def nak(self, delay=None):
        self.calls.append(("nak", delay))

    async def term(self):
        self.calls.append("term")

    async def in_progress(self):
        self.calls.append("in progress")


def redelivery(toolkit):
    """The inside of a redelivery: calls read before they claim."""
    return toolkit.delivery(Message(2))
