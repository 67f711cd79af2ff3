"""How the program ends where it was stopped while it started, or cannot write: one line, and never our mistake."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import sys

import pytest
from program import PROGRAM, Cli, program
from scenes import ambiguous_call, no_writes, stand
from support import Effect, put

BY = ("--by", "ann", "--reason", "seen in the outbox")
ENTRY = "import natsreceipts_cli; natsreceipts_cli.main()"


@pytest.mark.parametrize("module", ["pydantic_core", "nats", "typer", "natsreceipts.cli.edge"])
async def test_ctrl_c_while_it_is_imported(module):
    """Each at the beginning of the import of a module, which is where a Ctrl-C of the first moments arrives."""
    code = f"""
import os, signal, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop())
{ENTRY}
"""
    ended = await program("receipts", "ls", command=(sys.executable, "-c", code))
    assert (ended.code, ended.out, ended.err) == (130, "", "natsreceipts: stopped by Ctrl-C\n")


async def test_an_ignored_ctrl_c_stays_ignored():
    """As for a command in the background of a script."""
    code = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); os.kill(os.getpid(), 2); {ENTRY}"
    ended = await program("--version", command=(sys.executable, "-c", code))
    assert (ended.code, ended.err) == (0, "")


async def test_ctrl_c_behind_the_end():
    """While the interpreter goes away."""
    code = f"import atexit, os; atexit.register(os.kill, os.getpid(), {int(signal.SIGINT)}); {ENTRY}"
    ended = await program("--version", command=(sys.executable, "-c", code))
    assert ended.err in ("", "natsreceipts: stopped by Ctrl-C\n")
    assert ended.code == 130


# the output


async def shell(line, **env):
    """Run a line of bash in which ``$P`` is the program."""
    return await program(command=("/bin/bash", "-c", line), P=" ".join(PROGRAM), **env)


@pytest.mark.parametrize("arguments", ["--help", "--version", "receipts ls --help", "receipts"])
async def test_into_a_pipe_that_is_closed_already(arguments):
    ended = await shell(f"exec 3> >(exec 0<&-; exit); wait $!; $P {arguments} >&3")
    assert (ended.code, ended.err) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
async def test_a_full_disk_and_no_output(server, namespace, toolkit, run):
    revision = await ambiguous_call(run, [])
    key = run.key("send", []).kv_key
    where = f"-s {server.url} --namespace {namespace}"
    for arguments in ("--help", f"receipts ls {where}"):
        ended = await shell(f"$P {arguments} > /dev/full")
        assert ended.code == 1
        assert ended.error == "the output cannot be written: No space left on device"
    ended = await shell(f"$P receipts ls {where} >&-")
    assert (ended.code, ended.error) == (1, "the output cannot be written: standard output is closed")
    ended = await shell(f"$P receipts ls {where} 2>&-; echo $?")
    assert ended.lines[-1] == "0"
    ended = await shell(f"$P receipts show x {where} 2>/dev/full")
    assert ended.code == 2
    said = f"--not-applied --by a --reason b --yes --revision {revision}"
    ended = await shell(f"$P receipts resolve {key} {said} {where} > /dev/full")
    assert ended.code == 1
    assert "No space left on device; it IS settled, as failed at revision" in ended.error


async def test_a_settle_into_a_closed_pipe(server, namespace, toolkit, run):
    revision = await ambiguous_call(run, [])
    said = f"--not-applied --by a --reason b --yes --revision {revision} -s {server.url} --namespace {namespace}"
    line = f"exec 3> >(exec 0<&-; exit); wait $!; $P receipts resolve {run.key('send', []).kv_key} {said} >&3"
    ended = await shell(line)
    assert ended.code == 141
    assert "it IS settled, as failed at revision" in ended.error


async def test_no_input(server, namespace, toolkit, run):
    await ambiguous_call(run, [])
    where = f"-s {server.url} --namespace {namespace} --by a --reason b"
    key = run.key("send", []).kv_key
    ended = await shell(f"$P receipts resolve {key} --not-applied {where} <&-")
    assert ended.code == 2
    assert "nobody is there to ask" in ended.error
    ended = await shell(f"$P receipts resolve {key} --completed @- --yes --revision 1 {where} <&-")
    assert ended.code == 2
    assert "standard input is closed" in ended.error


async def test_tls_says_nothing_of_its_own(tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl on the PATH")
    from natsreceipts import embedded

    made = await program(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=s"),
        *("-keyout", tmp_path / "s.key", "-out", tmp_path / "s.pem", "-addext", "subjectAltName=IP:127.0.0.1"),
        command=(openssl,),
    )
    assert made.code == 0, made.err
    config = f'tls {{ cert_file: "{tmp_path}/s.pem", key_file: "{tmp_path}/s.key" }}'
    async with embedded(config=config) as server:
        for verb in (("up",), ("receipts", "ls", "--json")):
            ended = await program(*verb, "-s", server.url, "--tlsca", tmp_path / "s.pem")
            assert (ended.code, ended.err) == (0, "")


# what is given


NASTY = ["nats://[foo", "nats://127.0.0.1:99999", "nats://127.0.0.1:abc", "::::", "http://x", ",", "nats://a b", "\0"]


@pytest.mark.parametrize(
    "flags",
    [
        *(("--server", url) for url in NASTY),
        ("--inbox-prefix", "a b"),
        ("--inbox-prefix", "a.>"),
        *(("--timeout", text) for text in ("0", "-1", "9" * 400, "1e3", "2d", "s")),
        ("--context", "x" * 400 + ".json"),
        ("--context", "x" * 400),
        ("--context", "\0.json"),
        *((flag, "/") for flag in ("--creds", "--nkey", "--tlsca", "--context")),
        *((flag, "\0") for flag in ("--creds", "--nkey", "--tlsca")),
        ("--creds", "data:;base64,!!"),
        ("--namespace", "a b"),
        ("--namespace", "\ud800"),
    ],
)
async def test_what_cannot_be_used_is_no_mistake_of_ours(flags):
    ended = await Cli("--server", "nats://127.0.0.1:1", "--timeout", "300ms")("receipts", "ls", *flags)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert "mistake of natsreceipts" not in ended.error


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, '{"url": ["a"]}', '{"url": {}}', "[]", "null", '{"url": "a", "url": "b"}', "{", '{"url": "[x"}'],
)
async def test_contexts_that_cannot_be_used(tmp_path, text, monkeypatch):
    monkeypatch.delenv("NATS_URL", raising=False)
    file = tmp_path / "c.json"
    file.write_text(text)
    ended = await Cli("--context", file)("receipts", "ls")
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert "mistake of natsreceipts" not in ended.error


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "12345678901234567890123", "9007199254740993", '"\\ud800"', '{"a":1,"a":2}'],
)
async def test_details_that_not_every_reader_takes_alike(cli, toolkit, nc, namespace, value):
    said = ("--run", "r", "--step", "s", "--request-id", "q", "--to", "ops", "--decision", "d", "--outcome", "o")
    async with no_writes(nc, namespace):
        ended = await cli("notices", "file", *said, "--detail", f"n={value}")
    assert (ended.code, ended.out) == (2, "")
    assert "n" in ended.error


async def test_what_a_notice_says_to_others(cli, toolkit):
    said = ("--run", "r", "--step", "s", "--request-id", "q", "--to", "ops", "--outcome", "o", "--decision")
    filed = await cli("notices", "file", *said, "d", "--json")
    key = filed.objects[0]["key"]
    other = await cli("notices", "file", *said, "e")
    assert other.code == 6
    assert f"natsreceipts {' '.join(cli.flags)} notices show {key}`" in other.error
    assert (await cli("notices", "consume", key, "--by", "ann")).code == 0
    second = await cli("notices", "consume", key, "--by", "bob")
    assert second.code == 6
    assert " ms" not in second.error
    assert "Z: leave it out" in second.error


# look first, then ask


@pytest.fixture
def terminal(monkeypatch):
    """A standard input on which somebody has said yes to whatever is asked."""
    main, side = pty.openpty()
    os.write(main, b"y\n")
    with open(side, encoding="utf-8") as given:
        monkeypatch.setattr(sys, "stdin", given)
        yield
    os.close(main)


async def test_what_cannot_be_settled_is_not_asked_about(terminal, cli, run, toolkit, nc, namespace):
    await run.execute("send", ["done"], Effect())
    keys = {name: run.key("send", [name]) for name in ("done", "live", "absent", "corrupt", "newer", "failed")}
    await stand(nc, namespace, keys["live"], "running", leaseMs=600_000)
    await stand(nc, namespace, keys["failed"], "failed", error={"type": "E", "message": "m", "notApplied": True})
    await put(nc, namespace, keys["corrupt"], b"oops")
    await put(nc, namespace, keys["newer"], json.dumps({"v": 99}).encode())
    codes = {"done": 6, "live": 6, "failed": 6, "absent": 3, "corrupt": 7, "newer": 7}
    async with no_writes(nc, namespace):
        for name, code in codes.items():
            asked = await cli("receipts", "resolve", keys[name].kv_key, "--not-applied", *BY)
            assert (asked.code, asked.out) == (code, ""), name
            newest = (await toolkit.receipts.revisions(keys[name])) or [None]
            number = newest[-1].revision if newest[-1] is not None else 1
            script = ("--yes", "--revision", number)
            told = await cli("receipts", "resolve", keys[name].kv_key, "--not-applied", *BY, *script)
            assert (told.code, told.out) == (code, ""), name
            assert told.error.partition("come back in")[0] == asked.error.partition("come back in")[0]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--by", " ", "--reason", "b"), 2),
        (("--by", "a", "--reason", "x" * 3000), 2),
        ((*BY, "--notify", ""), 2),
        ((*BY, "--revision", "0"), 2),
        ((*BY, "--revision", "1000000"), 6),
    ],
)
async def test_what_is_no_use_is_not_asked_about(terminal, cli, run, toolkit, nc, namespace, flags, code):
    await ambiguous_call(run, [])
    async with no_writes(nc, namespace):
        ended = await cli("receipts", "resolve", run.key("send", []).kv_key, "--not-applied", *flags)
    assert (ended.code, ended.out) == (code, "")


async def test_an_erased_one_whose_payload_is_gone(cli, run, toolkit, nc, namespace):
    """Putting the record back would not give the result back."""
    await run.execute("send", [], Effect("x" * 600_000))
    key = run.key("send", [])
    assert (await cli("receipts", "show", key.kv_key)).code == 0
    await nc.jetstream().purge_stream(f"OBJ_{namespace}-receipt-payloads")
    told = await cli("receipts", "show", key.kv_key, "--json")
    assert told.code == 7
    assert "every later attempt gets PayloadMissing" in told.objects[0]["next"][0]
    revision = await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    told = await cli("receipts", "show", key.kv_key, "--json")
    first, *commands = told.objects[0]["next"]
    assert told.code == 0
    assert "its result cannot be had any more" in first
    assert [("nats" in line, "--completed" in line) for line in commands] == [(True, False), (True, True)]
    ended = await cli("receipts", "resolve", key.kv_key, "--completed", "null", *BY, "--yes", "--revision", revision)
    assert ended.code == 0, ended.err
    assert await run.execute("send", [], Effect("wrong")) is None
