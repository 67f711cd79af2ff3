"""What is sealed, and what it is bound to: payloads and errors of receipts, bodies of session entries.

Sealed is the JSON that would stand there in plain (a payload, an error's message, a body), by a key of the tenant's,
and bound to its place, so that it does not open anywhere else:

=============  ==============================================================================
what           bound to
=============  ==============================================================================
a payload      the receipt's `key.string`, and ``args``, ``result`` or ``step `` and its name
an error       the receipt's `key.string`, and ``error``
a body         the session's key, and the entry's id, parent, kind, run and dialect
=============  ==============================================================================

What does the sealing is given from outside (`natsreceipts.cipher`).
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import from_json, to_json

from natsreceipts.errors import KeyMissing, NatsReceiptsError, SealBroken, Unreachable
from natsreceipts.wire import EntryRecord, ErrorInfo, Payload, ReceiptRecord, SealedBox

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from natsreceipts.identity import ReceiptKey

__all__ = ["STEP", "Cipher", "SealingKey", "Seals", "sealed_error", "sealed_in", "sealed_payload"]

STEP = "step "
"""Before the name of a step, in what its output is bound to."""


class SealingKey(Protocol):
    """One key of a tenant's."""

    @property
    def id(self) -> str:
        """What tells it from the tenant's other keys."""
        ...

    def seal(self, data: bytes, bound_to: bytes) -> bytes:
        """Seal ``data`` so that it opens only with this key and where ``bound_to`` is the same."""
        ...

    def open(self, sealed: bytes, bound_to: bytes) -> bytes:
        """Open what `seal` made. Raises ValueError where it does not open."""
        ...


class Cipher(Protocol):
    """Where keys come from."""

    async def current(self, tenant: str) -> SealingKey | None:
        """The key that is sealed with now; None where the tenant has none."""
        ...

    async def named(self, tenant: str, key_id: str) -> SealingKey | None:
        """The key of that id; None where there is none."""
        ...


async def _answer(asked: Awaitable[SealingKey | None], tenant: str) -> SealingKey | None:
    """What the host's cipher answers; its errors are not taken for those of a body around, which say what it did."""
    try:
        return await asked
    except NatsReceiptsError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise Unreachable(f"the keys of tenant {tenant!r} could not be asked for ({kind}); try again") from error


def _in_receipt(key: ReceiptKey, place: str) -> bytes:
    return f"natsreceipts/1 receipt\0{key.string}\0{place}".encode()


def _in_session(session: str, record: EntryRecord) -> bytes:
    names = [session, record.id, record.parent_id, record.kind, record.run_id, record.dialect]
    return b"natsreceipts/1 entry\0" + to_json(names)


def _box(key: SealingKey, data: bytes, bound_to: bytes) -> SealedBox:
    return SealedBox(key=key.id, data=base64.b64encode(key.seal(data, bound_to)).decode())


def sealed_payload(key: SealingKey, receipt: ReceiptKey, place: str, payload: bytes) -> bytes:
    """The JSON of a sealed payload, from the JSON of a plain one."""
    return Payload(sealed=_box(key, payload, _in_receipt(receipt, place))).to_bytes()


def sealed_error(key: SealingKey, receipt: ReceiptKey, error: ErrorInfo) -> ErrorInfo:
    """The error with its message sealed."""
    box = _box(key, error.message.encode(), _in_receipt(receipt, "error"))
    return error.model_copy(update={"message": "", "sealed": box})


def sealed_in(record: ReceiptRecord) -> str | None:
    """The id of a key that something in a record is sealed with; None where all of it is plain."""
    if record.error is not None and record.error.sealed is not None:
        return record.error.sealed.key
    payloads = (record.args, record.result, *(record.steps or {}).values())
    return next((p.sealed_with for p in payloads if p is not None and p.sealed_with is not None), None)


class Seals:
    """Seals and opens with a cipher's keys, or (None) seals nothing and opens nothing."""

    def __init__(self, cipher: Cipher | None) -> None:
        self._cipher = cipher

    @property
    def on(self) -> bool:
        """Whether what is written is sealed."""
        return self._cipher is not None

    async def sealing(self, key: ReceiptKey) -> SealingKey | None:
        """The key that a call's data is sealed with now; None where nothing is sealed.

        Raises KeyMissing, and Unreachable where it cannot be asked for.
        """
        if self._cipher is None:
            return None
        found = await _answer(self._cipher.current(key.tenant), key.tenant)
        if found is None:
            raise KeyMissing(key, tenant=key.tenant, key_id=None, what="record")
        return found

    async def value(self, key: ReceiptKey, place: str, key_id: str, sealed: bytes) -> Any:
        """The value of a sealed payload. Raises KeyMissing, SealBroken, and ValueError for one that is no payload."""
        what = {"args": "arguments"}.get(place, place)
        opened = await self._opened(key, key.tenant, what, key_id, sealed, _in_receipt(key, place))
        return Payload.model_validate_json(opened).value()

    async def error(self, key: ReceiptKey, error: ErrorInfo) -> ErrorInfo:
        """An error with its message. Raises KeyMissing and SealBroken."""
        box = error.sealed
        if box is None:
            return error
        try:
            opened = await self._opened(key, key.tenant, "error", box.key, box.raw(), _in_receipt(key, "error"))
            return error.model_copy(update={"message": opened.decode(), "sealed": None})
        except ValueError as broken:
            raise SealBroken(key, tenant=key.tenant, key_id=box.key, what="error") from broken

    async def sealed_entry(self, tenant: str, session: str, record: EntryRecord) -> EntryRecord:
        """An entry as it is written: with its body sealed, where it has a message. Raises KeyMissing."""
        if self._cipher is None or record.kind in ("suspend", "resume"):
            return record
        key = await _answer(self._cipher.current(tenant), tenant)
        if key is None:
            raise KeyMissing(session, tenant=tenant, key_id=None, what="body")
        box = _box(key, to_json(record.body), _in_session(session, record))
        fields = {name: getattr(record, name) for name in record.model_fields_set if name != "body"}
        return EntryRecord(**fields, sealed=box)

    async def opened_entry(self, tenant: str, session: str, seq: int, record: EntryRecord) -> EntryRecord:
        """An entry with its body. Raises KeyMissing, SealBroken, and ValueError for a body that does not fit."""
        box = record.sealed
        if box is None:
            return record
        where, bound_to = f"{session}, entry {seq}", _in_session(session, record)
        opened = await self._opened(where, tenant, "body", box.key, box.raw(), bound_to)
        fields = {name: getattr(record, name) for name in record.model_fields_set if name not in ("body", "sealed")}
        return EntryRecord(**fields, body=from_json(opened))

    async def _opened(
        self, key: ReceiptKey | str, tenant: str, what: str, key_id: str, sealed: bytes, bound_to: bytes
    ) -> bytes:
        found = await _answer(self._cipher.named(tenant, key_id), tenant) if self._cipher is not None else None
        if found is None:
            raise KeyMissing(key, tenant=tenant, key_id=key_id, what=what)
        try:
            return found.open(sealed, bound_to)
        except ValueError as error:
            raise SealBroken(key, tenant=tenant, key_id=key_id, what=what) from error
