"""A schedule from its beginning to its end: all actors, then the quiet, then the one who comes last."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sim_actors import RECEIPT_ACTS, make_call, settle_by_hand
from sim_keys import RUN, TENANT, kv_key
from sim_notices import NOTICE_ACTS, end_notices
from sim_plan import ActorPlan
from sim_session_actors import SESSION_ACTS, end_session

from natsreceipts.errors import AmbiguousCall, ReceiptErased

if TYPE_CHECKING:
    from sim_judge import Asked
    from sim_process import Process
    from sim_world import World

    from natsreceipts.run import Run

__all__ = ["story"]

_ACTS = {**RECEIPT_ACTS, **SESSION_ACTS, **NOTICE_ACTS}


async def finisher(process: Process, actor: ActorPlan) -> None:
    """When the faults have ended: brings every call to its end, with a person's help where it needs one."""
    world = process.world
    toolkit = process.toolkit()
    effect = (
        "opaque" if all(a.how.get("effects", ["opaque"]) == ["opaque"] for a in world.plan.actors) else "idempotent"
    )
    if any(actor.kind == "courier" for actor in world.plan.actors):
        await end_notices(process, toolkit.notices)
        await toolkit.close()
        return
    sessions = dict.fromkeys(actor.how["session"] for actor in world.plan.actors if "session" in actor.how)
    for session in sessions:
        await end_session(process, toolkit, session, world.plan.keys, effect)
    options = {"effect": effect, "lease": world.plan.lease, "wait": 60.0}
    for number in range(0 if sessions else world.plan.keys):
        outcome: Any = None
        for _ in range(12):
            run = toolkit.run(TENANT, RUN)

            async def work(asked: Asked, run: Run = run, number: int = number) -> Any:
                return await make_call(world, asked, run, number, options, "execute")

            _, outcome = await world.ask(process, kv_key(number), None, work)
            if not isinstance(outcome, BaseException):
                break
            if isinstance(outcome, AmbiguousCall | ReceiptErased):
                await settle_by_hand(process, toolkit, kv_key(number))
            await process.sleep(5.0)
        world.check(not isinstance(outcome, BaseException), f"no end of call {number} without faults: {outcome!r}")
    await toolkit.close()


async def story(world: World) -> None:
    """All actors, then the quiet, then the one who comes last, then what must be so at the end."""
    tasks = [asyncio.create_task(world.live(actor, _ACTS[actor.kind])) for actor in world.plan.actors]
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()
    world.quiet()
    if any(event.what == "replace" for event in world.plan.events):
        await asyncio.sleep(120.0)
        return
    await asyncio.sleep(60.0)
    await world.live(ActorPlan("last", "finisher", 0.0, {}), finisher)
    await asyncio.sleep(60.0)
    world.judge.at_the_end()
