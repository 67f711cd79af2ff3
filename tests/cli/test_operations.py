"""The commands of docs/operations.md, run as they stand there, print what stands there.

``NATSRECEIPTS_WRITE_DOCS=1`` writes what they print into the page instead.
"""

from __future__ import annotations

import os
import re
import shutil

import pytest
from console import BLOCK, PAGE, Shell, commands, play, told


async def test_the_commands_print_what_the_page_says(own_server, nats_cli, tmp_path):
    if shutil.which("jq") is None:
        pytest.skip("needs jq on the PATH")
    page = PAGE.read_text(encoding="utf-8")
    shell = Shell(own_server.url, tmp_path, nats_cli)
    first, *blocks = BLOCK.findall(page)
    printed = {}
    for block in (first, *blocks):
        said = []
        for command, output in commands(block):
            out = await shell.run(command, output.count("\n") or 1)
            said.append(f"$ {command}\n{out}")
            if not os.environ.get("NATSRECEIPTS_WRITE_DOCS"):
                assert told(out) == told(output), command
        printed[block] = "".join(said)
        if block is first:
            shell.names(**await play(own_server.url))
    if os.environ.get("NATSRECEIPTS_WRITE_DOCS"):
        PAGE.write_text(BLOCK.sub(lambda match: f"```console\n{printed[match[1]]}```", page), encoding="utf-8")


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https:)([^)#]+)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).is_file(), target
