"""Standard output that says when it fails, in errors that nobody below takes for something else.

click and rich have ways of their own with a pipe that nobody reads, and end the program with status 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["CannotWrite", "PipeClosed", "telling_stdout"]


class PipeClosed(Exception):
    """Whoever read the output went away."""


class CannotWrite(Exception):
    """The output cannot be written: a full disk, or none was given."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the output cannot be written: {why}")


class _Telling(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        with _told():
            return super().write(text)

    def flush(self) -> None:
        with _told():
            super().flush()


@contextlib.contextmanager
def _told() -> Generator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise PipeClosed from error
    except OSError as error:
        raise CannotWrite(error.strerror or str(error)) from error


@contextlib.contextmanager
def telling_stdout() -> Generator[None]:
    """Let standard output raise `PipeClosed` and `CannotWrite` inside, when it is written to and at the end."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - closed by whoever started us
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise CannotWrite("standard output is closed")
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper) and not isinstance(before, _Telling):
        encoding, errors = before.encoding, before.errors
        lines, at_once = before.line_buffering, before.write_through
        raw = cast("BinaryIO", before.detach())
        sys.stdout = _Telling(raw, encoding, errors, line_buffering=lines, write_through=at_once)
        if before is sys.__stdout__:  # of which the size of the terminal is asked
            sys.__stdout__ = sys.stdout  # pyright: ignore[reportConstantRedefinition]
    try:
        yield
        sys.stdout.flush()
    except (PipeClosed, CannotWrite):
        _give_up()
        raise


def _give_up() -> None:
    """What is still in the buffer would fail again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
