"""The receipts of a namespace in several buckets, so that a cluster spreads their leaders and their disks.

All receipts of a run are in one of them, so what is asked about a run stays one request to one bucket.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

from natsreceipts.background import all_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from natsreceipts._jetstream.bucket import JetStreamBucket
    from natsreceipts._jetstream.seam import Bucket, Clock, Entry, Hint, Outcome

__all__ = ["PartitionedBucket", "partition_of"]


@lru_cache(maxsize=4096)
def _of_run(run: str, partitions: int) -> int:
    return int.from_bytes(sha256(run.encode()).digest()[:8], "big") % partitions


def partition_of(key: str, partitions: int) -> int:
    """The number of the partition, from 0, that holds a KV key: by its first two tokens, which name the run.

    It is the first 8 bytes of the SHA-256 of ``<tenant>.<run>``, as a big-endian number, modulo ``partitions``.
    """
    tenant, _, rest = key.partition(".")
    return _of_run(f"{tenant}.{rest.partition('.')[0]}", partitions)


class PartitionedBucket:
    """Several buckets as one. What is about one key is asked of the bucket that holds it (see the seam).

    Sequences and clocks of different buckets cannot be compared, so whatever is about those is asked of a part.
    """

    def __init__(self, name: str, parts: Sequence[JetStreamBucket]) -> None:
        self.name = name
        self._parts = tuple(parts)

    def of(self, key: str) -> Bucket:
        """The bucket that holds a key."""
        return self._parts[partition_of(key, len(self._parts))]

    def parts(self, pattern: str) -> Sequence[Bucket]:
        """The buckets that may hold keys that match a pattern: one, where it names the run."""
        tokens = pattern.split(".")
        if len(tokens) > 2 and "*" not in tokens[:2]:
            return (self.of(pattern),)
        return self._parts

    @property
    def high_water(self) -> int:
        """Of no meaning for several streams: ask a part."""
        raise NotImplementedError("sequences are those of one partition")

    @property
    def created(self) -> int:
        """When the youngest of them was made: of a call from before then nothing is known for sure."""
        return max(part.created for part in self._parts)

    @property
    def retention(self) -> float:
        """The shortest of theirs, in seconds; 0 where none expires."""
        return min((part.retention for part in self._parts if part.retention), default=0.0)

    @property
    def replicas(self) -> int:
        """The fewest of theirs."""
        return min(part.replicas for part in self._parts)

    @property
    def closed(self) -> bool:
        """The connection's state (see the seam)."""
        return self._parts[0].closed

    @property
    def max_payload(self) -> int:
        """The connection's limit (see the seam)."""
        return self._parts[0].max_payload

    async def put(self, key: str, value: bytes, *, expected: int, timeout: float) -> Outcome:
        """One fenced write, sent once (see the seam)."""
        return await self.of(key).put(key, value, expected=expected, timeout=timeout)

    async def newest(self, key: str, *, timeout: float, leader: bool = True) -> Entry | None:
        """The newest revision of a key (see the seam)."""
        return await self.of(key).newest(key, timeout=timeout, leader=leader)

    async def successor(self, key: str, revision: int, *, timeout: float) -> Entry | None:
        """The next revision of a key (see the seam)."""
        return await self.of(key).successor(key, revision, timeout=timeout)

    async def keeps(self, key: str, revision: int, *, timeout: float) -> bool:
        """Whether a revision of a key is still there (see the seam)."""
        return await self.of(key).keeps(key, revision, timeout=timeout)

    async def newest_of(self, pattern: str, *, timeout: float, most: int | None = None) -> list[Entry] | None:
        """The newest revision of each matching key, in one request to each bucket (see the seam)."""
        found = await all_of(part.newest_of(pattern, timeout=timeout, most=most) for part in self.parts(pattern))
        entries: list[Entry] = []
        for part in found:
            if part is None:
                return None
            entries.extend(part)
        return entries

    async def newest_each(self, keys: Sequence[str], *, timeout: float) -> list[Entry]:
        """The newest revision of each of these keys (see the seam)."""
        grouped: dict[int, list[str]] = {}
        for key in keys:
            grouped.setdefault(partition_of(key, len(self._parts)), []).append(key)
        found = await all_of(self._parts[number].newest_each(part, timeout=timeout) for number, part in grouped.items())
        by_key = {entry.key: entry for part in found for entry in part}
        return [by_key[key] for key in keys if key in by_key]

    async def keys(self, pattern: str, *, timeout: float) -> list[str]:
        """The keys that match, sorted (see the seam)."""
        found = await all_of(part.keys(pattern, timeout=timeout) for part in self.parts(pattern))
        return sorted(key for part in found for key in part)

    async def since(self, pattern: str, revision: int, *, timeout: float) -> tuple[list[Entry], bool]:
        """Kept revisions of keys of one run (see the seam)."""
        (part,) = self.parts(pattern)
        return await part.since(pattern, revision, timeout=timeout)

    async def clock(self, *, timeout: float) -> Clock:
        """The clock of the first one's leader: for people, since every leader has its own."""
        return await self._parts[0].clock(timeout=timeout)

    def replaced(self, evidence: str) -> Exception:
        """Of no meaning for several buckets: ask a part."""
        raise NotImplementedError(f"one partition is replaced, not all of them: {evidence}")

    def hints(self, key: str) -> AbstractAsyncContextManager[Hint]:
        """Signs of writes to a key (see the seam)."""
        return self.of(key).hints(key)

    def nonce(self) -> str:
        """A fresh random name (see the seam)."""
        return self._parts[0].nonce()

    def jitter(self) -> float:
        """A random number from 0 up to 1."""
        return self._parts[0].jitter()
