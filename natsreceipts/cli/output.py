"""What is printed: lines for people and for pipes, JSON a line, and nothing that a record could do to a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Generator

    from rich.console import RenderableType

__all__ = ["STATUS_STYLES", "Out", "duration", "instant", "plain"]

STATUS_STYLES = {
    "running": "cyan",
    "completed": "green",
    "failed": "yellow",
    "ambiguous": "bold red",
    "withdrawn": "dim",
    "erased": "bold red",
    "unreadable": "bold red",
}

_WIDEST = 100
"""Columns that text is wrapped at, on wider terminals and in pipes."""

_PROGRESS_EVERY = 0.5
"""Seconds."""


def plain(text: str) -> str:
    """Text on one line, with what could steer a terminal (or hide in one) written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def instant(time: dt.datetime, *, fine: bool = False) -> str:
    """A server's time, to the second or (``fine``) the millisecond, in UTC."""
    return time.isoformat(" ", "milliseconds" if fine else "seconds").replace("+00:00", "Z")


def duration(seconds: float) -> str:
    """A length of time for people: its two largest units."""
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f} ms"
    if abs(seconds) < 10:
        return f"{seconds:.1f} s"
    left = round(abs(seconds))
    sign = "-" if seconds < 0 else ""
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count} {unit}")
    return sign + " ".join(part for part in parts[:2] if not part.startswith("0 "))


class Out:
    """Standard output, and progress and remarks on standard error."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        self.console = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._remarks = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._coloured = self.console.is_terminal and not self.console.no_color
        self._redrawing = False
        self._progress = ""
        self._progress_at = time.monotonic()

    @property
    def live(self) -> bool:
        """Whether a table can be redrawn in place."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @property
    def width(self) -> int:
        """Columns for text."""
        return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST) if self.console.is_terminal else _WIDEST

    def line(self, *parts: str | tuple[str, str]) -> None:
        """One line, however long: texts, or texts with a style. Flushed, since somebody may wait for it."""
        self._clear()
        if self._coloured:
            self.console.print(Text.assemble(*parts))
        else:
            text = "".join(part if isinstance(part, str) else part[0] for part in parts)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def paragraph(self, text: str, *, indent: str = "", style: str = "") -> None:
        """Text, wrapped at the terminal's width but never inside a word."""
        for line in textwrap.wrap(
            text,
            max(self.width, 20),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ):
            self.line((line, style))

    def json(self, value: dict[str, Any]) -> None:
        """One JSON object on one line."""
        self.line(json.dumps(value, allow_nan=False))

    def show(self, renderable: RenderableType) -> None:
        """Something of rich's."""
        self._clear()
        self.console.print(renderable)

    @contextlib.contextmanager
    def redrawn(self, renderable: RenderableType) -> Generator[None]:
        """Keep something of rich's at the bottom of the terminal, where it is drawn anew four times a second."""
        with Live(renderable, console=self.console, refresh_per_second=4, vertical_overflow="crop"):
            self._redrawing = True
            try:
                yield
            finally:
                self._redrawing = False

    def remark(self, text: str) -> None:
        """A line on standard error, one line whatever is in it."""
        self._clear()
        # What is redrawn would be drawn over it, unless the one who redraws prints it too.
        console = self.console if self._redrawing and self._remarks.is_terminal else self._remarks
        with contextlib.suppress(OSError):  # nobody hears it, and the exit code says it too
            console.print(Text("natsreceipts: " + " ".join(plain(text.replace("\n", " ")).split())))

    def progress(self, text: str) -> None:
        """Say on a terminal how far it is, now and then, where nothing else moves."""
        now = time.monotonic()
        if not self._remarks.is_terminal or now - self._progress_at < _PROGRESS_EVERY:
            return
        self._clear()
        self._progress, self._progress_at = text, now
        sys.stderr.write("\r" + text)
        sys.stderr.flush()

    def _clear(self) -> None:
        if self._progress:
            sys.stderr.write("\r" + " " * len(self._progress) + "\r")
            sys.stderr.flush()
            self._progress = ""

    def close(self) -> None:
        """Nothing is left in a buffer. Raises `PipeClosed` and `CannotWrite`."""
        self._clear()
        sys.stdout.flush()
