"""What every request of a simulated process goes through, hints, and the object store."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Self

from sim_process import Crashed

from natsreceipts._jetstream import ObjectInfo
from natsreceipts.errors import Unreachable

if TYPE_CHECKING:
    from sim_process import Process
    from sim_stream import Stream

__all__ = ["Client", "SimHint", "SimObjects"]


class Client:
    """What every request goes through: the process's number of it, its luck, and what befalls the process at it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = process.loop
        self._mind = process.mind
        self._luck = process.mind.luck.random
        self._world = process.world
        self._calm = process.world.plan.calm

    async def _begin(self) -> tuple[float, float, float, float]:
        """Number the request and draw its luck: the fault (1: none), and three more numbers."""
        process, mind = self._process, self._mind
        if not process.alive:
            raise Crashed
        mind.ops += 1
        luck = self._luck
        fault, a, b, c = luck(), luck(), luck(), luck()
        rate = self._world.rate
        if fault >= rate or (mind.name, mind.ops) in self._calm:
            fault = 1.0
        else:
            process.world.faults.append((mind.name, mind.ops))
            fault /= rate
        if mind.ops in mind.triggers:
            for phase, what, length in mind.triggers[mind.ops]:
                if phase == "before":
                    process.befall(what, length)
                    await asyncio.sleep(0)
                    if not process.alive:
                        raise Crashed
        return fault, a, b, c

    def _phase(self, number: int, phase: str) -> None:
        if number in self._mind.triggers:
            for when, what, length in self._mind.triggers[number]:
                if when == phase:
                    self._process.befall(what, length)

    def _answered(self, future: asyncio.Future[Any], answer: Any, epoch: int, number: int) -> None:
        """The answer reaches the process, unless its connection was cut meanwhile."""
        process = self._process
        if epoch != process.epoch or future.done():
            return
        self._phase(number, "after")
        if future.done():
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class SimHint(AbstractAsyncContextManager["SimHint"]):
    """A subscription. In some schedules it is silent for ever."""

    def __init__(self, process: Process, stream: Stream, key: str) -> None:
        self._process = process
        self._stream = stream
        self._key = key
        self._signed = False
        self._waiter: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        if not self._process.alive:
            raise Crashed
        if not self._process.world.plan.silent_hints:
            self._stream.hints.setdefault(self._key, []).append(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        hints = self._stream.hints.get(self._key, [])
        if self in hints:
            hints.remove(self)

    def sign(self) -> None:
        """Something was sent to the key."""
        if self._process.loop.time() < self._process.cut_until:
            return
        self._signed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout: float) -> None:
        """Return at the next sign, or after ``timeout`` seconds."""
        if not self._process.alive:
            raise Crashed
        if not self._signed:
            self._waiter = self._process.loop.create_future()
            self._process.expect(self._waiter)
            timer = self._process.loop.call_later(timeout, _unsigned, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
        self._signed = False


def _unsigned(waiter: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class SimObjects(Client):
    """The object store on one process's connection."""

    def __init__(self, process: Process, store: dict[str, bytes]) -> None:
        super().__init__(process)
        self.name = "receipt-payloads"
        self._store = store

    async def put(self, name: str, data: bytes, *, timeout: float) -> ObjectInfo:
        """Store an object; where that fails, what was stored is not readable."""
        fault, a, _, _ = await self._begin()
        number = self._mind.ops
        await self._process.sleep(timeout if fault != 1.0 else 0.001 + 0.005 * a)
        self._phase(number, "after")
        if not self._process.alive:
            raise Crashed
        if fault != 1.0:
            raise Unreachable("no answer came in time")
        self._process.world.check(name not in self._store, f"the name {name} of an object is used twice")
        self._store[name] = data
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        return ObjectInfo(name, digest, len(data))

    async def get(self, info: ObjectInfo, *, timeout: float) -> bytes | None:
        """An object's bytes."""
        fault, a, _, _ = await self._begin()
        await self._process.sleep(timeout if fault != 1.0 else 0.001 + 0.005 * a)
        if fault != 1.0:
            raise Unreachable("no answer came in time")
        return self._store.get(info.name)
