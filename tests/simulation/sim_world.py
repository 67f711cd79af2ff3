"""One schedule, carried out: the server, the processes, the world outside and the judge, on one virtual clock."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from sim_client import SimObjects
from sim_judge import Asked, Judge
from sim_keys import kv_key
from sim_loop import OUTSIDE, Stuck, VirtualLoop
from sim_notices import NoticeJudge
from sim_outside import Outside
from sim_process import Crashed, Mind, Process
from sim_seam import SimBucket
from sim_session_judge import SessionJudge
from sim_stream import Stream

from natsreceipts.wire import read_entry, read_receipt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sim_plan import ActorPlan, Event, Plan

    from natsreceipts.entries import SessionEntry

__all__ = ["Report", "World", "carry_out"]

_LIVES = 4
_FAULTS_END = 300.0


class Report(NamedTuple):
    """What came of a schedule. ``problem``: what was violated, first."""

    problem: str | None
    events: tuple[str, ...]
    faults: tuple[tuple[str, int], ...]
    """Requests and bodies that went wrong: what a shrinker may make calm."""
    requests: int
    entered: int
    seconds: float
    """Virtual."""
    by_actor: dict[str, int]
    """Requests by actor."""


class _Nonces:
    """Fresh names that tell whose they are."""

    def __init__(self) -> None:
        self._owners: list[Process] = []

    def fresh(self, process: Process) -> str:
        self._owners.append(process)
        return f"{len(self._owners):024x}"

    @property
    def count(self) -> int:
        """How many there are so far."""
        return len(self._owners)

    def of(self, process: Process, first: int) -> list[str]:
        """Those that a process has drawn, from that one on."""
        return [f"{n + 1:024x}" for n in range(first, len(self._owners)) if self._owners[n] is process]

    def owner(self, nonce: str) -> Process | None:
        """The process that drew it."""
        number = int(nonce, 16)
        return self._owners[number - 1] if 0 < number <= len(self._owners) else None


class World:
    """Everything in one simulation."""

    def __init__(self, plan: Plan, *, tracing: bool = False) -> None:
        self.plan = plan
        self.tracing = tracing
        self.rate, self.body_rate = plan.rate, plan.body_rate
        self.loop = VirtualLoop()
        self.events: list[str] = []
        self.faults: list[tuple[str, int]] = []
        self.problem: str | None = None
        self.nonces = _Nonces()
        self.objects: dict[str, bytes] = {}
        self.judge = Judge(self)
        self.session_judge = SessionJudge(self)
        self.notice_judge = NoticeJudge(self)
        self.outside = Outside(self)
        self.receipts = Stream(
            self.loop, "receipts", history=plan.history, replicas=plan.replicas, retention=plan.retention
        )
        self.receipts.on_stored = self.judge.stored
        self.receipts.on_expired = self.judge.expired
        self.sessions = Stream(self.loop, "SESSIONS", history=0, replicas=plan.replicas)
        self.notices = Stream(self.loop, "notices", history=8, replicas=plan.replicas)
        self.sessions.on_stored = self.session_judge.stored
        self.notices.on_stored = self.notice_judge.stored
        self.replaced = False
        """Whether the receipts were replaced: what is promised then is little."""
        self.resolutions = 0
        self.minds: dict[str, Mind] = {}
        self.processes: dict[str, Process] = {}
        self._asked: dict[str, list[Asked]] = {}
        self._past: dict[str, list[Asked]] = {}
        threads = random.Random(plan.seed ^ 0x5EED)
        self.loop.thread = lambda: (threads.choice((0.0, 0.0, 3.0)), threads.choice((0.01, 0.5, 12.0)))

    # ------------------------------------------------------------------ for everybody

    def note(self, text: str) -> None:
        """An event, for the printed schedule."""
        if self.tracing:
            self.events.append(f"{self.loop.time() - 1000:10.4f}  {text}")

    def fail(self, problem: str) -> None:
        """Something is violated. The first one counts, and ends the schedule."""
        if self.problem is None:
            self.problem = problem
            self.note(f"VIOLATED: {problem}")
        self.loop.stop()

    def check(self, holds: bool, problem: str) -> None:
        """`fail` unless it holds."""
        if not holds:
            self.fail(problem)

    def connect(self, process: Process) -> tuple[SimBucket, SimBucket, SimBucket, SimObjects]:
        """A process's connection: receipts, sessions, notices, objects."""
        receipts, sessions, notices = (
            SimBucket(process, stream) for stream in (self.receipts, self.sessions, self.notices)
        )
        return receipts, sessions, notices, SimObjects(process, self.objects)

    def describe(self, stream: Stream, key: str, value: bytes) -> str:
        """A write in a few words."""
        if stream is self.notices or not value:
            return key
        if stream is self.sessions:
            entry = read_entry(stream.name, key, 0, value)
            return f"{entry.kind} {entry.id[-4:]}{' (close)' if entry.close else ''}"
        record = read_receipt(stream.name, key, 0, value)
        token = record.holder.token[-4:] if record.holder else "-"
        extra = f" open={record.open}" if record.open else ""
        extra += f" fences={record.fences}" if record.fences else ""
        extra += " notApplied" if record.not_applied else ""
        extra += " resolved" if record.resolved else ""
        return f"{record.status} attempt {record.attempts} token {token} write {record.write[-4:]}{extra}"

    # ------------------------------------------------------------------ calls under way

    async def ask(
        self, process: Process, key: str, entry: SessionEntry | None, work: Callable[[Asked], Awaitable[Any]]
    ) -> tuple[Asked, Any]:
        """Make a call as a host does; the judge hears what came of it."""
        asked = Asked(process, key, entry)
        self._asked.setdefault(key, []).append(asked)
        outcome = await process.host(_awaited(work, asked))
        asked.last = self.nonces.count
        self._asked[key].remove(asked)
        self._past.setdefault(key, []).append(asked)
        self.note(f"{process.name}: gets {type(outcome).__name__}: {outcome}"[:230])
        self.judge.told(asked, outcome)
        return asked, outcome

    def asked(self, key: str, process: Process | None) -> list[Asked]:
        """The calls of a key that a process has under way. (Those of a dead one stay: a late write is theirs.)"""
        return [asked for asked in self._asked.get(key, ()) if asked.process is process]

    def asked_by(self, key: str, nonce: str) -> list[Asked]:
        """The calls, over or not, that may have drawn a name."""
        owner, number = self.nonces.owner(nonce), int(nonce, 16) - 1
        calls = [*self._asked.get(key, ()), *self._past.get(key, ())]
        return [asked for asked in calls if asked.process is owner and asked.first <= number < asked.last]

    # ------------------------------------------------------------------ the schedule

    def mind(self, name: str) -> Mind:
        """The luck of an actor."""
        if name not in self.minds:
            seeds = [f"{self.plan.seed} {name} {what}" for what in ("requests", "bodies", "jitter")]
            self.minds[name] = Mind(name, *(random.Random(seed) for seed in seeds))
        return self.minds[name]

    def _arrange(self, event: Event) -> None:
        if event.op:
            triggers = self.mind(event.whom).triggers
            triggers.setdefault(event.op, []).append((event.phase, event.what, event.length))
        else:
            self.loop.call_later(event.at, self._befall, event, context=OUTSIDE)

    def _befall(self, event: Event) -> None:
        self.note(f"   {event}")
        stream = {"receipts": self.receipts, "sessions": self.sessions, "notices": self.notices}.get(event.whom)
        if stream is not None and event.what == "replace":
            self.replaced = True
            stream.replace()
            self.judge.forget()
        elif stream is not None and event.what == "outage":
            stream.outage(event.length)
        elif stream is not None and event.what == "stuck":
            stream.stuck_until = self.loop.time() + event.length
        elif event.what in ("erase", "purge"):
            self.erase(event.what)
        elif stream is not None:
            stream.elect(event.length, event.offset, 7.0)
        elif event.whom in self.processes:
            self.processes[event.whom].befall(event.what, event.length)

    async def live(self, actor: ActorPlan, act: Callable[[Process, ActorPlan], Awaitable[None]]) -> None:
        """An actor, in one process after the other: after a crash the turn begins again."""
        await asyncio.sleep(actor.start)
        for number in range(_LIVES):
            process = Process(self, self.mind(actor.name), number)
            self.processes[actor.name] = process
            task = self.loop.create_task(_life(process, actor, act), context=process.context)
            await asyncio.wait([task, process.ended], return_when=asyncio.FIRST_COMPLETED)
            if process.alive:
                if (error := task.exception()) is not None:
                    self.fail(f"{process.name} ended in {error!r}")
                process.ended.cancel()
                return
            await asyncio.sleep((0.01, 2.0, 20.0)[process.mind.ops % 3])

    def erase(self, what: str) -> None:
        """Somebody deletes the first receipt by hand."""
        self.note(f"   somebody: {what} of {kv_key(0)}")
        self.receipts.erase(kv_key(0), purge=what == "purge")
        if all(entry.erased for entry in self.receipts.kept(kv_key(0), self.receipts.seq)):
            self.judge.purged(kv_key(0))  # also by markers, where a history shorter than is allowed holds no more
        self.receipts.sign(kv_key(0))

    def quiet(self) -> None:
        """No more faults."""
        for mind in self.minds.values():
            mind.triggers.clear()
        self.rate = self.body_rate = 0.0
        self.note("   the faults have ended")


async def _awaited(work: Callable[[Asked], Awaitable[Any]], asked: Asked) -> Any:
    return await work(asked)


async def _life(process: Process, actor: ActorPlan, act: Callable[[Process, ActorPlan], Awaitable[None]]) -> None:
    try:
        await act(process, actor)
    except Crashed:
        if process.alive:
            raise


def carry_out(plan: Plan, *, tracing: bool = False) -> Report:
    """Carry a schedule out from its beginning to its end."""
    from sim_story import story

    world = World(plan, tracing=tracing)
    for event in plan.events:
        world._arrange(event)
    loop = world.loop
    try:
        story_task = loop.create_task(story(world))
        story_task.add_done_callback(lambda _: loop.stop())
        loop.run_forever()
        if world.problem is None and story_task.done() and (error := story_task.exception()) is not None:
            raise error
    except Stuck as stuck:
        world.problem = world.problem or str(stuck)
    finally:
        _bury(world)
    if world.problem is None and loop.errors:
        world.problem = f"an error in a callback: {loop.errors[0]}"
    by_actor = {name: mind.ops for name, mind in world.minds.items()}
    return Report(
        problem=world.problem,
        events=tuple(world.events),
        faults=tuple(world.faults),
        requests=sum(by_actor.values()),
        entered=world.outside.entered,
        seconds=loop.time() - 1000.0,
        by_actor=by_actor,
    )


def _bury(world: World) -> None:
    """After a violation tasks are still there: let them end, unseen."""
    loop = world.loop
    left = [task for task in asyncio.all_tasks(loop) if not task.done()]
    if left and world.problem is None:
        names = ", ".join(sorted(f"{task.get_coro().__qualname__}" for task in left))
        world.problem = f"tasks are left over: {names}"
    world.tracing = False
    for process in world.processes.values():
        if process.alive:
            process.befall("crash", 0.0)
    for _ in range(20):
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        if not left:
            break
        for task in left:
            task.cancel()
        loop._ready.append(asyncio.Handle(loop.stop, (), loop))
        try:
            loop.run_forever()
        except Stuck:
            break
    loop._ready.clear()
    loop._scheduled.clear()
    loop.close()
