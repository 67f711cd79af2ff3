"""Records that cannot be read: told at once, and in the exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from natsreceipts.cli.exits import Exit

if TYPE_CHECKING:
    from natsreceipts.cli.verb import Session
    from natsreceipts.errors import NatsReceiptsError

__all__ = ["Problems"]


class Problems:
    """Counts what cannot be read, and says so at once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.count = 0

    def __call__(self, problem: NatsReceiptsError) -> None:
        """One that cannot be read."""
        self.count += 1
        self._session.remark(str(problem))

    @property
    def exit(self) -> Exit:
        """How the verb ends."""
        return Exit.UNREADABLE if self.count else Exit.DONE
