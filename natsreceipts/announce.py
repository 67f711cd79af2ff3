"""What is told of calls by notices: that one needs a person, and that a person has settled one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from natsreceipts.background import see_through
from natsreceipts.errors import (
    AmbiguousCall,
    BucketReplaced,
    CorruptRecord,
    InvalidName,
    NotRecorded,
    PayloadMissing,
    ReceiptErased,
    SealedError,
    UnsupportedRecord,
)
from natsreceipts.identity import ReceiptKey, name_from_token, split_kv_key
from natsreceipts.notice import RunNoticeFact, fits_detail

if TYPE_CHECKING:
    from collections.abc import Callable

    from natsreceipts.notices import NoticeBoard
    from natsreceipts.receipts import Receipt

__all__ = ["NEEDS_A_PERSON", "Announcer"]

_log = logging.getLogger("natsreceipts")

NEEDS_A_PERSON: dict[type[Exception], str] = {
    AmbiguousCall: "ambiguous-call",
    NotRecorded: "call-not-recorded",
    PayloadMissing: "payload-missing",
    SealedError: "payload-sealed",
    ReceiptErased: "receipt-erased",
    CorruptRecord: "receipt-corrupt",
    UnsupportedRecord: "receipt-unsupported",
    BucketReplaced: "bucket-replaced",
}
"""The errors of a call that only a person can settle, and the decision that a notice of one names."""

_WITHIN = 20.0
"""Seconds that a notice is tried for, also while its teller is being cancelled."""


class Announcer:
    """Files the notices that calls give rise to, at the endpoint of the call's tenant and on its run.

    A notice that cannot be filed never stands in the way of what it was to tell of: it is logged as a warning. The
    ``step`` of each is the KV key of the call's receipt. ``fresh`` makes random names.
    """

    def __init__(self, board: NoticeBoard, fresh: Callable[[], str]) -> None:
        self._board = board
        self._fresh = fresh

    async def needs_a_person(self, operator: str, error: Exception) -> None:
        """Tell an operator of one of `NEEDS_A_PERSON`, once: the id comes from key, attempt and revision.

        Of a NotRecorded from the attempt's nonce: each attempt is another execution, and of one it is raised again for
        as long as the outcome cannot be recorded.
        """
        decision = next((said for kind, said in NEEDS_A_PERSON.items() if isinstance(error, kind)), "")
        attempt, revision = getattr(error, "attempts", None), getattr(error, "revision", None)
        once = f"{attempt or 0}:{revision or 0}"
        if isinstance(error, NotRecorded):
            once = error.token or self._fresh()
        key = getattr(error, "key", None)
        await self._tell(
            operator,
            key,
            request=f"{decision}:{key if isinstance(key, str) else getattr(key, 'kv_key', '')}:{once}",
            decision=decision,
            outcome="needs-a-person",
            detail={"attempt": attempt, "revision": revision},
        )

    async def resolved(self, addressee: str, receipt: Receipt) -> None:
        """Tell an agent that its call was settled: as completed, or as not applied."""
        await self._tell(
            addressee,
            receipt.key,
            request=f"call-resolved:{receipt.kv_key}:{receipt.attempts}:{receipt.revision}",
            decision="call-resolved",
            outcome="completed" if receipt.status == "completed" else "not-applied",
            detail={
                "attempt": receipt.attempts,
                "revision": receipt.revision,
                "by": receipt.resolved.by if receipt.resolved else None,
            },
        )

    async def _tell(
        self,
        addressee: str,
        key: ReceiptKey | str | None,
        *,
        request: str,
        decision: str,
        outcome: str,
        detail: dict[str, str | int | None],
    ) -> None:
        async def file() -> None:
            try:
                call = _names(key)
                said = {**detail, "args-hash": call.args_hash, "tool": call.tool}
                fitting = {name: value for name, value in said.items() if value is not None and fits_detail(value)}
                await self._board.of(call.tenant, call.run).file(
                    step=call.kv_key,
                    request_id=request,
                    addressee=addressee,
                    fact=RunNoticeFact(decision, outcome, fitting),
                )
            except asyncio.CancelledError:
                _log.warning("no notice of %r on %s to %r was filed in time", decision, key, addressee)
                raise
            except Exception as error:  # noqa: BLE001 - it must not hide what it was to tell of
                _log.warning("no notice of %r on %s to %r was filed: %s", decision, key, addressee, error)

        with contextlib.suppress(TimeoutError):  # it is logged
            await see_through(file(), within=_WITHIN)


def _names(key: ReceiptKey | str | None) -> ReceiptKey:
    if isinstance(key, ReceiptKey):
        return key
    if key is None:
        raise InvalidName("key", None, "the error names no call")
    tenant, run, tool, args_hash = split_kv_key(key)
    names = [name_from_token(token) for token in (tenant, run, tool)]
    if None in names:
        raise InvalidName("key", key, "its names are hashed")
    return ReceiptKey(names[0] or "", names[1] or "", names[2] or "", args_hash)
