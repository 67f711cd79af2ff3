"""Who acts on receipts: workers with their bodies, people who settle calls, and the one who comes last."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from sim_judge import Asked, BodyFailed
from sim_keys import RUN, TENANT, TOOL, arguments, kv_key

from natsreceipts.decision import Landed, NotLanded
from natsreceipts.errors import LeaseLost, NatsReceiptsError, NotApplied, ReceiptErased

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim_plan import ActorPlan
    from sim_process import Process
    from sim_world import World

    from natsreceipts.guard import Call
    from natsreceipts.run import Run

__all__ = ["RECEIPT_ACTS", "make_call", "settle_by_hand", "verifier"]

# ---------------------------------------------------------------- bodies


_KINDS = ("ok", "ok", "long", "long", "notApplied", "notApplied", "landed, raises", "gone, raises", "late", "odd")


class _Fate:
    """What a body comes to, drawn in the same number of draws whatever it is."""

    def __init__(self, process: Process, lease: float) -> None:
        mind, world = process.mind, process.world
        mind.bodies += 1
        luck = mind.body_luck.random
        odd, kind, before, after, length, late = (luck() for _ in range(6))
        self.kind, self.length, self.before, self.after, self.late = "ok", 0.01 + length * length, "", "", 0.0
        self.renews_aside = False
        if odd >= world.body_rate or (mind.name, -mind.bodies) in world.plan.calm:
            return
        world.faults.append((mind.name, -mind.bodies))
        self.kind = _KINDS[int(kind * len(_KINDS))]
        if self.kind == "long":
            self.length = lease * (0.3 + 2.5 * length)
        befalls = ("", "", "", "", "pause", "pause", "crash", "cancel", "renew", "cut")
        self.before, self.after = befalls[int(before * len(befalls))], befalls[int(after * len(befalls))]
        self.pause = lease * (0.3 + 2 * late)
        self.late = 40 * late * late
        self.renews_aside = late > 0.7


async def _befall(process: Process, call: Call, what: str, length: float) -> None:
    if what == "renew":
        await call.renew()
    elif what:
        process.befall(what, length)
    await process.sleep(0)


async def body(world: World, asked: Asked, call: Call, lease: float) -> Any:
    """The tool: what it does outside, and how it ends."""
    process = asked.process
    fate = _Fate(process, lease)
    world.note(f"{process.name}: its body begins ({fate.kind} {fate.before} {fate.after})")
    try:
        if fate.before:
            await _befall(process, call, fate.before, fate.pause)
        deed = _enter(world, asked, call)
        state = "gone" if fate.kind in ("notApplied", "gone, raises") else "landed"
        when = fate.late if fate.kind == "late" else fate.length * 0.9
        world.loop.call_later(when, world.outside.settle, deed, state)
        if fate.after:
            await _befall(process, call, fate.after, fate.pause)
        if call._options.effect == "resumable":
            await _steps(world, asked, call, deed.claimed)
        if fate.kind != "late":
            await process.sleep(fate.length)
        if fate.renews_aside:
            await _renew_aside(world, call)
        match fate.kind:
            case "notApplied":
                raise NotApplied
            case "landed, raises" | "gone, raises" | "late":
                raise BodyFailed(fate.kind)
            case "odd":
                return {"deed": object()}
        return deed.result
    except (NotApplied, BodyFailed) as error:
        for each in _sharing(world, asked):
            each.raised = error
        raise


async def _renew_aside(world: World, call: Call) -> None:
    """In a task of the body's own, which the body does not wait for."""

    async def renew() -> None:
        with contextlib.suppress(LeaseLost):
            await call.renew()

    world.loop.create_task(renew())
    await asyncio.sleep(0)


def _sharing(world: World, asked: Asked) -> list[Asked]:
    return world.asked(asked.key, asked.process) if asked.shared else [asked]


def _enter(world: World, asked: Asked, call: Call) -> Any:
    token = call._attempt.token
    claimed = world.judge.entering(asked, token)
    session, seq = (asked.entry.token, asked.entry.seq) if asked.entry is not None else ("", 0)
    deed = world.outside.enter(asked.key, asked.process, token, claimed, session, seq)
    for each in _sharing(world, asked):
        each.deeds.append(deed)
    return deed


async def _steps(world: World, asked: Asked, call: Call, claimed: int) -> None:
    for name in ("a", "b"):

        async def work(name: str = name) -> str:
            world.judge.stepping(asked, claimed, name)
            await asked.process.sleep(0.05)
            return f"{name} by {asked.process.name}"

        await call.step(name, work)


async def in_thread(world: World, asked: Asked, call: Call, lease: float) -> Any:
    """The same in a thread: what is begun there can be stopped by nobody."""
    fate = _Fate(asked.process, lease)
    if fate.before:
        await _befall(asked.process, call, fate.before, fate.pause)

    def work() -> Any:
        deed = _enter(world, asked, call)
        world.outside.settle(deed, "gone" if fate.kind in ("notApplied", "gone, raises") else "landed")
        error: Exception | None = None
        if fate.kind == "notApplied":
            error = NotApplied()
        elif fate.kind in ("landed, raises", "gone, raises"):
            error = BodyFailed(fate.kind)
        if error is not None:
            for each in _sharing(world, asked):
                each.raised = error
            raise error
        for each in _sharing(world, asked):
            each.returned.append(deed.result)
        return deed.result

    return await call.in_thread(work, whole=True)


# ---------------------------------------------------------------- workers


async def make_call(world: World, asked: Asked, run: Run, number: int, options: dict[str, Any], door: str) -> Any:
    """Call the tool through one of the doors; the result."""
    lease = options["lease"]
    works = partial(in_thread if door == "thread" else body, world, asked)

    async def work(call: Call) -> Any:
        for each in _sharing(world, asked):
            each.tokens.add(call._attempt.token)
        result = await works(call, lease)
        for each in _sharing(world, asked):
            each.returned.append(result)
        return result

    if door == "call":
        async with run.call(TOOL, arguments(number), **options) as call:
            if not call.replayed:
                call.result = await work(call)
        return call.result
    return await run.execute(TOOL, arguments(number), work, **options)


def verifier(world: World, process: Process, key: str) -> Callable[[], Any]:
    """Somebody who looks at the outside world, honestly."""

    async def verify() -> Any:
        await process.sleep(0.2)
        verdict = world.outside.verdict(key)
        world.note(f"{process.name}: its verifier says {verdict}")
        return verdict

    return verify


async def worker(process: Process, actor: ActorPlan) -> None:
    """Makes one call a few times over, whatever comes of it: as after a redelivery."""
    world, how = process.world, actor.how
    toolkit = process.toolkit()
    number = how["key"]
    key = kv_key(number)
    for turn in range(how["times"]):
        effects = how["effects"]
        options: dict[str, Any] = {
            "effect": effects[min(turn, len(effects) - 1)],
            "lease": world.plan.lease,
            "wait": how["wait"],
            "timeout": how.get("timeout"),
            "on_lost": how.get("on_lost", "cancel"),
        }
        if how.get("verify"):
            options["verify"] = verifier(world, process, key)
        run = toolkit.run(TENANT, RUN)
        if how.get("entered"):
            async with run:
                outcome = await _turn(world, process, run, number, options, how)
        else:
            outcome = await _turn(world, process, run, number, options, how)
        done = not isinstance(outcome, BaseException)
        await process.sleep(0.01 if done else min(getattr(outcome, "retry_after", 3.0), 60.0) + 0.5)
    await toolkit.close()


async def _turn(
    world: World, process: Process, run: Run, number: int, options: dict[str, Any], how: dict[str, Any]
) -> Any:
    async def work(asked: Asked) -> Any:
        asked.shared = bool(how.get("twice"))
        return await make_call(world, asked, run, number, options, "execute" if how.get("twice") else how["door"])

    key = kv_key(number)
    if not how.get("twice"):
        return (await world.ask(process, key, None, work))[1]
    both = [world.loop.create_task(world.ask(process, key, None, work)) for _ in range(2)]
    await asyncio.wait(both)
    return both[0].result()[1]


async def settle_by_hand(process: Process, toolkit: Any, key: str, *, running: bool = False) -> str:
    """Look at a receipt as a person does, and settle it where the outside world tells what became of it."""
    world = process.world
    try:
        receipt = await toolkit.receipts.get(key)
        if receipt is None or receipt.status not in ("ambiguous", "running", "failed"):
            return "nothing to settle"
        revision, status = receipt.revision, receipt.status
    except ReceiptErased as error:
        revision, status = error.revision, "erased"
    except NatsReceiptsError as error:
        return type(error).__name__
    await process.sleep(0.5)
    verdict = world.outside.verdict(key)
    said: dict[str, Any] = {"not_applied": True}
    if isinstance(verdict, Landed):
        said = {"completed": verdict.result}
    elif not isinstance(verdict, NotLanded):
        return "not known"
    world.resolutions += 1
    by = f"{process.name} {world.resolutions}"
    world.note(f"{process.name}: looked at revision {revision} ({status}), says {verdict}")
    outcome = await process.host(
        toolkit.receipts.resolve(key, revision=revision, by=by, reason="looked", even_if_running=running, **said)
    )
    world.note(f"{process.name}: gets {type(outcome).__name__}: {outcome}"[:200])
    if not isinstance(outcome, asyncio.CancelledError):
        world.judge.settled(by, key, outcome)
    return "settled" if not isinstance(outcome, BaseException) else type(outcome).__name__


async def resolver(process: Process, actor: ActorPlan) -> None:
    """A person on call."""
    toolkit = process.toolkit()
    for _ in range(actor.how["times"]):
        await settle_by_hand(process, toolkit, kv_key(actor.how["key"]), running=actor.how["running"])
        await process.sleep(7.0)
    await toolkit.close()


RECEIPT_ACTS = {"worker": worker, "resolver": resolver}
