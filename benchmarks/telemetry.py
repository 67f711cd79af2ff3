"""What telemetry adds to a fresh guarded call, in alternating rounds of one run.

    pip install 'natsreceipts[server,otel]' opentelemetry-sdk
    python benchmarks/telemetry.py [--rounds 15] [--calls 300]

Prints medians, and of the ratios to a toolkit without hooks in the same round: time per call one at a time, and
throughput with 64 in flight. With OpenTelemetry every call has its counters and histograms, and where a trace is
recorded around it two spans, which are batched and thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import natsreceipts
from natsreceipts.otel import OpenTelemetryHook
from natsreceipts.telemetry import log_events

ARGS = {"to": ["ada@example.com", "grace@example.com"], "subject": "Your order has shipped", "urgent": False}
RESULT = {"id": "m-0123456789", "status": "sent", "at": 1764496800.5, "note": "x" * 80}


class Nowhere(SpanExporter):
    def export(self, spans):
        return SpanExportResult.SUCCESS


def opentelemetry(tracers: TracerProvider) -> OpenTelemetryHook:
    meters = MeterProvider(metric_readers=[InMemoryMetricReader()])
    return OpenTelemetryHook(tracer_provider=tracers, meter_provider=meters)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300)
    chosen = parser.parse_args()
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(Nowhere()))
    traced = "OpenTelemetry, in a trace"
    ways = {
        "no hooks": [],
        "a hook that does nothing": [lambda event: None],
        "log_events, not shown": [log_events],
        "OpenTelemetry": [opentelemetry(tracers)],
        traced: [opentelemetry(tracers)],
    }
    counter = iter(range(10**9))

    async def send() -> dict[str, object]:
        return RESULT

    async def execute(run: natsreceipts.Run) -> None:
        await run.execute("send_email", {**ARGS, "n": next(counter)}, send)

    async def one_at_a_time(run: natsreceipts.Run, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            await execute(run)
        return (time.perf_counter() - started) / calls

    async def at_once(run: natsreceipts.Run, calls: int, width: int = 64) -> float:
        left = iter(range(calls))

        async def worker() -> None:
            for _ in left:
                await execute(run)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(width)))
        return (time.perf_counter() - started) / calls

    times: dict[tuple[str, str], list[float]] = {}
    async with natsreceipts.embedded() as server, contextlib.AsyncExitStack() as open_toolkits:
        runs: dict[str, natsreceipts.Run] = {}
        for name, hooks in ways.items():
            connecting = natsreceipts.connect(server.url, provision=True, hooks=hooks)
            runs[name] = (await open_toolkits.enter_async_context(connecting)).run("acme", "bench")
        for mode, measure, calls in (("1", one_at_a_time, chosen.calls), ("64", at_once, chosen.calls * 8)):
            for run in runs.values():
                await measure(run, calls // 4)
            for _ in range(chosen.rounds):
                for name, run in runs.items():
                    turn = tracers.get_tracer("agent").start_as_current_span("turn")
                    with turn if name == traced else contextlib.nullcontext():
                        times.setdefault((mode, name), []).append(await measure(run, calls))
    tracers.shutdown()
    print(f"{'':28} {'one at a time':>24} {'64 in flight':>28}")
    for name in ways:
        one, many = (statistics.median(times[mode, name]) for mode in ("1", "64"))
        more, more_at_64 = (
            statistics.median(
                each / base for each, base in zip(times[mode, name], times[mode, "no hooks"], strict=True)
            )
            for mode in ("1", "64")
        )
        print(f"{name:28} {one * 1e6:10.0f} us {more:6.2f} x time {1 / many:13,.0f} /s {1 / more_at_64:6.2f} x rate")


if __name__ == "__main__":
    asyncio.run(main())
