"""The dashboard asks for what workers and servers really have, and Prometheus for where they have it."""

from __future__ import annotations

import json
import re
from typing import get_args

import pytest
from compose_support import COMPOSE, serving
from telemetry_scenes import a_day

from natsreceipts.telemetry import DecisionKind, SettledAs

DASHBOARD = json.loads((COMPOSE / "grafana" / "dashboards" / "natsreceipts.json").read_text(encoding="utf-8"))
LANGUAGE = {"sum", "max", "rate", "increase", "histogram_quantile", "vector", "by", "or", "label_values"}


def queries():
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(found) >= len(DASHBOARD["panels"]) - 2  # all but the two rows
    return found + [each["query"]["query"] for each in DASHBOARD["templating"]["list"]]


def asked():
    """Every name of a metric that is asked for, with each label, and the values that it is compared to."""
    found = {}
    for query in queries():
        bare = re.sub(r"\[[^\]]*\]", "", query)  # ranges
        grouped = re.findall(r"by \(([^)]*)\)", bare)
        labels = {label.strip(): [] for group in grouped for label in group.split(",")}
        matchers = re.findall(r'([a-z_]+)=~?"([^"]*)"', bare)
        for label, values in matchers:
            labels[label] = [] if "$" in values else values.split("|")
        if wanted := re.match(r"label_values\((\w+), (\w+)\)$", bare):
            bare, labels = wanted[1], {wanted[2]: []}
        bare = re.sub(r"by \([^)]*\)|\{[^}]*\}", "", bare)
        for name in set(re.findall(r"[a-z_]\w*", bare)) - LANGUAGE:
            for label, values in labels.items():
                found.setdefault(name, {}).setdefault(label, set()).update(values)
            found.setdefault(name, {})
    return found


@pytest.fixture
async def exported(own_server, own_proxy, namespace):
    """What Prometheus scrapes off a worker that has seen everything: by metric, its labels and their values."""
    pytest.importorskip("opentelemetry.sdk")
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus")
    prometheus_client = pytest.importorskip("prometheus_client")
    import nats
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from natsreceipts.otel import OpenTelemetryHook

    memory, scraped = InMemoryMetricReader(), exporter.PrometheusMetricReader()
    meters = MeterProvider(metric_readers=[memory, scraped])
    client = await nats.connect(own_server.url)
    try:
        await a_day(own_server, own_proxy, namespace, client, [OpenTelemetryHook(meter_provider=meters)])
        data = memory.get_metrics_data()
        in_memory = {
            metric.name
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        found = {}
        for family in prometheus_client.REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("natsreceipts_"):
                    labels = found.setdefault(sample.name, {})
                    for label, value in sample.labels.items():
                        labels.setdefault(label, set()).add(value)
        yield found, in_memory
    finally:
        await client.close()
        meters.shutdown()


async def test_it_asks_workers_for_what_the_exporter_has(exported):
    found, in_memory = exported
    ours = {name: labels for name, labels in asked().items() if name.startswith("natsreceipts_")}
    for name, labels in ours.items():
        assert name in found, name
        for label, values in labels.items():
            assert label in found[name], (name, label)
            assert values <= found[name][label], (name, label)
    # ... and for all of it
    shown = {re.sub(r"_(total|seconds_(bucket|sum|count))$", "", name) for name in ours}
    assert shown == {name.replace(".", "_") for name in in_memory}
    kinds = found["natsreceipts_decisions_total"]["natsreceipts_decision"]
    assert kinds == set(get_args(DecisionKind))
    assert found["natsreceipts_settle_duration_seconds_count"]["natsreceipts_status"] == set(get_args(SettledAs))


async def test_it_asks_servers_for_what_they_have(tmp_path):
    """prometheus-nats-exporter names metrics after what the monitoring port says: /varz by itself, /jsz by these."""
    of_jsz = {
        "jetstream_server_total_message_bytes": ("bytes",),
        "jetstream_server_max_storage": ("config", "max_storage"),
        "jetstream_stream_total_messages": ("account_details", 0, "stream_detail", 0, "state", "messages"),
    }
    theirs = {name: labels for name, labels in asked().items() if not name.startswith("natsreceipts_")}
    async with serving(COMPOSE / "nats-single.conf", tmp_path, {}) as [node]:
        await node.healthy()
        from natsreceipts import connect

        async with connect(node.url, provision=True, connect_timeout=20.0):
            varz = await node.look("/varz")
            jsz = await node.look("/jsz?streams=true&accounts=true&config=true")
    for name, labels in theirs.items():
        if name.startswith("gnatsd_varz_"):
            value = flat(varz)[name.removeprefix("gnatsd_varz_")]
        else:
            value = jsz
            for step in of_jsz[name]:
                value = value[step]
        assert type(value) in (int, float), name
        assert labels.keys() <= {"server_id", "account", "stream_name"}


def flat(value, prefix=""):
    """Nested numbers by their path, as the exporter names them."""
    found = {}
    for name, each in value.items():
        if isinstance(each, dict):
            found |= flat(each, f"{prefix}{name}_")
        else:
            found[f"{prefix}{name}"] = each
    return found


def test_the_files_name_each_other():
    monitoring = (COMPOSE / "monitoring.yaml").read_text(encoding="utf-8")
    for path in re.findall(r"- \./([\w./]+):", monitoring):
        assert (COMPOSE / path).exists(), path
    provider = (COMPOSE / "grafana" / "provisioning" / "dashboards" / "natsreceipts.yaml").read_text(encoding="utf-8")
    source = (COMPOSE / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text(encoding="utf-8")
    [folder] = re.findall(r"path: (\S+)$", provider, re.MULTILINE)
    assert f"./grafana/dashboards:{folder}:ro" in monitoring
    [uid] = re.findall(r"uid: (\S+)$", source, re.MULTILINE)
    assert {part["datasource"]["uid"] for part in DASHBOARD["panels"] if "datasource" in part} == {uid}
    [name] = re.findall(r"names: \[(\S+)\]", (COMPOSE / "prometheus.yml").read_text(encoding="utf-8"))
    assert f"\n  {name}:" in monitoring
    cluster = (COMPOSE / "monitoring-cluster.yaml").read_text(encoding="utf-8")
    assert cluster.count(f"aliases: [{name}]") == 2
    assert sorted(re.findall(r"http://nats-(\d):8222", cluster)) == ["1", "2", "3"]
