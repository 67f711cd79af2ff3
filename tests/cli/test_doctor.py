"""The doctor from the command line: a line per check, JSON, the exit status, and fixes that do fix."""

from __future__ import annotations

import asyncio
import json

import pytest
from program import Terminal
from support import put

from natsreceipts._jetstream import BucketSpec, stream_config


async def test_a_line_per_check(toolkit, cli):
    ended = await cli("doctor")
    assert (ended.code, ended.err) == (0, "")
    levels = [line.split()[0] for line in ended.lines if not line.startswith(" ")]
    assert levels[:3] == ["ok", "ok", "ok"]
    assert ended.lines[-1] == f"{levels.count('ok')} ok, 1 warning, 1 unverified"
    assert ended.out.count("  fix: ") == 2


async def test_json(toolkit, cli):
    ended = await cli("doctor", "--json", "--no-records")
    assert ended.code == 0
    assert {"level": "ok", "check": "JetStream", "text": "enabled"} in ended.objects
    assert all({"level", "check", "text"} <= found.keys() for found in ended.objects)
    (replicas,) = [found for found in ended.objects if found["check"] == "replicas"]
    assert replicas["level"] == "warning"
    assert "--replicas=3" in replicas["fix"]
    assert not any(found["check"].startswith("receipts, ") for found in ended.objects)


async def test_an_error(toolkit, cli, namespace, nc):
    key = toolkit.run("acme", "r").key("send", {})
    await put(nc, namespace, key, b"oops\x1b[31m")
    ended = await cli("doctor")
    assert ended.code == 8
    assert "error       receipts, corrupt: 1 cannot be read: " + key.kv_key in ended.lines
    assert ended.lines[-1].endswith("1 error, 1 unverified")
    (found,) = [found for found in (await cli("doctor", "--json")).objects if found["level"] == "error"]
    assert found["keys"] == [key.kv_key]


async def test_where_there_is_nothing(cli, namespace):
    ended = await cli("doctor")
    assert ended.code == 8
    assert "fix: make it with `natsreceipts up`" in ended.out


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--namespace", "a.b"), 2),
        (("--tenant", ""), 2),
        (("--most", "0"), 2),
        (("--server", "nats://127.0.0.1:1", "--timeout", "1s"), 4),
    ],
)
async def test_what_cannot_be_looked_at(cli, flags, code):
    ended = await cli("doctor", *flags)
    assert ended.code == code
    assert ended.error


async def agreed(terminal):
    """Say yes to whatever it asks, and where the cursor is when it asks for that."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await terminal.end(0.5)
            except TimeoutError:
                cursor, terminal.seen = "\x1b[6n" in terminal.seen, ""
                terminal.type("\x1b[24;80R" if cursor else "y\r")


async def test_its_fixes_fix(server, namespace, nc, bucket, cli, nats_cli):
    """The commands that it gives, run with the nats CLI, leave nothing of what they are about."""
    weak = stream_config(BucketSpec(bucket))
    weak |= {"max_msgs_per_subject": 1, "max_age": 10**9 * 120, "max_bytes": 10**6, "max_msgs": 100, "discard": "old"}
    weak |= {"deny_purge": False, "deny_delete": False, "allow_rollup_hdrs": True, "allow_direct": False}
    weak |= {"max_msg_size": 10_000}
    answer = await nc.request(f"$JS.API.STREAM.CREATE.KV_{bucket}", json.dumps(weak).encode())
    assert "error" not in json.loads(answer.data)
    await cli("up")
    found = [each for each in (await cli("doctor", "--json", "--no-records")).objects if bucket in each["check"]]
    fixes = [each["fix"] for each in found if each["level"] != "ok"]
    assert len(fixes) == 10
    for fix in fixes:
        nats, *arguments = fix.split()
        assert nats == "nats"
        async with Terminal.of("-s", server.url, *arguments, "-f", command=(nats_cli,)) as terminal:
            assert await agreed(terminal) == 0, terminal.seen
    ended = await cli("doctor", "--json", "--no-records")
    assert {each["level"] for each in ended.objects if bucket in each["check"]} == {"ok"}
