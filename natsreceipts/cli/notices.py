"""``natsreceipts notices``: what was decided about runs, whom it was told, and whether they have heard it."""

from __future__ import annotations

import datetime as dt
import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.given_json import given_json
from natsreceipts.cli.output import instant, plain
from natsreceipts.cli.problems import Problems
from natsreceipts.cli.verb import AsJson, Session, group, verb
from natsreceipts.errors import InvalidName
from natsreceipts.identity import split_kv_key
from natsreceipts.notice import endpoint_of
from natsreceipts.shell import with_key

if TYPE_CHECKING:
    from natsreceipts.notice_record import Notice
    from natsreceipts.notices import NoticeBoard

__all__ = ["app"]

app = group("Look at run notices, file them, and put on record that a turn carried one.")

_SAFE = (1 << 53) - 1
"""The largest int that every double below it has a next one for."""

Tenant = Annotated[str | None, typer.Option(help="At the endpoint of this tenant.")]
Endpoint = Annotated[str | None, typer.Option(help="At this endpoint.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="A notice's KV key, as `ls` prints it.", show_default=False)]


def _endpoint(tenant: str | None, endpoint: str | None) -> str | None:
    if tenant is not None and endpoint is not None:
        raise Failure("say one of --tenant and --endpoint", Exit.USAGE)
    return endpoint_of(tenant) if tenant is not None else endpoint


def _time(milliseconds: int) -> str:
    """An instant of a record; one that no calendar has stays a number."""
    try:
        return instant(dt.datetime.fromtimestamp(milliseconds / 1000, dt.UTC))
    except (OverflowError, OSError, ValueError):
        return f"{milliseconds} ms"


def _as_json(key: str, notice: Notice) -> dict[str, Any]:
    consumed = jsonlib.loads(notice.consumed.to_bytes()) if notice.consumed is not None else None
    return {
        "key": key,
        "revision": notice.spec_revision,
        "noticeId": notice.notice_id,
        **jsonlib.loads(notice.spec.to_bytes()),
        "status": consumed,
    }


@verb(app, "ls")
async def ls(
    session: Session,
    tenant: Tenant = None,
    endpoint: Endpoint = None,
    run: Annotated[str | None, typer.Option("--run", help="Only on this run.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Only to this agent or operator.", metavar="NAME")] = None,
    pending: Annotated[bool, typer.Option("--pending", help="Only those that no turn has carried.")] = False,
    json: AsJson = False,
) -> Exit:
    """List notices, of all endpoints unless one is named: when they were filed, to whom, what, and the KV key."""
    problems = Problems(session)
    where = _endpoint(tenant, endpoint)
    async with session.toolkit() as toolkit:
        found = await toolkit.notices.find(endpoint=where, run=run, addressee=to, unreadable=problems)
    shown = {key: notice for key, notice in found.items() if not pending or notice.consumed is None}
    for key, notice in shown.items():
        if json:
            session.out.json(_as_json(key, notice))
            continue
        state, style = ("carried", "dim") if notice.consumed is not None else ("pending", "cyan")
        spec = notice.spec
        said = f"{plain(spec.addressee)}  {spec.fact.decision} {spec.fact.outcome}"
        session.out.line((state, style), f"  {_time(spec.at)}  {said}  {key}")
    if not shown and not json and not problems.count:
        session.remark(f"no notice matches ({len(found):,} read)")
    return problems.exit


async def _standing(board: NoticeBoard, key: str) -> Notice:
    notice = await board.get(key)
    if notice is None:
        raise Failure(
            f"there is no notice {key}: none was filed, or it has expired or was deleted. See "
            f"`natsreceipts notices ls`",
            Exit.NOT_FOUND,
        )
    return notice


@verb(app, "show")
async def show(session: Session, key: Key, json: AsJson = False) -> None:
    """Show a notice: what was decided, by which step, whom it is for, and which turn carried it."""
    async with session.toolkit() as toolkit:
        notice = await _standing(toolkit.notices, key)
    spec, out = notice.spec, session.out
    if json:
        out.json(_as_json(key.rpartition(".")[0] + ".spec", notice))
        return
    out.line(key.rpartition(".")[0] + ".spec")
    fields = [
        ("to", spec.addressee, ""),
        ("run", spec.run, ""),
        ("decision", spec.fact.decision, ""),
        ("outcome", spec.fact.outcome, ""),
        *((name, jsonlib.dumps(value, ensure_ascii=False), "") for name, value in (spec.fact.detail or {}).items()),
        ("filed", _time(spec.at), f"by step {plain(spec.step)}"),
    ]
    for name, value, meaning in fields:
        out.line(f"  {name:<15} {plain(value)}")
        if meaning:
            out.paragraph(meaning, indent=" " * 18, style="dim")
    carried = notice.consumed
    if carried is None:
        out.line(f"  {'carried':<15} ", ("by no turn yet", "cyan"))
    else:
        out.line(f"  {'carried':<15} by {plain(carried.by)} at {_time(carried.consumed_at)}")
    # The step is whatever its writer says: a command is offered only where it is a receipt's key.
    if spec.fact.outcome == "needs-a-person" and _is_kv_key(spec.step):
        out.line()
        out.line(("What to do", "bold"))
        for line in session.place.in_all([with_key("$ natsreceipts receipts show", spec.step)]):
            out.line(f"  {line}")


@verb(app, "file")
async def file(
    session: Session,
    run: Annotated[str, typer.Option("--run", help="The run that it is about.", show_default=False)],
    step: Annotated[str, typer.Option(help="The step that decided it.", show_default=False)],
    request_id: Annotated[
        str,
        typer.Option(help="What this step is always called by: the same again is not filed twice.", show_default=False),
    ],
    to: Annotated[
        list[str], typer.Option("--to", help="The agent; may be repeated.", metavar="NAME", show_default=False)
    ],
    decision: Annotated[str, typer.Option(help="What was decided, a word.", show_default=False)],
    outcome: Annotated[str, typer.Option(help="As what, a word.", show_default=False)],
    detail: Annotated[
        list[str] | None,
        typer.Option(help="A detail; may be repeated. The value is JSON, or else a text.", metavar="NAME=VALUE"),
    ] = None,
    tenant: Tenant = None,
    endpoint: Endpoint = None,
    at: Annotated[int | None, typer.Option(help="Milliseconds since the epoch; the server's now by default.")] = None,
    json: AsJson = False,
) -> None:
    """File a notice to each addressee, unless it stands there already. At the endpoint `local` by default."""
    details = dict(_detail(text) for text in detail or [])
    fact: dict[str, Any] = {"decision": decision, "outcome": outcome} | ({"detail": details} if details else {})
    where = _endpoint(tenant, endpoint) or "local"
    async with session.toolkit() as toolkit:
        board = toolkit.notices.at(where)
        filed = await board.file(run=run, step=step, request_id=request_id, addressees=to, fact=fact, at=at)
    session.written = "; ".join(f"{'filed' if one.created else 'stood there already'}: {one.key}" for one in filed)
    for one in filed:
        if json:
            session.out.json({"key": one.key, "noticeId": one.notice_id, "created": one.created})
        else:
            session.out.line(f"{'filed' if one.created else 'stood there already'}  {one.key}")


def _detail(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise Failure(f"--detail {text}: use NAME=VALUE", Exit.USAGE)
    try:
        read: object = given_json(value)
    except jsonlib.JSONDecodeError:
        return name, value
    except ValueError as error:
        raise Failure(f"--detail {name}: its value cannot be used: {error}", Exit.USAGE) from error
    if isinstance(read, int) and abs(read) > _SAFE:
        raise Failure(
            f"--detail {name}: {value} is beyond what a double holds exactly: write it as a text, {name}='\"{value}\"'",
            Exit.USAGE,
        )
    return name, read if isinstance(read, str | int | float | bool) else value


@verb(app, "consume")
async def consume(
    session: Session,
    key: Key,
    by: Annotated[str, typer.Option(help="The turn that carries it.", show_default=False)],
    json: AsJson = False,
) -> None:
    """Put on record that a turn carries a notice. Exit status 6: another one did."""
    async with session.toolkit() as toolkit:
        board = toolkit.notices
        notice = await _standing(board, key)
        at = board.at(key.split(".")[1])
        spec = notice.spec
        status = await at.consume(run=spec.run, addressee=spec.addressee, notice_id=notice.notice_id, by=by)
    session.written = f"it is on record as carried by {plain(status.by)}"
    if json:
        session.out.json({"key": key.rpartition(".")[0] + ".status", **jsonlib.loads(status.to_bytes())})
    else:
        session.out.line(f"carried by {plain(status.by)} at {_time(status.consumed_at)}")


def _is_kv_key(text: str) -> bool:
    try:
        split_kv_key(text)
    except InvalidName:
        return False
    return True
