"""Receipts in several buckets: a run is in one, whoever connects finds it there, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest
from support import Effect, toolkit_of

from natsreceipts import BucketReplaced, CallWithdrawn, InvalidSetting, NotProvisioned, connect
from natsreceipts._jetstream import partition_of
from natsreceipts.doctor import examine
from natsreceipts.provisioning import provision

ARGS = {"to": "a@b.c"}
N = 4
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "partitions.json").read_text("utf-8"))


def partitioned(server, namespace, **settings):
    return toolkit_of(server.url, namespace, **{"partitions": N} | settings)


async def buckets(nc, namespace):
    """The buckets of receipts that are there, with the number of keys in each."""
    found = {}
    for name in [f"{namespace}-receipts", *(f"{namespace}-receipts-{n}" for n in range(N + 1))]:
        try:
            info = await nc.jetstream().stream_info(f"KV_{name}")
        except Exception as error:
            assert "stream not found" in str(error)  # noqa: PT017
        else:
            found[name.removeprefix(f"{namespace}-")] = info.state.messages
    return found


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['key'][:20]} {case['partitions']}")
def test_which_one_holds_a_key(case):
    """As docs/wire.md says, for clients in other languages."""
    assert partition_of(case["key"], case["partitions"]) == case["partition"]


def test_all_of_them_are_used_and_a_run_is_in_one():
    assert {partition_of(f"acme.run-{n}.send.x", N) for n in range(100)} == set(range(N))
    assert len({partition_of(f"acme.run-1.{tool}.x", N) for tool in "abcdef"}) == 1


async def test_runs_are_spread_and_each_is_in_one(server, namespace, nc):
    async with partitioned(server, namespace) as toolkit:
        assert await buckets(nc, namespace) == dict.fromkeys((f"receipts-{n}" for n in range(N)), 0)
        for number in range(20):
            run = toolkit.run("acme", f"run-{number}")
            assert await run.execute("send", ARGS, Effect(number)) == number
            assert await run.execute("charge", ARGS, Effect(-number)) == -number
            key = run.key("send", ARGS)
            assert toolkit.receipts.bucket(key) == f"{namespace}-receipts-{partition_of(key.kv_key, N)}"
        counts = await buckets(nc, namespace)
        assert sum(counts.values()) == 80
        assert all(count and not count % 4 for count in counts.values()), counts
        listed = [receipt.kv_key async for receipt in toolkit.receipts.list()]
        assert len(listed) == 40
        assert listed == sorted(listed)
        assert [r.run async for r in _keys(toolkit, run="run-7")] == ["run-7", "run-7"]
        assert len([r async for r in toolkit.receipts.list(tool="charge")]) == 20


async def _keys(toolkit, **filters):
    async for receipt in toolkit.receipts.list(tenant="acme", **filters):
        yield receipt.key


async def test_whoever_connects_finds_them(server, namespace):
    """Also one that does not know of partitions, and one that would make what is missing."""
    async with partitioned(server, namespace) as toolkit:
        await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("first"))
    for settings in ({"partitions": None}, {"partitions": None, "provision": False}, {"provision": False}):
        async with partitioned(server, namespace, **settings) as toolkit:
            run = toolkit.run("acme", "run-1")
            assert await run.execute("send", ARGS, Effect("again")) == "first"
            async with run:
                assert await run.execute("send", ARGS, Effect("again")) == "first"


@pytest.mark.parametrize("made", [1, 3])
async def test_the_number_is_fixed(server, namespace, nc, made):
    async with partitioned(server, namespace, partitions=made):
        pass
    before = await buckets(nc, namespace)
    for making in (False, True):
        with pytest.raises(NotProvisioned, match=rf"has {made} partitions, and partitions=4 was asked for.*fixed"):
            async with partitioned(server, namespace, provision=making):
                pass
    with pytest.raises(NotProvisioned, match=f"has {made} partitions"):
        await provision(nc, namespace=namespace, partitions=N)
    assert await buckets(nc, namespace) == before


async def test_makers_that_race_end_with_one_number(server, namespace, nc):
    async def make(partitions):
        try:
            async with toolkit_of(server.url, namespace, partitions=partitions) as toolkit:
                return toolkit.receipts.bucket(toolkit.run("acme", "run-1").key("send", ARGS))
        except NotProvisioned as refused:
            assert "was asked for" in str(refused)  # noqa: PT017
            return None

    found = await asyncio.gather(*(make(partitions) for partitions in (None, 2, 3, 4, None, 2, 3, 4)))
    there = await buckets(nc, namespace)
    assert len({name for name in found if name is not None}) == 1
    assert all(name.removeprefix(f"{namespace}-") in there for name in found if name is not None)
    assert ("receipts" in there) != ("receipts-0" in there)
    assert found[0] is not None, "who does not say how many takes what there is"


@pytest.mark.parametrize("made", [1, N])
async def test_a_session_stream_that_is_gone_changes_no_number(server, namespace, nc, made):
    """The buckets say it too, so that whoever makes the stream again does not look for receipts elsewhere."""
    async with partitioned(server, namespace, partitions=made) as toolkit:
        await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("first"))
    await nc.jetstream().delete_stream(f"{namespace}-SESSIONS")
    with pytest.raises(NotProvisioned, match=rf"has {made} partitions, and partitions=2 was asked for"):
        async with partitioned(server, namespace, partitions=2):
            pass
    async with partitioned(server, namespace, partitions=None) as toolkit:
        assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("again")) == "first"


async def test_a_bucket_of_another_set_is_refused(server, namespace, nc):
    async with partitioned(server, namespace, partitions=2):
        pass
    name = f"KV_{namespace}-receipts-1"
    config = (await nc.jetstream().stream_info(name)).config
    await nc.jetstream().delete_stream(name)
    config.metadata = {"natsreceipts-partitions": "3"}
    await nc.jetstream().add_stream(config)
    with pytest.raises(NotProvisioned, match=r"receipts-1' is one of 3, and stream .* says that there are 2"):
        async with partitioned(server, namespace, partitions=None, provision=False):
            pass
    found = {finding.check: finding async for finding in examine(server.url, namespace=namespace)}
    assert found[f"bucket {namespace}-receipts-1, partitions"].level == "error"


@pytest.mark.parametrize("partitions", [0, -1, 65, 2.0, "4", True])
async def test_bad_numbers(server, namespace, partitions):
    with pytest.raises(InvalidSetting, match="partitions="):
        async with partitioned(server, namespace, partitions=partitions):
            pass


async def test_a_watch_sees_all_of_them(server, namespace):
    async with partitioned(server, namespace) as toolkit:
        for number in range(8):
            await toolkit.run("acme", f"run-{number}").execute("send", ARGS, Effect(number))
        async with aclosing(toolkit.receipts.watch(tenant="acme")) as watch, asyncio.timeout(60):
            standing = {receipt.key.run for receipt in [await anext(watch) for _ in range(8)]}
            assert standing == {f"run-{number}" for number in range(8)}
            for number in range(8, 16):
                await toolkit.run("acme", f"run-{number}").execute("send", ARGS, Effect(number))
            seen = {}
            while len(seen) < 8 or set(seen.values()) != {"completed"}:
                receipt = await anext(watch)
                assert seen.get(receipt.key.run) != "completed"
                seen[receipt.key.run] = receipt.status
        assert not [task for task in asyncio.all_tasks() if "anext" in repr(task.get_coro())]


async def test_one_that_is_made_again_is_noticed(server, namespace, nc):
    async with partitioned(server, namespace) as toolkit:
        for number in range(12):
            await toolkit.run("acme", f"run-{number}").execute("send", ARGS, Effect(number))
        key = toolkit.run("acme", "run-1").key("send", ARGS)
        name = f"KV_{toolkit.receipts.bucket(key)}"
        config = (await nc.jetstream().stream_info(name)).config
        await nc.jetstream().delete_stream(name)
        await nc.jetstream().add_stream(config)
        with pytest.raises(BucketReplaced):
            await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("again"))
        other = next(
            number
            for number in range(12)
            if partition_of(f"acme.run-{number}.send.x", N) != partition_of(key.kv_key, N)
        )
        assert await toolkit.run("acme", f"run-{other}").execute("send", ARGS, Effect("again")) == other


async def test_an_ambiguous_call_is_found_and_settled(server, namespace):
    async with partitioned(server, namespace) as toolkit:
        for number in range(6):
            with pytest.raises(ValueError, match="broken"):
                await toolkit.run("acme", f"run-{number}").execute("send", ARGS, Effect(ValueError("broken")))
        waiting = [receipt async for receipt in toolkit.receipts.list(status="ambiguous")]
        assert len(waiting) == 6
        for receipt in waiting:
            settled = await toolkit.receipts.resolve(
                receipt.kv_key, revision=receipt.revision, completed="by hand", by="ada", reason="looked"
            )
            assert [r.status for r in await toolkit.receipts.history(settled.kv_key)] == [
                "running",
                "ambiguous",
                "completed",
            ]
        assert await toolkit.run("acme", "run-3").execute("send", ARGS, Effect("again")) == "by hand"


async def test_a_session_is_woken(server, namespace):
    async with partitioned(server, namespace) as toolkit:
        for number in range(6):
            run = toolkit.run("acme", f"run-{number}")
            log = toolkit.sessions.open("acme", f"chat-{number}", dialect="openai-chat")
            call = {"id": "c1", "type": "function", "function": {"name": "send", "arguments": '{"to":"a@b.c"}'}}
            other = {"id": "c2", "type": "function", "function": {"name": "send", "arguments": '{"to":"x@y.z"}'}}
            await log.append({"role": "user", "content": "go"})
            await log.append({"role": "assistant", "content": None, "tool_calls": [call, other]}, run=run.run)
            await run.execute("send", {"to": "a@b.c"}, Effect("sent"))
            report = await log.wake(guarded={"send": lambda arguments: arguments})
            said = {recovered.tool_call_id: recovered for recovered in report.recovered}
            assert "sent" in str(said["c1"])
            assert "never_started" in str(said["c2"])
            with pytest.raises(CallWithdrawn):
                await run.execute("send", {"to": "x@y.z"}, Effect("late"))


async def test_doctor(server, namespace):
    async with partitioned(server, namespace) as toolkit:
        for number in range(6):
            with pytest.raises(ValueError, match="broken"):
                await toolkit.run("acme", f"run-{number}").execute("send", ARGS, Effect(ValueError("broken")))
    found = {finding.check: finding async for finding in examine(server.url, namespace=namespace)}
    assert "6 wait for a person" in found["receipts, ambiguous"].text
    assert found["receipts, readable"].text == "6 read"
    for number in range(N):
        assert found[f"bucket {namespace}-receipts-{number}, settings"].level == "ok"
    assert not [finding for finding in found.values() if finding.level == "error"]


async def test_without_partitions_nothing_is_said_of_them(server, namespace, nc):
    async with connect(server.url, namespace=namespace, provision=True):
        pass
    for stream in (f"KV_{namespace}-receipts", f"{namespace}-SESSIONS"):
        metadata = (await nc.jetstream().stream_info(stream)).config.metadata or {}
        assert not [name for name in metadata if not name.startswith("_nats")]
