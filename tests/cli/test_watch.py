"""Receipts as they change: lines in a pipe, a table on a terminal, until Ctrl-C or until nobody reads any more."""

from __future__ import annotations

import asyncio
import json
import re
import signal

import pytest
from program import Terminal, started
from scenes import ambiguous_call, stand
from support import Effect, put

ERASED = {"KV-Operation": "DEL"}


def flags(server, namespace):
    return ("--server", server.url, "--namespace", namespace)


async def away(proxy):
    """As a server that is down: no connection stands, and none can be made."""
    await proxy.refuse()
    await proxy.cut()


async def next_line(process):
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode()


@pytest.mark.parametrize("form", [("--json",), ()])
async def test_lines_in_a_pipe(server, namespace, run, nc, form):
    await run.execute("send", [1], Effect())
    process = await started("receipts", "watch", *form, *flags(server, namespace))
    first = await next_line(process)
    await ambiguous_call(run, [2])
    more = [await next_line(process) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert err.decode() == "natsreceipts: stopped by Ctrl-C\n"
    if form:
        shown = [json.loads(line) for line in (first, *more)]
        assert [(obj["key"], obj["status"]) for obj in shown] == [
            (run.key("send", [1]).kv_key, "completed"),
            (run.key("send", [2]).kv_key, "running"),
            (run.key("send", [2]).kv_key, "ambiguous"),
        ]
    else:
        assert [line.split()[0] for line in (first, *more)] == ["completed", "running", "ambiguous"]


async def test_what_cannot_be_read_does_not_end_it(server, namespace, run, nc):
    await put(nc, namespace, run.key("send", ["bad"]), b"by hand")
    process = await started("receipts", "watch", "--json", *flags(server, namespace))
    async with asyncio.timeout(30):
        assert b"cannot be read" in await process.stderr.readline()
    await run.execute("send", [1], Effect())
    assert json.loads(await next_line(process))["status"] == "running"
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130


async def test_a_pipe_that_closes(server, namespace, run, nc):
    await run.execute("send", [1], Effect())
    process = await started("receipts", "watch", *flags(server, namespace))
    await next_line(process)
    process._transport.get_pipe_transport(1).close()
    await run.execute("send", [2], Effect())  # the next line finds nobody
    async with asyncio.timeout(30):
        assert await process.stderr.read() == b""
        assert await process.wait() == 141


@pytest.mark.parametrize("columns", [60, 120])
async def test_a_table_on_a_terminal(server, namespace, run, nc, columns):
    await run.execute("send", [1], Effect())
    where = flags(server, namespace)
    async with Terminal.of("receipts", "watch", *where, columns=columns, rows=12, NO_COLOR="1") as terminal:
        await terminal.until("1 completed")
        for n in range(20):
            await stand(nc, namespace, run.key("pay", [n]), "ambiguous")
        await terminal.until("20 ambiguous")
        assert re.search(r"completed +1 +\d\d:\d\d:\d\dZ +acme\.", terminal.seen)  # whole, but for the key
        terminal.interrupt()
        assert await terminal.end() == 130
    assert "Traceback" not in terminal.seen
    assert "stopped by Ctrl-C" in terminal.seen
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in terminal.seen.splitlines()) <= columns


async def test_no_table_on_a_dumb_terminal(server, namespace, run):
    await run.execute("send", [1], Effect())
    async with Terminal.of("receipts", "watch", *flags(server, namespace), TERM="dumb") as terminal:
        await terminal.until(run.key("send", [1]).kv_key)
        terminal.interrupt()
        assert await terminal.end() == 130
    assert "\x1b[" not in terminal.seen


@pytest.mark.parametrize("form", [("--json",), ()])
async def test_a_receipt_that_is_deleted_meanwhile(server, namespace, run, nc, form):
    await run.execute("send", [1], Effect())
    key = run.key("send", [1])
    process = await started("receipts", "watch", *form, *flags(server, namespace))
    await next_line(process)
    await put(nc, namespace, key, b"", headers=ERASED)
    line = await next_line(process)
    if form:
        assert {"key": key.kv_key, "status": "erased"}.items() <= json.loads(line).items()
    else:
        assert (line.split()[0], line.split()[-1]) == ("erased", key.kv_key)
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130


async def test_a_row_of_the_table_never_shows_what_no_longer_stands(server, namespace, run, nc):
    for n in (1, 2, 3):
        await run.execute("send", [n], Effect())
    async with Terminal.of("receipts", "watch", *flags(server, namespace), columns=60, NO_COLOR="1") as terminal:
        await terminal.until("3 completed")
        await put(nc, namespace, run.key("send", [1]), b"", headers=ERASED)
        await terminal.until("1 erased")
        await put(nc, namespace, run.key("send", [2]), b"by hand")
        await terminal.until("1 unreadable")
        await terminal.until("cannot be read")
        terminal.interrupt()
        assert await terminal.end() == 130
    table = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.seen).rpartition("updated")[2]
    assert re.findall(r"^(erased|unreadable|completed) ", table, re.MULTILINE) == ["unreadable", "erased", "completed"]


async def test_a_server_that_is_away_is_told_of(proxy, namespace, run):
    await run.execute("send", [1], Effect())
    where = ("--server", proxy.url, "--namespace", namespace)
    async with Terminal.of("receipts", "watch", *where, columns=60) as terminal:
        await terminal.until("1 completed")
        await away(proxy)
        await terminal.until("no server answers: what is shown may be old", 60)
        await proxy.accept()
        await terminal.until("a server answers again", 60)
        terminal.interrupt()
        assert await terminal.end() == 130


@pytest.mark.faults  # an entry is looked for for 15 s
async def test_a_server_that_is_away_is_told_of_by_the_tail_of_a_session(proxy, namespace, toolkit):
    log = toolkit.sessions.open("acme", "chat-7")
    await log.append({"role": "user", "content": "Hello."})
    process = await started("sessions", "tail", "acme.chat-7", "--server", proxy.url, "--namespace", namespace)
    await next_line(process)
    await away(proxy)
    async with asyncio.timeout(60):
        assert (await process.stderr.readline()).startswith(b"natsreceipts: no server answers: what is shown may be")
        await proxy.accept()
        assert await process.stderr.readline() == b"natsreceipts: a server answers again\n"
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130
