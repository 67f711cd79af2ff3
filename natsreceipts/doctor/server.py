"""The server and the connection: version, JetStream, max_payload, a client's settings, and what is synced to disk."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any, cast

from natsreceipts.attempts import ROOM
from natsreceipts.doctor.finding import Finding, error, ok, unverified, warning
from natsreceipts.server_version import OLDEST_SERVER, is_old, version_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nats.aio.client import Client

    from natsreceipts.doctor.site import Site

__all__ = ["client_settings", "jetstream", "max_payload", "server_version", "sync_always"]

_SILENCE = 15.0
"""Seconds without an answer after which a client should notice that its server is gone: half of the default lease."""

_LEAST_ROOM = 16 * 1024
"""Bytes that a record without its payloads may need."""

_LONGEST_ANSWER = 16 * 2**20


def server_version(version: str) -> Finding:
    """The version that the server told when it was connected to."""
    oldest = ".".join(map(str, OLDEST_SERVER))
    if version_in(version) is None:
        return unverified("server version", f"the server calls itself {version!r}, and {oldest} or newer is needed")
    if is_old(version):
        return error(
            "server version",
            f"{version}, and {oldest} or newer is needed: it does not know the batched reads that runs, lists and "
            f"sessions are read with",
            fix=f"upgrade nats-server to {oldest} or newer; the files of its streams are taken over",
        )
    return ok("server version", f"{version} ({oldest} or newer is needed)")


def jetstream(site: Site) -> Finding:
    """Whether anything answers for streams."""
    if any(store.info is not None or store.problem is None for store in site.stores):
        return ok("JetStream", "enabled")
    problem = site.receipts[0].problem
    text = str(problem)
    if "JetStream is not enabled" in text or "jetstream not enabled" in text.lower():
        return error(
            "JetStream",
            text,
            fix="a `jetstream { store_dir: … }` block in the server's configuration, and `jetstream: enabled` in the "
            "account; in a cluster, wait for a leader",
        )
    return unverified("JetStream", f"the server was not to be asked: {text}")


def max_payload(limit: int, inline_limit: int) -> Finding:
    """The largest message that the server takes, against what records may become."""
    if limit - ROOM < _LEAST_ROOM:
        return error(
            "max_payload",
            f"{limit:,} bytes: records may not fit, and then a call that was made cannot be recorded",
            fix="max_payload: 1MB in the server's configuration",
        )
    if limit - ROOM < inline_limit:
        return warning(
            "max_payload",
            f"{limit:,} bytes, too few for the inline limit of {inline_limit:,}: payloads move to the object store "
            f"above {limit - ROOM:,} bytes already, and entries of sessions above {limit - 512:,} are refused",
            fix=f"max_payload of {inline_limit + ROOM:,} bytes or more in the server's configuration, or "
            f"connect(inline_limit={limit - ROOM})",
        )
    return ok("max_payload", f"{limit:,} bytes, for an inline limit of {inline_limit:,}")


def client_settings(client: Client | None) -> Iterator[Finding]:
    """How a client that was passed in holds its connection; None: the toolkit opened it itself."""
    if client is None:
        yield ok("client", "opened by the toolkit, with its settings")
        return
    options = client.options
    silence = options.get("ping_interval", 120) * (options.get("max_outstanding_pings", 2) + 1)
    buffered: int = getattr(client, "_max_pending_size", 0)
    found = False
    if buffered > 0:
        found = True
        yield warning(
            "client, pending_size",
            f"it holds back up to {buffered:,} bytes while it reconnects: a write that ended in doubt may be stored "
            f"much later",
            fix="nats.connect(…, pending_size=0), or give the toolkit the URL",
        )
    if silence > _SILENCE:
        found = True
        yield warning(
            "client, ping_interval",
            f"it takes up to {silence:g} s to notice that a server is silent: a lease of 30 s does not outlive that",
            fix="nats.connect(…, ping_interval=3, max_outstanding_pings=2)",
        )
    if not options.get("allow_reconnect", True) or options.get("max_reconnect_attempts", -1) >= 0:
        found = True
        yield warning(
            "client, max_reconnect_attempts",
            "it stops to reconnect at some time, and then every call ends in Unreachable until it is made anew",
            fix="nats.connect(…, allow_reconnect=True, max_reconnect_attempts=-1)",
        )
    if not found:
        yield ok("client", "its settings are those that the toolkit would use")


async def sync_always(monitors: list[str], *, timeout: float) -> list[Finding]:
    """Whether each server syncs what it acknowledges, by its monitoring port."""
    if not monitors:
        return [
            unverified(
                "sync_always",
                "whether the server syncs a write before it acknowledges it is only told on its monitoring port",
                fix="--monitor http://HOST:8222, once for each server",
            )
        ]
    return list(await asyncio.gather(*(_synced(url, timeout) for url in monitors)))


async def _synced(url: str, timeout: float) -> Finding:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return unverified("sync_always", f"{url!r} is no monitoring address", fix="use http://HOST:8222")
    check = f"sync_always, {parts.hostname}:{parts.port or 80}"
    try:
        told = await asyncio.to_thread(_fetched, url.rstrip("/") + "/jsz", timeout)
        config = told.get("config")
    except (OSError, ValueError, AttributeError, urllib.error.URLError) as problem:
        return unverified(check, f"{url}/jsz could not be read: {problem}", fix="use http://HOST:8222")
    if told.get("disabled") or not isinstance(config, dict):
        return unverified(check, f"{url}/jsz does not tell of JetStream: is it another server?")
    settings = cast("dict[str, Any]", config)
    if settings.get("sync_always") is True:
        return ok(check, "what is acknowledged is on the disk")
    interval = settings.get("sync_interval")
    every = f"every {interval / 1e9:g} s" if isinstance(interval, int) else "now and then"
    return warning(
        check,
        f"written to disk {every}: a power failure can lose receipts that were acknowledged, and their calls can run "
        f"again",
        fix="sync_interval: always, in the server's jetstream block (docs/guarantees.md, Durability, has its price)",
    )


def _fetched(url: str, timeout: float) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - checked to be http
        return json.loads(answer.read(_LONGEST_ANSWER))
