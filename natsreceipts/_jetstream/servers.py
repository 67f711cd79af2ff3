"""What can be connected to: URLs, and the settings of nats-py that a host may pass along."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nats.aio.client import Client
from typing_extensions import TypeIs

from natsreceipts.errors import InvalidSetting, brief

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["checked_servers", "without_secrets"]

_OURS = ("disconnected_cb", "error_cb", "max_reconnect_attempts", "pending_size")
"""Settings of nats-py that the guarantees rest on."""


def checked_servers(servers: object, options: dict[str, Any]) -> str | list[str] | Client:
    """What to connect to. Raises InvalidSetting for what is no URL, list of them, or client."""
    if taken := [name for name in _OURS if name in options]:
        raise InvalidSetting(
            f"{', '.join(taken)}: the toolkit sets this on connections that it opens; open one yourself and pass it"
        )
    if isinstance(servers, Client):
        if options:
            raise InvalidSetting(
                f"{', '.join(options)}: settings of a connection, and the client passed in has its own"
            )
        return servers
    urls: list[object] = [servers] if isinstance(servers, str) else list(servers) if _is_sequence(servers) else []
    if not urls or not all(isinstance(url, str) and url.strip() for url in urls):
        raise InvalidSetting(
            f"servers={brief(servers)}: use a URL like nats://127.0.0.1:4222, a list of them, or a connected nats-py "
            f"client"
        )
    texts = [str(url) for url in urls]
    for url in texts:
        if problem := _url_problem(url):
            raise InvalidSetting(
                f"server {without_secrets(url)!r}: {problem}; use a URL like nats://127.0.0.1:4222, with tls://, "
                f"ws:// or wss:// where the server wants that"
            )
    if len({_is_websocket(url) for url in texts}) > 1:
        raise InvalidSetting("servers: use WebSocket URLs (ws://, wss://) for all of them, or for none")
    _check_inbox_prefix(options.get("inbox_prefix"))
    return texts


def _url_problem(url: str) -> str:
    """Why nothing can be connected to by a URL, in words that hold none of its secrets; empty where there is no reason.

    (What urlsplit raises may hold the beginning of a password.)
    """
    if any(character.isspace() or not character.isprintable() for character in url.strip()):
        return "it has spaces or control characters"
    try:
        parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
        host = parts.hostname or ""
        host.encode("idna")
    except ValueError:
        return "it is no URL"
    if parts.scheme not in ("nats", "tls", "ws", "wss"):
        return "its scheme is none of NATS"
    if not host or "," in host:
        return "it names more than one host, which take a list" if host else "it names no host"
    try:
        return "" if parts.port != 0 else "0 is no port"
    except ValueError:
        hint = " (in a user or password, / ? # @ : are written as %2F and so on)" if "@" in url else ""
        return f"its port is no number up to 65535{hint}"


def _is_websocket(url: str) -> bool:
    return url.strip().startswith(("ws://", "wss://"))


_INBOX_PREFIX = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")


def _check_inbox_prefix(prefix: object) -> None:
    text = prefix.decode(errors="replace") if isinstance(prefix, bytes) else prefix
    if text is not None and not (isinstance(text, str) and _INBOX_PREFIX.fullmatch(text)):
        raise InvalidSetting(f"inbox_prefix={prefix!r}: use a subject without wildcards and spaces, as _INBOX_ops")


def _is_sequence(servers: object) -> TypeIs[Sequence[object]]:
    return isinstance(servers, list | tuple)


def without_secrets(url: str) -> str:
    """A URL as it can be shown: without a user, a password or a token."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2]
