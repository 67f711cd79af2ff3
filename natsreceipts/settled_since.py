"""Closes that said "outcome unknown" and whose calls were settled since: wake puts in what they came to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from natsreceipts.errors import CorruptRecord, PayloadMissing, ReceiptErased, UnsupportedRecord
from natsreceipts.fence import newest
from natsreceipts.seen import seen_of
from natsreceipts.shown import failure_of
from natsreceipts.transcript import view_of
from natsreceipts.withdrawal import withdraw

if TYPE_CHECKING:
    from collections.abc import Callable

    from natsreceipts._jetstream import Bucket
    from natsreceipts.attempts import Attempts
    from natsreceipts.dialects.base import Message
    from natsreceipts.entries import Branch, SessionEntry
    from natsreceipts.fence import Pace
    from natsreceipts.wire import ReceiptSaid

__all__ = ["Moved", "Settled", "settled_since", "unsettled"]

_log = logging.getLogger("natsreceipts")


class Moved(Exception):
    """A receipt moved on while it was judged: look at everything again."""


class Settled(NamedTuple):
    """What a call came to after its close."""

    close: SessionEntry
    receipt: ReceiptSaid
    value: Any
    is_error: bool
    why: str


def unsettled(branch: Branch) -> list[SessionEntry]:
    """The closes in what is shown that a receipt may settle: no real result answers their call."""
    if not any(map(_may_be_settled, branch.shown)):
        return []
    answers: dict[str, SessionEntry | None] = {}
    for entry in branch.shown:
        view = view_of(cast("Message", entry.message), dialect=entry.dialect)
        for call in view.calls:
            answers.pop(call.id, None)
        for result in view.results:
            if result.error_kind is None:
                answers[result.id] = None
            elif _may_be_settled(entry):
                answers.setdefault(result.id, entry)
    return [entry for entry in answers.values() if entry is not None]


def _may_be_settled(entry: SessionEntry) -> bool:
    told = entry.receipt
    return entry.close is not None and told is not None and told.status in ("ambiguous", "running")


async def settled_since(
    attempts: Attempts, close: SessionEntry, position: int, *, pace: Callable[[], Pace], dry_run: bool
) -> Settled | None:
    """What the very attempt that a close speaks of came to; None where that is still not known.

    That it had no effect is told only once no claim from before can be accepted any more, so it is fenced at
    ``position`` first. Raises `Moved`, Unreachable.
    """
    told = close.receipt
    assert told is not None
    bucket: Bucket = attempts.bucket
    found = await newest(bucket, told.key, pace())
    if found is None or found.revision <= told.revision:
        return None
    try:
        seen = seen_of(bucket.of(told.key).name, told.key, found)
        record = seen.record
        if record.attempts != told.attempts:
            return None
        said = told.model_copy(update={"revision": seen.revision, "status": record.status})
        if record.status == "completed":
            value = await attempts.load(seen, record.result)
            return Settled(close, said, value, is_error=False, why="the call came to a result after all")
    except (ReceiptErased, CorruptRecord, UnsupportedRecord, PayloadMissing) as error:
        _log.warning("what became of a call cannot be read: %s", error)
        return None
    if not record.not_applied:
        return None
    if not dry_run:
        revision = await withdraw(bucket, record.key, seen, token=close.token, position=position, pace=pace())
        if revision is None:
            raise Moved
        said = said.model_copy(update={"revision": revision})
    return Settled(
        close, said, await failure_of(attempts, record), is_error=True, why="it was settled that it had no effect"
    )
