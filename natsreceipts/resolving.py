"""What a person says who settles a call, and which receipts can be settled so. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from natsreceipts.attempt import Resolution
from natsreceipts.decision import Effect
from natsreceipts.errors import CallInFlight, InvalidName, InvalidSetting, NotResolvable, brief
from natsreceipts.identity import ReceiptKey, name_from_token, split_kv_key
from natsreceipts.notice import check_run
from natsreceipts.payload import NotEncodable
from natsreceipts.wire import ReceiptRecord, ResolvedBy, encode_payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from natsreceipts.receipt import Revision

__all__ = ["UNSET", "check_notifiable", "check_resolvable", "live", "names_of", "resolution_of"]

_LONGEST_TEXT = 2000
"""Characters of who settled a call, and of why."""

UNSET: Any = object()
"""No result was given (None is one)."""


def resolution_of(completed: object, *, not_applied: bool, by: str, reason: str) -> tuple[Resolution, Any]:
    """What is recorded, and the result as a replay gives it. Raises InvalidSetting."""
    for what, text in (("by", by), ("reason", reason)):
        if not isinstance(cast("object", text), str) or not text.strip():
            raise InvalidSetting(f"{what}={brief(text)}: say who settles this call and why, in a non-empty string")
        if len(text) > _LONGEST_TEXT:
            raise InvalidSetting(f"{what}: {len(text):,} characters are too many, use at most {_LONGEST_TEXT:,}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidSetting(f"{what}={brief(text)}: lone surrogates cannot be recorded") from error
    if not_applied is not True and not_applied is not False:
        raise InvalidSetting(f"not_applied={brief(not_applied)}: use True or False")
    if not_applied == (completed is not UNSET):
        raise InvalidSetting("say one of completed=RESULT and not_applied=True")
    resolved = ResolvedBy(by=by, reason=reason)
    if not_applied:
        return Resolution(resolved), None
    try:
        payload, value = encode_payload(completed)
    except NotEncodable as error:
        raise InvalidSetting(f"completed={type(completed).__name__}: {error}") from error
    return Resolution(resolved, payload), value


def check_notifiable(key: ReceiptKey, notify: str | None) -> None:
    """Raise InvalidName where somebody is to be told of a call on a run that notices have no room for."""
    if notify is not None:
        check_run(key.run)


def check_resolvable(record: ReceiptRecord, key: ReceiptKey) -> None:
    """Raise NotResolvable for a status that no person settles. (Of a running one its lease decides.)"""
    reason = {
        "completed": "its result is on record, and final",
        "withdrawn": "no attempt was ever made",
        "failed": "the next call makes a new attempt"
        if record.not_applied or record.effect is not Effect.OPAQUE
        else "",
    }.get(record.status)
    if reason:
        raise NotResolvable(key, status=record.status, reason=reason)


def live(key: ReceiptKey, left: float) -> CallInFlight:
    """The error for a running call whose lease is not over for so many seconds."""
    reason = "an attempt holds a live lease: wait for its end, or say even_if_running if you know better"
    return CallInFlight(key, retry_after=left, reason=reason)


def names_of(kv_key: str, revisions: Sequence[Revision]) -> ReceiptKey:
    """The names of a key whose newest record is gone, of what is left of it. Raises InvalidName where nothing is."""
    last = next((revision.receipt for revision in reversed(revisions) if revision.receipt is not None), None)
    if last is not None:
        return last.key
    tenant, run, tool, args_hash = split_kv_key(kv_key)
    names = [name_from_token(token) for token in (tenant, run, tool)]
    if None in names:
        raise InvalidName(
            "key",
            kv_key,
            "its names are hashed, and no revision is left that holds them: settle it from Python, with "
            "toolkit.receipts.resolve(ReceiptKey(tenant, run, tool, args_hash), ...)",
        )
    return ReceiptKey(names[0] or "", names[1] or "", names[2] or "", args_hash)
