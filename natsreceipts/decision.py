"""What to do about the receipt that was found. Pure: no clock, no NATS, no I/O.

==================================  ===========  =====================
state                               opaque       idempotent, resumable
==================================  ===========  =====================
absent                              execute 1    execute 1
completed                           replay       replay
failed, n attempts                  execute n+1  execute n+1
running, n attempts, lease live     wait         wait
running, n attempts, lease expired  ambiguous    execute n+1
==================================  ===========  =====================

A ``read`` is always executed, as attempt 1: it has no receipt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, TypeAlias

from natsreceipts.errors import brief

__all__ = [
    "Absent",
    "Ambiguous",
    "Completed",
    "Decision",
    "Effect",
    "Execute",
    "Failed",
    "Landed",
    "NotLanded",
    "ReceiptState",
    "Replay",
    "Running",
    "Unknown",
    "Verdict",
    "Wait",
    "decide",
    "stricter",
]


class Effect(StrEnum):
    """What kind of side effect a tool has. What is not known to be harmless is ``OPAQUE``."""

    READ = "read"
    """Changes nothing that matters (the host's word): no receipt at all."""
    IDEMPOTENT = "idempotent"
    """Once or twice is the same: executed again after a dead attempt."""
    RESUMABLE = "resumable"
    """A write that records its steps: executed again, and recorded steps are skipped."""
    OPAQUE = "opaque"
    """One indivisible write that leaves no trail here: after a dead attempt nobody knows."""


_BY_STRICTNESS = (Effect.READ, Effect.IDEMPOTENT, Effect.RESUMABLE, Effect.OPAQUE)


def stricter(a: Effect, b: Effect) -> Effect:
    """Return the one that allows less: opaque over resumable over idempotent over read."""
    return max(Effect(a), Effect(b), key=_BY_STRICTNESS.index)


# ---------------------------------------------------------------- what was found


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no receipt, or one that was withdrawn before anybody claimed it."""

    kind: ClassVar[Literal["absent"]] = "absent"


@dataclass(frozen=True, slots=True)
class Completed:
    """The result is on record."""

    kind: ClassVar[Literal["completed"]] = "completed"


@dataclass(frozen=True, slots=True)
class Failed:
    """The last of ``attempts`` (1, 2, …) ended, and another one may follow."""

    attempts: int
    kind: ClassVar[Literal["failed"]] = "failed"


@dataclass(frozen=True, slots=True)
class Running:
    """The last of ``attempts`` (1, 2, …) claimed the call and has not said how it ended.

    ``lease_expired`` is judged by the server's clock, never by a process's. A receipt that is
    already ambiguous is one whose lease has expired.
    """

    attempts: int
    lease_expired: bool
    kind: ClassVar[Literal["running"]] = "running"


ReceiptState: TypeAlias = Absent | Completed | Failed | Running


# ---------------------------------------------------------------- what to do


@dataclass(frozen=True, slots=True)
class Execute:
    """Claim the call as number ``attempt`` (1, 2, …), then execute it."""

    attempt: int
    kind: ClassVar[Literal["execute"]] = "execute"


@dataclass(frozen=True, slots=True)
class Replay:
    """Do not execute: the recorded result is this call's result."""

    kind: ClassVar[Literal["replay"]] = "replay"


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not execute now: another attempt is alive. Come back later."""

    reason: str
    kind: ClassVar[Literal["wait"]] = "wait"


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Do not execute: the effect may or may not have happened, and the receipt cannot tell."""

    reason: str
    kind: ClassVar[Literal["ambiguous"]] = "ambiguous"


Decision: TypeAlias = Execute | Replay | Wait | Ambiguous


def decide(state: ReceiptState, effect: Effect | str) -> Decision:
    """Return what to do about a call whose receipt is in ``state``. Total and pure.

    ``effect`` is the stricter of the record's and the caller's, as an :class:`Effect` or its value.
    Raises ValueError for an unknown effect or state, for ``attempts`` that is not an int of at
    least 1 (a bool is none), and for a ``lease_expired`` that is not a bool.
    """
    effect = Effect(effect)
    if problem := _problem(state):
        raise ValueError(problem)
    if effect is Effect.READ:
        return Execute(attempt=1)
    match state:
        case Absent():
            return Execute(attempt=1)
        case Completed():
            return Replay()
        case Failed(attempts):
            return Execute(attempt=attempts + 1)
        case Running(attempts, lease_expired=False):
            return Wait(f"attempt {attempts} holds a live lease")
        case Running(attempts):
            # The lease is over and nothing more was recorded. Who died, and when?
            #
            #   claim          enter          effect         settle         lease ends
            #   --|--------------|--------------|--------------|----------------|----> server's time
            #        died here:     died here:     died here:     (recorded:
            #        no effect      perhaps        it landed       not this case)
            #
            #   ...or nobody died, and a stalled worker wakes up after the lease and goes on.
            #
            # From here all of these look alike. Only an effect that can be repeated may be repeated.
            if effect is Effect.OPAQUE:
                return Ambiguous(f"attempt {attempts} claimed the call and its lease ended without an outcome")
            return Execute(attempt=attempts + 1)


def _problem(state: ReceiptState) -> str | None:
    if type(state) not in (Absent, Completed, Failed, Running):
        return f"not a receipt state: {type(state).__name__}"
    if isinstance(state, Failed | Running) and (type(state.attempts) is not int or state.attempts < 1):
        return f"attempts is an int that counts from 1, not {brief(state.attempts)}"
    if isinstance(state, Running) and type(state.lease_expired) is not bool:
        return f"lease_expired is a bool, not {brief(state.lease_expired)}"
    return None


# ---------------------------------------------------------------- what a verifier answers


@dataclass(frozen=True, slots=True)
class Landed:
    """The verifier saw the effect in the outside world; ``result`` becomes the call's result."""

    result: object = None
    kind: ClassVar[Literal["landed"]] = "landed"


@dataclass(frozen=True, slots=True)
class NotLanded:
    """The effect did not happen *and can no longer happen*: the call may be executed again."""

    kind: ClassVar[Literal["not_landed"]] = "not_landed"


@dataclass(frozen=True, slots=True)
class Unknown:
    """The verifier could not tell either; the call stays ambiguous."""

    kind: ClassVar[Literal["unknown"]] = "unknown"


Verdict: TypeAlias = Landed | NotLanded | Unknown
