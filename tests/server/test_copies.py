"""What docs/scale.md says of mirrors and leaf nodes: neither takes the place of the buckets."""

from __future__ import annotations

import asyncio
import json

import pytest
from support import PATIENCE, Effect, bucket_of, client_of, toolkit_of, until

from natsreceipts import NotProvisioned, embedded
from natsreceipts.embedded import free_port

ARGS = {"to": "a@b.c"}


async def joined(hub, leaf):
    """Wait until what is published at the hub is heard behind the leaf node."""
    async with asyncio.timeout(PATIENCE), client_of(hub.url) as here, client_of(leaf.url) as there:
        heard = await there.subscribe("hello")
        while True:
            await here.publish("hello")
            try:
                return await heard.next_msg(timeout=0.1)
            except TimeoutError:
                continue


async def test_a_mirror_can_be_read_and_takes_no_calls(server, namespace, nc):
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", ARGS, Effect("sent"))
    held = bucket_of(namespace)
    mirror = {"name": f"KV_{namespace}-copy-receipts", "mirror": {"name": f"KV_{held}"}, "max_msgs_per_subject": 8}
    made = await nc.request(f"$JS.API.STREAM.CREATE.{mirror['name']}", json.dumps(mirror).encode())
    assert "error" not in json.loads(made.data)
    subject = f"$KV.{held}.{run.key('send', ARGS).kv_key}"

    async def copied():
        request = json.dumps({"last_by_subj": subject}).encode()
        answer = await nc.request(f"$JS.API.STREAM.MSG.GET.{mirror['name']}", request)
        return json.loads(answer.data).get("message", {}).get("seq") == 2

    assert await until(copied)
    with pytest.raises(NotProvisioned, match="is a mirror of another stream, and takes no writes of its own"):
        async with toolkit_of(server.url, f"{namespace}-copy", partitions=None):
            pass


async def test_a_leaf_node_with_jetstream_has_buckets_of_its_own(namespace):
    port = free_port()
    hub_config = f"leafnodes {{ listen: 127.0.0.1:{port} }}"
    leaf_config = f"leafnodes {{ remotes: [ {{ url: nats-leaf://127.0.0.1:{port} }} ] }}"
    async with embedded(config=hub_config) as hub, embedded(config=leaf_config) as leaf:
        await joined(hub, leaf)
        async with toolkit_of(hub.url, namespace) as toolkit:
            assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("at the hub")) == "at the hub"
        with pytest.raises(NotProvisioned):
            async with toolkit_of(leaf.url, namespace, provision=False):
                pass
        # Whoever makes them there gets a second set, which knows nothing of the first one's calls.
        async with toolkit_of(leaf.url, namespace) as toolkit:
            assert [receipt async for receipt in toolkit.receipts.list()] == []
            assert await toolkit.run("acme", "run-2").execute("send", ARGS, Effect("there")) == "there"
        async with toolkit_of(hub.url, namespace) as toolkit:
            assert [receipt.result async for receipt in toolkit.receipts.list()] == ["at the hub"]
