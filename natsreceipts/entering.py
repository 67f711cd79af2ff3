"""How a call gets in: it claims, waits for another attempt, has a dead one judged, or finds what is on record."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from natsreceipts.attempt import Resolution
from natsreceipts.attempts import CLAIM_PATIENCE
from natsreceipts.decision import Effect, NotLanded, Replay, Unknown, Wait
from natsreceipts.errors import (
    AmbiguousCall,
    CallInFlight,
    CorruptRecord,
    InvalidSetting,
    NotClaimed,
    ReceiptErased,
    SealedError,
    UnsupportedRecord,
)
from natsreceipts.fence import InDoubt, NotWritten
from natsreceipts.result_types import encoded, typed
from natsreceipts.seen import seen_of
from natsreceipts.wire import Recorded, ResolvedBy, quick_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from natsreceipts._jetstream import Entry
    from natsreceipts.attempt import Attempt, Blocked
    from natsreceipts.attempts import Attempts
    from natsreceipts.decision import Landed, Verdict
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.options import CallOptions
    from natsreceipts.seen import Seen
    from natsreceipts.wire import ReceiptRecord

__all__ = ["Entering", "recorded"]


async def recorded(store: Attempts, key: ReceiptKey, options: CallOptions, entry: Entry) -> Recorded | None:
    """The call's result, where an entry holds it: a replay without a claim.

    Raises CorruptRecord, UnsupportedRecord, PayloadMissing, ResultTypeMismatch, Unreachable.
    """
    if options.effect is Effect.READ or entry.erased:
        return None
    quick = quick_result(key, entry.revision, entry.value)
    if quick is not None:
        return quick._replace(result=typed(key, options, quick.result))
    try:
        seen = seen_of(store.name_of(key), key, entry)
    except (CorruptRecord, UnsupportedRecord):
        return None  # it may have been mended since: the leader's word counts
    if seen.record.status != "completed":
        return None
    result = typed(key, options, await store.load(seen, seen.record.result))
    return Recorded(result, seen.record.attempts, seen.revision)


class Entering:
    """The way of one attempt to its claim. ``ask`` asks the verifier, once the ambiguous write was acknowledged."""

    __slots__ = ("_ask", "_attempt", "_known", "_options", "_read_first", "_store")

    def __init__(
        self,
        store: Attempts,
        attempt: Attempt,
        options: CallOptions,
        *,
        known: Entry | None,
        read_first: bool,
        ask: Callable[[], Awaitable[tuple[Verdict, BaseException | None]]],
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._options = options
        self._known = known
        self._read_first = read_first
        self._ask = ask

    async def claim(self) -> Recorded | None:
        """Claim the call: None once the attempt holds it, or what is on record of it. Raises as `Call` on entry."""
        store, attempt, lease = self._store, self._attempt, self._options.lease
        wait_until = asyncio.get_running_loop().time() + self._options.wait
        if store.unfinished:
            await store.finish(attempt.kv_key, store.pace(lease, patience=CLAIM_PATIENCE))
        seen = None
        if self._read_first or self._known is not None:
            seen = await self._first_look()
            if isinstance(seen, Recorded):
                return seen
        while True:
            blocked = await store.claim(attempt, seen)
            if blocked is None:
                if self._in_time() or await self._licensed():
                    return None
                seen = await store.look(attempt, store.pace(lease, patience=CLAIM_PATIENCE))
            elif isinstance(blocked, Recorded):
                return blocked
            elif isinstance(blocked.decision, Replay):
                return await self._replay(blocked.seen)
            elif isinstance(blocked.decision, Wait):
                seen = await self._wait(blocked, wait_until)
            else:
                seen = await self._condemn(blocked)

    async def _first_look(self) -> Seen | Recorded | None:
        """What is known of the receipt, or (in a redelivery) probably there to be read, before a claim.

        A replay may come from any replica, since completed is final; anything else is read again from the leader.
        """
        pace = self._store.pace(self._options.lease, patience=CLAIM_PATIENCE)
        entry = self._known or await self._store.peek(self._attempt.key, pace)
        if entry is None:
            return None
        quick = quick_result(self._attempt.key, entry.revision, entry.value)
        if quick is not None:
            return quick
        with contextlib.suppress(ReceiptErased, CorruptRecord, UnsupportedRecord):
            seen = seen_of(self._store.name_of(self._attempt.key), self._attempt.key, entry)
            if seen.record.status == "completed":
                return seen
        return await self._store.look(self._attempt, pace)

    async def _replay(self, seen: Seen) -> Recorded:
        result = await self._store.load(seen, seen.record.result)
        return Recorded(result, seen.record.attempts, seen.revision)

    def _in_time(self) -> bool:
        """Whether the claim's acknowledgement came less than a third of the lease after it was sent."""
        attempt = self._attempt
        now = asyncio.get_running_loop().time()
        return attempt.running and not attempt.overshadowed and now - attempt.sent < self._options.lease / 3

    async def _licensed(self) -> bool:
        """Whether the body may be entered: the acknowledgement came in time, or a renewal's did.

        False: the call was lost before the body was entered, so it is decided anew.
        """
        attempt, lease = self._attempt, self._options.lease
        pace = self._store.pace(lease, patience=CLAIM_PATIENCE)
        while not self._in_time():
            if pace.over:
                raise NotClaimed(self._attempt.key, "the server answers slower than a third of the lease")
            try:
                lost = await self._store.renew(attempt, pace, entering=True)
            except (NotWritten, InDoubt) as failure:
                raise NotClaimed(
                    self._attempt.key, f"the claim stands, and its lease could not be renewed in time: {failure}"
                ).because(failure.cause) from failure.cause
            if lost is not None:
                attempt.let_go()
                return False
        return True

    async def _wait(self, blocked: Blocked, wait_until: float) -> Seen | None:
        """Wait until the record moves or its lease ends; a subscription is the hint, a read the truth."""
        store, attempt = self._store, self._attempt
        loop = asyncio.get_running_loop()
        if loop.time() >= wait_until:
            raise CallInFlight(self._attempt.key, retry_after=blocked.expires_in)
        held_lease = (blocked.seen.record.lease_ms or 0) / 1000
        async with store.bucket.hints(attempt.kv_key) as hint:
            while True:
                pace = store.pace(self._options.lease, patience=CLAIM_PATIENCE)
                seen = await store.look(attempt, pace)
                if seen is None or seen.revision != blocked.seen.revision:
                    return seen
                expires_in = await store.expires_in(attempt, seen, pace)
                if expires_in <= 0:
                    return seen
                left = wait_until - loop.time()
                if left <= 0:
                    raise CallInFlight(self._attempt.key, retry_after=expires_in)
                await hint.wait(min(held_lease / 3, expires_in, left))

    async def _condemn(self, blocked: Blocked) -> Seen | None:
        """Raise AmbiguousCall, after the record says so and a verifier did not know; or return what to decide on."""
        store, attempt = self._store, self._attempt
        judged = await store.condemn(attempt, blocked)
        if judged is not None:
            verdict, cause = await self._ask()
            if isinstance(verdict, Unknown):
                detail = await self._detail(judged.record)
                if cause is not None:
                    detail += f"; and verify= failed: {cause}"
                raise AmbiguousCall(
                    self._attempt.key,
                    revision=judged.revision,
                    attempts=judged.record.attempts,
                    detail=detail,
                ).because(cause) from cause
            pace = store.pace(self._options.lease, patience=CLAIM_PATIENCE)
            try:
                await store.resolve(attempt, judged, self._resolution(verdict), pace)
            except (NotWritten, InDoubt) as failure:
                raise NotClaimed(self._attempt.key, f"what the verifier saw could not be recorded: {failure}").because(
                    failure.cause
                ) from failure.cause
        return await store.look(attempt, store.pace(self._options.lease, patience=CLAIM_PATIENCE))

    async def _detail(self, record: ReceiptRecord) -> str:
        error = record.error
        if error is None:
            return ""
        try:
            error = await self._store.error_of(record) or error
        except SealedError as sealed:
            return f"{error.type}, whose text cannot be opened: {sealed}"
        return f"{error.type}: {error.message}"

    def _resolution(self, verdict: Landed | NotLanded) -> Resolution:
        name = getattr(self._options.verify, "__qualname__", type(self._options.verify).__name__)
        by = ResolvedBy(by=f"verifier {name}", reason="it looked at the outside world")
        if isinstance(verdict, NotLanded):
            return Resolution(by)
        try:
            payload, _ = encoded(self._options, verdict.result)
        except Exception as problem:
            raise InvalidSetting(f"verify= answered with a result that cannot be recorded: {problem}") from problem
        return Resolution(by, payload)
