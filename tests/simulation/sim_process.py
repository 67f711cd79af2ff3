"""A simulated process: it crashes, is paused, is cut off and is cancelled where the schedule says so."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from sim_loop import OUTSIDE, PROCESS

from natsreceipts.announce import Announcer
from natsreceipts.attempts import Attempts
from natsreceipts.identity import sha256_hex
from natsreceipts.notices import NoticeBoard
from natsreceipts.payloads import PayloadStore
from natsreceipts.receipts import ReceiptStore
from natsreceipts.session_store import stream_mark
from natsreceipts.sessions import Sessions
from natsreceipts.toolkit import Toolkit

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine

    from sim_seam import SimBucket
    from sim_world import World

__all__ = ["Crashed", "Mind", "Process"]


class Crashed(BaseException):
    """The process is no more: nothing that it does from here on can be seen by anybody."""


class Mind:
    """What an actor's luck is, over all the processes that it lives in one after the other."""

    def __init__(self, name: str, luck: random.Random, body_luck: random.Random, jitter: random.Random) -> None:
        self.name = name
        self.luck = luck
        self.body_luck = body_luck
        self.jitter = jitter
        self.ops = 0
        self.bodies = 0
        self.triggers: dict[int, list[tuple[str, str, float]]] = {}
        """By number of the request: phase, what happens, how long."""


class Process:
    """One life of an actor: its own toolkit on its own connection."""

    def __init__(self, world: World, mind: Mind, number: int) -> None:
        self.world = world
        self.loop = world.loop
        self.mind = mind
        self.name = f"{mind.name}.{number}" if number else mind.name
        self.alive = True
        self.paused = False
        self.held: list[asyncio.Handle] = []
        self.cut_until = 0.0
        self.epoch = 0
        """How often its connection was cut: answers of an earlier one never come."""
        self.tries: dict[asyncio.Task[Any], None] = {}
        """What a host would cancel: the calls under way."""
        self.ended = world.loop.create_future()
        self._receipts: SimBucket | None = None
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self._waiting: dict[asyncio.Future[Any], tuple[float, Callable[[asyncio.Future[Any]], None]] | None] = {}

    def toolkit(self) -> Toolkit:
        """The product's own classes on the model of the server. In the process's own context."""
        world = self.world
        receipts, sessions, notices, objects = world.connect(self)
        self._receipts = receipts
        payloads = PayloadStore(objects, inline_limit=world.plan.inline_limit)
        attempts = Attempts(receipts, payloads, worker=self.name, session_stream=stream_mark(sessions))
        board = NoticeBoard(notices)
        announcer = Announcer(board, receipts.nonce)
        return Toolkit(
            ReceiptStore(receipts, attempts, announcer),
            Sessions(sessions, attempts, digest=sha256_hex),
            board,
            announcer,
            attempts,
            digest=sha256_hex,
            defaults={},
        )

    @property
    def high_water(self) -> int:
        """The highest sequence of the receipts that it knows of."""
        return self._receipts.high_water if self._receipts is not None else 0

    # ------------------------------------------------------------------ waiting

    def expect(self, answer: asyncio.Future[Any]) -> None:
        """Break off the wait for this answer when the process crashes."""
        self._waiting[answer] = None
        answer.add_done_callback(self._heard, context=OUTSIDE)

    def _heard(self, answer: asyncio.Future[Any]) -> None:
        self._waiting.pop(answer, None)

    def sent(
        self, future: asyncio.Future[Any], deadline: float, silence: Callable[[asyncio.Future[Any]], None]
    ) -> None:
        """A request is under way; ``silence`` is what the loss of its answer comes to at the deadline."""
        self._waiting[future] = (deadline, silence)

    async def answer(self, future: asyncio.Future[Any]) -> Any:
        """Wait for a server's answer."""
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def sleep(self, seconds: float) -> None:
        """Sleep, in a body or between two calls."""
        if not self.alive:
            raise Crashed
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            done = self.loop.create_future()
            self._waiting[done] = None
            timer = self.loop.call_later(seconds, _wake, done)
            try:
                await done
            finally:
                timer.cancel()
                self._waiting.pop(done, None)
        if not self.alive:
            raise Crashed

    async def host(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something as a host would, in a task that may be cancelled: its result, or the exception as a value."""
        task = self.loop.create_task(work)
        self.tries[task] = None
        try:
            await asyncio.wait([task])
        finally:
            del self.tries[task]
        if not self.alive:
            raise Crashed
        if task.cancelled():
            return asyncio.CancelledError()
        error = task.exception()
        return error if error is not None else task.result()

    # ------------------------------------------------------------------ what befalls it

    def befall(self, what: str, length: float) -> None:
        """One of crash, pause, cancel, cut; or somebody erases or purges a receipt at this moment."""
        if not self.alive:
            return
        self.world.note(f"{self.name}: {what}{f' for {length:.2f} s' if what in ('pause', 'cut') else ''}")
        match what:
            case "crash":
                self._crash()
            case "pause":
                self._pause(length)
            case "cancel":
                for task in list(self.tries):
                    task.cancel()
            case "cut":
                self._cut(length)
            case "erase" | "purge":
                self.world.erase(what)

    def _crash(self) -> None:
        self.alive = False
        self._resume()
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(Crashed())
        if not self.ended.done():
            self.ended.set_result(None)

    def _pause(self, length: float) -> None:
        if not self.paused:
            self.paused = True
            self.loop.call_later(length, self._resume, context=OUTSIDE)

    def _resume(self) -> None:
        if self.paused:
            self.paused = False
            held, self.held = self.held, []
            self.loop.hand_back(held)
            self.world.note(f"{self.name}: goes on")

    def _cut(self, length: float) -> None:
        """The connection: what was under way is never answered, and nothing can be sent for a while."""
        self.cut_until = self.loop.time() + length
        self.epoch += 1
        for future, waits in list(self._waiting.items()):
            if waits is not None and not future.done():
                deadline, silence = waits
                self.loop.call_at(max(deadline, self.loop.time()), silence, future, context=self.context)


def _wake(done: asyncio.Future[Any]) -> None:
    if not done.done():
        done.set_result(None)
