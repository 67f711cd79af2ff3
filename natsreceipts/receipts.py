"""The receipts as they stand in the bucket: `Receipt`, and reading them. Never writes."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from natsreceipts.errors import CorruptRecord, NatsReceiptsError, ReceiptErased, with_key
from natsreceipts.fence import Pace, newest
from natsreceipts.wire import ErrorInfo, ReceiptRecord, ResolvedBy, Status, read_receipt

if TYPE_CHECKING:
    from natsreceipts._jetstream import Bucket, Entry
    from natsreceipts.decision import Effect
    from natsreceipts.identity import ReceiptKey

__all__ = ["Receipt", "ReceiptStore", "Seen", "result_of", "seen_of"]

_READ_PATIENCE = 5.0
"""Seconds that a read is tried for."""


class Seen(NamedTuple):
    """A revision of a receipt as it was read. ``time`` is the server's, in nanoseconds since the epoch."""

    record: ReceiptRecord
    revision: int
    time: int


def seen_of(bucket: str, key: ReceiptKey | str, entry: Entry) -> Seen:
    """Read an entry of a receipts bucket. Raises ReceiptErased, CorruptRecord, UnsupportedRecord."""
    if entry.erased:
        raise ReceiptErased(key, bucket=bucket, revision=entry.revision)
    return Seen(read_receipt(bucket, key, entry.revision, entry.value), entry.revision, entry.time)


def result_of(bucket: str, seen: Seen) -> Any:
    """The recorded result of a completed receipt. Raises CorruptRecord where it cannot be read."""
    payload = seen.record.result
    try:
        if payload is None:
            raise ValueError("it has no result")
        return payload.value()
    except ValueError as error:
        raise CorruptRecord(bucket, seen.record.key, seen.revision, f"result: {error}") from error


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt as it stands in the bucket.

    ``updated`` is the server's timestamp of this revision. ``result`` is the recorded result (None where there is
    none, or where None was the result: ``status`` tells), ``error`` what the last attempt ended in.
    """

    key: ReceiptKey
    kv_key: str
    revision: int
    updated: dt.datetime
    status: Status
    attempts: int
    effect: Effect | None
    result: Any
    error: ErrorInfo | None
    resolved: ResolvedBy | None
    worker: str | None
    lease: float | None
    """Seconds."""


class ReceiptStore:
    """The receipts of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def get(self, key: ReceiptKey | str) -> Receipt | None:
        """The receipt of a call (a ReceiptKey or its KV key), or None where none was ever written.

        Reads from the leader, for up to 5 s, and writes nothing. Raises ReceiptErased, CorruptRecord,
        UnsupportedRecord, Unreachable, PermissionDenied, NotProvisioned.
        """
        kv_key = key if isinstance(key, str) else key.kv_key
        try:
            entry = await newest(self._bucket, kv_key, Pace(self._bucket, lease=30.0, patience=_READ_PATIENCE))
        except NatsReceiptsError as error:
            raise with_key(error, key)  # noqa: B904 - it is the same error
        return None if entry is None else self._view(seen_of(self._bucket.name, key, entry))

    def _view(self, seen: Seen) -> Receipt:
        record = seen.record
        return Receipt(
            key=record.key,
            kv_key=record.key.kv_key,
            revision=seen.revision,
            updated=dt.datetime.fromtimestamp(seen.time / 1e9, tz=dt.UTC),
            status=record.status,
            attempts=record.attempts,
            effect=record.effect,
            result=result_of(self._bucket.name, seen) if record.result else None,
            error=record.error,
            resolved=record.resolved,
            worker=record.holder.worker if record.holder else None,
            lease=record.lease_ms / 1000 if record.lease_ms else None,
        )
