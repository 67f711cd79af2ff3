"""The console blocks of docs/operations.md: the scene that they are about, and what they print."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from pathlib import Path

import nats
from program import Terminal
from support import Message, record_of

from natsreceipts import AmbiguousCall, connect

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_VARIES = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?Z?", "TIME"),
    (r"\b\d\d:\d\d:\d\d\b", "TIME"),
    (r"\b[0-9a-f]{24}\b", "NONCE"),
    (r"\b\d+(\.\d)? (ms|s|m|h|d)( \d+ (s|m|h))?", "LONG"),
    (r" {2,}", "  "),  # columns behind something that varies
    (r" +(?=\n|$)", ""),
)


def told(text):
    """A text without what differs from run to run."""
    for pattern, name in _VARIES:
        text = re.sub(pattern, name, text)
    return text.strip("\n")


def commands(block):
    """The commands of a block and what each prints, as the page has it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


async def play(url):
    """Make the calls that the page is about, and give its names for their keys."""

    async def charge():
        raise TimeoutError("no answer from the provider")

    async with connect(url, worker="host-a/101") as toolkit, await nats.connect(url) as client:
        run, other = toolkit.run("acme", "order-42"), toolkit.run("acme", "order-43")
        calls = {"KEY": (run, {"cents": 1999}), "PAY": (other, {"cents": 500})}
        for name, (of, args) in calls.items():
            with contextlib.suppress(TimeoutError):
                await of.execute("charge_card", args, charge)
            if name == "KEY":
                async with run.call("send_email", {"to": "ann@example.com"}) as call:
                    call.result = {"id": "m-1"}
        over = run.key("make_pdf", {})
        record = record_of(over, leaseMs=1, holder={"token": "0" * 24, "worker": "host-b/7"})
        await client.jetstream().publish(f"$KV.receipts.{over.kv_key}", json.dumps(record).encode())
        with contextlib.suppress(AmbiguousCall):
            async with toolkit.delivery(Message(), operator="ops"):
                await other.execute("charge_card", {"cents": 500}, charge)
        (notice,) = await toolkit.notices.find(addressee="ops")
        await converse(toolkit)
        keys = {name: of.key("charge_card", args).kv_key for name, (of, args) in calls.items()}
        return keys | {"MAIL": run.key("send_email", {"to": "ann@example.com"}).kv_key, "NOTICE": notice}


async def converse(toolkit):
    """A session that is cut off after its call was carried out."""
    log, run = toolkit.sessions.open("acme", "chat-7"), toolkit.run("acme", "chat-7")
    await log.append({"role": "user", "content": "Tell Ann that order 42 is on its way."})
    asked = {"type": "toolCall", "id": "call_0", "name": "send_email", "arguments": {"to": "ann@example.com"}}
    await log.append({"role": "assistant", "content": [{"type": "text", "text": "I do."}, asked]}, run=run)
    async with run.call("send_email", {"to": "ann@example.com"}) as call:
        call.result = {"id": "m-7"}


class Shell:
    """Runs a page's commands one after the other, in a folder of its own."""

    def __init__(self, url, folder, nats_cli):
        self._folder = folder
        self._env = {
            **os.environ,
            "NATS_URL": url,
            "PATH": f"{Path(nats_cli).parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
        }

    def names(self, **values):
        """Give shell variables a value."""
        self._env |= values

    async def run(self, command, lines):
        """What a command prints; one that runs on is ended after so many lines."""
        script = f'set -o pipefail; natsreceipts() {{ "$PYTHON" -m natsreceipts "$@"; }}; {command}'
        if " stream view " in command:  # which pages, and wants a terminal for that
            shell = ("/bin/bash", "-c", script)
            async with Terminal.of(command=shell, columns=1000, cwd=self._folder, **self._env) as terminal:
                await terminal.end()
            return terminal.seen.replace("\r\n", "\n")
        process = await asyncio.create_subprocess_exec(
            *("/bin/bash", "-c", script),
            cwd=self._folder,
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        async with asyncio.timeout(60):
            if " watch " not in command:
                return (await process.communicate())[0].decode()
            said = [(await process.stdout.readline()).decode() for _ in range(lines)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        await process.communicate()
        return "".join(said)
