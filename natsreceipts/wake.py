"""Wake: close the calls that a session was cut off in, with their receipts as evidence.

=========================================  ==============================================================
receipt                                    what wake does
=========================================  ==============================================================
completed                                  appends the real result
running, lease live                        raises SessionBusy, and has written nothing
absent, withdrawn                          fences it at the log's last position, then closes "never started"
failed                                     the same, then appends the error as the result
ambiguous, or opaque with its lease over   (makes it ambiguous,) closes "outcome unknown"
resumable, running with its lease over     closes "outcome unknown, safe to issue again"
no receipt that could tell                 closes in the conservative words of the log alone
settled since it was closed as unknown     appends what it came to (fenced first, where that is "no effect")
=========================================  ==============================================================

All receipts are looked at first. Every close goes in behind the log's fence, and the words that a call never started
only once no claim from before can be accepted: so two wakers, or a waker and a worker that comes back, cannot
contradict each other.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from natsreceipts.attempt import Attempt, Blocked
from natsreceipts.attempts import CLAIM_PATIENCE
from natsreceipts.background import all_of
from natsreceipts.closes import CloseReason, close_calls, close_reason
from natsreceipts.decision import Ambiguous, Effect, stricter
from natsreceipts.dialects import dialect_named
from natsreceipts.dialects.base import ErrorKind
from natsreceipts.errors import (
    CorruptRecord,
    InvalidSetting,
    NotClaimed,
    PayloadMissing,
    ReceiptErased,
    SessionBusy,
    SessionConflict,
    Unreachable,
    UnsupportedRecord,
    brief,
)
from natsreceipts.fence import clock, newest
from natsreceipts.identity import ReceiptKey, args_hash
from natsreceipts.numbering import NumberedCalls, call_number, distinct_of, turn_of
from natsreceipts.reconcile import ReconcileReport, RecoveredCall, closable
from natsreceipts.seen import Seen, seen_of
from natsreceipts.settled_since import Moved, Settled, settled_since, unsettled
from natsreceipts.shown import failure_of, result_message
from natsreceipts.telemetry import SessionWoken
from natsreceipts.tools import ToolFunction
from natsreceipts.transcript import interrupted_result_message
from natsreceipts.wire import CloseInfo, ReceiptSaid
from natsreceipts.withdrawal import withdraw

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from natsreceipts._jetstream import Bucket, Clock
    from natsreceipts.attempts import Attempts
    from natsreceipts.dialects.base import Message
    from natsreceipts.entries import CallSite, SessionEntry
    from natsreceipts.fence import Pace
    from natsreceipts.identity import Digest
    from natsreceipts.session_store import SessionStore
    from natsreceipts.transcript import OrphanToolCall

__all__ = ["Guarded", "Waker"]

_log = logging.getLogger("natsreceipts")

_DAY = 86_400.0

Guarded: TypeAlias = "ToolFunction[...] | Callable[[dict[str, Any]], Any] | Callable[[dict[str, Any], str], Any]"
"""How a tool's calls are keyed: its `@tool` function, or a function of the arguments, or of the arguments and the id of
the tool call, to ``args`` or ``(args, distinct)``."""


@dataclass(slots=True)
class _Case:
    """One call without a result, and what is known of it."""

    orphan: OrphanToolCall
    site: CallSite
    effect: Effect | None
    """The tool's effect as the host says it now; None where it does not."""
    guarded: bool
    """Whether a worker would leave a receipt of it."""
    key: ReceiptKey | None = None
    why: str = ""


@dataclass(slots=True)
class _Evidence:
    """The receipt of one key, and the cases that it speaks for: equal calls in one run are one call."""

    key: ReceiptKey
    cases: list[_Case]
    attempt: Attempt
    seen: Seen | None = None
    said: str = "absent"
    revision: int = 0

    @property
    def attempts(self) -> int:
        """How many attempts the receipt tells of."""
        return self.seen.record.attempts if self.seen is not None else 0


class _Told(NamedTuple):
    """What the model is to be told: a real result or the error on record, or (``reason``) a close."""

    why: str
    value: Any = None
    is_error: bool = False
    reason: CloseReason | None = None


class Waker:
    """One session, the receipts of its calls, and how their keys are made.

    ``watching`` is kept from one wake to the next: what this process itself has watched unchanged for a lease has
    expired, whatever timestamps say.
    """

    def __init__(
        self,
        store: SessionStore,
        attempts: Attempts,
        *,
        digest: Digest,
        guarded: object,
        effects: Mapping[str, Effect],
        started: Collection[str] | None,
        dry_run: bool,
        watching: dict[str, Attempt],
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._bucket = attempts.bucket
        self._digest = digest
        self._guarded = checked_guarded(guarded)
        self._effects = effects
        self._started = started
        self._dry_run = dry_run
        self._watching = watching

    async def wake(self) -> ReconcileReport:
        """Close what was cut off (see `natsreceipts.SessionLog.wake`)."""
        hooks = self._attempts.hooks
        if hooks is None or self._dry_run:
            return await self._wake()
        loop = asyncio.get_running_loop()
        began = loop.time()
        told = partial(SessionWoken, self._store.tenant, self._store.session)
        try:
            report = await self._wake()
        except BaseException as error:
            hooks.emit(told(loop.time() - began, 0, error))
            raise
        hooks.emit(told(loop.time() - began, len(report.recovered)))
        return report

    async def _wake(self) -> ReconcileReport:
        recovered: list[RecoveredCall] = []
        while True:
            await self._store.refresh()
            position = self._store.last_seq
            branch = self._store.branch()
            orphans, closes = closable(self._store), unsettled(branch)
            if not orphans and not closes:
                return ReconcileReport(tuple(recovered), position)
            messages = [cast("Message", entry.message) for entry in branch.shown]
            cases = [self._case(orphan, branch.sites[orphan.tool_call_id], messages) for orphan in orphans]
            try:
                told = await self._judged(cases, position)
                settled = await all_of(self._settled(close, position) for close in closes)
                expected = await self._append_settled(settled, position, recovered)
                await self._append(told, expected, recovered)
            except (Moved, SessionConflict):
                continue
            return ReconcileReport(tuple(recovered), self._store.last_seq)

    # ------------------------------------------------------------------ looking

    def _case(self, orphan: OrphanToolCall, site: CallSite, messages: list[Message]) -> _Case:
        how = self._guarded.get(orphan.tool_name)
        effect = self._effects.get(orphan.tool_name)
        declared = _declared_effect(how)
        if declared is not None:
            effect = declared if effect is None else stricter(declared, effect)
        case = _Case(orphan, site, effect, guarded=how is not None and effect is not Effect.READ)
        run, arguments = site.claims_from.run, site.call.arguments
        if how is None:
            case.why = "the tool is not guarded"
        elif run is None:
            case.why = "its entry names no run"
        elif arguments is None:
            case.why = "its arguments are no JSON object"
        else:
            try:
                number = self._number(how, orphan, arguments, messages)
                case.key = self._key(how, run, orphan, copy.deepcopy(arguments), number)
            except Exception as error:  # noqa: BLE001 - a model's arguments may be anything; nothing is known then
                # Not its text, which may show the arguments; the report and the session's log have that.
                kind = type(error).__name__
                _log.warning("wake: the key of a call of %s cannot be made (%s)", orphan.tool_name, kind)
                case.why = f"its key cannot be made: {error}"
        return case

    def _number(self, how: Guarded, orphan: OrphanToolCall, arguments: dict[str, Any], messages: list[Message]) -> int:
        if not isinstance(how, NumberedCalls):
            return 1
        turn = turn_of(messages, orphan.message_index, dialect_named(self._store.dialect))
        return call_number(turn, orphan.tool_name, arguments, orphan.tool_call_id)

    def _key(
        self, how: Guarded, run: str, orphan: OrphanToolCall, arguments: dict[str, Any], number: int
    ) -> ReceiptKey:
        distinct, tool = distinct_of(number), orphan.tool_name
        if isinstance(how, ToolFunction):
            tool, args = how.name, cast("object", how.arguments(**arguments))
        else:
            given = (arguments, orphan.tool_call_id) if _takes_the_id(how) else (arguments,)
            args = cast("object", cast("Callable[..., Any]", how)(*given))
            if type(args) is tuple:
                args, distinct = cast("tuple[object, str | None]", args)
            if type(args) is not dict and type(args) is not list:
                raise TypeError(f"the function of {tool} gave {type(args).__name__}, and not the arguments of the call")
        digest = args_hash(cast("object", args), digest=self._digest, distinct=distinct)
        return ReceiptKey(self._store.tenant, run, tool, digest)

    async def _judged(self, cases: list[_Case], position: int) -> list[tuple[_Case, _Evidence | None, _Told]]:
        """Look at all the receipts, then judge and fence each of them once."""
        found: dict[str, _Evidence] = {}
        for case in cases:
            if case.key is not None:
                kv_key = case.key.kv_key
                if kv_key not in self._watching:
                    self._watching[kv_key] = Attempt(case.key, effect=Effect.OPAQUE, lease=30.0)
                evidence = found.setdefault(kv_key, _Evidence(case.key, [], self._watching[kv_key]))
                evidence.cases.append(case)
        told: dict[str, _Told] = {}
        if found:
            buckets = {bucket.name: bucket for bucket in map(self._bucket.of, found)}
            clocks = await all_of(clock(bucket, self._pace()) for bucket in buckets.values())
            now = dict(zip(buckets, clocks, strict=True))
            await all_of(map(self._look, found.values()))
            await self._refuse_if_busy(found.values())
            judged = await all_of(
                self._judge(each, now[self._attempts.name_of(each.key)], position) for each in found.values()
            )
            told = dict(zip(found, judged, strict=True))
        return [
            (case, found[case.key.kv_key], told[case.key.kv_key])
            if case.key is not None
            else (case, None, self._unproven(case, case.why))
            for case in cases
        ]

    def _pace(self) -> Pace:
        return self._attempts.pace(30.0, patience=CLAIM_PATIENCE)

    async def _look(self, evidence: _Evidence) -> None:
        key = evidence.key
        try:
            entry = await newest(self._bucket, key.kv_key, self._pace())
            evidence.seen = seen_of(self._attempts.name_of(key), key, entry) if entry is not None else None
        except (ReceiptErased, CorruptRecord, UnsupportedRecord) as error:
            _log.warning("wake: %s", error)
            evidence.said = "erased" if isinstance(error, ReceiptErased) else "unreadable"
            evidence.revision = error.revision
            return
        if evidence.seen is not None:
            evidence.said, evidence.revision = evidence.seen.record.status, evidence.seen.revision

    async def _refuse_if_busy(self, found: Iterable[_Evidence]) -> None:
        live: list[str] = []
        longest = 0.0
        for each in found:
            if each.seen is not None and each.seen.record.status == "running":
                left = await self._attempts.expires_in(each.attempt, each.seen, self._pace())
                if left > 0:
                    live.append(each.key.tool)
                    longest = max(longest, left)
        if live:
            raise SessionBusy(
                self._store.tenant, self._store.session, retry_after=longest, calls=tuple(dict.fromkeys(live))
            )

    # ------------------------------------------------------------------ judging

    async def _judge(self, evidence: _Evidence, now: Clock, position: int) -> _Told:
        case, seen = evidence.cases[0], evidence.seen
        if evidence.said in ("erased", "unreadable"):
            return self._unproven(case, f"its receipt is {evidence.said}")
        if seen is None or seen.record.status == "withdrawn":
            if doubt := await self._doubts(evidence, now):
                return self._unproven(case, doubt)
            await self._fence(evidence, position)
            bucket = self._bucket.of(evidence.key.kv_key)
            if bucket.retention:
                # What time it is now: this process may have been frozen since it asked, until a receipt expired.
                now = await clock(bucket, self._pace())
                if doubt := await self._doubts(evidence, now):
                    return self._unproven(case, doubt)
            why = "no attempt was ever made, and from before this none can be made any more"
            return _Told(why, reason=CloseReason.NEVER_STARTED)
        record = seen.record
        if record.status == "completed":
            return await self._real(evidence, seen)
        recorded = record.effect or Effect.OPAQUE
        opaque = stricter(recorded, case.effect or Effect.READ) is Effect.OPAQUE
        if record.status == "failed" and (record.not_applied or not opaque):
            await self._fence(evidence, position)
            return _Told(
                "the receipt says that it failed", value=await failure_of(self._attempts, record), is_error=True
            )
        if record.status == "running" and not opaque:
            return _Told("its lease is over, and it may be repeated", reason=CloseReason.REPEATABLE)
        if record.status == "running" and recorded is Effect.OPAQUE and not self._dry_run:
            await self._condemn(evidence, seen)
        return _Told("an attempt may have had its effect", reason=CloseReason.AMBIGUOUS)

    async def _condemn(self, evidence: _Evidence, seen: Seen) -> None:
        blocked = Blocked(seen, Ambiguous("its lease is over"), Effect.OPAQUE)
        try:
            judged = await self._attempts.condemn(evidence.attempt, blocked)
        except (ReceiptErased, CorruptRecord, UnsupportedRecord):
            raise Moved from None  # it was deleted, or written over, since it was looked at
        except NotClaimed as failure:
            cause = failure.__cause__
            raise Unreachable(
                f"{evidence.key.kv_key}: its lease is over, and that could not be written down; nothing was appended, "
                f"wake the session again"
            ).because(cause) from cause
        if judged is None:
            raise Moved
        evidence.said, evidence.revision = "ambiguous", judged.revision

    async def _real(self, evidence: _Evidence, seen: Seen) -> _Told:
        why = "the receipt has its result"
        try:
            return _Told(why, value=await self._attempts.load(seen, seen.record.result))
        except PayloadMissing as error:
            _log.warning("wake: %s", error)
            return _Told(str(error), value=_GONE.format(tool=evidence.cases[0].orphan.tool_name), is_error=True)
        except CorruptRecord as error:
            evidence.said = "unreadable"
            return self._unproven(evidence.cases[0], str(error))

    async def _doubts(self, evidence: _Evidence, now: Clock) -> str:
        bucket = self._bucket.of(evidence.key.kv_key)
        for case in evidence.cases:
            if doubt := await self._doubt(case, bucket, now):
                return doubt
        return ""

    async def _doubt(self, case: _Case, bucket: Bucket, now: Clock) -> str:
        """Why it proves nothing that there is no attempt; empty where it does."""
        if not case.guarded:
            return "the tool only reads, and leaves no receipt"
        if self._started is not None and case.orphan.tool_call_id in self._started:
            return "the live caller saw it start"
        # A withdrawn record may be younger than what was lost before it: it vouches for nothing earlier.
        called = await self._store.time_of(case.site.entry)
        if called is None:
            return "its entry is no longer kept"
        when = called.timestamp()
        if when < bucket.created / 1e9:
            return "the call is older than the bucket"
        horizon = bucket.retention
        if horizon and now.now / 1e9 - when >= horizon - min(_DAY, horizon / 10):
            return "the call is older than receipts are kept for"
        return ""

    async def _fence(self, evidence: _Evidence, position: int) -> None:
        if self._dry_run:
            return
        token = evidence.cases[0].site.entry.token
        try:
            revision = await withdraw(
                self._bucket, evidence.key, evidence.seen, token=token, position=position, pace=self._pace()
            )
        except (CorruptRecord, UnsupportedRecord):
            raise Moved from None  # it was written over while that was in doubt
        if revision is None:
            raise Moved
        evidence.revision = revision

    def _unproven(self, case: _Case, why: str) -> _Told:
        """The words of the log alone; "never started" only where no receipt could tell and a live caller does."""
        effects = {case.orphan.tool_name: case.effect} if case.effect is not None else {}
        return _Told(why, reason=close_reason(case.orphan, effects, None if case.guarded else self._started))

    # ------------------------------------------------------------------ telling

    async def _settled(self, close: SessionEntry, position: int) -> Settled | None:
        return await settled_since(self._attempts, close, position, pace=self._pace, dry_run=self._dry_run)

    async def _append_settled(
        self, settled: list[Settled | None], expected: int, recovered: list[RecoveredCall]
    ) -> int:
        """Put in what calls came to after their closes. Returns the log's last sequence after that."""
        for each in settled:
            if each is None:
                continue
            run, said = each.close.run, each.receipt
            message, text = result_message(self._store, said, each.value, run=run, is_error=each.is_error)
            entry_id = ""
            if not self._dry_run:
                entry = await self._store.append("message", message, run=run, receipt=said, expected=expected)
                entry_id, expected = entry.id, entry.seq
            recovered.append(
                RecoveredCall(
                    said.tool_call_id,
                    said.tool_name,
                    entry_id,
                    text,
                    None,
                    said=said.status,
                    kv_key=said.key,
                    revision=said.revision,
                    why=each.why,
                )
            )
        return expected

    async def _append(
        self,
        told: list[tuple[_Case, _Evidence | None, _Told]],
        expected: int,
        recovered: list[RecoveredCall],
    ) -> None:
        store = self._store
        closes = iter(close_calls((case.orphan, say.reason) for case, _, say in told if say.reason is not None))
        for case, evidence, say in told:
            call, run = case.orphan, case.site.claims_from.run
            receipt = None
            if evidence is not None:
                receipt = ReceiptSaid(
                    tool_call_id=call.tool_call_id,
                    tool_name=call.tool_name,
                    key=evidence.key.kv_key,
                    revision=evidence.revision,
                    status=evidence.said,
                    attempts=evidence.attempts,
                )
            if say.reason is not None:
                close = next(closes)
                text, kind = close.text, ErrorKind(close.error_kind)
                marks = CloseInfo(tool_call_id=call.tool_call_id, error_kind=kind)
                message = interrupted_result_message(close, dialect=store.dialect)
            else:
                assert receipt is not None
                kind = marks = None
                message, text = result_message(store, receipt, say.value, run=run, is_error=say.is_error)
            entry_id = ""
            if not self._dry_run:
                entry = await store.append("message", message, run=run, close=marks, receipt=receipt, expected=expected)
                entry_id, expected = entry.id, entry.seq
            recovered.append(
                RecoveredCall(
                    call.tool_call_id,
                    call.tool_name,
                    entry_id,
                    text,
                    kind,
                    said=evidence.said if evidence is not None else None,
                    kv_key=evidence.key.kv_key if evidence is not None else None,
                    revision=evidence.revision if evidence is not None else 0,
                    why=say.why,
                )
            )


_GONE = "This call of {tool} was carried out. The result that it recorded can no longer be read. Do not issue it again."


def _takes_the_id(how: Callable[..., Any]) -> bool:
    """Whether a key function has a second required parameter, for the id of the tool call."""
    try:
        parameters = inspect.signature(how).parameters.values()
    except ValueError:
        return False  # written in C, and does not tell
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters) == 2


def _declared_effect(how: object) -> Effect | None:
    return how.effect if isinstance(how, ToolFunction) else None


def checked_guarded(guarded: object) -> dict[str, Guarded]:
    """How the calls of guarded tools are keyed, by the name that the model calls them by. Raises InvalidSetting."""
    if guarded is None:
        return {}
    if not isinstance(guarded, Mapping):
        tools = list(cast("Iterable[object]", guarded)) if isinstance(guarded, list | tuple | set) else [None]
        if not all(isinstance(each, ToolFunction) for each in tools):
            raise InvalidSetting(
                f"guarded={brief(cast('object', guarded))}: use a mapping of names to @tool functions, or a list"
            )
        return {each.name: each for each in cast("list[ToolFunction[...]]", tools)}
    found: dict[str, Guarded] = {}
    for name, how in cast("Mapping[object, object]", guarded).items():
        if not callable(how) or (not isinstance(how, ToolFunction) and inspect.iscoroutinefunction(how)):
            raise InvalidSetting(
                f"guarded[{brief(name)}]={brief(how)}: use the @tool function, or a function (arguments) or "
                f"(arguments, tool_call_id) -> args | (args, distinct) that is not async and has no effect itself"
            )
        found[str(name)] = cast("Guarded", how)
    return found
