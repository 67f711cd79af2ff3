"""`examine`: what the promises rest on, looked at check by check. Nothing is ever written."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client

from natsreceipts._jetstream import checked_servers, opened
from natsreceipts.doctor.finding import Finding, Level, error, ok, unverified
from natsreceipts.doctor.logs import notices, sessions
from natsreceipts.doctor.orphans import leftovers
from natsreceipts.doctor.permissions import try_permissions
from natsreceipts.doctor.records import receipts
from natsreceipts.doctor.server import client_settings, jetstream, max_payload, server_version, sync_always
from natsreceipts.doctor.site import site_of
from natsreceipts.doctor.stores import persist_mode, replicas, retention, settings
from natsreceipts.errors import InvalidName, InvalidSetting, NatsReceiptsError, PermissionDenied, brief
from natsreceipts.identity import key_token
from natsreceipts.provisioning import check_number
from natsreceipts.server_version import OLDEST_SERVER, is_old

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from natsreceipts.doctor.site import Site

__all__ = ["Finding", "Level", "examine"]


async def examine(
    servers_or_client: str | Sequence[str] | Client = "nats://127.0.0.1:4222",
    *,
    namespace: str = "",
    tenant: str | None = None,
    monitor: str | Sequence[str] = (),
    records: bool = True,
    most: int = 1_000_000,
    lease: float = 30.0,
    inline_limit: int = 256 * 1024,
    connect_timeout: float = 5.0,
    **connection: Any,
) -> AsyncGenerator[Finding, None]:
    """Look at a server, its stores and their records, and give what each check comes to, as it comes to it.

    Nothing is written: permissions are tried by requests that the server refuses before it stores anything, or that
    find nothing. ``tenant``: whose keys to try them on, for users that may write only theirs. ``monitor``: the
    monitoring addresses of the servers (``http://host:8222``), which alone tell whether they sync what they
    acknowledge. ``records=False`` leaves the records unread; else of each store at most ``most``, a part at a time.
    The other settings are those of `connect`.

    Raises Unreachable where no server lets us in, InvalidName, InvalidSetting. What fails later is a finding.
    """
    check_number("most", most, int, 1, 10**9)
    check_number("lease", lease, (int, float), 0.001, 10**9)
    check_number("inline_limit", inline_limit, int, 1024, 2**30)
    check_number("connect_timeout", connect_timeout, (int, float), 0.001, 3600)
    monitors = [monitor] if isinstance(monitor, str) else list(monitor)
    if any(not isinstance(url, str) or not url for url in monitors):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(f"monitor={brief(monitor)}: use addresses like http://127.0.0.1:8222")
    if tenant is not None:
        try:
            key_token(tenant)
        except InvalidName as bad:
            raise InvalidName("tenant", bad.value, bad.reason) from None
    servers = checked_servers(servers_or_client, connection)
    async with contextlib.AsyncExitStack() as stack:
        try:
            link = await stack.enter_async_context(opened(servers, connect_timeout=connect_timeout, options=connection))
        except PermissionDenied as denied:
            yield error(
                "inbox",
                f"the user may not subscribe to {denied.subject}: writes get through, and no answer ever comes back",
                fix='subscribe: { allow: "_INBOX.>" } for this user, or its own prefix and connect(inbox_prefix=…)',
            )
            return
        yield ok("inbox", "answers come back")
        site = await site_of(link, namespace=namespace, timeout=connect_timeout, lease=lease, most=most)
        version = link.server_version
        yield server_version(version)
        yield jetstream(site)
        yield max_payload(link.max_payload, inline_limit)
        for finding in client_settings(servers if isinstance(servers, Client) else None):
            yield finding
        for check in (settings, persist_mode, replicas, retention):
            for finding in check(site):
                yield finding
        for finding in await sync_always(monitors, timeout=connect_timeout):
            yield finding
        async for finding in try_permissions(site, tenant):
            yield finding
        if records:
            async with contextlib.aclosing(_records(site, version)) as found:
                async for finding in found:
                    yield finding


async def _records(site: Site, version: str) -> AsyncGenerator[Finding, None]:
    if is_old(version):
        oldest = ".".join(map(str, OLDEST_SERVER))
        yield unverified("records", f"they are read with requests that a server before {oldest} does not know")
        return
    for name, check in (("receipts", receipts), ("payloads", leftovers), ("notices", notices), ("sessions", sessions)):
        async for finding in _told(name, check(site)):
            yield finding


async def _told(name: str, found: AsyncIterator[Finding]) -> AsyncIterator[Finding]:
    try:
        async for finding in found:
            yield finding
    except NatsReceiptsError as problem:
        yield unverified(name, f"they could not be read to the end: {problem}")
