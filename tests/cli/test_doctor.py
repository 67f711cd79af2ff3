"""The doctor from the command line: a line per check, JSON, the exit status, and fixes that do fix."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from program import Cli, Terminal, program
from support import put, record_of, toolkit_of

from natsreceipts._jetstream import BucketSpec, JetStreamObjects, objects_config, opened, stream_config


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
    assert f"fix: make it with `natsreceipts {' '.join(cli.flags)} up`" in ended.out


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


PATIENT = ("--timeout", "20s")
FORGETFUL = {
    "max_msgs_per_subject": 1,
    "max_age": 10**9 * 120,
    "max_bytes": 10**6,
    "max_msgs": 100,
    "discard": "old",
    "deny_purge": False,
    "deny_delete": False,
    "allow_rollup_hdrs": True,
    "allow_direct": False,
    "max_msg_size": 10_000,
}
CLOSED = {"no_ack": True, "retention": "interest", "discard_new_per_subject": True}


@pytest.mark.parametrize("weak", [FORGETFUL, CLOSED], ids=["forgetful", "closed"])
async def test_its_fixes_fix(server, namespace, nc, bucket, cli, nats_cli, weak):
    """The commands that it gives, typed in as they stand, leave nothing of what they are about."""
    config = stream_config(BucketSpec(bucket)) | weak
    log = {"name": f"{namespace}-LOG", "subjects": [f"{namespace}.log.>"]}
    if weak is CLOSED:  # and filled from somewhere else, on subjects that are not its own
        config |= {"subjects": [f"$KV.{bucket}-other.>"], "sources": [{"name": log["name"]}]}
    objects = objects_config(BucketSpec(f"{namespace}-receipt-payloads"))
    if weak is CLOSED:
        objects |= {"allow_rollup_hdrs": False, "allow_direct": False, "max_msgs_per_subject": 9, "max_age": 10**12}
    for each in (log, config, objects):
        answer = await nc.request(f"$JS.API.STREAM.CREATE.{each['name']}", json.dumps(each).encode())
        assert "error" not in json.loads(answer.data)
    await cli("up")
    ours = (bucket, f"{namespace}-receipt-payloads")

    async def about_it():
        found = (await cli("doctor", "--json", "--no-records", "--timeout", "2s")).objects
        return [each for each in found if any(name in each["check"] for name in ours)]

    async with asyncio.timeout(60):  # 2 s are not enough for every machine at every time
        fixes = []
        while len(fixes) != (10 if weak is FORGETFUL else 9):
            fixes = [each["fix"] for each in await about_it() if each["level"] in ("warning", "error")]
    path = f"{Path(nats_cli).parent}:{os.environ['PATH']}"
    for fix in fixes:
        assert fix.startswith(f"nats --server {server.url} stream edit ")
        async with Terminal.of(command=("/bin/bash", "-c", f"{fix} -f"), PATH=path) as terminal:
            assert await agreed(terminal) == 0, terminal.seen
    async with asyncio.timeout(60):
        while {each["level"] for each in await about_it()} != {"ok"}:
            pass
    async with toolkit_of(server.url, namespace, provision=False, inline_limit=1024) as toolkit:
        assert await toolkit.run("acme", "r").execute("draw", {}, lambda: "x" * 5000) == "x" * 5000
    await nc.jetstream().delete_stream(log["name"])


async def test_what_is_left_over_can_be_removed_as_it_says(server, toolkit, namespace, nc, cli, nats_cli, monkeypatch):
    """A payload that no record names, and one that was not stored to its end: two of each, one kept."""
    monkeypatch.setattr("natsreceipts.doctor.orphans._OLD", -60.0)
    store = f"{namespace}-receipt-payloads"
    key = toolkit.run("acme", "order 42").key("draw", {}).kv_key
    async with opened(server.url, connect_timeout=20.0, options={}) as link:
        for n in range(2):
            await JetStreamObjects(link, store).put(f"{key}.{n:024}.0", b"left", timeout=20.0)
    for n in range(2):
        await nc.jetstream().publish(f"$O.{store}.C.unfinished-{n}", b"half of it")

    async def counted():
        found = {each["check"]: each for each in (await cli("doctor", "--json", *PATIENT)).objects}
        names = ("payloads, orphans", "payloads, unfinished")
        return [(len(found[name].get("keys", [])), found[name].get("fix")) for name in names]

    (orphans, rm), (unfinished, purge) = await counted()
    assert (orphans, unfinished) == (2, 2)
    path = f"{Path(nats_cli).parent}:{os.environ['PATH']}"
    for fix in (rm, purge):
        typed = ("/bin/bash", "-c", f"{fix.partition(', for each')[0]} -f")
        async with Terminal.of(command=typed, NATS_URL=server.url, PATH=path) as terminal:
            assert await agreed(terminal) == 0, terminal.seen
    assert [count for count, _ in await counted()] == [1, 1]


async def test_its_own_commands_are_about_the_same_namespace(toolkit, cli, namespace, nc):
    run = toolkit.run("acme", "r")
    with pytest.raises(TimeoutError):
        await run.execute("pay", {}, lost)
    over, gone = run.key("make", {}), run.key("send", {})
    await put(nc, namespace, over, record_of(over, leaseMs=1))
    await put(nc, namespace, gone, b"", headers={"KV-Operation": "DEL"})
    fixes = [
        found["fix"]
        for found in (await cli("doctor", "--json", *PATIENT)).objects
        if "natsreceipts " in found.get("fix", "")
    ]
    commands = [command for fix in fixes for command in fix.split(", and ")]
    assert len(commands) == 4
    for command in commands:
        program, *arguments = command.split()
        assert (program, arguments[: len(cli.flags)]) == ("natsreceipts", [*cli.flags])
        ended = await Cli()(*arguments)
        assert ended.code == 0
        assert any(key.kv_key in ended.out for key in (over, gone, run.key("pay", {})))


async def lost():
    raise TimeoutError("no answer")


async def test_its_commands_for_what_cannot_be_read(toolkit, cli, namespace, nc, nats_cli, server):
    run, fact = toolkit.run("acme", "r"), {"decision": "mail", "outcome": "sent"}
    await run.execute("send", {}, lambda: "sent")
    filed = await toolkit.notices.file(run="r", step="s", request_id="1", addressee="a", fact=fact)
    await toolkit.sessions.open("acme", "chat").append({"role": "user", "content": "hi"})
    await put(nc, namespace, run.key("send", {}), b"oops")
    await nc.jetstream().publish(f"$KV.{namespace}-notices.{filed.key}", b"oops")
    await nc.jetstream().publish(f"{namespace}-sessions.acme.chat", b"oops")
    found = {
        each["check"]: each for each in (await cli("doctor", "--json", *PATIENT)).objects if each["level"] == "error"
    }
    assert set(found) == {"receipts, corrupt", "notices, corrupt", "sessions, corrupt"}

    async def nats(command):
        program_of_it, *arguments = command.split()
        assert program_of_it == "nats"
        return await program(*arguments, command=(nats_cli,))

    show, says, _ = found["receipts, corrupt"]["fix"].partition(" says how to ")
    assert says
    shown = (await Cli()(*show.split()[1:])).out
    revert = next(line for line in shown.splitlines() if " kv revert " in line)
    assert (await nats(f"{revert.strip().removeprefix('$ ')} --force")).code == 0
    look, _, give_up = found["notices, corrupt"]["fix"].partition(" shows it: put there what belongs there, or give ")
    assert "oops" in (await nats(look)).out
    assert (await nats(f"{give_up.removeprefix('the notice up with ')} -f")).code == 0
    look, says, _ = found["sessions, corrupt"]["fix"].partition(" shows it: ")
    assert says
    assert "oops" in (await nats(look)).out
    left = [each["check"] for each in (await cli("doctor", "--json", *PATIENT)).objects if each["level"] == "error"]
    assert left == ["sessions, corrupt"]
