"""One attempt at one call, and what it can come to: the words that the write path speaks in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from natsreceipts.errors import CallWithdrawn
from natsreceipts.seals import sealed_error, sealed_payload
from natsreceipts.wire import ErrorInfo, ReceiptRecord, ResolvedBy, Status

if TYPE_CHECKING:
    from natsreceipts.decision import Decision, Effect
    from natsreceipts.entries import SessionEntry
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.seals import SealingKey
    from natsreceipts.seen import Seen

__all__ = ["Attempt", "Blocked", "Ending", "Judged", "Lost", "Resolution", "Write", "margin_of"]


class Blocked(NamedTuple):
    """Why a claim did not go ahead. ``expires_in``: seconds of lease that a running record has left."""

    seen: Seen
    decision: Decision
    effect: Effect
    expires_in: float = 0.0


class Judged(NamedTuple):
    """A record that a judge or a resolver wrote or found, under ``revision``."""

    record: ReceiptRecord
    revision: int


class Resolution(NamedTuple):
    """What somebody who looked at the outside world says: it landed with ``result`` (a payload's JSON), or (None)
    it did not and can no longer."""

    by: ResolvedBy
    result: bytes | None = None


class Lost(NamedTuple):
    """The call moved on without this attempt; ``seen`` is what stands there now."""

    seen: Seen

    def __str__(self) -> str:
        record = self.seen.record
        by = f", settled by {record.resolved.by}" if record.resolved else ""
        return f"the receipt is {record.status} at attempt {record.attempts}, revision {self.seen.revision}{by}"


class Ending(NamedTuple):
    """How an attempt ended: what its settle is to say."""

    status: Status
    result: bytes | None = None
    """A payload's JSON."""
    error: ErrorInfo | None = None


class Write:
    """A write that may be in flight: what to look for, or to send again, if its answer is lost."""

    __slots__ = ("_record", "expected", "nonce", "token", "value")

    def __init__(
        self, value: bytes, *, expected: int, nonce: str, token: str, record: ReceiptRecord | None = None
    ) -> None:
        self.value = value
        self.expected = expected
        self.nonce = nonce
        self.token = token
        self._record = record

    @classmethod
    def of(cls, record: ReceiptRecord, *, expected: int) -> Self:
        """The write of a record that was made in full."""
        token = record.holder.token if record.holder else ""
        return cls(record.to_bytes(), expected=expected, nonce=record.write, token=token, record=record)

    @property
    def record(self) -> ReceiptRecord:
        """What is written, read from its bytes where it was put together from pieces."""
        if self._record is None:
            self._record = ReceiptRecord.model_validate_json(self.value)
        return self._record


class Attempt:
    """One caller's attempt at one call: before its claim, while it holds the call, and after."""

    __slots__ = (
        "_held",
        "_watched",
        "_watched_since",
        "args",
        "body",
        "claimed_as",
        "effect",
        "entries",
        "in_flight",
        "key",
        "kv_key",
        "lease",
        "number",
        "overshadowed",
        "revision",
        "running",
        "sealing",
        "sent",
        "settling",
        "token",
    )

    def __init__(self, key: ReceiptKey, *, effect: Effect, lease: float) -> None:
        self.key = key
        self.kv_key = key.kv_key
        self.effect = effect
        self.lease = lease
        """Seconds."""
        self.entries: tuple[SessionEntry, ...] = ()
        """Where in a session the call was asked for; in the ambient scope perhaps in one of several."""
        self.args: bytes | None = None
        """The arguments to keep in the receipt, a payload's JSON."""
        self.sealing: SealingKey | None = None
        """What its results, steps, arguments and errors are sealed with; None where nothing is sealed."""
        self.revision = 0
        """The revision by which this attempt holds the call, or by which it ended; 0 before that."""
        self.number = 0
        """1, 2, … once it holds the call."""
        self.token = ""
        """The nonce of the attempt, as the record's holder."""
        self.running = False
        """Whether the record by which it holds the call says so (else it was judged ambiguous meanwhile)."""
        self.sent = 0.0
        """When the last accepted write that holds the call was first sent, on the loop's clock (seconds)."""
        self.claimed_as = effect
        """The effect that the claim was written with: the stricter of the record's and the caller's."""
        self.body: bytes | None = None
        """The common fields of a fresh call's records, as long as nothing else touched them."""
        self.in_flight: Write | None = None
        self.settling: Ending | None = None
        """What the write in flight says of the attempt's end."""
        self.overshadowed = False
        """Whether the record became opaque since the claim, over an earlier attempt that may have had its effect."""
        self._held: Write | ReceiptRecord | None = None
        self._watched = 0
        self._watched_since = 0.0

    @property
    def holds(self) -> bool:
        """Whether a record of this attempt stands, or stood until it ended."""
        return self._held is not None

    @property
    def held(self) -> ReceiptRecord:
        """The record by which this attempt holds the call."""
        held = self._held
        if held is None:
            raise RuntimeError("this attempt holds nothing")
        if isinstance(held, Write):
            held = self._held = held.record
        return held

    def wrote(self, write: Write, revision: int) -> None:
        """Go on from a write of its own that stands."""
        self._held = write
        self.revision = revision

    def found(self, record: ReceiptRecord, revision: int) -> None:
        """Go on from a record that was read, under this attempt's token."""
        self._held = record
        self.revision = revision
        self.running = record.status == "running"
        self.overshadowed = record.open and record.effect is not self.claimed_as
        self.number = record.attempts
        self.token = record.holder.token if record.holder else ""
        self.body = None

    def check_fences(self, fences: dict[str, int]) -> None:
        """Raise CallWithdrawn where fences refuse a claim of this attempt: it is from before one, or says nothing."""
        if not self.entries:
            raise CallWithdrawn(self.key)
        for entry in self.entries:
            if entry.seq <= fences.get(entry.token, -1):
                raise CallWithdrawn(self.key, entry=entry)

    def sealed(self, place: str, payload: bytes) -> bytes:
        """A payload's JSON as it is written at ``place`` of the record."""
        return payload if self.sealing is None else sealed_payload(self.sealing, self.key, place, payload)

    def sealed_error(self, error: ErrorInfo) -> ErrorInfo:
        """An error as it is written."""
        return error if self.sealing is None else sealed_error(self.sealing, self.key, error)

    def let_go(self) -> None:
        """Hold nothing any more."""
        self._held, self.revision, self.running, self.body, self.overshadowed = None, 0, False, None, False

    def watched(self, revision: int, now: float) -> float:
        """Seconds for which this attempt has itself seen the key stand at ``revision``."""
        if revision != self._watched:
            self._watched, self._watched_since = revision, now
        return now - self._watched_since


def margin_of(lease: float) -> float:
    """Seconds beyond a lease's end before it counts as expired: a tenth of it, at most 2 s."""
    return min(lease / 10, 2.0)
