"""A bucket that was replaced under a toolkit: every later call is refused, and told as itself."""

from __future__ import annotations

import pytest
from support import Effect, bucket_of, toolkit_of

from natsreceipts import BucketReplaced


async def test_every_call_is_refused_under_its_own_name(server, namespace, nc):
    effect = Effect()
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        for n in range(3):
            await run.execute("send", [n], Effect())
        js = nc.jetstream()
        config = (await js.stream_info(f"KV_{bucket_of(namespace)}")).config
        await js.delete_stream(f"KV_{bucket_of(namespace)}")
        await js.add_stream(config)
        for n in range(10, 15):
            with pytest.raises(BucketReplaced) as caught:
                await run.execute("send", [n], effect)
            assert caught.value.key == run.key("send", [n])
            assert run.key("send", [n]).kv_key in str(caught.value)
            assert str(caught.value).count("in run run-1") == 1
    assert effect.entered == 0
