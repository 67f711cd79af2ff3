"""Receipts as people and programs look at them, for code without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from natsreceipts import receipts
    from natsreceipts.errors import NatsReceiptsError, Unreachable
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.receipt import Receipt, Revision
    from natsreceipts.server_time import ServerTime
    from natsreceipts.sync.portal import Portal
    from natsreceipts.wire import Payload, Status

__all__ = ["ReceiptStore"]

_UNSET: Any = object()


class ReceiptStore:
    """The receipts of one bucket. Every verb is that of `natsreceipts.ReceiptStore`."""

    def __init__(self, portal: Portal, inner: receipts.ReceiptStore) -> None:
        self._portal = portal
        self._inner = inner

    def bucket(self, key: ReceiptKey | str) -> str:
        """The name of the bucket that a receipt is in. Raises InvalidName."""
        return self._inner.bucket(key)

    def get(self, key: ReceiptKey | str) -> Receipt | None:
        """The receipt of a call (a ReceiptKey or its KV key), or None where none was ever written."""
        return self._portal.run(self._inner.get, key)

    def history(self, key: ReceiptKey | str) -> list[Receipt]:
        """The kept revisions of a receipt, oldest first (the bucket keeps 8 or more)."""
        return self._portal.run(self._inner.history, key)

    def revisions(self, key: ReceiptKey | str) -> list[Revision]:
        """The kept revisions of a key, oldest first, with delete markers and what cannot be read."""
        return self._portal.run(self._inner.revisions, key)

    def payload(self, receipt: Receipt, payload: Payload) -> Any:
        """The value of a payload of a receipt's record (its result, a step, the arguments), wherever it is kept."""
        return self._portal.run(self._inner.payload, receipt, payload)

    def server_time(self) -> ServerTime:
        """The server's clock, by which leases end and receipts expire."""
        return self._portal.run(self._inner.server_time)

    def list(
        self,
        *,
        tenant: str | None = None,
        run: str | None = None,
        tool: str | None = None,
        status: Status | None = None,
        unreadable: Callable[[NatsReceiptsError], None] | None = None,
        erased: Callable[[str, Revision], None] | None = None,
    ) -> Iterator[Receipt]:
        """The newest revision of each receipt, filtered by names and status; an iterator, in order of keys.

        ``unreadable`` and ``erased`` are called on the toolkit's own thread.
        """
        return self._portal.iterate(
            self._inner.list(tenant=tenant, run=run, tool=tool, status=status, unreadable=unreadable, erased=erased)
        )

    def watch(
        self,
        *,
        tenant: str | None = None,
        run: str | None = None,
        tool: str | None = None,
        unreadable: Callable[[NatsReceiptsError], None] | None = None,
        erased: Callable[[str, Revision], None] | None = None,
        unreachable: Callable[[Unreachable | None], None] | None = None,
    ) -> Iterator[Receipt]:
        """The receipts that match, as they stand, and then every further revision in order, for ever.

        ``unreadable``, ``erased`` and ``unreachable`` are called on the toolkit's own thread.
        """
        watched = self._inner.watch(
            tenant=tenant, run=run, tool=tool, unreadable=unreadable, erased=erased, unreachable=unreachable
        )
        return self._portal.iterate(watched)

    def resolve(
        self,
        key: ReceiptKey | str,
        *,
        revision: int,
        completed: object = _UNSET,
        not_applied: bool = False,
        by: str,
        reason: str,
        notify: str | None = None,
        even_if_running: bool = False,
    ) -> Receipt:
        """Settle a call whose outcome nobody knows, on the ``revision`` that you looked at."""
        said: dict[str, Any] = {} if completed is _UNSET else {"completed": completed}
        return self._portal.run(
            self._inner.resolve,
            key,
            revision=revision,
            not_applied=not_applied,
            by=by,
            reason=reason,
            notify=notify,
            even_if_running=even_if_running,
            **said,
        )
