"""examples/session_wake.py as a script: workers killed at all points, what wake made of it, and what was done."""

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

EXAMPLE = Path(__file__).parents[2] / "examples" / "session_wake.py"
PLAN = [["read_order", "charge_card"], ["set_status", "print_label"], ["send_email"]]
OPAQUE = ("charge_card", "send_email")
POINTS = ("before", "during", "after")
EVERY = [f"{tool}:{point}" for line in PLAN for tool in line for point in POINTS]
DEFAULT = ["charge_card:after", "set_status:before", "print_label:during", "send_email:during"]


def play(kills, *, options=None, **changes):
    """Run it to its end, and return what it printed, each line whole."""
    marked = Marked(**changes)
    if options is None:
        options = [f"--kill-at={kill}" for kill in kills]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        env=marked.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    marked.gone()
    output = re.sub(r"\n {21}(?=\S)", " ", done.stdout)
    check(kills, output)
    return output


def check(kills, output):
    decided, unknown = story(kills)
    said = re.findall(r"wake: (\w+): its receipt is (\w+);", output)
    assert [(tool, "absent" if status == "withdrawn" else status) for tool, status in said] == decided
    assert sorted(re.findall(r"kill -9 at (\S+)", output)) == sorted(kills)
    first, last = re.findall(r"the model says: (.*)", output)
    assert first == (f"All is done, except that I cannot know about {', '.join(unknown)}." if unknown else last)
    assert last == "All is done."
    assert re.findall(r"settles its receipt", output) == ["settles its receipt"] * len(unknown)
    log, _, rest = output.partition("\nThe session's log\n")[2].partition("\nWhat the model reads by now")
    later, _, effects = rest.partition("\nWhat the tools did\n")
    assert sorted(re.findall(r"^  toolResult  \[wake, .*?\] (\w+):", log, re.MULTILINE)) == sorted(
        tool for tool, _ in decided
    )
    assert re.findall(r"^  toolResult  (\w+): ", later, re.MULTILINE) == unknown
    done = re.findall(r"^  worker \d+ +(\w+): ", effects, re.MULTILINE)
    paid = ["set_status"] * (2 if "set_status:during" in kills else 1)
    assert sorted(done) == sorted(["charge_card", *paid, "label", "pickup", "send_email"])
    assert output.endswith(f"\n{len(kills)} workers killed. Done twice: nothing.\n")


def story(kills):
    """What wake is to say of which call, and of which calls nobody knows what they came to."""
    left, decided, unknown = set(kills), [], []
    for line in PLAN:
        wanted = list(line)
        while wanted:
            hit = next(
                ((n, point) for n, tool in enumerate(wanted) for point in POINTS if f"{tool}:{point}" in left), None
            )
            if hit is None:
                break
            number, point = hit
            tool = wanted[number]
            left.remove(f"{tool}:{point}")
            again = wanted[number + 1 :]
            if tool == "read_order":
                said = "absent"
            elif point == "during":
                said = "ambiguous" if tool in OPAQUE else "running"
            else:
                said = "absent" if point == "before" else "completed"
            decided += [(tool, said), *((each, "absent") for each in again)]
            if said == "ambiguous":
                unknown.append(tool)
                left -= {f"{tool}:after"}
            wanted = again if said in ("ambiguous", "completed") else [tool, *again]
    # A person settles what nobody knew, and the wake of the next turn puts that in.
    return decided + [(tool, "completed") for tool in unknown], unknown


def test_the_default_kills():
    output = play(DEFAULT, options=[])
    assert "charge_card: its receipt is completed; the receipt has its result. The model reads: 20.00 charged" in output
    assert "This call of set_status was never started" in output
    assert "It is safe to issue again with the same arguments" in output
    assert "its receipt cannot tell whether it took effect" in output
    assert "  toolResult  send_email: mail to ann@example.com: Order 42 is on its way.\n" in output


@pytest.mark.parametrize("variant", [0, *(pytest.param(n, marks=pytest.mark.faults) for n in (1, 2))])
def test_any_other_kills(variant):
    seed = int(os.environ.get("SESSION_WAKE_SEED") or secrets.randbelow(2**32))
    print(f"SESSION_WAKE_SEED={seed} (variant {variant})")
    dice = random.Random(f"{seed}.{variant}")
    kills = dice.sample(EVERY, 4)
    for tool in OPAQUE:  # what nobody knows the outcome of is not called again
        if f"{tool}:during" in kills and f"{tool}:after" in kills:
            kills.remove(f"{tool}:after")
    play(kills)


async def test_on_a_given_server(server):
    async with natsreceipts.connect(server.url, provision=True) as toolkit:
        before = {receipt.kv_key async for receipt in toolkit.receipts.list(tenant="acme", tool="charge_card")}
        await asyncio.to_thread(play, ["charge_card:during", "print_label:before"], NATS_URL=server.url)
        receipts = [receipt async for receipt in toolkit.receipts.list(tenant="acme", tool="charge_card")]
        (receipt,) = [receipt for receipt in receipts if receipt.kv_key not in before]
        assert (receipt.status, receipt.attempts, receipt.result) == ("completed", 1, "20.00 charged for order 42")
        session = toolkit.sessions.open("acme", receipt.key.run)
        loaded = await session.load()
        assert natsreceipts.find_orphan_tool_calls(loaded.messages) == []
        assert [entry.close.error_kind for entry in loaded.entries if entry.close] == [
            "interrupted_outcome_unknown",
            "interrupted_never_started",
        ]
        request = await session.context()
        texts = [each["content"][0]["text"] for each in request.messages if each["role"] == "toolResult"]
        assert "20.00 charged for order 42" in texts
        assert not request.closed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_nothing_is_left_when_it_is_stopped_midway(number, code):
    marked = Marked()
    command = [sys.executable, "-c", INTERRUPTIBLE, str(EXAMPLE)]
    with subprocess.Popen(
        command, env=marked.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout:
                if "worker 4  starts" in line:
                    break
            assert len(marked.processes()) >= 3, "the example, its NATS server and a worker"
            process.send_signal(number)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (code, "")
    marked.gone()


def test_an_unknown_point_is_refused():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--kill-at", "send_fax:before"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "send_fax:before" in done.stderr
