"""What a verb that goes on for ever says while no server answers: what is shown may be old."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from natsreceipts.cli.verb import Session
    from natsreceipts.errors import Unreachable

__all__ = ["Silences"]


class Silences:
    """Says when no server answers any more, and when all do again; of a bucket in partitions each is told of."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open = 0
        self.warning = ""
        """For a table that is redrawn: what is to be said now."""

    def __call__(self, problem: Unreachable | None) -> None:
        """One begins, or (None) ends."""
        before, self._open = self._open, self._open + (1 if problem is not None else -1)
        if problem is not None and not before:
            self.warning = "no server answers: what is shown may be old"
            self._session.remark(f"{self.warning}; it goes on when one does ({problem})")
        elif problem is None and not self._open:
            self.warning = ""
            self._session.remark("a server answers again")
