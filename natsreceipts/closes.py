"""What a model is told about a call that was cut off: what is known of it, and what to check before it is repeated.

======================  =============================  =============================================================
close                   error kind                     when
======================  =============================  =============================================================
never started           interrupted_never_started      a live caller did not see it start, or wake fenced it
read                    interrupted_outcome_unknown    a tool that only reads
idempotent              interrupted_outcome_unknown    a tool that may be repeated
write                   interrupted_outcome_unknown    every other tool, and every unknown one
ambiguous               interrupted_outcome_unknown    a receipt says that an opaque attempt may have had its effect
repeatable              interrupted_outcome_unknown    a receipt says that a resumable attempt was cut off
======================  =============================  =============================================================

Pure. The texts are for models: their words may change, the error kinds do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from natsreceipts.decision import Effect
from natsreceipts.dialects.base import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = [
    "CloseReason",
    "InterruptedResult",
    "ToolCallRef",
    "close_calls",
    "close_reason",
    "failure_text",
    "interrupted_results",
]


class ToolCallRef(Protocol):
    """Anything that names a call: an `OrphanToolCall` does."""

    @property
    def tool_call_id(self) -> str:
        """The call's id in the transcript."""
        ...

    @property
    def tool_name(self) -> str:
        """The tool that was called."""
        ...


class CloseReason(StrEnum):
    """Why a call is closed: what is known about it."""

    NEVER_STARTED = "never_started"
    READ = "read"
    IDEMPOTENT = "idempotent"
    WRITE = "write"
    AMBIGUOUS = "ambiguous"
    """Guarded and opaque: an identical call is refused until it is settled."""
    REPEATABLE = "repeatable"
    """Guarded, and made to be repeated: an identical call goes on where it stopped."""

    @property
    def error_kind(self) -> ErrorKind:
        """What a close for this reason says to a machine."""
        if self is CloseReason.NEVER_STARTED:
            return ErrorKind.INTERRUPTED_NEVER_STARTED
        return ErrorKind.INTERRUPTED_OUTCOME_UNKNOWN


@dataclass(frozen=True, slots=True)
class InterruptedResult:
    """A close, before it is a message of any dialect. ``text`` is what the model reads."""

    tool_call_id: str
    tool_name: str
    text: str
    error_kind: ErrorKind


_IN_FULL: Final[dict[CloseReason, str]] = {
    CloseReason.NEVER_STARTED: (
        "This call of {tool} was never started: the session was interrupted first. Nothing was executed, so there is "
        "nothing to check or to undo. If it is still wanted, issue it again."
    ),
    CloseReason.READ: (
        "This call of {tool} was interrupted, and what it returned is lost, if it ran at all. The tool only reads, so "
        "nothing was changed either way. If you still need what it returns, issue it again."
    ),
    CloseReason.IDEMPOTENT: (
        "This call of {tool} was interrupted and its outcome is unknown: it may have taken effect in full, in part, or "
        "not at all. Repeating it with the same arguments leads to the same state as doing it once, so you may issue "
        "it again. Until you have, do not rely on its effect."
    ),
    CloseReason.WRITE: (
        "This call of {tool} was interrupted and its outcome is unknown: it may have taken effect in full, in part, or "
        "not at all. Assume none of these. It was not repeated, and repeating it blindly could do it twice: first "
        "look, by other means, at what it would have changed. If you cannot see that, ask before you issue it again."
    ),
    CloseReason.AMBIGUOUS: (
        "This call of {tool} was interrupted after it had been claimed, and its outcome is unknown: its receipt cannot "
        "tell whether it took effect. It was not repeated. In this run an identical call will be refused until a "
        "person or a check of the outside world has settled this one; do not go around that with other arguments. "
        "Check what you can by other means, or report that it is pending."
    ),
    CloseReason.REPEATABLE: (
        "This call of {tool} was interrupted and its outcome is unknown: parts of it may have taken effect. It is safe "
        "to issue again with the same arguments: what is on record is not done twice. Until that has succeeded, do not "
        "rely on its effect."
    ),
}

_IN_SHORT: Final[dict[CloseReason, str]] = {
    CloseReason.NEVER_STARTED: "never started, nothing was executed; issue it again if it is still wanted.",
    CloseReason.READ: "its result is lost, and nothing was changed; issue it again if you need it.",
    CloseReason.IDEMPOTENT: "its outcome is unknown; you may issue it again, and cannot rely on it until then.",
    CloseReason.WRITE: "its outcome is unknown; look at what it would have changed before you issue it again.",
    CloseReason.AMBIGUOUS: "its outcome is unknown; in this run an identical call will be refused until it is settled.",
    CloseReason.REPEATABLE: "its outcome is unknown; it is safe to issue again with the same arguments.",
}


def close_calls(reasons: Iterable[tuple[ToolCallRef, CloseReason]]) -> list[InterruptedResult]:
    """Return the closes of one batch of calls, each for its reason, in order.

    The first close for a reason says it in full; later ones name that call and keep to the gist.
    """
    first: dict[CloseReason, ToolCallRef] = {}
    closes: list[InterruptedResult] = []
    for call, reason in reasons:
        earlier = first.setdefault(reason, call)
        if earlier is call:
            text = _IN_FULL[reason].format(tool=call.tool_name)
        else:
            text = (
                f"Interrupted like the call of {earlier.tool_name} above, and the same holds for this call of "
                f"{call.tool_name}: {_IN_SHORT[reason]}"
            )
        closes.append(InterruptedResult(call.tool_call_id, call.tool_name, text, reason.error_kind))
    return closes


def interrupted_results(
    calls: Iterable[ToolCallRef],
    tool_effects: Mapping[str, Effect | str] | None = None,
    started: Collection[str] | None = None,
) -> list[InterruptedResult]:
    """Return the closes of one batch of calls of which nothing is on record.

    ``tool_effects`` gives tools' effects by name. A tool that is not in it, and a word that is no harmless effect,
    count as a write: an unknown tool is never said to be safe. ``started`` are the ids of the calls that a live caller
    saw start: a call that is not among them never did. Without it, nothing is known to have not started.

    Orphans of the kind ``result`` have no call that could be closed, and get nothing.
    """
    effects = tool_effects or {}
    return close_calls(
        (call, close_reason(call, effects, started)) for call in calls if getattr(call, "kind", None) != "result"
    )


def close_reason(
    call: ToolCallRef, effects: Mapping[str, Effect | str], started: Collection[str] | None = None
) -> CloseReason:
    """Return why a call is closed of which nothing is on record (see `interrupted_results`)."""
    if started is not None and call.tool_call_id not in started:
        return CloseReason.NEVER_STARTED
    effect = effects.get(call.tool_name)
    if effect == Effect.READ:
        return CloseReason.READ
    return CloseReason.IDEMPOTENT if effect == Effect.IDEMPOTENT else CloseReason.WRITE


def failure_text(error: str | None = None, reason: str | None = None) -> str:
    """Return what a model is told as the result of a call that a receipt says has failed.

    That is the error on record; where there is none, that the call was not carried out, and why if that is known
    (a person's reason for settling it so).
    """
    if error and error.strip():
        return error
    return f"the call was not carried out: {reason if reason and reason.strip() else 'no reason is on record'}"
