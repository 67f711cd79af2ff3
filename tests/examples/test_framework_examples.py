"""The examples of the frameworks as scripts: a worker is killed after the mail, and nothing is done twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import framework

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
@pytest.mark.parametrize(
    ("example", "module"), [("pydantic_ai_agent.py", "pydantic_ai"), ("langchain_agent.py", "langchain.agents")]
)
def test_nothing_is_done_twice(example, module, tmp_path):
    framework(module)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    before, after = done.stdout.split("the worker was killed; the turn is started again")
    assert before.strip() == "kill -9"
    said, did = after.split("what was done:\n")
    assert "charge_card: charged 20.00" in said
    assert "outcome of this call of send_email is unknown" in said
    assert [line.split(" (")[0] for line in did.splitlines()] == ["charged 20.00", "mailed ann@example.com"]
