"""The real nats CLI beside ours: the same contexts, and what becomes of calls whose receipts are changed by hand."""

from __future__ import annotations

import json
import os

import pytest
from program import Cli, Terminal, program, started
from support import Effect

from natsreceipts import CorruptRecord, ReceiptErased, connect

ARGS = {"to": "ann@example.com"}


@pytest.fixture
def nats(own_server, nats_cli):
    """Runs the nats CLI against the test's own server."""

    async def run(*arguments, server=own_server.url):
        where = ("--server", server) if server else ()
        return await program(*arguments, *where, command=(nats_cli,))

    return run


@pytest.fixture
async def toolkit(own_server):
    async with connect(own_server.url, provision=True, worker="host-a/101") as connected:
        yield connected


@pytest.fixture
async def key(toolkit):
    """The KV key of a completed call."""
    run = toolkit.run("acme", "order-42")
    await run.execute("send", ARGS, Effect("m-1"))
    return run.key("send", ARGS).kv_key


async def again(toolkit):
    return await toolkit.run("acme", "order-42").execute("send", ARGS, Effect("wrong"))


async def test_it_reads_what_is_written(nats, toolkit, key):
    other = toolkit.run("acme", "order-43")
    await other.execute("send", ARGS, Effect())
    assert (await nats("kv", "ls", "receipts", "acme.order-42.>")).lines == [key]
    assert set((await nats("kv", "ls", "receipts", "acme.>")).lines) == {key, other.key("send", ARGS).kv_key}
    record = json.loads((await nats("kv", "get", "receipts", key, "--raw")).out)
    assert (record["status"], record["result"]) == ("completed", {"json": "m-1"})
    history = (await nats("kv", "history", "receipts", key)).out
    assert [line.split("│")[2].strip() for line in history.splitlines() if key in line][1:] == ["1", "2"]


async def test_a_delete_by_hand(nats, toolkit, key, own_cli):
    assert (await nats("kv", "del", "receipts", key, "-f")).code == 0
    assert (await nats("kv", "ls", "receipts")).out.strip() in ("", "No keys found in bucket")
    with pytest.raises(ReceiptErased):
        await again(toolkit)
    ended = await own_cli("receipts", "show", key, "--json")
    (told,) = ended.objects
    assert (ended.code, told["status"]) == (0, "erased")
    command = told["next"][-1].removeprefix("$ nats ").split()
    assert (await nats(*command, "--force", server="")).code == 0  # what we advise works
    assert await again(toolkit) == "m-1"


async def test_a_write_by_hand(nats, toolkit, key, own_cli):
    assert (await nats("kv", "put", "receipts", key, "done")).code == 0
    with pytest.raises(CorruptRecord):
        await again(toolkit)
    ended = await own_cli("receipts", "show", key, "--json")
    (told,) = ended.objects
    assert (ended.code, told["status"]) == (7, "unreadable")
    assert (await nats(*told["next"][-1].removeprefix("$ nats ").split(), "--force", server="")).code == 0
    assert await again(toolkit) == "m-1"


async def test_writes_that_are_refused(nats, toolkit, key):
    for arguments in (
        ("purge", "receipts", key, "-f"),
        ("create", "receipts", key, "x"),
        ("update", "receipts", key, "x", 1),
    ):
        refused = await nats("kv", *arguments)
        assert refused.code == 1
        assert "error" in refused.err
    assert await again(toolkit) == "m-1"


async def test_a_record_by_hand_is_taken_at_its_word(nats, toolkit, key):
    """Nothing can tell a well-formed record from one of a worker's."""
    record = json.loads((await nats("kv", "get", "receipts", key, "--raw")).out)
    record |= {"result": {"json": "by hand"}, "write": "by-hand-1"}
    assert (await nats("kv", "put", "receipts", key, json.dumps(record))).code == 0
    assert await again(toolkit) == "by hand"


async def test_contexts_that_it_made(nats, own_server, toolkit, key, monkeypatch, tmp_path):
    for name, url in (("prod", own_server.url), ("nowhere", "nats://127.0.0.1:1")):
        added = await nats("context", "add", name, "--description", name, server=url)
        assert added.code == 0, added.err
    monkeypatch.delenv("NATS_URL", raising=False)
    assert (await nats("context", "select", "prod", server="")).code == 0
    for flags in ((), ("--context", "prod"), ("--context", str(tmp_path / "config/nats/context/prod.json"))):
        listed = await Cli()("receipts", "ls", *flags)
        assert listed.code == 0, (flags, listed.err)
        assert listed.lines[0].endswith(key)
        assert (await nats("kv", "ls", "receipts", *flags, server="")).lines == [key]
    assert (await Cli()("receipts", "ls", "--context", "nowhere", "--timeout", "300ms")).code == 4
    monkeypatch.setenv("NATS_CONTEXT", "nowhere")
    assert (await Cli()("receipts", "ls", "--timeout", "300ms")).code == 4
    assert (await Cli()("receipts", "ls", "--server", own_server.url)).code == 0
    monkeypatch.setenv("NATS_URL", own_server.url)
    assert (await Cli()("receipts", "ls")).code == 0
    assert sorted(os.listdir(tmp_path / "config/nats/context")) == ["nowhere.json", "prod.json"]


async def test_watching(nats, toolkit, key, own_server, nats_cli):
    process = await started("kv", "watch", "receipts", "--server", own_server.url, command=(nats_cli,))
    try:
        line = (await process.stdout.readline()).decode()
    finally:
        process.kill()
        await process.communicate()
    assert f"PUT receipts > {key}: " in line


async def test_sessions_on_a_terminal(nats_cli, own_server, toolkit):
    log = toolkit.sessions.open("acme", "chat")
    await log.append({"role": "user", "content": "hello"})
    view = (nats_cli, "stream", "view", "SESSIONS", "--server", own_server.url)
    async with Terminal.of(command=view, columns=200) as terminal:
        await terminal.end()
    assert "Subject: sessions.acme.chat" in terminal.seen
    assert '"body":{"role":"user","content":"hello"}' in terminal.seen
