"""Scripts without an event loop as processes: killed in a call and run again, interrupted, ended without closing."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("sync_script.py"))

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


class Scripts:
    def __init__(self, url, namespace, folder):
        self.given = (url, namespace, str(folder / "effects"))
        self.effects = folder / "effects"

    @contextmanager
    def started(self, what):
        process = subprocess.Popen(
            [sys.executable, SCRIPT, what, *self.given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def done(self, what):
        """Its exit status, what it said, and what it complained of."""
        with self.started(what) as process:
            said, complained = process.communicate(timeout=60)
            return process.returncode, said.split(), complained

    def interrupted(self, what, first):
        """Press Ctrl-C once it has said ``first``."""
        with self.started(what) as process:
            assert process.stdout.readline() == f"{first}\n"
            process.send_signal(signal.SIGINT)
            said, complained = process.communicate(timeout=60)
            assert "KeyboardInterrupt" in complained.splitlines()[-1]
            assert process.returncode == -signal.SIGINT
            return said.split()

    def count(self):
        return self.effects.read_text().count("effect") if self.effects.exists() else 0


@pytest.fixture
def scripts(server, namespace, tmp_path):
    return Scripts(server.url, namespace, tmp_path)


def test_killed_in_a_call_and_run_again_there_is_one_effect(scripts):
    assert scripts.done("killed-in")[0] == -signal.SIGKILL
    assert scripts.done("again") == (0, ["ambiguous"], "")
    assert scripts.done("verified") == (0, ["sent"], "")
    assert scripts.done("again") == (0, ["sent"], "")
    assert scripts.count() == 1


def test_killed_before_the_effect_it_is_made_once(scripts):
    assert scripts.done("killed-before")[0] == -signal.SIGKILL
    assert scripts.done("verified") == (0, ["sent"], "")
    assert scripts.done("again") == (0, ["sent"], "")
    assert scripts.count() == 1


def test_ctrl_c_in_a_body_is_written_down(scripts):
    assert scripts.interrupted("body", "begun") == ["interrupted", "ambiguous", "KeyboardInterrupt"]


def test_ctrl_c_while_another_attempt_is_waited_for(scripts, toolkit):
    with toolkit.run("acme", "run-1").call("send", {}) as call:
        assert scripts.interrupted("wait", "begun") == ["interrupted", "running", "None"]
        call.result = 1
    assert toolkit.receipts.get(call.key).status == "completed"


def test_ctrl_c_while_a_watch_waits(scripts, run):
    run.execute("send", {}, lambda: 1)
    assert scripts.interrupted("watch", "completed") == ["interrupted", "completed", "None"]


def test_a_fork_is_refused_and_leaves_the_parents_call_alone(scripts, toolkit):
    code, said, _ = scripts.done("fork")
    assert (code, said) == (0, ["refused", "refused"])
    (receipt,) = toolkit.receipts.list()
    assert (receipt.status, receipt.result, receipt.attempts) == ("completed", "the parent's", 1)


def test_a_script_may_end_without_closing(scripts, toolkit):
    code, said, complained = scripts.done("exits")
    assert (code, said) == (0, ["ends"])
    assert "Error" not in complained
    assert [receipt.status for receipt in toolkit.receipts.list()] == ["ambiguous"]
