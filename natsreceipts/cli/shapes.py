"""Receipts as JSON: the wire's fields under the wire's names, with the KV key as ``key`` and the server's time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from natsreceipts.payload import NotEncodable, normal_form

if TYPE_CHECKING:
    import datetime as dt

    from natsreceipts.receipt import Receipt, Revision

__all__ = ["erased_json", "readable", "rfc3339", "wire_json"]


def rfc3339(time: dt.datetime) -> str:
    """A server's time."""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def wire_json(receipt: Receipt) -> dict[str, Any]:
    """A receipt: ``key``, ``revision``, ``updated``, and its record as it stands in the bucket."""
    head = {"key": receipt.kv_key, "revision": receipt.revision, "updated": rfc3339(receipt.updated)}
    return {**head, **json.loads(receipt.record.to_bytes())}


def erased_json(key: str, marker: Revision) -> dict[str, Any]:
    """The delete marker that stands in the place of a receipt."""
    return {"key": key, "revision": marker.revision, "updated": rfc3339(marker.time), "status": "erased"}


def readable(value: Any) -> dict[str, Any]:
    """A decoded payload: as ``json`` where JSON can say it, else its Python form as ``text``."""
    try:
        plain, json_holds = normal_form(value)
    except NotEncodable:
        plain, json_holds = value, False
    return {"json": plain} if json_holds else {"text": repr(value)}
