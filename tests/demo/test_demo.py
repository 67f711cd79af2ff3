"""The demo, run as a person runs it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_COMMAND = [str(Path(sys.executable).parent / "natsreceipts"), "demo"]
_INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""A shell's background job, which a test run may be, and what it starts would ignore SIGINT."""
_SECONDS = 110
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^ *(order-\d+) +(\d+) +(.*?) *$", re.MULTILINE)


def environment(**changes):
    mine = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    return {**mine, "TERM": "xterm-256color", **changes}


def play(folder, *options, **changes):
    done = subprocess.run(
        [*_COMMAND, *options],
        cwd=folder,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_SECONDS,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


@contextlib.contextmanager
def playing(folder, *options):
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE, *_COMMAND, *options],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pids(output):
    return {int(pid) for pid in re.findall(r"\(pid (\d+)\)", output)}


def alive(pid):
    """Whether this very process runs: a pid that was given to somebody else, or a zombie, does not count."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"natsreceipts" in command


def descendants(pid):
    found, todo = set(), [pid]
    while todo:
        parent = todo.pop()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = {int(child) for child in path.read_text().split()}
            except OSError:
                continue
            todo += children - found
            found |= children
    return found


def gone(processes, *, within=30.0):
    deadline = time.monotonic() + within
    while left := {pid for pid in processes if alive(pid)}:
        if time.monotonic() > deadline:
            pytest.fail(f"still running: {left}")
        time.sleep(0.05)


def shape(line):
    """A line without the numbers that differ from run to run."""
    return re.sub(r"^ *[0-9.]+ s|\(pid \d+\)|\bworker \d+|\(delivery \d+\)|(?<=\d) +\d+ +\d+ +\d+ ", "", line).strip()


def rows(output):
    table = output[output.index("deliveries") :]
    return {name: rest.split(maxsplit=2) for name, _, rest in _ROW.findall(table)}


def check_receipts(output):
    table = rows(output)
    assert len(table) == 12
    by_status = {status: [job for job, cells in table.items() if cells[2] == status] for status in STATUSES}
    assert by_status["ambiguous"] == ["order-6"]
    assert {"order-4", "order-9"} <= set(by_status["completed, replayed"])
    assert sum(len(jobs) for jobs in by_status.values()) == 12
    assert {cells[1] for cells in table.values()} == {"1"}, "each mail arrived once"
    assert {cells[0] for cells in table.values()} == {"1"}, "each call was entered once"
    assert output.count("kill -9 worker") == 6


STATUSES = ("completed", "completed, replayed", "ambiguous")


def test_with_receipts_no_mail_is_sent_twice_and_one_is_ambiguous(tmp_path):
    code, output = play(tmp_path)
    assert code == 0, output
    check_receipts(output)
    assert "\x1b" not in output, "no colour in a pipe"
    assert max(map(len, re.sub(r"(?m)^(nats kv|natsreceipts receipts show) .*$", "", output).splitlines())) <= 80
    assert re.search(
        r"(?m)^nats kv history receipts acme\.order-6\.send_email\.[0-9a-f]{64} --server nats://\S+$", output
    )
    assert re.search(r"(?m)^natsreceipts receipts show acme\.order-6\.\S+ --server nats://\S+$", output)
    assert re.search(r"(?m)^nats kv get receipts acme\.order-6\.\S+ --raw --server nats://\S+$", output)
    gone(pids(output))
    assert list(tmp_path.iterdir()) == []
    shown = {shape(line) for line in README.split("```text\n")[1].split("```")[0].splitlines()}
    assert shown - {shape(line) for line in output.splitlines()} == {"..."}, "README.md shows what the demo prints"


def test_without_receipts_mails_are_sent_twice(tmp_path):
    code, output = play(tmp_path, "--without-receipts", COLUMNS="60", NO_COLOR="1", FORCE_COLOR="1")
    assert code == 0, output
    assert re.search(r"Sent twice: .*order-4,\s+order-6,\s+order-9\.", output)
    assert "\x1b[3" not in output, "no colour where NO_COLOR asks for none"
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines())) <= 60
    gone(pids(output))


@pytest.mark.faults
def test_narrow_and_in_colour(tmp_path):
    code, output = play(tmp_path, COLUMNS="60", FORCE_COLOR="1", PYTHONIOENCODING="ascii")
    assert code == 0, output
    assert "\x1b[" in output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    check_receipts(plain)
    said = re.sub(r"(?m)^(nats kv|natsreceipts receipts) .*$", "", plain)  # commands are to be copied whole
    assert max(map(len, said.splitlines())) <= 60


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_when_it_is_stopped_midway(tmp_path, number, code):
    """Also after SIGKILL: then there is nobody left to stop the others, and they end by themselves."""
    with playing(tmp_path) as process:
        for line in process.stdout:
            if "order-3" in line:
                break
        started = descendants(process.pid)
        assert len(started) >= 2, "a server and a worker"
        process.send_signal(number)
        _, errors = process.communicate(timeout=100)
        assert process.returncode == code
    assert "Traceback" not in errors
    gone(started)


def test_keep_leaves_the_server_until_interrupted(tmp_path):
    with playing(tmp_path, "--keep") as process:
        seen = ""
        for line in process.stdout:
            seen += line
            if "Ctrl-C" in line:
                break
        check_receipts(seen)
        server = int(re.findall(r"\(pid (\d+)\)", seen)[-1])
        assert alive(server)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0
    assert errors == ""
    gone(pids(seen))


@pytest.mark.parametrize(
    ("missing", "said"),
    [("typer", "natsreceipts[cli]"), ("rich", "natsreceipts[cli]"), ("aiosmtpd", "natsreceipts[demo]")],
)
def test_what_is_not_installed_is_named_in_one_line(tmp_path, missing, said):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    done = subprocess.run(
        _COMMAND, env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert missing in done.stderr
    assert said in done.stderr


def test_without_a_server_to_start_it_says_so(tmp_path):
    done = subprocess.run(
        _COMMAND,
        env=environment(NATS_SERVER=str(tmp_path / "nats-server")),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "nats-server" in done.stderr
