"""What OpenTelemetry gets to see, on a real server, by the SDK's own in-memory exporter and reader."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import get_args

import pytest
from support import Effect, toolkit_of, until
from telemetry_scenes import ARGS, EXPECTED, RESULT, SECRETS, a_day

from natsreceipts import InvalidSetting, ReceiptKey
from natsreceipts.telemetry import DecisionKind, LostLease

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from natsreceipts.otel import OpenTelemetryHook

DOCS = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")


def _value(point):
    return point.value if hasattr(point, "value") else point.count


class Seen:
    """A hook, and what the SDK made of it."""

    def __init__(self, *, sampler=None, **settings):
        self._spans = InMemorySpanExporter()
        self.tracers = TracerProvider(sampler=sampler)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self.reader])
        self.hook = OpenTelemetryHook(tracer_provider=self.tracers, meter_provider=self.meters, **settings)
        self.agent = self.tracers.get_tracer("agent")

    def spans(self, name=None):
        return [span for span in self._spans.get_finished_spans() if name in (None, span.name)]

    def metrics(self):
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        [resource] = data.resource_metrics
        [scope] = [each for each in resource.scope_metrics if each.scope.name == "natsreceipts"]
        return {metric.name: metric for metric in scope.metrics}

    def points(self, name):
        """By labels, without what did not happen: a counter's value, or how many values a histogram has."""
        metric = self.metrics().get(name)
        points = metric.data.data_points if metric is not None else []
        found = {tuple(sorted(point.attributes.items())): _value(point) for point in points}
        return {labels: value for labels, value in found.items() if value}

    @contextlib.contextmanager
    def tool_span(self, tool):
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
        with self.agent.start_as_current_span(f"execute_tool {tool}", attributes=attributes):
            yield


@pytest.fixture
def seen():
    made = []

    def make(**settings):
        made.append(Seen(**settings))
        return made[-1]

    yield make
    for each in made:
        each.tracers.shutdown()
        each.meters.shutdown()


def labels(tool, **more):
    named = {f"natsreceipts.{name}": value for name, value in more.items()}
    return tuple(sorted({"gen_ai.tool.name": tool, **named}.items()))


def listed(section):
    """The rows of the first table of a section of docs/telemetry.md, as names in backticks by cell."""
    text = DOCS.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*) \|$", text, re.MULTILINE)
    return [[re.findall(r"`([^`]+)`", cell) for cell in row.split(" | ")] for row in rows]


async def test_a_day(server, proxy, namespace, nc, bucket, seen):
    seen = seen()
    await a_day(server, proxy, namespace, nc, [seen.hook], around=seen.tool_span)
    tool_spans = {span.attributes["gen_ai.tool.name"]: span for span in seen.spans() if span.name.startswith("execute")}
    assert tool_spans.keys() == {*EXPECTED, "looked"}
    check_instruments(seen)
    check_counters(seen)
    check_histograms(seen)
    check_spans(seen, tool_spans)
    check_tool_spans(tool_spans)
    # Nothing of a user's is told, and metrics name neither tenant nor run.
    for span in seen.spans():
        if span.name.startswith("natsreceipts."):
            assert not any(secret in span.to_json() for secret in SECRETS)
            assert not span.events
    told = repr(seen.metrics())
    assert "fresh" in told
    assert not any(secret in told for secret in (*SECRETS, "acme", "order-42", "chat"))


def check_instruments(seen):
    """Each that is documented is there, with its unit and its labels, and no other."""
    metrics = seen.metrics()
    documented = {name: (unit, set(keys)) for [name], [unit], keys, *_ in listed("Metrics")}
    assert metrics.keys() == documented.keys()
    for name, metric in metrics.items():
        unit, keys = documented[name]
        assert metric.unit == unit
        assert metric.description
        found = set().union(*(point.attributes for point in metric.data.data_points))
        assert found == keys, name


def check_counters(seen):
    decisions = seen.points("natsreceipts.decisions")
    assert decisions == {
        labels("fresh", decision="execute"): 1,
        labels("fresh", decision="replay"): 3,
        labels("ambiguous", decision="execute"): 1,
        labels("ambiguous", decision="ambiguous"): 1,
        labels("retried", decision="execute"): 2,
        labels("doubted", decision="execute"): 1,
        labels("overtaken", decision="replay"): 1,
        labels("silent", decision="execute"): 1,
        labels("lost", decision="execute"): 1,
        labels("held", decision="wait"): 1,
        labels("withdrawn", decision="withdrawn"): 1,
        labels("corrupt", decision="refused"): 1,
        labels("kept", decision="execute"): 1,
        labels("kept", decision="replay"): 1,
        labels("once", decision="execute"): 1,
    }
    conflicts = seen.points("natsreceipts.conflicts")
    assert conflicts == {
        **{
            labels(tool, write="claim"): 1
            for tool in ("fresh", "ambiguous", "retried", "overtaken", "held", "withdrawn", "corrupt", "kept")
        },
        labels("lost", write="renew"): 1,
        labels("lost", write="settle"): 1,
    }
    doubts = seen.points("natsreceipts.unknown_writes.settled")
    doubts.pop(labels("silent", write="settle", outcome="landed"), None)  # on a slow machine
    assert doubts == {
        labels("doubted", write="claim", outcome="landed"): 1,
        labels("doubted", write="settle", outcome="landed"): 1,
        labels("overtaken", write="claim", outcome="not_landed"): 1,
        labels("kept", write="settle", outcome="landed"): 1,
    }
    failed = seen.points("natsreceipts.renewals.failed")
    assert failed.keys() == {labels("silent")}
    assert failed[labels("silent")] >= 1
    assert seen.points("natsreceipts.leases.lost") == {labels("lost"): 1}


def check_histograms(seen):
    claims = seen.points("natsreceipts.claim.duration")
    assert claims[labels("fresh", decision="replay")] == 2  # the third was prefetched
    assert sum(claims.values()) == sum(seen.points("natsreceipts.decisions").values()) - 1
    settles = seen.points("natsreceipts.settle.duration")
    assert settles == {
        labels("fresh", status="completed"): 1,
        labels("ambiguous", status="ambiguous"): 1,
        labels("retried", status="failed"): 1,
        labels("retried", status="completed"): 1,
        labels("doubted", status="completed"): 1,
        labels("silent", status="completed"): 1,
        labels("lost", status="lost"): 1,
        labels("kept", status="not_recorded"): 1,
        labels("kept", status="completed"): 1,
        labels("once", status="completed"): 1,
    }
    for name in ("natsreceipts.claim.duration", "natsreceipts.settle.duration"):
        for point in seen.metrics()[name].data.data_points:
            assert point.explicit_bounds[0] < 0.001 < 10 < point.explicit_bounds[-1]
            assert point.sum > 0
    [doubted] = [
        point
        for point in seen.metrics()["natsreceipts.claim.duration"].data.data_points
        if point.attributes["gen_ai.tool.name"] == "doubted"
    ]
    assert 0.2 < doubted.sum < 30  # seconds: its first answer was waited for in vain


def check_spans(seen, tool_spans):
    """Each that is documented is there, with its attributes, as a child of the agent's."""
    for name, keys, *_ in listed("Spans"):
        found = seen.spans(*name)
        assert found
        assert set().union(*(span.attributes for span in found)) == set(keys)
        for span in found:
            parent = tool_spans[span.attributes.get("gen_ai.tool.name", "withdrawn")]
            assert span.parent.span_id == parent.context.span_id
            assert parent.start_time <= span.start_time + 50_000_000  # nanoseconds: two clocks tell of it
            assert span.end_time <= parent.end_time
    [doubted] = [span for span in seen.spans("natsreceipts.claim") if span.attributes["gen_ai.tool.name"] == "doubted"]
    assert 0.2e9 < doubted.end_time - doubted.start_time < 30e9  # nanoseconds
    failed = {
        (span.name, span.attributes.get("gen_ai.tool.name"), span.attributes.get("error.type"))
        for span in seen.spans()
        if span.status.status_code is trace.StatusCode.ERROR
    }
    [unrecorded] = [span for span in seen.spans("natsreceipts.settle") if "error.type" in span.attributes]
    assert failed == {
        ("natsreceipts.claim", "corrupt", "CorruptRecord"),
        ("natsreceipts.settle", "lost", None),
        ("natsreceipts.settle", "kept", unrecorded.attributes["error.type"]),
    }


def check_tool_spans(tool_spans):
    """The agent's span of the tool says what became of the call."""
    key = ReceiptKey("acme", "order-42", "retried", "0" * 64).kv_key[:-64]
    said = tool_spans["retried"].attributes
    assert said["natsreceipts.key"].startswith(key)
    assert {name: value for name, value in said.items() if name != "natsreceipts.key"} == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "retried",
        "natsreceipts.attempt": 2,
        "natsreceipts.decision": "execute",
        "natsreceipts.replayed": False,
        "natsreceipts.status": "completed",
    }
    assert tool_spans["fresh"].attributes["natsreceipts.replayed"] is True
    assert not any(name.startswith("natsreceipts.") for name in tool_spans["looked"].attributes)
    documented = {name for [name], *_ in listed("The agent's span")}
    assert documented == {
        name for span in tool_spans.values() for name in span.attributes if name.startswith("natsreceipts.")
    }


def spans_of(seen, name, tool):
    return [span for span in seen.spans(name) if span.attributes["gen_ai.tool.name"] == tool]


async def test_outside_a_trace_there_are_no_spans(server, namespace, bucket, seen):
    plain, unsampled = seen(), seen(sampler=ALWAYS_OFF)
    async with toolkit_of(server.url, namespace, hooks=[plain.hook, unsampled.hook]) as toolkit:
        with unsampled.tool_span("send"):
            assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect(RESULT)) == RESULT
    for each in (plain, unsampled):
        assert each.spans() == []
        assert each.points("natsreceipts.decisions") == {labels("send", decision="execute"): 1}
        assert each.points("natsreceipts.claim.duration") == {labels("send", decision="execute"): 1}


async def test_attributes_are_for_the_span_of_the_tool_and_of_one_call(server, namespace, bucket, seen):
    seen = seen()
    async with toolkit_of(server.url, namespace, hooks=[seen.hook]) as toolkit:
        run = toolkit.run("acme", "run-1")
        with seen.agent.start_as_current_span("chat"):
            await run.execute("send", {"n": 1}, Effect(RESULT))
        with seen.tool_span("send"):

            async def send():
                await run.execute("inner", ARGS, Effect(RESULT))

            await run.execute("send", {"n": 2}, send)
    [chat], [tool] = seen.spans("chat"), seen.spans("execute_tool send")
    assert not chat.attributes
    assert tool.attributes["natsreceipts.key"] == run.key("send", {"n": 2}).kv_key
    assert {span.parent.span_id for span in spans_of(seen, "natsreceipts.claim", "inner")} == {tool.context.span_id}
    assert len(spans_of(seen, "natsreceipts.claim", "send")) == len(spans_of(seen, "natsreceipts.settle", "send")) == 2


async def test_spans_come_soon_while_the_toolkit_is_open(server, namespace, bucket, seen):
    seen = seen()
    async with toolkit_of(server.url, namespace, hooks=[seen.hook]) as toolkit:
        with seen.tool_span("send"):
            await toolkit.run("acme", "run-1").execute("send", ARGS, Effect(RESULT))

        async def both():
            return seen.spans("natsreceipts.claim") and seen.spans("natsreceipts.settle")

        await until(both)


async def test_one_hook_for_two_toolkits(server, namespace, bucket, seen):
    seen = seen()
    async with (
        toolkit_of(server.url, namespace, hooks=[seen.hook]) as one,
        toolkit_of(server.url, namespace, hooks=[seen.hook]) as other,
    ):
        for toolkit in (one, other):
            assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect(RESULT)) == RESULT
    assert seen.points("natsreceipts.decisions") == {
        labels("send", decision="execute"): 1,
        labels("send", decision="replay"): 1,
    }


@pytest.mark.parametrize("tools", [None, ["send", "charge"]], ids=["as they come", "named"])
def test_tool_names_are_bounded(seen, tools):
    seen = seen(tools=tools)
    names = ["send", *(f"made-up-{n}" for n in range(500)), "charge"]
    for name in names:
        seen.hook(LostLease(ReceiptKey("acme", "run-1", name, "0" * 64), 1))
    points = seen.points("natsreceipts.leases.lost")
    if tools is None:
        assert len(points) == 101
        assert points[labels("_OTHER")] == 402
    else:
        assert points == {labels("send"): 1, labels("charge"): 1, labels("_OTHER"): 500}


def test_counters_of_a_tool_begin_at_nothing(seen):
    """Who sees a counter begin at 1 sees no increase."""
    data = seen(tools=["send"]).metrics()["natsreceipts.decisions"].data
    assert {point.attributes["natsreceipts.decision"]: point.value for point in data.data_points} == dict.fromkeys(
        get_args(DecisionKind), 0
    )


def test_tools_are_a_list(seen):
    with pytest.raises(InvalidSetting, match="tools"):
        seen(tools="send")
