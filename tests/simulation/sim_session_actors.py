"""Who acts on sessions: agents that log and make the model's calls, wakers, reconcilers and readers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from sim_actors import make_call, settle_by_hand, verifier
from sim_keys import RUN, TENANT, TOOL, arguments, kv_key
from vendor_rules import RULES, Refused

from natsreceipts.errors import AmbiguousCall, InvalidSetting, ReceiptErased, SessionBusy, SessionConflict, Unreachable
from natsreceipts.identity import key_token
from natsreceipts.sessions import reconcile_interrupted_session
from natsreceipts.transcript import tool_result_message

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sim_judge import Asked
    from sim_plan import ActorPlan
    from sim_process import Process
    from sim_world import World

    from natsreceipts.entries import SessionEntry
    from natsreceipts.run import Run
    from natsreceipts.sessions import SessionLog
    from natsreceipts.toolkit import Toolkit

__all__ = ["SESSION_ACTS", "end_session"]


def said_by_user(text: str) -> dict[str, Any]:
    """A user's message: the same in the dialects that are used here."""
    return {"role": "user", "content": text}


def said_by_model(dialect: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """A model's message that calls the tool."""
    if dialect == "openai-chat":
        called = [
            {"id": id_, "type": "function", "function": {"name": TOOL, "arguments": json.dumps(args)}}
            for id_, args in calls
        ]
        return {"role": "assistant", "content": None, "tool_calls": called}
    if dialect == "anthropic":
        blocks = [{"type": "tool_use", "id": id_, "name": TOOL, "input": args} for id_, args in calls]
        return {"role": "assistant", "content": blocks}
    blocks = [{"type": "toolCall", "id": id_, "name": TOOL, "arguments": args} for id_, args in calls]
    return {"role": "assistant", "content": blocks}


class _Stopped(Exception):
    """The turn cannot go on: it begins again."""


class Desk:
    """One process at one session."""

    def __init__(self, process: Process, toolkit: Toolkit, session: str, effect: str) -> None:
        self.process, self.toolkit, self.effect = process, toolkit, effect
        self.world: World = process.world
        self.dialect = self.world.plan.dialect
        self.log: SessionLog = toolkit.sessions.open(TENANT, session, dialect=self.dialect)
        self.key = f"{key_token(TENANT)}.{key_token(session)}"
        self.run: Run = toolkit.run(TENANT, RUN)
        self.woken_at = self.shown = 0

    async def _writing(self, work: Coroutine[Any, Any, Any]) -> tuple[list[str], Any]:
        """Do something that may append: the ids that this process may have sent, and what came of it."""
        first = self.world.nonces.count
        outcome = await self.process.host(work)
        ids = self.world.nonces.of(self.process, first)
        self.world.note(f"{self.process.name}: gets {type(outcome).__name__}: {outcome}"[:260])
        return ids, outcome

    async def append(self, write: Callable[[], Coroutine[Any, Any, SessionEntry]]) -> SessionEntry:
        """Append; where it is not known whether that landed, the same again."""
        sent: list[str] = []
        for _ in range(4):
            ids, outcome = await self._writing(write())
            sent += ids
            self.world.session_judge.appended(self.key, sent, outcome, self.process, self.shown)
            if not isinstance(outcome, BaseException):
                self.shown = outcome.seq
                return outcome
            if isinstance(outcome, SessionConflict):
                self.shown = outcome.missed[-1].seq
            if not isinstance(outcome, Unreachable):
                break
            await self.process.sleep(2.0)
        raise _Stopped

    async def compact(self) -> None:
        """Let a summary stand for what was so far; where a call has no result yet, that is refused."""
        ids, outcome = await self._writing(self.log.compact(said_by_user("so far")))
        if isinstance(outcome, InvalidSetting) and not ids:
            return
        self.world.session_judge.appended(self.key, ids, outcome, self.process, self.shown)
        if isinstance(outcome, BaseException):
            raise _Stopped
        self.shown = outcome.seq

    async def wake(self, *, tries: int = 4, declared: bool = True) -> bool:
        """Wake the session, and again while it is busy."""
        effects = {TOOL: self.effect} if declared else None
        for _ in range(tries):
            ids, outcome = await self._writing(self.log.wake(guarded={TOOL: dict}, effects=effects))
            self.world.session_judge.woken(self.key, ids, outcome, self.process)
            if not isinstance(outcome, BaseException):
                self.woken_at = self.shown = outcome.last_seq
                return True
            await self.process.sleep(outcome.retry_after + 0.1 if isinstance(outcome, SessionBusy) else 2.0)
        return False

    async def look(self) -> None:
        """What goes to a model is what its API accepts."""
        view = await self.process.host(self.log.context())
        if isinstance(view, Unreachable | asyncio.CancelledError):
            return
        self.world.check(not isinstance(view, BaseException), f"{self.process.name}: context() raised {view!r}")
        self.shown = self.log.store.last_seq
        try:
            RULES[self.dialect](view.messages)
        except Refused as refused:
            self.world.fail(f"{self.process.name}: the request of the session is refused: {refused}")

    async def call(self, number: int, entry: SessionEntry | None, options: dict[str, Any], door: str) -> Any:
        """Make one of the model's calls."""
        if entry is not None:
            options = {**options, "entry": entry}

        async def work(asked: Asked) -> Any:
            return await make_call(self.world, asked, self.run, number, options, door)

        return (await self.world.ask(self.process, kv_key(number), entry, work))[1]


async def agent(process: Process, actor: ActorPlan) -> None:
    """Some turns of an agent; whatever stops one, the next begins with a wake."""
    how = actor.how
    toolkit = process.toolkit()
    desk = Desk(process, toolkit, how["session"], how["effects"][0])
    for turn in range(how["turns"]):
        try:
            await _turn(desk, how, turn)
        except _Stopped:
            desk = Desk(process, toolkit, how["session"], how["effects"][0])
        await process.sleep(how["pause"])
    await toolkit.close()


async def _turn(desk: Desk, how: dict[str, Any], turn: int) -> None:
    process = desk.process
    if how["wakes"] and not await desk.wake():
        raise _Stopped
    loaded = await process.host(desk.log.load())
    if isinstance(loaded, BaseException) or loaded.suspended:
        raise _Stopped
    desk.shown = loaded.last_seq
    if how["wakes"] and loaded.last_seq != desk.woken_at:
        raise _Stopped  # somebody has written since: that may be a call which is still to be closed
    luck = process.mind.body_luck
    if how.get("compacts") and turn and luck.random() < 0.5:
        await desk.compact()
    if how.get("branches") and loaded.entries and luck.random() < 0.4:
        await desk.log.branch(luck.choice(loaded.entries))
        if how["wakes"] and not await desk.wake():
            raise _Stopped
        await desk.append(partial(desk.log.append, said_by_user("rather so")))
    elif not loaded.messages:
        await desk.append(partial(desk.log.append, said_by_user("go")))
    ids = [f"call_{n}" if how["reuses"] else f"{process.name}-{turn}-{n}" for n in range(len(how["calls"]))]
    calls = [(id_, arguments(number)) for id_, number in zip(ids, how["calls"], strict=True)]
    entry = await desk.append(partial(desk.log.append, said_by_model(desk.dialect, calls), run=RUN))
    if how.get("stalls"):
        await process.sleep(how["stalls"])
    for id_, number in zip(ids, how["calls"], strict=True):
        asked_from: SessionEntry | None = entry
        if how.get("suspends"):
            await desk.append(partial(desk.log.suspend, [id_]))
            await process.sleep(5.0)
            asked_from = await desk.append(partial(desk.log.resume, [id_]))
        options: dict[str, Any] = {"effect": desk.effect, "lease": desk.world.plan.lease, "wait": how["wait"]}
        if how.get("verify"):
            options["verify"] = verifier(desk.world, process, kv_key(number))
        outcome = await desk.call(number, None if how.get("unnamed") else asked_from, options, how["door"])
        if how.get("leaves") and process.mind.body_luck.random() < 0.3:
            raise _Stopped
        if isinstance(outcome, AmbiguousCall):
            result = tool_result_message(id_, TOOL, outcome.model_text, is_error=True, dialect=desk.dialect)
        elif isinstance(outcome, BaseException):
            raise _Stopped
        else:
            result = tool_result_message(id_, TOOL, outcome, dialect=desk.dialect)
        await desk.append(partial(desk.log.append, result, run=RUN))
    await desk.look()


async def waker(process: Process, actor: ActorPlan) -> None:
    """Wakes a session that others may be at."""
    toolkit = process.toolkit()
    desk = Desk(process, toolkit, actor.how["session"], actor.how["effects"][0])
    for _ in range(actor.how["times"]):
        await desk.wake(tries=2, declared=actor.how["declared"])
        await process.sleep(actor.how["pause"])
    await toolkit.close()


async def reconciler(process: Process, actor: ActorPlan) -> None:
    """Closes what has no result by the word of the log alone."""
    toolkit = process.toolkit()
    desk = Desk(process, toolkit, actor.how["session"], actor.how["effects"][0])
    for _ in range(actor.how["times"]):
        ids, outcome = await desk._writing(reconcile_interrupted_session(desk.log, {TOOL: desk.effect}))
        desk.world.session_judge.woken(desk.key, ids, outcome, process)
        await process.sleep(actor.how["pause"])
    await toolkit.close()


async def reader(process: Process, actor: ActorPlan) -> None:
    """Looks at what would be sent to a model."""
    toolkit = process.toolkit()
    desk = Desk(process, toolkit, actor.how["session"], "opaque")
    for _ in range(4):
        await desk.look()
        await process.sleep(3.0)
    await toolkit.close()


SESSION_ACTS = {"agent": agent, "waker": waker, "reconciler": reconciler, "reader": reader}


async def end_session(process: Process, toolkit: Toolkit, session: str, keys: int, effect: str) -> None:
    """When the faults have ended: the session is woken, its calls come to an end, and its request is accepted."""
    world = process.world
    desk = Desk(process, toolkit, session, effect)
    loaded = await desk.log.load()
    desk.shown = loaded.last_seq
    if loaded.suspended:
        await desk.append(partial(desk.log.resume, sorted(loaded.suspended)))
    world.check(await desk.wake(tries=12), f"session {session} cannot be woken without faults")
    view = await desk.log.context()
    desk.shown = desk.log.store.last_seq
    agents = [actor.how for actor in world.plan.actors if actor.kind == "agent"]
    # An earlier call of an id that is used again can be closed by no append: agents that do not wake leave some.
    left = any(how["reuses"] and not how["wakes"] for how in agents)
    world.check(left or not view.closed, f"session {session} was woken, and calls have no result: {view.closed}")
    options = {"effect": effect, "lease": world.plan.lease, "wait": 60.0}
    for number in range(keys):
        entry = await desk.append(
            partial(desk.log.append, said_by_model(desk.dialect, [("last", arguments(number))]), run=RUN)
        )
        outcome: Any = None
        for _ in range(12):
            outcome = await desk.call(number, entry, options, "execute")
            if not isinstance(outcome, BaseException):
                break
            if isinstance(outcome, AmbiguousCall | ReceiptErased):
                await settle_by_hand(process, toolkit, kv_key(number))
            await process.sleep(5.0)
        world.check(not isinstance(outcome, BaseException), f"no end of call {number} without faults: {outcome!r}")
        result = tool_result_message("last", TOOL, outcome, dialect=desk.dialect)
        await desk.append(partial(desk.log.append, result, run=RUN))
    await desk.look()
