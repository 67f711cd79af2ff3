"""What a model is shown of a session: real results in place of closes whose calls came to something after all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from pydantic_core import to_json

from natsreceipts.attempts import CLAIM_PATIENCE
from natsreceipts.background import all_of
from natsreceipts.closes import failure_text
from natsreceipts.dialects.base import text_of
from natsreceipts.errors import CorruptRecord, PayloadMissing, ReceiptErased, UnsupportedRecord
from natsreceipts.fence import newest
from natsreceipts.reported import reported
from natsreceipts.seen import seen_of
from natsreceipts.transcript import tool_result_message

if TYPE_CHECKING:
    from natsreceipts.attempts import Attempts
    from natsreceipts.dialects.base import Message
    from natsreceipts.entries import SessionEntry
    from natsreceipts.session_store import SessionStore
    from natsreceipts.wire import ReceiptRecord, ReceiptSaid

__all__ = ["failure_of", "result_message", "shown_messages"]

_log = logging.getLogger("natsreceipts")

_TOO_LARGE = (
    "This call of {tool} was carried out. Its result of {size:,} bytes is too large, or nested too deeply, to stand in "
    "this session; it is on record as {kv_key}."
)


async def failure_of(attempts: Attempts, record: ReceiptRecord) -> str:
    """What a model is told of a receipt that has failed. Raises KeyMissing, SealBroken."""
    if record.resolved is not None:
        return failure_text(None, record.resolved.reason)
    error = await attempts.error_of(record)
    return failure_text(error.message if error is not None else None)


def result_message(
    store: SessionStore, told: ReceiptSaid, value: object, *, run: str | None, is_error: bool = False
) -> tuple[Message, str]:
    """The message with a real result, and what the model reads of it. A failure that the tool reported is one there.

    Where the entry would be too large, that is a word on where the result is.
    """
    name = told.tool_name
    value, text = reported(value)
    if text is not None:
        value, is_error = text, True
    message = tool_result_message(told.tool_call_id, name, value, is_error=is_error, dialect=store.dialect)
    if store.fits(message, run=run, receipt=told):
        return message, text_of(value)
    text = _TOO_LARGE.format(tool=name, size=len(to_json(message)), kv_key=told.key)
    return tool_result_message(told.tool_call_id, name, text, dialect=store.dialect), text


async def shown_messages(store: SessionStore, attempts: Attempts, late: dict[str, Message]) -> list[Message]:
    """The messages that go to a model, with real results in place of what wake wrote before there were any.

    That is where the very attempt that a close speaks of came to a result after all, since its holder came back or a
    person settled it. (That it had no effect is for wake to say, which fences it first.) ``late`` keeps results, by
    entry: completed is final. Raises Unreachable.
    """

    async def message_of(entry: SessionEntry) -> Message:
        told = entry.receipt
        message = cast("Message", entry.message)
        if told is None or told.status == "completed" or not told.attempts:
            return message
        if entry.id in late:
            return late[entry.id]
        found = await newest(attempts.bucket, told.key, attempts.pace(30.0, patience=CLAIM_PATIENCE))
        if found is None or found.revision <= told.revision:
            return message
        try:
            seen = seen_of(attempts.bucket.of(told.key).name, told.key, found)
            record = seen.record
            if record.status != "completed" or record.attempts != told.attempts:
                return message
            value = await attempts.load(seen, record.result)
        except (ReceiptErased, CorruptRecord, UnsupportedRecord, PayloadMissing) as error:
            _log.warning("what became of a call cannot be read: %s", error)
            return message
        late[entry.id], _ = result_message(store, told, value, run=entry.run)
        return late[entry.id]

    return await all_of(map(message_of, store.branch().shown))
