"""What the proxy is told to lose, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from typing import TYPE_CHECKING, TypeAlias

from natsreceipts.testing.frames import Frame, Parser, Published
from natsreceipts.testing.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from natsreceipts.testing.proxy import FaultProxy

__all__ = ["HIT_SECONDS", "Fault", "HeldFault", "Match", "predicate"]

Match: TypeAlias = "str | Callable[[Published], bool]"

HIT_SECONDS = 10.0


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
        self._matches = predicate(match)
        self._first = nth
        self._end = None if count is None else nth + count
        self._matched = 0
        self._hits = Tally()
        self._answers = Tally()

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

    async def hit(self, n: int = 1, *, timeout: float = HIT_SECONDS) -> Published:
        """Wait until the rule has been applied ``n`` times, and return the n-th publish.

        Raises TimeoutError after ``timeout`` seconds, and what the rule's function raised.
        """
        return await self._reach(self._hits, n, timeout)

    async def answered(self, n: int = 1, *, timeout: float = HIT_SECONDS) -> Published:
        """Wait until ``n`` answers have been swallowed, and return the n-th: the server has acted by then.

        With ``cut_after_store`` the connection is cut by then. Raises TimeoutError after ``timeout`` seconds.
        """
        return await self._reach(self._answers, n, timeout)

    def cancel(self) -> None:
        """Apply the rule to no further publish. Answers still under way are swallowed all the same."""
        self._proxy.forget_rule(self)

    async def _reach(self, tally: Tally, n: int, timeout: float) -> Published:
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
        self._held: list[tuple[Frame, bytes]] = []

    @property
    def held(self) -> int:
        """How many publishes are held back now."""
        return len(self._held)

    def hold(self, frame: Frame, connect: bytes) -> None:
        """Keep a publish, and the CONNECT under which it came."""
        self._held.append((frame, connect))

    async def release(self, *, timeout: float = HIT_SECONDS) -> Published:
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


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frame: Frame, connect: bytes) -> Published:
    options = json.loads(connect.split(maxsplit=1)[1]) | {"verbose": False, "pedantic": False, "echo": True}
    inbox = f"_INBOX.{secrets.token_hex(11)}".encode()
    writer.write(b"CONNECT %b\r\nSUB %b 1\r\n" % (json.dumps(options).encode(), inbox))
    writer.write(frame.with_reply(inbox))
    parser = Parser()
    while data := await reader.read(65536):
        for answer in parser.feed(data):
            if answer.op == b"PING":
                writer.write(b"PONG\r\n")
            elif answer.op == b"-ERR":
                raise ConnectionError(answer.raw.decode(errors="replace").strip())
            elif answer.op in {b"MSG", b"HMSG"}:
                return answer.message()
    raise ConnectionError("the server closed the connection over a publish that was released")


def predicate(match: Match) -> Callable[[Published], bool]:
    """Whether a publish is meant."""
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
