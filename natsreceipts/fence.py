"""Writes behind a fence, and what became of them: yes, no, or (only when it must be) unknown.

Two ways to settle a write in doubt, because two questions are asked of it:

`advance` is for writes that move a key on and are followed by the next one (claim, heartbeat, judgement, fence).
It asks *what is the newest record now*, and goes on from that.

`report` is for writes whose outcome is told to somebody (settle, resolve, file, consume). It asks *did this very
write land*, and reads the successor of the revision that it was fenced on: with compare-and-set at most one write
ever follows a revision, so that successor is ours, or ours is not and never will be.

Knows no agent and no receipt; every wait is the event loop's, every random number the bucket's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from natsreceipts._jetstream import Accepted, Conflict, RivalInFlight, Unknown
from natsreceipts.errors import BucketReplaced, NotProvisioned, PermissionDenied, Unreachable, with_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from natsreceipts._jetstream import Bucket, Clock, Entry, Outcome
    from natsreceipts.identity import ReceiptKey

_T = TypeVar("_T")

__all__ = [
    "HistoryDropped",
    "InDoubt",
    "Landed",
    "NotWritten",
    "Overtaken",
    "Pace",
    "advance",
    "clock",
    "newest",
    "patiently",
    "raise_refusal",
    "report",
]

_SHORTEST_TRY = 2.0
_LONGEST_TRY = 5.0
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


class Landed(NamedTuple):
    """The write is stored under ``revision``.

    ``entry`` is what stands there where that was read instead of acknowledged (it may be a later record of the
    same owner), ``sent`` when the write was first sent, on the loop's clock, ``doubt`` whether it was in doubt before.
    """

    revision: int
    sent: float
    entry: Entry | None = None
    doubt: bool = False


class Overtaken(NamedTuple):
    """The write is not stored and never will be: the key had moved on. ``entry`` is its newest, where it was read.

    ``doubt``: whether that was in doubt before.
    """

    entry: Entry | None
    doubt: bool = False


class NotWritten(Exception):
    """The write is not stored and never will be, and no rival was the reason."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(str(cause))


class InDoubt(Exception):
    """The deadline came, or the history was dropped, before it was known whether the write is stored."""

    def __init__(self, cause: Exception | None) -> None:
        self.cause = cause
        super().__init__(str(cause) if cause else "no answer could be had in time")


def raise_refusal(failure: NotWritten | InDoubt, key: ReceiptKey | str | None = None) -> None:
    """Raise the cause of a write that did not go through where it is told as it is: who is to do what stands in it.

    ``key`` is filled in as what it is about.
    """
    cause = failure.cause
    if isinstance(cause, PermissionDenied | NotProvisioned | BucketReplaced):
        raise (cause if key is None else with_key(cause, key)) from None


class HistoryDropped(InDoubt):
    """The revision that the write was fenced on is no longer kept, so its successor does not tell any more."""


class Pace:
    """How long a try lasts, the pauses between tries, and the end of trying. Seconds, on the loop's clock."""

    __slots__ = ("_bucket", "_longest", "_pause", "_shortest", "_try", "deadline", "now")

    def __init__(self, bucket: Bucket, *, lease: float, patience: float) -> None:
        self.now = asyncio.get_running_loop().time
        """The loop's clock."""
        self._bucket = bucket
        self._pause = _FIRST_PAUSE
        self._longest = min(_LONGEST_TRY, lease / 3)
        self._try = min(_SHORTEST_TRY, self._longest)
        self._shortest = min(0.05, patience / 4)
        self.deadline = self.now() + patience - self._shortest

    @property
    def over(self) -> bool:
        """Whether the deadline has come, or no answer can come any more."""
        return self.now() >= self.deadline or self._bucket.closed

    def next_try(self) -> float:
        """How long the next try may last: 2 to 5 s, never more than a third of the lease, nor past the deadline."""
        length = self._try
        self._try = min(length * 1.5, self._longest)
        # A try is never cut so short that it must time out: it would hide what the tries before it were told.
        return max(min(length, self.deadline - self.now()), self._shortest)

    async def pause(self) -> None:
        """Wait before the next try: jittered, doubling up to a second."""
        length = self._pause * (0.5 + self._bucket.jitter())
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        await asyncio.sleep(max(0.0, min(length, self.deadline - self.now())))


async def newest(bucket: Bucket, key: str, pace: Pace) -> Entry | None:
    """The newest revision as the leader has it, asked again until the deadline. Raises as the seam's `newest`."""
    return await patiently(pace, lambda timeout: bucket.newest(key, timeout=timeout))


async def clock(bucket: Bucket, pace: Pace) -> Clock:
    """The leader's clock, asked again until the deadline. Raises as the seam's `clock`."""
    return await patiently(pace, lambda timeout: bucket.clock(timeout=timeout))


async def patiently(pace: Pace, ask: Callable[[float], Awaitable[_T]]) -> _T:
    """Ask again until the deadline while no server answers. ``ask`` is given the seconds that it may take."""
    while True:
        try:
            return await ask(pace.next_try())
        except Unreachable:
            if pace.over:
                raise
        await pace.pause()


class _Sending:
    """The sends of one write: same bytes, same expected revision, and what is known of them so far."""

    __slots__ = ("_bucket", "_first", "_known", "_known_before", "_pace", "cause", "doubt", "sent")

    def __init__(self, bucket: Bucket, *, pace: Pace, doubt: bool, known: int, sent: float) -> None:
        self._bucket = bucket
        self._pace = pace
        self._first = not doubt
        self._known = known
        # Of a write that was sent before it is not known what was known then.
        self._known_before = 0 if doubt else known
        self.sent = sent
        self.doubt = doubt
        """Whether an earlier send may have been stored, or may yet be."""
        self.cause: Exception | None = None

    def take(self, outcome: Outcome) -> Landed | Overtaken | None:
        """Take in the outcome of a send. None: the write is not settled by that. Raises `NotWritten`."""
        if isinstance(outcome, Accepted):
            if outcome.revision <= self._known:
                raise self._bucket.replaced(f"it gave sequence {outcome.revision} after {self._known}")
            return Landed(outcome.revision, self.sent, doubt=self.doubt)
        if isinstance(outcome, Conflict):
            if self._first:
                return Overtaken(None)
            self.doubt = True
        elif isinstance(outcome, RivalInFlight):
            self.cause = Unreachable("another write to this key was in flight, and may never be committed")
        else:
            if isinstance(outcome, Unknown):
                self.cause = self.cause or outcome.cause
                self.doubt = True
            else:
                self.cause = outcome.cause
                if not outcome.retry and not self.doubt:
                    raise NotWritten(outcome.cause)
        self._first = False
        return None

    def read_back(self, entry: Entry, value: bytes) -> Landed:
        """The write stands, by a read. Raises BucketReplaced where it stands at a sequence that was given before it.

        What stands may also be an earlier write of the same owner, of which nothing follows.
        """
        if entry.value == value and entry.revision <= self._known_before:
            raise self._bucket.replaced(f"a write stands at sequence {entry.revision} after {self._known_before}")
        return Landed(entry.revision, self.sent, entry, doubt=True)

    def check_time(self) -> None:
        """Raise at the deadline: `InDoubt` or `NotWritten`, whichever is true."""
        if self._pace.over:
            raise InDoubt(self.cause) if self.doubt else NotWritten(self.cause or Unreachable())


async def advance(
    bucket: Bucket,
    key: str,
    value: bytes,
    *,
    expected: int,
    is_mine: Callable[[Entry], bool],
    pace: Pace,
    doubt: bool = False,
) -> Landed | Overtaken:
    """Write ``value`` on revision ``expected``, and where that is in doubt go on from whatever is newest.

    ``is_mine`` says whether a record that was read back counts as this writer's own. ``doubt`` is for a write
    that was sent before: it is looked for first. Raises `NotWritten` (certainly not stored), `InDoubt` (unknown at
    the deadline), and BucketReplaced, NotProvisioned or PermissionDenied from the seam.
    """
    bucket = bucket.of(key)
    known, sent = bucket.high_water, pace.now()
    outcome = None if doubt else await bucket.put(key, value, expected=expected, timeout=pace.next_try())
    if type(outcome) is Accepted and outcome.revision > known:
        return Landed(outcome.revision, sent)
    sending = _Sending(bucket, pace=pace, doubt=doubt, known=known, sent=sent)
    while True:
        if outcome is not None and (settled := sending.take(outcome)) is not None:
            return settled
        look_first = False
        sending.check_time()
        if sending.doubt:
            try:
                entry = await bucket.newest(key, timeout=pace.next_try())
            except Unreachable as error:
                sending.cause = sending.cause or error
                look_first = True
            else:
                revision = entry.revision if entry is not None else 0
                if revision > expected:
                    if entry is not None and is_mine(entry):
                        return sending.read_back(entry, value)
                    return Overtaken(entry, doubt=True)
                # Older than what this writer saw: a stale read, so read again. (After a refusal it is sent again all
                # the same: a deposed leader refuses what it has not heard of, and a write behind a fence does no harm.)
                look_first = revision < expected
        await pace.pause()
        outcome = None if look_first else await bucket.put(key, value, expected=expected, timeout=pace.next_try())


async def report(
    bucket: Bucket,
    key: str,
    value: bytes,
    *,
    expected: int,
    is_this_write: Callable[[Entry], bool],
    pace: Pace,
    doubt: bool = False,
) -> Landed | Overtaken:
    """Write ``value`` on revision ``expected``, and say whether this very write is stored.

    ``is_this_write`` recognises the write by its own nonce. ``doubt`` is for a write that was sent before: it is
    looked for first. Raises as `advance`, and `HistoryDropped` where the history no longer tells.
    """
    bucket = bucket.of(key)
    known, sent = bucket.high_water, pace.now()
    outcome = None if doubt else await bucket.put(key, value, expected=expected, timeout=pace.next_try())
    if type(outcome) is Accepted and outcome.revision > known:
        return Landed(outcome.revision, sent)
    sending = _Sending(bucket, pace=pace, doubt=doubt, known=known, sent=sent)
    while True:
        if outcome is not None and (settled := sending.take(outcome)) is not None:
            return settled
        look_first = False
        sending.check_time()
        if sending.doubt:
            try:
                found = await bucket.successor(key, expected, timeout=pace.next_try())
                if found is not None:
                    if is_this_write(found):
                        return sending.read_back(found, value)
                    # The successor first and the expected revision second: history is dropped oldest first, so
                    # if ours is still there, nothing between the two has been dropped. (What is written as the first
                    # of its key goes where nothing is dropped: notices are written once, sessions kept whole.)
                    if expected == 0 or await bucket.keeps(key, expected, timeout=pace.next_try()):
                        return Overtaken(None, doubt=True)
                    raise HistoryDropped(sending.cause)
            except Unreachable as error:
                sending.cause = sending.cause or error
                look_first = True
        await pace.pause()
        outcome = None if look_first else await bucket.put(key, value, expected=expected, timeout=pace.next_try())
