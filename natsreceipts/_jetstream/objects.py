"""An object store (ADR-20) for payloads that are too large for a record, over raw JetStream requests.

nats-py's own is not used: its ``get`` reads through a consumer that hangs if the stream vanishes, and its errors
are nats-py's. What is written is what it, the ``nats`` CLI and the other clients read: chunks on one subject, and a
meta message that is written last.
"""

from __future__ import annotations

import asyncio
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
_LOOK_AGAIN = 0.05
"""Seconds until a replica that is behind is asked again."""


class ObjectMeta(NamedTuple):
    """What stands in the store under a name: where its chunks are, their digest, and when it was written."""

    nuid: str
    digest: str | None
    stamp: str
    """The server's timestamp (RFC 3339, UTC)."""


class _Read(NamedTuple):
    """The object's bytes, or a subject of which this replica had only ``found`` messages (None: it is as it says)."""

    data: bytes | None
    lacking: str | None
    found: int


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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            read = await self._read(info, timeout)
            if read.data is not None or read.lacking is None:
                return read.data
            # Any replica answers, also one that is behind, as it was just started again: only the leader can say that
            # there is no more.
            if (await self._at_leader(read.lacking, timeout) or 0) <= read.found:
                return None
            if loop.time() >= deadline:
                raise Unreachable(f"object store {self.name!r}: the replica that answers does not have {info.name} yet")
            await asyncio.sleep(_LOOK_AGAIN)

    async def _read(self, info: ObjectInfo, timeout: float) -> _Read:
        """What one replica has of an object."""
        meta = await self._newest_meta(info.name, timeout)
        if meta is None:
            return _Read(None, self._meta(info.name), 0)
        if isinstance(meta, str) or meta.digest != info.digest:
            return _Read(None, None, 0)
        chunks = f"{self._subject}.C.{meta.nuid}"
        data = bytearray()
        sequence, found, whole = 0, 0, False
        while not whole:
            query = {"seq": sequence + 1, "next_by_subj": chunks, "batch": _PAGE}
            replies = await self._ask_many(to_json(query), timeout)
            end = replies.pop().headers or {}
            for chunk in replies:
                data += chunk.data
                sequence = int((chunk.headers or {})["Nats-Sequence"])
            found += len(replies)
            whole = end.get("Nats-Num-Pending") == "0" or not replies
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        return _Read(bytes(data) if digest == info.digest else None, chunks, found)

    async def look(self, name: str, *, timeout: float) -> ObjectMeta | None:
        """What a replica has under a name, without its bytes; None where there is nothing, or no more. As `get`."""
        meta = await self._newest_meta(name, timeout)
        return None if isinstance(meta, str) else meta

    async def _newest_meta(self, name: str, timeout: float) -> ObjectMeta | str | None:
        """What a replica says of an object; as a text, why that is no object; None: it has nothing."""
        try:
            reply = await self._request(f"{self._direct_get}.{self._meta(name)}", b"", timeout)
        except Unreachable:
            if await self._at_leader(self._meta(name), timeout) is None:
                return "the store is gone"
            raise
        headers = reply.headers or {}
        if headers.get("Status") == "404":
            return None
        try:
            meta: dict[str, Any] = from_json(reply.data)
            if meta.get("deleted"):
                return "deleted"
            return ObjectMeta(str(meta["nuid"]), meta.get("digest"), headers.get("Nats-Time-Stamp", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            return "unreadable"

    async def chunk_time(self, nuid: str, *, timeout: float) -> str | None:
        """The server's timestamp of the newest chunk under ``nuid``, None where there is none. As `get`."""
        reply = await self._request(f"{self._direct_get}.{self._subject}.C.{nuid}", b"", timeout)
        return (reply.headers or {}).get("Nats-Time-Stamp")

    async def _at_leader(self, subject: str, timeout: float) -> int | None:
        """How many messages the leader has on a subject; None where the whole store is gone."""
        asked = to_json({"subjects_filter": subject})
        reply = await self._request(f"$JS.API.STREAM.INFO.OBJ_{self.name}", asked, timeout)
        try:
            answer: dict[str, Any] = from_json(reply.data)
            error = api_error(answer)
            if error is None:
                subjects: dict[str, int] = answer["state"].get("subjects") or {}
                return int(subjects.get(subject, 0))
        except (ValueError, KeyError, TypeError, AttributeError) as unreadable:
            raise Unreachable(f"object store {self.name!r} gave an unreadable answer") from unreadable
        if error.code == _STREAM_NOT_FOUND:
            return None
        raise Unreachable(f"object store {self.name!r} gave no answer to a read: {error}")

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
