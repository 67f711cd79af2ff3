"""The processes of an example, however they came to be, and a way to start it that Ctrl-C can end."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import pytest

# A shell's background job, which a test run may be, and what it starts would ignore SIGINT.
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Marked:
    """An environment by which every process that was started from it is found, whoever its parent is by now."""

    def __init__(self, **changes):
        self.mark = f"EXAMPLE_TEST={secrets.token_hex(8)}"
        name, value = self.mark.split("=")
        mine = {name: value for name, value in os.environ.items() if name != "NATS_URL"}
        self.environment = {**mine, name: value, **changes}

    def processes(self):
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def gone(self, *, within=30.0):
        deadline = time.monotonic() + within
        while left := self.processes():
            if time.monotonic() > deadline:
                pytest.fail(f"still running: {left}")
            time.sleep(0.05)
