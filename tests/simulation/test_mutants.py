"""The simulation can fail: each known mistake, put into the product, is found within a bounded number of schedules."""

from __future__ import annotations

import pytest
from sim_driver import walk
from sim_mutants import MUTANTS

MOST = 6000


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, mutate = MUTANTS[name]
    mutate(monkeypatch)
    found = walk(range(MOST), kind=kind, shrink=False)
    print(f"{name}: after {found.schedules} schedules, {found.seconds:.1f} s: {found.problem}")
    assert found.problem is not None
