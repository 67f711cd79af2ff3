"""Harmless requests: what a user may do is found by asking for what cannot exist. Nothing is stored or changed.

A write is tried with the expectation that it goes to a stream whose name no stream can have. Every server refuses
that before it stores anything, whatever stands under the key, and only if the user may publish there at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from natsreceipts._jetstream.bucket import api_error
from natsreceipts._jetstream.connection import NoResponders, NotSent
from natsreceipts.errors import PermissionDenied, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from natsreceipts._jetstream.connection import Connection

__all__ = ["subject_pages", "try_publish", "try_request", "try_request_many"]

_NO_STREAM = {"Nats-Expected-Stream": "no.such.stream"}  # dots: no stream can be called that


async def try_publish(connection: Connection, subject: str, *, timeout: float) -> None:
    """Raise PermissionDenied where the user may not publish there, Unreachable where nobody answered."""
    await _try(connection, subject, b"", timeout, headers=_NO_STREAM)


async def try_request(connection: Connection, subject: str, query: dict[str, Any] | None, *, timeout: float) -> None:
    """Raise PermissionDenied where the user may not ask that, Unreachable where nobody answered."""
    await _try(connection, subject, to_json(query) if query else b"", timeout)


async def try_request_many(connection: Connection, subject: str, query: dict[str, Any], *, timeout: float) -> None:
    """`try_request` for what is answered by many messages, of which the last has a status."""
    try:
        await connection.request_many(subject, to_json(query), timeout=timeout)
    except (NotSent, NoResponders, Unreachable) as error:
        raise _told(subject, error) from error


async def _try(
    connection: Connection, subject: str, data: bytes, timeout: float, headers: dict[str, str] | None = None
) -> None:
    try:
        await connection.request(subject, data, timeout=timeout, headers=headers)
    except (NotSent, NoResponders, Unreachable) as error:
        raise _told(subject, error) from error


def _told(subject: str, error: NotSent | NoResponders | Unreachable) -> PermissionDenied | Unreachable:
    """The permission where it is one: a client of the host's learns of it after the time only."""
    cause = error.cause if isinstance(error, NotSent) else error.__cause__
    if isinstance(cause, PermissionDenied):
        return PermissionDenied(cause.operation, cause.subject)
    if isinstance(error, Unreachable):
        return error
    return Unreachable(f"nobody answers on {subject!r}" if isinstance(error, NoResponders) else str(cause))


async def subject_pages(
    connection: Connection, stream: str, pattern: str, *, timeout: float
) -> AsyncGenerator[list[str], None]:
    """The subjects of a stream that match, sorted, as many at a time as the server tells (100,000).

    Subjects that come or go meanwhile may be missed. Raises Unreachable, PermissionDenied.
    """
    offset = 0
    subject = f"$JS.API.STREAM.INFO.{stream}"
    while True:
        query = to_json({"subjects_filter": pattern, "offset": offset})
        try:
            answer: dict[str, Any] = from_json((await connection.request(subject, query, timeout=timeout)).data)
        except (NotSent, NoResponders, Unreachable) as error:
            raise _told(subject, error) from error
        error = api_error(answer)
        if error is not None:
            raise Unreachable(f"the keys of stream {stream!r} could not be read: {error}").because(error)
        found: dict[str, int] = answer["state"].get("subjects") or {}
        if found:
            yield sorted(found)
        offset += len(found)
        if not found or offset >= int(answer.get("total") or 0):
            return
