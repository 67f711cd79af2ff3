"""A receipt told to a person: what happened, revision by revision, what it means, and what to do next. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from natsreceipts.cli.output import duration, plain
from natsreceipts.decision import Effect
from natsreceipts.errors import InvalidName, UnsupportedRecord
from natsreceipts.resolving import names_of
from natsreceipts.shell import quoted_key, with_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from natsreceipts.receipt import Receipt, Revision

__all__ = ["EFFECTS", "Event", "advice", "claimed_by_not_applied", "events", "status_of"]

EFFECTS = {
    Effect.OPAQUE: "never executed again before somebody has settled it",
    Effect.RESUMABLE: "executed again after an attempt that died, without the steps that are on record",
    Effect.IDEMPOTENT: "executed again after an attempt that died",
    Effect.READ: "always executed",
}


class Event(NamedTuple):
    """What one revision says happened."""

    revision: Revision
    status: str
    text: str


def status_of(revision: Revision) -> str:
    """The status of a revision; ``erased`` and ``unreadable`` are those that no record has."""
    if revision.receipt is not None:
        return revision.receipt.status
    return "erased" if revision.erased else "unreadable"


def events(revisions: list[Revision]) -> Iterator[Event]:
    """What happened, oldest first."""
    before: Receipt | None = None
    for place, revision in enumerate(revisions):
        receipt = revision.receipt
        if revision.erased:
            text = "erased by hand: a delete marker stands here"
        elif receipt is None:
            text = f"cannot be read: {getattr(revision.problem, 'reason', None) or revision.problem}"
        elif before is None:
            gap = "the first revision that is still kept: " if not _begins(receipt) and place == 0 else ""
            text = gap + _happened(receipt, None)
        else:
            text = _happened(receipt, before)
        yield Event(revision, status_of(revision), plain(text))
        before = receipt


def _begins(receipt: Receipt) -> bool:
    return receipt.status in ("running", "withdrawn") and receipt.attempts <= 1


def _happened(now: Receipt, before: Receipt | None) -> str:
    by = f"by {now.worker}" if now.worker else "by nobody that is on record"
    settled = now.resolved is not None and (before is None or before.resolved != now.resolved)
    if before is not None and _fenced(now, before):
        marks = ", ".join(f"{session} at log position {at}" for session, at in (now.record.fences or {}).items())
        return f"fenced: a session was closed over this call ({marks})"
    match now.status:
        case "running":
            return _running(now, before, by)
        case "completed":
            if settled and now.resolved is not None:
                return f"settled as completed by {now.resolved.by}: {now.resolved.reason}"
            if before is not None and before.status == "failed":
                return f"completed {by}, which came back after it was declared failed"
            return f"completed {by}"
        case "failed":
            if settled and now.resolved is not None:
                return f"settled as not applied by {now.resolved.by}: {now.resolved.reason}"
            kind = "had no effect" if now.record.not_applied else "ended in an error"
            return f"attempt {now.attempts} {kind}{_because(now)}"
        case "ambiguous":
            return f"attempt {now.attempts} may or may not have taken effect{_because(now)}"
        case "withdrawn":
            return "withdrawn: the model was told that this call never started"


def _running(now: Receipt, before: Receipt | None, by: str) -> str:
    lease = f", lease {duration(now.lease)}" if now.lease else ""
    if before is not None and before.record.holder == now.record.holder and before.attempts == now.attempts:
        if new := [step for step in now.steps if step not in before.steps]:
            return f"step {', '.join(new)} on record {by}"
        if before.status == "ambiguous":
            return f"taken back {by}, which goes on"
        return f"lease renewed {by}{lease}"
    if before is not None and before.status in ("running", "ambiguous"):
        return f"attempt {now.attempts} takes over from attempt {before.attempts} {by}{lease}"
    return f"attempt {now.attempts} begins {by}{lease}"


def _fenced(now: Receipt, before: Receipt) -> bool:
    return now.record.fences != before.record.fences and now.status == before.status and now.attempts == before.attempts


def _because(receipt: Receipt) -> str:
    return f": {receipt.error.type}: {receipt.error.message}" if receipt.error is not None else ""


_FIND_OUT = (
    "Find out in the outside world whether the call took effect: the provider knows it by the idempotency key, if the "
    "tool passed that on. Then settle it:"
)


def advice(key: str, revisions: list[Revision], lease_left: float | None, *, bucket: str, lost: str) -> list[str]:
    """What to do about a key, in sentences; a line that begins with ``$`` is a command.

    ``lost``: what callers get where the last record's result cannot be had any more, else empty.
    """
    newest, receipt = revisions[-1], revisions[-1].receipt
    settle = "$ natsreceipts receipts resolve"
    completed = with_key(settle, key, "--by YOU --reason WHY --completed RESULT_AS_JSON")
    commands = [completed, with_key(settle, key, "--by YOU --reason WHY --not-applied")]
    last = next((revision.receipt for revision in reversed(revisions) if revision.receipt is not None), None)
    put_back = f"$ nats kv revert {bucket} {_before_dashes(key)} {last.revision}" if last is not None else ""
    if newest.erased:
        if last is not None and last.status == "completed" and lost:
            said = (
                f"The call is refused while this stands here. It was completed, but its result cannot be had any more: "
                f"with revision {last.revision} back, callers get {lost}. Restore the object from a backup and put "
                f"that revision back; or settle it with what you know of the result, null where that is nothing:"
            )
            return [said, put_back, completed]
        if last is not None and last.status == "completed":
            kept = f"it was completed, and revision {last.revision} has its result: put that back."
            return [f"The call is refused while this stands here; {kept}", put_back]
        try:
            names_of(key, revisions)
        except InvalidName as unknown:
            return [f"What happened to this call is no longer known, and it is refused. Of the key, {unknown.reason}."]
        return [f"What happened to this call is no longer known, and it is refused. {_FIND_OUT}", *commands]
    if isinstance(newest.problem, UnsupportedRecord):
        return ["A newer version of natsreceipts wrote this: upgrade it here. Nothing is executed until then."]
    if receipt is None:
        said = "Nothing is executed while this cannot be read. Find out who wrote it"
        if last is None:
            return [f"{said}."]
        more = f" Its result cannot be had any more, so callers then get {lost}." if lost else ""
        return [f"{said}, and put back the last revision that can be read.{more}", put_back]
    match receipt.status:
        case "completed" if lost:
            said = f"The call is not executed again, and every later attempt gets {lost}"
            return [f"{said}: restore the object from a backup of the object store, or go on without the result."]
        case "completed":
            return ["Nothing: every later attempt gets this result."]
        case "withdrawn":
            return ["Nothing: the model may issue the call anew."]
        case "failed" if receipt.record.not_applied or receipt.effect is not Effect.OPAQUE:
            return ["Nothing: the next attempt executes the call."]
        case "failed":
            return [f"An opaque caller is refused. {_FIND_OUT}", *commands]
        case "ambiguous":
            return [f"It is refused until it is settled. {_FIND_OUT}", *commands]
        case "running" if lease_left is not None and lease_left > 0:
            worker = plain(receipt.worker or "unknown")
            return [f"Wait: its worker ({worker}) is at it, and has {duration(lease_left)} to show that it lives."]
        case "running" if receipt.effect is not Effect.OPAQUE:
            return ["Nothing: its lease is over, and the next attempt takes over."]
        case "running":
            return [f"Its lease is over, so the next caller finds it ambiguous. {_FIND_OUT}", *commands]


def _before_dashes(key: str) -> str:
    return f"-- {key}" if key.startswith("-") else quoted_key(key)


def claimed_by_not_applied(receipt: Receipt | None, *, even_if_running: bool) -> str:
    """What a person says with ``--not-applied``."""
    worker = f" ({plain(receipt.worker)})" if receipt is not None and receipt.worker else ""
    stopped = f", that its worker{worker} is stopped" if even_if_running else ""
    return (
        f"You say that this call did not take effect{stopped}, and that nothing of it can take effect any more: no "
        f"request is still under way. The next attempt executes it again."
    )
