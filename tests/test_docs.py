"""What docs/ shows is run, and what docs/wire.md lists is what is written."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import get_args

import natsreceipts
from natsreceipts import NoticeSpec, NoticeStatus, RunNoticeFact, telemetry
from natsreceipts.announce import NEEDS_A_PERSON
from natsreceipts.identity import sha256_hex
from natsreceipts.payload import unpack
from natsreceipts.wire import CloseInfo, EntryKind, EntryRecord, ReceiptRecord, ReceiptSaid

DOCS = Path(__file__).parents[1] / "docs"
WIRE = (DOCS / "wire.md").read_text(encoding="utf-8")
SESSIONS = (DOCS / "sessions.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


async def test_the_examples_run(server, namespace, nc, capsys):
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True) as toolkit:
        async with toolkit.run("acme", "order 42").call("send_email", {"to": "ann@example.com"}) as call:
            call.result = "sent"
        kv = await nc.jetstream().key_value(f"{namespace}-receipts")
        names = {"toolkit": toolkit, "call": call, "kv": kv, "json": json, "natsreceipts": natsreceipts, "nc": nc}
        for page in sorted(DOCS.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            if page.name not in ("sessions.md", "sync.md", "telemetry.md") and not text.startswith("<!-- needs:"):
                for code in PYTHON.findall(text):
                    await run(code, page.name, names)
    assert 'build | approved | by="ann" budget=1200' in capsys.readouterr().out
    vectors = json.loads((DOCS.parent / "tests" / "vectors" / "partitions.json").read_text(encoding="utf-8"))
    for case in vectors["cases"]:
        number = f"-{case['partition']}" if case["partitions"] > 1 else ""
        assert names["bucket_of"](case["key"], case["partitions"]) == f"receipts{number}"


async def run(code, page, names):
    result = eval(compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(result):
        await result


class Provider:
    """Stands for a mail provider, in the examples on sessions."""

    def __init__(self):
        self.sent = []

    async def send(self, to, text, key):
        assert key
        self.sent.append((to, text))
        return f"<m-{len(self.sent)}@example.com>"

    async def send_one(self):
        return await self.send("ann@example.com", "Order 42 is on its way.", "key")


async def test_the_examples_on_sessions_run(server, namespace, capsys):
    mail = {"to": "ann@example.com", "text": "Order 42 is on its way."}

    async def model(messages):
        """Have the mail sent, and say what came of it."""
        if messages[-1]["role"] == "user":
            return calling("call_0", mail)
        return {"role": "assistant", "content": messages[-1]["content"]}

    def calling(call_id, arguments):
        call = {"type": "toolCall", "id": call_id, "name": "send_email", "arguments": arguments}
        return {"role": "assistant", "content": [call]}

    provider = Provider()
    blocks = PYTHON.findall(SESSIONS)
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True) as toolkit:
        names = {"toolkit": toolkit, "provider": provider, "model": model, "__name__": "sessions"}
        for code in blocks:
            if code.startswith("report ="):  # a worker was killed between two calls, of which one is on record
                await names["session"].load()
                for call_id, arguments in (("call_1", mail), ("call_2", {**mail, "to": "cy@example.com"})):
                    await names["session"].append(calling(call_id, arguments), run="chat-7")
            await run(code, "sessions.md", names)
    assert provider.sent == [("ann@example.com", "Order 42 is on its way."), ("bob@example.com", "Bye.")]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "Order 42" in line or line == "<m-1@example.com>"][-1] == "<m-1@example.com>"
    assert sum(line.startswith("send_email completed ") for line in lines) == 1
    assert sum(line.endswith(" interrupted_never_started") for line in lines) == 1
    assert {line.split()[0] for line in lines[-2:]} == {"chat-7", "chat-8"}


async def test_the_examples_on_telemetry_run(own_server, capsys):
    names = {"natsreceipts": natsreceipts, "url": own_server.url, "send": Provider().send_one}
    blocks = PYTHON.findall((DOCS / "telemetry.md").read_text(encoding="utf-8"))
    for code in blocks:
        if "natsreceipts.otel" not in code or importlib.util.find_spec("opentelemetry") is not None:
            await run(code, "telemetry.md", names)
    assert capsys.readouterr().out == "replayed: send_email\n"


def test_every_event_is_listed():
    page = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    table = page.split("| event | when | fields |\n")[1].split("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    listed = {re.sub(r"\W", "", row[0]): tuple(re.findall(r"`(\w+)`", row[2])) for row in rows}
    assert listed == {event.__name__: event._fields for event in get_args(telemetry.Event)}
    for kind in (telemetry.DecisionKind, telemetry.SettledAs, telemetry.WriteKind):
        for name in get_args(kind):
            assert f"`{name}`" in page
    logged = set(re.findall(r"^\| `([a-z_]+)` \| (?:DEBUG|INFO|WARNING|ERROR)", page, re.MULTILINE))
    source = "".join(path.read_text(encoding="utf-8") for path in (DOCS.parent / "natsreceipts").rglob("*.py"))
    assert logged == set(re.findall(r"fields\(\s*\"(\w+)\"", source))


async def test_the_examples_without_an_event_loop_run(own_server, capsys):
    class BlockingProvider:
        upload = publish = staticmethod(lambda: "done")

        def __init__(self):
            self.keys = []

        def send(self, to, text, key):
            self.keys.append(key)

        def charge(self, amount, key):
            self.keys.append(key)
            return amount

    provider = BlockingProvider()
    names = {"provider": provider, "url": own_server.url, "__name__": "sync"}
    async with natsreceipts.connect(own_server.url, provision=True):
        for code in PYTHON.findall((DOCS / "sync.md").read_text(encoding="utf-8")) * 2:
            await asyncio.to_thread(exec, compile(code, "sync.md", "exec"), names)
    assert len(set(provider.keys)) == len(provider.keys) == 2
    assert capsys.readouterr().out.count(" completed\n") == 6


def listed(section):
    """The names in the first column of the tables of a section of docs/wire.md."""
    text = WIRE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", row)]


def fields(model):
    return [field.alias or name for name, field in model.model_fields.items()]


def test_every_field_of_a_record_is_listed():
    assert sorted(listed("A receipt")) == sorted(fields(ReceiptRecord))


def test_every_field_of_an_entry_is_listed():
    inner = [
        f"{outer}.{name}" for outer, model in (("close", CloseInfo), ("receipt", ReceiptSaid)) for name in fields(model)
    ]
    bodies = ["body.toolCallIds", "body.message", "body.keepFrom"]
    assert sorted(listed("A session's entry")) == sorted([*fields(EntryRecord), *inner, *bodies])
    for kind in get_args(EntryKind):
        assert f"`{kind}`" in WIRE.split("\n## A session's entry\n")[1]


def test_links_lead_somewhere():
    for page in DOCS.glob("*.md"):
        text = re.sub(r"`[^`]*`", "", PYTHON.sub("", page.read_text(encoding="utf-8")))
        for target in re.findall(r"\]\((?!https:)([^)#]+)", text):
            assert (DOCS / target).is_file(), target


def test_every_field_of_a_notice_is_listed():
    section = WIRE.split("\n## A notice\n")[1].split("\n## ")[0]
    fact = RunNoticeFact("a", "b")
    records = [
        NoticeSpec(run="r", step="s", addressee="a", fact=fact, at=0),
        NoticeStatus(consumed_at=0, by="t", observed_spec_revision=1),
    ]
    written = [name for record in records for name in json.loads(record.to_bytes())]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == written


def test_every_decision_is_listed():
    page = (DOCS / "notices.md").read_text(encoding="utf-8")
    table = page.split("| decision | when |\n")[1]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    assert listed == {*NEEDS_A_PERSON.values(), "call-resolved"}


def test_the_extension_types_are_the_ones_that_are_read():
    section = WIRE.split("MessagePack uses these extension types")[1].split("\n## ")[0]
    numbers = [int(n) for cell in re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE) for n in cell.split(",")]
    assert sorted(numbers) == list(range(1, 10))
    for number in range(1, 12):
        problem = ""
        try:
            unpack(bytes([0xC7, 0, number]))
        except ValueError as error:
            problem = str(error)
        assert ("is not known" in problem) is (number > 9)


def test_the_digest_is_plain_sha256():
    assert sha256_hex(b"{}") == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
