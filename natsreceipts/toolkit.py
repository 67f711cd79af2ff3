"""`connect`: a connection, its buckets looked at once, and the stores on them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from natsreceipts._jetstream import PartitionedBucket, bind, bind_objects, checked_servers, make, opened
from natsreceipts.announce import Announcer
from natsreceipts.attempts import Attempts
from natsreceipts.background import Pulse, Stragglers
from natsreceipts.delivery import Delivery, JetStreamMessage, deliver
from natsreceipts.errors import InvalidSetting, NotProvisioned, brief
from natsreceipts.identity import Digest, sha256_hex
from natsreceipts.notice import check_text
from natsreceipts.notices import NoticeBoard
from natsreceipts.options import CallOptions
from natsreceipts.payloads import PayloadStore
from natsreceipts.provisioning import agreed, check_number, check_usable, partitioned, wanted
from natsreceipts.receipts import ReceiptStore
from natsreceipts.run import Executions, Run
from natsreceipts.seals import Seals
from natsreceipts.server_version import OLDEST_SERVER, is_old
from natsreceipts.session_store import stream_mark
from natsreceipts.sessions import Sessions
from natsreceipts.telemetry import ToolkitClosed, checked_hooks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from nats.aio.client import Client

    from natsreceipts._jetstream import Bucket, Finding, JetStreamBucket
    from natsreceipts.provisioning import Wanted
    from natsreceipts.seals import Cipher
    from natsreceipts.telemetry import Hook

__all__ = ["Toolkit", "connect"]

_log = logging.getLogger("natsreceipts")


class Toolkit:
    """What `connect` gives: ``receipts``, ``sessions``, ``notices``, and runs to make guarded calls in."""

    def __init__(
        self,
        receipts: ReceiptStore,
        sessions: Sessions,
        notices: NoticeBoard,
        announcer: Announcer,
        attempts: Attempts,
        *,
        digest: Digest,
        defaults: dict[str, Any],
    ) -> None:
        self.receipts = receipts
        """The receipts: `ReceiptStore.get`."""
        self.sessions = sessions
        """The session logs: `Sessions.open`."""
        self.notices = notices
        """The notices of the endpoint ``local``: `NoticeBoard.file`. ``run.notices`` are those of a tenant's run."""
        self._announcer = announcer
        self._digest = digest
        self._defaults = defaults
        self._attempts = attempts
        self._pulse = Pulse()
        self._stragglers = Stragglers()
        self._executions = Executions()

    async def close(self) -> None:
        """Called at the end of `connect`: waits for threads of calls that were cancelled over them."""
        if self._pulse.open_calls:
            _log.warning(
                "the toolkit is closed over %d open calls: what they come to cannot be recorded any more",
                self._pulse.open_calls,
            )
        self._pulse.close()
        await self._stragglers.end()
        if self._attempts.hooks is not None:
            self._attempts.hooks.emit(ToolkitClosed())

    def run(self, tenant: str, run: str, **defaults: Any) -> Run:
        """One run of an agent for one tenant; keyword arguments (`CallOptions`) are the defaults of its calls.

        Raises InvalidName and InvalidSetting.
        """
        return Run(
            self._attempts,
            self._pulse,
            self._stragglers,
            self._executions,
            tenant,
            run,
            digest=self._digest,
            defaults={**self._defaults, **defaults},
            notices=self.notices,
        )

    def delivery(
        self, msg: JetStreamMessage, *, operator: str | None = None, terminate: bool = False, progress: float = 5.0
    ) -> AbstractAsyncContextManager[Delivery]:
        """An async context manager around one JetStream message: the turn that it asks for.

        Keeps the message in progress every ``progress`` seconds (less than the consumer's ack_wait), acknowledges
        it when the body ends well, and gives it back when it raises, which it lets through: with the delay that
        CallInFlight names; with a long and growing one (30 s, doubling, at most an hour) on AmbiguousCall and
        whatever else needs a person, so that the turn goes on once that is settled (``terminate=True`` gives such
        a message up instead); after a second, doubling up to a minute, on the host's own errors; at once when it is
        cancelled. In a redelivery calls read their receipt before
        they claim.

        ``operator`` names who is told of what needs a person: on the call's run a notice is filed to that agent, at
        the endpoint of its tenant, once for each ambiguity. (It is logged where that fails.) Runs in such a delivery
        need names that notices have room for: InvalidName.
        """
        check_number("progress", progress, (int, float), 0.01, 3600)
        if operator is not None:
            check_text("operator", operator)
        tell = partial(self._announcer.needs_a_person, operator) if operator is not None else None
        return deliver(msg, terminate=terminate, progress=progress, tell=tell)


@contextlib.asynccontextmanager
async def connect(
    servers_or_client: str | Sequence[str] | Client = "nats://127.0.0.1:4222",
    *,
    namespace: str = "",
    digest: Digest = sha256_hex,
    cipher: Cipher | None = None,
    provision: bool = False,
    replicas: int = 1,
    history: int = 8,
    retention: float = 0.0,
    partitions: int | None = None,
    lease: float = 30.0,
    inline_limit: int = 256 * 1024,
    worker: str | None = None,
    hooks: Iterable[Hook] = (),
    connect_timeout: float = 5.0,
    **connection: Any,
) -> AsyncGenerator[Toolkit, None]:
    """Connect, look at the buckets, and give a `Toolkit` for as long as the context is open.

    ``servers_or_client``: a URL, several, or a connected nats-py client, which is not closed. ``namespace``
    prefixes every bucket and stream (``prod-receipts``). ``digest`` is how arguments are hashed, the same for every
    worker of a bucket. ``cipher`` (`natsreceipts.cipher.Cipher`) seals results, steps, stored arguments, errors' texts
    and session bodies with the tenant's key. ``provision`` makes missing buckets, with ``replicas``, ``history``
    (revisions kept of a key, at least 8) and ``retention`` (seconds until a receipt expires and its call can run
    again; 0: never); a bucket
    that is there is never changed. ``partitions``: in how many buckets (``receipts-0``, …; 1 to 64) the receipts are,
    all of a run in one of them; by default as many as there are, or one (``receipts``). The number is fixed when they
    are made. ``lease``: seconds, the default of every call. ``inline_limit``: bytes of a record
    above which its payloads move to the object store ``receipt-payloads``. ``worker`` names this worker in
    receipts, for people (``host/pid`` by default). ``hooks`` are told of what happens: `natsreceipts.telemetry`, and
    `natsreceipts.otel` for OpenTelemetry. ``connect_timeout``: seconds. Further keyword arguments go to
    nats-py's ``connect`` (``user``, ``password``, ``user_credentials``, ``tls``, …), except for ``pending_size``,
    ``max_reconnect_attempts``, ``error_cb`` and ``disconnected_cb``, which the guarantees rest on.

    Raises Unreachable, PermissionDenied, NotProvisioned (a bucket is missing, or its settings break the
    promises), InvalidName, InvalidSetting. Settings that weaken a promise, and a server that is too old to be read
    all from, are logged as warnings.
    """
    check_number("inline_limit", inline_limit, int, 1024, 2**30)
    check_number("connect_timeout", connect_timeout, (int, float), 0.001, 3600)
    if provision is not True and provision is not False:
        raise InvalidSetting(f"provision={brief(provision)}: use True or False")
    worker = worker if worker is not None else f"{socket.gethostname()}/{os.getpid()}"
    if not isinstance(cast("object", worker), str) or not worker.isprintable() or len(worker) > 200:
        raise InvalidSetting(f"worker={brief(worker)}: use up to 200 printable characters")
    telling = checked_hooks(hooks)
    servers = checked_servers(servers_or_client, connection)
    options = CallOptions(lease=lease)
    stores_of = partial(wanted, namespace=namespace, replicas=replicas, history=history, retention=retention)
    stores = stores_of(partitions=partitions)
    if not callable(digest):
        raise InvalidSetting(f"digest={brief(digest)}: use sha256_hex or hmac_digest(secret)")
    if cipher is not None and not (hasattr(cipher, "current") and hasattr(cipher, "named")):
        raise InvalidSetting(f"cipher={type(cipher).__name__}: use natsreceipts.cipher.Cipher(keys)")
    async with opened(servers, connect_timeout=connect_timeout, options=connection) as link:
        if provision:
            check_usable(stores, lease=options.lease)
            stores = await agreed(link, stores_of, partitions, making=True, timeout=connect_timeout)
            for store in stores.all:
                await make(link, store.name, store.config, timeout=connect_timeout)
        found: list[tuple[Wanted, list[Finding]]] = []

        async def bound(store: Wanted, *, of_sessions: bool = False) -> JetStreamBucket:
            made, weaker = await bind(
                link, store.name, lease=options.lease, timeout=connect_timeout, of_sessions=of_sessions
            )
            found.append((store, weaker))
            return made

        try:
            stream = await bound(stores.sessions, of_sessions=True)
        except NotProvisioned:
            await bound(stores.receipts[0])  # where nothing is there, this is what people look for
            raise
        stores = partitioned(stores_of, asked=partitions, there=stream.partitions)
        parts = [await bound(store) for store in stores.receipts]
        bucket = _one_of(parts, stores.sessions.name)
        notices = await bound(stores.notices)
        objects, weaker = await bind_objects(
            link, stores.payloads.name, retention=bucket.retention, timeout=connect_timeout
        )
        found.append((stores.payloads, weaker))
        _warn_of(link.server_version)
        for store, weaker in found:
            for finding in weaker:
                _log.warning("%s %s %s", store.kind, store.name, finding.text)
        least = 30.0 if bucket.replicas > 1 else 10.0
        if options.lease < least:
            _log.warning(
                "a lease of %g s is short: under %g s a slow server or a failover makes live calls ambiguous",
                options.lease,
                least,
            )
        if cipher is not None and digest is sha256_hex:
            _log.warning(
                "what calls leave is sealed, and the hash of their arguments in its key is a plain one: whoever reads "
                "the bucket can test a guess of the arguments against it. Give a new bucket digest=hmac_digest(secret)"
            )
        payloads = PayloadStore(objects, inline_limit=inline_limit, seals=Seals(cipher))
        attempts = Attempts(bucket, payloads, worker=worker, session_stream=stream_mark(stream), hooks=telling)
        board = NoticeBoard(notices)
        announcer = Announcer(board, bucket.nonce)
        toolkit = Toolkit(
            ReceiptStore(bucket, attempts, announcer),
            Sessions(stream, attempts, digest=digest),
            board,
            announcer,
            attempts,
            digest=digest,
            defaults={"lease": options.lease},
        )
        try:
            yield toolkit
        finally:
            await toolkit.close()


def _one_of(parts: Sequence[JetStreamBucket], sessions: str) -> Bucket:
    """The receipts' bucket, or its partitions as one. Raises NotProvisioned where they are not made for each other."""
    for part in parts:
        if part.partitions != len(parts):
            raise NotProvisioned(
                part.name,
                f"is one of {part.partitions}, and stream {sessions!r} says that there are {len(parts)}",
                advice="one of them was made or restored apart from the others: put back those that belong together, "
                "since receipts would not be found",
            )
    return parts[0] if len(parts) == 1 else PartitionedBucket(parts[0].name.removesuffix("-0"), parts)


def _warn_of(version: str) -> None:
    if is_old(version):
        _log.warning(
            "nats-server %s is too old (%s or newer is needed): runs, lists and sessions cannot be read",
            version,
            ".".join(map(str, OLDEST_SERVER)),
        )
