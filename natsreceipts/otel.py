"""OpenTelemetry for a toolkit (extra ``otel``): spans, metrics, and attributes on the agent's ``execute_tool`` span.

    async with natsreceipts.connect(url, hooks=[OpenTelemetryHook()]) as toolkit:

The names are in docs/telemetry.md. Metrics are labelled by tool, and never by tenant, run or anything of a user's.

A call takes a few hundred microseconds, a measurement in the SDK five and a span fifteen, and several times as long
where nothing of it is in the processor's cache. So counters are kept here, and read when metrics are collected, and
durations and spans are handed over many at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, TypeAlias, cast, get_args

try:
    from opentelemetry import context, metrics, trace
except ImportError as missing:
    raise ImportError("OpenTelemetryHook needs the extra otel: pip install 'natsreceipts[otel]'") from missing

from natsreceipts.errors import InvalidSetting
from natsreceipts.telemetry import (
    CallDecided,
    CallSettled,
    DecisionKind,
    DoubtSettled,
    LostLease,
    RenewalFailed,
    SessionWoken,
    ToolkitClosed,
    WriteConflict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from natsreceipts.telemetry import Event

__all__ = ["OpenTelemetryHook"]

_TOOL: Final = "gen_ai.tool.name"
_ERROR: Final = "error.type"
_DECISION: Final = "natsreceipts.decision"
_ATTEMPT: Final = "natsreceipts.attempt"
_REPLAYED: Final = "natsreceipts.replayed"
_KEY: Final = "natsreceipts.key"
_STATUS: Final = "natsreceipts.status"
_WRITE: Final = "natsreceipts.write"
_OUTCOME: Final = "natsreceipts.outcome"

_MOST_TOOLS = 100
_OTHER = "_OTHER"

_AT_ONCE = 64
"""How many durations and spans are handed over at once."""

_SOON = 0.5
"""Seconds that they wait for that at most."""

_Counts: TypeAlias = dict[tuple[tuple[str, str], ...], int]
"""How often something happened, by labels."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histograms' buckets: from a server beside the worker to a failover that was waited out."""


class OpenTelemetryHook:
    """A hook that tells OpenTelemetry. Make one, and hand it to every `connect` of the process.

    ``tracer_provider`` and ``meter_provider`` are the global ones unless given. ``tools`` names the tools that get a
    label of their own in the metrics; the others are counted together, as ``_OTHER``. Without it the first 100 names
    that come do: names that a model or a server of tools makes up cannot fill a metrics store. Spans have every name,
    and are made where the current span is recorded: outside a trace there are none.
    Raises InvalidSetting.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        tools: Iterable[str] | None = None,
    ) -> None:
        if isinstance(tools, str):
            raise InvalidSetting(f"tools={tools!r}: use a list of names")
        release = version("natsreceipts")
        self._tracer = trace.get_tracer("natsreceipts", release, tracer_provider)
        self._labels: dict[str, str] = {}
        self._open = tools is None
        self._lock = threading.Lock()
        self._later: deque[Callable[[], object]] = deque()
        self._due = 0.0
        meter = metrics.get_meter("natsreceipts", release, meter_provider)
        self._decisions = self._counter(
            meter, "natsreceipts.decisions", "{call}", "Calls, by what was decided about them"
        )
        self._conflicts = self._counter(
            meter, "natsreceipts.conflicts", "{write}", "Writes refused because the receipt had moved on"
        )
        self._renewals_failed = self._counter(
            meter, "natsreceipts.renewals.failed", "{renewal}", "Leases that could not be renewed in a try"
        )
        self._leases_lost = self._counter(meter, "natsreceipts.leases.lost", "{lease}", "Attempts that lost their call")
        self._doubts = self._counter(
            meter,
            "natsreceipts.unknown_writes.settled",
            "{write}",
            "Writes whose answer was lost, by what was found out about them",
        )
        self._claims = meter.create_histogram(
            "natsreceipts.claim.duration",
            unit="s",
            description="From a call to the decision about it, with all waiting",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._settles = meter.create_histogram(
            "natsreceipts.settle.duration",
            unit="s",
            description="From the end of an attempt to the record of it",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        for name in tools or ():
            self._begin(name)

    def _begin(self, tool: str) -> str:
        """Give a tool a label, and begin its counters at 0: who sees them begin at 1 sees no increase."""
        label = (_TOOL, tool)
        with self._lock:
            for decision in get_args(DecisionKind):
                self._decisions[label, (_DECISION, decision)] = 0
            self._renewals_failed[label,] = 0
            self._leases_lost[label,] = 0
            self._labels[tool] = tool
        return tool

    def _counter(self, meter: metrics.Meter, name: str, unit: str, description: str) -> _Counts:
        counts: _Counts = {}

        def observed(_options: metrics.CallbackOptions) -> list[metrics.Observation]:
            self._hand_over()
            with self._lock:
                return [metrics.Observation(count, dict(labels)) for labels, count in counts.items()]

        meter.create_observable_counter(name, [observed], unit=unit, description=description)
        return counts

    def _hand_over(self) -> None:
        """Hand over what waits: each once, whichever threads are at it."""
        while True:
            try:
                tell = self._later.popleft()
            except IndexError:
                return
            tell()

    def _tell(self, what: Callable[[], object]) -> None:
        """Hand it over with what follows it, or soon; metrics when they are collected at the latest."""
        self._later.append(what)
        now = time.monotonic()
        if len(self._later) >= _AT_ONCE:
            self._hand_over()
        elif now >= self._due:
            self._due = now + _SOON
            asyncio.get_running_loop().call_later(_SOON, self._hand_over)

    def _count(self, counts: _Counts, *labels: tuple[str, str]) -> None:
        with self._lock:
            counts[labels] = counts.get(labels, 0) + 1

    def __call__(self, event: Event) -> None:
        """Take an event in."""
        if isinstance(event, ToolkitClosed):
            self._hand_over()
            return
        if isinstance(event, SessionWoken):
            self._woken(event)
            return
        tool = (_TOOL, self._label(event.key.tool))
        match event:
            case CallDecided(_, decision, _, seconds):
                labels = (tool, (_DECISION, decision))
                self._count(self._decisions, *labels)
                if seconds is not None:
                    self._tell(partial(self._claims.record, seconds, dict(labels)))
                self._trace("natsreceipts.claim", event, failed=decision == "refused")
            case CallSettled(_, _, status, seconds):
                self._tell(partial(self._settles.record, seconds, {_TOOL: tool[1], _STATUS: status}))
                self._trace("natsreceipts.settle", event, failed=status in ("lost", "not_recorded"))
            case WriteConflict(_, write):
                self._count(self._conflicts, tool, (_WRITE, write))
            case DoubtSettled(_, write, landed):
                self._count(self._doubts, tool, (_WRITE, write), (_OUTCOME, "landed" if landed else "not_landed"))
            case RenewalFailed():
                self._count(self._renewals_failed, tool)
            case LostLease():
                self._count(self._leases_lost, tool)

    def _label(self, tool: str) -> str:
        label = self._labels.get(tool)
        if label is None:
            if not self._open or len(self._labels) >= _MOST_TOOLS:
                return _OTHER
            return self._begin(tool)
        return label

    def _trace(self, name: str, event: CallDecided | CallSettled, *, failed: bool) -> None:
        current = trace.get_current_span()
        if current.is_recording():
            about = _about(event)
            _on_tool_span(current, about)
            if event.seconds is not None:
                self._span(name, {_TOOL: event.key.tool, **about}, event.seconds, event.error, failed=failed)

    def _woken(self, event: SessionWoken) -> None:
        if trace.get_current_span().is_recording():
            about: dict[str, str | int] = {
                "natsreceipts.tenant": event.tenant,
                "natsreceipts.session": event.session,
                "natsreceipts.recovered": event.recovered,
            }
            self._span("natsreceipts.wake", about, event.seconds, event.error, failed=event.error is not None)

    def _span(
        self, name: str, about: dict[str, str | int], seconds: float, error: BaseException | None, *, failed: bool
    ) -> None:
        """A span of what has just ended: it is begun when it is over, so that none is left open by a cancellation."""
        if error is not None:
            about[_ERROR] = type(error).__qualname__
        ended, around = time.time_ns(), context.get_current()

        def tell() -> None:
            begun = ended - round(seconds * 1e9)
            span = self._tracer.start_span(name, around, attributes=about, start_time=begun)
            if failed:
                span.set_status(trace.StatusCode.ERROR)
            span.end(ended)

        self._tell(tell)


def _about(event: CallDecided | CallSettled) -> dict[str, str | int]:
    about: dict[str, str | int] = {_KEY: event.key.kv_key}
    if event.attempt:
        about[_ATTEMPT] = event.attempt
    if isinstance(event, CallSettled):
        about[_STATUS] = event.status
    else:
        about[_DECISION], about[_REPLAYED] = event.decision, event.decision == "replay"
    return about


def _on_tool_span(span: trace.Span, about: dict[str, str | int]) -> None:
    """Put attributes on the current span, if that is the one of a tool's execution, and of no other guarded call.

    By the semantic conventions for generative AI it says ``gen_ai.operation.name`` = ``execute_tool``, and is named so.
    """
    said = cast("Mapping[str, object]", getattr(span, "attributes", None) or {})
    name = cast("str", getattr(span, "name", ""))
    executes_tool = said.get("gen_ai.operation.name") == "execute_tool" or name.startswith("execute_tool")
    if executes_tool and said.get(_KEY, about[_KEY]) == about[_KEY]:
        span.set_attributes(about)
