"""examples/openai_agent.py and examples/mcp_server.py as scripts, as a new user would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import framework
from marked import Marked

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(300)


def play(example, *options):
    marked = Marked()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *options],
        env=marked.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    marked.gone()
    return done.stdout


STORIES = {
    (): ("accepted as <m-1@example.com>", "Ann was told.", 1),
    ("--kill-at", "during"): ("cannot tell whether it took effect", "I cannot know", 1),
    ("--kill-at", "before"): ("cannot tell whether it took effect", "I cannot know", 0),
}


@pytest.mark.parametrize("options", STORIES)
def test_openai_agent(options):
    framework("agents")
    reads, says, mails = STORIES[options]
    output = play("openai_agent.py", *options)
    assert output.count("kill -9") == 1
    assert reads in output.partition("the model is going to read: ")[2]
    assert says in output.partition("the agent says: ")[2]
    assert output.endswith(f"mails sent: {mails}\n")


@pytest.mark.parametrize(
    ("options", "again"),
    [((), "replayed, nothing was executed: accepted"), (("--kill-at", "during"), "told: The outcome of this call")],
)
def test_mcp_server(options, again):
    framework("mcp.server.extension")
    output = play("mcp_server.py", *options)
    assert "call 1: the server was killed" in output
    assert f"call 2: {again}" in output
    assert output.endswith("mails sent: 1\n")
