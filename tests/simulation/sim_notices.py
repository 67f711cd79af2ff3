"""Who files and consumes notices, and the judge of that: one record of each key, one turn to carry each notice."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json
from sim_keys import RUN

from natsreceipts.errors import AlreadyConsumed, InvalidName, NoticeConflict, Unreachable

if TYPE_CHECKING:
    from sim_plan import ActorPlan
    from sim_process import Process
    from sim_world import World

    from natsreceipts._jetstream import Entry

__all__ = ["NOTICE_ACTS", "NoticeJudge", "end_notices"]

_TO = "agent:ops"

_LAG = 20.0
"""Seconds that a server is behind at most, in this model."""


class NoticeJudge:
    """Holds the notices against the design."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.records: dict[str, dict[str, Any]] = {}
        self._filed_at: dict[str, float] = {}
        self._told: dict[str, str] = {}
        """By status key the turn that was told that it carries the notice."""

    def stored(self, entry: Entry, by: str) -> None:
        """A record was stored."""
        if entry.key in self.records:
            self._world.fail(f"{entry.key} was written again by {by}")
        self.records[entry.key] = from_json(entry.value)
        self._filed_at[entry.key] = self._world.loop.time()
        stem, _, kind = entry.key.rpartition(".")
        if kind == "status" and f"{stem}.spec" not in self.records:
            self._world.fail(f"{entry.key} was written by {by} before the notice itself")

    def filed(self, key: str, decision: str, outcome: Any, who: str) -> None:
        """What came of a filing."""
        stands = self.records.get(key)
        if isinstance(outcome, NoticeConflict):
            ok = stands is not None and stands["fact"]["decision"] != decision
        elif isinstance(outcome, BaseException):
            ok = isinstance(outcome, Unreachable | asyncio.CancelledError)
        else:
            ok = stands is not None and stands["fact"]["decision"] == decision
        self._world.check(ok, f"{who} filed {decision}, was told {outcome!r}, and on record is {stands}")

    def consumed(self, key: str, turn: str, outcome: Any) -> None:
        """What came of a consumption."""
        stands = self.records.get(key)
        if isinstance(outcome, InvalidName):
            # Reads prove nothing. A client of a server that was cut off asks nobody else, and is told so for a while.
            ago = self._world.loop.time() - self._filed_at[f"{key.removesuffix('.status')}.spec"]
            self._world.check(ago < _LAG, f"{turn} consumed {key}, filed {ago:.1f} s before, and was told {outcome}")
            return
        if isinstance(outcome, AlreadyConsumed):
            ok = stands is not None and stands["by"] == outcome.by != turn
        elif isinstance(outcome, BaseException):
            ok = isinstance(outcome, Unreachable | asyncio.CancelledError)
        else:
            ok = stands is not None and stands["by"] == turn and self._told.setdefault(key, turn) == turn
        self._world.check(ok, f"{turn} consumed {key}, was told {outcome!r}, and on record is {stands}")


async def courier(process: Process, actor: ActorPlan) -> None:
    """Files some notices, and consumes what waits; after a crash the same turns again."""
    world, how = process.world, actor.how
    judge = world.notice_judge
    toolkit = process.toolkit()
    board = toolkit.notices
    for turn in range(how["times"]):
        for number in how["files"]:
            work = board.file(
                run=RUN,
                step="s",
                request_id=f"r{number}",
                addressee=_TO,
                fact={"decision": how["decision"], "outcome": "done"},
            )
            outcome = await process.host(work)
            world.note(f"{process.name}: files r{number}, gets {outcome!r}"[:200])
            judge.filed(getattr(outcome, "key", ""), how["decision"], outcome, process.name)
        for notice in await _pending(process, board):
            await _carry(process, board, notice, f"{actor.name}-{turn}")
        await process.sleep(how["pause"])
    await toolkit.close()


async def _carry(process: Process, board: Any, notice: Any, turn: str) -> None:
    """Consume a notice as a turn does, and again as long as it is not known whether that is on record."""
    stem = next(key for key in process.world.notice_judge.records if f".{notice.notice_id}.spec" in key)[:-5]
    for _ in range(4):
        outcome = await process.host(board.consume(run=RUN, addressee=_TO, notice_id=notice.notice_id, by=turn))
        process.world.note(f"{process.name}: consumes as {turn}, gets {outcome!r}"[:200])
        process.world.notice_judge.consumed(f"{stem}.status", turn, outcome)
        if not isinstance(outcome, Unreachable | asyncio.CancelledError):
            return
        await process.sleep(1.0)


async def watcher(process: Process, actor: ActorPlan) -> None:
    """Carries what a watch gives it, as it comes; after a crash first what it had taken before."""
    toolkit = process.toolkit()
    board = toolkit.notices
    for notice in await _pending(process, board, by=actor.name):
        await _carry(process, board, notice, actor.name)
    seen: set[str] = set()
    until = process.loop.time() + actor.how["seconds"]
    async with contextlib.aclosing(board.watch(run=RUN, addressee=_TO)) as given:
        while (left := until - process.loop.time()) > 0:
            notice = await process.host(_next(given, left))
            if notice is None or isinstance(notice, BaseException):
                break
            process.world.note(f"{process.name}: is given {notice.notice_id[:8]}")
            process.world.check(notice.notice_id not in seen, f"{process.name} was given {notice.notice_id} twice")
            seen.add(notice.notice_id)
            await _carry(process, board, notice, actor.name)
    await toolkit.close()


async def _next(given: Any, within: float) -> Any:
    try:
        return await asyncio.wait_for(anext(given), within)
    except TimeoutError:
        return None


async def _pending(process: Process, board: Any, **by: str) -> list[Any]:
    waiting = await process.host(board.pending(run=RUN, addressee=_TO, **by))
    if isinstance(waiting, BaseException):
        allowed = isinstance(waiting, Unreachable | asyncio.CancelledError)
        process.world.check(allowed, f"pending() raised {waiting!r}")
        return []
    return waiting


NOTICE_ACTS = {"courier": courier, "watcher": watcher}


async def end_notices(process: Process, board: Any) -> None:
    """When the faults have ended: a watch gives every notice that waits, and all of them are consumed."""
    waiting = {notice.notice_id for notice in await board.pending(run=RUN, addressee=_TO)}
    async with contextlib.aclosing(board.watch(run=RUN, addressee=_TO)) as given:
        while (notice := await _next(given, 60.0)) is not None:
            waiting.discard(notice.notice_id)
            await _carry(process, board, notice, "last")
    process.world.check(not waiting, f"a watch did not give what waits: {waiting}")
    left = await board.pending(run=RUN, addressee=_TO)
    process.world.check(not left, f"notices are left that nobody can consume: {left}")
