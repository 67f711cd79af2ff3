"""What the protocol needs of JetStream, as a Protocol of few verbs, and the three outcomes of a write.

Everything above this file reaches time, randomness and the network only through the event loop and this seam.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

__all__ = [
    "Accepted",
    "Bucket",
    "Clock",
    "Conflict",
    "Entry",
    "Hint",
    "ObjectInfo",
    "Objects",
    "Outcome",
    "Refused",
    "RivalInFlight",
    "Unknown",
    "nanoseconds",
]


def nanoseconds(rfc3339: str) -> int:
    """A server timestamp (up to nine digits of a second) as nanoseconds since the epoch."""
    head, _, rest = rfc3339.rstrip("Z").partition(".")
    seconds = int(dt.datetime.fromisoformat(head).replace(tzinfo=dt.UTC).timestamp())
    return seconds * 1_000_000_000 + int(rest.ljust(9, "0")[:9] or 0)


class Accepted(NamedTuple):
    """The server acknowledged the write under this revision (its stream sequence)."""

    revision: int


class Conflict(NamedTuple):
    """JetStream error 10071: the key's last revision is not the expected one.

    That this very send was not stored is certain; whether an earlier send of the same bytes was, is not.
    """


class RivalInFlight(NamedTuple):
    """JetStream error 10164: another write with an expectation is in flight, and may never commit."""


class Refused(NamedTuple):
    """Certainly not stored, and for another reason than a conflict.

    ``retry`` says whether the same write may be accepted a moment later (not connected, no leader).
    """

    cause: Exception
    retry: bool


class Unknown(NamedTuple):
    """No answer, or one that proves nothing: the write may have been stored, or may be stored later."""

    cause: Exception


Outcome = Accepted | Conflict | RivalInFlight | Refused | Unknown


class Entry(NamedTuple):
    """One revision of a key. ``stamp`` is the server's timestamp as it tells it (RFC 3339, UTC, up to nanoseconds)."""

    key: str
    revision: int
    stamp: str
    value: bytes
    erased: bool
    """A delete or purge marker, or one that the server placed at an expiry."""

    @property
    def time(self) -> int:
        """The timestamp in nanoseconds since the epoch. Most reads never need it."""
        return nanoseconds(self.stamp)

    @property
    def when(self) -> dt.datetime:
        """The timestamp as a datetime in UTC, to the microsecond."""
        return dt.datetime.fromtimestamp(self.time / 1e9, dt.UTC)


class Clock(NamedTuple):
    """The leader's clock: ``now`` and when it became leader (0 on a single server), nanoseconds since the epoch."""

    now: int
    leader_since: int


class ObjectInfo(NamedTuple):
    """What names an object: its name, its digest (``SHA-256=<base64url>``) and its size in bytes."""

    name: str
    digest: str
    size: int


class Objects(Protocol):
    """An object store. Names are written once."""

    @property
    def name(self) -> str:
        """The store's name, as the ``nats`` CLI knows it."""
        ...

    async def put(self, name: str, data: bytes, *, timeout: float) -> ObjectInfo:
        """Store an object under a name that was never used before, ``timeout`` seconds for each chunk.

        Raises Unreachable (what was stored is not readable under the name) or PermissionDenied.
        """
        ...

    async def get(self, info: ObjectInfo, *, timeout: float) -> bytes | None:
        """An object's bytes; None where it is gone or its digest is another. Raises Unreachable, PermissionDenied."""
        ...


class Hint(Protocol):
    """Says that something may have happened to a key. It may be silent for ever: a read is the truth."""

    async def wait(self, timeout: float) -> None:
        """Return at the next sign, or after ``timeout`` seconds, or earlier where a sign has come before."""
        ...


class Bucket(Protocol):
    """A KV bucket, fenced by expected revisions; or several in which the keys are spread by run (`of`, `parts`)."""

    def of(self, key: str) -> Bucket:
        """The one bucket that holds a key: itself, where there is one. Sequences and clocks are those of such a one."""
        ...

    def parts(self, pattern: str) -> Sequence[Bucket]:
        """The single buckets that may hold keys that match a pattern."""
        ...

    @property
    def name(self) -> str:
        """The bucket's name, as the ``nats`` CLI knows it."""
        ...

    @property
    def high_water(self) -> int:
        """The highest stream sequence that this bucket is known to have given."""
        ...

    @property
    def created(self) -> int:
        """When the server made the stream below, nanoseconds since the epoch: it knows of nothing earlier."""
        ...

    @property
    def retention(self) -> float:
        """Seconds until a revision expires; 0 where it never does."""
        ...

    @property
    def replicas(self) -> int:
        """How many servers hold the bucket."""
        ...

    @property
    def closed(self) -> bool:
        """Whether no request will ever be answered any more: the toolkit or its connection was closed."""
        ...

    @property
    def max_payload(self) -> int:
        """Bytes of headers and value that the server takes in one write."""
        ...

    async def put(self, key: str, value: bytes, *, expected: int, timeout: float) -> Outcome:
        """Send one write once: it is stored only if ``expected`` is the key's newest revision (0: none at all).

        Never raises, except for a cancellation, after which the outcome is unknown.
        """
        ...

    async def newest(self, key: str, *, timeout: float, leader: bool = True) -> Entry | None:
        """The newest revision, from the leader or (``leader=False``) from any replica, which may be stale.

        Raises Unreachable, PermissionDenied or NotProvisioned.
        """
        ...

    async def successor(self, key: str, revision: int, *, timeout: float) -> Entry | None:
        """The oldest kept revision of the key above ``revision``, from the leader. Raises as `newest`."""
        ...

    async def keeps(self, key: str, revision: int, *, timeout: float) -> bool:
        """Whether the leader still has exactly this revision of the key. Raises as `newest`."""
        ...

    async def newest_of(self, pattern: str, *, timeout: float, most: int | None = None) -> list[Entry] | None:
        """The newest revision of each key that matches, in one request; None where they are more than 1,024.

        ``pattern`` is made of key tokens, ``*`` and a closing ``>``. With ``most`` bytes asked for, what the server
        gives within them, and no more. From any replica. Raises as `newest`.
        """
        ...

    async def newest_each(self, keys: Sequence[str], *, timeout: float) -> list[Entry]:
        """The newest revision of each of these keys (at most 1,024), in their order, without those that are not there.

        From any replica. Raises as `newest`.
        """
        ...

    async def keys(self, pattern: str, *, timeout: float) -> list[str]:
        """The keys that match, sorted. Raises as `newest`."""
        ...

    async def since(self, pattern: str, revision: int, *, timeout: float) -> tuple[list[Entry], bool]:
        """Kept revisions above ``revision`` of keys that match, in order, and whether these are all. As `newest`."""
        ...

    async def clock(self, *, timeout: float) -> Clock:
        """The leader's clock. Raises BucketReplaced where the stream is not the one connected to; else as `newest`."""
        ...

    def replaced(self, evidence: str) -> Exception:
        """Note that this is another bucket than the one connected to; the error to raise, now and at every verb."""
        ...

    def hints(self, key: str) -> AbstractAsyncContextManager[Hint]:
        """Signs of writes to the key while the context is open."""
        ...

    def nonce(self) -> str:
        """A fresh random name, 24 hex digits."""
        ...

    def jitter(self) -> float:
        """A random number from 0 up to 1."""
        ...
