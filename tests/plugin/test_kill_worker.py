"""kill_worker: the n-th write, before and after, run again; what is not guarded is found twice."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from pathlib import Path

import nats
import plugin_workers as workers
import pytest

from natsreceipts import connect
from natsreceipts.testing import FaultProxy, Published, WorkerFailed, is_write, kill_worker
from natsreceipts.testing.worker_process import WorkerProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(sys.platform == "win32", reason="kill -9")]


@pytest.fixture
def kill(tmp_path):
    return functools.partial(kill_worker, folder=tmp_path / "trials", timeout=120.0)


def table(trials):
    return [
        (trial.n, trial.moment, len(trial.lines("effects")), trial.error.partition(":")[0], statuses(trial))
        for trial in trials
    ]


def statuses(trial):
    return [receipt.status for receipt in trial.receipts]


async def test_a_guarded_effect(kill):
    trials = await kill(workers.guarded, "mail")
    assert table(trials) == [
        (1, "before", 1, "", ["completed"]),
        (1, "after", 0, "AmbiguousCall", ["ambiguous"]),
        (2, "before", 1, "AmbiguousCall", ["ambiguous"]),
        (2, "after", 1, "", ["completed"]),
        (3, "before", 1, "", ["completed"]),
    ]
    assert [trial.killed_at is None for trial in trials] == [False] * 4 + [True]
    assert all(trial.killed_at.subject.startswith("$KV.receipts.acme.order-42.send.") for trial in trials[:-1])
    assert b'"status":"completed"' in trials[3].killed_at.payload
    assert "AmbiguousCall" in trials[1].output
    assert repr(trials[2]).endswith("(completed), then AmbiguousCall>")
    assert str(trials[-1]) == "not killed"


async def test_an_effect_that_is_not_guarded(kill):
    trials = await kill(workers.unguarded)
    assert table(trials) == [(1, "before", 2, "", []), (1, "after", 2, "", []), (2, "before", 1, "", [])]


async def test_a_command_that_goes_on_for_ever(kill):
    """As in production: jobs from a stream, a command that never ends, and somebody who looks when it is done."""

    async def setup(url):
        async with await nats.connect(url) as client:
            js = client.jetstream()
            await js.add_stream(name="JOBS", subjects=["jobs.*"], retention="workqueue")
            await js.add_consumer("JOBS", durable_name="mailer", ack_wait=3.0)
            await js.publish("jobs.acme", b'{"run": "order-42"}')

    async def until(url):
        async with await nats.connect(url) as client, connect(client, provision=True) as toolkit:
            while (await client.jetstream().stream_info("JOBS")).state.messages:
                if [each async for each in toolkit.receipts.list(status="ambiguous")]:
                    return
                await asyncio.sleep(0.05)

    command = [sys.executable, workers.__file__, "{url}", "{folder}"]
    trials = await kill(command, setup=setup, until=until, moments=("after",))
    assert table(trials)[:2] == [(1, "after", 0, "", ["ambiguous"]), (2, "after", 1, "", ["completed"])]
    assert all(len(trial.lines("effects")) <= 1 for trial in trials)
    assert trials[2].killed_at.subject.startswith("$JS.ACK.JOBS.mailer.")
    assert table(trials)[-1] == (4, "after", 1, "", ["completed"])


async def test_an_until_that_loses_a_cancellation(tmp_path, monkeypatch):
    """Before Python 3.12 one is lost where it meets the answer to a request of nats-py's."""
    monkeypatch.setattr("natsreceipts.testing.worker_process._LONGEST_CLEANUP", 0.05)
    cancelled, begun = [], tmp_path / "begun"

    async def until():
        begun.touch()
        while len(cancelled) < 2:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.append(True)
        raise asyncio.CancelledError

    async with asyncio.timeout(30):
        ends = f"import os, time\nwhile not os.path.exists({str(begun)!r}): time.sleep(0.01)"
        async with WorkerProcess([sys.executable, "-c", ends], env=os.environ, log=tmp_path / "log") as process:
            assert await process.end(until=until, timeout=30) == 0
    assert len(cancelled) == 2


async def test_everything_that_the_worker_has_started_is_killed(kill):
    trials = await kill(workers.with_a_child, moments=("before",))
    assert len(trials) == 2
    for pid in trials[0].lines("children"):
        async with asyncio.timeout(30):
            while _alive(int(pid)):  # killed, and perhaps not yet reaped
                await asyncio.sleep(0.02)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path("/proc/self").exists()


async def test_what_shows_nothing_is_an_error(kill):
    with pytest.raises(WorkerFailed, match="no write that could be seen"):
        await kill(workers.never_writes)


async def test_a_worker_that_fails_by_itself(kill):
    with pytest.raises(WorkerFailed, match=r"(?s)without being killed.*LookupError: no such order"):
        await kill(workers.fails)


@pytest.mark.faults
async def test_a_worker_that_hangs(kill):
    with pytest.raises(TimeoutError, match=r"did not end within 15 s.*\n.*hanging"):
        await kill(workers.hangs, timeout=15.0)


async def test_too_many_writes(kill):
    with pytest.raises(WorkerFailed, match="more than 2 writes"):
        await kill(workers.many_writes, most=2, moments=("before",))


async def test_which_writes_count(kill):
    trials = await kill(workers.many_writes, writes=lambda message: message.payload == b"7")
    assert [(trial.n, trial.moment, trial.killed_at and trial.killed_at.payload) for trial in trials] == [
        (1, "before", b"7"),
        (1, "after", b"7"),
        (2, "before", None),
    ]


async def test_an_error_of_the_function_that_counts(kill):
    def writes(message):
        raise ZeroDivisionError(message.subject)

    with pytest.raises(ZeroDivisionError, match="notes"):
        await kill(workers.many_writes, writes=writes)


async def test_what_cannot_be_run(kill):
    async def local(url, folder):
        pass

    for worker, *args in ([local], [lambda url, folder: None], [workers.guarded, lambda: None], ["worker"], [["a"], 1]):
        with pytest.raises(TypeError):
            await kill(worker, *args)


def test_what_is_a_write():
    for subject, payload, counts in (
        ("$KV.receipts.a.b.c.d", b"{}", True),
        ("orders.done", b"", True),
        ("$JS.ACK.JOBS.mailer.1.2.3.4.5", b"", True),
        ("$JS.ACK.JOBS.mailer.1.2.3.4.5", b"-NAK", True),
        ("$JS.ACK.JOBS.mailer.1.2.3.4.5", b"+WPI", False),
        ("$JS.API.STREAM.MSG.GET.KV_receipts", b"{}", False),
        ("$JS.API.CONSUMER.MSG.NEXT.JOBS.mailer", b"", False),
    ):
        assert is_write(Published(subject, {}, payload)) is counts, subject


async def test_waiting_for_clients_to_go(server):
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        await proxy.disconnected()  # nobody is there
        client = await nats.connect(proxy.url)
        with pytest.raises(TimeoutError, match="1 clients are still connected"):
            await proxy.disconnected(timeout=0.05)
        gone = asyncio.create_task(proxy.disconnected())
        await client.close()
        await gone
        assert proxy.connections == 0
