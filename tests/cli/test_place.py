"""The commands that the program prints lead back to where it was told to look, and hold no secret."""

from __future__ import annotations

import json
import re
import shlex

import nats
import pytest
from program import Cli
from scenes import ambiguous_call
from support import Effect, put

from natsreceipts import connect, embedded
from natsreceipts.cli.place import Place
from natsreceipts.shell import with_key

BY = ("--by", "ann", "--reason", "seen in the outbox")
LONG = "x" * 400


def placed(text, **flags):
    return Place(flags).in_commands(text)


@pytest.mark.parametrize(
    ("flags", "ours", "theirs"),
    [
        ({}, "", ""),
        ({"namespace": "prod"}, "--namespace prod ", ""),
        ({"server": "nats://h:1,nats://i:2"}, "--server nats://h:1,nats://i:2 ", "--server nats://h:1,nats://i:2 "),
        ({"context": "prod", "namespace": "p"}, "--context prod --namespace p ", "--context prod "),
        ({"context": "my prod"}, "--context 'my prod' ", "--context 'my prod' "),
        ({"no_context": True}, "--no-context ", "--no-context "),
        (
            {"tlscert": "c", "tlskey": "k", "tlsca": "ca.pem", "tlsfirst": True, "inbox_prefix": "_IN"},
            *["--tlscert c --tlskey k --tlsca ca.pem --inbox-prefix _IN --tlsfirst "] * 2,
        ),
        ({"creds": "a.creds", "nkey": "u.nk"}, "--creds a.creds --nkey u.nk ", "--creds a.creds --nkey u.nk "),
    ],
)
def test_the_flags_of_the_place(flags, ours, theirs):
    assert placed("see `natsreceipts receipts ls`", **flags) == f"see `natsreceipts {ours}receipts ls`"
    assert placed("$ nats kv get receipts K", **flags) == f"$ nats {theirs}kv get receipts K"


@pytest.mark.parametrize(
    ("flags", "shown", "variables"),
    [
        ({"server": "nats://ann:hidden@h:1"}, "--server nats://h:1 --user ann ", "set NATS_PASSWORD for that: it is"),
        ({"server": "nats://hidden@h:1"}, "--server nats://h:1 ", "set NATS_TOKEN for that: it is"),
        ({"server": "nats://a%20b:hidden@h:1"}, "--server nats://h:1 --user 'a b' ", "NATS_PASSWORD"),
        ({"user": "ann", "password": "hidden"}, "--user ann ", "NATS_PASSWORD"),
        ({"user": "hidden"}, "", "NATS_TOKEN"),
        ({"token": "hidden"}, "", "NATS_TOKEN"),
        ({"jwt": "hidden", "seed": "hidden"}, "", "set NATS_JWT and NATS_SEED for that: they are not printed"),
        ({"creds": "data:;base64,hidden"}, "", "NATS_CREDS"),
    ],
)
def test_secrets_are_not_printed(flags, shown, variables):
    text = placed("make it with `natsreceipts up`", **flags)
    assert text.startswith(f"make it with `natsreceipts {shown}up` (")
    assert variables in text
    lines = Place(flags).in_all(["Do this:", "$ nats kv ls receipts"])
    assert lines[:2] == ["Do this:", f"$ nats {shown}kv ls receipts"]
    assert variables[4:] in lines[2]
    assert "hidden" not in text + "".join(lines)
    assert placed("nothing to be run", **flags) == "nothing to be run"


def test_a_command_holds_whatever_it_is_about():
    line = "$ natsreceipts sessions wake a.b --dry-run --guarded 'x; natsreceipts up'"
    assert Place({"context": "c"}).in_all([line]) == [line.replace("sessions wake", "--context c sessions wake")]


def test_keys_that_begin_with_a_dash():
    assert with_key("natsreceipts receipts show", "acme.1") == "natsreceipts receipts show acme.1"
    assert with_key("natsreceipts sessions wake", "-a.b", "--dry-run") == "natsreceipts sessions wake --dry-run -- -a.b"


def test_keys_that_begin_with_an_equals_sign_are_quoted():
    """zsh takes such a word for the path of a command."""
    assert with_key("natsreceipts receipts show", "=C3=A9.r") == "natsreceipts receipts show '=C3=A9.r'"
    assert with_key("nats kv get receipts", "a.=C3", "--raw") == "nats kv get receipts a.=C3 --raw"


# all verbs

_COMMAND = re.compile(r"\b(?:natsreceipts|nats) [^;`\n]*")


def commands_in(ended):
    """Each command that was printed, whatever it stands in."""
    text = ended.out + ended.err.removeprefix("natsreceipts: ").replace("\nnatsreceipts: ", "\n")
    for match in _COMMAND.finditer(text):
        words = match[0].split()
        if words[0] == "nats" or {"up", "doctor", "receipts", "notices", "sessions"} & set(words):
            yield match[0]


@pytest.fixture
async def scene():
    """A server of the namespace ``prod``, and keys of receipts, a notice and a session to be told about."""
    async with embedded() as server, connect(server.url, namespace="prod", provision=True) as toolkit:
        client = toolkit.run("acme", "order-42")
        keys = {}
        for name in ("ambiguous", "erased", "corrupt", "done", "gone"):
            keys[name] = client.key("send", [name])
        await ambiguous_call(client, ["ambiguous"])
        await ambiguous_call(client, ["erased"])
        for name in ("done", "corrupt"):
            await client.execute("send", [name], Effect("it"))
        nc = await nats.connect(server.url)
        try:
            await put(nc, "prod", keys["erased"], b"", headers={"KV-Operation": "DEL"})
            await put(nc, "prod", keys["corrupt"], b"oops")
            dashed = toolkit.run("-dash", "-r")
            await ambiguous_call(dashed, [])
            keys["dashed"] = dashed.key("send", [])
            log = toolkit.sessions.open("acme", "chat")
            call = {"type": "toolCall", "id": "c0", "name": "send; touch x", "arguments": {}}
            await log.append({"role": "assistant", "content": [call]})
            (filed,) = await toolkit.notices.at("local").file(
                run="r1",
                step=keys["ambiguous"].kv_key,
                request_id="q",
                addressees=["ops"],
                fact={"decision": "d", "outcome": "needs-a-person"},
            )
            yield server, {name: key.kv_key for name, key in keys.items()} | {"notice": filed.key}
        finally:
            await nc.close()


async def test_every_verb(scene):
    server, keys = scene
    flags = ("--server", server.url, "--no-context", "--inbox-prefix", "_INBOX_ops")
    cli, elsewhere = Cli(*flags, "--namespace", "prod"), Cli(*flags, "--namespace", "other")
    said = ("--not-applied", *BY)
    runs = [
        *[await elsewhere(*verb) for verb in (("receipts", "ls"), ("notices", "ls"), ("sessions", "ls"), ("doctor",))],
        *[await cli("receipts", "show", "--", keys[name]) for name in ("ambiguous", "erased", "corrupt", "dashed")],
        await cli("receipts", "ls"),
        await cli("receipts", "stats"),
        await cli("receipts", "show", keys["gone"]),
        await cli("receipts", "resolve", keys["ambiguous"], *said, "--yes"),
        await cli("receipts", "resolve", keys["gone"], *said, "--yes", "--revision", 1),
        await cli("receipts", "resolve", keys["corrupt"], *said, "--yes", "--revision", 1),
        await cli("notices", "show", keys["notice"]),
        await cli("notices", "show", keys["notice"].replace(".r1.", ".r2.")),
        await cli("sessions", "show", "acme.chat"),
        await cli("sessions", "show", "acme.nobody"),
        await cli("doctor"),
    ]
    place = f"--server {server.url} --inbox-prefix _INBOX_ops --no-context "
    found = 0
    for ended in runs:
        for command in commands_in(ended):
            theirs = command.startswith("nats ")
            assert command.startswith(f"nats {place}" if theirs else f"natsreceipts {place}--namespace "), command
            found += 1
    assert found >= 25
    for name in ("ambiguous", "erased", "dashed"):
        told = (await cli("receipts", "show", "--json", "--", keys[name])).objects[0]["next"]
        for line in told:
            if line.startswith("$ natsreceipts"):
                words = shlex.split(line)[2:]
                given = [{"YOU": "ann", "WHY": "why", "RESULT_AS_JSON": "1"}.get(word, word) for word in words]
                ended = await Cli()(*given)
                assert "nobody is there to ask" in ended.err  # understood up to there
                assert ended.code == 2


async def test_a_dashed_key_as_it_is_listed(scene):
    server, keys = scene
    ended = await Cli("--server", server.url, "--namespace", "prod")("receipts", "show", keys["dashed"])
    assert ended.code == 2
    assert "A key that begins with - goes last, behind --" in ended.error


async def test_the_password_of_a_url(scene):
    server, keys = scene
    url = server.url.replace("nats://", "nats://ann:hidden@")
    ended = await Cli("--server", url, "--namespace", "prod")("receipts", "show", keys["ambiguous"])
    assert ended.code == 0
    assert f"$ natsreceipts --server {server.url} --user ann --namespace prod receipts resolve" in ended.out
    assert "Set NATS_PASSWORD for that: it is not printed." in ended.out
    assert "hidden" not in ended.out + ended.err


async def test_an_erased_one_with_a_hashed_name(own_server):
    """The names are taken from a revision that still has them."""
    cli = Cli("--server", own_server.url)
    async with connect(own_server.url, provision=True) as toolkit:
        run = toolkit.run(LONG, "r")
        await ambiguous_call(run, [])
        key = run.key("send", []).kv_key
        assert key.startswith("=H")
        nc = await nats.connect(own_server.url)
        try:
            await nc.jetstream().publish(f"$KV.receipts.{key}", b"", headers={"KV-Operation": "DEL"})
            shown = (await cli("receipts", "show", key, "--json")).objects[0]
            assert any(f"receipts resolve '{key}'" in line for line in shown["next"])  # = means something to zsh
            say = ("--not-applied", *BY, "--yes", "--revision", shown["revision"])
            ended = await cli("receipts", "resolve", key, *say)
            assert ended.code == 0, ended.err
            assert await run.execute("send", [], lambda: "anew") == "anew"
            bare = toolkit.run(LONG, "s").key("send", []).kv_key
            await nc.jetstream().publish(f"$KV.receipts.{bare}", b"", headers={"KV-Operation": "DEL"})
        finally:
            await nc.close()
    shown = (await cli("receipts", "show", bare, "--json")).objects[0]
    assert not any("receipts resolve" in line.split("(")[0] for line in shown["next"])
    assert "ReceiptKey(tenant, run, tool, args_hash)" in json.dumps(shown["next"])
    ended = await cli("receipts", "resolve", bare, "--not-applied", *BY, "--yes", "--revision", shown["revision"])
    assert ended.code == 2
    assert "no revision is left that holds them" in ended.error
