"""A worker as a process, which is killed at once or runs to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Self

from natsreceipts.background import stopped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

__all__ = ["WorkerProcess"]

_LONGEST_LOOK = 0.02

_LONGEST_CLEANUP = 2.0
"""Seconds after which an ``until`` that was cancelled, and has not ended, is cancelled again."""


class WorkerProcess:
    """A command, started with its context and gone at the end of it, with all processes that it started.

    It is tied to no event loop, and its output goes to the end of a file.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self._command = command
        self._env = env
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        with self._log.open("ab") as log:
            # A pipe that nobody writes to: its end tells a worker that we are gone.
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            self.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def kill(self) -> None:
        """Kill -9, also what it has started."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()

    async def end(self, *, until: Callable[[], Awaitable[object]] | None, timeout: float) -> int | None:
        """Wait for its exit status; None where ``until`` ended first, and it was killed then.

        Raises TimeoutError after ``timeout`` seconds, and what ``until`` raises.
        """
        assert self._process is not None
        watch = None if until is None else asyncio.ensure_future(until())
        delay = 0.001
        try:
            async with asyncio.timeout(timeout):
                while (status := self._process.poll()) is None:
                    if watch is not None and watch.done():
                        watch.result()
                        self.kill()
                        self._process.wait()
                        return None
                    await asyncio.sleep(delay)
                    delay = min(delay * 1.5, _LONGEST_LOOK)
                return status
        finally:
            if watch is not None:
                await stopped(watch, again=_LONGEST_CLEANUP)
                if not watch.cancelled():
                    watch.exception()  # seen: it is raised above, or the worker's own end came first
