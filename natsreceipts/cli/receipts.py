"""``natsreceipts receipts``: list, watch and count."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.output import STATUS_STYLES, duration, instant, plain
from natsreceipts.cli.problems import Problems
from natsreceipts.cli.shapes import wire_json
from natsreceipts.cli.verb import AsJson, Session, group, verb
from natsreceipts.wire import Status

if TYPE_CHECKING:
    from natsreceipts.receipt import Receipt
    from natsreceipts.server_time import ServerTime

__all__ = ["app"]

app = group("Look at the receipts of tool calls, and settle what nobody knows.")

_STATUSES = get_args(Status)

Tenant = Annotated[str | None, typer.Option(help="Only this tenant's.")]
RunName = Annotated[str | None, typer.Option("--run", help="Only of runs of this name.")]
ToolName = Annotated[str | None, typer.Option("--tool", help="Only of this tool.")]


def _row(session: Session, receipt: Receipt, *, left: str = "") -> None:
    between = f"{left:<11} " if left else ""
    session.out.line(
        (f"{receipt.status:<9}", STATUS_STYLES[receipt.status]),
        f" {receipt.attempts:>3}  {instant(receipt.updated)}  {between}{receipt.kv_key}",
    )


@verb(app, "ls")
async def ls(
    session: Session,
    tenant: Tenant = None,
    run: RunName = None,
    tool: ToolName = None,
    status: Annotated[
        str | None,
        typer.Option(help=f"Only of this status: {', '.join(_STATUSES)}.", autocompletion=lambda: list(_STATUSES)),
    ] = None,
    ambiguous: Annotated[
        bool, typer.Option("--ambiguous", help="What is to be settled, by the time left until it expires.")
    ] = False,
    stuck: Annotated[
        bool, typer.Option("--stuck", help="Running, and the lease is over by the server's clock.")
    ] = False,
    json: AsJson = False,
) -> Exit:
    """List receipts: status, attempts, the server's time of the last write, and the KV key."""
    if sum([status is not None, ambiguous, stuck]) > 1:
        raise Failure("use one of --status, --ambiguous and --stuck", Exit.USAGE)
    if status is not None and status not in _STATUSES:
        raise Failure(f"--status {status}: use one of {', '.join(_STATUSES)}", Exit.USAGE)
    problems = Problems(session)
    found = read = 0
    waiting: list[Receipt] = []
    async with session.toolkit() as toolkit:
        time = await toolkit.receipts.server_time()
        async for receipt in toolkit.receipts.list(tenant=tenant, run=run, tool=tool, unreadable=problems):
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
    return problems.exit


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
    if not number and session.out.console.is_terminal:
        heading = f"{column:<11} " if column else ""
        session.out.line((f"{'STATUS':<9} ATT  {'UPDATED (server time)':<20}  {heading}KEY", "bold"))
    left = {"": "", "LEFT": "for ever" if kept is None else duration(kept)}.get(column, duration(-(lease or 0)))
    _row(session, receipt, left=left)


@verb(app, "watch")
async def watch(
    session: Session, tenant: Tenant = None, run: RunName = None, tool: ToolName = None, json: AsJson = False
) -> None:
    """Show receipts as they stand, and then every change, until Ctrl-C.

    A table that is redrawn on a terminal, a line for each in a pipe.
    """
    problems = Problems(session)
    async with session.toolkit() as toolkit:
        watched = toolkit.receipts.watch(tenant=tenant, run=run, tool=tool, unreadable=problems)
        async with contextlib.aclosing(watched) as receipts:
            if json or not session.out.live:
                async for receipt in receipts:
                    if json:
                        session.out.json(wire_json(receipt))
                    else:
                        _row(session, receipt)
                return
            board = _Board(session)
            with Live(board, console=session.out.console, refresh_per_second=4, vertical_overflow="crop"):
                async for receipt in receipts:
                    board.take(receipt)


class _Board:
    """The receipts that changed last, as many as fit, and how many there are of each status."""

    _MOST = 500

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: OrderedDict[str, Receipt] = OrderedDict()
        self._statuses: dict[str, str] = {}

    def take(self, receipt: Receipt) -> None:
        self._statuses[receipt.kv_key] = receipt.status
        self._last[receipt.kv_key] = receipt
        self._last.move_to_end(receipt.kv_key)
        while len(self._last) > self._MOST:
            self._last.popitem(last=False)

    def __rich__(self) -> Table:
        console = self._session.out.console
        counts = Counter(list(self._statuses.values()))
        title = Text("  ").join(Text(f"{count} {status}", STATUS_STYLES[status]) for status, count in counts.items())
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        table.add_column("status", no_wrap=True, min_width=max(map(len, _STATUSES)))
        table.add_column("att", justify="right", no_wrap=True, min_width=3)
        table.add_column("updated", no_wrap=True, min_width=len("00:00:00Z"))
        table.add_column(
            "key", no_wrap=True, overflow="ellipsis", ratio=1
        )  # the only one that is cut: its tail is a hash
        rows = max(console.size.height - 4, 3)
        for receipt in list(self._last.values())[: -rows - 1 : -1]:
            time = receipt.updated.astimezone(dt.UTC).strftime("%H:%M:%SZ")
            status = Text(receipt.status, STATUS_STYLES[receipt.status])
            table.add_row(status, str(receipt.attempts), time, receipt.kv_key)
        return table


@verb(app, "stats")
async def stats(
    session: Session, tenant: Tenant = None, run: RunName = None, tool: ToolName = None, json: AsJson = False
) -> Exit:
    """Count receipts by status and tool, and what needs a person."""
    problems = Problems(session)
    statuses: Counter[str] = Counter()
    tools: dict[str, Counter[str]] = {}
    repeated = stuck = 0
    oldest: Receipt | None = None
    async with session.toolkit() as toolkit:
        time = await toolkit.receipts.server_time()
        async for receipt in toolkit.receipts.list(tenant=tenant, run=run, tool=tool, unreadable=problems):
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
                "retentionSeconds": time.retention or None,
                "oldestAmbiguous": oldest.kv_key if oldest is not None else None,
                "keptForSeconds": None if kept is None else round(kept, 3),
            }
        )
        return problems.exit
    _print_stats(session, statuses, tools)
    out = session.out
    out.line(f"more than one attempt: {repeated:,}; running with the lease over (--stuck): {stuck:,}")
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
