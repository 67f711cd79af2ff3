"""A client's connection through the proxy: two sockets, and the frames between them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from natsreceipts.testing.frames import Parser, without_urls

if TYPE_CHECKING:
    from natsreceipts.testing.proxy import FaultProxy

__all__ = ["Link", "Socket"]


class Link:
    """One client's connection: a socket to the client and one to the server."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.client = Socket(self, "to_server")
        self.server = Socket(self, "to_client")
        self.connect: bytes | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dialling: asyncio.Task[None] | None = None
        self._aborted = False

    def made(self, socket: Socket) -> None:
        """A socket is connected."""
        if socket is self.server:
            self.update()
        elif self.proxy.came(self):
            self.update()
            self._dialling = asyncio.get_running_loop().create_task(self._dial())
            self._dialling.add_done_callback(self._dialled)
        else:
            self.abort()

    async def _dial(self) -> None:
        while self.server.transport is None:
            try:
                await asyncio.get_running_loop().create_connection(lambda: self.server, *self.proxy.upstream)
            except OSError:
                await asyncio.sleep(0.01)

    def _dialled(self, _: asyncio.Task[None]) -> None:
        self._dialling = None
        if self.client.lost or self.server.transport is None:
            self.abort()
        self._settle()

    def other(self, socket: Socket) -> Socket:
        """The socket on the far side."""
        return self.server if socket is self.client else self.client

    def update(self) -> None:
        """Go on, or hold, after something has changed."""
        for socket in (self.client, self.server):
            socket.update()

    def forward(self, socket: Socket, data: bytes | bytearray) -> None:
        """Handle what came in on a socket."""
        out: list[bytes] = []
        for frame in socket.parser.feed(data):
            if socket is self.client:
                if frame.op in {b"PUB", b"HPUB"}:
                    out += self.proxy.seen(self, frame)
                    continue
                if frame.op == b"CONNECT":
                    self.connect = frame.raw
                    self.proxy.said_hello()
                out.append(frame.raw)
            elif frame.op in {b"MSG", b"HMSG"} and self.proxy.keeps(frame):
                self._write(socket, out)
                out.clear()
                self.proxy.swallow(self, frame)
                if self._aborted:
                    return
            else:
                out.append(without_urls(frame.raw) if frame.op == b"INFO" else frame.raw)
        self._write(socket, out)

    def _write(self, source: Socket, frames: list[bytes]) -> None:
        target = self.other(source).transport
        if frames and target is not None:
            target.write(b"".join(frames))

    def ended(self, socket: Socket) -> None:
        """A socket was closed by its other end, and all that came from it was forwarded."""
        target = self.other(socket).transport
        if target is not None and not self._aborted:
            target.close()
        self._settle()

    def abort(self) -> None:
        """Close both sides at once."""
        self._aborted = True
        if self._dialling is not None:
            self._dialling.cancel()
        for socket in (self.client, self.server):
            if socket.transport is not None:
                socket.transport.abort()

    def _settle(self) -> None:
        if self.client.is_open() or self.server.is_open() or self._dialling is not None:
            return
        if not self.closed.done():
            self.proxy.gone(self)
            self.closed.set_result(None)


class Socket(asyncio.Protocol):
    """One side of a link. It reads only while what it reads can be forwarded."""

    def __init__(self, link: Link, direction: str) -> None:
        self.link = link
        self.direction = direction
        self.parser = Parser()
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self._full = False
        self._reading = True
        self._backlog = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self.transport = cast("asyncio.Transport", transport)
        self.link.made(self)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._may_forward():
            self.link.forward(self, data)
        else:  # read before reading was paused
            self._backlog += data

    def pause_writing(self) -> None:
        """Called by asyncio."""
        self._full = True
        self.link.other(self).update()

    def resume_writing(self) -> None:
        """Called by asyncio."""
        self._full = False
        self.link.other(self).update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.lost = True
        if not self._backlog or not self.link.other(self).is_open():
            self._backlog.clear()
            self.link.ended(self)

    def is_open(self) -> bool:
        """Whether it is connected."""
        return self.transport is not None and not self.lost

    def update(self) -> None:
        """Go on, or hold, after something has changed."""
        if self.transport is None:
            return
        may = self._may_forward()
        if may and self._backlog:
            data, self._backlog = self._backlog, bytearray()
            self.link.forward(self, data)
            if self.lost:
                self.link.ended(self)
        may = may and not self.link.other(self).full
        if may != self._reading and not self.lost and not self.transport.is_closing():
            self._reading = may
            if may:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    @property
    def full(self) -> bool:
        """Whether it takes no more for now."""
        return self._full

    def _may_forward(self) -> bool:
        return self.link.other(self).is_open() and not self.link.proxy.is_stalled(self.direction)
