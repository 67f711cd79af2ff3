"""What a host does to a session's log: append, suspend and resume, compact, name the entry of a call."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from pydantic_core import from_json, to_json

from natsreceipts.entries import remember_entry
from natsreceipts.errors import InvalidName, InvalidSetting, InvalidTranscript, brief
from natsreceipts.identity import key_token
from natsreceipts.run import Run, active_run
from natsreceipts.session_store import entry_id_of
from natsreceipts.transcript import closable_by_append, tool_calls_of

if TYPE_CHECKING:
    from natsreceipts.dialects.base import Message, ToolCall
    from natsreceipts.entries import SessionEntry
    from natsreceipts.session_store import SessionStore

__all__ = ["append_message", "checked_ids", "compact", "entry_of", "resume", "suspend"]

_LONGEST_NAME = 4096
"""Characters of a tool call's id or name: each stands in its close several times."""


async def append_message(
    store: SessionStore, message: Message, *, run: str | Run | None, entry_id: str | None = None
) -> SessionEntry:
    """Append one message, verbatim (see `natsreceipts.SessionLog.append`)."""
    if entry_id is not None and (
        type(cast("object", entry_id)) is not str or not entry_id.isprintable() or not entry_id
    ):
        raise InvalidName("entry_id", entry_id, "use a non-empty printable string")
    await store.ensure_loaded()
    if entry_id is not None and entry_id not in store.entries:
        await store.glance()
    calls = tool_calls_of(message, dialect=store.dialect)
    body = _plain(store, message)
    entry = store.entries.get(entry_id) if entry_id is not None else None
    if entry is None:
        _check_calls(store, calls)
        entry = await store.append("message", body, run=_run_of(store, run), entry_id=entry_id)
    else:
        store.same(entry, body)
    if calls:
        remember_entry(entry)
    return entry


def _check_calls(store: SessionStore, calls: list[ToolCall]) -> None:
    """Refuse calls that nobody could close or decide on any more."""
    for call in calls:
        if max(len(call.id), len(call.name)) > _LONGEST_NAME:
            raise InvalidTranscript(
                store.dialect, 0, f"the id or the name of a call has more than {_LONGEST_NAME:,} characters"
            )
        if call.id in store.branch().suspended:
            raise InvalidSetting(
                f"session {store.session} of {store.tenant}: {call.id!r} is on hold, and could not be decided on any "
                f"more after another call of that id: give this one an id of its own, or resume or answer it first"
            )


def _plain(store: SessionStore, message: Message) -> Message:
    try:
        plain = from_json(to_json(message, inf_nan_mode="null"))
    except (ValueError, RecursionError) as error:
        raise InvalidTranscript(store.dialect, 0, f"it is not plain JSON: {error}") from error
    if plain != message:
        raise InvalidTranscript(store.dialect, 0, "it is not plain JSON: it would not be read back as it is")
    return plain


def _run_of(store: SessionStore, run: str | Run | None) -> str | None:
    if run is None:
        run = active_run()
        if run is None or run.tenant != store.tenant:
            return None
    if isinstance(run, Run):
        if run.tenant != store.tenant:
            raise InvalidSetting(f"run {run.run} is of tenant {run.tenant}, and the session of {store.tenant}")
        return run.run
    try:
        key_token(run)
    except InvalidName as error:
        raise InvalidName("run", error.value, error.reason) from None
    return run


async def suspend(store: SessionStore, tool_call_ids: Collection[str]) -> SessionEntry:
    """Put calls on hold."""
    await store.ensure_loaded()
    store.check_known()
    branch = store.branch()
    ids = _ids(tool_call_ids)
    messages = [cast("Message", entry.message) for entry in branch.shown]
    waiting = {orphan.tool_call_id for orphan in closable_by_append(messages, dialect=store.dialect)}
    if unknown := [each for each in ids if each not in waiting]:
        raise InvalidName("tool call", unknown[0], "it is no call of the active branch that has no result")
    return await store.append("suspend", {"toolCallIds": ids}, run=_run_of_calls(store, ids))


async def resume(store: SessionStore, tool_call_ids: Collection[str]) -> SessionEntry:
    """Release calls from hold."""
    await store.ensure_loaded()
    store.check_known()
    ids = _ids(tool_call_ids)
    if unknown := [each for each in ids if each not in store.branch().suspended]:
        raise InvalidName("tool call", unknown[0], "it is not suspended in the active branch")
    entry = await store.append("resume", {"toolCallIds": ids}, run=_run_of_calls(store, ids))
    remember_entry(entry)
    return entry


def _run_of_calls(store: SessionStore, ids: list[str]) -> str | None:
    runs = {store.branch().sites[each].entry.run for each in ids if each in store.branch().sites}
    if len(runs) > 1:
        raise InvalidSetting(f"the calls {', '.join(ids)} are of several runs: suspend and resume each run's alone")
    return runs.pop() if runs else None


async def entry_of(store: SessionStore, tool_call_id: str) -> SessionEntry:
    """The entry that a claim of this call names."""
    await store.ensure_loaded()
    store.check_known()
    branch = store.branch()
    if not isinstance(cast("object", tool_call_id), str):
        raise InvalidName("tool call", tool_call_id, "use the id of a tool call, a string")
    if tool_call_id in branch.suspended:
        raise InvalidName("tool call", tool_call_id, "it is suspended: resume it first")
    if tool_call_id not in branch.sites:
        raise InvalidName("tool call", tool_call_id, "the active branch, as far as it was read, does not call it")
    entry = branch.sites[tool_call_id].claims_from
    remember_entry(entry)
    return entry


async def compact(store: SessionStore, message: Message, *, keep_from: SessionEntry | str | None) -> SessionEntry:
    """Let one message stand for what is before an entry."""
    await store.ensure_loaded()
    store.check_known()
    if tool_calls_of(message, dialect=store.dialect):
        raise InvalidSetting("the message of a compaction cannot call tools: nobody would answer")
    branch = store.branch()
    places = {entry.id: index for index, entry in enumerate(branch.shown) if entry.kind != "compaction"}
    kept = entry_id_of(keep_from)
    if kept is not None and kept not in places:
        raise InvalidName("entry", kept, "it is no message of the active branch that is still shown")
    cut = places[kept] if kept is not None else len(branch.shown)
    messages = [cast("Message", entry.message) for entry in branch.shown]
    waiting = [each.tool_call_id for each in closable_by_append(messages[:cut], dialect=store.dialect)]
    if waiting:
        raise InvalidSetting(
            f"the calls {', '.join(waiting)} have no result before that entry: keep them, or wake the session first"
        )
    return await store.append("compaction", {"message": _plain(store, message), "keepFrom": kept})


def checked_ids(what: str, ids: object) -> list[str]:
    """The tool-call ids in a collection, each once. Raises InvalidSetting for anything else."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Collection):
        raise InvalidSetting(f"{what}={brief(ids)}: use a list or set of tool-call ids")
    found = cast("Collection[object]", ids)
    if not all(isinstance(each, str) for each in found):
        raise InvalidSetting(f"{what}={brief(cast('object', ids))}: use strings, the ids of tool calls")
    return list(dict.fromkeys(cast("Collection[str]", found)))


def _ids(tool_call_ids: Collection[str]) -> list[str]:
    ids = checked_ids("tool_call_ids", tool_call_ids)
    if not ids:
        raise InvalidSetting(f"tool_call_ids={brief(tool_call_ids)}: name at least one tool call")
    return ids
