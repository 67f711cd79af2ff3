"""The last net: what it catches, what it lets fall, and that it says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from standstill import Ticker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")

CONFTEST = """
import pytest
from standstill import Standstill

def pytest_configure(config):
    config.pluginmanager.register(Standstill())
"""
INI = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
addopts = -p no:cacheprovider
"""
TESTS = '''
import asyncio, os, re, signal, subprocess, time
import pytest

runs = []

def stand_still():
    """Stop this process for a while."""
    waker = subprocess.Popen(["/bin/sh", "-c", f"while sleep 0.6; do kill -CONT {os.getpid()} || exit; done"])
    longest = 0.0
    while longest < 0.55:
        before = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        longest = time.monotonic() - before
    waker.kill()
    waker.wait()

@pytest.fixture
async def loop_and_run():
    """Made anew for each run."""
    runs.append("fixture")
    yield asyncio.get_running_loop(), runs.count("fixture")
    runs.append("end of fixture")

@pytest.fixture(scope="session")
def shared():
    runs.append("shared")
    if runs.count("shared") == 1:
        stand_still()
        raise OSError("too late")
    return "made"

async def test_that_failed_over_a_standstill(loop_and_run):
    loop, run = loop_and_run
    assert loop is asyncio.get_running_loop()
    if run == 1:
        stand_still()
        raise OSError("the lease ended")
    assert runs == ["fixture", "end of fixture", "fixture"]

def test_whose_shared_fixture_failed_over_a_standstill(shared):
    assert shared == "made"

def test_that_always_fails():
    runs.append("always")
    if runs.count("always") == 1:
        stand_still()
    raise OSError("always")

def test_that_failed_on_a_quiet_machine():
    runs.append("quiet")
    assert runs.count("quiet") == 2
'''


def test_what_the_process_uses_itself_is_no_standstill():
    times = [(0.0, 0.0), (1.0, 0.9), (1.1, 0.9), (3.0, 2.1), (3.5, 2.2), (4.0, 2.3)]
    ticker = Ticker(iter(times).__next__)
    assert [round(ticker.longest(), 1) for _ in range(3)] == [0.1, 0.1, 0.7]
    ticker.reset()
    assert round(ticker.longest(), 1) == 0.4


@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n", "2"]], ids=["alone", "xdist"])
def test_what_fails_over_a_standstill_is_run_once_more(tmp_path, options):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", *options],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    print(done.stdout, done.stderr)
    outcomes = re.findall(r"^((?:PASSED|FAILED|ERROR) test_some\.py::test_\w+)", done.stdout, re.MULTILINE)
    assert {outcome.replace("test_some.py::test_", "") for outcome in outcomes} == {
        "PASSED that_failed_over_a_standstill",
        "PASSED whose_shared_fixture_failed_over_a_standstill",
        "FAILED that_always_fails",
        "FAILED that_failed_on_a_quiet_machine",
    }
    said = done.stdout.split(" standstill =")[1]
    assert "3 tests were run again because the machine stood still" in said
    for test, error in (
        ("that_failed_over_a_standstill", "call: OSError: the lease ended"),
        ("whose_shared_fixture_failed_over_a_standstill", "setup: OSError: too late"),
        ("that_always_fails", "call: OSError: always"),
    ):
        assert re.search(rf"::test_{test}: stood still for \d\.\d s, and failed with: {error}", said)
