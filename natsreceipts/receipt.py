"""A receipt, and a revision of one, as people and programs look at them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datetime as dt

    from natsreceipts.decision import Effect
    from natsreceipts.errors import NatsReceiptsError
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.wire import ErrorInfo, ReceiptRecord, ResolvedBy, Status

__all__ = ["Receipt", "Revision", "Sealed"]


@dataclass(frozen=True, slots=True)
class Sealed:
    """In the place of a result, arguments or an error's text that could not be opened here: by which key they are."""

    key_id: str

    def __str__(self) -> str:
        return f"(sealed with key {self.key_id})"


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt as it stands in the bucket.

    ``updated`` is the server's timestamp of this revision. ``result`` is the recorded result (None where there is
    none, or where None was the result: ``status`` tells), ``error`` what the last attempt ended in. What is sealed, and
    cannot be opened here, is a `Sealed` in its place (only ``get`` raises).
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
    args: Any
    """The stored arguments, or None (also where they are in the object store)."""
    large: bool
    """Whether the result is in the object store; only ``get`` loads it, elsewhere ``result`` is None."""
    steps: tuple[str, ...]
    """The names of the recorded steps."""
    worker: str | None
    lease: float | None
    """Seconds."""
    record: ReceiptRecord = dataclasses.field(repr=False)
    """The record as it was read; ``record.to_bytes()`` is its JSON, under the names of docs/wire.md."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One kept revision of a key: a receipt, a delete marker (``erased``), or a value that cannot be read.

    ``time`` is the server's timestamp. Of ``receipt``, ``erased`` and ``problem`` exactly one is set.
    """

    revision: int
    time: dt.datetime
    receipt: Receipt | None
    erased: bool
    problem: NatsReceiptsError | None
    """CorruptRecord or UnsupportedRecord."""
    value: bytes = dataclasses.field(repr=False)
    """As it stands in the bucket."""
