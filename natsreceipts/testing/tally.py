"""Something to wait for."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["Tally"]


class Tally:
    """A list that can be waited for."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._error: BaseException | None = None

    def add(self, item: object) -> None:
        """One more."""
        self.items.append(item)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Raise this from every wait."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        for n, waiter in self._waiting:
            if not waiter.done() and (self._error is not None or len(self.items) >= n):
                waiter.set_result(None)
        self._waiting = [(n, waiter) for n, waiter in self._waiting if not waiter.done()]

    async def reach(self, n: int) -> None:
        """Wait until there are ``n`` items."""
        if self._error is None and len(self.items) < n:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((n, waiter))
            await waiter
        if self._error is not None:
            raise self._error
