"""The simulation can fail: each known mistake, put into the product, is found within a bounded number of schedules."""

from __future__ import annotations

import pytest
from sim_driver import walk
from sim_mutants import MUTANTS
from sim_plan import plan_of
from sim_world import carry_out

MOST = 6000


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_mistake_is_found(name: str) -> None:
    kind, mutate = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        found = walk(range(MOST), kind=kind, shrink=False)
    print(f"{name}: after {found.schedules} schedules, {found.seconds:.1f} s: {found.problem}")
    assert found.problem is not None
    assert found.seed is not None
    report = carry_out(plan_of(found.seed, kind=kind))
    assert report.problem is None, f"the product itself fails there: {report.problem}"


def test_a_schedule_that_fails_is_printed_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, mutate = MUTANTS["a dead opaque attempt that is executed again"]
    mutate(monkeypatch)
    found = walk(range(MOST), kind=kind)
    assert found.problem is not None
    whole, _, small = found.problem.partition("shrunk:")
    assert len(small.splitlines()) <= len(whole.splitlines())
    assert "   1. " in small
    assert f"seed {found.seed}:" in small
    assert "an opaque call was claimed over" in small
