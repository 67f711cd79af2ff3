"""One connection to NATS: requests with one reply inbox, and every way in which they fail.

Why not nats-py's own ``request``: one inbox with a callback costs 52 us a request against 81 (measured), pending
requests are failed when the connection drops instead of after the whole time-out (on connections that we
opened), and a permission error, which the server answers with silence, is told as what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import ssl
import sys
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import nats
import nats.errors
from nats.aio.client import Client

from natsreceipts._jetstream.servers import without_secrets
from natsreceipts._jetstream.tls import check_tls
from natsreceipts.background import stopped
from natsreceipts.errors import InvalidSetting, PermissionDenied, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.aio.transport import Transport

__all__ = ["Connection", "NoResponders", "NotSent", "Reply", "close_client", "opened"]

_log = logging.getLogger("natsreceipts")

_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)

_PINGS = {"ping_interval": 3, "max_outstanding_pings": 2}
"""A machine that is gone closes nothing: 6 to 9 s of silence end the connection (one ping more than are outstanding),
and another 2 s go by where the first server that is tried then is the silent one. The lease of 30 s is renewed every
10 s, so half of it is what may pass: with pings every 10 s it was lost to a single frozen leader (measured)."""

_HEADER_PRELUDE = len(b"NATS/1.0\r\n\r\n")


class Reply(NamedTuple):
    """The answer to a request: its headers (None where it had none) and its payload."""

    headers: dict[str, str] | None
    data: bytes


class NotSent(Exception):
    """The request was certainly not sent and nothing of it is buffered. ``retry``: it may go out a moment later."""

    def __init__(self, cause: Exception, *, retry: bool) -> None:
        self.cause = cause
        self.retry = retry
        super().__init__(str(cause))


class NoResponders(Exception):
    """Nobody listens on the subject: no such stream, no leader, or no JetStream. Nothing was stored."""


class _Waiting(NamedTuple):
    future: asyncio.Future[Reply]
    subject: str
    timeout: float
    deadline: float


class Connection:
    """A nats-py client with a reply inbox of our own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prefix = client.new_inbox() + "."
        self._tokens = itertools.count(1)
        self._waiting: dict[str, _Waiting] = {}
        self._gathering: dict[str, Callable[[Reply], None]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._given_up = False
        self._inbox_denied: PermissionDenied | None = None
        self._inbox: Subscription | None = None

    async def open(self, *, timeout: float) -> None:
        """Subscribe to the inbox. Raises PermissionDenied where that is not allowed, Unreachable after ``timeout``.

        An inbox that is not permitted lets writes through and swallows their answers (measured), so it is found
        out here.
        """
        subject = self._prefix + "*"
        try:
            self._inbox = await self._subscribe(subject, self._on_reply)
            for _ in range(2):  # nats-py sends the first one's PING ahead of the subscription (measured)
                await self._client.flush(timeout=max(1, round(timeout)))
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise Unreachable(f"the NATS server did not answer within {timeout:.0f} s").because(error) from error
        self.check_inbox()

    def check_inbox(self) -> None:
        """Raise PermissionDenied where the server is known to have refused the inbox."""
        subject = self._prefix + "*"
        if self._last_denied(subject) is not None:
            self._inbox_denied = PermissionDenied("subscribe", subject)
        if self._inbox_denied is not None:
            raise PermissionDenied("subscribe", subject)

    async def close(self) -> None:
        """Give up the inbox; requests in flight end as unreachable."""
        self._given_up = True
        self._fail_all(Unreachable("the toolkit was closed while this request was in flight"))
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if self._inbox is not None and not self._client.is_closed:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._inbox.unsubscribe()

    @property
    def client(self) -> Client:
        """The nats-py client below."""
        return self._client

    @property
    def max_payload(self) -> int:
        """Bytes of headers and payload that the server takes in one message."""
        return self._client.max_payload

    @property
    def server_version(self) -> str:
        """The version that the server connected to told of itself; "unknown" while there is none."""
        told = str(self._client.connected_server_version).removeprefix("<nats server v").removesuffix(">")
        return "unknown" if told.startswith("0.0.0") else told

    async def request(
        self, subject: str, payload: bytes, *, timeout: float, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send one request and wait up to ``timeout`` seconds for its answer.

        Raises `NotSent`, `NoResponders`, PermissionDenied (the request was refused), or Unreachable (no answer:
        what the request asked for may have been done).
        """
        client = self._client
        self._check(payload, headers)
        token = str(next(self._tokens))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        deadline = loop.time() + timeout
        self._waiting[token] = _Waiting(future, subject, timeout, deadline)
        # One timer for all that wait: a timer of its own costs a request as much as its answer's parsing.
        if self._sweep is None or self._sweep.when() > deadline:
            self._sweep_at(deadline)
        try:
            # No await stands between the check and the bytes being handed to the transport's buffer, so with any
            # client, also one that buffers while it reconnects, nothing is sent after we said that it was not.
            await client.publish(subject, payload, reply=self._prefix + token, headers=headers)
            reply = await future
        except nats.errors.Error as error:
            raise self._not_sent(error) from error
        finally:
            self._waiting.pop(token, None)
        if not reply.data and reply.headers is not None and reply.headers.get("Status") == "503":
            raise NoResponders(subject)
        return reply

    @property
    def closed(self) -> bool:
        """Whether no request will ever be answered any more."""
        return self._given_up or self._client.is_closed

    def _check(self, payload: bytes, headers: dict[str, str] | None) -> None:
        client = self._client
        if self._given_up:
            raise NotSent(Unreachable("the toolkit was closed: nothing is sent any more"), retry=False)
        if self._inbox_denied is not None:
            # A new one each time: whoever raises it to a host fills in which call it was.
            raise NotSent(PermissionDenied("subscribe", self._inbox_denied.subject), retry=False)
        if not client.is_connected or client.is_draining:
            state = "closed" if client.is_closed else "draining" if client.is_draining else "not connected"
            raise NotSent(
                Unreachable(f"the connection to NATS is {state}"),
                retry=not (client.is_closed or client.is_draining),
            )
        size = len(payload)
        if headers:
            size += _HEADER_PRELUDE + sum([len(k) + len(v) + 4 for k, v in headers.items()])
        if size > client.max_payload:
            # Over it the server resets the connection and nats-py never reconnects (measured).
            raise NotSent(
                ValueError(f"{size:,} bytes are more than the server's max_payload of {client.max_payload:,}"),
                retry=False,
            )

    def _not_sent(self, error: Exception) -> NotSent:
        return NotSent(Unreachable(f"the connection to NATS refused to send: {error}").because(error), retry=True)

    async def request_many(self, subject: str, payload: bytes, *, timeout: float) -> list[Reply]:
        """Send one request that is answered by many messages, and give them with the status that ends them, last.

        Up to ``timeout`` seconds in which no message comes. Raises as `request`.
        """
        self._check(payload, None)
        replies: list[Reply] = []
        token = str(next(self._tokens))
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Reply] = loop.create_future()

        def take(reply: Reply) -> None:
            replies.append(reply)
            if not reply.data and reply.headers is not None and "Status" in reply.headers and not ended.done():
                ended.set_result(reply)

        self._gathering[token] = take
        self._waiting[token] = _Waiting(ended, subject, timeout, inf)
        try:
            await self._client.publish(subject, payload, reply=self._prefix + token)
            while not ended.done():
                heard = len(replies)
                await asyncio.wait([ended], timeout=timeout)
                if not ended.done() and len(replies) == heard:
                    raise Unreachable(f"NATS did not finish its answer to {subject!r} within {timeout:.1f} s").because(
                        self._last_denied(subject)
                    )
            # A direct get that nobody serves has further headers beside the status (measured).
            if (ended.result().headers or {}).get("Status") == "503":
                raise NoResponders(subject)
        except nats.errors.Error as error:
            raise self._not_sent(error) from error
        finally:
            self._gathering.pop(token, None)
            self._waiting.pop(token, None)
        return replies

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """A plain subscription. Raises Unreachable where the connection cannot take it."""
        try:
            return await self._subscribe(subject, callback)
        except (nats.errors.Error, OSError) as error:
            raise Unreachable(f"the connection to NATS refused a subscription: {error}").because(error) from error

    async def try_subscribe(self, subject: str, *, timeout: float) -> None:
        """Subscribe to a subject for a moment. Raises PermissionDenied where that is refused, Unreachable."""
        subscription = await self.subscribe(subject, _ignore)
        try:
            for _ in range(2):
                await self._client.flush(timeout=max(1, round(timeout)))
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise Unreachable(f"the NATS server did not answer within {timeout:.0f} s").because(error) from error
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
        denied = self._last_denied(subject)
        if denied is not None and denied.operation == "subscribe":
            raise denied

    async def _subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Subscription:
        return await self._client.subscribe(subject, cb=callback)  # pyright: ignore[reportUnknownMemberType]

    async def _on_reply(self, msg: Msg) -> None:
        token = msg.subject[len(self._prefix) :]
        if token in self._gathering:
            self._gathering[token](Reply(msg.headers, msg.data))
            return
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_result(Reply(msg.headers, msg.data))

    def _sweep_at(self, deadline: float) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._sweep = None
        now = asyncio.get_running_loop().time()
        for future, subject, timeout, deadline in self._waiting.values():
            if deadline <= now and not future.done():
                error = Unreachable(f"NATS did not answer a request on {subject!r} within {timeout:.1f} s")
                # On a client that we did not open there is no callback to learn this from.
                future.set_exception(error.because(self._last_denied(subject)))
        left = min((waiting.deadline for waiting in self._waiting.values() if not waiting.future.done()), default=inf)
        if left < inf:
            self._sweep_at(left)

    def _last_denied(self, subject: str) -> PermissionDenied | None:
        last = self._client.last_error
        match = _DENIED.search(str(last)) if last is not None else None
        if match is None or match[2].lower() != subject.lower():
            return None
        return PermissionDenied(_verb(match[1]), subject)

    def _fail_all(self, error: Unreachable) -> None:
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)

    async def on_disconnected(self) -> None:
        """The connection dropped: answers to what is in flight will not come."""
        self._fail_all(Unreachable("the connection to NATS dropped before the answer came"))

    async def on_error(self, error: Exception) -> None:
        """An error that the server or the client reports beside any request."""
        match = _DENIED.search(str(error))
        if match is None:
            _log.debug("NATS connection: %s: %s", type(error).__name__, error)
            return
        verb, subject = _verb(match[1]), match[2]
        _log.warning("NATS connection: %s", PermissionDenied(verb, subject))
        # nats-py hands the server's errors on in lower case.
        if verb == "subscribe" and subject.lower() == (self._prefix + "*").lower():
            self._inbox_denied = PermissionDenied(verb, self._prefix + "*")
            self._fail_all(
                Unreachable("the answers to this connection are not let through").because(self._inbox_denied)
            )
            return
        meant = [waiting for waiting in self._waiting.values() if waiting.subject.lower() == subject.lower()]
        alone = len({waiting.subject for waiting in meant}) == 1
        for waiting in meant:
            if not waiting.future.done() and verb == "publish":
                denied = PermissionDenied(verb, waiting.subject)
                # Of subjects that differ in case alone nobody can tell which one was meant.
                waiting.future.set_exception(
                    denied if alone else Unreachable("a request may not have been permitted").because(denied)
                )


async def _ignore(_msg: Msg) -> None:
    pass


def _verb(operation: str) -> str:
    return "publish" if operation.lower() == "publish" else "subscribe"


_REFUSED = re.compile(r"authoriz|authentication (expired|revoked)", re.IGNORECASE)


def _is_refusal(error: Exception | None) -> bool:
    """Whether a server, or TLS, turned us down, which the same credentials do not change a moment later.

    A refused login drops the connection, so that later errors speak of the transport and hide the reason.
    """
    return isinstance(error, nats.errors.AuthorizationError | ssl.SSLCertVerificationError) or bool(
        _REFUSED.search(str(error))
    )


class _TurnedDown(Exception):
    """Every server turned us down. (What an error callback raises ends nats-py's first connect, and no other.)"""


class _Callbacks:
    """nats-py takes its callbacks before there is a connection to speak of."""

    def __init__(self, servers: int) -> None:
        self.connection: Connection | None = None
        self.connecting = True
        self.last: Exception | None = None
        self._refusals_left = servers

    async def error(self, error: Exception) -> None:
        if not _is_refusal(self.last):
            self.last = error
        if self.connecting and _is_refusal(error):
            self._refusals_left -= 1  # nats-py tries its servers in turn
            if self._refusals_left <= 0:
                raise _TurnedDown from error
        if self.connection is not None:
            await self.connection.on_error(error)

    async def disconnected(self) -> None:
        if self.connection is not None:
            await self.connection.on_disconnected()


def _nkeys_errors() -> tuple[type[Exception], ...]:
    """What the optional nkeys raises for seeds that are none, where it was imported."""
    found = getattr(sys.modules.get("nkeys"), "NkeysError", None)
    return (found,) if found is not None else ()


async def close_client(client: Client) -> None:
    """Close a client of our own, whatever state it is in, and leave none of its tasks behind.

    nats-py's close() fails on a client that never got as far as a server. Where it reconnects just then, close()
    cancels the task that waits for the old transport, with it the future that both wait for, and so raises a
    CancelledError that nobody asked for. And before Python 3.12 the reconnecting task loses a cancel that arrives
    with the refusal of the server it tries (asyncio.wait_for raises the refusal instead): it would go on for ever, and
    connect a client that is closed.
    """
    task = asyncio.current_task()
    asked = task.cancelling() if task is not None else 0
    try:
        with contextlib.suppress(AssertionError, nats.errors.Error, OSError):
            await client.close()
    except asyncio.CancelledError:
        if task is None or task.cancelling() > asked:
            raise
    finally:
        await _reconnecting_ended(client)


async def _close_refused(client: Client, cause: BaseException | None) -> None:
    if not isinstance(cause, ssl.SSLError):
        await close_client(client)
        return
    # After a handshake that failed nats-py's close() waits for ever for a transport that is gone (measured).
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await close_client(client)
    transport: Transport | None = getattr(client, "_transport", None)
    if transport is not None:
        transport.close()


async def _reconnecting_ended(client: Client) -> None:
    task: asyncio.Task[None] | None = getattr(client, "_reconnection_task", None)
    if task is None or task.done():
        return
    await stopped(task, again=0.1)
    transport: Transport | None = getattr(client, "_transport", None)
    if transport is not None:  # it may have been let in meanwhile
        transport.close()


@contextlib.asynccontextmanager
async def opened(
    servers: str | Sequence[str] | Client, *, connect_timeout: float, options: dict[str, Any]
) -> AsyncGenerator[Connection, None]:
    """A connection for the time of the context; a client that is passed in stays open behind it.

    Connections that we open buffer nothing while they reconnect (``pending_size=0``: a write that was reported as
    not sent must not land later), notice a silent server within 9 s, and never stop reconnecting.
    """
    if isinstance(servers, Client):
        if not (servers.is_connected or servers.is_reconnecting) or servers.is_draining:
            raise InvalidSetting("the nats-py client is not connected: connect it first, or pass the server's URL")
        connection = Connection(servers)
        await connection.open(timeout=connect_timeout)
        try:
            yield connection
        finally:
            await connection.close()
        return
    urls = [servers] if isinstance(servers, str) else list(servers)
    callbacks = _Callbacks(len(urls))
    client = Client()
    settings: dict[str, Any] = {
        **_PINGS,
        "reconnect_time_wait": 0.25,
        "skip_subject_validation": True,  # every subject is made here, of checked names and escaped tokens
        **options,
        "pending_size": 0,
        "max_reconnect_attempts": -1,
        "error_cb": callbacks.error,
        "disconnected_cb": callbacks.disconnected,
    }
    shown = ", ".join(map(without_secrets, urls))
    await check_tls(urls, options)
    try:
        async with asyncio.timeout(connect_timeout):
            await client.connect(urls, **settings)
    except _TurnedDown as down:
        await _close_refused(client, down.__cause__)
        cause = callbacks.last
        raise Unreachable(
            f"the NATS server at {shown} did not let us in ({cause}): check the credentials and the TLS settings"
        ).because(cause) from down.__cause__
    except (FileNotFoundError, PermissionError, ImportError, ValueError, TypeError, *_nkeys_errors()) as error:
        await close_client(client)
        raise InvalidSetting(f"{shown} cannot be connected to with these settings: {error}") from error
    except (TimeoutError, nats.errors.Error, OSError) as error:
        await close_client(client)
        cause = callbacks.last or error
        raise Unreachable(
            f"no NATS server at {shown} let us in within {connect_timeout:g} s ({cause}): check the address, "
            f"the credentials and that the server runs"
        ).because(cause) from cause
    except BaseException:
        await close_client(client)
        raise
    connection = Connection(client)
    callbacks.connecting, callbacks.connection = False, connection
    try:
        await connection.open(timeout=connect_timeout)
        yield connection
    finally:
        await connection.close()
        await close_client(client)
