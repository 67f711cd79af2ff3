"""The product with one rule replaced: each of these mistakes is one that the simulation has to find."""

from __future__ import annotations

import asyncio
from functools import wraps
from random import Random
from typing import TYPE_CHECKING, Any

from sim_seam import SimBucket

from natsreceipts import attempts, entering, fence, guard, notice_store, session_store, settled_since, wake
from natsreceipts._jetstream import Accepted, Clock, Conflict
from natsreceipts.attempt import Judged
from natsreceipts.decision import Effect, decide
from natsreceipts.fence import Landed, Overtaken, patiently
from natsreceipts.seen import seen_of
from natsreceipts.wire import read_receipt

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = ["MUTANTS"]

MUTANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {}
"""By what is wrong: the kind of schedules that it is looked for in, and how it is put in."""


def _mutant(kind: str, name: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    def put(mutate: Callable[[pytest.MonkeyPatch], None]) -> None:
        MUTANTS[name] = (kind, mutate)

    return put


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by one that is given the old one first."""
    old = getattr(owner, name)

    @wraps(old)
    def new(*args: Any, **kwargs: Any) -> Any:
        return around(old, *args, **kwargs)

    patch.setattr(owner, name, new)


# ---------------------------------------------------------------- writing


@_mutant("workers", "a claim that is not create-only")
def _(patch: pytest.MonkeyPatch) -> None:
    async def advance(old: Any, bucket: Any, key: str, value: bytes, *, expected: int, **rest: Any) -> Any:
        if expected == 0:
            entry = await bucket.newest(key, timeout=2.0)
            expected = entry.revision if entry is not None else 0
        return await old(bucket, key, value, expected=expected, **rest)

    _around(patch, attempts, "advance", advance)


@_mutant("workers", "a claim as `kv.create` makes it: over a delete marker")
def _(patch: pytest.MonkeyPatch) -> None:
    async def advance(old: Any, bucket: Any, key: str, value: bytes, *, expected: int, **rest: Any) -> Any:
        if expected == 0:
            entry = await bucket.newest(key, timeout=2.0)
            expected = entry.revision if entry is not None and entry.erased else 0
        return await old(bucket, key, value, expected=expected, **rest)

    _around(patch, attempts, "advance", advance)


@_mutant("workers", "a settle without the fence")
def _(patch: pytest.MonkeyPatch) -> None:
    async def report(old: Any, bucket: Any, key: str, value: bytes, *, expected: int, **rest: Any) -> Any:
        outcome = await bucket.put(key, value, expected=-1, timeout=2.0)
        if isinstance(outcome, Accepted):
            return Landed(outcome.revision, 0.0)
        return await old(bucket, key, value, expected=expected, **rest)

    _around(patch, attempts, "report", report)


@_mutant("workers", "a settle that takes a conflict as success")
def _(patch: pytest.MonkeyPatch) -> None:
    async def report(old: Any, *args: Any, **rest: Any) -> Any:
        outcome = await old(*args, **rest)
        return Landed(rest["expected"] + 1, 0.0) if isinstance(outcome, Overtaken) else outcome

    _around(patch, attempts, "report", report)


@_mutant("doubtful", "a conflict after a doubt taken as lost")
def _(patch: pytest.MonkeyPatch) -> None:
    def take(old: Any, sending: Any, outcome: Any) -> Any:
        return Overtaken(None) if isinstance(outcome, Conflict) else old(sending, outcome)

    _around(patch, fence._Sending, "take", take)


@_mutant("workers", "no answer taken as not written")
def _(patch: pytest.MonkeyPatch) -> None:
    def take(old: Any, sending: Any, outcome: Any) -> Any:
        if isinstance(outcome, fence.Unknown):
            raise fence.NotWritten(outcome.cause)
        return old(sending, outcome)

    _around(patch, fence._Sending, "take", take)


@_mutant("doubtful", "a settle in doubt that reads the newest instead of the successor")
def _(patch: pytest.MonkeyPatch) -> None:
    async def successor(old: Any, bucket: Any, key: str, revision: int, *, timeout: float) -> Any:
        entry = await bucket.newest(key, timeout=timeout)
        return entry if entry is not None and entry.revision > revision else None

    _around(patch, SimBucket, "successor", successor)


@_mutant("workers", "a settle in doubt that compares whose attempt it is, not whose write")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrote(old: Any, store: Any, key: Any, nonce: str, entry: Any) -> bool:
        record = read_receipt("receipts", key, entry.revision, entry.value)
        owner = store.bucket._nonces.owner
        return record.holder is not None and owner(record.holder.token) is owner(nonce)

    _around(patch, attempts.Attempts, "_wrote", wrote)


@_mutant("workers", "message ids: a lost race that is answered as a success")
def _(patch: pytest.MonkeyPatch) -> None:
    async def put(old: Any, bucket: Any, key: str, value: bytes, *, expected: int, timeout: float) -> Any:
        outcome = await old(bucket, key, value, expected=expected, timeout=timeout)
        if isinstance(outcome, Conflict) and expected == 0:
            return Accepted(bucket._stream.seq)
        return outcome

    _around(patch, SimBucket, "put", put)
    _around(patch, fence._Sending, "take", _no_high_water)


def _no_high_water(old: Any, sending: Any, outcome: Any) -> Any:
    return Landed(outcome.revision, sending.sent) if isinstance(outcome, Accepted) else old(sending, outcome)


# ---------------------------------------------------------------- holding


@_mutant("workers", "a renewal that ignores the fence: it goes on from whatever stands there")
def _(patch: pytest.MonkeyPatch) -> None:
    def rebase(old: Any, store: Any, attempt: Any, seen: Any, *, late: bool) -> bool:
        attempt.revision = seen.revision
        return True

    _around(patch, attempts.Attempts, "_rebase", rebase)


@_mutant("mixed", "no lock around heartbeat and settle")
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, guard.Call, "_one_write", lambda old, call: asyncio.Lock())


@_mutant("workers", "entering on an acknowledgement that comes late")
def _(patch: pytest.MonkeyPatch) -> None:
    def in_time(old: Any, way: Any) -> bool:
        return way._attempt.running

    _around(patch, entering.Entering, "_in_time", in_time)


@_mutant("workers", "every running record taken as a claim given up")
def _(patch: pytest.MonkeyPatch) -> None:
    def given_up(old: Any, store: Any, record: Any) -> bool:
        return record.status == "running"

    _around(patch, attempts.Attempts, "_was_given_up", given_up)


@_mutant("workers", "a settle that could not be written is told as kept, and forgotten")
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, attempts.Attempts, "keep", lambda old, *args: None)


@_mutant("workers", "a cancelled caller that settles as not applied without a look at its claim")
def _(patch: pytest.MonkeyPatch) -> None:
    async def in_flight(old: Any, call: Any) -> Any:
        call._state = "open"
        return await old(call)

    async def failed(old: Any, call: Any, error: Any, *, spoke: bool) -> None:
        await old(call, error, spoke=spoke or isinstance(error, asyncio.CancelledError))

    _around(patch, guard.Call, "_failed", failed)


# ---------------------------------------------------------------- deciding and judging


@_mutant("workers", "a dead opaque attempt that is executed again")
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, attempts, "decide", lambda old, state, effect: decide(state, Effect.IDEMPOTENT))


@_mutant("workers", "a judge without the second look")
def _(patch: pytest.MonkeyPatch) -> None:
    async def condemn(old: Any, store: Any, attempt: Any, blocked: Any) -> Any:
        if blocked.seen.record.status == "ambiguous":
            return Judged(blocked.seen.record, blocked.seen.revision)
        return await store._judge(attempt, blocked, store.pace(attempt.lease, patience=15.0))

    _around(patch, attempts.Attempts, "condemn", condemn)


@_mutant("workers", "a judge that goes by the clock of its own process")
def _(patch: pytest.MonkeyPatch) -> None:
    async def clock(old: Any, bucket: Any, pace: Any) -> Any:
        found = await old(bucket, pace)
        skew = Random(bucket._process.mind.name).uniform(-60, 60)
        return Clock(found.now + int(skew * 1e9), found.leader_since)

    _around(patch, attempts, "clock", clock)


@_mutant("workers", "a direct get that is believed")
def _(patch: pytest.MonkeyPatch) -> None:
    async def newest(old: Any, bucket: Any, key: str, pace: Any) -> Any:
        return await patiently(pace, lambda timeout: bucket.newest(key, timeout=timeout, leader=False))

    _around(patch, attempts, "newest", newest)


@_mutant("workers", "a resolve on a fresh read, not on what was looked at")
def _(patch: pytest.MonkeyPatch) -> None:
    async def resolve(old: Any, store: Any, attempt: Any, standing: Any, resolution: Any, pace: Any) -> Any:
        entry = await store.bucket.newest(attempt.kv_key, timeout=2.0)
        if not entry.erased:
            seen = seen_of("receipts", attempt.key, entry)
            standing = Judged(seen.record, seen.revision)
        return await old(store, attempt, standing, resolution, pace)

    _around(patch, attempts.Attempts, "resolve", resolve)


@_mutant("mixed", "a claim that forgets that an earlier attempt may have landed")
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, attempts.Attempts, "_leaves_open", lambda old, store, record: False)


@_mutant("mixed", "not applied, said while an earlier attempt is open")
def _(patch: pytest.MonkeyPatch) -> None:
    def ended(old: Any, store: Any, attempt: Any, ending: Any) -> Any:
        if not (ending.error and ending.error.not_applied and attempt.held.open):
            return old(store, attempt, ending)
        record = store._next(attempt, status="failed", error=ending.error)
        return attempts.Write.of(record, expected=attempt.revision)

    _around(patch, attempts.Attempts, "_ended", ended)


@_mutant("mixed", "a claim that drops the recorded steps")
def _(patch: pytest.MonkeyPatch) -> None:
    def claim_over(old: Any, store: Any, attempt: Any, seen: Any, *, number: int, effect: Any) -> Any:
        if seen is not None:
            seen = seen._replace(record=seen.record.model_copy(update={"steps": None}))
        return old(store, attempt, seen, number=number, effect=effect)

    _around(patch, attempts.Attempts, "_claim_over", claim_over)


# ---------------------------------------------------------------- sessions and wakes


@_mutant("session", "a wake that writes no fence")
def _(patch: pytest.MonkeyPatch) -> None:
    async def withdraw(old: Any, bucket: Any, key: Any, seen: Any, **rest: Any) -> int:
        return seen.revision if seen is not None else 0

    for module in (wake, settled_since):
        _around(patch, module, "withdraw", withdraw)


@_mutant("session", "a fence at a lower position than the wake has read")
def _(patch: pytest.MonkeyPatch) -> None:
    async def withdraw(old: Any, *args: Any, position: int, **rest: Any) -> Any:
        return await old(*args, position=position - 1, **rest)

    for module in (wake, settled_since):
        _around(patch, module, "withdraw", withdraw)


@_mutant("session", "a wake that closes calls which another worker is at")
def _(patch: pytest.MonkeyPatch) -> None:
    async def refuse_if_busy(old: Any, waker: Any, found: Any) -> None:
        return None

    _around(patch, wake.Waker, "_refuse_if_busy", refuse_if_busy)


@_mutant("session", "a claim that forgets the fences")
def _(patch: pytest.MonkeyPatch) -> None:
    def claim_over(old: Any, store: Any, attempt: Any, seen: Any, *, number: int, effect: Any) -> Any:
        if seen is not None:
            seen = seen._replace(record=seen.record.model_copy(update={"fences": None}))
        return old(store, attempt, seen, number=number, effect=effect)

    _around(patch, attempts.Attempts, "_claim_over", claim_over)


@_mutant("session", "a claim that does not look at the fences")
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, attempts.Attempt, "check_fences", lambda old, attempt, fences: None)


@_mutant("session", "a settle that drops the fences")
def _(patch: pytest.MonkeyPatch) -> None:
    def following(old: Any, store: Any, attempt: Any, *, status: Any, **fields: Any) -> Any:
        record = old(store, attempt, status=status, **fields)
        return record.model_copy(update={"fences": None})

    _around(patch, attempts.Attempts, "_next", following)


@_mutant("shared", "a fence that forgets the other sessions")
def _(patch: pytest.MonkeyPatch) -> None:
    async def withdraw(old: Any, bucket: Any, key: Any, seen: Any, **rest: Any) -> Any:
        if seen is not None and seen.record.fences:
            seen = seen._replace(record=seen.record.model_copy(update={"fences": {}}))
        return await old(bucket, key, seen, **rest)

    for module in (wake, settled_since):
        _around(patch, module, "withdraw", withdraw)


@_mutant("session", "an append made again under a new id")
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, session_store, "_same", lambda old, one, other: False)


@_mutant("session", "an append that was overtaken, told as appended")
def _(patch: pytest.MonkeyPatch) -> None:
    async def report(old: Any, *args: Any, **rest: Any) -> Any:
        outcome = await old(*args, **rest)
        return Landed(rest["expected"] + 1, 0.0) if isinstance(outcome, Overtaken) else outcome

    _around(patch, session_store, "report", report)


@_mutant("session", "a wake whose closes do not expect what it has read")
def _(patch: pytest.MonkeyPatch) -> None:
    async def append(old: Any, store: Any, kind: Any, body: Any, *, expected: Any = None, **rest: Any) -> Any:
        if expected is not None:
            await store.refresh()
        return await old(store, kind, body, **rest)

    _around(patch, session_store.SessionStore, "append", append)


@_mutant("session", "a wake that takes an attempt in doubt for one that never started")
def _(patch: pytest.MonkeyPatch) -> None:
    async def look(old: Any, waker: Any, evidence: Any) -> None:
        await old(waker, evidence)
        if evidence.said == "ambiguous":
            evidence.seen, evidence.said = None, "absent"

    async def withdraw(old: Any, bucket: Any, key: Any, seen: Any, **rest: Any) -> Any:
        return 0 if seen is None else await old(bucket, key, seen, **rest)

    _around(patch, wake.Waker, "_look", look)
    for module in (wake, settled_since):
        _around(patch, module, "withdraw", withdraw)


# ---------------------------------------------------------------- notices


@_mutant("notices", "a consumption that is not create-only")
def _(patch: pytest.MonkeyPatch) -> None:
    async def advance(old: Any, bucket: Any, key: str, value: bytes, *, expected: int, **rest: Any) -> Any:
        entry = await bucket.newest(key, timeout=2.0)
        return await old(bucket, key, value, expected=entry.revision if entry is not None else 0, **rest)

    _around(patch, notice_store, "advance", advance)


@_mutant("notices", "a watch that begins with what is filed from now on")
def _(patch: pytest.MonkeyPatch) -> None:
    async def fresh(old: Any, store: Any, entries: Any, known: dict[str, int]) -> Any:
        first = not known
        found = await old(store, entries, known)
        return {} if first else found

    _around(patch, notice_store.NoticeStore, "fresh", fresh)


@_mutant("notices", "a consumption that was overtaken, told as one's own")
def _(patch: pytest.MonkeyPatch) -> None:
    async def advance(old: Any, *args: Any, **rest: Any) -> Any:
        outcome = await old(*args, **rest)
        return Landed(1, 0.0) if isinstance(outcome, Overtaken) else outcome

    _around(patch, notice_store, "advance", advance)
