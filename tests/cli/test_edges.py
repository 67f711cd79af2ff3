"""Where the program meets servers, pipes and people: one line and the documented exit code, and never a traceback."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from program import Cli, program, started
from scenes import ambiguous_call
from support import Effect, bucket_of, put, record_of

from natsreceipts import ReceiptKey, connect, embedded
from natsreceipts.cli.exits import Exit, exit_of
from natsreceipts.errors import NatsReceiptsError, PermissionDenied, StaleRevision, Unreachable

KEY = "acme.order-42.send." + "0" * 64
NOTICE = f"notice.local.run-1.{'A' * 43}.{'B' * 43}.spec"
NOWHERE = ("--server", "nats://127.0.0.1:1", "--timeout", "300ms")

VERBS = [
    ("receipts", "ls"),
    ("receipts", "show", KEY),
    ("receipts", "watch"),
    ("receipts", "stats"),
    ("receipts", "resolve", KEY, "--not-applied", "--by", "a", "--reason", "b", "--yes", "--revision", "1"),
    ("notices", "ls"),
    ("notices", "show", NOTICE),
    ("notices", "consume", NOTICE, "--by", "t"),
    ("sessions", "ls"),
    ("sessions", "show", "acme.chat"),
    ("sessions", "tail", "acme.chat"),
    ("sessions", "wake", "acme.chat", "--dry-run"),
    ("up",),
]


async def test_no_server():
    for verb in VERBS:
        ended = await Cli(*NOWHERE)(*verb)
        assert (ended.code, ended.out) == (4, "")
        assert "no NATS server at nats://127.0.0.1:1 let us in within 0.3 s" in ended.error


async def test_no_bucket(cli):
    for verb in VERBS[:-1]:
        ended = await cli(*verb)
        assert (ended.code, ended.out) == (5, "")
        assert f"does not exist: make it once with `natsreceipts {' '.join(cli.flags)} up`" in ended.error


async def test_no_jetstream():
    async with embedded(config="accounts { A { users: [{user: a, password: b}] } }\nno_auth_user: a") as server:
        for verb in VERBS:
            ended = await Cli("--server", server.url, "--timeout", "2s")(*verb)
            assert ended.code in (4, 5)
            assert ended.out == ""
            assert "JetStream" in ended.error


USERS = """
accounts {
  A {
    jetstream: enabled
    users: [
      {user: admin, password: admin}
      {user: reader, password: reader, permissions: {
        publish: ["$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.DIRECT.GET.>"]
        subscribe: ["_INBOX.>"]
      }}
      {user: nobody, password: nobody, permissions: {publish: ["x"], subscribe: ["_INBOX.>"]}}
    ]
  }
  SYS { users: [{user: sys, password: sys}] }
}
system_account: SYS
"""


@pytest.fixture
async def guarded():
    """A server with users, an ambiguous receipt's key and its revision."""
    async with (
        embedded(config=USERS) as server,
        connect(server.url, user="admin", password="admin", provision=True) as toolkit,
    ):
        run = toolkit.run("acme", "order-42")
        yield server, run.key("send", []), await ambiguous_call(run, [])


def as_user(server, name, password=None):
    return Cli("--server", server.url, "--user", name, "--password", password or name, "--timeout", "2s")


async def test_a_wrong_password(guarded):
    for verb in VERBS:
        ended = await as_user(guarded[0], "reader", "wrong")(*verb)
        assert (ended.code, ended.out) == (4, "")
        assert "authorization" in ended.error.lower()
        assert "wrong" not in ended.error.split("Authorization")[0]


async def test_somebody_who_may_only_read(guarded):
    server, key, revision = guarded
    cli = as_user(server, "reader")
    assert (await cli("receipts", "ls")).lines[0].split()[-1] == key.kv_key
    assert (await cli("receipts", "show", key.kv_key)).code == 0
    assert (await cli("receipts", "stats")).code == 0
    said = ("--by", "a", "--reason", "b", "--yes", "--revision", revision)
    for verb, subject in (
        (("receipts", "resolve", key.kv_key, "--not-applied", *said), f"$KV.receipts.{key.kv_key}"),
        (("up", "--namespace", "other"), "$JS.API.STREAM.CREATE.other-SESSIONS"),
    ):
        ended = await cli(*verb)
        assert (ended.code, ended.out) == (4, ""), verb
        assert subject in ended.error
        assert "does not let this connection" in ended.error


async def test_somebody_who_may_nothing(guarded):
    for verb in VERBS:
        ended = await as_user(guarded[0], "nobody")(*verb)
        assert (ended.code, ended.out) == (4, "")
        assert "does not let this connection publish on '$JS.API.STREAM.INFO.SESSIONS'" in ended.error


async def test_an_account_without_jetstream():
    accounts = "A { jetstream: enabled, users: [{ user: a, password: p }] }, B { users: [{ user: b, password: p }] }"
    async with embedded(config=f"accounts {{ {accounts} }}\nno_auth_user: a") as server:
        ended = await Cli("--server", server.url, "--user", "b", "--password", "p")("receipts", "ls")
    assert (ended.code, ended.out) == (4, "")
    assert "JetStream not enabled for account" in ended.error
    assert "`jetstream: enabled`" in ended.error  # what to do


async def test_a_verb_that_is_nearly_one():
    ended = await Cli()("recepts", "ls")
    assert ended.code == 2
    assert "No such command 'recepts'" in ended.error
    assert ended.error.endswith((" Did you mean 'receipts'? See: natsreceipts --help", "'. See: natsreceipts --help"))


async def fill(nc, namespace, count):
    """Many completed receipts."""
    key = ReceiptKey.of("acme", "order-42", "send", [-1])
    for n in range(count):
        key = ReceiptKey.of("acme", "order-42", "send", [n])
        record = record_of(key, status="completed", result={"json": 1})
        await nc.publish(f"$KV.{bucket_of(namespace)}.{key.kv_key}", json.dumps(record).encode())
    await put(nc, namespace, key, record_of(key, status="completed", result={"json": 2}))  # the last one is in


async def test_a_pipe_that_closes_early(server, namespace, toolkit, nc):
    await fill(nc, namespace, 3000)
    for flags in ((), ("--json",)):
        process = await started("receipts", "ls", *flags, "--server", server.url, "--namespace", namespace)
        assert b"acme.order-42.send." in await process.stdout.readline()
        process._transport.get_pipe_transport(1).close()
        async with asyncio.timeout(60):
            assert await process.stderr.read() == b""
            assert await process.wait() == 141


async def test_ctrl_c_in_a_list(server, namespace, toolkit, nc):
    await fill(nc, namespace, 3000)
    process = await started("receipts", "ls", "--server", server.url, "--namespace", namespace)
    await process.stdout.readline()  # the rest does not fit the pipe, so it is in the middle of it
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        _, err = await process.communicate()
    assert process.returncode == 130
    assert err == b"natsreceipts: stopped by Ctrl-C\n"


async def test_ctrl_c_while_it_connects():
    connected = asyncio.Event()

    async def silent(reader, writer):
        connected.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        process = await started("receipts", "ls", "--server", f"nats://127.0.0.1:{port}", "--timeout", "1m")
        async with asyncio.timeout(60):
            await connected.wait()
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"natsreceipts: stopped by Ctrl-C\n")


async def test_jq(server, namespace, toolkit, run):
    jq = shutil.which("jq")
    if jq is None:
        pytest.skip("needs jq on the PATH")
    await run.execute("send", [], Effect({"id": "m-1"}))
    key = run.key("send", []).kv_key
    for verb, query, answer in (
        ("receipts ls --json", ".key", key),
        (f"receipts show {key} --json", ".result.json.id", "m-1"),
        ("receipts stats --json", ".statuses.completed", "1"),
        ("up --json --dry-run", 'select(.stream | startswith("KV_") and endswith("receipts")) | .state', "there"),
    ):
        where = f"--server {server.url} --namespace {namespace}"
        line = f"set -o pipefail; {sys.executable} -m natsreceipts {verb} {where} | {jq} -r '{query}'"
        ended = await program(command=("/bin/bash", "-c", line))
        assert (ended.code, ended.out, ended.err) == (0, answer + "\n", "")


# the program itself


async def test_its_version():
    ended = await program("--version")
    assert (ended.code, ended.err) == (0, "")
    assert re.fullmatch(r"natsreceipts \d+\.\d+\.\d+\n", ended.out)


async def test_help_of_every_group_and_verb():
    for arguments in ((), ("receipts",), *VERBS, ("demo",)):
        verb = [word for word in arguments[:2] if word != KEY]
        ended = await Cli()(*verb, "--help")
        assert (ended.code, ended.err) == (0, "")
        assert "Usage: natsreceipts" in ended.out
    for group in ((), ("receipts",), ("notices",), ("sessions",)):
        ended = await Cli()(*group)
        assert ended.code == 0
        assert "Usage: natsreceipts" in ended.out


async def test_the_exit_codes_are_in_the_help_and_in_the_docs():
    told = " ".join((await program("--help", COLUMNS="200")).out.split())
    docs = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    for code in Exit:
        assert f"{code.value} {code.meaning}" in told
        assert f"| {code.value} | {code.meaning} |" in docs


@pytest.mark.parametrize(
    "arguments",
    [
        ("receipts", "ls", "--nope"),
        ("receipts", "show"),
        ("nothing",),
        ("receipts", "resolve", KEY),
        ("up", "--history", "x"),
    ],
)
async def test_wrong_use_is_one_line_and_says_where_help_is(arguments):
    ended = await Cli()(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert re.search(r"See: natsreceipts.* --help$", ended.error)


async def test_a_mistake_of_ours_is_one_line_too(monkeypatch):
    def broken(self):
        raise KeyError("x")

    monkeypatch.setattr("natsreceipts.cli.verb.Session.toolkit", broken)
    ended = await Cli()("receipts", "ls")
    assert (ended.code, ended.out) == (1, "")
    assert "this is a mistake of natsreceipts (KeyError: 'x')" in ended.error
    monkeypatch.setenv("NATSRECEIPTS_TRACEBACK", "1")
    with pytest.raises(KeyError):
        await Cli()("receipts", "ls")


async def test_flags_of_the_connection_before_the_verb_and_behind_it(server, namespace, toolkit, run):
    await run.execute("send", [], Effect())
    where = ("--server", server.url, "--namespace", namespace)
    for arguments in ((*where, "receipts", "ls"), ("receipts", "ls", *where), (*NOWHERE[:2], "receipts", "ls", *where)):
        assert (await Cli()(*arguments)).code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_completion(shell):
    ended = await program(
        _NATSRECEIPTS_COMPLETE=f"complete_{shell}",
        COMP_WORDS="natsreceipts receipts re",
        COMP_CWORD="2",
        _TYPER_COMPLETE_ARGS="natsreceipts receipts re",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert "resolve" in ended.out


def test_every_error_of_the_library_has_an_exit_code():
    assert exit_of(Unreachable()) is Exit.NO_NATS
    assert exit_of(PermissionDenied("publish", "x")) is Exit.NO_NATS
    assert exit_of(StaleRevision(KEY, revision=1, current=2, status="running")) is Exit.NOT_SETTLED
    assert exit_of(NatsReceiptsError("x")) is Exit.FAILED


@pytest.mark.parametrize("missing", ["typer", "rich"])
async def test_without_its_extra(missing):
    code = f"import sys; sys.modules['{missing}'] = None; from natsreceipts.cli import main; main()"
    ended = await program(command=(sys.executable, "-c", code))
    assert ended.code == 1
    assert ended.err.strip().endswith("is not installed. Run: pip install 'natsreceipts[cli]'")
