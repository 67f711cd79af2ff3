# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What the types of natsreceipts.testing promise. pyright checks this file in strict mode; nothing runs it.

A comment that ignores an error is an assertion here: pyright complains where the error is not there.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import natsreceipts
from natsreceipts import Receipt, Toolkit
from natsreceipts.testing import (
    Direction,
    Fault,
    FaultProxy,
    HeldFault,
    Match,
    Moment,
    Published,
    ServerAddress,
    Trial,
    WorkerFailed,
    is_write,
    kill_worker,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


async def worker(url: str, folder: Path, cents: int) -> None:
    """A worker as kill_worker calls it."""

    async def charge() -> None:
        folder.joinpath("charges").touch()

    async with natsreceipts.connect(url, provision=True, lease=1) as toolkit:
        await toolkit.run("acme", "order-42").execute("charge", {"cents": cents}, charge)


def sync_worker(url: str, folder: Path) -> None:
    """One without an event loop of its own to begin with."""


async def hook(url: str) -> None:
    """What is awaited before a trial, or ends one."""


async def kills(folder: Path) -> None:
    trials = await kill_worker(worker, 5, folder=folder)
    assert_type(trials, list[Trial])
    await kill_worker(sync_worker, folder=folder, moments=("before",), env={"A": "1"}, namespace="prod", most=5)
    await kill_worker(functools.partial(worker, cents=5), folder=folder, setup=hook, until=hook, timeout=9)
    await kill_worker(["python", folder, "{url}"], folder=folder, writes="$KV.>")
    await kill_worker(worker, 5, folder=folder, writes=lambda message: message.payload != b"")
    await kill_worker(worker, 5, folder=folder, writes=is_write)
    await kill_worker(worker, 5)  # pyright: ignore[reportCallIssue]
    await kill_worker(worker, 5, folder=folder, moments=("during",))  # pyright: ignore[reportArgumentType]
    await kill_worker(worker, 5, folder=folder, setup=sync_worker)  # pyright: ignore[reportArgumentType]
    await kill_worker(5, folder=folder)  # pyright: ignore[reportArgumentType]
    for trial in trials:
        assert_type(trial.n, int)
        assert_type(trial.moment, Moment)
        assert_type(trial.killed_at, Published | None)
        assert_type(trial.folder, Path)
        assert_type(trial.lines("outbox"), list[str])
        assert_type(trial.error, str)
        assert_type(trial.receipts, tuple[Receipt, ...])
        assert_type(trial.output, str)
        trial.n = 2  # pyright: ignore[reportAttributeAccessIssue]
    failed: Exception = WorkerFailed("it did not end well")
    raise failed


async def faults(host: str, port: int) -> None:
    async with FaultProxy(host, port) as proxy:
        assert_type(proxy, FaultProxy)
        assert_type(proxy.url, str)
        assert_type(proxy.port, int)
        assert_type(proxy.connections, int)
        lost = proxy.drop_answer("$KV.receipts.>")
        assert_type(lost, Fault)
        assert_type(await lost.hit(), Published)
        assert_type(await lost.answered(2, timeout=5), Published)
        assert_type(lost.hits, list[Published])
        assert_type(lost.answers, list[Published])
        lost.cancel()
        assert_type(proxy.cut_after_store("a.*", nth=2), Fault)
        assert_type(proxy.drop(is_write, count=None), Fault)
        assert_type(proxy.duplicate("a"), Fault)
        assert_type(proxy.observe(">"), Fault)
        held = proxy.delay("a")
        assert_type(held, HeldFault)
        assert_type(held.held, int)
        assert_type(await held.release(), Published)
        match: Match = "$KV.>"
        assert_type(proxy.published(match), list[Published])
        proxy.drop(7)  # pyright: ignore[reportArgumentType]
        await proxy.cut()
        await proxy.refuse()
        await proxy.accept()
        direction: Direction = "to_server"
        await proxy.stall(direction)
        await proxy.resume()
        await proxy.stall("sideways")  # pyright: ignore[reportArgumentType]
        await proxy.connected(2)
        await proxy.disconnected(timeout=5)
    for message in lost.answers:
        assert_type(message.subject, str)
        assert_type(message.payload, bytes)


def test_with_the_fixtures(
    receipts_server: ServerAddress,
    receipts_namespace: str,
    receipts_toolkit: Toolkit,
    receipts_proxy: FaultProxy,
    kill_worker: Callable[..., Coroutine[Any, Any, list[Trial]]],
) -> None:
    """How a test with types names what the plugin's fixtures give."""
    assert_type(receipts_server.url, str)
    assert_type(receipts_server.host, str)
    assert_type(receipts_server.port, int)
