"""A run that is entered fetches its receipts once: replays cost nothing, and only completed is believed."""

from __future__ import annotations

import asyncio
import json

import pytest
from scenes import history, stand
from support import Effect, bucket_of, put, record_of, redelivery, toolkit_of

from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    CorruptRecord,
    ReceiptErased,
    UnsupportedRecord,
    tool,
)
from natsreceipts.run import delivered

ARGS = {"to": "a@b.c"}


@pytest.fixture
async def far(proxy, namespace, bucket):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        yield toolkit.run("acme", "run-1")


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


def requests(proxy):
    """What was asked of the server since `forget`: the verb or bucket of each request."""
    return [m.subject for m in proxy.published() if not m.subject.startswith("_INBOX")]


async def completed(nc, namespace, run, count, **fields):
    """Completed receipts, written at once; their keys."""
    keys = [run.key("send", [n]) for n in range(count)]
    for n, key in enumerate(keys):
        record = record_of(key, **({"status": "completed", "result": {"json": n}} | fields))
        await nc.publish(f"$KV.{bucket_of(namespace)}.{key.kv_key}", json.dumps(record).encode())
    await put(nc, namespace, "z.z.z." + "0" * 64, b"", headers={"KV-Operation": "DEL"})  # the last one is in
    return keys


async def test_one_request_and_then_none(far, proxy, nc, namespace):
    await completed(nc, namespace, far, 50)
    effect = Effect("wrong")
    proxy.forget()
    async with far:
        assert len(requests(proxy)) == 1
        assert requests(proxy)[0].startswith(f"$JS.API.DIRECT.GET.KV_{bucket_of(namespace)}")
        for n in range(50):
            assert await far.execute("send", [n], effect) == n
        for n in range(50):
            async with far.call("send", [n]) as call:
                assert (call.replayed, call.result, call.attempt) == (True, n, 1)
                assert call.revision > 0
        assert len(requests(proxy)) == 1
    assert effect.entered == 0


async def test_tools_replay_for_nothing_too(far, proxy, nc, namespace):
    ran = []

    @tool
    async def send(n):
        ran.append(n)
        return n

    async with far:
        assert [await send(n) for n in range(3)] == [0, 1, 2]
    proxy.forget()
    async with far:
        assert [await send(n) for n in range(3)] == [0, 1, 2]
        assert len(requests(proxy)) == 1
    assert ran == [0, 1, 2]


async def test_a_fresh_call_costs_its_two_writes(far, proxy, nc, namespace):
    await completed(nc, namespace, far, 3)
    async with far:
        proxy.forget()
        assert await far.execute("send", ["new"], Effect("new")) == "new"
        assert [subject[:4] for subject in requests(proxy)] == ["$KV."] * 2


async def test_an_empty_run(far, proxy):
    proxy.forget()
    async with far:
        assert len(requests(proxy)) == 1
        assert await far.execute("send", ARGS, Effect("x")) == "x"
        assert await far.execute("send", ARGS, Effect("wrong")) == "x"


async def test_other_runs_are_left_alone(far, server, namespace, nc, proxy):
    async with toolkit_of(server.url, namespace) as other:
        for tenant, run_name in (("acme", "run-10"), ("acme", "run"), ("other", "run-1")):
            await other.run(tenant, run_name).execute("send", ARGS, Effect("theirs"))
    async with far:
        assert await far.execute("send", ARGS, Effect("ours")) == "ours"


@pytest.mark.parametrize("names", [("a.b", "*"), ("é", ">"), ("x" * 200, "r/1")], ids=range(3))
async def test_runs_with_odd_names(proxy, namespace, bucket, nc, names):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        run = toolkit.run(*names)
        await run.execute("send", ARGS, Effect("x"))
        proxy.forget()
        async with run:
            assert await run.execute("send", ARGS, Effect("wrong")) == "x"
            assert len(requests(proxy)) == 1


@pytest.mark.parametrize("count", [1024, 1025])
async def test_a_run_of_many_keys(far, proxy, nc, namespace, count):
    """Over the limit it reads as it goes."""
    await completed(nc, namespace, far, count)
    proxy.forget()
    async with far:
        assert len(requests(proxy)) == 1
        for n in (0, count - 1):
            assert await far.execute("send", [n], Effect("wrong")) == n
        assert (len(requests(proxy)) == 1) == (count <= 1024)


async def test_large_records_are_read_as_they_are_needed(far, proxy, nc, namespace):
    small = await far.execute("send", ["small"], Effect("x" * 15_000))
    large = await far.execute("send", ["large"], Effect("x" * 17_000))
    moved = await far.execute("send", ["moved"], Effect("x" * 400_000))
    effect = Effect("wrong")
    async with far:
        proxy.forget()
        assert await far.execute("send", ["small"], effect) == small
        assert requests(proxy) == []
        assert await far.execute("send", ["large"], effect) == large
        assert requests(proxy) != []
        assert await far.execute("send", ["moved"], effect) == moved
    assert effect.entered == 0


async def test_a_run_of_many_large_records(far, proxy, nc, namespace):
    """One request is bounded in bytes: what does not come with it is read as it is needed."""
    await completed(nc, namespace, far, 600, result={"json": "x" * 14_000})
    proxy.forget()
    async with far:
        assert len(requests(proxy)) == 1
        known = len(far._known)
        assert 50 < known < 400
        effect = Effect("wrong")
        for n in (0, 300, 599):
            assert await far.execute("send", [n], effect) == "x" * 14_000
    assert effect.entered == 0


# What is not completed is decided from the leader


@pytest.mark.parametrize("door", ["execute", "call"])
@pytest.mark.parametrize("status", ["running", "ambiguous", "failed", "not applied", "withdrawn"])
async def test_a_prefetched_record_that_moved_on(far, key, nc, namespace, status, door):
    """Prefetched in any other state, completed since: the result is what counts."""
    await stand(nc, namespace, key, status, leaseMs=60_000)
    effect = Effect("wrong")
    async with far:
        await stand(nc, namespace, key, "completed")
        if door == "execute":
            assert await far.execute("send", ARGS, effect) == "theirs"
        else:
            async with far.call("send", ARGS) as call:
                assert (call.replayed, call.result) == (True, "theirs")
    assert effect.entered == 0


async def test_a_prefetched_record_that_is_ambiguous(far, key, nc, namespace):
    revision = await stand(nc, namespace, key, "ambiguous")
    async with far:
        with pytest.raises(AmbiguousCall) as caught:
            await far.execute("send", ARGS, Effect("wrong"))
        assert caught.value.revision == revision
        # Settled meanwhile: what was prefetched does not stand in the way.
        await stand(nc, namespace, key, "not applied")
        assert await far.execute("send", ARGS, Effect("second")) == "second"


async def test_a_prefetched_record_that_is_running(far, key, nc, namespace):
    await stand(nc, namespace, key, "running", leaseMs=60_000)
    async with far:
        with pytest.raises(CallInFlight):
            await far.execute("send", ARGS, Effect("wrong"), wait=0)
        task = asyncio.create_task(far.execute("send", ARGS, Effect("wrong")))
        await asyncio.sleep(0.05)
        await stand(nc, namespace, key, "completed")
        assert await task == "theirs"


@pytest.mark.parametrize("status", ["failed", "not applied"])
async def test_a_prefetched_record_that_failed(far, key, nc, namespace, status):
    await stand(nc, namespace, key, status, effect="idempotent", attempts=3)
    async with far:
        async with far.call("send", ARGS, effect="idempotent") as call:
            assert call.attempt == 4
            call.result = "fourth"
        assert await far.execute("send", ARGS, Effect("wrong"), effect="idempotent") == "fourth"
    assert (await history(nc, namespace, key))[-2:] == ["running", "completed"]


async def test_what_is_completed_within_the_run_is_replayed(far, key, nc, namespace):
    await stand(nc, namespace, key, "not applied")
    async with far:
        assert await far.execute("send", ARGS, Effect("second")) == "second"
        assert await far.execute("send", ARGS, Effect("wrong")) == "second"


async def test_an_erased_receipt(far, key, nc, namespace):
    await stand(nc, namespace, key, "completed")
    await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    async with far:
        with pytest.raises(ReceiptErased):
            await far.execute("send", ARGS, Effect("wrong"))


@pytest.mark.parametrize(("value", "error"), [(b"no JSON", CorruptRecord), (b'{"v":2}', UnsupportedRecord)])
async def test_an_unreadable_receipt_spoils_only_its_own_call(far, key, nc, namespace, value, error):
    await put(nc, namespace, key, value)
    effect = Effect("fine")
    async with far:
        assert await far.execute("send", ["other"], effect) == "fine"
        with pytest.raises(error):
            await far.execute("send", ARGS, effect)
        with pytest.raises(error):
            async with far.call("send", ARGS):
                effect.entered += 1
    assert effect.entered == 1


@pytest.mark.parametrize("door", ["execute", "call"])
async def test_an_unreadable_receipt_that_was_mended_meanwhile(far, key, nc, namespace, door):
    """As the error says: the last good revision was put back. What was prefetched is not believed."""
    await put(nc, namespace, key, b"no JSON")
    async with far:
        await stand(nc, namespace, key, "completed")
        if door == "execute":
            assert await far.execute("send", ARGS, Effect("wrong")) == "theirs"
        else:
            async with far.call("send", ARGS) as call:
                assert (call.replayed, call.result) == (True, "theirs")


@pytest.mark.parametrize("status", ["completed", "running"])
async def test_a_read_does_not_care(far, nc, namespace, key, status):
    await stand(nc, namespace, key, status)
    async with far:
        assert await far.execute("send", ARGS, Effect("read"), effect="read") == "read"


# Nothing is kept


async def test_nothing_is_kept_after_the_run_is_left(far, proxy, key, nc, namespace):
    await stand(nc, namespace, key, "completed")
    async with far:
        assert far._known
    assert far._known == {}
    proxy.forget()
    assert await far.execute("send", ARGS, Effect("wrong")) == "theirs"
    assert requests(proxy) != []


async def test_entered_again_it_fetches_again(far, proxy, key, nc, namespace):
    async with far:
        pass
    await stand(nc, namespace, key, "completed")
    async with far:
        proxy.forget()
        assert await far.execute("send", ARGS, Effect("wrong")) == "theirs"
        assert requests(proxy) == []


async def test_entered_twice_at_once(far, proxy, key, nc, namespace):
    """The inner one neither fetches again nor drops what the outer one has."""
    await stand(nc, namespace, key, "completed")
    proxy.forget()
    async with far:
        async with far:
            assert await far.execute("send", ARGS, Effect("wrong")) == "theirs"
        assert await far.execute("send", ARGS, Effect("wrong")) == "theirs"
        assert len(requests(proxy)) == 1


async def test_left_by_an_error_nothing_is_kept(far, key, nc, namespace):
    await stand(nc, namespace, key, "completed")
    with pytest.raises(KeyError):
        async with far:
            raise KeyError
    assert far._known == {}


async def test_cancelled_while_it_is_fetched(far, proxy, key, nc, namespace):
    await stand(nc, namespace, key, "completed")
    held = proxy.delay(lambda m: m.subject.startswith("$JS.API.DIRECT.GET"))

    async def turn():
        async with far:
            pass

    task = asyncio.create_task(turn())
    await held.hit()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert far._known == {}
    assert far._entered == 0
    async with far:
        assert await far.execute("send", ARGS, Effect("wrong")) == "theirs"


@pytest.mark.parametrize("fault", ["drop", "drop_answer", "cut_after_store"])
async def test_a_prefetch_that_is_lost_is_no_error(far, proxy, key, nc, namespace, fault, monkeypatch):
    monkeypatch.setattr("natsreceipts.fence._SHORTEST_TRY", 0.3)
    await stand(nc, namespace, key, "completed")
    getattr(proxy, fault)(lambda m: m.subject.startswith("$JS.API.DIRECT.GET"))
    async with far:
        assert await far.execute("send", ARGS, Effect("wrong")) == "theirs"
        assert await far.execute("send", [2], Effect("two")) == "two"


# Deliveries


async def test_a_first_delivery_fetches_nothing(far, proxy):
    token = delivered.set(1)
    try:
        proxy.forget()
        async with far:
            assert requests(proxy) == []
            assert await far.execute("send", ARGS, Effect("x")) == "x"
            assert [subject[:4] for subject in requests(proxy)] == ["$KV."] * 2
    finally:
        delivered.reset(token)


async def test_a_redelivery_fetches_once(far, proxy, server, namespace, bucket, nc):
    await completed(nc, namespace, far, 3)
    async with toolkit_of(server.url, namespace) as other, redelivery(other):
        proxy.forget()
        async with far:
            assert [await far.execute("send", [n], Effect("wrong")) for n in range(3)] == [0, 1, 2]
            assert len(requests(proxy)) == 1
            # What was not there when it was fetched is claimed at once.
            assert await far.execute("send", ["new"], Effect("new")) == "new"
            assert [subject[:4] for subject in requests(proxy)[1:]] == ["$KV."] * 2


@pytest.mark.parametrize("count", [3, 1100])
async def test_a_redelivery_reads_first(far, proxy, server, namespace, bucket, nc, count):
    """Without a run that is entered, or with one of too many keys: one read for each replay, and no refused claim."""
    await completed(nc, namespace, far, count)
    async with toolkit_of(server.url, namespace) as other, redelivery(other):
        if count > 1024:
            async with far:
                proxy.forget()
                assert [await far.execute("send", [n], Effect("wrong")) for n in range(3)] == [0, 1, 2]
        else:
            proxy.forget()
            assert [await far.execute("send", [n], Effect("wrong")) for n in range(3)] == [0, 1, 2]
    assert [subject.split(".")[2:4] for subject in requests(proxy)] == [["DIRECT", "GET"]] * 3


async def test_a_redelivery_decides_from_the_leader(far, server, namespace, bucket, nc, key):
    await stand(nc, namespace, key, "ambiguous")
    async with toolkit_of(server.url, namespace) as other, redelivery(other), far:
        await stand(nc, namespace, key, "not applied")
        assert await far.execute("send", ARGS, Effect("second")) == "second"


async def test_runs_at_once(server, namespace, bucket, nc):
    """Many tasks, each in the run of its own."""
    async with toolkit_of(server.url, namespace) as toolkit:

        @tool
        async def send(n):
            return [n, asyncio.current_task().get_name()]

        async def turn(name):
            async with toolkit.run("acme", name):
                return [await send(n) for n in range(5)]

        first = await asyncio.gather(*(asyncio.create_task(turn(f"r{n}"), name=f"t{n}") for n in range(8)))
        again = await asyncio.gather(*(asyncio.create_task(turn(f"r{n}"), name=f"u{n}") for n in range(8)))
        assert first == again
