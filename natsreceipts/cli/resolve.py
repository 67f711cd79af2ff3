"""``natsreceipts receipts resolve``: settle a call whose outcome nobody knows, on the revision that was looked at."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.output import plain
from natsreceipts.cli.receipts import app
from natsreceipts.cli.shapes import wire_json
from natsreceipts.cli.show import Found, Key, looked_up, tell_history
from natsreceipts.cli.story import claimed_by_not_applied, status_of
from natsreceipts.cli.verb import AsJson, Session, verb
from natsreceipts.errors import NatsReceiptsError, StaleRevision

if TYPE_CHECKING:
    from natsreceipts.notice_record import NoticeSpec
    from natsreceipts.receipt import Receipt

__all__: list[str] = []


@verb(app, "resolve")
def resolve(
    session: Session,
    key: Key,
    by: Annotated[str, typer.Option(help="Who settles it: stays on record.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Why: stays on record.", show_default=False)],
    completed: Annotated[
        str | None,
        typer.Option(help="It took effect, and this is its result: JSON, @FILE, or @- for the input.", metavar="JSON"),
    ] = None,
    not_applied: Annotated[
        bool, typer.Option("--not-applied", help="It did not take effect and no longer can: it may be tried again.")
    ] = False,
    notify: Annotated[
        str | None, typer.Option(help="File a notice of it to this agent, whose call it was.", metavar="AGENT")
    ] = None,
    even_if_running: Annotated[
        bool, typer.Option("--even-if-running", help="Also over a live lease. Stop its worker first.")
    ] = False,
    revision: Annotated[int | None, typer.Option(help="Settle this revision, and no other.", metavar="N")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, for scripts: needs --revision.")] = False,
    json: AsJson = False,
) -> Exit:
    """Settle a call whose outcome nobody knows.

    It shows the revision that it will settle and asks; the write is refused if the receipt has moved on since.
    """
    if not_applied == (completed is not None):
        raise Failure("say one of --completed JSON (it took effect) and --not-applied", Exit.USAGE)
    if yes and revision is None:
        raise Failure(
            "--yes needs --revision N, the one that you looked at with `natsreceipts receipts show`", Exit.USAGE
        )
    outcome: dict[str, Any] = {"not_applied": True} if not_applied else {"completed": _result(completed or "")}
    if not yes:
        revision = _asked(session, key, revision, outcome, even_if_running=even_if_running)
    assert revision is not None
    session.interrupted = f"stopped by Ctrl-C; whether it was settled shows `natsreceipts receipts show {key}`"
    said: dict[str, Any] = {"by": by, "reason": reason, "even_if_running": even_if_running, **outcome}
    settled, told = session.run(_settled(session, key, notify=notify, revision=revision, **said))
    if json:
        session.out.json(wire_json(settled))
    else:
        what = "every later attempt gets that result" if completed is not None else "the next attempt executes it again"
        session.out.line(f"settled as {settled.status} at revision {settled.revision}: {what}")
    if not told:
        raise Failure(
            f"it is settled, and {notify} is NOT told: no notice of it could be filed, or it cannot be read back. File "
            f"it with `natsreceipts notices file`, once that is permitted",
            Exit.FAILED,
        )
    return Exit.DONE


def _result(given: str) -> Any:
    """The result that is recorded. Raises `Failure`."""
    text = given
    try:
        if given.startswith("@"):
            text = sys.stdin.read() if given == "@-" else Path(given[1:]).read_text(encoding="utf-8")
        result = jsonlib.loads(text, parse_constant=_no_json)
        jsonlib.dumps(result, ensure_ascii=False, allow_nan=False).encode()  # 1e999 is infinity, "\\ud800" has no UTF-8
        return result
    except OSError as error:
        raise Failure(f"--completed {given}: {error}", Exit.USAGE) from error
    except (ValueError, RecursionError) as error:
        raise Failure(
            f"--completed is no JSON ({error}): write a text in double quotes ('\"done\"'), and null where there is no "
            f"result",
            Exit.USAGE,
        ) from error


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is none")


def _asked(session: Session, key: str, revision: int | None, outcome: dict[str, Any], *, even_if_running: bool) -> int:
    """Show what would be settled, ask, and give the revision that was shown. Raises `Failure`."""
    if not sys.stdin.isatty():
        raise Failure(
            "nobody is there to ask: look with `natsreceipts receipts show`, then say --yes --revision N", Exit.USAGE
        )
    found = session.run(_looked_at(session, key))
    newest = found.newest
    if revision is not None and revision != newest.revision:
        raise StaleRevision(key, revision=revision, current=newest.revision, status=status_of(newest))
    out = session.out
    out.line(found.key)
    tell_history(out, found)
    out.line()
    if "completed" in outcome:
        claim = "You say that this call took effect. Every later attempt gets this result and executes nothing:"
        out.paragraph(claim)
        out.line("  " + plain(jsonlib.dumps(outcome["completed"], ensure_ascii=False)))
    else:
        out.paragraph(claimed_by_not_applied(found.newest_readable, even_if_running=even_if_running))
    out.close()
    if not _agreed(f"Settle revision {newest.revision}, {status_of(newest)}, so? [y/N] "):
        raise Failure("nothing was settled", Exit.NOT_SETTLED)
    return newest.revision


def _agreed(question: str) -> bool:
    sys.stdout.write(question)
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _looked_at(session: Session, key: str) -> Found:
    async with session.toolkit() as toolkit:
        return await looked_up(toolkit.receipts, key, bucket=session.bucket)


async def _settled(session: Session, key: str, *, notify: str | None, **settlement: Any) -> tuple[Receipt, bool]:
    """The receipt, and whether the agent was told (a notice that cannot be filed is no error of the settle's)."""
    async with session.toolkit() as toolkit:
        settled = await toolkit.receipts.resolve(key, notify=notify, **settlement)
        if notify is None:
            return settled, True
        try:
            board = toolkit.run(settled.key.tenant, settled.key.run).notices
            filed = await board.list(addressee=notify)
        except NatsReceiptsError:
            return settled, False
        return settled, any(each.spec.step == settled.kv_key and _tells_of(each.spec, settled) for each in filed)


def _tells_of(spec: NoticeSpec, settled: Receipt) -> bool:
    return spec.fact.decision == "call-resolved" and (spec.fact.detail or {}).get("revision") == settled.revision
