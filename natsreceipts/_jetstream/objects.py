"""An object store (ADR-20) for payloads that are too large for a record, over raw JetStream requests.

nats-py's own is not used: its ``get`` reads through a consumer that hangs if the stream vanishes, and its errors
are nats-py's. What is written is what it, the ``nats`` CLI and the other clients read: chunks on one subject, and a
meta message that is written last.
"""

from __future__ import annotations

import base64
import hashlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json, to_json

from natsreceipts._jetstream.bucket import api_error
from natsreceipts._jetstream.connection import NoResponders, NotSent
from natsreceipts._jetstream.seam import ObjectInfo
from natsreceipts.errors import PermissionDenied, Unreachable

if TYPE_CHECKING:
    from natsreceipts._jetstream.connection import Connection, Reply

__all__ = ["JetStreamObjects", "ObjectMeta"]

_CHUNK = 128 * 1024
_PAGE = 32
"""Chunks asked for in one request: 4 MiB."""
_STREAM_NOT_FOUND = 10059


class ObjectMeta(NamedTuple):
    """What stands in the store under a name: where its chunks are, their digest, and when it was written."""

    nuid: str
    digest: str | None
    stamp: str
    """The server's timestamp (RFC 3339, UTC)."""


class JetStreamObjects:
    """One object store on one connection."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._subject = f"$O.{name}"
        self._direct_get = f"$JS.API.DIRECT.GET.OBJ_{name}"

    async def put(self, name: str, data: bytes, *, timeout: float) -> ObjectInfo:
        """Store an object under a name that was never used before (see the seam)."""
        nuid = os.urandom(11).hex()
        chunk_size = min(_CHUNK, self._connection.max_payload // 2)
        chunks = range(0, len(data), chunk_size)
        last = 0
        for start in chunks:
            # Fenced like a record: a chunk that reaches the server twice would make the object unreadable.
            fence = {"Nats-Expected-Last-Subject-Sequence": str(last)}
            last = await self._publish(f"{self._subject}.C.{nuid}", data[start : start + chunk_size], timeout, fence)
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        meta = {
            "name": name,
            "bucket": self.name,
            "nuid": nuid,
            "size": len(data),
            "chunks": len(chunks),
            "digest": digest,
            "options": {"max_chunk_size": chunk_size},
        }
        await self._publish(self._meta(name), to_json(meta), timeout, {"Nats-Rollup": "sub"})
        return ObjectInfo(name, digest, len(data))

    async def get(self, info: ObjectInfo, *, timeout: float) -> bytes | None:
        """An object's bytes; None where it is gone or is not what was stored (see the seam)."""
        meta = await self.look(info.name, timeout=timeout)
        if meta is None or meta.digest != info.digest:
            return None
        nuid = meta.nuid
        data = bytearray()
        sequence, whole = 0, False
        while not whole:
            query = {"seq": sequence + 1, "next_by_subj": f"{self._subject}.C.{nuid}", "batch": _PAGE}
            replies = await self._ask_many(to_json(query), timeout)
            end = replies.pop().headers or {}
            for chunk in replies:
                data += chunk.data
                sequence = int((chunk.headers or {})["Nats-Sequence"])
            whole = end.get("Nats-Num-Pending") == "0" or not replies
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        return bytes(data) if digest == info.digest else None

    async def look(self, name: str, *, timeout: float) -> ObjectMeta | None:
        """What stands there under a name, without its bytes; None where there is nothing, or no more. As `get`."""
        try:
            reply = await self._request(f"{self._direct_get}.{self._meta(name)}", b"", timeout)
        except Unreachable:
            if await self._deleted(timeout):
                return None
            raise
        headers = reply.headers or {}
        if headers.get("Status") == "404":
            return None
        try:
            meta: dict[str, Any] = from_json(reply.data)
            if meta.get("deleted"):
                return None
            return ObjectMeta(str(meta["nuid"]), meta.get("digest"), headers.get("Nats-Time-Stamp", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    async def chunk_time(self, nuid: str, *, timeout: float) -> str | None:
        """The server's timestamp of the newest chunk under ``nuid``, None where there is none. As `get`."""
        reply = await self._request(f"{self._direct_get}.{self._subject}.C.{nuid}", b"", timeout)
        return (reply.headers or {}).get("Nats-Time-Stamp")

    async def _deleted(self, timeout: float) -> bool:
        """Whether the server says that the whole store is gone."""
        reply = await self._request(f"$JS.API.STREAM.INFO.OBJ_{self.name}", b"", timeout)
        try:
            error = api_error(from_json(reply.data))
        except (ValueError, AttributeError):
            return False
        return error is not None and error.code == _STREAM_NOT_FOUND

    def _meta(self, name: str) -> str:
        return f"{self._subject}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    async def _publish(self, subject: str, data: bytes, timeout: float, headers: dict[str, str]) -> int:
        reply = await self._request(subject, data, timeout, headers)
        try:
            answer: dict[str, Any] = from_json(reply.data)
            error = api_error(answer)
            if error is None:
                return int(answer["seq"])
        except (ValueError, KeyError, TypeError, AttributeError) as unreadable:
            raise Unreachable(f"object store {self.name!r} gave an unreadable answer") from unreadable
        raise Unreachable(f"object store {self.name!r} refused a payload: {error}") from error

    async def _request(self, subject: str, data: bytes, timeout: float, headers: dict[str, str] | None = None) -> Reply:
        try:
            return await self._connection.request(subject, data, timeout=timeout, headers=headers)
        except NotSent as error:
            if isinstance(error.cause, PermissionDenied):
                raise error.cause from None
            raise Unreachable(f"object store {self.name!r}: {error.cause}") from error.cause
        except NoResponders:
            raise Unreachable(f"no stream answers for object store {self.name!r} right now") from None

    async def _ask_many(self, query: bytes, timeout: float) -> list[Reply]:
        try:
            return await self._connection.request_many(self._direct_get, query, timeout=timeout)
        except NotSent as error:
            if isinstance(error.cause, PermissionDenied):
                raise error.cause from None
            raise Unreachable(f"object store {self.name!r}: {error.cause}") from error.cause
        except NoResponders:
            raise Unreachable(f"no stream answers for object store {self.name!r} right now") from None
