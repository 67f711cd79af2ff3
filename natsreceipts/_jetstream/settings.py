"""The settings of a bucket: made as they must be, and compared with what is there.

Made through the stream API, because nats-py's KV configuration cannot say them all.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json, to_json

from natsreceipts._jetstream.bucket import JetStreamBucket, api_error, stream_of, subjects_of
from natsreceipts._jetstream.connection import Connection, NoResponders, NotSent
from natsreceipts._jetstream.findings import MIN_HISTORY, Finding, edit_of, findings, objects_findings
from natsreceipts._jetstream.objects import JetStreamObjects
from natsreceipts.errors import NotProvisioned, PermissionDenied, Unreachable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BucketSpec",
    "bind",
    "bind_objects",
    "bucket_of",
    "config_of",
    "info_of",
    "make",
    "objects_config",
    "partitions_in",
    "stream_config",
]

_PARTITIONS = "natsreceipts-partitions"
"""Where a stream's metadata say in how many buckets the receipts are."""

_STREAM_NOT_FOUND = 10059
_NAME_IN_USE = 10058
_NANOSECONDS = 1_000_000_000
_PATIENCE = 2.0
"""Seconds after which a request that makes something is made again."""


class BucketSpec(NamedTuple):
    """What a bucket is made with: its name, replicas, revisions kept, and retention in seconds (0: for ever).

    ``of_sessions``: it is the session stream, which keeps every entry. ``partitions``: in how many buckets the receipts
    beside it are, or it is one of how many.
    """

    name: str
    replicas: int = 1
    history: int = MIN_HISTORY
    retention: float = 0.0
    of_sessions: bool = False
    partitions: int = 1


def stream_config(spec: BucketSpec) -> dict[str, Any]:
    """The stream below a bucket, as the JetStream API takes it."""
    return {
        "name": stream_of(spec.name, of_sessions=spec.of_sessions),
        "subjects": [subjects_of(spec.name, of_sessions=spec.of_sessions) + ">"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_msgs_per_subject": -1 if spec.of_sessions else spec.history,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": round(spec.retention * _NANOSECONDS),
        "max_msg_size": -1,
        "num_replicas": spec.replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
        "deny_delete": True,
        "deny_purge": True,
        **({"metadata": {_PARTITIONS: str(spec.partitions)}} if spec.partitions > 1 else {}),
    }


def partitions_in(config: Mapping[str, Any]) -> int:
    """In how many buckets the receipts are, by a stream's configuration; 1 where it says nothing."""
    metadata: Mapping[str, str] = config.get("metadata") or {}
    said = metadata.get(_PARTITIONS, "1")
    return int(said) if said.isascii() and said.isdigit() else 0


async def bind(
    connection: Connection, name: str, *, lease: float, timeout: float, of_sessions: bool = False
) -> tuple[JetStreamBucket, list[Finding]]:
    """The bucket (or session stream) ``name`` as it is, and what is weaker than it should be.

    Raises NotProvisioned where it is missing or its settings are refused, Unreachable, PermissionDenied.
    """
    stream = stream_of(name, of_sessions=of_sessions)
    kind = "stream" if of_sessions else "bucket"
    answer = await _api(connection, f"$JS.API.STREAM.INFO.{stream}", {}, name, timeout)
    error = api_error(answer)
    if error is not None:
        if error.code == _STREAM_NOT_FOUND:
            raise NotProvisioned(name, kind=kind).because(error) from error
        raise Unreachable(f"the settings of {kind} {name!r} could not be read: {error}").because(error) from error
    config: dict[str, Any] = answer["config"]
    found = findings(config, lease=lease, of_sessions=of_sessions)
    _refuse(name, kind, stream, found)
    return bucket_of(connection, name, answer, of_sessions=of_sessions), found


def bucket_of(
    connection: Connection, name: str, info: Mapping[str, Any], *, of_sessions: bool = False
) -> JetStreamBucket:
    """The bucket (or session stream) ``name``, of whose stream this is the STREAM.INFO; its settings are not judged."""
    config: Mapping[str, Any] = info["config"]
    return JetStreamBucket(
        connection,
        name,
        created=info["created"],
        high_water=int(info["state"]["last_seq"]),
        replicas=int(config.get("num_replicas") or 1),
        retention=config.get("max_age", 0) / _NANOSECONDS,
        direct=bool(config.get("allow_direct")),
        of_sessions=of_sessions,
        partitions=partitions_in(config),
    )


async def make(connection: Connection, bucket: str, config: dict[str, Any], *, timeout: float) -> bool:
    """Make a stream unless it is there; one that is there is never changed. ``bucket`` is what errors call it.

    Whether it was not there. (A try whose answer was lost may have made it: then this says that it was.)

    Raises NotProvisioned where the server refuses it, Unreachable, PermissionDenied.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    subject = f"$JS.API.STREAM.CREATE.{config['name']}"
    while True:
        error = api_error(await _until_answered(connection, subject, config, bucket, deadline))
        if error is None or error.code == _NAME_IN_USE:
            return error is None
        if error.code == 10008 and loop.time() < deadline:  # no meta leader yet, or not enough peers up
            await asyncio.sleep(0.1)
            continue
        advice = "change what the server objects to"
        raise NotProvisioned(bucket, f"could not be made: {error}", advice=advice).because(error) from error


def objects_config(spec: BucketSpec) -> dict[str, Any]:
    """The stream below an object store (ADR-20), which needs roll-ups; its horizon is the receipts' plus a day."""
    return {
        "name": f"OBJ_{spec.name}",
        "subjects": [f"$O.{spec.name}.C.>", f"$O.{spec.name}.M.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": round((spec.retention + 86_400) * _NANOSECONDS) if spec.retention else 0,
        "num_replicas": spec.replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
    }


async def config_of(connection: Connection, stream: str, name: str, *, timeout: float) -> dict[str, Any] | None:
    """The configuration of a stream, None where it is missing. Raises as `info_of`."""
    info = await info_of(connection, stream, name, timeout=timeout)
    return info["config"] if info is not None else None


async def info_of(connection: Connection, stream: str, name: str, *, timeout: float) -> dict[str, Any] | None:
    """What the server says of a stream, None where it is missing. ``name`` is what errors call it.

    Raises Unreachable, PermissionDenied.
    """
    answer = await _api(connection, f"$JS.API.STREAM.INFO.{stream}", {}, name, timeout)
    error = api_error(answer)
    if error is None:
        return answer
    if error.code == _STREAM_NOT_FOUND:
        return None
    raise Unreachable(f"the settings of {name!r} could not be read: {error}").because(error) from error


async def bind_objects(
    connection: Connection, name: str, *, retention: float, timeout: float
) -> tuple[JetStreamObjects, list[Finding]]:
    """The object store ``name`` as it is, and what is weaker than it should be for receipts kept ``retention`` seconds.

    Raises NotProvisioned where it is missing or takes no payloads, Unreachable, PermissionDenied.
    """
    stream, kind = f"OBJ_{name}", "object store"
    answer = await _api(connection, f"$JS.API.STREAM.INFO.{stream}", {}, name, timeout)
    error = api_error(answer)
    if error is not None:
        if error.code == _STREAM_NOT_FOUND:
            raise NotProvisioned(name, kind=kind).because(error) from error
        raise Unreachable(f"object store {name!r} could not be looked at: {error}").because(error) from error
    found = objects_findings(answer["config"], retention=retention)
    _refuse(name, kind, stream, found)
    return JetStreamObjects(connection, name), found


def _refuse(name: str, kind: str, stream: str, found: list[Finding]) -> None:
    refused = [finding for finding in found if finding.refused]
    if refused:
        raise NotProvisioned(
            name,
            f"cannot be used: it {'; it '.join(finding.text for finding in refused)}",
            advice=f"a store that is there is never changed by us. To put it right: {edit_of(stream, refused)}",
            kind=kind,
        )


async def _api(
    connection: Connection, subject: str, body: dict[str, Any], bucket: str, timeout: float
) -> dict[str, Any]:
    try:
        reply = await connection.request(subject, to_json(body) if body else b"", timeout=timeout)
    except NotSent as error:
        if isinstance(error.cause, PermissionDenied):
            raise error.cause from None
        raise Unreachable(f"bucket {bucket!r} cannot be reached: {error.cause}") from error.cause
    except NoResponders as error:
        raise Unreachable(
            f"the server answers for no bucket {bucket!r}: JetStream is not enabled on it, or has no leader right now"
        ).because(error) from error
    except Unreachable:
        connection.check_inbox()  # a client of the host's may learn of it late
        raise
    try:
        return from_json(reply.data)
    except ValueError as error:
        raise Unreachable(f"the server's answer about bucket {bucket!r} is no JSON").because(error) from error


async def _until_answered(
    connection: Connection, subject: str, body: dict[str, Any], bucket: str, deadline: float
) -> dict[str, Any]:
    """A request that may be made twice: a cluster that has just started loses some without a word (measured)."""
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        patience = max(min(_PATIENCE, deadline - started), 0.001)
        try:
            return await _api(connection, subject, body, bucket, patience)
        except Unreachable:
            now = loop.time()
            if now >= deadline or now - started < patience:  # at its end, or for another reason than silence
                raise
