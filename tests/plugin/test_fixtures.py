"""The pytest plugin as users have it: in test runs of their own, with warnings as errors."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nats
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
[MAIL, LOST] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(400)

[INI] = re.findall(r"^```ini\n# pytest.ini\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CONFIGURATION = INI.replace("asyncio_mode = auto", "asyncio_mode = {mode}") + "filterwarnings = error\n"


class Suite:
    """Somebody's tests, in a folder of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {}

    async def run(self, *arguments, mode="auto", **files):
        (self.folder / "pytest.ini").write_text(CONFIGURATION.format(mode=mode))
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
        names = [point.value for point in importlib.metadata.entry_points(group="pytest11")]
        if "pytest_natsreceipts" not in names:  # natsreceipts was not installed from this checkout
            command += ["-p", "pytest_natsreceipts"]
        environment = {name: value for name, value in os.environ.items() if name != "NATSRECEIPTS_TEST_URL"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=self.folder,
            env=environment | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=380,
            check=False,
        )
        return done.returncode, done.stdout


@pytest.fixture
def suite(tmp_path):
    return Suite(tmp_path)


def test_the_plugin_is_registered():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"natsreceipts": "pytest_natsreceipts"}


async def test_a_test_of_ten_lines_passes_where_the_tool_is_guarded(suite):
    """As docs/testing.md shows it, word for word."""
    status, said = await suite.run(test_mail=MAIL)
    assert status == 0, said
    assert "1 passed" in said


async def test_and_fails_where_it_is_not(suite):
    guard = 'await toolkit.run("acme", "order-42").execute("send_mail", {"to": "ann"}, send_mail)'
    assert guard in MAIL
    assert "`await send_mail()`" in PAGE
    status, said = await suite.run(test_mail=MAIL.replace(guard, "await send_mail()"))
    assert status == 1, said
    assert "1 failed" in said
    [shown] = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in shown.splitlines():
        assert line in said, said


def test_it_is_ten_lines():
    """Without blank lines, imports and the tool itself."""
    tool = MAIL[MAIL.index("    async def send_mail") : MAIL.index("    async with natsreceipts")]
    lines = [line for line in MAIL.replace(tool, "").splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10


FIXTURES = """
import natsreceipts
import pytest


@pytest.mark.asyncio
async def test_a_toolkit(receipts_toolkit, receipts_namespace):
    run = receipts_toolkit.run("acme", "order-42")
    assert await run.execute("send", {}, lambda: "sent") == "sent"
    [receipt] = [each async for each in receipts_toolkit.receipts.list()]
    assert receipt.status == "completed"


@pytest.mark.asyncio
async def test_another_is_empty(receipts_toolkit):
    assert [each async for each in receipts_toolkit.receipts.list()] == []


@pytest.mark.asyncio
async def test_the_server(receipts_server, receipts_namespace):
    with pytest.raises(natsreceipts.NotProvisioned):
        async with natsreceipts.connect(receipts_server.url, namespace=receipts_namespace):
            pass
    assert receipts_server.url.endswith(f"{receipts_server.host}:{receipts_server.port}")


def test_a_sync_test(receipts_server, receipts_namespace, kill_worker):
    assert receipts_server.port
    assert callable(kill_worker)
"""


@pytest.mark.parametrize("mode", ["strict", "auto"])
async def test_the_fixtures(suite, mode):
    lost = f"import natsreceipts\nimport pytest\n\n\n@pytest.mark.asyncio\n{LOST}"
    status, said = await suite.run(mode=mode, test_fixtures=FIXTURES, test_lost=lost)
    assert status == 0, said
    assert "5 passed" in said


async def test_a_given_server_is_used_and_left_clean(suite, own_server):
    suite.environment["NATSRECEIPTS_TEST_URL"] = own_server.url
    status, said = await suite.run(test_fixtures=FIXTURES, test_where=WHERE.format(port=own_server.port))
    assert status == 0, said
    async with await nats.connect(own_server.url) as client:
        assert await client.jetstream().streams_info() == []


WHERE = """
def test_where(receipts_server):
    assert receipts_server.port == {port}
"""

OWN = """
import pytest


@pytest.fixture
def receipts_server():
    return "mine"


def test_mine(receipts_server):
    assert receipts_server == "mine"
"""


async def test_a_fixture_of_the_users_own_wins(suite):
    status, said = await suite.run(test_own=OWN)
    assert status == 0, said


UNUSED = """
import sys


def test_nothing_is_imported():
    assert "pytest_natsreceipts" in sys.modules
    assert not {"natsreceipts", "nats", "pydantic"} & set(sys.modules)
"""


async def test_a_suite_that_uses_none_of_it_imports_none_of_it(suite):
    status, said = await suite.run("-p", "no:hypothesispytest", test_unused=UNUSED)
    assert status == 0, said
    assert "1 passed" in said


def test_the_toolkit_needs_no_pytest():
    code = "import sys; sys.modules['pytest'] = sys.modules['pytest_asyncio'] = None; import natsreceipts.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
