"""The seam as a simulated process has it: the product's requests to the model of the server, with the faults between.

Each request draws its fate from its actor's luck, the same number of draws whatever it is, so that a schedule stays
what it is when a fault is left out of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim_client import Client, SimHint
from sim_loop import OUTSIDE

from natsreceipts._jetstream import Accepted, Clock, Conflict, Entry, Outcome, Refused, RivalInFlight
from natsreceipts._jetstream import Unknown as NoAnswer
from natsreceipts._jetstream.bucket import JetStreamError
from natsreceipts.errors import BucketReplaced, Unreachable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from sim_process import Process
    from sim_stream import Stream

__all__ = ["SimBucket"]

_PUT_FAULTS = (
    ("its answer is lost", 4),
    ("it lands late", 4),
    ("it is lost", 3),
    ("a rival is in flight", 2),
    ("it is not sent", 1),
    ("it is slow", 3),
    ("its answer is slow", 3),
    ("it is refused", 1),
)
_READ_FAULTS = (("no answer", 3), ("it is slow", 2), ("it is stale", 5))


def _spread(faults: tuple[tuple[str, int], ...]) -> list[str]:
    return [name for name, weight in faults for _ in range(weight)]


_PUT, _READ = _spread(_PUT_FAULTS), _spread(_READ_FAULTS)


class SimBucket(Client):
    """A bucket, or the session stream, on one process's connection."""

    def __init__(self, process: Process, stream: Stream) -> None:
        super().__init__(process)
        self._stream = stream
        self._nonces = process.world.nonces
        self.name = stream.name
        self.high_water = stream.seq
        self.created = stream.created
        self.retention = stream.retention
        self.replicas = stream.replicas
        self.closed = False
        self.max_payload = 1024 * 1024
        self._replaced: BucketReplaced | None = None

    # ------------------------------------------------------------------ writing

    async def put(self, key: str, value: bytes, *, expected: int, timeout: float) -> Outcome:
        """One write, sent once."""
        fault, a, b, c = await self._begin()
        process, loop = self._process, self._loop
        number = self._mind.ops
        if self._replaced is not None:
            return Refused(self._replaced, retry=False)
        now = loop.time()
        if now < process.cut_until:
            return Refused(Unreachable("not connected"), retry=True)
        there, back = 0.0005 + 0.004 * a, 0.001 * b
        what = "" if fault == 1.0 else _PUT[int(fault * len(_PUT))]
        answered, lands = True, True
        match what:
            case "its answer is lost":
                answered = False
            case "it lands late":
                there = timeout * (0.3 + a) + 40 * b * b * c
            case "it is lost":
                lands = answered = False
            case "it is slow":
                there, back = timeout * 0.9 * a, timeout * 0.5 * b
            case "its answer is slow":
                back = timeout * 1.2 * b
        if process.world.tracing:
            about = process.world.describe(self._stream, key, value)
            process.world.note(f"{process.name} #{number}: put {about} on {expected}{what and f': {what}'}")
        if what == "it is not sent":
            return Refused(Unreachable("nothing could be sent"), retry=True)
        if what == "it is refused" and c < 0.3:
            return Refused(JetStreamError(10077, "maximum bytes exceeded"), retry=False)
        future = loop.create_future()
        deadline = now + timeout
        if lands:
            rival = what == "a rival is in flight"
            late = fault != 1.0 and c < 0.5
            args = (
                future,
                key,
                value,
                expected,
                process.epoch,
                number,
                back if answered else -1.0,
                rival,
                late,
                deadline,
            )
            loop.call_at(now + there, self._arrives, args, context=OUTSIDE)
        if not answered or there + back > timeout:
            loop.call_at(deadline, _silent, future, context=process.context)
        process.sent(future, deadline, _silent)
        self._phase(number, "sent")
        return await process.answer(future)

    def _arrives(self, args: tuple[Any, ...]) -> None:
        """The write reaches a server."""
        future, key, value, expected, epoch, number, back, rival, late, deadline = args
        process, loop, stream = self._process, self._loop, self._stream
        answer: Outcome
        if rival or (stream.stuck_until > loop.time() and not stream.down):
            answer = RivalInFlight()
        elif stream.deposed is not None and number % 2 and stream.behind(key, expected):
            answer = Conflict()  # a deposed leader has not seen what this writer has, and says so at once
            process.world.note(f"   a deposed server: {process.name} #{number} {answer}")
        elif stream.down or (stream.deposed is not None and number % 2):
            # No leader: it is refused, or it waits for one, or it is gone. To a deposed leader: it is gone.
            if stream.deposed is None and late:
                loop.call_later(1.0, self._arrives, args, context=OUTSIDE)
                loop.call_at(max(deadline, loop.time()), _silent, future, context=process.context)
            elif stream.deposed is None and back >= 0:
                answer = Refused(Unreachable("no stream takes writes"), retry=True)
                loop.call_later(back, self._answered, future, answer, epoch, number, context=OUTSIDE)
            else:
                loop.call_at(max(deadline, loop.time()), _silent, future, context=process.context)
            return
        else:
            revision = stream.store(key, value, expected, process.name)
            answer = Accepted(revision) if revision else Conflict()
            if process.world.tracing:
                process.world.note(f"   server: {process.name} #{number} {answer}")
            stream.sign(key)
        if back < 0:
            return
        if back == 0:
            self._acknowledged(future, answer, epoch, number)
        else:
            loop.call_later(back, self._acknowledged, future, answer, epoch, number, context=OUTSIDE)

    def _acknowledged(self, future: asyncio.Future[Any], answer: Outcome, epoch: int, number: int) -> None:
        if not future.done() and epoch == self._process.epoch and isinstance(answer, Accepted):
            self.high_water = max(self.high_water, answer.revision)
        self._answered(future, answer, epoch, number)

    # ------------------------------------------------------------------ reading

    async def _read(self, what: str, look: Callable[[int], Any], timeout: float, *, leader: bool = True) -> Any:
        fault, a, b, c = await self._begin()
        process, loop, stream = self._process, self._loop, self._stream
        number = self._mind.ops
        if self._replaced is not None:
            raise self._replaced
        now = loop.time()
        fate = "" if fault == 1.0 else _READ[int(fault * len(_READ))]
        if process.world.tracing:
            process.world.note(f"{process.name} #{number}: {what}{fate and f': {fate}'}")
        if now < process.cut_until:
            raise Unreachable("not connected")
        if stream.down and leader and b < 0.7 and stream.deposed is None:
            raise Unreachable("no stream answers")
        future = loop.create_future()
        deadline = now + timeout
        if fate == "no answer" or (stream.down and leader and stream.deposed is None):
            loop.call_at(deadline, _unreached, future, context=process.context)
        else:
            delay = timeout * 1.1 * a if fate == "it is slow" else 0.0005 + 0.003 * a
            # A stale read: of a replica any prefix; of a leader what a deposed one knows.
            behind = 20.0 * b * b * b if fate == "it is stale" and not leader else 0.0
            old = leader and c < 0.5
            args = (future, look, behind, old, process.epoch, number)
            loop.call_at(now + delay, self._asked, args, context=OUTSIDE)
            if delay > timeout:
                loop.call_at(deadline, _unreached, future, context=process.context)
        process.sent(future, deadline, _unreached)
        self._phase(number, "sent")
        return await process.answer(future)

    def _asked(self, args: tuple[Any, ...]) -> None:
        future, look, behind, old, epoch, number = args
        stream = self._stream
        upto = stream.seq
        if old and stream.deposed is not None:
            upto = stream.deposed
        elif behind:
            upto = stream.as_of(self._loop.time() - behind)
        self._answered(future, look(upto), epoch, number)

    def _seen(self, entry: Entry | None) -> Entry | None:
        if entry is not None:
            self.high_water = max(self.high_water, entry.revision)
        return entry

    async def newest(self, key: str, *, timeout: float, leader: bool = True) -> Entry | None:
        """The newest revision of a key."""
        look = self._stream.newest
        return self._seen(await self._read("read newest", lambda upto: look(key, upto), timeout, leader=leader))

    async def successor(self, key: str, revision: int, *, timeout: float) -> Entry | None:
        """The oldest kept revision above one."""

        def look(upto: int) -> Entry | None:
            return next((entry for entry in self._stream.kept(key, upto) if entry.revision > revision), None)

        return self._seen(await self._read(f"read successor of {revision}", look, timeout))

    async def keeps(self, key: str, revision: int, *, timeout: float) -> bool:
        """Whether exactly this revision is kept."""
        return await self._read(
            f"is {revision} kept",
            lambda upto: any(entry.revision == revision for entry in self._stream.kept(key, upto)),
            timeout,
        )

    async def newest_of(self, pattern: str, *, timeout: float, most: int | None = None) -> list[Entry] | None:
        """The newest revision of each key that matches."""
        stream = self._stream

        def look(upto: int) -> list[Entry]:
            found = [stream.newest(key, upto) for key in stream.matching(pattern)]
            return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.revision)

        return await self._read(f"read all of {pattern}", look, timeout, leader=False)

    async def newest_each(self, keys: Sequence[str], *, timeout: float) -> list[Entry]:
        """The newest revision of each of these keys."""
        stream = self._stream

        def look(upto: int) -> list[Entry]:
            return [entry for key in keys if (entry := stream.newest(key, upto)) is not None]

        return await self._read(f"read {len(keys)} keys", look, timeout, leader=False)

    async def keys(self, pattern: str, *, timeout: float) -> list[str]:
        """The keys that match."""
        stream = self._stream
        return await self._read(
            f"keys of {pattern}",
            lambda upto: sorted(key for key in stream.matching(pattern) if stream.newest(key, upto)),
            timeout,
        )

    async def since(self, pattern: str, revision: int, *, timeout: float) -> tuple[list[Entry], bool]:
        """Kept revisions above one, from any replica, in pages."""
        stream = self._stream

        def look(upto: int) -> tuple[list[Entry], bool]:
            found = [
                entry
                for key in stream.matching(pattern)
                for entry in stream.kept(key, upto)
                if entry.revision > revision
            ]
            found.sort(key=lambda entry: entry.revision)
            return found[:4], len(found) <= 4

        found, whole = await self._read(f"read {pattern} since {revision}", look, timeout, leader=False)
        if found:
            self._seen(found[-1])
        return found, whole

    async def clock(self, *, timeout: float) -> Clock:
        """The leader's clock."""
        stream = self._stream
        created, clock = await self._read(
            "read clock", lambda upto: (stream.created, stream.clock(deposed=upto == stream.deposed)), timeout
        )
        if created != self.created:
            raise self.replaced(f"it was made at {created}, and ours at {self.created}")
        return clock

    def replaced(self, evidence: str) -> Exception:
        """Refuse everything from here on."""
        if self._replaced is None:
            self._replaced = BucketReplaced(self.name, evidence)
        return BucketReplaced(self.name, self._replaced.evidence)

    def hints(self, key: str) -> AbstractAsyncContextManager[SimHint]:
        """Signs of writes to a key."""
        return SimHint(self._process, self._stream, key)

    def of(self, key: str) -> SimBucket:
        """The bucket itself: it holds every key."""
        return self

    def parts(self, pattern: str) -> tuple[SimBucket, ...]:
        """The bucket itself."""
        return (self,)

    def nonce(self) -> str:
        """A name that nobody else has, and that tells this simulation whose it is."""
        return self._nonces.fresh(self._process)

    def jitter(self) -> float:
        """A random number from 0 up to 1."""
        return self._mind.jitter.random()


def _silent(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(NoAnswer(Unreachable("no answer came in time")))


def _unreached(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(Unreachable("no answer came in time"))
