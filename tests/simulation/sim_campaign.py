"""Walks through very many schedules in all cores, and prints what came of it. No server is needed.

    python tests/simulation/sim_campaign.py            # 50,000 schedules of new seeds: 6 to 10 minutes on two cores
    python tests/simulation/sim_campaign.py 2000 --seed 7

It ends with 1 at the first schedule that breaks a promise, which is printed as it was and shrunk.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "sessions_pure"), str(_HERE.parent.parent)]

from sim_driver import Walk, walk, walk_plans  # noqa: E402
from sim_steps import every_step  # noqa: E402

STEPS = "every step"
KINDS = {"workers": 0.25, "mixed": 0.15, "doubtful": 0.1, "session": 0.25, "notices": 0.1, "replaced": 0.05, STEPS: 0.1}
"""What share of the schedules is about what."""

_CHUNK = 250


def chunk(kind: str, seed: int, count: int) -> Walk:
    """``count`` schedules of a kind from a seed on. For a process of the pool."""
    if kind != STEPS:
        return walk(range(seed, seed + count), kind=kind)
    plans = every_step(range(seed, seed + count))
    return walk_plans(plan for _, plan in zip(range(count), plans, strict=False))


def campaign(count: int, seed: int, *, processes: int) -> dict[str, Walk]:
    """What so many schedules came to, by kind. A failing one ends it."""
    found: dict[str, Walk] = defaultdict(Walk)
    with ProcessPoolExecutor(processes) as pool:
        jobs = {}
        for kind, share in KINDS.items():
            wanted = round(count * share)
            for start in range(0, wanted, _CHUNK):
                jobs[pool.submit(chunk, kind, seed + start, min(_CHUNK, wanted - start))] = kind
        for done in as_completed(jobs):
            walked = done.result()
            found[jobs[done]] += walked
            if walked.problem is not None:
                pool.shutdown(wait=True, cancel_futures=True)
                break
    return {kind: found[kind] for kind in KINDS if kind in found}


def table(found: dict[str, Walk], took: float) -> str:
    """What came of it, for people."""
    lines = [f"{'':<12}{'schedules':>10}{'requests':>12}{'faults':>10}{'effects':>10}{'violations':>12}"]
    total = Walk()
    for each in found.values():
        total += each
    for kind, each in [*found.items(), ("all", total)]:
        violations = int(each.problem is not None)
        lines.append(
            f"{kind:<12}{each.schedules:>10,}{each.requests:>12,}{each.faults:>10,}{each.entered:>10,}{violations:>12}"
        )
    lines.append(f"{took:.0f} s, {total.schedules / took * 60:,.0f} schedules a minute")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=50_000, help="schedules")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    print(f"--seed {given.seed}", flush=True)
    began = time.perf_counter()
    found = campaign(given.count, given.seed, processes=given.processes)
    print(table(found, time.perf_counter() - began))
    for each in found.values():
        if each.problem is not None:
            print(f"\nSIM_SEED={each.seed}\n{each.problem}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
