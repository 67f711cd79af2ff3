"""Lost answers at filing and consuming, and watches that live through what happens to a connection."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from notice_scenes import AGENT, FACT, filed, keys_of, raw, stem, subjects, watched
from support import PATIENCE, client_of, toolkit_of

from natsreceipts import (
    AlreadyConsumed,
    BucketReplaced,
    CorruptRecord,
    NoticeBoard,
    NoticeConflict,
    Unreachable,
    UnsupportedRecord,
    connect,
    run_notice_id,
)

pytestmark = pytest.mark.usefixtures("bucket")

SAID = {"run": "run-1", "addressee": AGENT}


@pytest.fixture
def board(toolkit):
    return toolkit.notices


@pytest.fixture
async def far(proxy, namespace, bucket, monkeypatch):
    monkeypatch.setattr("natsreceipts.fence._SHORTEST_TRY", 0.3)
    async with toolkit_of(proxy.url, namespace) as toolkit:
        yield toolkit.notices


FAULTS = ["drop_answer", "cut_after_store", "drop", "duplicate"]


@pytest.mark.parametrize("at", [None, 17])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_lost_answer_at_filing(far, proxy, namespace, nc, fault, at):
    lost = getattr(proxy, fault)(subjects(namespace))
    (one,) = await filed(far, "q", at=at)
    assert len(lost.hits) == 1
    assert one.created
    assert await keys_of(nc, namespace) == {one.key: 1}
    (again,) = await filed(far, "q", at=at)
    assert not again.created


@pytest.mark.parametrize("connected", ["before", "after"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_stood_before_is_not_created_by_a_write_that_is_lost(
    proxy, board, namespace, nc, monkeypatch, fault, connected
):
    """Though it has the same bytes: whether the writer knew of it when it connected, or not."""
    monkeypatch.setattr("natsreceipts.fence._SHORTEST_TRY", 0.3)
    first = None if connected == "before" else await filed(board, "q", at=17)
    async with toolkit_of(proxy.url, namespace) as toolkit:
        first = first or await filed(board, "q", at=17)
        lost = getattr(proxy, fault)(subjects(namespace))
        (again,) = await filed(toolkit.notices, "q", at=17)
    assert len(lost.hits) == 1
    assert [first[0].created, again.created] == [True, False]
    assert await keys_of(nc, namespace) == {again.key: 1}


@pytest.mark.parametrize("at", [None, 17])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_lost_answer_at_consuming(far, proxy, namespace, nc, fault, at):
    (one,) = await filed(far, "q")
    lost = getattr(proxy, fault)(subjects(namespace))
    status = await far.consume(**SAID, notice_id=one.notice_id, by="turn-1", at=at)
    assert len(lost.hits) == 1
    assert (await far.read(**SAID, notice_id=one.notice_id)).consumed == status
    assert set((await keys_of(nc, namespace)).values()) == {1}
    with pytest.raises(AlreadyConsumed):
        await far.consume(**SAID, notice_id=one.notice_id, by="turn-2")


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_turn_that_repeats_itself_and_loses_the_answer(far, proxy, namespace, nc, fault):
    """What it put down first has the bytes of what it sends, and is known to have stood before."""
    (one,) = await filed(far, "q")
    first = await far.consume(**SAID, notice_id=one.notice_id, by="turn-1", at=5)
    lost = getattr(proxy, fault)(subjects(namespace))
    assert await far.consume(**SAID, notice_id=one.notice_id, by="turn-1", at=5) == first
    assert len(lost.hits) == 1
    (again,) = await filed(far, "q")
    assert not again.created
    assert set((await keys_of(nc, namespace)).values()) == {1}


@pytest.mark.parametrize("fault", ["drop", "drop_answer"])
async def test_a_rival_while_the_answer_is_lost(far, proxy, board, namespace, fault):
    """Whoever is on record won: with the write lost the rival, with the answer lost oneself."""
    (one,) = await filed(board, "q")
    lost = getattr(proxy, fault)(subjects(namespace), count=None)
    mine = asyncio.create_task(far.consume(**SAID, notice_id=one.notice_id, by="turn-1"))
    await (lost.hit() if fault == "drop" else lost.answered())
    (theirs,) = await asyncio.gather(
        board.consume(**SAID, notice_id=one.notice_id, by="turn-2"), return_exceptions=True
    )
    lost.cancel()
    (ours,) = await asyncio.gather(mine, return_exceptions=True)
    kinds = [type(outcome).__name__ for outcome in (ours, theirs)]
    expected = ["AlreadyConsumed", "NoticeStatus"] if fault == "drop" else ["NoticeStatus", "AlreadyConsumed"]
    assert kinds == expected


async def test_a_conflict_while_the_write_is_lost(far, proxy, board, namespace):
    lost = proxy.drop(subjects(namespace), count=None)
    mine = asyncio.create_task(filed(far, "q"))
    await lost.hit()
    await filed(board, "q", fact=FACT | {"outcome": "no"})
    lost.cancel()
    with pytest.raises(NoticeConflict) as caught:
        await mine
    assert (caught.value.existing.fact.outcome, caught.value.refused.fact.outcome) == ("no", "ok")


async def test_nobody_answers(far, proxy, namespace, nc, monkeypatch):
    (one,) = await filed(far, "q")
    monkeypatch.setattr("natsreceipts.notice_store._WRITE_PATIENCE", 0.5)
    lost = proxy.drop(subjects(namespace), count=None)
    with pytest.raises(Unreachable, match="file it again"):
        await filed(far, "another")
    with pytest.raises(Unreachable, match="consume it again as 'turn-1'"):
        await far.consume(**SAID, notice_id=one.notice_id, by="turn-1")
    assert lost.hits
    lost.cancel()
    assert await keys_of(nc, namespace) == {one.key: 1}


async def test_a_consumption_that_is_cancelled_and_repeated(far, proxy, namespace):
    (one,) = await filed(far, "q")
    lost = proxy.drop_answer(subjects(namespace))
    task = asyncio.create_task(far.consume(**SAID, notice_id=one.notice_id, by="turn-1"))
    await lost.answered()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await far.consume(**SAID, notice_id=one.notice_id, by="turn-1")).by == "turn-1"


async def test_a_replaced_bucket(board, nc, namespace):
    await filed(board, "a", "b", "c")
    js = nc.jetstream()
    config = (await js.stream_info(f"KV_{namespace}-notices")).config
    await js.delete_stream(f"KV_{namespace}-notices")
    await js.add_stream(config)
    with pytest.raises(BucketReplaced):
        await filed(board, "d")


# Watching


async def test_what_is_pending_and_then_what_is_new(board):
    one, two = await filed(board, "a", "b", at=2)
    (early,) = await filed(board, "c", at=1)
    await board.consume(**SAID, notice_id=two.notice_id, by="turn-0")
    async with watched(board.watch(**SAID)) as take:
        assert [n.notice_id for n in await take(2)] == [early.notice_id, one.notice_id]
        await filed(board, "elsewhere", run="run-2")
        await filed(board, "elsewhere", addressee="another")
        for n in range(5):
            (new,) = await filed(board, f"new-{n}")
            assert [n.notice_id for n in await take(1)] == [new.notice_id]
            await board.consume(**SAID, notice_id=new.notice_id, by="turn-1")
        (last,) = await filed(board, "last")
        assert [n.notice_id for n in await take(1)] == [last.notice_id]
        assert take.queue.empty()


async def test_a_burst(board):
    async with watched(board.watch(**SAID)) as take:
        done = await asyncio.gather(*(filed(board, f"q{n}") for n in range(300)))
        found = await take(300)
    assert {n.notice_id for n in found} == {one.notice_id for (one,) in done}


async def test_a_notice_that_was_written_again_is_not_new(board, nc, namespace):
    (one,) = await filed(board, "a")
    kv = await raw(nc, namespace)
    async with watched(board.watch(**SAID)) as take:
        await take(1)
        await kv.put(one.key, (await kv.get(one.key)).value)
        (new,) = await filed(board, "b")
        assert [n.notice_id for n in await take(1)] == [new.notice_id]


async def test_what_was_consumed_while_the_watcher_was_busy_is_not_new(board):
    told = await filed(board, *"abcdef", at=1)
    async with aclosing(board.watch(**SAID)) as notices:
        first = await anext(notices)
        rest = sorted({one.notice_id for one in told} - {first.notice_id})
        for notice_id in rest[:-1]:
            await board.consume(**SAID, notice_id=notice_id, by="another")
        assert (await anext(notices)).notice_id == rest[-1]


async def test_what_was_deleted_while_the_watcher_was_busy_is_gone(board, nc, namespace):
    told = await filed(board, *"abc", at=1)
    kv = await raw(nc, namespace)
    async with aclosing(board.watch(**SAID)) as notices:
        first = await anext(notices)
        gone, last = sorted((one for one in told if one.notice_id != first.notice_id), key=lambda one: one.notice_id)
        await kv.delete(gone.key)
        assert (await anext(notices)).notice_id == last.notice_id


BAD_STATUSES = [b"garbage", None, b'{"v":2}', b'{"v":1,"consumedAt":1,"by":"turn-1","observedSpecRevision":1000000000}']


async def spoil(kv, one, value):
    """Put a status that does not read in place of a consumption; None deletes it."""
    key = f"{stem(one.notice_id)}.status"
    await (kv.delete(key) if value is None else kv.put(key, value))


@pytest.mark.parametrize("value", BAD_STATUSES, ids=ascii)
@pytest.mark.parametrize("when", ["before", "while busy", "after"])
async def test_a_watch_leaves_out_no_status_that_does_not_read(board, nc, namespace, monkeypatch, value, when):
    """It raises as `list` does: whether it has given the notice, is about to, or has just begun."""
    monkeypatch.setattr("natsreceipts.notice_store._SETTLING", 0.2)
    one, two = await filed(board, "a", "b", at=1)
    kv = await raw(nc, namespace)
    if when == "before":
        await spoil(kv, two, value)
    async with aclosing(board.watch(**SAID)) as notices, asyncio.timeout(PATIENCE):
        if when != "before":
            first = await anext(notices)
            other = two if first.notice_id == one.notice_id else one
            if when == "after":
                assert (await anext(notices)).notice_id == other.notice_id
            await spoil(kv, other, value)
        with pytest.raises((CorruptRecord, UnsupportedRecord)) as watched_:
            await anext(notices)
    with pytest.raises(type(watched_.value)) as listed:
        await board.list(**SAID)
    assert watched_.value.key == listed.value.key


async def test_a_watch_leaves_out_no_status_without_its_spec(board, nc, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.notice_store._SETTLING", 0.2)
    kv = await raw(nc, namespace)
    for observed in (0, 1):
        key = f"{stem(run_notice_id(f'q{observed}', AGENT), run=f'run-{observed}')}.status"
        await kv.put(key, b'{"v":1,"consumedAt":1,"by":"turn-1","observedSpecRevision":%d}' % observed)
        async with aclosing(board.watch(run=f"run-{observed}", addressee=AGENT)) as notices, asyncio.timeout(PATIENCE):
            with pytest.raises(CorruptRecord, match="spec"):
                await anext(notices)


async def test_a_watch_goes_on_without_a_notice_that_was_given_up(board, nc, namespace):
    """A status that does not read is no matter where the spec was deleted."""
    bad, worse = await filed(board, "bad", "worse")
    kv = await raw(nc, namespace)
    await kv.delete(bad.key)
    await spoil(kv, bad, b"garbage")
    async with watched(board.watch(**SAID)) as take:
        await take(1)
        await kv.delete(worse.key)
        await spoil(kv, worse, b"garbage")
        (new,) = await filed(board, "new")
        assert [n.notice_id for n in await take(1)] == [new.notice_id]


class Silent:
    """A bucket that lists no spec of one notice, and whose leader is silent for as long as the test says."""

    def __init__(self, bucket, hidden):
        self._bucket = bucket
        self._hidden = hidden
        self.asked = asyncio.Event()
        self.silent = True

    def __getattr__(self, name):
        return getattr(self._bucket, name)

    async def since(self, pattern, revision, *, timeout):
        entries, whole = await self._bucket.since(pattern, revision, timeout=timeout)
        return [entry for entry in entries if entry.key != self._hidden], whole

    async def newest(self, key, *, timeout):
        if self.silent:
            self.asked.set()
            raise Unreachable
        return await self._bucket.newest(key, timeout=timeout)


async def test_a_watch_that_is_interrupted_while_it_looks_at_what_it_found(board, monkeypatch):
    """It begins again with all of that."""
    monkeypatch.setattr("natsreceipts.notice_store._READ_PATIENCE", 0.2)
    one, two = await filed(board, "a", "b")
    await board.consume(**SAID, notice_id=two.notice_id, by="turn-1")
    silent = Silent(board._bucket, two.key)
    async with watched(NoticeBoard(silent).watch(**SAID)) as take:
        await silent.asked.wait()
        silent.silent = False
        assert [n.notice_id for n in await take(1)] == [one.notice_id]


async def test_two_watchers_share_the_work(board):
    """Both are told of all; by consuming, each notice is carried by one of them."""
    carried = {"w1": [], "w2": []}

    async def work(name):
        async with aclosing(board.watch(**SAID)) as notices:
            async for notice in notices:
                try:
                    await board.consume(**SAID, notice_id=notice.notice_id, by=name)
                except AlreadyConsumed:
                    continue
                carried[name].append(notice.notice_id)

    tasks = [asyncio.create_task(work(name)) for name in carried]
    told = [one.notice_id for one in await filed(board, *(f"q{n}" for n in range(60)))]
    async with asyncio.timeout(30):
        while sum(map(len, carried.values())) < 60:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert sorted(carried["w1"] + carried["w2"]) == sorted(told)


async def test_a_watch_lives_through_a_restart(own_server, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.notices._WATCH_EVERY", 0.3)
    async with toolkit_of(own_server.url, namespace) as toolkit, watched(toolkit.notices.watch(**SAID)) as take:
        (one,) = await filed(toolkit.notices, "a")
        assert [n.notice_id for n in await take(1)] == [one.notice_id]
        for name in ("b", "c"):
            await own_server.restart()
            async with connect(own_server.url, namespace=namespace) as other:
                gone, new = await filed(other.notices, f"{name}-gone", name)
                await other.notices.consume(**SAID, notice_id=gone.notice_id, by="turn-1")
            found = [n.notice_id for n in await take(1)]
            if found == [gone.notice_id]:  # it was told before it was consumed
                found = [n.notice_id for n in await take(1)]
            assert found == [new.notice_id]


async def test_a_watch_lives_through_a_connection_that_is_cut(proxy, namespace, board, monkeypatch):
    monkeypatch.setattr("natsreceipts.notices._WATCH_EVERY", 0.3)
    async with toolkit_of(proxy.url, namespace) as far, watched(far.notices.watch(**SAID)) as take:
        await filed(board, "a")
        await take(1)
        await proxy.refuse()
        await proxy.cut()
        gone, new = await filed(board, "gone", "b")
        await board.consume(**SAID, notice_id=gone.notice_id, by="turn-1")
        await proxy.accept()
        assert [n.notice_id for n in await take(1)] == [new.notice_id]


async def test_a_watch_that_starts_while_the_server_is_away(own_server, namespace):
    async with toolkit_of(own_server.url, namespace) as toolkit:
        (one,) = await filed(toolkit.notices, "a")
        await own_server.stop()
        async with watched(toolkit.notices.watch(**SAID)) as take:
            await asyncio.sleep(0.05)
            await own_server.restart()
            assert [n.notice_id for n in await take(1)] == [one.notice_id]


async def test_a_watch_notices_another_bucket(own_server, namespace):
    """A server that came back without its data."""
    async with toolkit_of(own_server.url, namespace) as toolkit, watched(toolkit.notices.watch(**SAID)) as take:
        await filed(toolkit.notices, "a")
        await take(1)
        await own_server.restart(wipe=True)
        async with client_of(own_server.url) as nc, toolkit_of(nc, namespace):
            with pytest.raises(BucketReplaced):
                await take(1)


async def test_a_watch_that_is_left_early(board, nc, namespace):
    """It leaves no task and no subscription."""
    await filed(board, "a")
    async with aclosing(board.watch(**SAID)) as notices:
        async for _ in notices:
            break
    task = asyncio.create_task(anext(board.watch(run="run-1", addressee="nobody")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
