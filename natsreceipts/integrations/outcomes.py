"""How a call of an agent's tool is guarded, and how its outcome reaches the model: the same in all frameworks.

=========================================  ==========================================================================
what the call came to                      what the model gets
=========================================  ==========================================================================
a result, now or on record                 that result
the tool reported a failure itself         that text, now and at a replay (`CallFailed`)
ambiguous, or ambiguous by a time-out      that the outcome is unknown, and what to do; or the error is raised
another attempt is still at it after       that it is, and that nothing was executed here; or the error is raised
``wait`` seconds (by default: long
enough to tell that it is dead)
the receipt was deleted or is unreadable   that nobody knows what became of it; or the error is raised
done, and its recorded result is lost      that it was done, and not to do it again; or the error is raised
the arguments are no plain JSON            that nothing was executed
the tool raised an error                   what the framework makes of the tool's errors: it is raised
the same, and the framework would tell     that text, and of an opaque tool that nobody knows what became of it; or
the model in its own words (`CallRaised`)  AmbiguousCall is raised
control flow of the framework              what the framework makes of it: it is raised, and is on record as not applied
anything else of ours                      nothing: it is raised, and the turn has to end
=========================================  ==========================================================================

What has to end the turn: LeaseLost and CallWithdrawn (this worker is not the one that goes on), NotClaimed,
Unreachable, PermissionDenied and NotProvisioned (nothing can be guarded now), NotRecorded (it was done, and must be
written down before anything follows from it), BucketReplaced, UnsupportedRecord (a newer worker can go on), and what is
wrong with the program itself (InvalidName, InvalidSetting, NoActiveRun, ResultTypeMismatch). A model could do nothing
about them, and would go on as if something were known.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from natsreceipts.announce import NEEDS_A_PERSON
from natsreceipts.decision import Effect
from natsreceipts.errors import (
    AmbiguousCall,
    CallInFlight,
    CallTimedOut,
    CorruptRecord,
    InvalidSetting,
    NatsReceiptsError,
    NoActiveRun,
    NotApplied,
    NotCanonical,
    PayloadMissing,
    ReceiptErased,
    ReceiptError,
)
from natsreceipts.options import CallOptions
from natsreceipts.reconcile import checked_effects
from natsreceipts.reported import failure, reported, success
from natsreceipts.run import current_run, operated
from natsreceipts.telemetry import fields

if TYPE_CHECKING:
    from natsreceipts.entries import SessionEntry
    from natsreceipts.guard import Call
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.run import Run

__all__ = ["Body", "CallFailed", "CallRaised", "NotCarriedOut", "OnUnknown", "Outcome", "ToolGuard", "current_call"]

_log = logging.getLogger("natsreceipts")

OnUnknown: TypeAlias = Literal["tell", "raise"]
"""Whether the model is told that nobody knows what became of a call, or the error is raised to the host."""

Body: TypeAlias = Callable[[], Awaitable[Any]]
"""What executes a call: it returns the result, or raises `CallFailed`, the framework's control flow, or any error."""

_call: ContextVar[Call | None] = ContextVar("natsreceipts_current_call", default=None)


def current_call() -> Call:
    """The guarded call in whose body this code runs, for its ``idempotency_key`` and its ``step``.

    It is there in what the body awaits, and in threads that a framework starts for it. Raises NoActiveRun outside a
    call that an integration guards.
    """
    call = _call.get()
    if call is None:
        raise NoActiveRun("no guarded call is being executed here: current_call() is for the inside of a guarded tool")
    return call


class CallFailed(Exception):
    """Raised by a body: the tool itself has reported to the model that the call failed, and in which words.

    That is what the call came to, not an error of the call: for an opaque tool it is recorded as the result, so that a
    replay says the same. A tool that may be repeated is executed again by the next equal call.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)


class CallRaised(Exception):
    """Raised by a body: the tool raised ``error``, and the framework would give the model ``text`` as the result.

    For the receipt that is the error. An opaque call is ambiguous then, and the model is told so beside ``text``, or
    it would try again with other arguments.
    """

    def __init__(self, text: str, error: BaseException) -> None:
        self.text = text
        self.error = self.recorded_as = error
        super().__init__(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to."""

    value: Any = None
    """What the body returned, as a replay gives it; None where the call failed."""
    text: str | None = None
    """Where the call failed, or its outcome is not known: what the model is to read, marked as an error."""

    @property
    def is_error(self) -> bool:
        """Whether the model is to get ``text``, and not ``value``."""
        return self.text is not None


class ToolGuard:
    """How an agent's tool calls are guarded: in which run, with which effects, and what is told to the model.

    ``run``: the run that they are made in; by default the ambient one at the time of the call. ``effects``: tools'
    effects by name (`Effect` or its value), which count before what a tool declares of itself in the framework; other
    tools have the run's, which is ``opaque`` unless it says otherwise. ``on_unknown``: ``"tell"`` gives the model a
    text where nobody knows what became of a call, ``"raise"`` raises the error. ``control_flow``: the framework's
    exceptions by which a tool says that it has not carried out the call (yet).

    Raises InvalidSetting.
    """

    def __init__(
        self,
        run: Run | None = None,
        *,
        effects: Mapping[str, Effect | str] | None = None,
        on_unknown: OnUnknown = "tell",
        control_flow: tuple[type[BaseException], ...] = (),
    ) -> None:
        if on_unknown not in ("tell", "raise"):
            raise InvalidSetting(f"on_unknown={on_unknown!r}: use 'tell' or 'raise'")
        self._run = run
        self._effects = checked_effects("effects", effects)
        self._on_unknown = on_unknown
        self._control_flow = control_flow

    @property
    def run(self) -> Run:
        """The run that calls are made in. Raises NoActiveRun where none was given and none is ambient."""
        return self._run if self._run is not None else current_run()

    def effect_of(self, tool: str, declared: object = None) -> Effect:
        """The effect of a tool: as ``effects`` says, else as it declares itself, else the run's."""
        if tool in self._effects:
            return self._effects[tool]
        if declared is None:
            return self.run.options.effect
        try:
            return Effect(cast("str", declared))
        except ValueError as error:
            raise InvalidSetting(f"effect={declared!r} of tool {tool!r}: use one of {', '.join(Effect)}") from error

    async def call(
        self,
        tool: str,
        args: object,
        body: Body,
        *,
        distinct: str | None = None,
        declared: object = None,
        entry: SessionEntry | None = None,
    ) -> Outcome:
        """Execute ``body`` once for this call, or tell what became of it.

        ``args``: as the model gave them, plain JSON data. ``distinct``: what sets it apart from an equal call
        (`natsreceipts.numbering`). ``declared``: the effect that the tool declares, if any. ``entry``: the session's
        entry with the call, where the ambient one is not it.

        Raises what has to end the turn (see the module), what the body raised, and with ``on_unknown="raise"``
        AmbiguousCall, CallInFlight, CallTimedOut, ReceiptErased, CorruptRecord and PayloadMissing.
        """
        run, effect = self.run, self.effect_of(tool, declared)
        try:
            key = run.key(tool, args, distinct=distinct)
        except NotCanonical as error:
            return Outcome(text=_NOT_CANONICAL.format(tool=tool, path=error.path, reason=error.reason))
        if effect is Effect.READ:
            # No receipt is kept under this key. A tool that keeps its own makes an equal call in its body, which must
            # not be taken for this one.
            distinct = f"read {distinct or ''}"
        options: dict[str, Any] = {"effect": effect, "wait": _patience(run.options), "entry": entry}
        signal: BaseException
        executed: list[Call] = []
        execute = self._body(body, effect, run.options.not_applied, executed)
        try:
            value, text = reported(await run.execute(tool, args, execute, distinct=distinct, **options))
            return Outcome(value, text)
        except CallFailed as failed:
            return Outcome(text=failed.text)
        except CallRaised as raised:
            if effect is not Effect.OPAQUE:
                return Outcome(text=raised.text)
            revision, attempts = (executed[0].revision, executed[0].attempt) if executed else (0, 1)
            signal = AmbiguousCall(key, revision=revision, attempts=attempts, detail=str(raised)).because(raised.error)
            text = f"{raised.text}\n{signal.model_text}"
        except NotCarriedOut as said:
            if isinstance(said.signal, CallRaised):
                return Outcome(text=said.signal.text)
            text, signal = None, said.signal
        except ReceiptError as error:
            text, signal = model_text(error, key), error
        if text is None or self._on_unknown == "raise":
            raise signal
        await self._told(signal)
        return Outcome(text=text)

    async def _told(self, error: BaseException) -> None:
        """The host does not see the error, so that it is said here, and to the operator of the delivery."""
        # Not its text, which has that of the tool's own error in it.
        key, kind = getattr(error, "key", None), type(error).__name__
        extra = fields("model_told", key, error)
        _log.warning(
            "%s: the model is told of it, and the turn goes on (%s)", getattr(key, "kv_key", key), kind, extra=extra
        )
        operator = operated.get()
        if operator is not None and isinstance(error, tuple(NEEDS_A_PERSON)):
            await operator(error)

    def _body(
        self, body: Body, effect: Effect, not_applied: tuple[type[BaseException], ...], executed: list[Call]
    ) -> Callable[[Call], Awaitable[Any]]:
        async def execute(call: Call) -> Any:
            executed.append(call)
            token = _call.set(call)
            try:
                return success(await body())
            except CallFailed as failed:
                if effect is not Effect.OPAQUE:
                    raise
                return failure(failed.text)
            except CallRaised as raised:
                if isinstance(raised.error, (NotApplied, *not_applied)):
                    raise NotCarriedOut(raised) from raised.error
                raise
            except self._control_flow as signal:
                raise NotCarriedOut(signal) from signal
            finally:
                _call.reset(token)

        return execute


class NotCarriedOut(NotApplied):
    """The body says by ``signal`` that the call was not carried out, and can be made again."""

    def __init__(self, signal: BaseException) -> None:
        self.signal = signal
        super().__init__(str(signal) or f"the call was not carried out yet: {type(signal).__name__}")


def _patience(options: CallOptions) -> float:
    """Seconds to wait for another attempt: where the host leaves that open, until a dead one can be told from it."""
    default = CallOptions().wait
    return max(default, 1.2 * options.lease + 1) if options.wait == default else options.wait


def model_text(error: NatsReceiptsError, key: ReceiptKey) -> str | None:
    """What a model may be told of an error about the call ``key``; None where the turn has to end.

    An error about another call, which a body made, is the tool's own error.
    """
    said = getattr(error, "key", None)
    if said not in (key, key.kv_key):
        return None
    if isinstance(error, AmbiguousCall):
        return error.model_text
    if isinstance(error, CallInFlight) and not error.retry_after:
        return None  # it is made inside its own body: the tool is guarded twice
    if isinstance(error, CallTimedOut):
        if error.status == "ambiguous":
            return AmbiguousCall(key, revision=0, attempts=1).model_text
        return _TIMED_OUT.format(tool=key.tool, timeout=error.timeout)
    for kind, text in _TEXTS.items():
        if isinstance(error, kind):
            return text.format(tool=key.tool)
    return None


_NOT_CANONICAL: Final = (
    "The arguments of this call of {tool} cannot be used: {path}: {reason}. Nothing was executed. Give plain JSON."
)
_TIMED_OUT: Final = (
    "This call of {tool} took longer than {timeout:g} s and was stopped. Parts of it may have taken effect. It is safe "
    "to issue again with the same arguments; until that has succeeded, do not rely on its effect."
)
_NOT_ON_RECORD: Final = (
    "What became of this call of {tool} is no longer on record: it may or may not have taken effect. It was not "
    "executed now, and an identical call will be refused until a person has settled it. Do not assume either outcome: "
    "check what you can by other means, or report that it is pending."
)
_TEXTS: Final[dict[type[NatsReceiptsError], str]] = {
    CallInFlight: (
        "Another attempt of this call of {tool} is still at it, and it was waited for. Nothing was executed here, and "
        "the outcome is not known yet. Do not go around that with other arguments: an identical call will wait for "
        "that attempt, and return what it came to. Or report that it is pending."
    ),
    PayloadMissing: (
        "This call of {tool} was carried out. The result that it recorded can no longer be read. Do not issue it again."
    ),
    ReceiptErased: _NOT_ON_RECORD,
    CorruptRecord: _NOT_ON_RECORD,
}
