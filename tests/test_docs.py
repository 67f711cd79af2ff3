"""What docs/ shows is run, and what docs/wire.md lists is what is written."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import natsreceipts
from natsreceipts.identity import sha256_hex
from natsreceipts.payload import unpack
from natsreceipts.wire import ReceiptRecord

DOCS = Path(__file__).parents[1] / "docs"
WIRE = (DOCS / "wire.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


async def test_the_examples_run(server, namespace, nc):
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True) as toolkit:
        async with toolkit.run("acme", "order 42").call("send_email", {"to": "ann@example.com"}) as call:
            call.result = "sent"
        kv = await nc.jetstream().key_value(f"{namespace}-receipts")
        names = {"toolkit": toolkit, "call": call, "kv": kv, "json": json}
        for page in sorted(DOCS.glob("*.md")):
            for code in PYTHON.findall(page.read_text(encoding="utf-8")):
                compiled = compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                result = eval(compiled, names)
                if inspect.isawaitable(result):
                    await result


def test_every_field_of_a_record_is_listed():
    section = WIRE.split("\n## A receipt\n")[1].split("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {field.alias or name for name, field in ReceiptRecord.model_fields.items()}


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
