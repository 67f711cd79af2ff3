"""The core knows no framework, and no framework's extra pulls in another's."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
FRAMEWORKS = sorted(EXTRAS.keys() & {"pydantic-ai", "langchain", "openai-agents", "mcp", "fastmcp"})
MODULES = {
    "pydantic_ai", "langchain", "langchain_core", "langgraph", "agents", "mcp", "fastmcp", "openai", "anthropic",
}  # fmt: skip


def required(extra):
    return {re.match(r"[\w.-]+", each)[0].lower() for each in EXTRAS[extra]}


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_an_extra_is_its_framework_alone(extra):
    others = set().union(*(required(other) for other in FRAMEWORKS if other != extra))
    assert not required(extra) & others
    assert "natsreceipts" not in required(extra)
    assert all(re.search(r">=\d", each) for each in EXTRAS[extra]), "a lower bound that is tested"


def test_the_core_imports_no_framework():
    code = "import sys, natsreceipts, natsreceipts.cli, natsreceipts.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not MODULES & set(done.stdout.split())
