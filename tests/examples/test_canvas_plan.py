"""examples/canvas_plan.py as a script: workers killed at all points of the plan, and who asked the canvas for what."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from marked import INTERRUPTIBLE, Marked

import natsreceipts

EXAMPLE = Path(__file__).parents[2] / "examples" / "canvas_plan.py"
OPERATIONS = range(1, 21)
POINTS = ("before", "during", "after")
DEFAULT = [(3, "before"), (9, "during"), (17, "after")]
ROW = re.compile(r"^ *(\d+)  (?:circle|square|star) +(\d+) +(\d+)  (.*)$", re.MULTILINE)


def play(kills, *, options=None, **changes):
    """Run it to its end, and return the rows of its table and all that it printed."""
    marked = Marked(**changes)
    if options is None:
        options = [f"--kill-at={number}:{point}" for number, point in kills]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        env=marked.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    marked.gone()
    check(kills, done.stdout)
    return done.stdout


def check(kills, output):
    """Each operation was done once; only those were asked again that a killed worker had left unrecorded."""
    order = sorted(kills, key=lambda kill: (kill[0], POINTS.index(kill[1])))
    asked, on_record = plan_with(order)
    rows = {int(number): (int(times), int(done), who) for number, times, done, who in ROW.findall(output)}
    assert rows == {number: (len(asked[number]), 1, "; ".join(asked[number])) for number in OPERATIONS}
    assert re.findall(r"kill -9 at (\S+)", output) == [f"{number}:{point}" for number, point in order]
    receipts = re.findall(r"receipt: (\w+), (\d+) of 20 steps", output)
    assert receipts == [*(("running", str(steps)) for steps in on_record), ("completed", "20")]
    assert re.findall(r"has the plan, attempt (\d+)", output) == [str(n + 1) for n in range(len(kills) + 1)]
    assert re.findall(r"op (\d+) was asked (\S+)(?: times)?, done once$", output, re.MULTILINE) == [
        (str(number), "twice" if len(asked[number]) == 2 else str(len(asked[number])))
        for number in OPERATIONS
        if len(asked[number]) > 1
    ]
    assert output.endswith(f"20 operations, {len(kills)} workers killed, 20 shapes on the canvas\n")


def plan_with(kills):
    """What the canvas is to be asked, and how many steps are on record after each kill."""
    asked = {number: [] for number in OPERATIONS}
    on_record, done = [], set()
    for worker, kill in enumerate([*kills, (21, "before")], 1):
        for number in range(on_record[-1] + 1 if on_record else 1, kill[0] + 1):
            if number > 20 or kill == (number, "before"):
                break
            if kill == (number, "during"):
                said = "cut off"
            else:
                said = "known, answered again" if number in done else "done"
                done.add(number)
            asked[number].append(f"worker {worker}: {said}")
        on_record.append(kill[0] - 1)
    return asked, on_record[:-1]


def test_the_default_kills():
    output = play(DEFAULT, options=[])
    assert "op 9 was asked twice, done once" in output
    assert "op 17 was asked twice, done once" in output
    assert "op 3 was" not in output


@pytest.mark.parametrize("variant", [0, *(pytest.param(n, marks=pytest.mark.faults) for n in (1, 2))])
def test_any_other_kills(variant):
    seed = int(os.environ.get("CANVAS_PLAN_SEED") or secrets.randbelow(2**32))
    print(f"CANVAS_PLAN_SEED={seed} (variant {variant})")
    dice = random.Random(f"{seed}.{variant}")
    play([(dice.choice(OPERATIONS), dice.choice(POINTS)) for _ in range(3)])


def test_kills_at_the_very_first_and_the_very_last_point():
    play([(20, "after"), (1, "before"), (20, "after")])


def test_no_kills():
    play([], options=["--no-kills"])


async def test_on_a_given_server(server):
    async with natsreceipts.connect(server.url, provision=True) as toolkit:
        before = {receipt.kv_key async for receipt in toolkit.receipts.list(tenant="acme", tool="canvas_plan")}
        output = await asyncio.to_thread(play, [(12, "after")], NATS_URL=server.url)
        receipts = [receipt async for receipt in toolkit.receipts.list(tenant="acme", tool="canvas_plan")]
    (receipt,) = [receipt for receipt in receipts if receipt.kv_key not in before]
    assert (receipt.status, receipt.attempts, receipt.effect) == ("completed", 2, "resumable")
    assert receipt.worker == "worker 2"
    assert sorted(receipt.steps) == sorted(f"op-{number}" for number in OPERATIONS)
    assert receipt.result == re.findall(r"done, (shape-\d+)", output)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_nothing_is_left_when_it_is_stopped_midway(number, code):
    marked = Marked()
    command = [sys.executable, "-c", INTERRUPTIBLE, str(EXAMPLE)]
    with subprocess.Popen(
        command, env=marked.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout:
                if "worker 2  starts" in line:
                    break
            assert len(marked.processes()) >= 4, "the example, its NATS server, the canvas and a worker"
            process.send_signal(number)
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    assert (process.returncode, errors) == (code, "")
    marked.gone()


def test_an_unknown_point_is_refused():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--kill-at", "21:before"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "21:before" in done.stderr
