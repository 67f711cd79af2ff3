"""What happened, as it was written down: by workers, by the effects outside, and by the streams. Pure.

An operation is two lines in its worker's file: that it began, and how it ended. One that has no second line (its
worker was killed) ended as unknown. Times are seconds of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Deed", "History", "Operation", "Outcome", "Stored", "deeds_of", "operations_of"]

Outcome = Literal["ok", "failed", "unknown"]
"""Whether it was acknowledged; certainly did nothing; or nobody can tell by this word alone."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one worker."""

    id: str
    worker: str
    do: str
    """call, resolve, read, append, wake, file, consume."""
    key: str
    """The KV key of a receipt; of a notice or a session what its records' keys begin with."""
    began: float
    ended: float | None = None
    outcome: Outcome = "unknown"
    error: str = ""
    """The name of the class that was raised."""
    asked: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    """What was returned."""


@dataclass(frozen=True, kw_only=True)
class Deed:
    """One line of the log outside of NATS: what an effect did, on disk before it goes on.

    ``phase``: entered, then landed (the effect is there), refused (it is not and can no longer be) or broke (it ended
    in an error, before or after it landed); step, for each step of a resumable effect that is executed.
    """

    at: float
    op: str
    worker: str
    key: str
    phase: str
    effect: str
    revision: int
    """Of the receipt, by which the attempt held the call when it was entered; 0 for a read."""
    token: str = ""
    """What landed: the result."""
    step: str = ""
    session: str = ""
    entry: int = 0
    """The position in the session that the call was claimed from."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One message of a stream, as it is kept."""

    key: str
    revision: int
    time: float
    """The server's timestamp, in seconds."""
    expected: int | None
    """The revision that its writer expected there, by its header."""
    value: dict[str, Any]


@dataclass(kw_only=True)
class History:
    """All of it."""

    operations: list[Operation] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    receipts: list[Stored] = field(default_factory=list)
    notices: list[Stored] = field(default_factory=list)
    sessions: list[Stored] = field(default_factory=list)
    replaced: bool = False
    """The bucket was deleted and made again meanwhile: what stands in it now is not the whole of it."""


def _lines(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n")
    if lines.pop():  # the last line is whole, or its writer was killed over it
        raise ValueError(f"a line that was cut off: {text[-200:]!r}")
    return [json.loads(line) for line in lines]


def deeds_of(text: str) -> list[Deed]:
    """The lines of the log of effects."""
    return [Deed(**line) for line in _lines(text)]


def operations_of(texts: Iterable[str]) -> list[Operation]:
    """The operations in the files of all workers, in the order in which they began."""
    found: list[Operation] = []
    for text in texts:
        ends: dict[str, dict[str, Any]] = {}
        begun: list[dict[str, Any]] = []
        for line in _lines(text):
            if "do" in line:
                begun.append(line)
            elif ends.setdefault(line["id"], line) is not line:
                raise ValueError(f"operation {line['id']} ended twice")
        found.extend(Operation(**line | ends.get(line["id"], {})) for line in begun)
    return sorted(found, key=lambda op: op.began)
