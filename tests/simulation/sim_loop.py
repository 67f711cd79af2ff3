"""An event loop on virtual time: it never waits, and whose turn it is depends on nothing but the schedule.

When nothing is ready, the clock jumps to the next timer. What belongs to a process that is paused is held back, as the
operating system holds back a stopped process: its timers and answers are there at once when it goes on.
"""

from __future__ import annotations

import asyncio
import heapq
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim_process import Process

__all__ = ["OUTSIDE", "PROCESS", "Stuck", "VirtualLoop"]

PROCESS: ContextVar[Process | None] = ContextVar("simulated_process", default=None)
"""The simulated process that the code runs in; None for the server and the world outside."""

OUTSIDE = copy_context()

_START = 1000.0


class Stuck(Exception):
    """Nobody will ever do anything again, or they will never come to an end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready, in order; then jumps to the next timer. No selector, no threads, no wall clock."""

    def __init__(self, *, most_turns: int = 400_000, latest: float = 20_000.0) -> None:
        super().__init__()
        self._virtual = _START
        self._turns = most_turns
        self._latest = _START + latest
        self.errors: list[str] = []
        """What went wrong in callbacks."""
        self.thread: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        """Seconds until a thread is free, and until the work in it is done."""

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        if not ready and not self._stopping:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
                self._timer_cancelled_count -= 1
            if not scheduled:
                raise Stuck("a deadlock: nothing is ready and no timer runs")
            self._virtual = max(self._virtual, scheduled[0]._when)
            if self._virtual > self._latest:
                raise Stuck(f"no end after {self._latest - _START:,.0f} virtual seconds")
        now = self._virtual
        while scheduled and scheduled[0]._when <= now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if handle._cancelled:
                self._timer_cancelled_count -= 1
            else:
                ready.append(handle)
        self._turns -= len(ready)
        if self._turns < 0:
            raise Stuck("no end after very many turns of the loop: something spins")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.paused:
                process.held.append(handle)
            else:
                handle._run()
        handle = None

    def hand_back(self, held: list[asyncio.Handle]) -> None:
        """Let what was held back of a process run."""
        self._ready.extend(held)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A thread: what it does is done at one instant, some time before anybody hears of it."""
        done = self.create_future()
        process = PROCESS.get()
        free, works = self.thread()

        def begin() -> None:
            if process is not None and not process.alive:
                return
            if process is not None and process.paused:
                process.held.append(self._later(begin))
                return
            try:
                outcome = (func(*args), None)
            except BaseException as error:
                outcome = (None, error)
            self.call_later(works, end, outcome)

        def end(outcome: tuple[Any, BaseException | None]) -> None:
            if done.done() or (process is not None and not process.alive):
                return
            if outcome[1] is not None:
                done.set_exception(outcome[1])
            else:
                done.set_result(outcome[0])

        self.call_later(free, begin)
        if process is not None:
            process.expect(done)
        return done

    def _later(self, fn: Callable[[], None]) -> asyncio.Handle:
        return asyncio.Handle(fn, (), self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note an error in a callback. What nobody asked for (a task of a process that crashed) is no error."""
        if "never retrieved" in context["message"] or "was destroyed" in context["message"]:
            return
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass
