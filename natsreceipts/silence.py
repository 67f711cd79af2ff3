"""What a watch tells while no server answers: it goes on by itself, and what it has shown may be old."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from natsreceipts.errors import Unreachable

__all__ = ["Silence"]


class Silence:
    """Tells of its beginning, with the error, and of its end, with None: each once, however often it is tried."""

    def __init__(self, tell: Callable[[Unreachable | None], None] | None) -> None:
        self._tell = tell
        self._lasts = False

    def begins(self, error: Unreachable) -> None:
        """No server answered."""
        self._say(error)

    def ends(self) -> None:
        """One answered."""
        self._say(None)

    def _say(self, error: Unreachable | None) -> None:
        if self._lasts == (error is not None):
            return
        self._lasts = error is not None
        if self._tell is not None:
            self._tell(error)
