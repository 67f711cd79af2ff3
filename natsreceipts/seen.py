"""A revision of a receipt as it was read from the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from natsreceipts.errors import CorruptRecord, ReceiptErased
from natsreceipts.wire import ReceiptRecord, read_receipt

if TYPE_CHECKING:
    from natsreceipts._jetstream import Entry
    from natsreceipts.identity import ReceiptKey

__all__ = ["Seen", "result_of", "seen_of"]


class Seen(NamedTuple):
    """A revision of a receipt as it was read."""

    record: ReceiptRecord
    revision: int
    entry: Entry

    @property
    def time(self) -> int:
        """The server's timestamp, in nanoseconds since the epoch."""
        return self.entry.time


def seen_of(bucket: str, key: ReceiptKey | str, entry: Entry) -> Seen:
    """Read an entry of a receipts bucket. Raises ReceiptErased, CorruptRecord, UnsupportedRecord."""
    if entry.erased:
        raise ReceiptErased(key, bucket=bucket, revision=entry.revision)
    return Seen(read_receipt(bucket, key, entry.revision, entry.value), entry.revision, entry)


def result_of(bucket: str, seen: Seen) -> Any:
    """The recorded result of a completed receipt. Raises CorruptRecord where it cannot be read."""
    payload = seen.record.result
    try:
        if payload is None:
            raise ValueError("it has no result")
        return payload.value()
    except ValueError as error:
        raise CorruptRecord(bucket, seen.record.key, seen.revision, f"result: {error}") from error
