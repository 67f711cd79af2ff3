"""That nothing is there is said of the bucket that was connected to, and only when a server has said so."""

from __future__ import annotations

import pytest
from notice_scenes import AGENT, FACT, filed, watched
from support import flushed, toolkit_of

from natsreceipts import BucketReplaced, NotProvisioned, Unreachable, run_notice_id

pytestmark = pytest.mark.usefixtures("bucket")

SAID = {"run": "run-1", "addressee": AGENT}
NOTICE = {**SAID, "notice_id": run_notice_id("q", AGENT)}


async def first_of(board):
    async with watched(board.watch(**SAID)) as take:
        return await take(1)


ASKED = {
    "list": lambda board: board.list(**SAID),
    "list_run": lambda board: board.list_run(run="run-1"),
    "pending": lambda board: board.pending(**SAID),
    "unconsumed_steps": lambda board: board.unconsumed_steps(run="run-1"),
    "read": lambda board: board.read(**NOTICE),
    "consume": lambda board: board.consume(**NOTICE, by="turn-1"),
    "consume, at given": lambda board: board.consume(**NOTICE, by="turn-1", at=1),
    "file": lambda board: filed(board, "another"),
    "file, at given": lambda board: filed(board, "another", at=1),
    "file, to several": lambda board: filed(board, "another", addressee=None, addressees=["a", "b"], at=1),
    "watch": first_of,
}
asked = pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)


async def replace(nc, namespace):
    """Delete the bucket, and make it again as it was, with none of its records."""
    stream = f"KV_{namespace}-notices"
    config = (await nc.jetstream().stream_info(stream)).config
    await nc.jetstream().delete_stream(stream)
    await nc.jetstream().add_stream(config)


@asked
async def test_a_bucket_that_is_gone(toolkit, nc, namespace, ask):
    await filed(toolkit.notices, "q")
    await nc.jetstream().delete_stream(f"KV_{namespace}-notices")
    with pytest.raises(NotProvisioned, match="notices"):
        await ask(toolkit.notices)


@asked
async def test_a_bucket_that_was_replaced(toolkit, nc, namespace, ask):
    await filed(toolkit.notices, "q")
    await replace(nc, namespace)
    with pytest.raises(BucketReplaced, match="notices"):
        await ask(toolkit.notices)


async def test_a_bucket_that_was_replaced_and_has_other_notices(server, toolkit, nc, namespace):
    """All of them are carried, so nothing is pending: of those that it had before nobody knows."""
    await filed(toolkit.notices, "q", "r")
    await replace(nc, namespace)
    async with toolkit_of(server.url, namespace) as later:
        (one,) = await filed(later.notices, "q")
        await later.notices.consume(**NOTICE, by="turn-1")
        assert await later.notices.pending(**SAID) == []
    assert one.created
    for ask in ("pending", "unconsumed_steps"):
        async with toolkit_of(server.url, namespace):
            with pytest.raises(BucketReplaced):
                await ASKED[ask](toolkit.notices)


async def test_what_it_costs(toolkit, nc, namespace):
    """One request to a read that finds nothing, and none to one that finds something."""
    board = toolkit.notices
    state = f"$JS.API.STREAM.INFO.KV_{namespace}-notices"
    seen = []

    async def take(message):
        seen.append(message.subject)

    subscription = await nc.subscribe(state, cb=take)
    await flushed(nc)

    async def cost(coroutine):
        seen.clear()
        found = await coroutine
        await flushed(nc)
        return found, len(seen)

    assert await cost(board.list(**SAID)) == ([], 1)
    assert await cost(board.pending(**SAID)) == ([], 1)
    assert await cost(board.read(**NOTICE)) == (None, 1)
    await filed(board, "q")
    for ask in ("list", "list_run", "pending", "read"):
        assert (await cost(ASKED[ask](board)))[1] == 0
    await subscription.unsubscribe()


async def test_a_list_that_nobody_answers(proxy, server, namespace, monkeypatch):
    """What was asked for, for how long it was tried, and what to do."""
    monkeypatch.setattr("natsreceipts.notice_store._READ_PATIENCE", 1.0)
    async with toolkit_of(proxy.url, namespace) as toolkit:
        await filed(toolkit.notices, "q")
        proxy.drop("$JS.API.DIRECT.GET.>", count=None)
        with pytest.raises(Unreachable, match=r"notice\.local\.run-1\..* tried for \d.* ask again"):
            await toolkit.notices.pending(**SAID)
        proxy.drop("$JS.API.STREAM.>", count=None)
        with pytest.raises(Unreachable, match=r"notice\.local\.run-1\..* tried for \d.* ask again"):
            await toolkit.notices.read(**NOTICE)


async def test_filing_waits_for_a_server_as_long_as_a_write_does(proxy, server, namespace, monkeypatch):
    """Longer than a read: its first look is part of the write."""
    monkeypatch.setattr("natsreceipts.notice_store._READ_PATIENCE", 0.1)
    monkeypatch.setattr("natsreceipts.fence._SHORTEST_TRY", 0.2)
    async with toolkit_of(proxy.url, namespace) as toolkit:
        lost = proxy.drop("$JS.API.STREAM.INFO.>", count=3)
        filed_ = await toolkit.notices.file(run="run-1", step="s", request_id="q", addressee=AGENT, fact=FACT, at=1)
    assert len(lost.hits) == 3
    assert filed_.created
