"""The proxy itself: connections, and the rules for what goes through them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, TypeVar

from natsreceipts.embedded import free_port
from natsreceipts.testing.faults import HIT_SECONDS, Fault, HeldFault, Match, predicate
from natsreceipts.testing.links import Link
from natsreceipts.testing.tally import Tally

if TYPE_CHECKING:
    from types import TracebackType

    from natsreceipts.testing.frames import Frame, Published

__all__ = ["Direction", "FaultProxy"]

Direction: TypeAlias = Literal["both", "to_server", "to_client"]

_AnyFault = TypeVar("_AnyFault", bound=Fault)

_HOST = "127.0.0.1"


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
        self._links: set[Link] = set()
        self._rules: list[Fault] = []
        self._awaited: dict[bytes, tuple[Fault, Link]] = {}
        self._published: list[Published] = []
        self._connects = Tally()

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

    async def connected(self, n: int = 1, *, timeout: float = HIT_SECONDS) -> None:
        """Wait until ``n`` clients are connected at once. Raises TimeoutError after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self.connections < n:
                    await self._connects.reach(len(self._connects.items) + 1)
        except TimeoutError:
            raise TimeoutError(f"{self.connections} clients are connected after {timeout:g} s, and not {n}") from None

    async def disconnected(self, *, timeout: float = HIT_SECONDS) -> None:
        """Wait until the clients that are connected now have gone, and what they sent is on its way to the server.

        Raises TimeoutError after ``timeout`` seconds.
        """
        closing = [link.closed for link in self._links]
        if closing:
            _, left = await asyncio.wait(closing, timeout=timeout)
            if left:
                raise TimeoutError(f"{len(left)} clients are still connected after {timeout:g} s")

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
            self._server = await loop.create_server(lambda: Link(self).client, _HOST, self._port)

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
        matches = predicate(match)
        return [message for message in self._published if matches(message)]

    def forget(self) -> None:
        """Empty the record that :meth:`published` reads."""
        self._published.clear()

    # What links and rules call

    def _add(self, fault: _AnyFault) -> _AnyFault:
        self._rules.append(fault)
        return fault

    def seen(self, link: Link, frame: Frame) -> list[bytes]:
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

    def keeps(self, frame: Frame) -> bool:
        """Whether a message to a client is an answer that it must not get."""
        return frame.subject in self._awaited

    def swallow(self, link: Link, frame: Frame) -> None:
        """Do what a rule wants done at the server's answer."""
        fault, sender = self._awaited[frame.subject]
        if fault.kind == "cut_after_store":
            link.abort()
            sender.abort()
        fault.answered_by(frame.message())

    def came(self, link: Link) -> bool:
        """A connection was made: whether it may stay."""
        self._links.add(link)
        return self._server is not None

    def said_hello(self) -> None:
        """A client has sent CONNECT."""
        self._connects.add(None)

    def gone(self, link: Link) -> None:
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


def _directions(direction: Direction) -> set[str]:
    return {"to_server", "to_client"} if direction == "both" else {direction}
