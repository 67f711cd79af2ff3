"""Reconcile: close the calls of a session that have no result, by what the log alone tells. And the person's marker.

Every close goes in behind the log's fence, so of two reconcilers one appends and the other finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from natsreceipts.closes import interrupted_results
from natsreceipts.decision import Effect
from natsreceipts.errors import InvalidSetting, SessionConflict, brief
from natsreceipts.transcript import (
    ErrorKind,
    OrphanToolCall,
    closable_by_append,
    interrupted_result_message,
    interruption_marker_message,
)
from natsreceipts.wire import CloseInfo

if TYPE_CHECKING:
    from collections.abc import Collection

    from natsreceipts.dialects.base import Message
    from natsreceipts.session_store import SessionStore

__all__ = ["ReconcileReport", "RecoveredCall", "append_marker", "closable", "reconcile"]


@dataclass(frozen=True, slots=True)
class RecoveredCall:
    """One call that had no result, and what was appended for it: all that a host needs to tell others of it."""

    tool_call_id: str
    tool_name: str
    entry_id: str
    """The entry with the result; empty where nothing was written (``dry_run``)."""
    text: str
    """What the model reads."""
    error_kind: ErrorKind | None
    """None where it is no close but what a receipt says that the call came to."""
    said: str | None = None
    """What the receipt said: its status, ``absent``, ``erased``, ``unreadable``; None where none was asked."""
    kv_key: str | None = None
    """The receipt that was asked."""
    revision: int = 0
    """The revision of the receipt that was read; 0 where there was none."""
    why: str = ""
    """Why this was appended, for people."""


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What reconcile or wake did. ``last_seq``: the sequence of the session's last entry after that."""

    recovered: tuple[RecoveredCall, ...]
    last_seq: int
    marker_id: str | None = None
    """The entry of the interruption marker, where one was appended."""


def checked_effects(what: str, effects: object) -> dict[str, Effect]:
    """Effects by tool name. Raises InvalidSetting for anything else."""
    if effects is None:
        return {}
    if not isinstance(effects, Mapping):
        raise InvalidSetting(f"{what}={brief(effects)}: use a mapping of tool names to effects")
    found: dict[str, Effect] = {}
    for name, effect in cast("Mapping[object, object]", effects).items():
        try:
            found[str(name)] = Effect(cast("str", effect))
        except ValueError as error:
            raise InvalidSetting(f"{what}[{brief(name)}]={brief(effect)}: use one of {', '.join(Effect)}") from error
    return found


def closable(store: SessionStore, suspended: Collection[str] = frozenset()) -> list[OrphanToolCall]:
    """The calls of the active branch, as far as it was read, that a close at its end would close."""
    branch = store.branch()
    messages = [cast("Message", entry.message) for entry in branch.shown]
    return closable_by_append(messages, branch.suspended | frozenset(suspended), dialect=store.dialect)


async def reconcile(
    store: SessionStore,
    *,
    effects: Mapping[str, Effect | str],
    suspended: Collection[str],
    started: Collection[str] | None,
) -> ReconcileReport:
    """Close what has no result (see `natsreceipts.reconcile_interrupted_session`)."""
    recovered: list[RecoveredCall] = []
    while True:
        await store.refresh()
        seen, sites = store.last_seq, store.branch().sites
        try:
            for result in interrupted_results(closable(store, suspended), effects, started):
                message = interrupted_result_message(result, dialect=store.dialect)
                kind = ErrorKind(result.error_kind)
                close = CloseInfo(tool_call_id=result.tool_call_id, error_kind=kind)
                run = sites[result.tool_call_id].entry.run
                entry = await store.append("message", message, run=run, close=close, expected=seen)
                seen = entry.seq
                recovered.append(
                    RecoveredCall(result.tool_call_id, result.tool_name, entry.id, result.text, kind, why="no result")
                )
        except SessionConflict:
            continue  # somebody else is at it: what is left to do is found anew
        return ReconcileReport(tuple(recovered), store.last_seq)


async def append_marker(store: SessionStore, *, tool_use_in_flight: bool) -> str:
    """Append the interruption marker (see `natsreceipts.append_interruption_marker`)."""
    await store.ensure_loaded()
    if waiting := closable(store):
        raise InvalidSetting(
            f"the call {waiting[0].tool_call_id} of {waiting[0].tool_name} has no result, so a message after it would "
            f"break the transcript: reconcile or wake the session first"
        )
    message = interruption_marker_message(tool_use_in_flight=tool_use_in_flight, dialect=store.dialect)
    return (await store.append("marker", message)).id
