"""Reading receipts: get, list, history and watch show what stands, by any name of the key, and never write."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from contextlib import aclosing, asynccontextmanager

import pytest
from scenes import ambiguous_call, no_writes, stand
from support import Effect, bucket_of, client_of, newest, put, record_of, toolkit_of

from natsreceipts import CorruptRecord, InvalidName, ReceiptErased, Unreachable, connect
from natsreceipts.embedded import embedded

ARGS = {"to": "a@b.c"}
NAMES = [
    ("acme", "run-1", "send"),
    ("Zürich & co", "run/1", "send it"),
    ("a.b", "*", ">"),
    ("acme", "x" * 181, "é" * 99),
    ("=H", "=", "%"),
    ("日本", "r\tn", " "),
]


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


@pytest.mark.parametrize("names", NAMES, ids=range(len(NAMES)))
async def test_by_either_name_of_the_key(toolkit, nc, namespace, names):
    tenant, run_name, tool = names
    run = toolkit.run(tenant, run_name)
    key = run.key(tool, ARGS)
    for name in (key, key.kv_key):
        assert await toolkit.receipts.get(name) is None
        assert await toolkit.receipts.history(name) == []
    await run.execute(tool, ARGS, Effect({"id": 1}))
    async with no_writes(nc, namespace):
        one, other = await toolkit.receipts.get(key), await toolkit.receipts.get(key.kv_key)
        assert one == other
        assert (one.key, one.kv_key, one.status, one.result) == (key, key.kv_key, "completed", {"id": 1})
        assert await toolkit.receipts.history(key) == await toolkit.receipts.history(key.kv_key)
        assert [r.status for r in await toolkit.receipts.history(key)] == ["running", "completed"]
        for filters in ({}, {"tenant": tenant}, {"run": run_name}, {"tool": tool}, {"tenant": tenant, "tool": tool}):
            assert [r async for r in toolkit.receipts.list(**filters)] == [one]


async def test_what_a_receipt_says(toolkit, run, key, nc, namespace):
    before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=1)
    await run.execute("send", ARGS, Effect("x"), effect="resumable", store_args=True, lease=7.5)
    receipt = await toolkit.receipts.get(key)
    message = await newest(nc, namespace, key)
    assert receipt.revision == message.seq
    assert receipt.updated.timestamp() == pytest.approx(message.time.timestamp(), abs=0.001)
    assert before < receipt.updated < dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
    assert (receipt.effect, receipt.attempts, receipt.lease, receipt.args) == ("resumable", 1, 7.5, ARGS)
    assert (receipt.large, receipt.error, receipt.resolved, receipt.steps) == (False, None, None, ())
    assert "/" in receipt.worker


@pytest.mark.parametrize("status", ["running", "ambiguous", "failed", "not applied", "completed", "withdrawn"])
async def test_every_status_is_shown_as_it_stands(toolkit, run, key, nc, namespace, status):
    """Also a running one whose lease is over: reading judges nobody."""
    revision = await stand(nc, namespace, key, status, leaseMs=1)
    await asyncio.sleep(0.01)
    async with no_writes(nc, namespace):
        receipt = await toolkit.receipts.get(key)
        assert receipt.status == ("failed" if status == "not applied" else status)
        assert receipt.revision == revision
        assert [r async for r in toolkit.receipts.list()] == [receipt]
        assert await toolkit.receipts.history(key) == [receipt]
        async with aclosing(toolkit.receipts.watch()) as watching:
            assert await anext(watching) == receipt


@pytest.mark.parametrize("bad", ["", "a", "a.b.c.d", "a.b.c." + "0" * 63, "a.b.c." + "G" * 64, "*.*.*.*", "é.b.c.d"])
async def test_keys_that_cannot_be(toolkit, bad):
    for read in (toolkit.receipts.get, toolkit.receipts.history):
        with pytest.raises(InvalidName):
            await read(bad)


async def test_names_that_cannot_be_listed(toolkit):
    for filters in ({"tenant": ""}, {"run": "\ud800"}, {"tool": ""}):
        with pytest.raises(InvalidName):
            _ = [r async for r in toolkit.receipts.list(**filters)]
        with pytest.raises(InvalidName):
            await anext(toolkit.receipts.watch(**filters))


async def test_wildcards_in_names_match_nothing_else(toolkit):
    await toolkit.run("acme", "run-1").execute("send", ARGS, Effect())
    for filters in ({"tenant": "*"}, {"run": ">"}, {"tool": "*"}, {"tenant": "acm*"}):
        assert [r async for r in toolkit.receipts.list(**filters)] == []


async def test_filters(toolkit, nc, namespace):
    keys = {}
    for tenant in ("a", "b"):
        for run_name in ("r1", "r2"):
            for tool, status in (("send", "completed"), ("pay", "ambiguous"), ("put", "running")):
                key = toolkit.run(tenant, run_name).key(tool, ARGS)
                keys[tenant, run_name, tool] = key
                await stand(nc, namespace, key, status)

    async def found(**filters):
        return {(r.key.tenant, r.key.run, r.key.tool) async for r in toolkit.receipts.list(**filters)}

    def those(check):
        return {names for names in keys if check(*names)}

    assert await found() == set(keys)
    assert await found(tenant="a") == those(lambda t, r, n: t == "a")
    assert await found(run="r2") == those(lambda t, r, n: r == "r2")
    assert await found(tool="pay") == those(lambda t, r, n: n == "pay")
    assert await found(tenant="b", run="r1", tool="put") == {("b", "r1", "put")}
    assert await found(status="ambiguous") == those(lambda t, r, n: n == "pay")
    assert await found(tenant="a", status="running") == those(lambda t, r, n: (t, n) == ("a", "put"))
    assert await found(status="failed") == await found(tenant="c") == set()
    listed = [r.kv_key async for r in toolkit.receipts.list()]
    assert listed == sorted(listed)


async def test_erased_receipts(toolkit, run, key, nc, namespace):
    await run.execute("send", ARGS, Effect())
    await run.execute("send", [2], Effect())
    await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    async with no_writes(nc, namespace):
        with pytest.raises(ReceiptErased):
            await toolkit.receipts.get(key)
        assert [r.key async for r in toolkit.receipts.list()] == [run.key("send", [2])]
        assert [r.status for r in await toolkit.receipts.history(key)] == ["running", "completed"]
        async with aclosing(toolkit.receipts.watch()) as watching:
            assert (await anext(watching)).key == run.key("send", [2])


async def test_corrupt_receipts(toolkit, key, nc, namespace):
    await put(nc, namespace, key, b"no JSON")
    async with no_writes(nc, namespace):
        for read in (toolkit.receipts.get, toolkit.receipts.history):
            with pytest.raises(CorruptRecord):
                await read(key)
        with pytest.raises(CorruptRecord):
            _ = [r async for r in toolkit.receipts.list()]
        with pytest.raises(CorruptRecord):
            await anext(toolkit.receipts.watch())


async def test_a_long_history(toolkit, key, nc, namespace):
    for n in range(20):
        await stand(nc, namespace, key, "running", attempts=n + 1)
    history = await toolkit.receipts.history(key)
    assert [r.attempts for r in history] == list(range(13, 21))  # the bucket keeps 8
    assert history == sorted(history, key=lambda r: r.revision)
    assert [r.updated for r in history] == sorted(r.updated for r in history)


async def test_a_history_of_more_than_a_page(server, namespace, bucket, nc):
    async with toolkit_of(server.url, namespace, history=64) as toolkit:
        key = toolkit.run("acme", "run-1").key("send", ARGS)
        for n in range(70):
            await stand(nc, namespace, key, "running", attempts=n + 1, args={"json": "x" * 60_000})
        history = await toolkit.receipts.history(key)
        assert [r.attempts for r in history] == list(range(7, 71))


async def fill(nc, namespace, run, count, **fields):
    """Many completed receipts, written at once."""
    subject = f"$KV.{bucket_of(namespace)}."
    keys = [run.key("send", [n]) for n in range(count)]
    for key in keys:
        fields = {"status": "completed", "result": {"json": 1}} | fields
        await nc.publish(subject + key.kv_key, json.dumps(record_of(key, **fields)).encode())
    marker = await put(nc, namespace, run.key("fill", []), b"", headers={"KV-Operation": "DEL"})  # the last one is in
    assert marker > count
    return keys


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2600])
async def test_many_receipts(toolkit, run, nc, namespace, count):
    keys = await fill(nc, namespace, run, count)
    await put(nc, namespace, keys[7], b"", headers={"KV-Operation": "DEL"})
    await stand(nc, namespace, keys[9], "ambiguous")
    async with no_writes(nc, namespace):
        listed = [r.kv_key async for r in toolkit.receipts.list()]
        assert listed == sorted(key.kv_key for key in keys if key is not keys[7])
        assert [r.key async for r in toolkit.receipts.list(status="ambiguous")] == [keys[9]]
        assert [r async for r in toolkit.receipts.list(tool="other")] == []
        async with aclosing(toolkit.receipts.watch()) as watching:
            watched = {(await anext(watching)).key for _ in range(count - 1)}
        assert watched == set(keys) - {keys[7]}


async def test_large_records_are_listed_whole():
    """More than the server puts into one batch, of which there is nothing to be seen but a count of what is left."""
    async with (
        embedded(config="max_pending: 2000000") as server,
        client_of(server.url) as nc,
        toolkit_of(server.url, "large") as toolkit,
    ):
        run = toolkit.run("acme", "run-1")
        keys = await fill(nc, "large", run, 50, result={"json": "x" * 100_000})
        assert [r.kv_key async for r in toolkit.receipts.list()] == sorted(key.kv_key for key in keys)
        async with aclosing(toolkit.receipts.watch()) as watching:
            assert {(await anext(watching)).kv_key for _ in keys} == {key.kv_key for key in keys}
        async with run:
            for n in (0, 49):
                assert await run.execute("send", [n], Effect("wrong")) == "x" * 100_000


async def test_a_bucket_without_direct_gets(server, namespace, nc, bucket):
    count = 3
    async with toolkit_of(server.url, namespace):
        pass
    js = nc.jetstream()
    config = (await js.stream_info(f"KV_{bucket}")).config
    config.allow_direct = False
    await js.update_stream(config)
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        keys = [run.key("send", [n]) for n in range(count)]
        for key in keys:
            await run.execute("send", [keys.index(key)], Effect())
        assert [r.kv_key async for r in toolkit.receipts.list()] == sorted(key.kv_key for key in keys)
        assert [r.status for r in await toolkit.receipts.history(keys[0])] == ["running", "completed"]
        async with run:
            assert await run.execute("send", [0], Effect("wrong")) == "done"


async def test_reading_when_nobody_answers(own_server, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.receipts._READ_PATIENCE", 0.3)
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", ARGS, Effect())
        await own_server.stop()
        with pytest.raises(Unreachable):
            await toolkit.receipts.get(run.key("send", ARGS))
        with pytest.raises(Unreachable):
            await toolkit.receipts.history(run.key("send", ARGS))
        with pytest.raises(Unreachable):
            _ = [r async for r in toolkit.receipts.list()]


# watch


@asynccontextmanager
async def watched(toolkit, **filters):
    """The receipts that a watch gives, in a queue."""
    seen = asyncio.Queue()

    async def watch():
        async with aclosing(toolkit.receipts.watch(**filters)) as receipts:
            async for receipt in receipts:
                seen.put_nowait(receipt)

    task = asyncio.create_task(watch())

    async def take(n, timeout=30):
        async with asyncio.timeout(timeout):
            return [await seen.get() for _ in range(n)]

    take.queue = seen
    try:
        yield take
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def test_current_state_first_and_then_every_revision(toolkit, run, nc, namespace):
    for n in range(3):
        await run.execute("send", [n], Effect(n))
    async with no_writes(nc, namespace), watched(toolkit) as take:
        first = await take(3)
        assert take.queue.empty()
    assert {r.result for r in first} == {0, 1, 2}
    assert {r.status for r in first} == {"completed"}
    async with watched(toolkit) as take:
        await take(3)
        revision = await ambiguous_call(run, ARGS)
        await toolkit.receipts.resolve(run.key("send", ARGS), revision=revision, not_applied=True, by="a", reason="b")
        await run.execute("send", ARGS, Effect("second"))
        await run.execute("send", [4], Effect(4))
        seen = await take(7)
        assert [r.status for r in seen] == [
            *("running", "ambiguous", "failed", "running", "completed"),
            *("running", "completed"),
        ]
        revisions = [r.revision for r in seen]
        assert revisions == list(range(revisions[0], revisions[0] + 7))
        assert take.queue.empty()


async def test_a_watch_with_filters(toolkit):
    await toolkit.run("acme", "before").execute("send", ARGS, Effect())
    async with watched(toolkit, tenant="acme", tool="send") as take:
        await take(1)  # from here on it sees every revision
        for tenant in ("other", "acme"):
            for tool in ("pay", "send"):
                await toolkit.run(tenant, "r").execute(tool, ARGS, Effect())
        seen = await take(2)
    assert [(r.key.tenant, r.key.tool, r.status) for r in seen] == [
        ("acme", "send", "running"),
        ("acme", "send", "completed"),
    ]


async def test_a_burst_is_watched_whole(toolkit, run, nc, namespace):
    await run.execute("send", ["before"], Effect())
    async with watched(toolkit) as take:
        await take(1)  # from here on it sees every revision
        await asyncio.gather(*(run.execute("send", [n], Effect(n)) for n in range(700)))
        seen = await take(1400)
    assert [r.revision for r in seen] == sorted(r.revision for r in seen)
    assert len({r.revision for r in seen}) == 1400
    assert {r.result for r in seen if r.status == "completed"} == set(range(700))


async def test_a_slow_watcher_misses_only_what_the_history_drops(toolkit, run, key, nc, namespace):
    async with aclosing(toolkit.receipts.watch()) as receipts:
        await stand(nc, namespace, key, "running", attempts=1)
        assert (await anext(receipts)).attempts == 1
        for n in range(2, 31):
            await stand(nc, namespace, key, "running", attempts=n)
        seen = [(await anext(receipts)).attempts for _ in range(8)]
        assert seen == list(range(23, 31))


async def test_a_watch_lives_through_a_restart(own_server, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.receipts._WATCH_EVERY", 0.3)
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", [0], Effect(0))
        async with watched(toolkit) as take:
            assert [r.result for r in await take(1)] == [0]
            await own_server.restart()
            async with connect(own_server.url, namespace=namespace, lease=6.0) as other:
                await other.run("acme", "run-1").execute("send", [1], Effect(1))
                seen = await take(2)
                assert [r.status for r in seen] == ["running", "completed"]
                await own_server.restart()
            async with connect(own_server.url, namespace=namespace, lease=6.0) as other:
                await other.run("acme", "run-1").execute("send", [2], Effect(2))
                assert [r.result for r in await take(2)] == [None, 2]


async def test_a_watch_tells_of_what_is_deleted_and_of_silence(proxy, namespace, bucket, nc, run, monkeypatch):
    monkeypatch.setattr("natsreceipts.receipts._WATCH_EVERY", 0.3)
    await run.execute("send", [0], Effect(0))
    said = []

    def erased(key, marker):
        said.append((key, "erased", marker.revision))

    async with toolkit_of(proxy.url, namespace) as far:
        watching = far.receipts.watch(erased=erased, unreachable=lambda error: said.append(type(error)))
        async with aclosing(watching), asyncio.timeout(60):
            await anext(watching)
            ack = await put(nc, namespace, run.key("send", [0]), b"", headers={"KV-Operation": "DEL"})
            await run.execute("send", [1], Effect(1))
            assert [(await anext(watching)).status for _ in range(2)] == ["running", "completed"]
            assert said == [(run.key("send", [0]).kv_key, "erased", ack)]
            await proxy.refuse()
            await proxy.cut()
            more = asyncio.ensure_future(anext(watching))
            while Unreachable not in said:
                await asyncio.sleep(0.05)
            await proxy.accept()
            while said[-1] is not type(None):
                await asyncio.sleep(0.05)
            await run.execute("send", [2], Effect(2))
            assert (await more).status == "running"
    assert said[1:] == [Unreachable, type(None)]  # each once


async def test_a_watch_lives_through_a_connection_that_is_cut(proxy, namespace, bucket, nc, run, monkeypatch):
    monkeypatch.setattr("natsreceipts.receipts._WATCH_EVERY", 0.3)
    await run.execute("send", [0], Effect(0))
    async with toolkit_of(proxy.url, namespace) as far, watched(far) as take:
        await take(1)  # from here on it sees every revision
        await run.execute("send", [1], Effect(1))
        await take(2)
        await proxy.refuse()
        await proxy.cut()
        await run.execute("send", [2], Effect(2))
        await proxy.accept()
        assert [r.result for r in await take(2)] == [None, 2]


async def test_a_watch_that_starts_while_the_server_is_away(own_server, namespace):
    """It waits that out, as later."""
    async with toolkit_of(own_server.url, namespace) as toolkit:
        await toolkit.run("acme", "run-1").execute("send", [0], Effect(0))
        await own_server.stop()
        async with watched(toolkit) as take:
            await asyncio.sleep(0.05)
            await own_server.restart()
            assert [r.result for r in await take(1)] == [0]


async def test_a_watch_that_is_left_early(toolkit, run, nc, namespace):
    """Its subscription goes with it, wherever it stands."""
    await run.execute("send", [0], Effect(0))
    async with aclosing(toolkit.receipts.watch()) as receipts:
        async for _ in receipts:
            break
    task = asyncio.create_task(anext(toolkit.receipts.watch(tenant="nobody")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_two_watches(toolkit, run):
    await run.execute("send", ["before"], Effect())
    async with watched(toolkit) as one, watched(toolkit) as other:
        assert await one(1) == await other(1)  # from here on they see every revision
        await run.execute("send", [0], Effect(0))
        assert await one(2) == await other(2)


async def test_none_of_them_writes(toolkit, run, key, nc, namespace):
    await run.execute("send", ARGS, Effect())
    await stand(nc, namespace, run.key("send", [2]), "running", leaseMs=1)
    async with no_writes(nc, namespace):
        for name in (key, key.kv_key, run.key("send", [2]), run.key("send", ["never"])):
            await toolkit.receipts.get(name)
            await toolkit.receipts.history(name)
        for status in ("running", "completed", None):
            _ = [r async for r in toolkit.receipts.list(status=status)]
        async with watched(toolkit) as take:
            await take(2)
