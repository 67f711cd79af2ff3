"""The live table of `receipts watch`."""

from __future__ import annotations

import datetime as dt
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple, get_args

from rich.table import Table
from rich.text import Text

from natsreceipts.cli.output import STATUS_STYLES
from natsreceipts.wire import Status

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Board"]

_WIDEST = max(map(len, get_args(Status)))


class _Row(NamedTuple):
    status: str
    attempts: str
    time: str


class Board:
    """The keys that changed last, as many as fit, and how many there are of each status."""

    _MOST = 500

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: OrderedDict[str, _Row] = OrderedDict()
        self._statuses: dict[str, str] = {}
        self.warning = ""
        """What is said above the table."""

    def take(self, key: str, status: str, *, attempts: int | None = None, updated: dt.datetime | None = None) -> None:
        """What stands under a key now."""
        time = updated.astimezone(dt.UTC).strftime("%H:%M:%SZ") if updated is not None else ""
        self._statuses[key] = status
        self._last[key] = _Row(status, "" if attempts is None else str(attempts), time)
        self._last.move_to_end(key)
        while len(self._last) > self._MOST:
            self._last.popitem(last=False)

    def __rich__(self) -> Table:
        counts = Counter(list(self._statuses.values()))
        title = Text("  ").join(Text(f"{count} {status}", STATUS_STYLES[status]) for status, count in counts.items())
        if self.warning:
            title = Text("\n").join([Text(self.warning, "bold red"), title])
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        table.add_column("status", no_wrap=True, min_width=_WIDEST)
        table.add_column("att", justify="right", no_wrap=True, min_width=3)
        table.add_column("updated", no_wrap=True, min_width=len("00:00:00Z"))
        table.add_column(
            "key", no_wrap=True, overflow="ellipsis", ratio=1
        )  # the only one that is cut: its tail is a hash
        lines = title.wrap(self._console, max(self._console.size.width, 1))
        rows = max(self._console.size.height - 3 - len(lines), 3)
        for key, row in list(self._last.items())[: -rows - 1 : -1]:
            table.add_row(Text(row.status, STATUS_STYLES[row.status]), row.attempts, row.time, key)
        return table
