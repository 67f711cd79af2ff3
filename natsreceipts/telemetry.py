"""What a toolkit tells of its work: events, the hooks that are handed them, and the hook that logs them.

    async with natsreceipts.connect(url, hooks=[log_events]) as toolkit:

A hook is called on the event loop, in the task whose call it is, right where the thing happened: it must return at
once. One that raises is logged once and breaks nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from natsreceipts.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from natsreceipts.identity import ReceiptKey

__all__ = [
    "CallDecided",
    "CallSettled",
    "DecisionKind",
    "DoubtSettled",
    "Event",
    "Hook",
    "Hooks",
    "LostLease",
    "RenewalFailed",
    "SessionWoken",
    "SettledAs",
    "ToolkitClosed",
    "WriteConflict",
    "WriteKind",
    "checked_hooks",
    "fields",
    "log_events",
]

_log = logging.getLogger("natsreceipts")

DecisionKind: TypeAlias = Literal["execute", "replay", "wait", "ambiguous", "withdrawn", "refused"]
"""`natsreceipts.Decision` in the first four; ``withdrawn`` is CallWithdrawn, and ``refused`` any other error."""

SettledAs: TypeAlias = Literal["completed", "failed", "ambiguous", "lost", "not_recorded"]
"""A status, where it stands in the receipt; ``lost``: the call had moved on; ``not_recorded``: that it stands there is
not known, and the process may have kept it."""

WriteKind: TypeAlias = Literal["claim", "renew", "settle", "judge", "resolve"]
"""A step of a resumable call is recorded by a ``renew``; ``judge`` makes a dead attempt ambiguous."""


class CallDecided(NamedTuple):
    """It was decided what to do about a guarded call, after the claim or instead of it.

    Once for each `run.call` and `run.execute` that leaves a receipt: not for a ``read``, and equal calls that share
    one execution are one.
    """

    key: ReceiptKey
    decision: DecisionKind
    attempt: int
    """The attempt that is to execute, or whose result is replayed; 0 where there is neither."""
    seconds: float | None
    """How long that took, with all waiting for another attempt; None where it was known without asking."""
    error: BaseException | None = None
    """What the caller gets instead of a result."""


class CallSettled(NamedTuple):
    """An attempt was ended, or it was tried to: what its receipt was to say of it."""

    key: ReceiptKey
    attempt: int
    status: SettledAs
    seconds: float
    error: BaseException | None = None
    """Why it is ``not_recorded``."""


class WriteConflict(NamedTuple):
    """A write was refused because the receipt had moved on; what follows is decided on what stands there.

    With ``claim`` this is how a call that was made before is usually found out.
    """

    key: ReceiptKey
    write: WriteKind


class DoubtSettled(NamedTuple):
    """Whether a write had landed was not known (its answer was lost, or late), and it was found out."""

    key: ReceiptKey
    write: WriteKind
    landed: bool
    """Whether it stands now, perhaps because it was sent again."""


class RenewalFailed(NamedTuple):
    """A lease could not be renewed by a heartbeat (which tries again) or by ``call.renew()``."""

    key: ReceiptKey
    attempt: int
    error: BaseException


class LostLease(NamedTuple):
    """An attempt lost its call before its outcome was on record. Once for each attempt."""

    key: ReceiptKey
    attempt: int


class SessionWoken(NamedTuple):
    """A session was woken (`SessionLog.wake`, and `interrupt` with ``guarded``), or could not be."""

    tenant: str
    session: str
    seconds: float
    recovered: int
    """How many calls were given a result or a close."""
    error: BaseException | None = None


class ToolkitClosed(NamedTuple):
    """The toolkit was closed: nothing follows. For hooks that hand things on later."""


Event: TypeAlias = (
    CallDecided | CallSettled | WriteConflict | DoubtSettled | RenewalFailed | LostLease | SessionWoken | ToolkitClosed
)
"""There may be further ones: a hook leaves alone what it does not know."""

Hook: TypeAlias = Callable[[Event], object]
"""A function of one event that is not async, and returns at once: what it returns is ignored."""


class Hooks:
    """The hooks of one toolkit."""

    __slots__ = ("_failed", "_hooks")

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = tuple(hooks)
        self._failed: set[int] = set()

    def emit(self, event: Event) -> None:
        """Hand an event to every hook. Whatever they raise stays here, but for what ends the interpreter."""
        for number, hook in enumerate(self._hooks):
            try:
                hook(event)
            except (Exception, asyncio.CancelledError):  # noqa: BLE001 - a hook may fail in its own way
                if number not in self._failed:
                    self._failed.add(number)
                    _log.exception("the hook %r failed at a %s; it is told once", hook, type(event).__name__)


def checked_hooks(hooks: object) -> Hooks | None:
    """The hooks of a toolkit; None where there are none. Raises InvalidSetting."""
    if not isinstance(hooks, Iterable):
        raise InvalidSetting(f"hooks={hooks!r}: use a list of functions of one event")
    given = list(cast("Iterable[Any]", hooks))
    for hook in given:
        if not callable(hook) or isinstance(hook, type):
            raise InvalidSetting(f"hooks: {hook!r} is no function of one event")
        called: object = getattr(hook, "__call__", None)  # noqa: B004 - whether an object's call is async
        if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(called):
            raise InvalidSetting(f"hooks: {hook!r} is async, and nobody would wait for it: use a function that is not")
    return Hooks(given) if given else None


def fields(
    event: str, key: ReceiptKey | str | None = None, error: BaseException | None = None, **more: object
) -> dict[str, object]:
    """The ``extra`` of a log record: what happened, to which receipt. No arguments, no results, no error's text."""
    found: dict[str, object] = {"natsreceipts.event": event}
    if key is not None:
        found["natsreceipts.key"] = key if isinstance(key, str) else key.kv_key
    if key is not None and not isinstance(key, str):
        found["gen_ai.tool.name"] = key.tool
    if error is not None:
        found["error.type"] = type(error).__name__
    found.update({f"natsreceipts.{name}": value for name, value in more.items() if value is not None})
    return found


_QUIET = ("execute", "replay")
_AS_INTENDED = ("completed", "failed")


def log_events(event: Event) -> None:
    """A hook that logs events on the logger ``natsreceipts``, with their fields as ``extra``.

    What is not as it should be is a warning, what was recovered or had to be found out is for information, the
    rest is for debugging. A renewal that failed is a warning anyway, so that this leaves it alone.
    """
    match event:
        case CallDecided(key, decision, attempt, seconds, error):
            level = logging.DEBUG if decision in _QUIET else logging.INFO
            if decision in ("ambiguous", "refused"):
                level = logging.WARNING
            elif attempt > 1 or (decision == "replay"):
                level = logging.INFO
            if _log.isEnabledFor(level):
                extra = fields("decided", key, error, decision=decision, attempt=attempt, seconds=seconds)
                _log.log(level, "%s: decided: %s, attempt %d", key.kv_key, decision, attempt, extra=extra)
        case CallSettled(key, attempt, status, seconds, error):
            level = logging.DEBUG if status == "completed" else logging.INFO
            if status not in _AS_INTENDED:
                level = logging.WARNING
            if _log.isEnabledFor(level):
                extra = fields("settled", key, error, status=status, attempt=attempt, seconds=seconds)
                _log.log(level, "%s: attempt %d settled as %s", key.kv_key, attempt, status, extra=extra)
        case WriteConflict(key, write):
            if _log.isEnabledFor(logging.DEBUG):
                extra = fields("conflict", key, write=write)
                _log.debug("%s: a %s was refused, the receipt had moved on", key.kv_key, write, extra=extra)
        case DoubtSettled(key, write, landed):
            outcome = "landed" if landed else "not_landed"
            extra = fields("doubt_settled", key, write=write, outcome=outcome)
            _log.info("%s: a %s in doubt was found out: %s", key.kv_key, write, outcome, extra=extra)
        case LostLease(key, attempt):
            extra = fields("lease_lost", key, attempt=attempt)
            _log.warning("%s: attempt %d lost its lease", key.kv_key, attempt, extra=extra)
        case SessionWoken(tenant, session, seconds, recovered, error):
            level = logging.INFO if recovered or error is not None else logging.DEBUG
            extra = fields("woken", None, error, tenant=tenant, session=session, recovered=recovered, seconds=seconds)
            said = "woken" if error is None else f"not woken ({type(error).__name__})"
            _log.log(level, "session %r of %r: %s, %d calls recovered", session, tenant, said, recovered, extra=extra)
        case _:
            pass
