"""Carries out many schedules, one after the other, and says what was found."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from sim_plan import plan_of
from sim_shrink import printed, shrunk
from sim_world import carry_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sim_plan import Plan

__all__ = ["Walk", "walk", "walk_plans"]


class Walk(NamedTuple):
    """What many schedules came to. ``problem``: the first one that failed, printed as it was and shrunk."""

    schedules: int = 0
    requests: int = 0
    entered: int = 0
    faults: int = 0
    seconds: float = 0.0
    seed: int | None = None
    problem: str | None = None

    def __str__(self) -> str:
        pace = self.schedules / self.seconds * 60 if self.seconds else 0.0
        text = (
            f"{self.schedules:,} schedules in {self.seconds:.1f} s ({pace:,.0f} a minute): {self.requests:,} requests, "
            f"{self.faults:,} faults, {self.entered:,} effects"
        )
        return text if self.problem is None else f"{text}\nSIM_SEED={self.seed}\n{self.problem}"

    def __add__(self, other: Walk) -> Walk:  # type: ignore[override]
        """Both together, one after the other."""
        mine = (self.schedules, self.requests, self.entered, self.faults, self.seconds)
        others = (other.schedules, other.requests, other.entered, other.faults, other.seconds)
        first = self if self.problem is not None else other
        return Walk(*[a + b for a, b in zip(mine, others, strict=True)], first.seed, first.problem)


def walk(seeds: Iterable[int], *, seconds: float = 1e9, kind: str = "", shrink: bool = True) -> Walk:
    """Carry out the schedules of these seeds, for so many seconds at most, up to the first that fails."""
    return walk_plans((plan_of(seed, kind=kind) for seed in seeds), seconds=seconds, shrink=shrink)


def walk_plans(plans: Iterable[Plan], *, seconds: float = 1e9, shrink: bool = True) -> Walk:
    """Carry out these schedules, for so many seconds at most, up to the first that fails."""
    walked = requests = entered = faults = 0
    began = time.perf_counter()
    with _quick():
        for plan in plans:
            report = carry_out(plan)
            walked += 1
            requests += report.requests
            entered += report.entered
            faults += len(report.faults) + len(plan.events)
            took = time.perf_counter() - began
            if report.problem is not None:
                text = report.problem
                if shrink:
                    text = f"{printed(plan)}\n\nshrunk:\n{printed(shrunk(plan))}"
                return Walk(walked, requests, entered, faults, took, plan.seed, text)
            if took > seconds:
                break
            if walked % 200 == 0:
                gc.collect()
    return Walk(walked, requests, entered, faults, time.perf_counter() - began)


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Without what costs time and tells nothing here: the product's log, and the collector in between."""
    log = logging.getLogger("natsreceipts")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        log.setLevel(level)
        if collects:
            gc.enable()
        gc.collect()
