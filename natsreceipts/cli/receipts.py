"""``natsreceipts receipts``: list, watch and count."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from natsreceipts.cli.board import Board
from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.output import STATUS_STYLES, duration, instant, plain
from natsreceipts.cli.problems import Problems
from natsreceipts.cli.shapes import erased_json, wire_json
from natsreceipts.cli.silence import Silences
from natsreceipts.cli.verb import AsJson, Session, group, verb
from natsreceipts.errors import ReceiptError
from natsreceipts.wire import Status

if TYPE_CHECKING:
    from natsreceipts.errors import NatsReceiptsError, Unreachable
    from natsreceipts.receipt import Receipt, Revision
    from natsreceipts.server_time import ServerTime

__all__ = ["app"]

app = group("Look at the receipts of tool calls, and settle what nobody knows.")

_STATUSES = get_args(Status)
_LISTED = (*_STATUSES, "erased")

Tenant = Annotated[str | None, typer.Option(help="Only this tenant's.")]
RunName = Annotated[str | None, typer.Option("--run", help="Only of runs of this name.")]
ToolName = Annotated[str | None, typer.Option("--tool", help="Only of this tool.")]


def _row(session: Session, receipt: Receipt, *, left: str = "") -> None:
    between = f"{left:<11} " if left else ""
    session.out.line(
        (f"{receipt.status:<9}", STATUS_STYLES[receipt.status]),
        f" {receipt.attempts:>3}  {instant(receipt.updated)}  {between}{receipt.kv_key}",
    )


def _erased_row(session: Session, key: str, marker: Revision) -> None:
    session.out.line((f"{'erased':<9}", STATUS_STYLES["erased"]), f" {'-':>3}  {instant(marker.time)}  {key}")


@verb(app, "ls")
async def ls(
    session: Session,
    tenant: Tenant = None,
    run: RunName = None,
    tool: ToolName = None,
    status: Annotated[
        str | None,
        typer.Option(help=f"Only of this status: {', '.join(_LISTED)}.", autocompletion=lambda: list(_LISTED)),
    ] = None,
    ambiguous: Annotated[
        bool, typer.Option("--ambiguous", help="What is to be settled, by the time left until it expires.")
    ] = False,
    stuck: Annotated[
        bool, typer.Option("--stuck", help="Running, and the lease is over by the server's clock.")
    ] = False,
    json: AsJson = False,
) -> Exit:
    """List receipts: status, attempts, the server's time of the last write, and the KV key.

    `erased` is one that was deleted by hand: its call is refused.
    """
    if sum([status is not None, ambiguous, stuck]) > 1:
        raise Failure("use one of --status, --ambiguous and --stuck", Exit.USAGE)
    if status is not None and status not in _LISTED:
        raise Failure(f"--status {status}: use one of {', '.join(_LISTED)}", Exit.USAGE)
    problems = Problems(session)
    found = read = gone = 0
    waiting: list[Receipt] = []

    def erased(key: str, marker: Revision) -> None:
        nonlocal found, read, gone
        read, gone = read + 1, gone + 1
        if ambiguous or stuck or status not in (None, "erased"):
            return
        if json:
            session.out.json(erased_json(key, marker))
        else:
            _heading(session, found)
            _erased_row(session, key, marker)
        found += 1

    async with session.toolkit() as toolkit:
        time = await toolkit.receipts.server_time()
        listed = toolkit.receipts.list(tenant=tenant, run=run, tool=tool, unreadable=problems, erased=erased)
        async for receipt in listed:
            read += 1
            session.out.progress(f"{read:,} receipts read")
            if ambiguous and receipt.status == "ambiguous":
                waiting.append(receipt)
            elif stuck and _is_stuck(receipt, time):
                _found(session, receipt, time, found, json=json, column="LEASE OVER")
                found += 1
            elif not ambiguous and not stuck and (status is None or receipt.status == status):
                _found(session, receipt, time, found, json=json)
                found += 1
        waiting.sort(key=lambda receipt: (receipt.updated, receipt.kv_key))  # all are kept for as long
        for receipt in waiting:
            _found(session, receipt, time, found, json=json, column="LEFT")
            found += 1
    if not found and not json and not problems.count:
        session.remark(f"no receipt matches ({read:,} read)")
    if gone and (ambiguous or stuck):
        session.remark(f"{gone:,} erased by hand, and refused too: see `natsreceipts receipts ls --status erased`")
    return problems.exit


def _heading(session: Session, number: int, column: str = "") -> None:
    if not number and session.out.console.is_terminal:
        heading = f"{column:<11} " if column else ""
        session.out.line((f"{'STATUS':<9} ATT  {'UPDATED (server time)':<20}  {heading}KEY", "bold"))


def _is_stuck(receipt: Receipt, time: ServerTime) -> bool:
    left = time.lease_left(receipt)
    return left is not None and left <= 0


def _found(session: Session, receipt: Receipt, time: ServerTime, number: int, *, json: bool, column: str = "") -> None:
    kept, lease = time.kept_for(receipt), time.lease_left(receipt)
    if json:
        more: dict[str, Any] = {}
        if column == "LEFT":
            more["keptForSeconds"] = None if kept is None else round(kept, 3)
        elif column:
            more["leaseOverSeconds"] = round(-(lease or 0), 3)
        session.out.json(wire_json(receipt) | more)
        return
    _heading(session, number, column)
    left = {"": "", "LEFT": "for ever" if kept is None else duration(kept)}.get(column, duration(-(lease or 0)))
    _row(session, receipt, left=left)


@verb(app, "watch")
async def watch(
    session: Session, tenant: Tenant = None, run: RunName = None, tool: ToolName = None, json: AsJson = False
) -> None:
    """Show receipts as they stand, and then every change, until Ctrl-C.

    A table that is redrawn on a terminal, a line for each in a pipe. It waits for a server that is away, and says so.
    """
    problems, silences = Problems(session), Silences(session)
    board = Board(session.out.console) if session.out.live and not json else None

    def unreadable(problem: NatsReceiptsError) -> None:
        problems(problem)
        if board is not None and isinstance(problem, ReceiptError):
            board.take(problem.key if isinstance(problem.key, str) else problem.key.kv_key, "unreadable")

    def erased(key: str, marker: Revision) -> None:
        if board is not None:
            board.take(key, "erased", updated=marker.time)
        elif json:
            session.out.json(erased_json(key, marker))
        else:
            _erased_row(session, key, marker)

    def unreachable(problem: Unreachable | None) -> None:
        silences(problem)
        if board is not None:
            board.warning = silences.warning

    async with session.toolkit() as toolkit:
        watched = toolkit.receipts.watch(
            tenant=tenant, run=run, tool=tool, unreadable=unreadable, erased=erased, unreachable=unreachable
        )
        async with contextlib.aclosing(watched) as receipts:
            if board is None:
                async for receipt in receipts:
                    if json:
                        session.out.json(wire_json(receipt))
                    else:
                        _row(session, receipt)
                return
            with session.out.redrawn(board):
                async for receipt in receipts:
                    board.take(receipt.kv_key, receipt.status, attempts=receipt.attempts, updated=receipt.updated)


@verb(app, "stats")
async def stats(
    session: Session, tenant: Tenant = None, run: RunName = None, tool: ToolName = None, json: AsJson = False
) -> Exit:
    """Count receipts by status and tool, and what needs a person."""
    problems = Problems(session)
    statuses: Counter[str] = Counter()
    tools: dict[str, Counter[str]] = {}
    repeated = stuck = gone = 0
    oldest: Receipt | None = None

    def erased(_key: str, _marker: Revision) -> None:
        nonlocal gone
        gone += 1

    async with session.toolkit() as toolkit:
        time = await toolkit.receipts.server_time()
        listed = toolkit.receipts.list(tenant=tenant, run=run, tool=tool, unreadable=problems, erased=erased)
        async for receipt in listed:
            statuses[receipt.status] += 1
            session.out.progress(f"{statuses.total():,} receipts read")
            tools.setdefault(receipt.key.tool, Counter())[receipt.status] += 1
            repeated += receipt.attempts > 1
            stuck += _is_stuck(receipt, time)
            if receipt.status == "ambiguous" and (oldest is None or receipt.updated < oldest.updated):
                oldest = receipt
    kept = time.kept_for(oldest) if oldest is not None else None
    if json:
        session.out.json(
            {
                "total": statuses.total(),
                "statuses": statuses,
                "tools": tools,
                "moreThanOneAttempt": repeated,
                "stuck": stuck,
                "unreadable": problems.count,
                "erased": gone,
                "retentionSeconds": time.retention or None,
                "oldestAmbiguous": oldest.kv_key if oldest is not None else None,
                "keptForSeconds": None if kept is None else round(kept, 3),
            }
        )
        return problems.exit
    _print_stats(session, statuses, tools)
    out = session.out
    out.line(f"more than one attempt: {repeated:,}; running with the lease over (--stuck): {stuck:,}")
    if gone:
        out.line(f"erased by hand, and refused (--status erased): {gone:,}")
    out.line(f"receipts are kept {'for ' + duration(time.retention) if time.retention else 'for ever'}")
    if oldest is not None:
        expires = f", expires in {duration(kept)}" if kept is not None else ""
        out.line(f"ambiguous for longest, since {instant(oldest.updated)}{expires}:")
        out.line(f"  {oldest.kv_key}")
    return problems.exit


def _print_stats(session: Session, statuses: Counter[str], tools: dict[str, Counter[str]]) -> None:
    shown = [status for status in _STATUSES if statuses[status]]
    heads = "".join(f"  {status:>9}" for status in shown)
    session.out.line((f"{'total':>9}{heads}  tool", "bold"))
    for name, counts in sorted(tools.items(), key=lambda item: (-item[1].total(), item[0])):
        cells = "".join(f"  {counts[status]:>9,}" for status in shown)
        session.out.line(f"{counts.total():>9,}{cells}  {plain(name)}")
    if len(tools) != 1:
        cells = "".join(f"  {statuses[status]:>9,}" for status in shown)
        session.out.line(f"{statuses.total():>9,}{cells}  (all)")
