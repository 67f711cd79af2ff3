"""A TCP connection that can be cut, or go silent: for routes between servers, whose protocol it does not look at."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from natsreceipts.embedded import free_port

__all__ = ["Wire"]

HOST = "127.0.0.1"


class Wire:
    """A port of ours that leads to ``upstream``, while its context is open."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._cut = False
        self.port = 0

    async def __aenter__(self) -> Self:
        for _ in range(20):
            self.port = free_port()
            with contextlib.suppress(OSError):
                self._server = await asyncio.start_server(self._serve, HOST, self.port)
                return self
        raise OSError("no free port found in 20 tries")

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Close all connections, and each new one at once, until `heal`."""
        self._cut = True
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    def stall(self) -> None:
        """Carry nothing any more, and close nothing, until `heal`."""
        self._flows.clear()

    def heal(self) -> None:
        """Go on: what was sent meanwhile arrives now."""
        self._cut = False
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        writers = [writer]
        try:
            if self._cut:
                return
            far_reader, far_writer = await asyncio.open_connection(HOST, self._upstream)
            writers.append(far_writer)
            there = asyncio.ensure_future(self._pump(reader, far_writer))
            back = asyncio.ensure_future(self._pump(far_reader, writer))
            try:
                await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the far side is down, or the wire is cut: this end finds out by being closed
        finally:
            for each in writers:
                each.transport.abort()
            self._pumps.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
