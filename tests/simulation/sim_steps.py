"""Every step of some schedules: a crash, a cancellation, a cut or a stop at each request of each actor."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sim_plan import Event, plan_of
from sim_world import carry_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sim_plan import Plan

__all__ = ["FAULTS", "every_step", "steps_of"]

FAULTS = ("crash", "cancel", "cut", "pause")

_PHASES = ("before", "sent", "after")
"""Before a request is sent; when it is under way; when its answer is there."""


def steps_of(seed: int, kind: str, *, faults: Iterable[str] = FAULTS) -> Iterator[Plan]:
    """The schedule of a seed without any fault, and then once for every step of it and every fault at it."""
    plan = plan_of(seed, kind=kind).but(events=(), rate=0.0, body_rate=0.0)
    yield plan
    requests = carry_out(plan).by_actor
    for actor in plan.actors:
        for op, phase, what in itertools.product(range(1, requests.get(actor.name, 0) + 1), _PHASES, faults):
            length = {"cut": 3.0, "pause": plan.lease * 1.6}.get(what, 0.0)
            yield plan.but(events=(Event(what, actor.name, op=op, phase=phase, length=length),))


def every_step(seeds: Iterable[int]) -> Iterator[Plan]:
    """`steps_of` these seeds, of all kinds in turn."""
    for seed, kind in zip(seeds, itertools.cycle(("workers", "session", "mixed", "notices", "session"))):
        yield from steps_of(seed, kind)
