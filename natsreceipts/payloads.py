"""Large payloads: out of the record and into the object store on the way in, and back on the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from natsreceipts._jetstream import ObjectInfo
from natsreceipts.errors import CorruptRecord, NatsReceiptsError, PayloadMissing, Unreachable, with_key
from natsreceipts.payload import pack, unpack
from natsreceipts.seals import Seals
from natsreceipts.wire import ObjectRef, Payload, ReceiptRecord

if TYPE_CHECKING:
    from natsreceipts._jetstream import Objects
    from natsreceipts.fence import Pace
    from natsreceipts.identity import ReceiptKey

__all__ = ["PayloadStore"]

_READ_TIMEOUT = 5.0
"""Seconds that one page of an object may take."""


class PayloadStore:
    """The payloads of one bucket that are too large for its records."""

    def __init__(self, objects: Objects, *, inline_limit: int, seals: Seals | None = None) -> None:
        self._objects = objects
        self.seals = seals or Seals(None)
        """What is sealed is opened with these."""
        self.inline_limit = inline_limit
        """Bytes of a record as a whole, above which payloads move out of it."""

    async def moved(self, record: ReceiptRecord, pace: Pace, *, limit: int) -> ReceiptRecord:
        """The record with its payloads moved out, largest first, until it fits ``limit`` bytes or all are moved.

        Objects are written before the record that names them, as MessagePack, under ``<kv key>.<write nonce>.<n>``,
        a name that is never used again. Raises Unreachable, PermissionDenied, NotEncodable.
        """
        payloads: dict[tuple[str, str], Payload] = {
            **{("steps", step): payload for step, payload in (record.steps or {}).items()},
            **{(name, ""): p for name in ("args", "result") if (p := getattr(record, name)) is not None},
        }
        inline = [(len(p.to_bytes()), place) for place, p in payloads.items() if p.object is None]
        inline.sort(key=lambda sized: sized[0], reverse=True)
        size = len(record.to_bytes())
        for number, (length, place) in enumerate(inline):
            if size <= limit:
                break
            name = f"{record.key.kv_key}.{record.write}.{number}"
            payloads[place] = await self._put(name, payloads[place], pace)
            size -= length - len(payloads[place].to_bytes())
        changed: dict[str, Any] = {name: p for (name, step), p in payloads.items() if not step}
        if record.steps:
            changed["steps"] = {step: p for (_, step), p in payloads.items() if step}
        return record.model_copy(update=changed)

    async def _put(self, name: str, payload: Payload, pace: Pace) -> Payload:
        box = payload.sealed
        data = box.raw() if box is not None else pack(payload.value())
        sealed = {"sealed_with": box.key} if box is not None else {}
        number = 0
        while True:
            try:
                # Whatever an unfinished try left behind has no meta message, so no record can name it.
                info = await self._objects.put(f"{name}.{number}" if number else name, data, timeout=pace.next_try())
                return Payload(object=ObjectRef(name=info.name, digest=info.digest, size=info.size, **sealed))
            except Unreachable:
                if pace.over:
                    raise
            number += 1
            await pace.pause()

    async def load(self, bucket: str, key: ReceiptKey, revision: int, payload: Payload, place: str) -> Any:
        """A payload's value, wherever it is. ``place``: where it stands in the record (`seals`).

        Raises PayloadMissing where its object is gone or changed, KeyMissing and SealBroken where it is sealed and
        cannot be opened, CorruptRecord where it cannot be read, and Unreachable.
        """
        try:
            if payload.sealed is not None:
                return await self.seals.value(key, place, payload.sealed.key, payload.sealed.raw())
            if payload.object is None:
                return payload.value()
            try:
                data = await self._objects.get(_info(payload.object), timeout=_READ_TIMEOUT)
            except NatsReceiptsError as error:
                raise with_key(error, key)  # noqa: B904 - it is the same error
            if data is None:
                raise PayloadMissing(key, store=self._objects.name, name=payload.object.name)
            if payload.object.sealed_with is not None:
                return await self.seals.value(key, place, payload.object.sealed_with, data)
            return unpack(data)
        except ValueError as error:
            raise CorruptRecord(bucket, key, revision, f"payload: {error}") from error


def _info(ref: ObjectRef) -> ObjectInfo:
    return ObjectInfo(ref.name, ref.digest, ref.size)
