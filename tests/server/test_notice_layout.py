"""Records of notices as others write and read them, and those that do not fit together or were tampered with."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from notice_scenes import AGENT, FACT, filed, raw, stem
from support import toolkit_of

from natsreceipts import (
    AlreadyConsumed,
    CorruptRecord,
    InvalidName,
    NoticeConflict,
    RunNoticeFact,
    UnsupportedRecord,
    run_notice_id,
)

pytestmark = pytest.mark.usefixtures("bucket")


@pytest.fixture
def board(toolkit):
    return toolkit.notices


async def test_a_notice_written_by_hand(board, nc, namespace):
    kv = await raw(nc, namespace)
    notice_id = run_notice_id("/notify:told#0", "日本")
    key = stem(notice_id, agent="日本", endpoint="prod_acme")
    spec = {"v": 1, "run": "run-1", "step": "/notify:told#0", "addressee": "日本", "fact": FACT, "at": 1700000000000}
    revision = await kv.create(f"{key}.spec", json.dumps(spec, ensure_ascii=False).encode())
    there = board.at("prod_acme")
    read = await there.read(run="run-1", addressee="日本", notice_id=notice_id)
    assert (read.spec.at, read.spec.fact, read.consumed) == (1700000000000, RunNoticeFact("build", "ok"), None)
    assert read.spec_revision == revision
    again = {"run": "run-1", "step": spec["step"], "request_id": spec["step"], "addressee": "日本", "fact": FACT}
    assert not (await there.file(**again, at=spec["at"])).created
    status = {"v": 1, "consumedAt": 1700000000001, "by": "goal/7", "observedSpecRevision": revision}
    await kv.create(f"{key}.status", json.dumps(status).encode())
    (notice,) = await there.list(run="run-1", addressee="日本")
    assert (notice.consumed.by, notice.consumed.consumed_at) == ("goal/7", 1700000000001)
    with pytest.raises(AlreadyConsumed, match="goal/7"):
        await there.consume(run="run-1", addressee="日本", notice_id=notice_id, by="turn-1")


async def test_a_notice_read_by_hand(board, nc, namespace):
    fact = FACT | {"detail": {"n": 1.5, "ok": True, "why": "ü"}}
    (one,) = await filed(board, "q", at=17, fact=fact)
    await board.consume(run="run-1", addressee=AGENT, notice_id=one.notice_id, by="turn-1", at=18)
    kv = await raw(nc, namespace)
    spec = await kv.get(f"{stem(one.notice_id)}.spec")
    said = {"v": 1, "run": "run-1", "step": "/n#0", "addressee": AGENT, "fact": fact, "at": 17}
    assert json.loads(spec.value) == said
    status = await kv.get(f"{stem(one.notice_id)}.status")
    carried = {"v": 1, "consumedAt": 18, "by": "turn-1", "observedSpecRevision": spec.revision}
    assert json.loads(status.value) == carried


@pytest.mark.parametrize("half", ["spec", "status"])
@pytest.mark.parametrize(("value", "kind"), [(b"{}", CorruptRecord), (b'{"v":2}', UnsupportedRecord)])
async def test_what_cannot_be_read_is_never_left_out(board, nc, namespace, half, value, kind):
    (one,) = await filed(board, "q")
    kv = await raw(nc, namespace)
    key = f"{stem(one.notice_id)}.{half}"
    await kv.put(key, value)
    said = {"run": "run-1", "addressee": AGENT}
    for ask in (
        board.list(**said),
        board.pending(**said),
        board.list_run(run="run-1"),
        board.unconsumed_steps(run="run-1"),
        board.read(**said, notice_id=one.notice_id),
        board.consume(**said, notice_id=one.notice_id, by="turn-1"),
    ):
        with pytest.raises(kind) as caught:
            await ask
        assert (caught.value.bucket, caught.value.key) == (f"{namespace}-notices", key)


async def test_a_status_without_its_spec(board, nc, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.notice_store._SETTLING", 0.2)
    notice_id = run_notice_id("q", AGENT)
    status = {"v": 1, "consumedAt": 1, "by": "turn-1", "observedSpecRevision": 1}
    await (await raw(nc, namespace)).put(f"{stem(notice_id)}.status", json.dumps(status).encode())
    for ask in (
        board.read(run="run-1", addressee=AGENT, notice_id=notice_id),
        board.list(run="run-1", addressee=AGENT),
        board.list_run(run="run-1"),
    ):
        with pytest.raises(CorruptRecord, match="spec"):
            await ask


async def test_a_spec_that_is_seen_after_its_status(proxy, server, namespace, nc):
    """A stale read: it is read again."""
    async with toolkit_of(proxy.url, namespace) as toolkit:
        notice_id = run_notice_id("q", AGENT)
        kv = await raw(nc, namespace)
        status = {"v": 1, "consumedAt": 1, "by": "turn-1", "observedSpecRevision": 2}
        await kv.put(f"{stem(notice_id)}.status", json.dumps(status).encode())
        looks = proxy.observe(lambda m: m.subject.startswith("$JS.API.STREAM.MSG.GET") and b".spec" in m.payload)
        task = asyncio.create_task(toolkit.notices.read(run="run-1", addressee=AGENT, notice_id=notice_id))
        await looks.hit()
        await filed(toolkit.notices, "q")
        assert (await task).consumed.by == "turn-1"


async def test_a_status_that_runs_ahead_of_its_spec(board, nc, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.notice_store._SETTLING", 0.2)
    (one,) = await filed(board, "q")
    status = {"v": 1, "consumedAt": 1, "by": "turn-1", "observedSpecRevision": 99}
    await (await raw(nc, namespace)).put(f"{stem(one.notice_id)}.status", json.dumps(status).encode())
    with pytest.raises(CorruptRecord, match="later spec"):
        await board.read(run="run-1", addressee=AGENT, notice_id=one.notice_id)
    with pytest.raises(CorruptRecord, match="later spec"):
        await board.list(run="run-1", addressee=AGENT)


async def test_a_notice_that_was_deleted(board, nc, namespace):
    one, two = await filed(board, "a", "b")
    said = {"run": "run-1", "addressee": AGENT}
    kv = await raw(nc, namespace)
    await kv.delete(one.key)
    assert [n.notice_id for n in await board.list(**said)] == [two.notice_id]
    assert await board.read(**said, notice_id=one.notice_id) is None
    with pytest.raises(NoticeConflict) as caught:
        await filed(board, "a")
    assert caught.value.existing is None
    with pytest.raises(InvalidName, match="deleted by hand: no notice"):
        await board.consume(**said, notice_id=one.notice_id, by="turn-1")


@pytest.mark.parametrize("half", ["spec", "status"])
async def test_the_way_out_that_an_error_names(board, nc, namespace, half):
    """Of a record that does not read there is no good revision to go back to."""
    one, two = await filed(board, "a", "b")
    said = {"run": "run-1", "addressee": AGENT}
    kv = await raw(nc, namespace)
    await kv.put(f"{stem(one.notice_id)}.{half}", b"garbage")
    with pytest.raises(CorruptRecord) as caught:
        await board.list(**said)
    text = str(caught.value)
    assert "executed" not in text
    assert "history" not in text
    bucket, key = re.search("`nats kv del (.*?) (.*?)`", text).groups()
    assert bucket == f"{namespace}-notices"
    await kv.delete(key)
    for ask in (board.list(**said), board.list_run(run="run-1"), board.pending(**said)):
        assert [n.notice_id for n in await ask] == [two.notice_id]
    assert await board.unconsumed_steps(run="run-1") == {"/n#0"}


async def test_a_consumption_that_was_deleted(board, nc, namespace):
    """That it was carried is known, and by whom is not: neither pending nor left out."""
    (one,) = await filed(board, "a")
    said = {"run": "run-1", "addressee": AGENT}
    await board.consume(**said, notice_id=one.notice_id, by="turn-1")
    await (await raw(nc, namespace)).delete(f"{stem(one.notice_id)}.status")
    for ask in (board.pending(**said), board.consume(**said, notice_id=one.notice_id, by="turn-2")):
        with pytest.raises(CorruptRecord, match="marker"):
            await ask
