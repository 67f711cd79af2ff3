"""``natsreceipts sessions``: the logs of sessions, as they stand and as they grow, and what wake would do."""

from __future__ import annotations

import contextlib
import json as jsonlib
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.output import duration, instant, plain
from natsreceipts.cli.shapes import rfc3339
from natsreceipts.cli.silence import Silences
from natsreceipts.cli.verb import AsJson, Session, group, verb
from natsreceipts.errors import InvalidName, SessionBusy
from natsreceipts.identity import name_from_token
from natsreceipts.shell import with_key
from natsreceipts.transcript import closable_by_append, view_of
from natsreceipts.wire import EntryRecord

if TYPE_CHECKING:
    from natsreceipts.cli.output import Out
    from natsreceipts.entries import SessionEntry
    from natsreceipts.sessions import LoadedSession, SessionLog
    from natsreceipts.toolkit import Toolkit

__all__ = ["app"]

app = group("Look at the logs of sessions, and at what waking one would do.")

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="A session's key, TENANT.SESSION, as `ls` prints it.", show_default=False)
]

_LONGEST = 400
"""Characters of a message that are shown of a session; --json has it all."""


def _opened(toolkit: Toolkit, key: str) -> SessionLog:
    tenant, dot, session = key.partition(".")
    if not dot or "." in session:
        raise InvalidName("session key", key, "it is not TENANT.SESSION, as `natsreceipts sessions ls` prints it")
    names = name_from_token(tenant), name_from_token(session)
    if names[0] is None or names[1] is None:
        raise InvalidName("session key", key, "one of its names is hashed: look at it with `nats stream view`")
    return toolkit.sessions.open(names[0], names[1])


async def _loaded(log: SessionLog, key: str) -> LoadedSession:
    loaded = await log.load()
    if not loaded.all_entries:
        raise Failure(
            f"there is no session {key}: nothing was ever appended, or it has expired. See `natsreceipts sessions ls`",
            Exit.NOT_FOUND,
        )
    return loaded


def _as_json(key: str, entry: SessionEntry) -> dict[str, Any]:
    """An entry: ``key``, ``seq``, ``time``, and its record as it stands on the stream."""
    said: dict[str, Any] = {"run_id": entry.run, "close": entry.close, "receipt": entry.receipt}
    record = EntryRecord(
        v=1,
        id=entry.id,
        parent_id=entry.parent_id,
        kind=entry.kind,
        dialect=entry.dialect,
        body=entry.body,
        **{name: value for name, value in said.items() if value is not None},
    )
    head = {"key": key, "seq": entry.seq, "time": rfc3339(entry.time) if entry.time is not None else None}
    return head | jsonlib.loads(record.to_bytes())


@verb(app, "ls")
async def ls(
    session: Session,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    json: AsJson = False,
) -> None:
    """List sessions: the server's time of the last entry, its sequence, and the session's key."""
    found = 0
    async with session.toolkit() as toolkit:
        async for one in toolkit.sessions.list(tenant=tenant):
            if json:
                session.out.json(
                    {
                        "key": one.key,
                        "tenantId": one.tenant,
                        "sessionId": one.session,
                        "lastSeq": one.last_seq,
                        "updated": rfc3339(one.updated),
                    }
                )
            else:
                if not found and session.out.console.is_terminal:
                    session.out.line((f"{'UPDATED (server time)':<21} {'LAST SEQ':>8}  KEY", "bold"))
                session.out.line(f"{instant(one.updated)}  {one.last_seq:>8}  {one.key}")
            found += 1
    if not found and not json:
        session.remark("no session matches")


@verb(app, "show")
async def show(
    session: Session,
    key: Key,
    branches: Annotated[
        bool, typer.Option("--all", help="The entries of all branches, not of the active one alone.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show a session's entries, with the server's times, and which calls have no result."""
    async with session.toolkit() as toolkit:
        log = _opened(toolkit, key)
        loaded = await _loaded(log, key)
    active = {entry.id for entry in loaded.entries}
    for entry in loaded.all_entries if branches else loaded.entries:
        if json:
            session.out.json(_as_json(key, entry) | ({"active": entry.id in active} if branches else {}))
        else:
            _tell(session.out, entry, left="" if entry.id in active else "  (on no active branch)")
    if json:
        return
    open_calls = closable_by_append(loaded.messages, loaded.suspended, dialect=log.dialect)
    for call in open_calls:
        session.out.line((f"without a result: {plain(call.tool_name)} ({plain(call.tool_call_id)})", "bold yellow"))
    for call_id in sorted(loaded.suspended):
        session.out.line(f"on hold: {plain(call_id)}")
    if open_calls:
        tools = sorted({call.tool_name for call in open_calls})  # whatever a model has written
        names = " ".join(f"--guarded {shlex.quote(plain(name))}" for name in tools)
        for line in session.place.in_all([with_key("$ natsreceipts sessions wake", key, f"--dry-run {names}")]):
            session.out.line(f"  {line}")


@verb(app, "tail")
async def tail(
    session: Session,
    key: Key,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Entries that are there already.", min=0)] = 10,
    json: AsJson = False,
) -> None:
    """Show the last entries of a session, of all branches, and then every further one, until Ctrl-C."""
    async with session.toolkit() as toolkit:
        log = _opened(toolkit, key)
        there = [entry.seq for entry in (await log.load()).all_entries]
        first = there[-lines] if 0 < lines <= len(there) else 0 if lines else (there[-1] + 1 if there else 0)
        async with contextlib.aclosing(log.watch(unreachable=Silences(session))) as entries:
            async for entry in entries:
                if entry.seq < first:
                    continue
                if json:
                    session.out.json(_as_json(key, entry))
                else:
                    _tell(session.out, entry)


def _tell(out: Out, entry: SessionEntry, *, left: str = "") -> None:
    time = instant(entry.time, fine=True) if entry.time is not None else "-"
    what = _what(entry)
    run = f"  run {plain(entry.run)}" if entry.run else ""
    out.line(f"{entry.seq}  {time}  ", (what, "cyan"), f"{run}{left}")
    if entry.tool_call_ids:
        out.paragraph(plain(", ".join(entry.tool_call_ids)), indent="    ")
    elif entry.message is not None:
        _tell_message(out, entry, entry.message)
    if entry.receipt is not None:
        said = entry.receipt
        out.line(f"    from its receipt, {said.status} at revision {said.revision}: {said.key}")


def _what(entry: SessionEntry) -> str:
    if entry.close is not None:
        return f"close, {entry.close.error_kind}"
    role = (entry.message or {}).get("role") or (entry.message or {}).get("type")
    return f"{entry.kind} of {role}" if isinstance(role, str) and role.isidentifier() else entry.kind


def _tell_message(out: Out, entry: SessionEntry, message: dict[str, Any]) -> None:
    view = view_of(message, dialect=entry.dialect)
    for call in view.calls:
        arguments = call.arguments if call.arguments is not None else call.raw
        out.line(f"    calls {plain(call.name)} ({plain(call.id)}) {_short(arguments)}")
    for result in view.results:
        out.line(f"    result of {plain(result.id)}")
    if not view.calls:
        out.line(f"    {_short(message.get('content', message))}")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False)
    return plain(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters, --json has all)")


@verb(app, "wake")
async def wake(
    session: Session,
    key: Key,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Required: nothing is written.")] = False,
    guarded: Annotated[
        list[str] | None,
        typer.Option(
            help="A tool whose calls leave receipts, keyed by the model's arguments as they are; may be repeated.",
            metavar="TOOL",
        ),
    ] = None,
    effect: Annotated[
        list[str] | None,
        typer.Option(help="The effect of another tool, as search=read; may be repeated.", metavar="TOOL=EFFECT"),
    ] = None,
    json: AsJson = False,
) -> Exit:
    """Tell what waking a session would do: for each call without a result, what its receipt says and what to append.

    Waking itself is for the worker, which knows how its calls are keyed. A receipt that is not found here may stand
    under another key: where a tool's arguments are bound with defaults, or hashed with a secret.
    """
    if not dry_run:
        raise Failure(
            "only --dry-run here: wake a session in its worker, with session.wake(guarded=…), which knows its tools",
            Exit.USAGE,
        )
    effects = dict(_effect(text) for text in effect or [])
    async with session.toolkit() as toolkit:
        log = _opened(toolkit, key)
        await _loaded(log, key)
        try:
            report = await log.wake(guarded=dict.fromkeys(guarded or [], _as_they_are), effects=effects, dry_run=True)
        except SessionBusy as busy:
            if json:
                session.out.json({"key": key, "busy": True, "retryAfterSeconds": round(busy.retry_after, 3)})
            else:
                session.out.line(
                    f"wake would refuse: {plain(', '.join(busy.calls))} may be running under a live lease, for "
                    f"{duration(busy.retry_after)} more at most"
                )
            return Exit.DONE
    for call in report.recovered:
        if json:
            session.out.json(
                {
                    "key": key,
                    "toolCallId": call.tool_call_id,
                    "toolName": call.tool_name,
                    "errorKind": call.error_kind,
                    "text": call.text,
                    "why": call.why,
                    "receiptKey": call.kv_key,
                    "receiptStatus": call.said,
                    "receiptRevision": call.revision,
                }
            )
            continue
        what = f"would be closed, {call.error_kind}" if call.error_kind else "would get what the receipt has"
        session.out.line((f"{plain(call.tool_name)} ({plain(call.tool_call_id)})", "bold"), f" {what}")
        if call.kv_key is not None:
            session.out.line(f"    receipt {call.said}: {call.kv_key}")
        session.out.paragraph(plain(call.why), indent="    ")
        session.out.paragraph(f"the model would read: {_short(call.text)}", indent="    ", style="dim")
    if not report.recovered and not json:
        session.out.line("nothing to do: every call has a result, or is on hold")
    return Exit.DONE


def _as_they_are(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments


def _effect(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise Failure(f"--effect {text}: use TOOL=EFFECT, as search=read", Exit.USAGE)
    return name, value
