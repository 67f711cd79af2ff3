"""Every kept revision of a key, read or not, and how long leases and receipts have by the server's clock."""

from __future__ import annotations

import datetime as dt
from contextlib import aclosing
from functools import partial

import pytest
from scenes import stand
from support import Effect, put, toolkit_of, until

from natsreceipts import CorruptRecord, InvalidName, ServerTime, UnsupportedRecord

ARGS = {"to": "ann@example.com"}


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


async def test_revisions_give_what_history_gives(toolkit, run, key):
    await run.execute("send", ARGS, Effect())
    revisions = await toolkit.receipts.revisions(key)
    assert [r.receipt for r in revisions] == await toolkit.receipts.history(key.kv_key)
    assert [r.receipt.record.to_bytes() for r in revisions] == [r.value for r in revisions]
    assert [(r.revision, r.time) for r in revisions] == [(r.receipt.revision, r.receipt.updated) for r in revisions]
    assert await toolkit.receipts.revisions(run.key("send", [])) == []
    with pytest.raises(InvalidName):
        await toolkit.receipts.revisions("no key")


async def test_one_that_cannot_be_read_hides_no_other(toolkit, key, nc, namespace):
    await stand(nc, namespace, key, "running")
    await put(nc, namespace, key, b"by hand")
    await stand(nc, namespace, key, "running", v=2)
    await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    await stand(nc, namespace, key, "ambiguous")
    revisions = await toolkit.receipts.revisions(key)
    assert [r.receipt and r.receipt.status for r in revisions] == ["running", None, None, None, "ambiguous"]
    assert [type(r.problem) for r in revisions] == [
        *(type(None), CorruptRecord, UnsupportedRecord),
        *(type(None), type(None)),
    ]
    assert [r.erased for r in revisions] == [False, False, False, True, False]
    assert revisions[1].value == b"by hand"
    with pytest.raises(CorruptRecord):
        await toolkit.receipts.history(key)


async def test_a_list_and_a_watch_go_on_past_what_cannot_be_read(toolkit, run, nc, namespace):
    good, bad, new = (run.key("send", [n]) for n in range(3))
    await put(nc, namespace, bad, b"by hand")
    await stand(nc, namespace, good, "ambiguous")
    problems = []
    assert [r.key async for r in toolkit.receipts.list(unreadable=problems.append)] == [good]
    assert [problem.key for problem in problems] == [bad.kv_key]
    async with aclosing(toolkit.receipts.watch(unreadable=problems.append)) as watching:
        assert (await anext(watching)).key == good
        assert len(problems) == 2
        await stand(nc, namespace, good, "withdrawn", v=2)
        await stand(nc, namespace, new, "ambiguous")
        assert (await anext(watching)).key == new
    assert [type(problem) for problem in problems] == [CorruptRecord, CorruptRecord, UnsupportedRecord]


async def test_payloads_wherever_they_are(server, namespace, bucket):
    async with toolkit_of(server.url, namespace, inline_limit=2000) as toolkit:
        run = toolkit.run("acme", "run-1", effect="resumable", store_args=True)

        async def body(call):
            await call.step("upload", lambda: {"at": dt.date(2025, 1, 2)})
            return "x" * 5000

        await run.execute("send", ARGS, body)
        receipt = await toolkit.receipts.get(run.key("send", ARGS))
        record = receipt.record
        assert record.result.object is not None
        assert await toolkit.receipts.payload(receipt, record.result) == "x" * 5000
        assert await toolkit.receipts.payload(receipt, record.args) == ARGS
        assert await toolkit.receipts.payload(receipt, record.steps["upload"]) == {"at": dt.date(2025, 1, 2)}


async def later_than(toolkit, key):
    """The server's time, once the lease of this receipt is over by it."""
    receipt, time = await toolkit.receipts.get(key), await toolkit.receipts.server_time()
    return time if time.lease_left(receipt) < 0 else None


async def test_what_is_left_by_the_servers_clock(server, namespace, bucket, nc):
    async with toolkit_of(server.url, namespace, retention=3600) as toolkit:
        run = toolkit.run("acme", "run-1")
        over, live, settled = (run.key("send", [n]) for n in range(3))
        await stand(nc, namespace, over, "running", leaseMs=1)
        await stand(nc, namespace, live, "running", leaseMs=600_000)
        await stand(nc, namespace, settled, "completed")
        time = await until(partial(later_than, toolkit, over))
        left = {r.key: time.lease_left(r) async for r in toolkit.receipts.list()}
        assert left[over] < 0
        assert 500 < left[live] <= 602
        assert left[settled] is None
        kept = [time.kept_for(r) async for r in toolkit.receipts.list()]
        assert all(3500 < seconds <= 3600 for seconds in kept)


async def test_a_leader_change_costs_one_fresh_lease(toolkit, key, nc, namespace):
    await stand(nc, namespace, key, "running", leaseMs=10_000)
    receipt = await toolkit.receipts.get(key)
    later = receipt.updated + dt.timedelta(seconds=60)
    assert ServerTime(later, None, 0.0).lease_left(receipt) == pytest.approx(-49.0)
    assert ServerTime(later, later, 0.0).lease_left(receipt) == pytest.approx(11.0)
    assert ServerTime(later, None, 0.0).kept_for(receipt) is None
