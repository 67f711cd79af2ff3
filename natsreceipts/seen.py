"""A revision of a receipt as it was read from the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from natsreceipts.errors import ReceiptErased
from natsreceipts.wire import ReceiptRecord, read_receipt

if TYPE_CHECKING:
    from natsreceipts._jetstream import Entry
    from natsreceipts.identity import ReceiptKey

__all__ = ["Seen", "seen_of"]


class Seen(NamedTuple):
    """A revision of a receipt as it was read."""

    record: ReceiptRecord
    revision: int
    entry: Entry | None
    """What it was read from; None for a record of this process's own."""

    @property
    def time(self) -> int:
        """The server's timestamp, in nanoseconds since the epoch; 0 where it is not known."""
        return self.entry.time if self.entry is not None else 0


def seen_of(bucket: str, key: ReceiptKey | str, entry: Entry) -> Seen:
    """Read an entry of a receipts bucket. Raises ReceiptErased, UnsupportedRecord."""
    if entry.erased:
        raise ReceiptErased(key, bucket=bucket, revision=entry.revision)
    return Seen(read_receipt(bucket, key, entry.revision, entry.value), entry.revision, entry)
