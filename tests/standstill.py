"""The last net under the tests: one that failed while the machine stood still is run once more.

A thread ticks in every process that runs tests. Where a tick comes late by more than half a second, and the process
did not use that time itself, nothing here could run meanwhile: leases end and time-outs strike that never would.
Only then a test that failed is run again, once, from fresh fixtures, and the summary names it, with what it failed
with. On a machine that does not stand still nothing is ever run twice.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from _pytest.terminal import TerminalReporter

TICK = 0.05
LIMIT = 0.5
"""Seconds between two ticks that are too many."""

TOO_LATE = 60.0
"""Seconds after which a test is not begun again: the time-out of a test is one for both runs."""


class Ticker:
    """Measures for how long at a time this process could not run."""

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None) -> None:
        self._lock = threading.Lock()
        self._now = now or _now
        self._last = self._now()
        self._longest = 0.0

    def start(self) -> Self:
        """Tick from now on."""
        threading.Thread(target=self._tick, name="standstill", daemon=True).start()
        return self

    def reset(self) -> None:
        """Measure from here on."""
        self.longest()
        with self._lock:
            self._longest = 0.0

    def longest(self) -> float:
        """The longest standstill since the last reset, in seconds."""
        with self._lock:
            now = self._now()
            passed, used = (after - before for after, before in zip(now, self._last, strict=True))
            self._longest = max(self._longest, passed - used)
            self._last = now
            return self._longest

    def _tick(self) -> None:
        while True:
            time.sleep(TICK)
            self.longest()


def _now() -> tuple[float, float]:
    """The time, and how much of it this process has used."""
    return time.monotonic(), time.process_time()


class Standstill:
    """The plugin."""

    def __init__(self) -> None:
        self._ticker: Ticker | None = None
        self._again: dict[str, tuple[float, str]] = {}

    @pytest.hookimpl
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test as pytest does, and once more where it failed over a standstill."""
        ticker = self._ticker = self._ticker or Ticker().start()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        ticker.reset()
        began = time.monotonic()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = [report for report in reports if report.failed]
        longest = ticker.longest()
        if failed and longest > LIMIT and time.monotonic() - began < TOO_LATE:
            _forget_failed_fixtures(item)
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            for report in reports:
                report.again = [longest, _in_short(failed[0])]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what was run again, also in another process."""
        again = getattr(report, "again", None)
        if again is not None:
            self._again[report.nodeid] = tuple(again)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Say so."""
        if not self._again:
            return
        terminalreporter.section("standstill")
        for nodeid, (longest, said) in self._again.items():
            terminalreporter.line(f"{nodeid}: stood still for {longest:.1f} s, and failed with: {said}")
        tests = "1 test was" if len(self._again) == 1 else f"{len(self._again)} tests were"
        terminalreporter.line(f"{tests} run again because the machine stood still", yellow=True)


def _in_short(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return f"{report.when}: {(text.strip().splitlines() or [''])[0][:200]}"


def _forget_failed_fixtures(item: pytest.Item) -> None:
    """A fixture of a wider scope that failed would raise the same error again. (One of the test's own is gone.)"""
    if not isinstance(item, pytest.Function):
        return
    item._initrequest()
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if definition.cached_result is not None and definition.cached_result[2] is not None:
                definition.finish(item._request)
