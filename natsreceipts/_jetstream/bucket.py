"""A KV bucket over raw JetStream requests: the verbs of the seam, and what each answer of the server proves.

nats-py's own KV is not used: its ``create`` writes over delete markers and leaks the errors of a hidden read, its
errors hide whether a conflict was 10071 or 10164, its reads carry no time, and its STREAM.INFO drops the server's
clock (all measured).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import random
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from natsreceipts._jetstream.connection import Connection, NoResponders, NotSent, Reply
from natsreceipts._jetstream.seam import (
    Accepted,
    Clock,
    Conflict,
    Entry,
    Hint,
    Outcome,
    Refused,
    RivalInFlight,
    Unknown,
    nanoseconds,
)
from natsreceipts.errors import (
    BucketReplaced,
    NatsReceiptsError,
    NotProvisioned,
    PermissionDenied,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from nats.aio.msg import Msg

__all__ = ["JetStreamBucket", "JetStreamError", "api_error", "stream_of", "subjects_of"]

_WRONG_LAST_SEQUENCE = 10071
_RIVAL_IN_FLIGHT = 10164
_NO_MESSAGE = 10037
_STREAM_NOT_FOUND = 10059
_STORE_FAILED = 10077

_DEFINITE = frozenset(
    {
        10049,  # stream store failed at the header: an expectation that cannot be parsed
        10054,  # message size exceeds maximum allowed
        10060,  # expected stream does not match
        10097,  # header size exceeds maximum allowed
        10109,  # invalid operation on a sealed stream
        10111,  # rollup not permitted
        10166,  # per-message TTL is disabled
    }
)
"""Refusals that a server gives before it stores anything. Everything that is not listed proves nothing."""

_MOST_SUBJECTS = 1024
"""Keys that one batched read of newest revisions may match; above, the server answers 413 (measured)."""

_PAGE = 4096
"""Messages asked for in one page of a batched read."""

_PAGE_BYTES = 4 * 1024 * 1024
"""Bytes asked for in one page: a client that falls further behind than the server's max_pending (64 MB) is cut off."""

_LOOK_AGAIN = 0.05
_LOOK_NO_MORE = 1.0
"""Seconds after a sign until the first and the last of the looks at what it was a sign of."""

_FULL = ("maximum bytes exceeded", "maximum messages exceeded", "maximum messages per subject exceeded")
"""10077 is also the generic "store failed"; only these texts speak of the bucket's settings (measured)."""


_WAYS_OUT = {
    10039: "say `jetstream: enabled` for it in the server's configuration, or connect as a user of another account",
}


class JetStreamError(NatsReceiptsError):
    """The server refused a request."""

    def __init__(self, code: int, description: str) -> None:
        self.code = code
        self.description = description
        way_out = f" ({_WAYS_OUT[code]})" if code in _WAYS_OUT else ""
        super().__init__(f"JetStream error {code}: {description}{way_out}")


def api_error(answer: dict[str, Any]) -> JetStreamError | None:
    """The error in an answer of the JetStream API, if it holds one."""
    error = answer.get("error")
    if not isinstance(error, dict):
        return None
    found: dict[str, Any] = error  # pyright: ignore[reportUnknownVariableType]
    return JetStreamError(int(found.get("err_code") or found.get("code") or 0), str(found.get("description") or ""))


def stream_of(name: str, *, of_sessions: bool) -> str:
    """The stream of a bucket, or the session stream of that name."""
    return name if of_sessions else f"KV_{name}"


def subjects_of(name: str, *, of_sessions: bool) -> str:
    """What comes before the key in the subjects of a stream: ``$KV.<bucket>.``, or ``prod-sessions.``."""
    return f"{name.removesuffix('SESSIONS')}sessions." if of_sessions else f"$KV.{name}."


class JetStreamBucket:
    """One bucket on one connection. Made by the toolkit, which has looked at the stream before.

    The session stream is one too (``of_sessions``): its keys are sessions, and it keeps every entry of each.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        created: str,
        high_water: int,
        replicas: int,
        retention: float,
        direct: bool,
        of_sessions: bool = False,
        partitions: int = 1,
    ) -> None:
        self.name = name
        self.partitions = partitions
        """In how many buckets the receipts of the namespace are, as the stream's metadata say."""
        self.of_sessions = of_sessions
        self.high_water = high_water
        self.replicas = replicas
        self.retention = retention
        self._direct = direct
        self._connection = connection
        self._stream = stream_of(name, of_sessions=of_sessions)
        self._subject = subjects_of(name, of_sessions=of_sessions)
        self._what = f"stream {name!r}" if of_sessions else f"bucket {name!r}"
        self._ack = f'{{"stream":"{self._stream}","seq":'.encode()
        self._created = created
        self._replaced: BucketReplaced | None = None
        self._msg_get = f"$JS.API.STREAM.MSG.GET.{self._stream}"
        self._direct_get = f"$JS.API.DIRECT.GET.{self._stream}."
        self._info = f"$JS.API.STREAM.INFO.{self._stream}"

    def of(self, key: str) -> JetStreamBucket:
        """The bucket itself: it holds every key."""
        return self

    def parts(self, pattern: str) -> tuple[JetStreamBucket, ...]:
        """The bucket itself."""
        return (self,)

    @property
    def created(self) -> int:
        """When the stream was made (see the seam)."""
        return nanoseconds(self._created)

    @property
    def closed(self) -> bool:
        """The connection's state (see the seam)."""
        return self._connection.closed

    @property
    def max_payload(self) -> int:
        """The connection's limit (see the seam)."""
        return self._connection.max_payload

    async def put(self, key: str, value: bytes, *, expected: int, timeout: float) -> Outcome:
        """One fenced write, sent once (see the seam)."""
        if self._replaced is not None:
            return Refused(BucketReplaced(self.name, self._replaced.evidence, stream=self._stream), retry=False)
        try:
            reply = await self._connection.request(
                self._subject + key,
                value,
                timeout=timeout,
                headers={"Nats-Expected-Last-Subject-Sequence": str(expected)},
            )
        except NotSent as error:
            return Refused(error.cause, retry=error.retry)
        except NoResponders:
            return Refused(Unreachable(f"no stream takes writes to {self._what} right now"), retry=True)
        except PermissionDenied as error:
            return Refused(error, retry=False)
        except Unreachable as error:
            return Unknown(error)
        return self._outcome(reply)

    def _outcome(self, reply: Reply) -> Outcome:
        data = reply.data
        digits = data[len(self._ack) : -1]
        if data.startswith(self._ack) and digits.isdigit():  # what nearly every answer looks like
            revision = int(digits)
            self.high_water = max(self.high_water, revision)
            return Accepted(revision)
        try:
            answer = from_json(reply.data)
            error = api_error(answer)
            if error is None:
                revision = int(answer["seq"])
                if answer.get("stream") != self._stream:
                    return Unknown(JetStreamError(0, f"stream {answer.get('stream')!r} took the write"))
                self.high_water = max(self.high_water, revision)
                return Accepted(revision)
        except (ValueError, KeyError, TypeError, AttributeError) as unreadable:
            return Unknown(unreadable)
        if error.code == _WRONG_LAST_SEQUENCE:
            return Conflict()
        if error.code == _RIVAL_IN_FLIGHT:
            return RivalInFlight()
        full = error.code == _STORE_FAILED and error.description.lower() in _FULL
        if full or error.code in _DEFINITE:
            return Refused(error, retry=False)
        return Unknown(error)

    async def newest(self, key: str, *, timeout: float, leader: bool = True) -> Entry | None:
        """The newest revision of a key (see the seam)."""
        if leader or not self._direct:
            return await self._get(key, {"last_by_subj": self._subject + key}, timeout)
        reply = await self._ask(self._direct_get + self._subject + key, b"", timeout)
        if (reply.headers or {}).get("Status") == "404":
            return None
        return self._direct_entry(reply)

    def _direct_entry(self, reply: Reply) -> Entry:
        headers = reply.headers or {}
        try:
            entry = Entry(
                headers["Nats-Subject"].removeprefix(self._subject),
                int(headers["Nats-Sequence"]),
                headers["Nats-Time-Stamp"],
                reply.data,
                erased=_is_marker(headers),
            )
        except (KeyError, ValueError) as error:
            status = f"{headers.get('Status', '')} {headers.get('Description', '')}".strip()
            raise Unreachable(f"{self._what} gave no readable answer to a read ({status})").because(error) from error
        self.high_water = max(self.high_water, entry.revision)
        return entry

    async def newest_of(self, pattern: str, *, timeout: float, most: int | None = None) -> list[Entry] | None:
        """The newest revision of each matching key (see the seam)."""
        if self._direct:
            return await self._multi([self._subject + pattern], timeout, most)
        found: dict[str, Entry] = {}
        revision, whole = 0, False
        while not whole:
            entries, whole = await self.since(pattern, revision, timeout=timeout)
            found |= {entry.key: entry for entry in entries}
            if len(found) > _MOST_SUBJECTS:
                return None
            revision = entries[-1].revision if entries else revision
        return sorted(found.values(), key=lambda entry: entry.revision)

    async def _multi(self, subjects: list[str], timeout: float, most: int | None) -> list[Entry] | None:
        entries: list[Entry] = []
        up_to = 0
        while True:
            # One page ends at a byte limit of the server's; the next goes on within the same snapshot.
            query: dict[str, Any] = {"multi_last": subjects, "max_bytes": most if most is not None else _PAGE_BYTES}
            if entries:
                query |= {"seq": entries[-1].revision + 1, "up_to_seq": up_to}
            replies = await self._ask_many(to_json(query), timeout)
            end = replies.pop().headers or {}
            entries.extend([self._direct_entry(reply) for reply in replies])
            status = end.get("Status")
            if status == "413":
                return None
            if status == "404":
                return entries
            if status == "204" and (end.get("Nats-Num-Pending") == "0" or most is not None):
                return entries
            up_to = int(end.get("Nats-UpTo-Sequence") or 0)
            if status != "204" or not replies or not up_to:
                raise self._broken_off(end)

    async def newest_each(self, keys: Sequence[str], *, timeout: float) -> list[Entry]:
        """The newest revision of each of these keys (see the seam)."""
        if self._direct:
            entries = await self._multi([self._subject + key for key in keys], timeout, None) or []
        else:
            found = [await self.newest(key, timeout=timeout) for key in keys]
            entries = [entry for entry in found if entry is not None]
        order = {key: place for place, key in enumerate(keys)}
        return sorted(entries, key=lambda entry: order[entry.key])

    async def keys(self, pattern: str, *, timeout: float) -> list[str]:
        """The matching keys, in pages of the server's (see the seam)."""
        found: set[str] = set()
        while True:
            query = {"subjects_filter": self._subject + pattern, "offset": len(found)}
            answer = self._read_answer(await self._ask(self._info, to_json(query), timeout)) or {}
            self._check_created(answer)
            state: dict[str, Any] = answer.get("state") or {}
            subjects: dict[str, int] = state.get("subjects") or {}
            before = len(found)
            found |= {subject.removeprefix(self._subject) for subject in subjects}
            if len(found) == before or len(found) >= int(answer.get("total") or 0):
                return sorted(found)

    async def since(self, pattern: str, revision: int, *, timeout: float) -> tuple[list[Entry], bool]:
        """Kept revisions above one (see the seam)."""
        query = {"seq": revision + 1, "next_by_subj": self._subject + pattern}
        if not self._direct:
            entry = await self._get(None, query, timeout)
            return ([entry], False) if entry is not None else ([], True)
        replies = await self._ask_many(to_json({**query, "batch": _PAGE, "max_bytes": _PAGE_BYTES}), timeout)
        end = replies.pop().headers or {}
        status = end.get("Status")
        if status not in ("204", "404"):
            raise self._broken_off(end)
        entries = [self._direct_entry(reply) for reply in replies]
        return entries, status == "404" or end.get("Nats-Num-Pending") == "0"

    def _broken_off(self, end: dict[str, str]) -> Unreachable:
        status = f"{end.get('Status', '')} {end.get('Description', '')}".strip()
        return Unreachable(f"{self._what} broke off an answer ({status})")

    async def _ask_many(self, query: bytes, timeout: float) -> list[Reply]:
        if self._replaced is not None:
            raise BucketReplaced(self.name, self._replaced.evidence, stream=self._stream)
        try:
            return await self._connection.request_many(self._direct_get.removesuffix("."), query, timeout=timeout)
        except NotSent as error:
            if isinstance(error.cause, PermissionDenied):
                raise error.cause from None
            raise Unreachable(f"{self._what} cannot be read: {error.cause}").because(error.cause) from error.cause
        except NoResponders:
            raise Unreachable(f"no stream answers for {self._what} right now") from None

    async def successor(self, key: str, revision: int, *, timeout: float) -> Entry | None:
        """The oldest kept revision above ``revision`` (see the seam)."""
        return await self._get(key, {"seq": revision + 1, "next_by_subj": self._subject + key}, timeout)

    async def keeps(self, key: str, revision: int, *, timeout: float) -> bool:
        """Whether exactly this revision is still kept (see the seam)."""
        entry = await self._get(key, {"seq": revision, "next_by_subj": self._subject + key}, timeout)
        return entry is not None and entry.revision == revision

    async def clock(self, *, timeout: float) -> Clock:
        """The leader's clock, and a look whether this is still the same stream (see the seam)."""
        reply = await self._ask(self._info, b"", timeout)
        answer = self._read_answer(reply)
        if answer is None:
            raise Unreachable(f"{self._what} did not tell its state")
        self._check_created(answer)
        cluster: dict[str, str] = answer.get("cluster") or {}
        since = cluster.get("leader_since")
        return Clock(nanoseconds(answer["ts"]), nanoseconds(since) if since else 0)

    def _check_created(self, answer: dict[str, Any]) -> None:
        if answer.get("created") != self._created:
            raise self.replaced(f"it was made at {answer.get('created')}, and ours at {self._created}")

    def replaced(self, evidence: str) -> BucketReplaced:
        """Refuse everything from here on (see the seam)."""
        if self._replaced is None:
            self._replaced = BucketReplaced(self.name, evidence, stream=self._stream)
        return BucketReplaced(self.name, self._replaced.evidence, stream=self._stream)

    @contextlib.asynccontextmanager
    async def hints(self, key: str) -> AsyncGenerator[Hint, None]:
        """A plain subscription to the key's subject (see the seam)."""
        hint = _SubjectHint()
        subscription = await self._connection.subscribe(self._subject + key, hint.on_message)
        try:
            yield hint
        finally:
            if not self._connection.client.is_closed:
                await subscription.unsubscribe()

    def nonce(self) -> str:
        """12 random bytes as hex (from the kernel, so that a fork does not repeat them)."""
        return os.urandom(12).hex()

    def jitter(self) -> float:
        """A random number from 0 up to 1."""
        return random.random()

    async def _get(self, key: str | None, query: dict[str, Any], timeout: float) -> Entry | None:
        answer = self._read_answer(await self._ask(self._msg_get, to_json(query), timeout))
        if answer is None:
            return None
        try:
            message = answer["message"]
            headers = base64.b64decode(message["hdrs"]).decode(errors="replace") if message.get("hdrs") else ""
            entry = Entry(
                key if key is not None else message["subject"].removeprefix(self._subject),
                int(message["seq"]),
                message["time"],
                base64.b64decode(message.get("data") or ""),
                erased=_is_marker(_parsed(headers)),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise Unreachable(f"{self._what} gave no readable answer to a read").because(error) from error
        self.high_water = max(self.high_water, entry.revision)
        return entry

    def _read_answer(self, reply: Reply) -> dict[str, Any] | None:
        """The answer of an API request; None where it says that there is no such message."""
        try:
            answer: dict[str, Any] = from_json(reply.data)
            error = api_error(answer)
        except (ValueError, AttributeError) as unreadable:
            raise Unreachable(f"{self._what} gave an answer that is no JSON").because(unreadable) from unreadable
        if error is None:
            return answer
        if error.code == _NO_MESSAGE:
            return None
        if error.code == _STREAM_NOT_FOUND:
            raise NotProvisioned(self.name, kind=self._what.partition(" ")[0]).because(error) from error
        raise Unreachable(f"{self._what} could not be read: {error}").because(error) from error

    async def _ask(self, subject: str, payload: bytes, timeout: float) -> Reply:
        if self._replaced is not None:
            raise BucketReplaced(self.name, self._replaced.evidence, stream=self._stream)
        try:
            return await self._connection.request(subject, payload, timeout=timeout)
        except NotSent as error:
            if isinstance(error.cause, PermissionDenied):
                raise error.cause from None
            raise Unreachable(f"{self._what} cannot be read: {error.cause}").because(error.cause) from error.cause
        except NoResponders:
            raise Unreachable(f"no stream answers for {self._what} right now") from None


class _SubjectHint:
    """A sign comes when a write is published, which may be before it is stored: who then looks may not see it yet.

    So after a sign the next waits are short ones, each twice as long as the one before.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._again = math.inf

    async def on_message(self, _msg: Msg) -> None:
        self._event.set()

    async def wait(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(min(timeout, self._again)):
                await self._event.wait()
            self._again = _LOOK_AGAIN
        except TimeoutError:
            self._again = self._again * 2 if self._again < _LOOK_NO_MORE else math.inf
        self._event.clear()


def _is_marker(headers: dict[str, str]) -> bool:
    return headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers


def _parsed(headers: str) -> dict[str, str]:
    lines = (line.partition(":") for line in headers.split("\r\n")[1:])
    return {name.strip(): value.strip() for name, colon, value in lines if colon}
