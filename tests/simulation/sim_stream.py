"""What the server holds: one stream with a last sequence per key, its leaders and their clocks, and all that ever was.

A read may be of the present or of any past: a prefix of the log, with the history as it was kept then.
"""

from __future__ import annotations

import bisect
import datetime as dt
from typing import TYPE_CHECKING, NamedTuple

from natsreceipts._jetstream import Clock, Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim_client import SimHint
    from sim_loop import VirtualLoop

__all__ = ["Stream"]

_EPOCH = 1_750_000_000
_SECOND = 1_000_000_000


class _Leader(NamedTuple):
    offset: float
    """Seconds that its clock is ahead."""
    since: int
    """Nanoseconds since the epoch on its own clock; 0 on a single server."""


class Stream:
    """One stream. Times are the leader's, nanoseconds since the epoch."""

    def __init__(self, loop: VirtualLoop, name: str, *, history: int, replicas: int, retention: float = 0.0) -> None:
        self._loop = loop
        self.name = name
        self.history = history
        """Revisions kept of a key; 0: all."""
        self.replicas = replicas
        self.retention = retention
        """Seconds until a revision expires, on the leader's clock; 0: never."""
        self.log: list[Entry] = []
        self.keys: dict[str, list[Entry]] = {}
        self.at: list[float] = []
        """When each entry of the log was stored, on the loop's clock."""
        self.seq = 0
        self.created = self._now(0.0) - 3600 * _SECOND
        self.hints: dict[str, list[SimHint]] = {}
        """By key, or pattern of keys."""
        self.on_stored: Callable[[Entry, str], None] = lambda entry, by: None
        self.on_expired: Callable[[str], None] = lambda key: None
        """Told of a key of which nothing is kept any more."""
        self.stuck_until = 0.0
        """Until when a rival's write is in flight that never commits (10164)."""
        self._purged: dict[str, int] = {}
        """By key the sequence of the last purge: what was before it is gone."""
        self._expired = 0
        """How many entries of the log have expired."""
        self.elections = 0
        self._leader = _Leader(0.0, self.created if replicas > 1 else 0)
        self._deposed: tuple[_Leader, int] | None = None
        self._deposed_until = 0.0
        self._down_until = 0.0

    def _now(self, offset: float) -> int:
        return int((_EPOCH + self._loop.time() + offset) * _SECOND)

    # ------------------------------------------------------------------ leaders

    @property
    def down(self) -> bool:
        """Whether there is no leader, so that nothing is written."""
        return self._loop.time() < self._down_until

    def outage(self, length: float) -> None:
        """No leader for a while, then the same one."""
        self._down_until = max(self._down_until, self._loop.time() + length)

    def elect(self, length: float, offset: float, deposed_for: float) -> None:
        """No leader for ``length`` seconds, then another one, whose clock is elsewhere.

        The deposed one goes on to answer whoever asks it, for a while, with what it knew.
        """
        self.elections += 1
        self.outage(length)
        self._deposed = (self._leader, self.seq)
        self._deposed_until = self._loop.time() + length + deposed_for
        self._loop.call_later(length, self._take_over, offset)

    def _take_over(self, offset: float) -> None:
        self._leader = _Leader(offset, self._now(offset))

    @property
    def deposed(self) -> int | None:
        """How far the log of a deposed leader reaches that still answers, if there is one."""
        if self._deposed is None or self._loop.time() >= self._deposed_until:
            return None
        return self._deposed[1]

    def behind(self, key: str, expected: int) -> bool:
        """Whether a deposed leader that still answers knows another last revision of a key than the expected one."""
        upto = self.deposed
        newest = self.newest(key, upto) if upto is not None else None
        return upto is not None and (newest.revision if newest is not None else 0) != expected

    def clock(self, *, deposed: bool) -> Clock:
        """What a leader's clock shows, and since when it leads."""
        leader = self._deposed[0] if deposed and self._deposed is not None else self._leader
        return Clock(self._now(leader.offset), leader.since)

    def replace(self) -> None:
        """Somebody deletes the stream, and makes it again: empty, and its sequences begin anew."""
        self.keys, self.log, self.at, self.seq = {}, [], [], 0
        self._purged, self._expired = {}, 0
        self.created = self._now(self._leader.offset)
        self._deposed = None

    # ------------------------------------------------------------------ writing

    def store(self, key: str, value: bytes, expected: int, by: str) -> int:
        """The revision under which it is stored; 0: the key's last revision is not the expected one."""
        newest = self.newest(key, self.seq)
        if expected >= 0 and (newest.revision if newest is not None else 0) != expected:
            return 0
        return self._add(key, value, by, erased=False)

    def erase(self, key: str, *, purge: bool) -> None:
        """Somebody deletes a key by hand: a marker is stored, whatever stood there; a purge drops all before it."""
        self._add(key, b"", "somebody", erased=True)
        if purge:
            self._purged[key] = self.seq

    def _add(self, key: str, value: bytes, by: str, *, erased: bool) -> int:
        self.seq += 1
        entry = Entry(key, self.seq, _stamp(self._now(self._leader.offset)), value, erased=erased)
        self.keys.setdefault(key, []).append(entry)
        self.log.append(entry)
        self.at.append(self._loop.time())
        self.on_stored(entry, by)
        return self.seq

    def sign(self, key: str) -> None:
        """Something was published to a key."""
        for pattern, hints in self.hints.items():
            if hints and (pattern == key or _matches(pattern.split("."), key)):
                for hint in hints:
                    hint.sign()

    def _expire(self) -> None:
        """Drop what is older than the retention. The oldest go first, and nothing comes back with another clock."""
        if not self.retention:
            return
        oldest = self._now(self._leader.offset) - int(self.retention * _SECOND)
        while self._expired < len(self.log) and self.log[self._expired].time <= oldest:
            entry = self.log[self._expired]
            self._expired += 1
            revisions = self.keys.get(entry.key, [])
            while revisions and revisions[0].revision <= entry.revision:
                del revisions[0]
            if not revisions and entry.key in self.keys:
                del self.keys[entry.key]
                self.on_expired(entry.key)

    # ------------------------------------------------------------------ reading

    def as_of(self, when: float) -> int:
        """How far the log of somebody reaches who is as far behind as that time on the loop's clock."""
        return bisect.bisect_right(self.at, when)

    def kept(self, key: str, upto: int) -> list[Entry]:
        """The revisions of a key that are kept in the log up to a sequence."""
        self._expire()
        revisions = self.keys.get(key, [])
        if upto < self.seq:
            revisions = [entry for entry in revisions if entry.revision <= upto]
        if 0 < self._purged.get(key, 0) <= upto:
            revisions = [entry for entry in revisions if entry.revision >= self._purged[key]]
        return revisions[-self.history :] if self.history else revisions

    def newest(self, key: str, upto: int) -> Entry | None:
        """The newest revision of a key in the log up to a sequence."""
        self._expire()
        for entry in reversed(self.keys.get(key, ())):
            if entry.revision <= upto:
                return entry
        return None

    def matching(self, pattern: str) -> list[str]:
        """The keys that match, in the order in which they came."""
        if "*" not in pattern and ">" not in pattern:
            return [pattern] if pattern in self.keys else []
        wanted = pattern.split(".")
        return [key for key in self.keys if _matches(wanted, key)]


def _matches(wanted: list[str], key: str) -> bool:
    tokens = key.split(".")
    return len(tokens) == len(wanted) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


def _stamp(when: int) -> str:
    seconds, rest = divmod(when, _SECOND)
    return f"{dt.datetime.fromtimestamp(seconds, dt.UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
