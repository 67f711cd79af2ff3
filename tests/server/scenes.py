"""Receipts in a given state, and what is asked of many of them: legal histories, counted writes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

from support import newest, put, record_of, revisions, writes_to

from natsreceipts import AmbiguousCall

STANDING = {
    "ambiguous": {"error": {"type": "LeaseExpired", "message": "it ended"}},
    "running": {},
    "failed": {"error": {"type": "E", "message": "no", "notApplied": False}},
    "not applied": {"status": "failed", "error": {"type": "E", "message": "no", "notApplied": True}},
    "completed": {"result": {"json": "theirs"}},
    "withdrawn": {"attempts": 0, "effect": None, "holder": None, "leaseMs": None, "fences": {"s": 3}},
}


async def stand(nc, namespace, key, status, **fields):
    """Put a receipt into a state, as another worker might have; its revision."""
    said = {"status": status} | STANDING.get(status, {}) | fields
    record = {name: value for name, value in record_of(key, **said).items() if value is not None}
    return await put(nc, namespace, key, record)


async def ambiguous_call(run, args, **options):
    """Let a call become ambiguous: its body fails with an error that proves nothing; the revision."""

    async def body():
        raise ConnectionResetError("after the request went out")

    with suppress(ConnectionResetError):
        await run.execute("send", args, body, **options)
    try:
        await run.execute("send", args, body, **options)
    except AmbiguousCall as error:
        return error.revision
    raise AssertionError("it is not ambiguous")


async def revision_of(nc, namespace, key):
    return (await newest(nc, namespace, key)).seq


async def history(nc, namespace, key):
    """The statuses of all kept revisions."""
    return [record["status"] for record in await revisions(nc, namespace, key)]


@asynccontextmanager
async def no_writes(nc, namespace):
    """Nothing is published to the bucket meanwhile, not even a write that is refused."""
    async with counted_writes(nc, namespace) as writes:
        yield
    assert writes == []


@asynccontextmanager
async def counted_writes(nc, namespace):
    """The writes to the bucket meanwhile, also refused ones; whole once the context is left."""
    writes, marker = [], asyncio.Event()

    async def take(message):
        if message.data == b"counted":
            marker.set()
        else:
            writes.append(message)

    fence = f"{namespace}.counted"
    subscription = await nc.subscribe(writes_to(namespace), cb=take)
    end = await nc.subscribe(fence, cb=take)
    await nc.flush()
    try:
        yield writes
        await nc.publish(fence, b"counted")
        async with asyncio.timeout(5):
            await marker.wait()
    finally:
        await subscription.unsubscribe()
        await end.unsubscribe()
