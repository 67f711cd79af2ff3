"""Receipts in a given state, and what is asked of many of them: legal histories, counted writes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

from support import flushed, newest, put, record_of, revisions, writes_to

from natsreceipts import AmbiguousCall, StaleRevision

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


async def resolved_over(toolkit, key, **outcome):
    """Have a person settle a call that runs, on whatever revision its holder has renewed it to."""
    while True:
        receipt = await toolkit.receipts.get(key)
        with suppress(StaleRevision):  # a renewal was faster
            return await toolkit.receipts.resolve(
                key, revision=receipt.revision, by="ann", reason="r", even_if_running=True, **outcome
            )


async def revision_of(nc, namespace, key):
    return (await newest(nc, namespace, key)).seq


async def history(nc, namespace, key):
    """The statuses of all kept revisions."""
    return [record["status"] for record in await revisions(nc, namespace, key)]


def outline(records):
    """The statuses of a history without renewals, which come on a slow machine where a lease is short."""
    kept = []
    for record in records:
        said = (record["status"], record["attempts"])
        if not kept or kept[-1] != said or said[0] != "running":
            kept.append(said)
    return [status for status, _ in kept]


@asynccontextmanager
async def no_writes(nc, namespace):
    """Nothing is published to the bucket meanwhile, not even a write that is refused."""
    async with counted_writes(nc, namespace) as writes:
        yield
    assert writes == []


@asynccontextmanager
async def counted_writes(nc, namespace, *, least=0):
    """The writes to the bucket meanwhile, also refused ones; whole once the context is left.

    ``least`` of them are waited for: a server may answer a write before it passes it on to others.
    """
    writes, marker = [], asyncio.Event()

    async def take(message):
        if message.data == b"counted":
            marker.set()
        else:
            writes.append(message)

    fence = f"{namespace}.counted"
    subscription = await nc.subscribe(writes_to(namespace), cb=take)
    end = await nc.subscribe(fence, cb=take)
    await flushed(nc)
    try:
        yield writes
        async with asyncio.timeout(30):
            while len(writes) < least:
                await asyncio.sleep(0.01)
            await nc.publish(fence, b"counted")
            await marker.wait()
    finally:
        await subscription.unsubscribe()
        await end.unsubscribe()


def check_history(records, *, given_up=()):
    """A key's whole history is one chain of legal transitions. ``given_up``: tokens of claims that were never entered.

    The table of docs/wire.md: what may follow what, attempts that never go down, a nonce of its own for every write,
    completed is final, and an opaque call is claimed again only where somebody said that it did not happen.
    """
    nonces = [record["write"] for record in records]
    assert len(set(nonces)) == len(nonces), "a nonce was used twice"
    before = None
    for record in records:
        problem = _illegal(before, record, given_up)
        assert problem is None, (problem, before, record)
        before = record


def _illegal(before, record, given_up):
    status, attempts = record["status"], record["attempts"]
    token = (record.get("holder") or {}).get("token")
    if before is None:
        return None if (status, attempts) in (("running", 1), ("withdrawn", 0)) else "it does not begin with a claim"
    old, old_token = before["status"], (before.get("holder") or {}).get("token")
    if old == "completed":
        return "completed is final"
    if attempts == before["attempts"] + 1:
        return _illegal_claim(before, record, given_up)
    if attempts != before["attempts"]:
        return "attempts went down, or up by more than one"
    if token != old_token:
        return "the holder changed within an attempt"
    if before.get("open") and not record.get("open") and "resolved" not in record:
        return "open was dropped, and nobody settled it"
    if record.get("open") and (record.get("error") or {}).get("notApplied"):
        return "not applied was said of an open call"
    if not before.get("steps", {}).keys() <= record.get("steps", {}).keys():
        return "a step was dropped"
    legal = {
        "running": {"running", "completed", "failed", "ambiguous"},
        "ambiguous": {"running", "completed", "failed", "ambiguous"},
        "failed": {"ambiguous", "completed"},
        "withdrawn": {"withdrawn"},
    }
    if old == status == "failed" and "resolved" in record and "resolved" not in before:
        # What became opaque since its attempt was made, and did not say that nothing happened, is for a person.
        return None if record["effect"] == "opaque" and not before["error"].get("notApplied") else "settled twice"
    if status not in legal[old]:
        return f"{old} was followed by {status}"
    if old == "failed" and status == "completed" and "resolved" not in before and "resolved" not in record:
        return "a failed that nobody declared was completed"
    if old == "failed" and status == "ambiguous" and before.get("error", {}).get("notApplied"):
        return "a call that was not applied became ambiguous"
    return None


def _illegal_claim(before, record, given_up):
    old_token = (before.get("holder") or {}).get("token")
    if record["status"] != "running" or record["holder"]["token"] == old_token:
        return "a new attempt begins with a claim of its own"
    if {"result", "error", "resolved"} & record.keys():
        return "a claim keeps nothing of how the last attempt ended"
    denied = before["status"] == "failed" and before.get("error", {}).get("notApplied")
    landed = before["status"] in ("running", "ambiguous", "failed") and not denied and old_token not in given_up
    if (landed or before.get("open")) and not record.get("open"):
        return "a claim hides that an earlier attempt may have had its effect"
    if record["effect"] == "opaque" and not (denied or before["status"] == "withdrawn" or old_token in given_up):
        return "an opaque call was claimed again, and nobody said that it did not happen"
    return None
