"""What the records come to: what waits, what cannot be read, what is missing and what is left over."""

from __future__ import annotations

import json

import pytest
from support import LEASE, bucket_of, newest, put, record_of, toolkit_of

from natsreceipts import AmbiguousCall, RunNoticeFact, examine
from natsreceipts._jetstream import JetStreamBucket, JetStreamObjects, opened

BIG = "x" * 5000


async def value():
    return "done"


async def big():
    return BIG


async def lost():
    raise TimeoutError("no answer")


async def state(nc, namespace):
    infos = [info for info in await nc.jetstream().streams_info() if namespace in info.config.name]
    return sorted((info.config.name, info.state.messages, info.state.last_seq, info.state.bytes) for info in infos)


@pytest.fixture
def looked(diagnose, nc, namespace):
    """Examine, and see that nothing was written or removed by it."""

    async def look(**settings):
        before = await state(nc, namespace)
        found = await diagnose(**settings)
        assert await state(nc, namespace) == before
        return found

    return look


async def test_what_waits_for_a_person(toolkit, looked, namespace, nc):
    run = toolkit.run("acme", "r")
    for number in range(22):
        with pytest.raises(TimeoutError):
            await run.execute("pay", {"n": number}, lost)
    first = run.key("pay", {"n": 0}).kv_key
    finding = (await looked())["receipts, ambiguous"]
    assert finding.level == "warning"
    assert finding.text.startswith(f"22 wait for a person, {first} since ")
    assert "for ever" in finding.text
    assert first in finding.fix
    assert len(finding.keys) == 20
    assert finding.keys[0] == first


@pytest.mark.parametrize(("retention", "level"), [(30 * 86_400, "warning"), (3000, "warning"), (300, "error")])
async def test_the_time_that_is_left(server, namespace, bucket, looked, nc, monkeypatch, retention, level):
    async with toolkit_of(server.url, namespace, retention=retention) as toolkit:
        with pytest.raises(TimeoutError):
            await toolkit.run("acme", "r").execute("pay", {}, lost)
    if level == "error":  # as if it had been there for nearly as long as it is kept
        clock = JetStreamBucket.clock

        async def late(self, *, timeout):
            told = await clock(self, timeout=timeout)
            return told._replace(now=told.now + 280 * 10**9)

        monkeypatch.setattr(JetStreamBucket, "clock", late)
    finding = (await looked())["receipts, ambiguous"]
    assert finding.level == level
    assert "expires in" in finding.text


async def test_a_running_call_whose_lease_is_over(toolkit, looked, namespace, nc):
    run = toolkit.run("acme", "r")
    over, live = run.key("make", {}), run.key("make", {"n": 1})
    await put(nc, namespace, over, record_of(over, leaseMs=1), last=0)
    await put(nc, namespace, live, record_of(live, leaseMs=int(LEASE * 1e5)), last=0)
    finding = (await looked())["receipts, lease over"]
    assert (finding.level, finding.keys) == ("warning", (over.kv_key,))
    assert "--stuck" in finding.fix


async def test_what_cannot_be_read(toolkit, looked, namespace, nc):
    run = toolkit.run("acme", "r")
    broken, newer, gone = (run.key("send", {"n": n}) for n in range(3))
    for key in (broken, newer, gone):
        await run.execute("send", {"n": int(key == newer) + 2 * int(key == gone)}, value)
    await put(nc, namespace, broken, b"oops")
    await put(nc, namespace, newer, record_of(newer, v=2))
    await put(nc, namespace, gone, b"", headers={"KV-Operation": "DEL"})
    await put(nc, namespace, "foreign", b"{}")
    found = await looked()
    assert found["receipts, corrupt"].keys == (broken.kv_key, "foreign")
    assert found["receipts, corrupt"].level == "error"
    assert "docs/operations.md" in found["receipts, corrupt"].fix
    assert found["receipts, unsupported"].keys == (newer.kv_key,)
    assert "pip install -U" in found["receipts, unsupported"].fix
    assert (found["receipts, erased"].level, found["receipts, erased"].keys) == ("warning", (gone.kv_key,))


@pytest.fixture
async def large(server, namespace, bucket):
    async with toolkit_of(server.url, namespace, inline_limit=1024) as connected:
        yield connected


async def test_a_payload_that_is_missing(large, looked, namespace, nc):
    run = large.run("acme", "r")
    for number in range(3):
        await run.execute("make", {"n": number}, big)
    assert "3 in the object store" in (await looked())["receipts, payloads"].text
    key = run.key("make", {"n": 1})
    record = json.loads((await newest(nc, namespace, key)).data)
    store = await nc.jetstream().object_store(f"{namespace}-receipt-payloads")
    await store.delete(record["result"]["object"]["name"])
    finding = (await looked())["receipts, payloads"]
    assert (finding.level, finding.keys) == ("error", (key.kv_key,))
    assert f"OBJ_{namespace}-receipt-payloads" in finding.fix


async def test_payloads_that_no_record_names(large, looked, namespace, nc, server, monkeypatch):
    run = large.run("acme", "r")
    await run.execute("make", {}, big)
    kept = run.key("make", {"kept": True})
    async with run.call("make", {"kept": True}) as call:
        call.result = BIG
    record = json.loads((await newest(nc, namespace, kept)).data)
    await put(nc, namespace, kept, {**record, "result": {"json": 1}})  # an older revision still names it
    left = f"{run.key('make', {'n': 1}).kv_key}.{'0' * 24}.0"
    async with opened(server.url, connect_timeout=5.0, options={}) as link:
        await JetStreamObjects(link, f"{namespace}-receipt-payloads").put(left, b"left", timeout=5.0)
    await nc.jetstream().publish(f"$O.{namespace}-receipt-payloads.C.unfinished", b"half of it")
    found = await looked()
    assert "3 payloads; each" in found["payloads, orphans"].text  # nothing is an hour old
    monkeypatch.setattr("natsreceipts.doctor.orphans._OLD", -60.0)
    found = await looked()
    assert found["payloads, orphans"].keys == (left,)
    assert found["payloads, orphans"].level == "ok"
    assert "nats object rm" in found["payloads, orphans"].fix
    assert found["payloads, unfinished"].keys == ("unfinished",)
    assert not found.levels("error")


async def test_sessions_that_were_restored_apart(toolkit, looked, namespace, nc):
    log, run = toolkit.sessions.open("acme", "chat"), toolkit.run("acme", "r")
    call = {"type": "toolCall", "id": "c", "name": "send", "arguments": {}}
    await log.append({"role": "user", "content": "hi"})
    await log.append({"role": "assistant", "content": [call]}, run=run)
    await log.wake(guarded={"send": lambda arguments: arguments})
    found = await looked()
    assert found["sessions against receipts"].level == found["receipts against sessions"].level == "ok"
    stream = f"{namespace}-SESSIONS"
    config = (await nc.jetstream().stream_info(stream)).config
    await nc.jetstream().delete_stream(stream)
    await nc.jetstream().add_stream(config)
    finding = (await looked())["sessions against receipts"]
    assert finding.level == "error"
    assert finding.keys == (run.key("send", {}).kv_key,)
    assert "CallWithdrawn" in finding.text


async def test_receipts_that_were_restored_apart(toolkit, looked, namespace, nc):
    log, run = toolkit.sessions.open("acme", "chat"), toolkit.run("acme", "r")
    await run.execute("send", {}, value)
    call = {"type": "toolCall", "id": "c", "name": "send", "arguments": {}}
    await log.append({"role": "assistant", "content": [call]}, run=run)
    await log.wake(guarded={"send": lambda arguments: arguments})
    stream = f"KV_{bucket_of(namespace)}"
    config = (await nc.jetstream().stream_info(stream)).config
    await nc.jetstream().delete_stream(stream)
    await nc.jetstream().add_stream(config)
    finding = (await looked())["receipts against sessions"]
    assert finding.level == "error"
    assert finding.keys == (run.key("send", {}).kv_key,)


async def test_notices_and_entries_that_cannot_be_read(toolkit, looked, namespace, nc):
    js, fact = nc.jetstream(), RunNoticeFact("build", "approved")
    for number in range(3):
        filed = await toolkit.notices.file(run="r", step="s", request_id=str(number), addressee="a", fact=fact)
    await toolkit.notices.consume(run="r", addressee="a", notice_id=filed.notice_id, by="t")
    found = await looked()
    assert found["notices, readable"].text == "4 records read, 2 notices carried by no turn yet"
    bucket = f"$KV.{namespace}-notices"
    await js.publish(f"{bucket}.{filed.key}", b"oops")
    alone = "notice.local.r.a.b.status"
    status = {"v": 1, "consumedAt": 1, "by": "t", "observedSpecRevision": 1}
    await js.publish(f"{bucket}.{alone}", json.dumps(status).encode())
    await js.publish(f"{bucket}.mine", b"{}")
    log = toolkit.sessions.open("acme", "chat")
    await log.append({"role": "user", "content": "hi"})
    await js.publish(f"{namespace}-sessions.acme.chat", b"oops")
    await js.publish(f"{namespace}-sessions.acme.chat", json.dumps({"v": 7}).encode())
    found = await looked()
    assert set(found["notices, corrupt"].keys) == {filed.key, alone}
    assert found["notices, strange keys"].keys == ("mine",)
    assert found["sessions, corrupt"].keys == ("acme.chat at 2",)
    assert found["sessions, unsupported"].keys == ("acme.chat at 3",)


async def test_more_than_one_answer_holds(toolkit, looked, namespace, nc):
    run, js = toolkit.run("acme", "r"), nc.jetstream()
    keys = [run.key("send", {"n": n}) for n in range(1500)]
    for key in keys:
        record = record_of(key, status="completed", result={"json": 1})
        await js.publish_async(f"$KV.{bucket_of(namespace)}.{key.kv_key}", json.dumps(record).encode())
    await js.publish_async_completed()
    found = await looked()
    assert found["receipts, readable"].text == "1,500 read"
    some = await looked(most=1000)
    assert some["receipts, readable"].text == "1,000 read"
    assert some["bucket receipts, bounded"].level == "unverified"
    assert "1,000 of 1,500" in some["bucket receipts, bounded"].text


async def test_direct_gets_are_off(toolkit, looked, namespace, nc):
    await toolkit.run("acme", "r").execute("send", {}, value)
    config = (await nc.jetstream().stream_info(f"KV_{bucket_of(namespace)}")).config
    config.allow_direct = False
    await nc.jetstream().update_stream(config)
    found = await looked()
    assert found["receipts, readable"].text == "1 read"
    assert found["bucket receipts, permissions"].level == "ok"


async def test_it_looks_from_before_a_call_is_settled(toolkit, namespace, server):
    """It is no matter to the calls that go on meanwhile."""
    run = toolkit.run("acme", "r")
    async with run.call("send", {}) as call:
        levels = {f.check: f.level async for f in examine(server.url, namespace=namespace)}
        assert levels["receipts, lease over"] == "ok"
        call.result = 1
    with pytest.raises(TimeoutError):
        await run.execute("pay", {}, lost)
    with pytest.raises(AmbiguousCall):
        await run.execute("pay", {}, value)
