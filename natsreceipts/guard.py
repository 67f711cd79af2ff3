"""The guard around one call: claim it, let the body run under a lease, write down how it ended.

The home of tasks and timers. No task outlives the context manager that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from natsreceipts.attempt import Attempt, Ending, Lost
from natsreceipts.background import Gate, Pulse, Stragglers, all_done, see_through
from natsreceipts.decision import Effect, Landed, NotLanded, Unknown, Verdict
from natsreceipts.entering import Entering
from natsreceipts.errors import (
    AmbiguousCall,
    CallInFlight,
    CallTimedOut,
    CallWithdrawn,
    CorruptRecord,
    InvalidName,
    InvalidSetting,
    LeaseLost,
    NatsReceiptsError,
    NotApplied,
    NotClaimed,
    NotRecorded,
    PayloadMissing,
    ReceiptErased,
    ReceiptError,
    ResultNotSet,
    StepRepeated,
    Unreachable,
    UnsupportedRecord,
    with_key,
)
from natsreceipts.fence import InDoubt, NotWritten
from natsreceipts.options import CallOptions, takes_argument
from natsreceipts.payload import NotEncodable
from natsreceipts.result_types import encoded, typed
from natsreceipts.telemetry import CallDecided, LostLease, RenewalFailed, fields
from natsreceipts.wire import Recorded, encode_payload, error_info

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from natsreceipts._jetstream import Entry
    from natsreceipts.attempts import Attempts
    from natsreceipts.entries import SessionEntry
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.telemetry import DecisionKind

__all__ = ["Call", "inside", "mark_left"]

_log = logging.getLogger("natsreceipts")

_SETTLE_PATIENCE = 120.0
"""Seconds that a settle is tried for: an effect has happened, and its result is worth waiting out a failover."""

_HURRIED = 5.0
"""Seconds that a cancelled call takes to write down what it leaves behind."""

_TAIL = 0.06
"""Seconds at the end of a lease in which no further try to renew it is made."""

_UNSET: Any = object()

_LEFT = "_natsreceipts_left"
"""Marks an exception that has left a guarded call with the bodies around it: for them it is an ordinary error."""

_REFUSALS: dict[type[BaseException], DecisionKind] = {
    AmbiguousCall: "ambiguous",
    CallInFlight: "wait",
    CallWithdrawn: "withdrawn",
}


class _Body:
    """A body that the code runs in, and the one around it."""

    __slots__ = ("ended", "key", "outside")

    def __init__(self, key: ReceiptKey, outside: _Body | None) -> None:
        self.key = key
        self.outside = outside
        self.ended = False


_entered: ContextVar[_Body | None] = ContextVar("natsreceipts_entered", default=None)
"""The calls in whose bodies the code runs, from the innermost out."""

_T = TypeVar("_T")


def mark_left(error: BaseException, outside: _Body | None = None) -> None:
    """Note that an exception left a guarded call, into the bodies around it (by default those of the calling code).

    The last 64 are enough: a mark is looked at on the way out, and only an exception that is raised again and again
    collects more.
    """
    bodies = outside if outside is not None else _entered.get()
    if bodies is not None:
        error.__dict__[_LEFT] = (*error.__dict__.get(_LEFT, ()), bodies)[-64:]


def inside(key: ReceiptKey) -> bool:
    """Whether the calling code runs inside the body of this very call."""
    body = _entered.get()
    while body is not None:
        if body.key == key and not body.ended:
            return True
        body = body.outside
    return False


class Call:
    """One guarded call, as an async context manager around its body.

    Entering claims the call, waits for another attempt, or finds the recorded result (``replayed``). Leaving it
    settles: the body must set ``result`` where it executed the effect.

    Raises on entry CallInFlight, AmbiguousCall, NotClaimed, CallWithdrawn, ReceiptErased, CorruptRecord,
    UnsupportedRecord, BucketReplaced, PermissionDenied, NotProvisioned: nothing was executed in any of these cases.
    Raises on exit what the body raised, or LeaseLost, NotRecorded, ResultNotSet, CallTimedOut.
    """

    __slots__ = (
        "_attempt",
        "_beat",
        "_body",
        "_cancelled_body",
        "_cancelling",
        "_guarded",
        "_interrupted_by",
        "_known",
        "_lock",
        "_never_started",
        "_number",
        "_options",
        "_outside",
        "_pulse",
        "_read_first",
        "_result",
        "_returned",
        "_revision",
        "_state",
        "_steps",
        "_store",
        "_stragglers",
        "_task",
        "_thread",
        "_threads",
        "_timer",
        "_told_lost",
        "key",
        "lost",
        "replayed",
    )

    def __init__(
        self,
        store: Attempts,
        pulse: Pulse,
        stragglers: Stragglers,
        key: ReceiptKey,
        options: CallOptions,
        *,
        args: object = None,
        known: Entry | None = None,
        read_first: bool = False,
        entries: tuple[SessionEntry, ...] = (),
    ) -> None:
        self.key = key
        """The ReceiptKey of the call."""
        self.replayed = False
        """Whether the result is a recorded one and nothing is to be executed."""
        self.lost = False
        """Whether this attempt has lost the call while its body ran."""
        self._store = store
        self._pulse = pulse
        self._stragglers = stragglers
        self._thread: asyncio.Future[Any] | None = None
        self._never_started = False
        self._threads = 0
        self._told_lost: LeaseLost | None = None
        self._options = options
        self._known = known
        self._read_first = read_first
        self._attempt = Attempt(key, effect=options.effect, lease=options.lease)
        self._attempt.entries = entries
        if options.store_args:
            self._attempt.args, _ = encode_payload(args)
        self._steps: set[str] | None = None
        self._result: Any = _UNSET
        self._revision = 0
        self._number = 1
        self._state: Literal["new", "open", "ended"] = "new"
        self._guarded = options.effect is not Effect.READ
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._outside: _Body | None = None
        self._body: _Body | None = None
        self._lock: asyncio.Lock | None = None
        self._beat: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._interrupted_by: Lost | ReceiptError | Literal["silence", "timeout"] | None = None
        self._cancelled_body = False
        self._returned = False

    # ------------------------------------------------------------------ what a body sees

    @property
    def idempotency_key(self) -> str:
        """64 hex digits that are the same for every attempt of this call, for a provider that takes such a key."""
        return self.key.idempotency_key

    @property
    def attempt(self) -> int:
        """The number of this attempt (1, 2, …), or of the one whose result is replayed."""
        return self._number

    @property
    def revision(self) -> int:
        """The revision of the receipt as this call last wrote or read it; 0 for a ``read``."""
        return self._revision or self._attempt.revision

    @property
    def result(self) -> Any:
        """The call's result: set it in the body. After the body it is the value as a replay would give it."""
        if self._result is _UNSET:
            raise AttributeError("this call has no result yet: set call.result in its body")
        return self._result

    @result.setter
    def result(self, value: object) -> None:
        if self.replayed:
            raise InvalidSetting(
                f"{self.key.kv_key}: the result of this call was replayed and stands; look at call.replayed before "
                f"setting call.result"
            )
        self._result = value

    def _one_write(self) -> asyncio.Lock:
        """Heartbeat, renewal and settle of one call go through one lock, made where it is first needed."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def renew(self) -> None:
        """Renew the lease now, to be sure just before the point of no return.

        Raises LeaseLost where the call is no longer this attempt's, or where that could not be found out within a
        third of the lease: in both cases do not go on.
        """
        if self._state != "open" or not self._guarded or self.replayed:
            return
        third = self._options.lease / 3
        loop = asyncio.get_running_loop()
        asked = loop.time()
        try:
            async with self._one_write():
                if self._state != "open":
                    raise LeaseLost(self.key, "it has ended")
                lost = await self._store.renew(self._attempt, self._store.pace(self._options.lease, patience=third))
        except LeaseLost:
            raise
        except (NotWritten, InDoubt, NatsReceiptsError) as failure:
            cause = failure if isinstance(failure, NatsReceiptsError) else failure.cause
            self._tell_of_renewal(cause or failure)
            raise LeaseLost(self.key, f"its lease could not be renewed: {failure}").because(cause) from cause
        if lost is not None:
            raise self._lost_in_body(lost)
        if loop.time() - asked >= third:
            raise LeaseLost(self.key, "renewing its lease took longer than a third of it")

    async def step(self, name: str, fn: Callable[[], Awaitable[_T] | _T]) -> _T:
        """Execute one step of a resumable effect, or return its recorded output.

        ``fn`` is executed unless an earlier attempt recorded this step; what it returns (awaited where it can be)
        is written into the receipt before this returns, and comes back as a later attempt would get it. What it
        raises is let through, and nothing is recorded. Raises StepRepeated for a name used twice in one attempt,
        InvalidSetting unless the effect is resumable, LeaseLost where the call is no longer this attempt's, and
        NotRecorded with the output where it could not be written: the step ran, and a later attempt may repeat it.
        """
        if self._options.effect is not Effect.RESUMABLE:
            raise InvalidSetting(f"{self.key.kv_key}: steps are for effect='resumable', not {self._options.effect}")
        if self._state != "open" or self.replayed:
            raise InvalidSetting(f"{self.key.kv_key}: step {name!r} outside the body of a call that executes")
        if not isinstance(cast("object", name), str) or not name or not name.isprintable():
            raise InvalidName("step", name, "use a non-empty printable string")
        if takes_argument(fn):
            raise InvalidSetting(f"{self.key.kv_key}: step {name!r}: pass a function of no argument")
        self._steps = self._steps or set()
        if name in self._steps:
            raise StepRepeated(self.key, name)
        self._steps.add(name)
        attempt = self._attempt
        output = (attempt.held.steps or {}).get(name)
        if output is not None:
            try:
                return cast("_T", await self._store.load_step(attempt, name, output))
            except PayloadMissing as missing:
                raise PayloadMissing(self.key, store=missing.store, name=missing.name, step=name) from None
        if self.lost:
            raise LeaseLost(self.key, "it was lost before this step")
        try:
            made = fn()
            if inspect.isawaitable(made):
                made = await cast("Awaitable[_T]", made)
        except BaseException:
            self._steps.discard(name)  # nothing is recorded of it, so it may be tried again
            raise
        try:
            payload, value = encode_payload(made)
            async with self._one_write():
                if self._state != "open":
                    raise LeaseLost(self.key, f"it ended before its step {name!r} did", result=made, has_result=True)
                pace = self._store.pace(self._options.lease, patience=self._options.lease)
                lost = await self._store.renew(attempt, pace, (name, payload))
        except LeaseLost:
            raise
        except (NotWritten, InDoubt, NotEncodable, NatsReceiptsError) as failure:
            cause = failure.cause if isinstance(failure, NotWritten | InDoubt) else failure
            raise self._not_recorded(f"step {name!r}: {failure}", made, has_result=True).because(cause) from cause
        if lost is not None:
            raise self._lost_in_body(lost)
        return cast("_T", value)

    def _lost_in_body(self, lost: Lost) -> LeaseLost:
        self._lose()
        self._told_lost = LeaseLost(self.key, str(lost))
        return self._told_lost

    async def in_thread(self, fn: Callable[[], _T], *, whole: bool = False) -> _T:
        """Run a blocking function in a thread, in the body of this call.

        A thread cannot be cancelled. If this is: the receipt of an opaque call becomes ambiguous at once, and the
        toolkit waits for the thread at its end; a call that can be resumed is not settled before its thread ends.
        ``whole``: the function is all that the body does, so that what it comes to after a cancellation is what
        the call came to, and is still recorded (a late completion). Raises what ``fn`` raises.
        """
        gate = Gate()
        context = copy_context()
        thread = asyncio.get_running_loop().run_in_executor(None, lambda: context.run(gate.passed, fn))
        return await self.beside(cast("asyncio.Future[_T]", thread), gate, whole=whole)

    async def beside(self, thread: asyncio.Future[_T], gate: Gate | None = None, *, whole: bool) -> _T:
        """Wait, in the body of this call, for what a thread does, as `in_thread`; ``gate`` is before work not begun."""
        self._threads += 1
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            if gate is not None and gate.shut():
                self._never_started = whole  # it was waiting for a free thread, and will find the gate shut
                raise
            if whole:
                self._thread = thread
            elif not thread.done():
                self._stragglers.adopt(all_done({thread}), f"thread of {self.key.kv_key}")
            if self._guarded and self._attempt.held.effect is not Effect.OPAQUE:
                await see_through(all_done({thread}), within=None)
            raise
        finally:
            self._threads -= 1

    # ------------------------------------------------------------------ entering

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise InvalidSetting("a call is entered once: make a new one with run.call(...)")
        self._task = asyncio.current_task()
        if self._task is None:
            raise InvalidSetting("a call is entered inside an asyncio task")
        if self._guarded:
            if inside(self.key):
                raise CallInFlight(self.key, retry_after=0.0, reason="this call is made inside its own body")
            hooks, began = self._store.hooks, 0.0
            if hooks is not None:
                began = asyncio.get_running_loop().time()
            try:
                found = await self._entering().claim()
            except BaseException as error:
                if hooks is not None:
                    hooks.emit(self._decided(began, error))
                if self._attempt.in_flight is not None or self._attempt.holds:
                    pace = self._store.pace(self._options.lease, patience=_HURRIED)
                    with contextlib.suppress(TimeoutError):
                        await see_through(self._store.abandon(self._attempt, pace), within=_HURRIED + 1)
                if isinstance(error, Unreachable):
                    raise NotClaimed(self.key, str(error)) from error
                if isinstance(error, NatsReceiptsError) and not isinstance(error, ReceiptError):
                    raise with_key(error, self.key)  # noqa: B904 - it is the same error
                raise
            if hooks is not None:
                hooks.emit(self._decided(began, found))
            if found is not None:
                self._take(found)
        self._open()
        return self

    def _decided(self, began: float, found: Recorded | BaseException | None) -> CallDecided:
        seconds = asyncio.get_running_loop().time() - began
        if isinstance(found, BaseException):
            decision = _REFUSALS.get(type(found), "refused")
            return CallDecided(self.key, decision, 0, seconds, found)
        if found is not None:
            return CallDecided(self.key, "replay", found.attempts, seconds)
        return CallDecided(self.key, "execute", self._attempt.number, seconds)

    def _open(self) -> None:
        self._state = "open"
        self._outside = _entered.get()
        self._body = _Body(self.key, self._outside)
        _entered.set(self._body)
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        if self.replayed:
            return
        if self._guarded:
            self._number = self._attempt.number
            self._pulse.watch(self, self._attempt.sent + self._options.lease / 3)
        if self._options.timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(self._options.timeout, self._time_out)

    def _entering(self) -> Entering:
        return Entering(
            self._store,
            self._attempt,
            self._options,
            known=self._known,
            read_first=self._read_first,
            ask=self._verify,
        )

    def _take(self, recorded: Recorded) -> None:
        self._result = typed(self.key, self._options, recorded.result)
        self._revision = recorded.revision
        self._number = recorded.attempts
        self.replayed = True

    async def _verify(self) -> tuple[Verdict, BaseException | None]:
        """What the verifier saw in the outside world. It is asked only after the ambiguous write was acknowledged."""
        verify = self._options.verify
        if verify is None:
            return Unknown(), None
        outside = _entered.get()
        _entered.set(_Body(self.key, outside))  # a verifier that makes this call again is told so, as a body is
        try:
            verdict = await (verify(self) if takes_argument(verify) else verify())
        except Exception as error:  # noqa: BLE001 - a verifier that fails does not know
            extra = fields("verifier_failed", self.key, error)
            # Not its text, which may hold what it read; AmbiguousCall has that.
            _log.warning("%s: the verifier failed (%s)", self.key.kv_key, type(error).__name__, extra=extra)
            return Unknown(), error
        finally:
            _entered.set(outside)
        if not isinstance(cast("object", verdict), Landed | NotLanded | Unknown):
            answer = type(verdict).__name__
            raise InvalidSetting(f"verify= answered with a {answer}: use Landed(result), NotLanded() or Unknown()")
        return verdict, None

    # ------------------------------------------------------------------ while the body runs

    def start_heartbeat(self) -> None:
        """Renew the lease from now on. For the `Pulse`."""
        self._beat = asyncio.get_running_loop().create_task(self._heartbeat(), name=f"heartbeat {self.key.kv_key}")

    async def _heartbeat(self) -> None:
        """Renew every third of the lease. Silence ends a resumable body; an opaque one goes on, since nobody else
        may run it, and keeps trying."""
        store, attempt, lease = self._store, self._attempt, self._options.lease
        loop = asyncio.get_running_loop()
        while self._state == "open":
            patience = max(attempt.sent + lease - loop.time(), lease / 3)
            try:
                async with self._one_write():
                    lost = await store.renew(attempt, store.pace(lease, patience=patience))
            except (ReceiptErased, CorruptRecord, UnsupportedRecord) as unreadable:
                self._interrupt(unreadable)
                return
            except (NotWritten, InDoubt, NatsReceiptsError) as silence:
                opaque = attempt.held.effect is Effect.OPAQUE
                self._tell_of_renewal(silence)
                left = attempt.sent + lease - loop.time()
                if left <= _TAIL and not opaque:
                    await asyncio.sleep(max(left, 0.0))
                    self._interrupt("silence")
                    return
                await asyncio.sleep(min(lease / 10, 1.0))
                continue
            if lost is not None:
                self._interrupt(lost)
                return
            await asyncio.sleep(max(attempt.sent + lease / 3 - loop.time(), 0.0))

    def _tell_of_renewal(self, failure: Exception) -> None:
        cause = failure.cause or failure if isinstance(failure, NotWritten | InDoubt) else failure
        extra = fields("renewal_failed", self.key, cause, attempt=self._number)
        _log.warning("%s: the lease could not be renewed: %s", self.key.kv_key, failure, extra=extra)
        if self._store.hooks is not None:
            self._store.hooks.emit(RenewalFailed(self.key, self._number, cause))

    def _lose(self) -> None:
        """Note that the call is no longer this attempt's."""
        if not self.lost and self._store.hooks is not None:
            self._store.hooks.emit(LostLease(self.key, self._number))
        self.lost = True

    def _time_out(self) -> None:
        # A body that hangs gives its call away, except where a thread of it still works: nobody else is let in
        # beside that before it ends.
        works_on = self._threads > 0 and self._guarded and self._attempt.held.effect is not Effect.OPAQUE
        if not works_on:
            self._pulse.drop(self)
            if self._beat is not None:
                self._beat.cancel()
        self._interrupt("timeout")

    def _interrupt(self, reason: Lost | ReceiptError | Literal["silence", "timeout"]) -> None:
        if self._state != "open" or self._interrupted_by is not None:
            return
        self._interrupted_by = reason
        if reason != "timeout":
            self._lose()
        if reason == "timeout" or self._options.on_lost == "cancel":
            self._cancelled_body = True
            assert self._task is not None
            self._task.cancel()

    # ------------------------------------------------------------------ leaving

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._state = "ended"
        _entered.set(self._outside)
        if self._body is not None:
            self._body.ended = True  # also for code that was started in the body, and goes on after it
        self._pulse.drop(self)
        if self._timer is not None:
            self._timer.cancel()
        ours = False
        if self._cancelled_body:
            assert self._task is not None
            ours = self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)
        spoke = error is not None and (self._never_started or self._said_not_applied(error))
        if self._beat is not None:
            self._beat.cancel()
        try:
            if self.replayed:
                return False
            if error is None:
                await self._succeeded()
            elif self._thread is not None and self._guarded:
                if await self._left_thread(self._thread, error, ours=ours):
                    return True
            elif ours:
                return await self._interrupted(error)
            elif self._guarded:
                await self._failed(error, spoke=spoke)
            # A resolver's result stands for a body that stopped where it was told that the call is lost.
            return self.replayed and error is not None and error is self._told_lost
        finally:
            if error is not None:
                mark_left(error, self._outside)
            if self._beat is not None:
                await see_through(_ended(self._beat), within=None)

    async def _succeeded(self) -> None:
        if not self._guarded:
            if self._result is _UNSET:
                raise ResultNotSet(self.key, status="none (it is a read)")
            return
        self._returned = True
        if self._result is _UNSET:
            self._returned = False
            missing = ResultNotSet(self.key, status=self._unfinished_status())
            await self._settle(Ending(self._unfinished_status(), error=error_info(missing)), patience=_SETTLE_PATIENCE)
            raise missing
        try:
            payload, value = encoded(self._options, self._result)
        except Exception as problem:  # noqa: BLE001 - a model of the host's may fail in its own way
            await self._unstorable(problem)
        else:
            self._result = value
            await self._settle(Ending("completed", result=payload), patience=_SETTLE_PATIENCE)
            if self._options.result_type is not None and not self.replayed:
                self._result = typed(self.key, self._options, value)

    async def _unstorable(self, problem: Exception) -> None:
        """The effect happened and its result cannot be kept: say so in the receipt, and hand the result out."""
        status = self._unfinished_status()
        await self._settle(Ending(status, error=error_info(problem)), patience=_SETTLE_PATIENCE)
        raise self._not_recorded(
            f"its result cannot be stored, so the receipt is {status}: {problem}",
            self._result,
            has_result=True,
            again=status == "failed",
        ) from problem

    def _not_recorded(self, reason: str, result: object, **said: bool) -> NotRecorded:
        attempt = self._attempt
        return NotRecorded(
            self.key, reason, result=result, attempts=attempt.number or None, token=attempt.token or None, **said
        )

    async def _left_thread(self, thread: asyncio.Future[Any], error: BaseException, *, ours: bool) -> bool:
        """The body was cancelled over its thread. What the thread came to is written down, now or when it ends.

        True: the call has a result all the same.
        """
        if thread.done():
            unrecorded = await see_through(self._thread_ended(thread), within=None)
            return await self._told_thread(thread, error, unrecorded) if ours else False
        try:
            if ours:
                return await self._interrupted(error)
            await self._failed(error, spoke=False)
            return False
        finally:
            self._stragglers.adopt(self._thread_ended(thread), f"late end of {self.key.kv_key}")

    async def _told_thread(
        self, thread: asyncio.Future[Any], error: BaseException, unrecorded: Lost | Exception | None
    ) -> bool:
        """Say what became of a call that was interrupted over its thread, which has ended since."""
        value = self._result if self._returned else None
        if isinstance(unrecorded, Lost):
            if await self._replay_resolved(unrecorded):
                return True
            raise LeaseLost(self.key, str(unrecorded), result=value, has_result=self._returned) from error
        if unrecorded is not None:
            raise self._not_recorded(str(unrecorded), value, has_result=self._returned, kept=True) from unrecorded
        problem = thread.exception()
        if self._interrupted_by == "timeout":
            spoke = problem is not None and self._said_not_applied(problem)
            status = "completed" if self._returned else "failed" if spoke else self._unfinished_status()
            raise CallTimedOut(self.key, timeout=self._options.timeout or 0.0, status=status) from error
        if not self._returned:
            raise problem if problem is not None else error
        self._result = typed(self.key, self._options, value)
        return True

    async def _thread_ended(self, thread: asyncio.Future[Any]) -> Lost | Exception | None:
        """Write down what a thread came to. None: it stands in the receipt; else as `_settle_in_hurry`."""
        await asyncio.wait([thread])
        problem = thread.exception()
        if problem is not None:
            spoke = self._said_not_applied(problem)
            status = "failed" if spoke else self._unfinished_status()
            ending = Ending(status, error=error_info(problem, not_applied=spoke))
        else:
            try:
                payload, self._result = encoded(self._options, thread.result())
                self._returned = True
                ending = Ending("completed", result=payload)
            except Exception as unstorable:  # noqa: BLE001 - a model of the host's may fail in its own way
                ending = Ending(self._unfinished_status(), error=error_info(unstorable))
        return await self._settle_in_hurry(ending)

    def _said_not_applied(self, error: BaseException) -> bool:
        if not isinstance(error, (NotApplied, *self._options.not_applied)):
            return False
        if isinstance(error, NatsReceiptsError) and not isinstance(error, NotApplied):
            return False  # an inner guarded call's word about itself
        bodies: _Body | None
        for bodies in error.__dict__.get(_LEFT, ()):
            body = bodies
            while body is not None:
                if body is self._body:
                    return False
                body = body.outside
        return True

    async def _interrupted(self, error: BaseException) -> bool:
        """Settle, and say why the body was cancelled. True: there is a result all the same, a resolver's."""
        if isinstance(self._interrupted_by, Lost):
            if await self._replay_resolved(self._interrupted_by):
                return True
            raise LeaseLost(self.key, str(self._interrupted_by)) from error
        if isinstance(self._interrupted_by, ReceiptError):
            raise LeaseLost(self.key, "its receipt cannot be read any more") from self._interrupted_by
        if self._interrupted_by == "silence":
            try:
                await self._settle(Ending("failed", error=error_info(error)), patience=_HURRIED)
            except NotRecorded as unrecorded:
                raise LeaseLost(
                    self.key, "NATS was silent for a whole lease, and the body was cancelled"
                ) from unrecorded
            if self.replayed:
                return True
            raise LeaseLost(self.key, "NATS was silent for a whole lease, and the body was cancelled") from error
        status = self._unfinished_status() if self._guarded else "none (it is a read)"
        late = CallTimedOut(self.key, timeout=self._options.timeout or 0.0, status=status)
        if self._guarded:
            await self._settle(Ending(self._unfinished_status(), error=error_info(late)), patience=_SETTLE_PATIENCE)
            if self.replayed:
                return True
        raise late from error

    async def _failed(self, error: BaseException, *, spoke: bool) -> None:
        status = "failed" if spoke else self._unfinished_status()
        ending = Ending(status, error=error_info(error, not_applied=spoke))
        if isinstance(error, Exception):
            await self._settle(ending, patience=_SETTLE_PATIENCE)
        else:
            # A cancellation (or the interpreter's end) goes on as what it is, whatever the settle comes to.
            with contextlib.suppress(TimeoutError):
                await see_through(self._settle_in_hurry(ending), within=_HURRIED + 1)

    def _unfinished_status(self) -> Literal["failed", "ambiguous"]:
        return "ambiguous" if self._guarded and self._attempt.held.effect is Effect.OPAQUE else "failed"

    async def _settle(self, ending: Ending, *, patience: float) -> None:
        store, attempt = self._store, self._attempt
        value = self._result if self._returned else None
        try:
            if self._lock is None:
                lost = await store.settle(attempt, ending, store.pace(self._options.lease, patience=patience))
            else:
                async with self._lock:
                    lost = await store.settle(attempt, ending, store.pace(self._options.lease, patience=patience))
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                await see_through(self._settle_in_hurry(ending), within=_HURRIED + 1)
            raise
        except (NotWritten, InDoubt, NatsReceiptsError) as failure:
            cause = failure.cause if isinstance(failure, NotWritten | InDoubt) else failure
            if ending.status == "completed" and cause is not None and _is_about_the_value(cause):
                await self._unstorable(cause)
            store.keep(attempt, ending, value)
            raise self._not_recorded(str(failure), value, has_result=self._returned, kept=True) from cause
        if lost is None:
            return
        if await self._replay_resolved(lost):
            return
        self._lose()
        raise LeaseLost(self.key, str(lost), result=value, has_result=self._returned)

    async def _replay_resolved(self, lost: Lost) -> bool:
        """Whether somebody completed the call in this attempt's stead; then that result is the call's."""
        if not self._store.resolved_for(self._attempt, lost.seen):
            return False
        _log.warning(
            "%s: %s; that result stands, and not what this attempt did",
            self.key.kv_key,
            lost,
            extra=fields("resolved_meanwhile", self.key, attempt=self._number),
        )
        seen = lost.seen
        result = await self._store.load(seen, seen.record.result)
        self._take(Recorded(result, seen.record.attempts, seen.revision))
        return True

    async def _settle_in_hurry(self, ending: Ending) -> Lost | Exception | None:
        """Settle, or go on with a settle that a cancellation cut off. What cannot be finished is kept.

        None: it stands in the receipt. `Lost`: the call had moved on. Else why it is only kept.
        """
        store, attempt = self._store, self._attempt
        value = self._result if self._returned else None
        try:
            async with self._one_write():
                lost = await store.settle(attempt, ending, store.pace(self._options.lease, patience=_HURRIED))
        except (NotWritten, InDoubt, NatsReceiptsError) as failure:
            store.keep(attempt, ending, value)
            _log.warning(
                "%s: cancelled, and its outcome could not be recorded: %s",
                self.key.kv_key,
                failure,
                extra=fields("outcome_kept", self.key, attempt=self._number),
            )
            return failure
        except asyncio.CancelledError:
            store.keep(attempt, ending, value)
            raise
        if lost is not None:
            extra = fields("outcome_too_late", self.key, attempt=self._number)
            _log.warning("%s: cancelled, and the call had moved on: %s", self.key.kv_key, lost, extra=extra)
            if not store.resolved_for(attempt, lost.seen):
                self._lose()
        return lost


def _is_about_the_value(cause: Exception) -> bool:
    """Whether a settle was refused because of what it said (its size), so that a smaller one can be written."""
    return isinstance(cause, ValueError) or getattr(cause, "code", None) in (10054, 10097)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a heartbeat ended in an error", exc_info=error)
