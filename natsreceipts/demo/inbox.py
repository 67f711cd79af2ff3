"""The inbox of the demo: a real SMTP server, which says what reaches it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from aiosmtpd.smtp import SMTP, Envelope, Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Inbox"]

_HOST = "127.0.0.1"


class Inbox:
    """An SMTP server on a free port of 127.0.0.1, for as long as its context is open.

    ``coming`` is called when a mail to an address is announced, ``arrived`` when it has been taken. Where one of
    them returns True, the client hears nothing more: it was killed meanwhile. ``seconds``: how long a mail takes.
    """

    def __init__(self, *, coming: Callable[[str], bool], arrived: Callable[[str], bool], seconds: float) -> None:
        self._coming = coming
        self._arrived = arrived
        self._seconds = seconds
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: SMTP(self, hostname="inbox", loop=loop), _HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """Called by aiosmtpd: the client named a recipient."""
        del server, session, options
        if self._coming(address):
            await _silence()
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        """Called by aiosmtpd: the whole mail is here. It counts as arrived, whatever the client gets to hear."""
        del server, session
        await asyncio.sleep(self._seconds)
        if self._arrived(envelope.rcpt_tos[0]):
            await _silence()
        return "250 OK"


async def _silence() -> None:
    """Until aiosmtpd cancels the handler, as the client's connection is gone."""
    await asyncio.get_running_loop().create_future()
