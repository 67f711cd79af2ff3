"""Whether a server that TLS was asked of does it: nats-py asks no such thing, and goes on in the clear (measured)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic_core import from_json

from natsreceipts.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_tls"]


async def check_tls(urls: Sequence[str], options: dict[str, Any]) -> None:
    """Raise InvalidSetting where TLS is asked for and a server's greeting does not require it.

    nats-py upgrades a connection only where the server requires it, whatever the URL and the settings say, and would
    send the credentials in the clear. Servers that do not answer are left to `connect`.
    """
    if options.get("tls_handshake_first"):
        return
    for url in urls:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.scheme != "tls" and not (parts.scheme == "nats" and options.get("tls")):
            continue
        greeting = await _greeting(parts.hostname or "127.0.0.1", parts.port or 4222)
        if greeting is not None and not greeting.get("tls_required"):
            raise InvalidSetting(
                f"the NATS server at {parts.hostname}:{parts.port or 4222} does not require TLS, so the connection "
                f"would not be encrypted: use a server that does, or leave TLS out"
            )


async def _greeting(host: str, port: int) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                line = await reader.readuntil(b"\r\n")
            finally:
                writer.close()
                await writer.wait_closed()
        verb, _, body = line.partition(b" ")
        if verb.upper() == b"INFO":
            return from_json(body)
    return None
