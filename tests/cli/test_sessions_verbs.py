"""Sessions from the command line: listed, shown, followed, and what wake would do."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest
from program import Terminal, started
from scenes import ambiguous_call, stand
from support import Effect

KEY = "acme.chat"


def user(text):
    return {"role": "user", "content": text}


def calls(*named):
    return {
        "role": "assistant",
        "content": [{"type": "toolCall", "id": i, "name": name, "arguments": args} for i, name, args in named],
    }


@pytest.fixture
def log(toolkit):
    return toolkit.sessions.open("acme", "chat")


@pytest.fixture
async def cut_off(log, run):
    """A session that ends in three calls: one done, one ambiguous, one that never began."""
    await log.append(user("Tell Ann."))
    asked = [("c1", "send", ["done"]), ("c2", "send", ["it"]), ("c3", "send", ["new"])]
    await log.append(calls(*((i, name, {"args": args}) for i, name, args in asked)), run=run)
    await run.execute("send", {"args": ["done"]}, Effect("m-1"))
    await ambiguous_call(run, {"args": ["it"]})
    return log


async def test_ls(cli, cut_off, toolkit):
    await toolkit.sessions.open("globex", "s 1").append(user("hi"))
    ended = await cli("sessions", "ls")
    assert [line.split()[-1] for line in ended.lines] == [KEY, "globex.s=201"]
    (one,) = (await cli("sessions", "ls", "--json", "--tenant", "acme")).objects
    assert one["key"] == KEY
    assert (one["tenantId"], one["sessionId"], one["lastSeq"]) == ("acme", "chat", (await cut_off.load()).last_seq)
    assert one["updated"].endswith("Z")
    none = await cli("sessions", "ls", "--tenant", "nobody")
    assert (none.code, none.out) == (0, "")


async def test_show_gives_the_entries_as_they_stand(cli, cut_off):
    entries = (await cli("sessions", "show", KEY, "--json")).objects
    assert [entry["body"] for entry in entries] == (await cut_off.load()).messages
    assert [entry["key"] for entry in entries] == [KEY, KEY]
    assert entries[1]["parentId"] == entries[0]["id"]
    assert entries[1]["runId"] == "order-42"
    assert entries[0]["time"] < entries[1]["time"]
    ended = await cli("sessions", "show", KEY)
    assert ended.out.count("without a result: send") == 3
    assert f"sessions wake {KEY} --dry-run --guarded send" in ended.out


async def test_show_tells_what_wake_wrote(cli, cut_off):
    await cut_off.suspend(["c3"])
    await cut_off.wake(guarded={"send": lambda arguments: arguments})
    ended = await cli("sessions", "show", KEY)
    assert ended.code == 0
    assert "from its receipt, completed at revision " in ended.out
    assert "close, interrupted_outcome_unknown" in ended.out
    assert "on hold: c3" in ended.out
    assert "without a result" not in ended.out
    kinds = [entry["kind"] for entry in (await cli("sessions", "show", KEY, "--json")).objects]
    assert kinds == ["message", "message", "suspend", "message", "message"]


async def test_other_branches(cli, log):
    first = await log.append(user("one"))
    await log.append(user("two"))
    await log.branch(first)
    await log.append(user("three"))
    shown = (await cli("sessions", "show", KEY, "--json")).objects
    assert [entry["body"]["content"] for entry in shown] == ["one", "three"]
    every = (await cli("sessions", "show", KEY, "--json", "--all")).objects
    assert [(entry["body"]["content"], entry["active"]) for entry in every] == [
        *(("one", True), ("two", False), ("three", True)),
    ]
    assert "(on no active branch)" in (await cli("sessions", "show", KEY, "--all")).out


@pytest.mark.parametrize(("lines", "before"), [("1", ["two"]), ("0", []), ("9", ["one", "two"])])
async def test_tail(server, namespace, log, lines, before):
    await log.append(user("one"))
    await log.append(user("two"))
    where = ("--server", server.url, "--namespace", namespace)
    process = await started("sessions", "tail", KEY, "--json", "-n", lines, *where)
    try:
        async with asyncio.timeout(60):
            seen = [json.loads(await process.stdout.readline()) for _ in before]
            further = asyncio.ensure_future(process.stdout.readline())
            while not further.done():  # until it looks: with -n 0 nothing says when it does
                await log.append(user("three"))
                await asyncio.wait([further], timeout=0.5)
            seen.append(json.loads(await further))
    finally:
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert [entry["body"]["content"] for entry in seen] == [*before, "three"]
    assert (process.returncode, err) == (130, b"natsreceipts: stopped by Ctrl-C\n")


async def test_wake_tells_and_writes_nothing(cli, cut_off, nc, namespace):
    before = (await cut_off.load()).last_seq
    ended = await cli("sessions", "wake", KEY, "--dry-run", "--guarded", "send", "--json")
    assert (ended.code, ended.err) == (0, "")
    told = {call["toolCallId"]: (call["receiptStatus"], call["errorKind"]) for call in ended.objects}
    assert told == {
        "c1": ("completed", None),
        "c2": ("ambiguous", "interrupted_outcome_unknown"),
        "c3": ("absent", "interrupted_never_started"),
    }
    assert {call["key"] for call in ended.objects} == {KEY}
    text = (await cli("sessions", "wake", KEY, "--dry-run", "--guarded", "send")).out
    assert "send (c1) would get what the receipt has" in text
    assert (await cut_off.load()).last_seq == before
    unguarded = (await cli("sessions", "wake", KEY, "--dry-run", "--json", "--effect", "send=read")).objects
    assert {call["receiptStatus"] for call in unguarded} == {None}


async def test_wake_while_a_worker_is_at_it(cli, cut_off, run, nc, namespace):
    await stand(nc, namespace, run.key("send", {"args": ["new"]}), "running", leaseMs=600_000)
    flags = ("sessions", "wake", KEY, "--dry-run", "--guarded", "send")
    ended = await cli(*flags)
    assert ended.code == 0
    assert "wake would refuse: send may be running under a live lease" in ended.out
    assert (await cli(*flags, "--json")).objects[0]["busy"] is True


async def test_nothing_to_wake(cli, log):
    await log.append(user("hi"))
    ended = await cli("sessions", "wake", KEY, "--dry-run")
    assert ended.lines == ["nothing to do: every call has a result, or is on hold"]


async def test_a_transcript_cannot_steer_the_terminal(cli, log):
    await log.append(user("\x1b[2J\u202e"))
    await log.append(calls(("i\x1b", "na\u202eme", {"a": "\x1b[2J"})))
    for arguments in (("show", KEY), ("wake", KEY, "--dry-run")):
        ended = await cli("sessions", *arguments)
        assert ended.code == 0
        assert "\x1b" not in ended.out
        assert "\u202e" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("show", "acme.nobody"), 3, "there is no session acme.nobody"),
        (("show", "acme"), 2, "it is not TENANT.SESSION"),
        (("show", "a.b.c"), 2, "it is not TENANT.SESSION"),
        (("show", "=H" + "0" * 64 + ".x"), 2, "is hashed"),
        (("show", "a b.c"), 2, "cannot be used"),
        (("wake", KEY), 2, "only --dry-run here"),
        (("wake", KEY, "--dry-run", "--effect", "read"), 2, "use TOOL=EFFECT"),
        (("wake", KEY, "--dry-run", "--effect", "send=no"), 2, "use one of"),
    ],
)
async def test_what_is_no_use(cli, log, arguments, code, hint):
    await log.append(user("hi"))
    ended = await cli("sessions", *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert hint in ended.error


async def test_60_columns(server, namespace, cut_off):
    where = ("--server", server.url, "--namespace", namespace)
    async with Terminal.of("sessions", "show", KEY, *where, columns=60) as terminal:
        assert await terminal.end() == 0
    assert "without a result" in terminal.seen
