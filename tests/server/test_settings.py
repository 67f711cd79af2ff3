"""How a bucket is made, what is refused of one that is there, and what is only warned of."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil

import nats
import pytest
from nats.js.api import StorageType, StreamConfig
from support import Effect, Message, bucket_of, stored, toolkit_of

from natsreceipts import (
    InvalidName,
    InvalidSetting,
    NotClaimed,
    NotProvisioned,
    NotRecorded,
    Unreachable,
    args_hash,
    connect,
    examine,
    hmac_digest,
)
from natsreceipts import provision as provision_stores
from natsreceipts.embedded import _candidates, free_port

ARGS = {"to": "a@b.c"}


async def made(nc, namespace, **settings):
    """A bucket with our settings, but for those given."""
    bucket = bucket_of(namespace)
    config = {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "max_msgs_per_subject": 8,
        "discard": "new",
        "allow_direct": True,
        "deny_delete": True,
        "deny_purge": True,
    }
    await nc.jetstream().add_stream(StreamConfig(**_named(config | settings, bucket)))


def _named(config, bucket):
    subjects = [subject.replace("other", f"{bucket}-other") for subject in config["subjects"]]
    return {**config, "subjects": subjects}


async def test_provisioning_makes_the_designed_bucket(server, namespace, nc, bucket):
    async with toolkit_of(server.url, namespace):
        info = await nc.request(f"$JS.API.STREAM.INFO.KV_{bucket}", b"")
    config = json.loads(info.data)["config"]
    designed = {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_msgs_per_subject": 8,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msg_size": -1,
        "num_replicas": 1,
        "allow_direct": True,
        "deny_delete": True,
        "deny_purge": True,
    }
    assert {name: config.get(name) for name in designed} == designed
    assert not config.get("allow_rollup_hdrs")
    assert not config.get("allow_msg_ttl")
    assert not config.get("discard_new_per_subject")
    assert not config.get("sealed")


async def test_the_bucket_without_a_namespace(own_server):
    async with connect(own_server.url, provision=True) as toolkit:
        run = toolkit.run("acme", "run-1")
        assert await run.execute("send", ARGS, Effect()) == "done"
    async with connect(own_server.url) as toolkit:
        assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("wrong")) == "done"
        client = await nats.connect(own_server.url)
        kv = await client.jetstream().key_value("receipts")
        assert await kv.keys() == [run.key("send", ARGS).kv_key]
        await client.close()


async def test_the_bucket_is_one_of_nats_pys(run, nc, bucket):
    for n in range(3):
        await run.execute("send", {"n": n}, Effect(n))
    kv = await nc.jetstream().key_value(bucket)
    key = run.key("send", {"n": 1}).kv_key
    entry = await kv.get(key)
    assert (entry.revision, entry.key) == (4, key)
    assert b'"status":"completed"' in entry.value
    assert [e.revision for e in await kv.history(key)] == [3, 4]
    assert sorted(await kv.keys()) == sorted(run.key("send", {"n": n}).kv_key for n in range(3))
    direct = await nc.request(f"$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}", b"")
    assert direct.data == entry.value
    assert direct.headers["Nats-Sequence"] == "4"


async def test_settings_of_a_new_bucket(server, namespace, nc, bucket):
    async with toolkit_of(server.url, namespace, history=20, retention=3600):
        config = (await nc.jetstream().stream_info(f"KV_{bucket}")).config
        assert config.max_msgs_per_subject == 20
        assert config.max_age == 3600


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"history": 7}, "keeps 7"), ({"retention": 59.0, "lease": 6.0}, "10 leases"), ({"history": 1}, "keeps 1 ")],
)
async def test_settings_that_break_the_promises_are_not_made(server, namespace, nc, settings, match):
    with pytest.raises(InvalidSetting, match=match):
        async with toolkit_of(server.url, namespace, **settings):
            raise AssertionError("connected")
    with pytest.raises(NotProvisioned):
        async with toolkit_of(server.url, namespace, provision=False):
            raise AssertionError("connected")


@pytest.mark.parametrize("history", [0, -1])
async def test_a_history_without_a_bound(server, namespace, bucket, history):
    """0 and -1 mean no limit to the server. Whatever is made of them, it keeps at least 8."""
    try:
        async with toolkit_of(server.url, namespace, history=history) as toolkit:
            run = toolkit.run("acme", "run-1")
            async with run.call("send", ARGS) as call:
                for _ in range(12):
                    await call.renew()
                call.result = 1
            assert await run.execute("send", ARGS, Effect("wrong")) == 1
    except InvalidSetting:
        pass


async def test_an_existing_bucket_is_never_changed(server, namespace, nc, bucket):
    await made(nc, namespace, max_msgs_per_subject=11, description="mine")
    async with toolkit_of(server.url, namespace, history=20, retention=3600):
        config = (await nc.jetstream().stream_info(f"KV_{bucket}")).config
        assert (config.max_msgs_per_subject, config.description, config.max_age or 0) == (11, "mine", 0)


async def test_a_missing_bucket_says_how_to_make_it(server, namespace):
    with pytest.raises(NotProvisioned, match="provision=True") as caught:
        async with toolkit_of(server.url, namespace, provision=False):
            raise AssertionError("connected")
    assert caught.value.bucket == bucket_of(namespace)
    assert bucket_of(namespace) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_msgs_per_subject": 7}, "keeps 7"),
        ({"max_msgs_per_subject": 1}, "keeps 1 "),
        ({"max_age": 59.0}, "59 s"),
        ({"retention": "interest"}, "retention 'interest'"),
        ({"discard_new_per_subject": True}, "discard_new_per_subject"),
        ({"no_ack": True}, "no_ack"),
        ({"subjects": ["$KV.other.>"]}, "must take all of"),
    ],
)
async def test_a_bucket_that_breaks_the_promises_is_refused(server, namespace, nc, bucket, settings, match):
    await made(nc, namespace, **settings)
    for provision in (False, True):
        with pytest.raises(NotProvisioned, match=match) as caught:
            async with toolkit_of(server.url, namespace, lease=6.0, provision=provision):
                raise AssertionError("connected")
        assert caught.value.bucket == bucket
        assert f"nats stream edit KV_{bucket} --" in str(caught.value)


async def test_a_horizon_of_ten_leases_will_do(server, namespace, nc, bucket):
    await made(nc, namespace, max_age=60.0)
    async with toolkit_of(server.url, namespace, lease=6.0) as toolkit:
        assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect()) == "done"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"storage": StorageType.MEMORY}, "memory"),
        ({"max_bytes": 10_000_000}, "max_bytes"),
        ({"max_msgs": 10_000}, "max_msgs"),
        ({"max_bytes": 10_000_000, "discard": "old"}, "discards old"),
        ({"deny_delete": False}, "deny_delete"),
        ({"deny_purge": False}, "deny_purge"),
        ({"allow_rollup_hdrs": True, "deny_purge": False}, "roll-up"),
        ({"allow_msg_ttl": True}, "TTL"),
        ({"allow_direct": False}, "direct gets"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_weaker_bucket_is_warned_of_and_used(server, namespace, nc, bucket, settings, word, caplog):
    await made(nc, namespace, **settings)
    with caplog.at_level(logging.WARNING, logger="natsreceipts"):
        async with toolkit_of(server.url, namespace, lease=60.0) as toolkit:
            said = [record.getMessage() for record in caplog.records]
            assert any(word in text and bucket in text for text in said)
            assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect()) == "done"


async def changed(nc, stream, **settings):
    """One that was made as it should be, and then changed."""
    js = nc.jetstream()
    config = (await js.stream_info(stream)).config
    await js.update_stream(config.evolve(**settings))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"allow_rollup_hdrs": False}, "refuses every payload"),
        ({"allow_direct": False}, "no payload can be read"),
        ({"max_msgs_per_subject": 4}, "parts of a payload"),
        ({"retention": "interest"}, "retention 'interest'"),
        ({"no_ack": True}, "no_ack"),
    ],
)
async def test_an_object_store_that_takes_no_payloads_is_refused(server, namespace, nc, bucket, settings, match):
    async with toolkit_of(server.url, namespace):
        pass
    await changed(nc, f"OBJ_{namespace}-receipt-payloads", **settings)
    for provision in (False, True):
        with pytest.raises(NotProvisioned, match=match) as caught:
            async with toolkit_of(server.url, namespace, provision=provision):
                raise AssertionError("connected")
        assert caught.value.bucket == f"{namespace}-receipt-payloads"
        assert f"nats stream edit OBJ_{namespace}-receipt-payloads --" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_bytes": 10_000_000}, "max_bytes"),
        ({"max_msgs": 10_000}, "max_msgs"),
        ({"max_msg_size": 1_000_000}, "max_msg_size"),
        ({"discard": "old"}, "discards old"),
        ({"max_age": 3600.0}, "drops payloads"),
    ],
)
async def test_a_weaker_object_store_is_warned_of_and_used(server, namespace, nc, bucket, settings, word, caplog):
    async with toolkit_of(server.url, namespace):
        pass
    await changed(nc, f"OBJ_{namespace}-receipt-payloads", **settings)
    with caplog.at_level(logging.WARNING, logger="natsreceipts"):
        async with toolkit_of(server.url, namespace, lease=60.0, inline_limit=1024) as toolkit:
            said = [record.getMessage() for record in caplog.records]
            assert [word in text for text in said if "receipt-payloads" in text] == [True]
            assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("x" * 5000)) == "x" * 5000


async def test_a_server_that_is_too_old_is_warned_of(server, namespace, bucket, caplog, monkeypatch):
    monkeypatch.setattr("natsreceipts.server_version.OLDEST_SERVER", (99, 0))
    with caplog.at_level(logging.WARNING, logger="natsreceipts"):
        async with toolkit_of(server.url, namespace, lease=60.0):
            pass
    assert "is too old" in caplog.text


async def test_what_connect_looks_at_costs_no_request_more(server, namespace, bucket, proxy):
    async with toolkit_of(server.url, namespace):
        pass
    async with toolkit_of(proxy.url, namespace, provision=False):
        asked = [message.subject for message in proxy.published()]
    assert sorted(asked) == sorted(
        f"$JS.API.STREAM.INFO.{stream}"
        for stream in (
            f"KV_{bucket}",
            f"KV_{namespace}-notices",
            f"OBJ_{namespace}-receipt-payloads",
            f"{namespace}-SESSIONS",
        )
    )


async def test_a_bucket_as_it_should_be_is_not_warned_of(server, namespace, bucket, caplog):
    async with toolkit_of(server.url, namespace, lease=30.0):
        pass
    assert caplog.records == []
    async with toolkit_of(server.url, namespace, lease=9.0):
        pass
    assert "9 s" in caplog.text


async def test_a_full_bucket(server, namespace, nc, bucket):
    """A claim that is refused by the bucket's limits is not claimed, at once; a settle is not recorded."""
    await made(nc, namespace, max_msgs=3)
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", [1], Effect())
        effect = Effect("mine")
        with pytest.raises(NotRecorded, match="maximum messages exceeded") as caught:
            await run.execute("send", [2], effect)
        assert caught.value.result == "mine"
        with pytest.raises(NotClaimed, match="maximum messages exceeded"):
            await run.execute("send", [3], effect)
        assert effect.entered == 1
        await nc.jetstream().update_stream(
            StreamConfig(
                name=f"KV_{bucket}",
                subjects=[f"$KV.{bucket}.>"],
                max_msgs_per_subject=8,
                max_msgs=10,
                discard="new",
                allow_direct=True,
                deny_delete=True,
                deny_purge=True,
            )
        )
        assert await run.execute("send", [2], effect) == "mine"  # finishes the settle that was kept
        assert effect.entered == 1


async def test_a_value_over_the_buckets_own_limit(server, namespace, nc, bucket):
    await made(nc, namespace, max_msg_size=2000)
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        with pytest.raises(NotRecorded) as caught:
            await run.execute("send", ARGS, Effect("x" * 3000))
        assert caught.value.has_result
        assert (await stored(nc, namespace, run.key("send", ARGS)))["status"] == "ambiguous"


@pytest.mark.parametrize("namespace", ["a.b", "a b", "ä", "*", "x" * 65, "a/b", "\n"])
async def test_bad_namespaces(server, namespace):
    with pytest.raises(InvalidName, match="namespace"):
        async with connect(server.url, namespace=namespace, provision=True):
            raise AssertionError("connected")


async def test_bad_settings(server):
    for settings in ({"lease": 0}, {"digest": "sha256"}, {"lease": float("inf")}):
        with pytest.raises(InvalidSetting):
            async with connect(server.url, **settings):
                raise AssertionError("connected")


UNSPEAKABLE = 10**5000
"""An int of more digits than Python converts: to show it raises ValueError, to compute with it OverflowError."""


async def test_a_setting_that_cannot_even_be_shown(server, run, toolkit):
    names = ("inline_limit", "connect_timeout", "provision", "worker", "digest", "replicas", "history", "retention")
    for name in (*names, "lease"):
        with pytest.raises(InvalidSetting, match=name):
            async with connect(server.url, **{name: UNSPEAKABLE}):
                raise AssertionError("connected")
    with pytest.raises(InvalidSetting, match="servers"):
        async with connect(UNSPEAKABLE):
            raise AssertionError("connected")
    for name in ("most", "lease", "inline_limit", "connect_timeout"):
        with pytest.raises(InvalidSetting, match=name):
            [finding async for finding in examine(server.url, **{name: UNSPEAKABLE})]
    for name in ("replicas", "history", "retention", "connect_timeout", "lease"):
        with pytest.raises(InvalidSetting, match=name):
            await provision_stores(server.url, **{name: UNSPEAKABLE})
    with pytest.raises(InvalidSetting, match="progress"):
        toolkit.delivery(Message(), progress=UNSPEAKABLE)
    with pytest.raises(InvalidSetting, match="status"):
        [receipt async for receipt in toolkit.receipts.list(status=UNSPEAKABLE)]
    key, given = run.key("send", ARGS), {"revision": 1, "not_applied": True, "by": "ann", "reason": "seen"}
    for name in ("not_applied", "by", "reason", "even_if_running"):
        with pytest.raises(InvalidSetting, match=name):
            await toolkit.receipts.resolve(key, **{**given, name: UNSPEAKABLE})
    log = toolkit.sessions.open("acme", "chat")
    with pytest.raises(InvalidSetting):
        toolkit.sessions.open("acme", "chat", dialect=UNSPEAKABLE)
    for verb in (log.suspend, log.resume):
        with pytest.raises(InvalidSetting):
            await verb([UNSPEAKABLE])
    for settings in ({"guarded": UNSPEAKABLE}, {"guarded": {"send": UNSPEAKABLE}}, {"effects": {"send": UNSPEAKABLE}}):
        with pytest.raises(InvalidSetting):
            await log.wake(**settings)


async def test_a_digest_of_ones_own(server, namespace, bucket):
    secret = hmac_digest(b"s" * 32)
    async with toolkit_of(server.url, namespace, digest=secret) as toolkit:
        run = toolkit.run("acme", "run-1")
        assert run.key("send", ARGS).args_hash == args_hash(ARGS, digest=secret) != args_hash(ARGS)
        assert await run.execute("send", ARGS, Effect()) == "done"
        assert await run.execute("send", ARGS, Effect("wrong")) == "done"


async def test_the_workers_name(server, namespace, bucket, nc):
    async with toolkit_of(server.url, namespace, worker="w-7 ä") as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", ARGS, Effect())
        assert (await toolkit.receipts.get(run.key("send", ARGS))).worker == "w-7 ä"


async def test_a_server_that_loses_a_request_is_asked_again(proxy, namespace, bucket):
    """As a cluster does that has just started."""
    lost = proxy.drop("$JS.API.STREAM.CREATE.>", count=1)
    async with connect(proxy.url, namespace=namespace, provision=True, connect_timeout=20.0) as toolkit:
        assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect()) == "done"
    assert lost.hits
    proxy.drop("$JS.API.STREAM.CREATE.>", count=None)
    with pytest.raises(Unreachable, match="did not answer"):
        async with connect(proxy.url, namespace=namespace, provision=True, connect_timeout=3.0):
            raise AssertionError("connected")


async def test_two_provisioners_at_once(server, namespace, bucket):
    async def one(n):
        async with toolkit_of(server.url, namespace) as toolkit:
            return await toolkit.run("acme", "run-1").execute("send", [n], Effect(n))

    assert await asyncio.gather(*(one(n) for n in range(10))) == list(range(10))


async def test_several_servers_may_be_named(server, namespace, bucket):
    async with toolkit_of([f"nats://127.0.0.1:{free_port()}", server.url], namespace) as toolkit:
        assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect()) == "done"


async def test_a_server_without_jetstream():
    program = shutil.which("nats-server") or next(found for _, found in _candidates() if found)
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        program, "-a", "127.0.0.1", "-p", str(port), stderr=asyncio.subprocess.PIPE
    )
    try:
        while b"Server is ready" not in (line := await process.stderr.readline()):
            assert line, "it ended"
        with pytest.raises(Unreachable, match="JetStream"):
            async with connect(f"nats://127.0.0.1:{port}", connect_timeout=2):
                raise AssertionError("connected")
    finally:
        process.kill()
        await process.communicate()
