"""`connect` for code without an event loop: a toolkit whose loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
from typing import TYPE_CHECKING, Any

from natsreceipts import toolkit as toolkits
from natsreceipts.errors import InvalidSetting, Unreachable
from natsreceipts.identity import Digest, sha256_hex
from natsreceipts.sync.calls import OpenCalls, call_options
from natsreceipts.sync.notices import NoticeBoard
from natsreceipts.sync.portal import Errand, Portal, current_errand
from natsreceipts.sync.receipts import ReceiptStore
from natsreceipts.sync.run import Run
from natsreceipts.sync.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from natsreceipts.seals import Cipher
    from natsreceipts.telemetry import Hook

__all__ = ["Toolkit", "connect"]


class Toolkit:
    """What `connect` gives: ``receipts``, ``sessions``, ``notices``, and runs to make guarded calls in.

    As `natsreceipts.Toolkit`; to be used from any thread of the process that opened it.
    """

    def __init__(self, portal: Portal, open_calls: OpenCalls, inner: toolkits.Toolkit) -> None:
        self._portal = portal
        self._open_calls = open_calls
        self._inner = inner
        self.receipts = ReceiptStore(portal, inner.receipts)
        """The receipts: `ReceiptStore.get`."""
        self.sessions = Sessions(portal, inner.sessions)
        """The session logs: `Sessions.open`."""
        self.notices = NoticeBoard(portal, inner.notices)
        """The notices of the endpoint ``local``: `NoticeBoard.file`. ``run.notices`` are those of a tenant's run."""

    def run(self, tenant: str, run: str, **defaults: Any) -> Run:
        """One run of an agent for one tenant; keyword arguments (`CallOptions`) are the defaults of its calls.

        Raises InvalidName and InvalidSetting.
        """
        inner = self._inner.run(tenant, run, **{"on_lost": "continue", **call_options(defaults)})
        return Run(self._portal, self._open_calls, inner)


class _Connection:
    """A toolkit on a loop of its own, for as long as the context is open."""

    def __init__(self, servers: str | Sequence[str], settings: dict[str, Any]) -> None:
        self._servers = servers
        self._settings = settings
        self._portal: Portal | None = None
        self._errand: Errand[None] | None = None
        self._stop: asyncio.Event | None = None
        self._open_calls = OpenCalls()

    def __enter__(self) -> Toolkit:
        if self._portal is not None:
            raise InvalidSetting("a connection is entered once: call connect(...) again")
        portal = self._portal = Portal()
        errand = self._errand = Errand(portal, self._open)
        try:
            errand.start()
            toolkit = errand.heard()
            if not isinstance(toolkit, Toolkit):
                errand.result()
                raise Unreachable("this toolkit was closed while it was opened")
        except BaseException:
            errand.cancel()
            portal.close()
            raise
        atexit.register(self._at_exit)
        return toolkit

    async def _open(self) -> None:
        self._stop = asyncio.Event()
        async with toolkits.connect(self._servers, **self._settings) as inner:
            assert self._portal is not None
            current_errand().say(Toolkit(self._portal, self._open_calls, inner))
            await self._stop.wait()
            await self._open_calls.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        portal, errand = self._portal, self._errand
        if portal is None or errand is None:
            raise InvalidSetting("this connection was not entered")
        if portal.forked:
            return  # it is the other process's
        portal.soon(lambda: self._stop is None or self._stop.set())
        if portal.is_here:
            return
        try:
            errand.result(elsewhere=True)
        finally:
            portal.close()
            atexit.unregister(self._at_exit)  # last: a Ctrl-C before leaves it to the end of the program

    def _at_exit(self) -> None:
        """The program ends, and nobody has closed it."""
        with contextlib.suppress(Exception):
            self.__exit__(None, None, None)


def connect(
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
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
) -> AbstractContextManager[Toolkit]:
    """Connect, and give a `Toolkit` for as long as the context is open. All settings as in `natsreceipts.connect`.

    ``hooks`` are called on the toolkit's own thread. The connection, the leases and all waiting are the work of an
    event loop in a thread of its own; the bodies of
    calls run in the threads that make them. A program that ends without leaving the context closes it at its end.

    Raises what `natsreceipts.connect` raises, and InvalidSetting for a connected client (which belongs to another
    loop) and where an event loop runs in the calling thread.
    """
    if not isinstance(servers, str | list | tuple):
        raise InvalidSetting(
            f"servers={type(servers).__name__}: give a URL or several; a connected client belongs to its own loop"
        )
    settings: dict[str, Any] = {
        "namespace": namespace,
        "digest": digest,
        "cipher": cipher,
        "provision": provision,
        "replicas": replicas,
        "history": history,
        "retention": retention,
        "partitions": partitions,
        "lease": lease,
        "inline_limit": inline_limit,
        "worker": worker,
        "hooks": hooks,
        "connect_timeout": connect_timeout,
        **connection,
    }
    return _Connection(servers, settings)
