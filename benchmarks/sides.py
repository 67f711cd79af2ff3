"""Ways to do the same thing, measured side by side in alternating rounds."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any


async def taken(work: Any, *, seconds: float, width: int = 1) -> float:
    """Seconds per call, by the number of calls that ``width`` callers made in about ``seconds``."""
    until = time.perf_counter() + seconds
    made = 0

    async def caller() -> None:
        nonlocal made
        while time.perf_counter() < until:
            await work()
            made += 1

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(width)))
    return (time.perf_counter() - started) / made


class Sides:
    """Ways that are measured side by side."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.ways: dict[str, Any] = {}
        self.times: dict[str, list[float]] = {}

    def add(self, name: str, way: Any) -> None:
        """``way()`` gives seconds per call."""
        self.ways[name] = way

    async def measure(self, rounds: int) -> None:
        for way in self.ways.values():
            await way()
        names = list(self.ways)
        self.times = {name: [] for name in names}
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                self.times[name].append(await self.ways[name]())

    def ratios(self, name: str, to: str | None = None) -> list[float]:
        """Of the time to that of the first way (or ``to``), round by round, lowest first."""
        first = self.times[to or next(iter(self.times))]
        return sorted(mine / theirs for mine, theirs in zip(self.times[name], first, strict=True))

    def print(self, *, rates: bool = False) -> None:
        print(f"\n{self.title}")
        for name, times in self.times.items():
            median, ratios = statistics.median(times), self.ratios(name)
            if rates:
                ratios = sorted(1 / ratio for ratio in ratios)
                shown = f"{1 / median:11,.0f} /s"
            else:
                shown = f"{median * 1e6:11,.0f} us"
            print(
                f"  {name:34}{shown}  {statistics.median(ratios):6.2f} x {'rate' if rates else 'time'}"
                f"  ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


def load() -> str:
    """How busy the machine is: processes that want to run, over the last 1, 5 and 15 minutes."""
    return " ".join(f"{number:.1f}" for number in os.getloadavg()) if hasattr(os, "getloadavg") else "?"
