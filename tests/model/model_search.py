"""Searches a transition system: all of it breadth-first, or a part of it by seeded random walks."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from receipts_model import Model, World


_NO_DIGITS = str.maketrans("", "", "0123456789")


class Found(NamedTuple):
    """What a search saw: how many states, or walks.

    ``problem`` is the first thing that went wrong, ``schedule`` the steps up to there.
    """

    states: int
    steps: int
    seconds: float
    problem: str | None = None
    schedule: tuple[str, ...] = ()
    seen: frozenset[str] = frozenset()
    """The statuses of the records that stood when nobody could do anything more."""
    kinds: frozenset[str] = frozenset()
    """The steps that were taken, without their numbers (walks only)."""

    def __str__(self) -> str:
        text = f"{self.states:,} {'walks' if self.kinds else 'states'}, {self.steps:,} steps, {self.seconds:.1f} s"
        if self.problem is None:
            return text
        lines = "\n".join(f"  {n:2}. {label}" for n, label in enumerate(self.schedule, 1))
        return f"{text}\n{self.problem}, after {len(self.schedule)} steps:\n{lines}"


def search(model: Model, *, limit: int = 2_000_000) -> Found:
    """Go through every reachable state, nearest first, up to the first problem: its schedule is a shortest one.

    Raises RuntimeError over ``limit`` states.
    """
    began = time.perf_counter()
    came: dict[World, tuple[World, str] | None] = {model.start: None}
    layer = [model.start]
    known = {model.key(model.start)}
    steps = 0
    ends: set[str] = set()
    while layer:
        following: list[World] = []
        for world in layer:
            stuck = True
            for label, after, problem in model.steps(world):
                steps += 1
                stuck = False
                if problem is not None:
                    schedule = (*_way(came, world), label)
                    return Found(len(came), steps, time.perf_counter() - began, problem, schedule)
                if after in came:
                    continue
                key = model.key(after)
                if key not in known:
                    known.add(key)
                    came[after] = (world, label)
                    following.append(after)
            if stuck:
                ends.add(world.chain[-1].status if world.chain else "absent")
        if len(came) > limit:
            raise RuntimeError(f"over {limit:,} states")
        layer = following
    return Found(len(came), steps, time.perf_counter() - began, seen=frozenset(ends))


def _way(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    labels: list[str] = []
    back = came[world]
    while back is not None:
        world, label = back
        labels.append(label)
        back = came[world]
    return labels[::-1]


def walk(model: Model, *, seed: int, seconds: float = 60.0, walks: int = 1_000_000, longest: int = 200) -> Found:
    """Walk at random from the start up to ``walks`` times, each time until nobody can do anything more.

    A slow machine takes longer than ``seconds`` for the first 500, which are few.
    """
    chance = random.Random(seed)
    began = time.perf_counter()
    steps = walked = 0
    ends: set[str] = set()
    kinds: set[str] = set()
    while walked < walks and (walked < 500 or time.perf_counter() - began < seconds):
        walked += 1
        world = model.start
        schedule: list[str] = []
        for _ in range(longest):
            choices = list(model.steps(world))
            if not choices:
                break
            for label, _, problem in choices:
                if problem is not None:
                    return Found(
                        walked, steps, time.perf_counter() - began, problem, (*schedule, label), kinds=frozenset(kinds)
                    )
            label, world, _ = chance.choice(choices)
            schedule.append(label)
            kinds.add(label.translate(_NO_DIGITS))
            steps += 1
        ends.add(world.chain[-1].status if world.chain else "absent")
    return Found(walked, steps, time.perf_counter() - began, seen=frozenset(ends), kinds=frozenset(kinds))
