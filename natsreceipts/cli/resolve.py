"""``natsreceipts receipts resolve``: settle a call whose outcome nobody knows, on the revision that was looked at."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.given_json import given_json
from natsreceipts.cli.output import plain
from natsreceipts.cli.receipts import app
from natsreceipts.cli.shapes import wire_json
from natsreceipts.cli.show import Found, Key, looked_up, tell_history
from natsreceipts.cli.story import claimed_by_not_applied, status_of
from natsreceipts.cli.verb import AsJson, Session, verb
from natsreceipts.errors import InvalidSetting, NatsReceiptsError, StaleRevision
from natsreceipts.notice import check_text
from natsreceipts.resolving import UNSET, check_notifiable, check_resolvable, live, names_of, resolution_of
from natsreceipts.shell import with_key

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
        look = with_key("natsreceipts receipts show", key)
        raise Failure(f"--yes needs --revision N, the one that you looked at with `{look}`", Exit.USAGE)
    if not yes and not _somebody_is_there():
        look = with_key("natsreceipts receipts show", key)
        raise Failure(f"nobody is there to ask: look with `{look}`, then say --yes --revision N", Exit.USAGE)
    outcome: dict[str, Any] = {"not_applied": True} if not_applied else {"completed": _result(completed or "")}
    resolution_of(outcome.get("completed", UNSET), not_applied=not_applied, by=by, reason=reason)
    if notify is not None:
        check_text("notify", notify)
    found = session.run(_looked_at(session, key))
    _check(found, revision, notify, even_if_running=even_if_running)
    if not yes:
        _ask(session, found, outcome, even_if_running=even_if_running)
    look = with_key("natsreceipts receipts show", key)
    session.interrupted = f"stopped by Ctrl-C; whether it was settled shows `{look}`"
    said: dict[str, Any] = {"by": by, "reason": reason, "even_if_running": even_if_running, **outcome}
    chosen = found.newest.revision if revision is None else revision
    settled, told = session.run(_settled(session, key, notify=notify, revision=chosen, **said))
    session.written = f"it IS settled, as {settled.status} at revision {settled.revision}"
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
            text = _input() if given == "@-" else Path(given[1:]).read_text(encoding="utf-8")
        return given_json(text)
    except OSError as error:
        raise Failure(f"--completed {given}: {error}", Exit.USAGE) from error
    except jsonlib.JSONDecodeError as error:
        raise Failure(
            f"--completed is no JSON ({error}): write a text in double quotes ('\"done\"'), and null where there is no "
            f"result",
            Exit.USAGE,
        ) from error
    except ValueError as error:
        raise Failure(f"--completed is no JSON that every reader takes alike: {error}", Exit.USAGE) from error


def _input() -> str:
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] - closed by whoever started us
        raise OSError("standard input is closed")
    return sys.stdin.read()


def _somebody_is_there() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # pyright: ignore[reportUnnecessaryComparison] - it may be closed


def _check(found: Found, revision: int | None, notify: str | None, *, even_if_running: bool) -> None:
    """Refuse what cannot be settled, before anybody is asked to affirm it. The settle checks the same again."""
    newest = found.newest
    if revision is not None and revision < 1:
        raise InvalidSetting(f"revision={revision}: use the revision that you looked at, an int of at least 1")
    if revision is not None and revision != newest.revision:
        raise StaleRevision(found.key, revision=revision, current=newest.revision, status=status_of(newest))
    if newest.problem is not None:
        raise newest.problem
    key = names_of(found.key, found.revisions)
    if newest.receipt is not None:
        check_resolvable(newest.receipt.record, key)
        left = found.lease_left
        if newest.receipt.status == "running" and not even_if_running and left is not None and left > 0:
            raise live(key, left)
    check_notifiable(key, notify)


def _ask(session: Session, found: Found, outcome: dict[str, Any], *, even_if_running: bool) -> None:
    """Show what would be settled, and ask. Raises `Failure`."""
    newest, out = found.newest, session.out
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


def _agreed(question: str) -> bool:
    sys.stdout.write(question)
    sys.stdout.flush()
    answer = ""
    try:
        answer = sys.stdin.readline()
    finally:
        if not answer.endswith("\n"):  # Ctrl-C, or the end of the input: what is said next gets a line of its own
            sys.stdout.write("\n")
            sys.stdout.flush()
    return answer.strip().lower() in ("y", "yes")


async def _looked_at(session: Session, key: str) -> Found:
    async with session.toolkit() as toolkit:
        return await looked_up(toolkit.receipts, key)


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
