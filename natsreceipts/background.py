"""What runs beside a body: work that is seen through, first heartbeats, threads that outlive their call."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence

__all__ = ["Door", "Gate", "Pulse", "Stragglers", "all_done", "all_of", "merged", "see_through", "stopped"]

_log = logging.getLogger("natsreceipts")

_T = TypeVar("_T")

_CANCEL_AGAIN = 1.0
"""Seconds after which what was cancelled, and still goes on, is cancelled again."""


async def see_through(work: Coroutine[Any, Any, _T], *, within: float | None) -> _T:
    """Run ``work`` to its end even if this task is cancelled meanwhile, then let the cancellation go on.

    After ``within`` seconds (None: never) the work itself is cancelled, and TimeoutError raised.
    """
    task = asyncio.get_running_loop().create_task(work)
    end = asyncio.get_running_loop().call_later(within, task.cancel) if within is not None else None
    cancelled: asyncio.CancelledError | None = None
    try:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    finally:
        if end is not None:
            end.cancel()
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            _log.warning("while being cancelled: %s", task.exception())
        raise cancelled
    if task.cancelled():
        raise TimeoutError
    return task.result()


async def stopped(task: asyncio.Future[Any], *, again: float) -> None:
    """Cancel a task every ``again`` seconds until it has ended. A cancellation of the caller waits for that.

    Once is not enough for what talks to NATS: nats-py swallows a cancellation that finds it flushing, and before
    Python 3.12 asyncio.wait_for loses one that comes together with its result.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait([task], timeout=again)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class Gate:
    """Between a caller that may be cancelled and the thread that is to do its work: exactly one of them passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False

    def passed(self, work: Callable[[], _T]) -> _T | None:
        """In the thread: do the work, unless the gate was shut before (then nobody waits for what this returns)."""
        return work() if self._take() else None

    def shut(self) -> bool:
        """In the caller: whether the work has not begun, and now never will."""
        return self._take()

    def _take(self) -> bool:
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken


class Heart(Protocol):
    """Something that needs a heartbeat once it is open for long: a call."""

    def start_heartbeat(self) -> None:
        """Renew the lease from now on."""
        ...


class Door:
    """Lets so many claims through at a time, in the order of arrival.

    A thousand requests more in flight make no server faster: they time out in its queue and are sent again, and
    each keeps alive what it needs for that. Heartbeats and settles never wait here.
    """

    def __init__(self, width: int, *, patience: float) -> None:
        self._room = asyncio.Semaphore(width)
        self._patience = patience
        self._silent = False

    async def enter(self) -> bool:
        """Wait for one's turn: whether there was a wait.

        Raises TimeoutError where the turn comes late, and who went before got no answer.
        """
        if not self._room.locked():
            await self._room.acquire()
            return False
        loop = asyncio.get_running_loop()
        came = loop.time()
        await self._room.acquire()
        if self._silent and loop.time() - came >= self._patience:
            self._room.release()
            raise TimeoutError
        return True

    def leave(self, *, silent: bool) -> None:
        """Let the next one in. ``silent``: no server answered."""
        self._silent = silent
        self._room.release()


class Pulse:
    """When which open call is due for its first heartbeat: one timer for all calls of a toolkit.

    A timer of its own would cost a short call, which needs no heartbeat, as much as encoding its result.
    """

    def __init__(self) -> None:
        self._due: dict[Heart, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, call: Heart, due: float) -> None:
        """Start the heartbeat of ``call`` at ``due`` on the loop's clock, unless it is dropped before."""
        self._due[call] = due
        if self._timer is None or self._timer.when() > due:
            self._set(due)

    def drop(self, call: Heart) -> None:
        """Forget a call that ended."""
        self._due.pop(call, None)

    @property
    def open_calls(self) -> int:
        """How many calls are open that have not needed a heartbeat yet."""
        return len(self._due)

    def close(self) -> None:
        """Let no timer outlive the toolkit."""
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for call in [call for call, due in self._due.items() if due <= now]:
            del self._due[call]
            call.start_heartbeat()
        if self._due:
            self._set(min(self._due.values()))


class Stragglers:
    """What goes on after its call was left: threads, which nobody can cancel. A toolkit waits for them at its end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def adopt(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run ``work`` to its end, whatever becomes of the call that it belongs to."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Wait for all of it."""
        while self._tasks:
            _log.warning("waiting for %d threads of calls that were cancelled", len(self._tasks))
            await see_through(all_done(set(self._tasks)), within=None)


async def all_done(work: set[Any]) -> None:
    """Wait for futures or tasks, whatever they end in."""
    await asyncio.wait(work)


async def all_of(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What all of it comes to. Nothing of it goes on after this: an error is raised when the last one has ended."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return cast("list[_T]", found)


async def merged(sources: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """What several generators yield, as it comes, until the first of them raises. Closing this closes them all."""
    nexts: dict[asyncio.Future[_T], AsyncGenerator[_T, None]] = {}
    try:
        nexts |= {asyncio.ensure_future(anext(source)): source for source in sources}
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                source = nexts.pop(each)
                try:
                    item = each.result()
                except StopAsyncIteration:
                    continue
                nexts[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        if nexts:
            await see_through(all_of(stopped(each, again=_CANCEL_AGAIN) for each in nexts), within=None)
        for source in sources:
            await source.aclose()
