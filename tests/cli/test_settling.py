"""Settling from the command line: what is asked, what is refused, what is written."""

from __future__ import annotations

import json

import pytest
from program import Terminal, program
from scenes import ambiguous_call, no_writes, stand
from support import Effect, put, until

BY = ("--by", "ann", "--reason", "seen in the outbox")


@pytest.fixture
async def ambiguous(run):
    """The key and the revision of an ambiguous receipt."""
    revision = await ambiguous_call(run, ["it"])
    return run.key("send", ["it"]), revision


async def test_a_script_completes(cli, run, ambiguous, tmp_path):
    key, revision = ambiguous
    file = tmp_path / "result.json"
    file.write_text('{"id": "m-1"}')
    ended = await cli(
        "receipts", "resolve", key.kv_key, "--completed", f"@{file}", *BY, "--yes", "--revision", revision
    )
    assert (ended.code, ended.err) == (0, "")
    assert "every later attempt gets that result" in ended.out
    assert await run.execute("send", ["it"], Effect("wrong")) == {"id": "m-1"}


async def test_a_script_says_not_applied(cli, run, ambiguous, toolkit):
    key, revision = ambiguous
    ended = await cli(
        "receipts", "resolve", key.kv_key, "--not-applied", *BY, "--yes", "--revision", revision, "--json"
    )
    assert ended.code == 0
    (settled,) = ended.objects
    assert settled["key"] == key.kv_key
    assert settled["status"] == "failed"
    assert settled["error"]["notApplied"] is True
    assert settled["resolved"] == {"by": "ann", "reason": "seen in the outbox"}
    assert await run.execute("send", ["it"], Effect("anew")) == "anew"


async def test_the_result_from_the_input(server, namespace, ambiguous, toolkit):
    key, revision = ambiguous
    flags = ("--server", server.url, "--namespace", namespace)
    text = json.dumps({"text": "é"})
    ended = await program(
        *("receipts", "resolve", key.kv_key, "--completed", "@-", *BY, "--yes", "--revision", revision, *flags),
        command=(
            "/bin/sh",
            "-c",
            f'printf %s \'{text}\' | exec "$0" -m natsreceipts "$@"',
            __import__("sys").executable,
        ),
    )
    assert ended.code == 0, ended.err
    assert (await toolkit.receipts.get(key)).result == {"text": "é"}


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ((), "say one of"),
        (("--completed", "1", "--not-applied"), "say one of"),
        (("--not-applied", "--yes"), "--yes needs --revision N"),
        (("--completed", "done", "--yes", "--revision", "1"), "in double quotes"),
        (("--completed", "@/no/such/file", "--yes", "--revision", "1"), "No such file"),
        (("--not-applied",), "say --yes --revision N"),
        (("--not-applied", "--yes", "--revision", "0"), "the revision that you looked at"),
        (("--not-applied", "--yes", "--revision", "x"), "See: natsreceipts receipts resolve --help"),
    ],
)
async def test_what_is_no_use(server, namespace, cli, ambiguous, nc, flags, hint):
    async with no_writes(nc, namespace):
        where = ("--server", server.url, "--namespace", namespace)
        ended = await program("receipts", "resolve", ambiguous[0].kv_key, *flags, *BY, *where)
    assert (ended.code, ended.out) == (2, "")
    assert hint in ended.error


async def test_who_and_why_are_asked_for(cli, ambiguous, nc, namespace):
    async with no_writes(nc, namespace):
        ended = await cli("receipts", "resolve", ambiguous[0].kv_key, "--not-applied", "--by", "ann")
        assert ended.code == 2
        assert "--reason" in ended.error
        end = await cli(
            "receipts", "resolve", ambiguous[0].kv_key, "--not-applied", *BY[:3], " ", "--yes", "--revision", 2
        )
        assert end.code == 2
        assert "say who settles this call and why" in end.error


async def test_a_revision_that_was_overtaken(cli, run, ambiguous, nc, namespace):
    key, revision = ambiguous
    await stand(nc, namespace, key, "ambiguous", attempts=2)
    ended = await cli("receipts", "resolve", key.kv_key, "--not-applied", *BY, "--yes", "--revision", revision)
    assert (ended.code, ended.out) == (6, "")
    assert f"revision {revision} is not the newest" in ended.error


async def test_what_is_not_to_be_settled(cli, run, toolkit, nc, namespace):
    await run.execute("send", ["done"], Effect())
    done, live, absent = (run.key("send", [name]) for name in ("done", "live", "absent"))
    revision = await stand(nc, namespace, live, "running", leaseMs=600_000)
    for key, number, code, hint in (
        (done, (await toolkit.receipts.get(done)).revision, 6, "final"),
        (live, revision, 6, "holds a live lease"),
        (absent, 1, 3, "no attempt was ever made"),
    ):
        ended = await cli("receipts", "resolve", key.kv_key, "--not-applied", *BY, "--yes", "--revision", number)
        assert (ended.code, ended.out) == (code, "")
        assert hint in ended.error
    ended = await cli(
        *("receipts", "resolve", live.kv_key, "--not-applied", *BY),
        *("--yes", "--revision", revision, "--even-if-running"),
    )
    assert ended.code == 0


async def test_an_erased_one_is_settled(cli, run, nc, namespace):
    key = run.key("send", ["erased"])
    revision = await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    ended = await cli("receipts", "resolve", key.kv_key, "--completed", "null", *BY, "--yes", "--revision", revision)
    assert ended.code == 0, ended.err
    assert await run.execute("send", ["erased"], Effect("wrong")) is None


# at a terminal


def asking(server, namespace, key, *flags, columns=80):
    where = ("--server", server.url, "--namespace", namespace)
    return Terminal.of("receipts", "resolve", key.kv_key, *flags, *BY, *where, columns=columns, NO_COLOR="1")


@pytest.mark.parametrize("columns", [60, 100])
async def test_it_shows_what_is_settled_and_asks(server, namespace, ambiguous, toolkit, nc, columns):
    key, revision = ambiguous
    async with asking(server, namespace, key, "--completed", '{"id": 1}', columns=columns) as terminal:
        await terminal.until(f"Settle revision {revision}, ambiguous, so? [y/N] ")
        said = " ".join(terminal.seen.split())
        assert "attempt 1 may or may not have taken effect: ConnectionResetError" in said
        assert 'Every later attempt gets this result and executes nothing: {"id": 1}' in said
        assert (await toolkit.receipts.get(key)).status == "ambiguous"
        terminal.type("y\n")
        assert await terminal.end() == 0
    assert (await toolkit.receipts.get(key)).result == {"id": 1}


async def test_it_says_what_not_applied_claims(server, namespace, run, nc, toolkit):
    key = run.key("send", ["live"])
    await stand(nc, namespace, key, "running", leaseMs=600_000, holder={"token": "t", "worker": "host-b/7"})
    async with asking(server, namespace, key, "--not-applied", "--even-if-running") as terminal:
        await terminal.until("so? [y/N] ")
        said = " ".join(terminal.seen.split())
        assert (
            "did not take effect, that its worker (host-b/7) is stopped, and that nothing of it can take effect" in said
        )
        terminal.type("yes\n")
        assert await terminal.end() == 0
    assert (await toolkit.receipts.get(key)).status == "failed"


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04", "settle\n"])
async def test_anything_but_yes_settles_nothing(server, namespace, ambiguous, nc, answer):
    async with no_writes(nc, namespace), asking(server, namespace, ambiguous[0], "--not-applied") as terminal:
        await terminal.until("so? [y/N] ")
        terminal.type(answer)
        assert await terminal.end() == 6
    assert "nothing was settled" in terminal.seen


@pytest.mark.parametrize("unbuffered", ["", "1"])
async def test_ctrl_c_at_the_question(server, namespace, ambiguous, nc, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    async with no_writes(nc, namespace), asking(server, namespace, ambiguous[0], "--not-applied") as terminal:
        await terminal.until("so? [y/N] ")
        terminal.interrupt()
        assert await terminal.end() == 130
    assert "[y/N] \r\nnatsreceipts: stopped by Ctrl-C" in terminal.seen
    assert "Traceback" not in terminal.seen


async def test_what_moved_while_it_was_asked(server, namespace, ambiguous, nc):
    key, _ = ambiguous
    async with asking(server, namespace, key, "--not-applied") as terminal:
        await terminal.until("so? [y/N] ")
        await stand(nc, namespace, key, "ambiguous", attempts=2)
        terminal.type("y\n")
        assert await terminal.end() == 6
    assert "is not the newest" in " ".join(terminal.seen.split())


async def test_a_running_one_is_looked_at_twice(server, namespace, run, nc, toolkit):
    key = run.key("send", ["over"])
    await stand(nc, namespace, key, "running", leaseMs=1000)
    revision = (await toolkit.receipts.get(key)).revision

    async def over():
        return (await toolkit.receipts.server_time()).lease_left(await toolkit.receipts.get(key)) <= 0

    await until(over)
    async with asking(server, namespace, key, "--not-applied", "--revision", str(revision)) as terminal:
        await terminal.until("so? [y/N] ")
        terminal.type("y\n")
        assert await terminal.end() == 0
    assert [r.status for r in await toolkit.receipts.history(key)] == ["running", "ambiguous", "failed"]


async def test_a_revision_that_is_not_the_newest_is_not_asked_about(server, namespace, ambiguous, nc):
    async with (
        no_writes(nc, namespace),
        asking(server, namespace, ambiguous[0], "--not-applied", "--revision", "1") as t,
    ):
        assert await t.end() == 6
    assert "[y/N]" not in t.seen


@pytest.mark.parametrize(
    "result", ["NaN", "Infinity", "1e999", '{"a": -1e999}', '"\\ud800"', "{", '{"a":1,"a":2}', "9" * 30, "[" * 5000]
)
async def test_what_is_no_json_is_no_result(cli, ambiguous, nc, namespace, result):
    key, revision = ambiguous
    async with no_writes(nc, namespace):
        ended = await cli(
            "receipts", "resolve", key.kv_key, "--completed", result, *BY, "--yes", "--revision", revision
        )
    assert (ended.code, ended.out) == (2, "")
    assert "is no JSON" in ended.err


async def test_an_agent_that_cannot_be_told(cli, ambiguous, toolkit, nc, namespace):
    """It is settled all the same, and said that the agent was not told."""
    key, revision = ambiguous
    await nc.jetstream().delete_stream(f"KV_{namespace}-notices")
    await nc.jetstream().add_stream(
        name=f"KV_{namespace}-notices", subjects=[f"$KV.{namespace}-notices.>"], max_msg_size=1, allow_direct=True
    )
    ended = await cli(
        "receipts", "resolve", key.kv_key, "--not-applied", *BY, "--notify", "planner", "--yes", "--revision", revision
    )
    assert ended.code == 1
    assert "settled as failed" in ended.out
    assert "NOT told" in ended.err
    assert (await toolkit.receipts.get(key)).status == "failed"
