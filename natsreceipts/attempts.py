"""The write path of a receipt: claim, renew, settle, judge. Request and answer only, no task and no timer.

The timeline of a fresh call, which costs exactly two writes:

    claim ----------> enter ----> the body runs ----> settle
    create-only       a licence: the acknowledgement  compare-and-set on the revision
    (revision 0)      came within a third of a lease  that this attempt last wrote

Every write carries a nonce of its own and is fenced on the revision that its writer last saw. Reads only advise.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import to_json

from natsreceipts.attempt import Attempt, Blocked, Ending, Judged, Lost, Resolution, Write, margin_of
from natsreceipts.background import Door
from natsreceipts.decision import (
    Absent,
    Completed,
    Effect,
    Execute,
    Failed,
    ReceiptState,
    Running,
    decide,
    stricter,
)
from natsreceipts.errors import (
    CorruptRecord,
    InvalidSetting,
    KeyMissing,
    NatsReceiptsError,
    NotClaimed,
    NotRecorded,
    PermissionDenied,
    Unreachable,
)
from natsreceipts.fence import (
    HistoryDropped,
    InDoubt,
    Landed,
    NotWritten,
    Overtaken,
    Pace,
    advance,
    clock,
    newest,
    raise_refusal,
    report,
)
from natsreceipts.seals import STEP, sealed_in
from natsreceipts.seen import Seen, seen_of
from natsreceipts.telemetry import CallSettled, DoubtSettled, WriteConflict, fields
from natsreceipts.wire import (
    ErrorInfo,
    Holder,
    Payload,
    ReceiptRecord,
    Recorded,
    Status,
    fresh_body,
    fresh_receipt,
    quick_result,
    read_receipt,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from natsreceipts._jetstream import Bucket, Entry
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.payloads import PayloadStore
    from natsreceipts.seals import Seals
    from natsreceipts.telemetry import Hooks, SettledAs, WriteKind

__all__ = ["CLAIM_PATIENCE", "Attempts"]

_log = logging.getLogger("natsreceipts")

CLAIM_PATIENCE = 15.0
"""Seconds that a claim is tried for: writes are out for 4 to 10 s in a failover (measured)."""

ROOM = 4096
"""Bytes kept free below the server's max_payload for a record's headers and for what is not payload."""

_CLAIMS_AT_ONCE = 128
"""Claims that one process has in flight: enough for 2,500 a second from a server that is 50 ms away."""

_GIVEN_UP = 10_000
_UNFINISHED = 1_000


class Attempts:
    """The write path of one bucket, as one worker goes it."""

    def __init__(
        self,
        bucket: Bucket,
        payloads: PayloadStore,
        *,
        worker: str,
        session_stream: str | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.session_stream = session_stream
        """Which stream the entries stand in that calls here may name."""
        self.hooks = hooks
        """Who is told of what happens, here and in the calls, runs and wakes that go this way; None: nobody."""
        self._bucket = bucket
        self._payloads = payloads
        self._inline_limit = min(payloads.inline_limit, bucket.max_payload - ROOM)
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._worker_json = to_json(worker)
        self._door = Door(_CLAIMS_AT_ONCE, patience=CLAIM_PATIENCE)
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._unfinished: OrderedDict[str, tuple[Attempt, Ending, Any]] = OrderedDict()

    @property
    def bucket(self) -> Bucket:
        """The bucket below, which may be several in one."""
        return self._bucket

    def name_of(self, key: ReceiptKey) -> str:
        """The name of the bucket that holds a receipt, as the ``nats`` CLI knows it."""
        return self._bucket.of(key.kv_key).name

    @property
    def unfinished(self) -> bool:
        """Whether any settle was kept."""
        return bool(self._unfinished)

    def pace(self, lease: float, *, patience: float) -> Pace:
        """Tries for an operation that may take ``patience`` seconds in all.

        Raises InvalidSetting in another event loop than the toolkit's.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidSetting(
                "this toolkit belongs to another event loop: connect once in each loop (one asyncio.run, one connect)"
            )
        return Pace(self._bucket, lease=lease, patience=patience)

    def _note(self, hooks: Hooks, attempt: Attempt, write: WriteKind, outcome: Landed | Overtaken) -> None:
        """Tell of a write that did not go through plainly."""
        landed = isinstance(outcome, Landed)
        if outcome.doubt:
            hooks.emit(DoubtSettled(attempt.key, write, landed))
        if not landed:
            hooks.emit(WriteConflict(attempt.key, write))

    async def _fitted(self, attempt: Attempt, write: Write, pace: Pace) -> Write:
        """The write, with payloads moved to the object store where it would be too large. Raises as a write does."""
        if len(write.value) <= self._inline_limit:
            return write
        attempt.body = None
        record = await self._payloads.moved(write.record, pace, limit=self._inline_limit)
        return Write.of(record, expected=write.expected)

    # ------------------------------------------------------------------ reading

    async def load_step(self, attempt: Attempt, name: str, payload: Payload) -> Any:
        """The output of a step of the record by which the attempt holds the call. Raises as `load`."""
        return await self._payloads.load(
            self.name_of(attempt.key), attempt.key, attempt.revision, payload, f"{STEP}{name}"
        )

    async def load(self, seen: Seen, payload: Payload | None, place: str = "result") -> Any:
        """The value of a payload at a place of a record.

        Raises PayloadMissing, KeyMissing, SealBroken, CorruptRecord, Unreachable.
        """
        if payload is None:
            raise CorruptRecord(self.name_of(seen.record.key), seen.record.key, seen.revision, "it has no result")
        return await self._payloads.load(self.name_of(seen.record.key), seen.record.key, seen.revision, payload, place)

    async def error_of(self, record: ReceiptRecord) -> ErrorInfo | None:
        """The error of a record, opened where it is sealed. Raises KeyMissing, SealBroken."""
        return await self._payloads.seals.error(record.key, record.error) if record.error is not None else None

    async def prepare(self, attempt: Attempt) -> None:
        """Get the key that what the attempt writes is sealed with, if anything is. Raises KeyMissing."""
        if attempt.sealing is None:
            attempt.sealing = await self._payloads.seals.sealing(attempt.key)

    @property
    def seals(self) -> Seals:
        """What payloads, and the sessions' entries, are sealed and opened with."""
        return self._payloads.seals

    async def look(self, attempt: Attempt, pace: Pace) -> Seen | None:
        """The newest revision of the attempt's key, from the leader. Raises as `get`."""
        entry = await newest(self._bucket, attempt.kv_key, pace)
        return None if entry is None else seen_of(self.name_of(attempt.key), attempt.key, entry)

    async def prefetch(self, pattern: str, *, most_keys_bytes: tuple[int, int], pace: Pace) -> dict[str, Entry] | None:
        """The newest entries of the keys that match, by KV key, in one request; None where they are too many.

        ``most_keys_bytes``: an entry of more than the first number of bytes is left out, and no more than the second
        number are asked for in all; what is left out is read when it is needed. Raises Unreachable.
        """
        largest, total = most_keys_bytes
        entries = await self._bucket.newest_of(pattern, timeout=pace.next_try(), most=total)
        if entries is None:
            return None
        return {entry.key: entry for entry in entries if len(entry.value) <= largest and not entry.erased}

    async def peek(self, key: ReceiptKey, pace: Pace) -> Entry | None:
        """The newest entry that some replica has: good for a replay, since completed is final, and for nothing else.

        None also where such a read is not answered or not permitted: the claim decides.
        """
        try:
            return await self._bucket.newest(key.kv_key, timeout=pace.next_try(), leader=False)
        except (Unreachable, PermissionDenied):
            return None

    # ------------------------------------------------------------------ claiming

    async def claim(self, attempt: Attempt, seen: Seen | None) -> Blocked | Recorded | None:
        """Claim the call, going out from what was ``seen`` (None: nothing, so claim first and read when refused).

        None: the attempt holds the call. `Recorded`: it was completed, which may be any replica's word. Raises
        NotClaimed and what `get` raises; nothing of ours stays behind that this process would not recognise as given
        up. Of very many claims some wait until others have their answer.
        """
        # Before anything is written: a settle must not fail for want of a key.
        await self.prepare(attempt)
        pace = self.pace(attempt.lease, patience=CLAIM_PATIENCE)
        try:
            if await self._door.enter():
                pace = self.pace(attempt.lease, patience=CLAIM_PATIENCE)
        except TimeoutError:
            raise NotClaimed(
                attempt.key, f"{_CLAIMS_AT_ONCE} claims of this process are in flight, and none was answered in time"
            ) from None
        silent = False
        try:
            return await self._claim(attempt, seen, pace)
        except NotClaimed:
            silent = True
            raise
        finally:
            self._door.leave(silent=silent)

    async def _claim(self, attempt: Attempt, seen: Seen | None, pace: Pace) -> Blocked | Recorded | None:
        while True:
            if seen is None:
                write = self._fresh_claim(attempt)
            else:
                blocked = await self._blocked(attempt, seen, pace)
                if not isinstance(blocked.decision, Execute):
                    return blocked
                write = self._claim_over(attempt, seen, number=blocked.decision.attempt, effect=blocked.effect)
            if len(write.value) > self._inline_limit:
                if seen is None and (seen := await self.look(attempt, pace)) is not None:
                    continue  # no object is written for a claim that will be refused
                write = await self._fitted(attempt, write, pace)
            outcome = await self._send_claim(attempt, write, pace)
            if isinstance(outcome, Landed):
                return None
            if seen is None and outcome.entry is None:
                entry = await self.peek(attempt.key, pace)
                recorded = quick_result(attempt.key, entry.revision, entry.value) if entry else None
                if recorded is not None:
                    return recorded
            try:
                seen = await self._look_past(attempt, write.expected, pace, outcome.entry) or seen
            except InDoubt as failure:
                raise NotClaimed(attempt.key, str(failure)).because(failure.cause) from failure.cause

    async def _look_past(self, attempt: Attempt, revision: int, pace: Pace, entry: Entry | None = None) -> Seen | None:
        """What overtook a write on ``revision``; None, after a pause: that cannot be seen, so write again.

        Either the read is stale and the write is refused again, or who refused it was: a deposed leader, that has not
        heard of the revision that the write expects. Raises `InDoubt` at the pace's deadline.
        """
        seen = seen_of(self.name_of(attempt.key), attempt.key, entry) if entry else await self.look(attempt, pace)
        if seen is not None and seen.revision > revision:
            return seen
        if pace.over:
            raise InDoubt(Unreachable("the server refused a write as overtaken, and reads do not show by what"))
        await pace.pause()
        return None

    async def _send_claim(
        self, attempt: Attempt, write: Write, pace: Pace, *, doubt: bool = False
    ) -> Landed | Overtaken:
        token = write.token
        attempt.in_flight = write
        try:
            outcome = await advance(
                self._bucket,
                attempt.kv_key,
                write.value,
                expected=write.expected,
                is_mine=partial(self._holds, attempt.key, token),
                pace=pace,
                doubt=doubt,
            )
        except NotWritten as failure:
            attempt.in_flight = None
            raise_refusal(failure)
            raise NotClaimed(attempt.key, str(failure.cause)).because(failure.cause) from failure.cause
        except InDoubt as failure:
            attempt.in_flight = None
            self._give_up(token)
            raise NotClaimed(
                attempt.key,
                f"whether the claim was stored is not known after all tries: {failure}; it will not be entered",
            ).because(failure.cause) from failure.cause
        except NatsReceiptsError:
            # What was read back could not be read, or the bucket is gone: the claim may stand all the same.
            attempt.in_flight = None
            self._give_up(token)
            raise
        attempt.in_flight = None
        if self.hooks is not None:
            self._note(self.hooks, attempt, "claim", outcome)
        if isinstance(outcome, Landed):
            attempt.sent = outcome.sent
            if outcome.entry is not None:
                attempt.found(seen_of(self.name_of(attempt.key), attempt.key, outcome.entry).record, outcome.revision)
            elif attempt.body is not None:
                attempt.wrote(write, outcome.revision)
                attempt.number, attempt.token, attempt.running = 1, token, True
            else:
                attempt.found(write.record, outcome.revision)
        return outcome

    async def abandon(self, attempt: Attempt, pace: Pace) -> None:
        """Settle a claim that will not be entered as failed, not applied; first find out whether it was stored.

        Where that cannot be known in time, this process remembers the claim as given up.
        """
        write = attempt.in_flight
        try:
            if write is not None:
                outcome = await self._send_claim(attempt, write, pace, doubt=True)
                if isinstance(outcome, Overtaken):
                    return
            elif not attempt.holds:
                return
            error = ErrorInfo(type="Cancelled", message="cancelled before the body was entered", not_applied=True)
            await self.settle(attempt, Ending("failed", error=error), pace)
        except (NatsReceiptsError, NotWritten, InDoubt):
            if attempt.holds:
                self._give_up(attempt.token)
        except BaseException:
            self._give_up(write.token if write else attempt.token)
            raise

    def _give_up(self, token: str) -> None:
        self._given_up[token] = None
        while len(self._given_up) > _GIVEN_UP:
            self._given_up.popitem(last=False)

    def _leaves_open(self, record: ReceiptRecord) -> bool:
        """Whether an earlier attempt of a record that is claimed over may have had its effect."""
        if record.status in ("running", "ambiguous"):
            return not self._was_given_up(record)
        return record.status == "failed" and not record.not_applied

    def _was_given_up(self, record: ReceiptRecord) -> bool:
        return (
            record.status in ("running", "ambiguous")
            and record.holder is not None
            and record.holder.token in self._given_up
        )

    async def _blocked(self, attempt: Attempt, seen: Seen, pace: Pace) -> Blocked:
        record = seen.record
        effect = stricter(record.effect or Effect.READ, attempt.effect)
        if record.status == "completed":
            return Blocked(seen, decide(Completed(), effect), effect)
        if record.fences:
            attempt.check_fences(record.fences)
        state: ReceiptState
        expires_in = 0.0
        if record.status == "withdrawn":
            state = Absent()
        elif self._was_given_up(record) and not (record.open and effect is Effect.OPAQUE):
            # It speaks for that attempt only: an earlier one may have had its effect where the record is open.
            state = Failed(record.attempts)
        elif record.status == "failed" and (effect is not Effect.OPAQUE or record.not_applied):
            state = Failed(record.attempts)
        elif record.status == "running" and not self._was_given_up(record):
            expires_in = await self.expires_in(attempt, seen, pace)
            state = Running(record.attempts, lease_expired=expires_in <= 0)
        else:
            state = Running(record.attempts, lease_expired=True)
        return Blocked(seen, decide(state, effect), effect, expires_in)

    async def expires_in(self, attempt: Attempt, seen: Seen, pace: Pace) -> float:
        """Seconds until the lease of a running record has expired, by the server's clock; 0 or less: it has.

        A revision that this attempt has itself watched unchanged for as long has expired whatever the
        timestamps say. A leader change costs one fresh lease, so skew between servers cannot steal a live one.
        """
        lease = (seen.record.lease_ms or 0) / 1000
        full = lease + margin_of(lease)
        left = full - attempt.watched(seen.revision, pace.now())
        if left <= 0:
            return left
        now, leader_since = await clock(self._bucket.of(attempt.kv_key), pace)
        return min(left, full - (now - max(seen.time, leader_since)) / 1e9)

    def _fresh_claim(self, attempt: Attempt) -> Write:
        if attempt.args is not None:
            return self._claim_over(attempt, None, number=1, effect=attempt.effect)
        attempt.claimed_as = attempt.effect
        nonce, token = self._bucket.nonce(), self._bucket.nonce()
        attempt.body = fresh_body(
            attempt.key,
            effect=attempt.effect,
            lease_ms=max(1, round(attempt.lease * 1000)),
            token=token,
            worker=self._worker_json,
        )
        value = fresh_receipt(attempt.body, write=nonce, status="running")
        return Write(value, expected=0, nonce=nonce, token=token)

    def _claim_over(self, attempt: Attempt, seen: Seen | None, *, number: int, effect: Effect) -> Write:
        attempt.body = None
        attempt.claimed_as = effect
        fields: dict[str, Any] = {}
        if attempt.args is not None:
            fields["args"] = Payload.model_validate_json(attempt.sealed("args", attempt.args))
        if seen is not None:
            for name in ("steps", "fences"):
                if (value := getattr(seen.record, name)) is not None:
                    fields[name] = value
            if seen.record.open or self._leaves_open(seen.record):
                fields["open"] = True
        key = attempt.key
        record = ReceiptRecord(
            v=1,
            write=self._bucket.nonce(),
            status="running",
            tenant_id=key.tenant,
            run_id=key.run,
            tool_name=key.tool,
            args_hash=key.args_hash,
            effect=effect,
            attempts=number,
            lease_ms=max(1, round(attempt.lease * 1000)),
            holder=Holder(token=self._bucket.nonce(), worker=self._worker),
            **fields,
        )
        return Write.of(record, expected=seen.revision if seen is not None else 0)

    def _holds(self, key: ReceiptKey, token: str, entry: Entry) -> bool:
        if entry.erased:
            return False
        record = read_receipt(self.name_of(key), key, entry.revision, entry.value)
        return record.status in ("running", "ambiguous") and record.holder is not None and record.holder.token == token

    # ------------------------------------------------------------------ holding

    async def renew(
        self, attempt: Attempt, pace: Pace, step: tuple[str, bytes] | None = None, *, entering: bool = False
    ) -> Lost | None:
        """Renew the lease, and record the output of a ``step`` (its name and a payload's JSON) with it.

        None: the attempt holds the call for another lease from ``attempt.sent`` on, and the step stands. ``entering``:
        before the body, a record that became opaque over an earlier attempt is lost, not taken back. Raises
        `NotWritten` and `InDoubt` at the pace's deadline, and what `get` raises.
        """
        recorded: dict[str, Payload] = {}
        if step is not None:
            name, output = step
            recorded[name] = Payload.model_validate_json(attempt.sealed(f"{STEP}{name}", output))
        while True:
            if attempt.held.status not in ("running", "ambiguous"):
                raise InDoubt(Unreachable(f"{attempt.kv_key} has ended and is not renewed"))
            if entering and attempt.overshadowed:
                return Lost(Seen(attempt.held, attempt.revision, None))
            fields: dict[str, Any] = {}
            if step is not None:
                attempt.body = None
                fields["steps"] = {**(attempt.held.steps or {}), **recorded}
            write = Write.of(self._next(attempt, status="running", **fields), expected=attempt.revision)
            write = await self._fitted(attempt, write, pace)
            outcome = await advance(
                self._bucket,
                attempt.kv_key,
                write.value,
                expected=write.expected,
                is_mine=partial(self._holds, attempt.key, attempt.token),
                pace=pace,
            )
            if self.hooks is not None:
                self._note(self.hooks, attempt, "renew", outcome)
            if isinstance(outcome, Overtaken):
                seen = await self._look_past(attempt, write.expected, pace, outcome.entry)
                if seen is not None and not self._rebase(attempt, seen, late=False):
                    return Lost(seen)
                continue
            if outcome.entry is None:
                attempt.wrote(write, outcome.revision)
                attempt.running = True
            else:
                attempt.found(seen_of(self.name_of(attempt.key), attempt.key, outcome.entry).record, outcome.revision)
            # What was read back in a doubt may be an older write of this attempt, from which the lease already runs.
            if attempt.running and attempt.held.write == write.nonce:
                attempt.sent = outcome.sent
                return None

    def settle(self, attempt: Attempt, ending: Ending, pace: Pace) -> Coroutine[Any, Any, Lost | None]:
        """Write down how the attempt ended. None: that stands in the receipt.

        A settle whose answer was lost is found by its own nonce. Called again after a cancellation, it goes on
        with the write that was in flight. `Lost` with a completed record under this attempt's token: a resolver
        completed it. Raises `NotWritten` and `InDoubt`, and what `get` raises.
        """
        if self.hooks is None:
            return self._settle(attempt, ending, pace)
        return self._settle_and_tell(self.hooks, attempt, ending, pace)

    async def _settle_and_tell(self, hooks: Hooks, attempt: Attempt, ending: Ending, pace: Pace) -> Lost | None:
        began = pace.now()
        try:
            lost = await self._settle(attempt, ending, pace)
        except Exception as error:
            cause = (error.cause or error) if isinstance(error, NotWritten | InDoubt) else error
            hooks.emit(CallSettled(attempt.key, attempt.number, "not_recorded", pace.now() - began, cause))
            raise
        # What was to be written is not always what stands: a failure is no word about an earlier attempt.
        status = "completed" if ending.status == "completed" else attempt.held.status
        if lost is not None:
            status = "lost"
        hooks.emit(CallSettled(attempt.key, attempt.number, cast("SettledAs", status), pace.now() - began))
        return lost

    async def _settle(self, attempt: Attempt, ending: Ending, pace: Pace) -> Lost | None:
        while True:
            write = attempt.in_flight
            doubt = write is not None
            dropped: HistoryDropped | None = None
            if write is None and attempt.settling is not None and attempt.held.status == "completed":
                return None  # a later word on this attempt stands already, its thread's: an earlier one was kept
            if write is None:
                write = self._ended(attempt, ending)
                if len(write.value) > self._inline_limit:
                    write = await self._fitted(attempt, write, pace)
                attempt.in_flight, attempt.settling = write, ending
            try:
                outcome = await report(
                    self._bucket,
                    attempt.kv_key,
                    write.value,
                    expected=write.expected,
                    is_this_write=partial(self._wrote, attempt.key, write.nonce),
                    pace=pace,
                    doubt=doubt,
                )
            except NotWritten:
                attempt.in_flight = None
                raise
            except HistoryDropped as failure:
                # Completed is final: whatever is newest now tells whether our completion stands.
                if ending.status != "completed":
                    raise
                outcome, dropped = Overtaken(None), failure
            attempt.in_flight = None
            if self.hooks is not None:
                self._note(self.hooks, attempt, "settle", outcome)
            if isinstance(outcome, Landed):
                attempt.wrote(write, outcome.revision)
                if attempt.settling == ending:
                    return None
                continue  # that was an earlier word on this attempt (ambiguous, over its thread); now the last one
            seen = await self._look_past(attempt, write.expected, pace)
            if seen is None:
                continue
            if dropped is not None and seen.record.holder is None:
                raise dropped  # but it was deleted by hand since, and settled anew
            if self._completed_by(attempt, seen) and not self.resolved_for(attempt, seen):
                attempt.found(seen.record, seen.revision)
                return None
            if not self._rebase(attempt, seen, late=ending.status == "completed"):
                return Lost(seen)

    def _wrote(self, key: ReceiptKey, nonce: str, entry: Entry) -> bool:
        if entry.erased:
            return False
        return read_receipt(self.name_of(key), key, entry.revision, entry.value).write == nonce

    def _completed_by(self, attempt: Attempt, seen: Seen) -> bool:
        record = seen.record
        return record.status == "completed" and record.holder is not None and record.holder.token == attempt.token

    def resolved_for(self, attempt: Attempt, seen: Seen) -> bool:
        """Whether somebody else completed this attempt's call in its stead."""
        return self._completed_by(attempt, seen) and seen.record.resolved is not None

    def _rebase(self, attempt: Attempt, seen: Seen, *, late: bool) -> bool:
        """Go on from a record that is still this attempt's own: judged, fenced, or (``late``) declared failed."""
        record = seen.record
        own = record.holder is not None and record.holder.token == attempt.token and record.attempts == attempt.number
        declared_failed = record.status == "failed" and record.resolved is not None
        if own and (record.status in ("running", "ambiguous") or (late and declared_failed)):
            attempt.found(record, seen.revision)
            return True
        return False

    def _next(self, attempt: Attempt, *, status: Status, **fields: Any) -> ReceiptRecord:
        """The next record of an attempt that holds the call: what it is about stays, how it ended is new."""
        held = attempt.held
        if held.result is not None or held.error is not None or held.resolved is not None:
            said = ("result", "error", "resolved")
            held = ReceiptRecord(**{name: getattr(held, name) for name in held.model_fields_set if name not in said})
        return held.model_copy(update={"write": self._bucket.nonce(), "status": status, **fields})

    def _ended(self, attempt: Attempt, ending: Ending) -> Write:
        status, error = ending.status, ending.error
        result = attempt.sealed("result", ending.result) if ending.result is not None else None
        if attempt.body is not None and result is not None:
            nonce = self._bucket.nonce()
            value = fresh_receipt(attempt.body, write=nonce, status=status, result=result)
            return Write(value, expected=attempt.revision, nonce=nonce, token=attempt.token)
        if error is not None and error.not_applied and attempt.held.open:
            # An earlier attempt may have had the effect, so this one cannot speak for the call.
            error = error.model_copy(update={"not_applied": False})
            status = "ambiguous" if attempt.held.effect is Effect.OPAQUE else "failed"
        fields: dict[str, Any] = {}
        if result is not None:
            fields["result"] = Payload.model_validate_json(result)
        if error is not None:
            fields["error"] = attempt.sealed_error(error)
        return Write.of(self._next(attempt, status=status, **fields), expected=attempt.revision)

    # ------------------------------------------------------------------ judging

    async def condemn(self, attempt: Attempt, blocked: Blocked) -> Judged | None:
        """Make a record whose lease is over ambiguous, unless it says so already. None: it moved, so look again.

        A running record is looked at twice, a third of its lease and margin apart, and must not have moved: a
        restarted server must not condemn every call in flight, their holders get time to renew. The wait is made
        in here, except for what this attempt has already watched that long. Raises NotClaimed where the judgement
        cannot be written, and what `get` raises.
        """
        seen = blocked.seen
        if seen.record.status == "ambiguous":
            return Judged(seen.record, seen.revision)
        if seen.record.status == "running" and not self._was_given_up(seen.record):
            lease = (seen.record.lease_ms or 0) / 1000
            apart = (lease + margin_of(lease)) / 3
            async with self._bucket.hints(attempt.kv_key) as hint:
                while True:
                    pace = self.pace(attempt.lease, patience=CLAIM_PATIENCE)
                    left = apart - attempt.watched(seen.revision, pace.now())
                    if left <= 0:
                        break
                    await hint.wait(left)
                    again = await self.look(attempt, pace)
                    if again is None or again.revision != seen.revision:
                        return None
        return await self._judge(attempt, blocked, self.pace(attempt.lease, patience=CLAIM_PATIENCE))

    async def _judge(self, attempt: Attempt, blocked: Blocked, pace: Pace) -> Judged | None:
        """On the revision that was looked at: of many judges exactly one wins, and a stale read raises no alarm."""
        seen = blocked.seen
        record = seen.record
        error = record.error or ErrorInfo(
            type="LeaseExpired", message=f"the lease ended without an outcome, judged by {self._worker}"
        )
        judged = record.model_copy(
            update={"write": self._bucket.nonce(), "status": "ambiguous", "effect": blocked.effect, "error": error}
        )
        nonce = judged.write
        try:
            outcome = await advance(
                self._bucket,
                attempt.kv_key,
                judged.to_bytes(),
                expected=seen.revision,
                is_mine=partial(self._wrote, attempt.key, nonce),
                pace=pace,
            )
        except (NotWritten, InDoubt) as failure:
            raise NotClaimed(
                attempt.key, f"its lease is over, and that it is ambiguous could not be written: {failure}"
            ).because(failure.cause) from failure.cause
        if self.hooks is not None:
            self._note(self.hooks, attempt, "judge", outcome)
        if isinstance(outcome, Overtaken):
            return None
        return Judged(judged, outcome.revision)

    async def resolve(self, attempt: Attempt, standing: Judged, resolution: Resolution, pace: Pace) -> Judged | None:
        """Settle a call from outside, on the revision that was looked at. What stands then; None: it had moved.

        The holder stays on record, so that an attempt that comes back late recognises what became of its call.
        Raises `NotWritten` and `InDoubt`, and KeyMissing.
        """
        record = standing.record
        if resolution.result is not None:
            await self.prepare(attempt)
            if attempt.sealing is None and (key_id := sealed_in(record)) is not None:
                # A result in plain beside what is sealed is not what its owner wants.
                raise KeyMissing(attempt.key, tenant=attempt.key.tenant, key_id=key_id, what="record")
        fields: dict[str, Any] = {
            name: getattr(record, name)
            for name in record.model_fields_set
            if name not in ("write", "status", "result", "error", "resolved", "open")
        }
        if resolution.result is not None:
            result = Payload.model_validate_json(attempt.sealed("result", resolution.result))
            fields |= {"status": "completed", "result": result}
        else:
            error = ErrorInfo(type="NotApplied", message=resolution.by.reason, not_applied=True)
            fields |= {"status": "failed", "error": error}
        settled = ReceiptRecord(write=self._bucket.nonce(), resolved=resolution.by, **fields)
        write = await self._fitted(attempt, Write.of(settled, expected=standing.revision), pace)
        outcome = await report(
            self._bucket,
            attempt.kv_key,
            write.value,
            expected=write.expected,
            is_this_write=partial(self._wrote, attempt.key, write.nonce),
            pace=pace,
        )
        if self.hooks is not None:
            self._note(self.hooks, attempt, "resolve", outcome)
        return Judged(write.record, outcome.revision) if isinstance(outcome, Landed) else None

    # ------------------------------------------------------------------ settles that stayed unknown

    def keep(self, attempt: Attempt, ending: Ending, result: object) -> None:
        """Keep a settle that could not be finished, so that this process's next call of the key finishes it."""
        self._unfinished[attempt.kv_key] = (attempt, ending, result)
        while len(self._unfinished) > _UNFINISHED:
            dropped, _ = self._unfinished.popitem(last=False)
            _log.error(
                "%s: its outcome could not be recorded, and is now forgotten: settle it by hand",
                dropped,
                extra=fields("outcome_forgotten", dropped),
            )

    async def finish(self, kv_key: str, pace: Pace) -> None:
        """Finish a settle of this key that was kept, if there is one. Raises NotRecorded where that fails again."""
        kept = self._unfinished.pop(kv_key, None)
        if kept is None:
            return
        attempt, ending, result = kept
        try:
            lost = await self.settle(attempt, ending, pace)
            if lost is not None:
                _log.warning(
                    "%s: an outcome that was kept came too late: %s",
                    kv_key,
                    lost,
                    extra=fields("outcome_too_late", attempt.key, attempt=attempt.number),
                )
        except HistoryDropped:
            # The key has moved on by more than is kept, so the write landed or never will: nothing is left to finish.
            _log.warning(
                "%s: whether an outcome that was kept is recorded cannot be known any more",
                kv_key,
                extra=fields("outcome_unknown", attempt.key, attempt=attempt.number),
            )
        except (NotWritten, InDoubt) as failure:
            self.keep(attempt, ending, result)
            raise NotRecorded(
                attempt.key,
                f"an earlier outcome of this process still cannot be written: {failure}",
                result=result,
                has_result=ending.status == "completed",
                kept=True,
                attempts=attempt.number,
                token=attempt.token,
            ).because(failure.cause) from failure.cause
        except BaseException:
            self.keep(attempt, ending, result)
            raise
