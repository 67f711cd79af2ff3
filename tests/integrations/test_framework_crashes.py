"""The worker is killed in the middle of a tool call, and its framework starts the turn again.

Before the claim is stored, after it, before the effect, after it, before it is settled, and after that: the mail went
out at most once (each of two equal ones, where the model asks for two), and the agent comes to its end: with the
result, or honestly, with the word that nobody knows.
"""

from __future__ import annotations

import functools
import os
import signal
import sys

import framework_workers as workers
import pytest
from frameworks import framework

from natsreceipts.testing import kill_worker
from natsreceipts.testing.child import command_for
from natsreceipts.testing.worker_process import WorkerProcess

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform == "win32", reason="kill -9"),
]

WORKERS = {
    "pydantic-ai": ("pydantic_ai", workers.pydantic_ai_turn),
    "pydantic-ai-session": ("pydantic_ai", workers.pydantic_ai_session),
    "langchain": ("langchain.agents", workers.langchain_turn),
}


@pytest.fixture(params=WORKERS)
def worker(request):
    name, function = WORKERS[request.param]
    framework(name)
    return function


@pytest.fixture
def kill(tmp_path):
    return functools.partial(kill_worker, folder=tmp_path / "trials", timeout=120.0)


def only_receipts(message):
    return message.subject.startswith("$KV.receipts.")


def looked_at(trial):
    """How often the mail went out, what the agent ended with, and what the receipts say."""
    return len(trial.lines("outbox")), trial.lines("output"), sorted(each.status for each in trial.receipts)


async def test_killed_at_each_write_of_a_receipt(kill, worker):
    trials = await kill(worker, writes=only_receipts)
    assert [trial.error for trial in trials] == [""] * 5
    before_claim, after_claim, before_settle, after_settle, unkilled = map(looked_at, trials)
    assert before_claim == after_settle == unkilled == (1, ["done"], ["completed"])
    assert after_claim == (0, ["unknown"], ["ambiguous"])
    assert before_settle == (1, ["unknown"], ["ambiguous"])


@pytest.mark.parametrize("die", ["before", "after"])
async def test_killed_in_the_tool(worker, tmp_path, own_server, die):
    folder = tmp_path / "work"
    folder.mkdir()
    command = command_for(worker, (own_server.url, folder, die), tmp_path / "task", tmp_path / "report")
    for status in (-signal.SIGKILL, 0):
        async with WorkerProcess(command, env=dict(os.environ), log=tmp_path / "log") as process:
            assert await process.end(until=None, timeout=120.0) == status, (tmp_path / "log").read_text()
    assert workers.lines(folder, "output") == ["unknown"]
    assert len(workers.lines(folder, "outbox")) == (1 if die == "after" else 0)


async def test_two_equal_mails_are_two(kill, worker):
    trials = await kill(worker, "", True, writes=only_receipts, moments=("after",))
    for trial in trials:
        assert trial.error == "", trial.output
        sent = trial.lines("outbox")
        assert len(sent) == len(set(sent)) <= 2, trial  # each has an idempotency key of its own
        receipts = [each.status for each in trial.receipts]
        assert len(receipts) == 2
        honest = ["unknown"] if "ambiguous" in receipts else ["done"]
        assert trial.lines("output") == honest, trial
        assert len(sent) >= receipts.count("completed")
    assert len(trials[-1].lines("outbox")) == 2
