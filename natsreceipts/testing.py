"""Faults for tests: a proxy between NATS clients and one server that loses exactly what it is told to lose.

::

    async with FaultProxy("127.0.0.1", server.port) as proxy:
        lost = proxy.drop_answer("$KV.receipts.>")  # the next claim lands, and its writer never hears of it
        async with connect(proxy.url) as toolkit:
            ...
        await lost.answered()

Every fault is an event to wait for, so a test needs no sleeps. Plain TCP only: no TLS, no websockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast

from natsreceipts.embedded import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Direction", "Fault", "FaultProxy", "HeldFault", "Match", "Published"]

Direction: TypeAlias = Literal["both", "to_server", "to_client"]

Match: TypeAlias = "str | Callable[[Published], bool]"
_AnyFault = TypeVar("_AnyFault", bound="Fault")

_HOST = "127.0.0.1"
_HIT_SECONDS = 10.0


class Published(NamedTuple):
    """A message as it was published. Of a header that occurs more than once, the last value is kept.

    An answer without a payload of its own (no responders, end of batch) has ``Status`` and ``Description``
    among its headers, as in nats-py.
    """

    subject: str
    headers: dict[str, str]
    payload: bytes


class FaultProxy:
    """A TCP proxy between NATS clients and the server at ``upstream_host:upstream_port``.

    It listens on a free port of 127.0.0.1 while its context is open, and forwards bytes as they come, except
    that the server's ``connect_urls`` are left out, so that clients do not learn a way around it. A client
    that connects while the server is down waits in the proxy until it is up.

    A *rule* (:meth:`drop_answer`, :meth:`cut_after_store`, :meth:`drop`, :meth:`delay`, :meth:`duplicate`,
    :meth:`observe`) applies to publishes of clients. ``match`` is a subject with NATS wildcards, or a
    function of the :class:`Published`. It applies from the ``nth`` match on (from 1), ``count`` times (None:
    from there on for ever). A publish goes to the oldest rule that applies to it; younger ones neither see
    nor count it.
    """

    def __init__(self, upstream_host: str, upstream_port: int) -> None:
        self._upstream = (upstream_host, upstream_port)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._stalled: set[str] = set()
        self._links: set[_Link] = set()
        self._rules: list[Fault] = []
        self._awaited: dict[bytes, tuple[Fault, _Link]] = {}
        self._published: list[Published] = []
        self._connects = _Tally()

    async def __aenter__(self) -> Self:
        for _ in range(20):
            self._port = free_port()
            with contextlib.suppress(OSError):
                await self.accept()
                return self
        raise OSError("no free port found in 20 tries")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()
        for _ in range(3):  # connections that were accepted and are not made yet
            await asyncio.sleep(0)
        await self.cut()

    @property
    def url(self) -> str:
        """Where clients connect: ``nats://127.0.0.1:PORT``."""
        return f"nats://{_HOST}:{self._port}"

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; 0 before the context is entered."""
        return self._port

    # Connections

    @property
    def connections(self) -> int:
        """How many clients are connected now (they have sent CONNECT)."""
        return sum(link.connect is not None for link in self._links)

    async def connected(self, n: int = 1, *, timeout: float = _HIT_SECONDS) -> None:
        """Wait until ``n`` clients are connected at once. Raises TimeoutError after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self.connections < n:
                    await self._connects.reach(len(self._connects.items) + 1)
        except TimeoutError:
            raise TimeoutError(f"{self.connections} clients are connected after {timeout:g} s, and not {n}") from None

    async def cut(self) -> None:
        """Drop all connections now, on both sides. They are closed when this returns.

        Clients may connect again at once: :meth:`refuse` first where they should not.
        """
        links = list(self._links)
        for link in links:
            link.abort()
        for link in links:
            await link.closed

    async def refuse(self) -> None:
        """Refuse new connections, as a server that is down does, until :meth:`accept`."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def accept(self) -> None:
        """Take new connections again."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: _Link(self).client, _HOST, self._port)

    async def stall(self, direction: Direction = "both") -> None:
        """Forward nothing any more in ``direction``, and close nothing, until :meth:`resume`.

        It holds for connections made later too: they are taken, and hear nothing.
        """
        self._stalled |= _directions(direction)
        for link in self._links:
            link.update()

    async def resume(self, direction: Direction = "both") -> None:
        """Go on after :meth:`stall`.

        What was sent meanwhile is forwarded now, also of clients that have gone.
        """
        self._stalled -= _directions(direction)
        for link in list(self._links):
            link.update()

    # Rules

    def drop_answer(self, match: Match, *, nth: int = 1, count: int | None = 1) -> Fault:
        """Forward the publish, and swallow what is sent to its reply subject. The connection stays up.

        Publishes without a reply subject do not match.
        """
        return self._add(Fault(self, "drop_answer", match, nth, count))

    def cut_after_store(self, match: Match, *, nth: int = 1, count: int | None = 1) -> Fault:
        """Forward the publish, wait for the server's answer, swallow it, and cut the client's connection.

        Publishes without a reply subject do not match. The answer is among the fault's ``answers``, which
        say whether the write was stored or refused.
        """
        return self._add(Fault(self, "cut_after_store", match, nth, count))

    def drop(self, match: Match, *, nth: int = 1, count: int | None = 1) -> Fault:
        """Never forward the publish. The connection stays up."""
        return self._add(Fault(self, "drop", match, nth, count))

    def delay(self, match: Match, *, nth: int = 1, count: int | None = 1) -> HeldFault:
        """Hold the publish back until :meth:`HeldFault.release`. Everything else flows on."""
        return self._add(HeldFault(self, "delay", match, nth, count))

    def duplicate(self, match: Match, *, nth: int = 1, count: int | None = 1) -> Fault:
        """Forward the publish twice. The client gets both answers, in order."""
        return self._add(Fault(self, "duplicate", match, nth, count))

    def observe(self, match: Match, *, nth: int = 1, count: int | None = None) -> Fault:
        """Forward the publish as it is: to wait for it, or to count."""
        return self._add(Fault(self, "observe", match, nth, count))

    def published(self, match: Match = ">") -> list[Published]:
        """Return what clients have published so far, in order, whatever became of it.

        A request is a publish too (``$JS.API.>``).
        """
        matches = _predicate(match)
        return [message for message in self._published if matches(message)]

    def forget(self) -> None:
        """Empty the record that :meth:`published` reads."""
        self._published.clear()

    # What links and rules call

    def _add(self, fault: _AnyFault) -> _AnyFault:
        self._rules.append(fault)
        return fault

    def seen(self, link: _Link, frame: _Frame) -> list[bytes]:
        """What is to be forwarded of a client's publish."""
        message = frame.message()
        self._published.append(message)
        reply = frame.reply
        for fault in self._rules:
            if (reply or not fault.needs_answer) and fault.takes(message):
                break
        else:
            return [frame.raw]
        if fault.needs_answer:
            self._awaited[reply] = (fault, link)
        elif isinstance(fault, HeldFault):
            fault.hold(frame, link.connect or b"CONNECT {}\r\n")
        fault.hit_by(message)
        return [frame.raw] * {"drop": 0, "delay": 0, "duplicate": 2}.get(fault.kind, 1)

    def keeps(self, frame: _Frame) -> bool:
        """Whether a message to a client is an answer that it must not get."""
        return frame.subject in self._awaited

    def swallow(self, link: _Link, frame: _Frame) -> None:
        """Do what a rule wants done at the server's answer."""
        fault, sender = self._awaited[frame.subject]
        if fault.kind == "cut_after_store":
            link.abort()
            sender.abort()
        fault.answered_by(frame.message())

    def came(self, link: _Link) -> bool:
        """A connection was made: whether it may stay."""
        self._links.add(link)
        return self._server is not None

    def said_hello(self) -> None:
        """A client has sent CONNECT."""
        self._connects.add(None)

    def gone(self, link: _Link) -> None:
        """Both sides of a connection are closed."""
        self._links.discard(link)

    def is_stalled(self, direction: str) -> bool:
        """Whether nothing is to be forwarded in ``direction``."""
        return direction in self._stalled

    def forget_rule(self, fault: Fault) -> None:
        """Apply a rule no more."""
        with contextlib.suppress(ValueError):
            self._rules.remove(fault)

    @property
    def upstream(self) -> tuple[str, int]:
        """Host and port of the server behind the proxy."""
        return self._upstream


class Fault:
    """A rule of a :class:`FaultProxy`, and what came of it.

    ``hits`` are the publishes that it was applied to, ``answers`` the server's answers that it swallowed.
    """

    def __init__(self, proxy: FaultProxy, kind: str, match: Match, nth: int, count: int | None) -> None:
        if nth < 1 or (count is not None and count < 1):
            raise ValueError(f"nth and count start from 1, not nth={nth}, count={count}")
        self.kind = kind
        self.needs_answer = kind in {"drop_answer", "cut_after_store"}
        self._proxy = proxy
        self._match = match
        self._matches = _predicate(match)
        self._first = nth
        self._end = None if count is None else nth + count
        self._matched = 0
        self._hits = _Tally()
        self._answers = _Tally()

    def __repr__(self) -> str:
        return f"<{self.kind} of {self._match!r}: {self._matched} matched, {len(self.hits)} hit>"

    @property
    def hits(self) -> list[Published]:
        """The publishes that the rule was applied to, in order."""
        return self._hits.items

    @property
    def answers(self) -> list[Published]:
        """The answers that the server gave to them and the client did not get, in order."""
        return self._answers.items

    async def hit(self, n: int = 1, *, timeout: float = _HIT_SECONDS) -> Published:
        """Wait until the rule has been applied ``n`` times, and return the n-th publish.

        Raises TimeoutError after ``timeout`` seconds, and what the rule's function raised.
        """
        return await self._reach(self._hits, n, timeout)

    async def answered(self, n: int = 1, *, timeout: float = _HIT_SECONDS) -> Published:
        """Wait until ``n`` answers have been swallowed, and return the n-th: the server has acted by then.

        With ``cut_after_store`` the connection is cut by then. Raises TimeoutError after ``timeout`` seconds.
        """
        return await self._reach(self._answers, n, timeout)

    def cancel(self) -> None:
        """Apply the rule to no further publish. Answers still under way are swallowed all the same."""
        self._proxy.forget_rule(self)

    async def _reach(self, tally: _Tally, n: int, timeout: float) -> Published:
        try:
            async with asyncio.timeout(timeout):
                await tally.reach(n)
        except TimeoutError:
            subjects = [message.subject for message in self._proxy.published()[-20:]]
            raise TimeoutError(f"{self!r} after {timeout:g} s; last published: {subjects}") from None
        return tally.items[n - 1]

    # What the proxy calls

    def takes(self, message: Published) -> bool:
        """Count the publish if it matches, and say whether the rule applies to it."""
        try:
            if not self._matches(message):
                return False
        except Exception as error:  # noqa: BLE001 - the caller's function: its error belongs to the waiting test
            self._hits.fail(error)
            return False
        self._matched += 1
        return self._first <= self._matched and (self._end is None or self._matched < self._end)

    def hit_by(self, message: Published) -> None:
        """The rule was applied."""
        self._hits.add(message)

    def answered_by(self, message: Published) -> None:
        """An answer was swallowed."""
        self._answers.add(message)


class HeldFault(Fault):
    """A rule that holds publishes back (:meth:`FaultProxy.delay`)."""

    def __init__(self, proxy: FaultProxy, kind: str, match: Match, nth: int, count: int | None) -> None:
        super().__init__(proxy, kind, match, nth, count)
        self._held: list[tuple[_Frame, bytes]] = []

    @property
    def held(self) -> int:
        """How many publishes are held back now."""
        return len(self._held)

    def hold(self, frame: _Frame, connect: bytes) -> None:
        """Keep a publish, and the CONNECT under which it came."""
        self._held.append((frame, connect))

    async def release(self, *, timeout: float = _HIT_SECONDS) -> Published:
        """Send the oldest publish that is held to the server, and return the server's answer.

        It goes over a connection of the proxy's own (with the client's credentials; those signed for one
        connection do not do) and with a reply subject of its own, so it lands even if the client has gone,
        and the client hears nothing. It goes past :meth:`FaultProxy.stall`. Raises RuntimeError when nothing
        is held, ConnectionError when the server refuses, TimeoutError after ``timeout`` seconds.
        """
        if not self._held:
            raise RuntimeError("nothing is held: await hit() before release()")
        frame, connect = self._held.pop(0)
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(*self._proxy.upstream)
            try:
                return await _ask(reader, writer, frame, connect)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frame: _Frame, connect: bytes) -> Published:
    options = json.loads(connect.split(maxsplit=1)[1]) | {"verbose": False, "pedantic": False, "echo": True}
    inbox = f"_INBOX.{secrets.token_hex(11)}".encode()
    writer.write(b"CONNECT %b\r\nSUB %b 1\r\n" % (json.dumps(options).encode(), inbox))
    writer.write(frame.with_reply(inbox))
    parser = _Parser()
    while data := await reader.read(65536):
        for answer in parser.feed(data):
            if answer.op == b"PING":
                writer.write(b"PONG\r\n")
            elif answer.op == b"-ERR":
                raise ConnectionError(answer.raw.decode(errors="replace").strip())
            elif answer.op in {b"MSG", b"HMSG"}:
                return answer.message()
    raise ConnectionError("the server closed the connection over a publish that was released")


class _Link:
    """One client's connection: a socket to the client and one to the server."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.client = _Socket(self, "to_server")
        self.server = _Socket(self, "to_client")
        self.connect: bytes | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dialling: asyncio.Task[None] | None = None
        self._aborted = False

    def made(self, socket: _Socket) -> None:
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

    def other(self, socket: _Socket) -> _Socket:
        return self.server if socket is self.client else self.client

    def update(self) -> None:
        for socket in (self.client, self.server):
            socket.update()

    def forward(self, socket: _Socket, data: bytes | bytearray) -> None:
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
                out.append(_without_urls(frame.raw) if frame.op == b"INFO" else frame.raw)
        self._write(socket, out)

    def _write(self, source: _Socket, frames: list[bytes]) -> None:
        target = self.other(source).transport
        if frames and target is not None:
            target.write(b"".join(frames))

    def ended(self, socket: _Socket) -> None:
        """A socket was closed by its other end, and all that came from it was forwarded."""
        target = self.other(socket).transport
        if target is not None and not self._aborted:
            target.close()
        self._settle()

    def abort(self) -> None:
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


class _Socket(asyncio.Protocol):
    """One side of a link. It reads only while what it reads can be forwarded."""

    def __init__(self, link: _Link, direction: str) -> None:
        self.link = link
        self.direction = direction
        self.parser = _Parser()
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self._full = False
        self._reading = True
        self._backlog = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.link.made(self)

    def data_received(self, data: bytes) -> None:
        if self._may_forward():
            self.link.forward(self, data)
        else:  # read before reading was paused
            self._backlog += data

    def pause_writing(self) -> None:
        self._full = True
        self.link.other(self).update()

    def resume_writing(self) -> None:
        self._full = False
        self.link.other(self).update()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self._backlog or not self.link.other(self).is_open():
            self._backlog.clear()
            self.link.ended(self)

    def is_open(self) -> bool:
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
        return self._full

    def _may_forward(self) -> bool:
        return self.link.other(self).is_open() and not self.link.proxy.is_stalled(self.direction)


class _Frame:
    """One operation of the NATS client protocol, as it came (``raw``) and taken apart."""

    __slots__ = ("_line", "_words", "op", "raw")

    def __init__(self, op: bytes, words: list[bytes], line: int, raw: bytes) -> None:
        self.op = op
        self.raw = raw
        self._words = words
        self._line = line

    @property
    def subject(self) -> bytes:
        return self._words[1]

    @property
    def reply(self) -> bytes:
        """The reply subject of a PUB or HPUB, empty where there is none."""
        return self._words[2] if len(self._words) == (4 if self.op == b"PUB" else 5) else b""

    @property
    def _header(self) -> int:
        return int(self._words[-2]) if self.op in {b"HPUB", b"HMSG"} else 0

    def message(self) -> Published:
        start = self._line + self._header
        headers = _headers(self.raw[self._line : start]) if self._header else {}
        return Published(self.subject.decode(errors="surrogateescape"), headers, self.raw[start:-2])

    def with_reply(self, reply: bytes) -> bytes:
        sizes = self._words[-2:] if self.op == b"HPUB" else self._words[-1:]
        return b" ".join([self.op, self.subject, reply, *sizes]) + b"\r\n" + self.raw[self._line :]


class _Parser:
    """Cuts a byte stream into frames. The bytes of all frames together are the stream's."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned: int = 0
        self._head: tuple[bytes, list[bytes], int, int] | None = None

    def feed(self, data: bytes | bytearray) -> list[_Frame]:
        buffer = self._buffer
        buffer += data
        frames: list[_Frame] = []
        start = 0
        while True:
            if self._head is None:
                end = buffer.find(b"\n", max(start, self._scanned)) + 1
                if not end:
                    self._scanned = len(buffer)
                    break
                self._head = _head(bytes(buffer[start:end]))
            op, words, line, total = self._head
            if len(buffer) - start < total:
                break
            frames.append(_Frame(op, words, line, bytes(buffer[start : start + total])))
            start += total
            self._head = None
            self._scanned = start
        del buffer[:start]
        self._scanned = max(0, self._scanned - start)
        return frames


def _head(line: bytes) -> tuple[bytes, list[bytes], int, int]:
    """Operation, words, length of the line, length of the frame."""
    words = line.split()
    op = words[0].upper() if words else b""
    size = 0
    allowed = {b"PUB": (3, 4), b"HPUB": (4, 5), b"MSG": (4, 5), b"HMSG": (5, 6)}.get(op)
    if allowed is not None:
        sizes = words[-2:] if op.startswith(b"H") else words[-1:]
        if len(words) in allowed and all(number.isdigit() for number in sizes):
            size = int(words[-1]) + 2
        else:
            op = b""  # the server's to complain about
    return op, words, len(line), len(line) + size


def _headers(block: bytes) -> dict[str, str]:
    first, *lines = block.decode(errors="surrogateescape").split("\r\n")
    headers: dict[str, str] = {}
    status = first.removeprefix("NATS/1.0").strip()
    if status:
        headers["Status"], _, description = status.partition(" ")
        if description:
            headers["Description"] = description.strip()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def _without_urls(line: bytes) -> bytes:
    if b"connect_urls" not in line:
        return line
    info: dict[str, Any] = json.loads(line.split(maxsplit=1)[1])
    kept = {name: value for name, value in info.items() if name not in {"connect_urls", "ws_connect_urls"}}
    return b"INFO %b\r\n" % json.dumps(kept, separators=(",", ":")).encode()


class _Tally:
    """A list that can be waited for."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._error: BaseException | None = None

    def add(self, item: object) -> None:
        self.items.append(item)
        self._wake()

    def fail(self, error: BaseException) -> None:
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


def _predicate(match: Match) -> Callable[[Published], bool]:
    if not isinstance(match, str):
        return match
    pattern = match.split(".")

    def matches(message: Published) -> bool:
        tokens = message.subject.split(".")
        if pattern[-1] == ">":
            return len(tokens) >= len(pattern) and _equal(pattern[:-1], tokens)
        return len(tokens) == len(pattern) and _equal(pattern, tokens)

    return matches


def _equal(pattern: list[str], tokens: list[str]) -> bool:
    return all(wanted in {"*", token} for wanted, token in zip(pattern, tokens, strict=False))


def _directions(direction: Direction) -> set[str]:
    return {"to_server", "to_client"} if direction == "both" else {direction}
