"""A user who lacks one permission is told which, with what to allow; trying them stores nothing."""

from __future__ import annotations

import asyncio
import contextlib

import nats
import pytest
from support import client_of

from natsreceipts import connect, embedded, examine

STREAMS = {
    "bucket receipts": ("KV_receipts", "$KV.receipts."),
    "bucket notices": ("KV_notices", "$KV.notices."),
    "stream SESSIONS": ("SESSIONS", "sessions."),
}


def _lacks():
    """What is denied, of which store that is told, and the subject that is to be allowed."""
    for store, (stream, subjects) in STREAMS.items():
        yield "publish", f"$JS.API.STREAM.INFO.{stream}", store, f"$JS.API.STREAM.INFO.{stream}"
        yield "publish", f"$JS.API.STREAM.MSG.GET.{stream}", store, f"$JS.API.STREAM.MSG.GET.{stream}"
        yield "publish", f"$JS.API.DIRECT.GET.{stream}.>", store, f"$JS.API.DIRECT.GET.{stream}.>"
        yield "publish", f"$JS.API.DIRECT.GET.{stream}", store, f"$JS.API.DIRECT.GET.{stream}"
        yield "publish", f"{subjects}>", store, f"{subjects}>"
        yield "subscribe", f"{subjects}>", store, f"{subjects}>"
    store, stream = "object store receipt-payloads", "OBJ_receipt-payloads"
    yield "publish", f"$JS.API.STREAM.INFO.{stream}", store, f"$JS.API.STREAM.INFO.{stream}"
    yield "publish", f"$JS.API.DIRECT.GET.{stream}.>", store, f"$JS.API.DIRECT.GET.{stream}.>"
    yield "publish", f"$JS.API.DIRECT.GET.{stream}", store, f"$JS.API.DIRECT.GET.{stream}"
    yield "publish", "$O.receipt-payloads.C.>", store, "$O.receipt-payloads.>"
    yield "publish", "$O.receipt-payloads.M.>", store, "$O.receipt-payloads.>"


LACKS = list(_lacks())
WORKER = """
  publish: { allow: [
    "$KV.receipts.>", "$KV.notices.>", "sessions.>", "$O.receipt-payloads.>",
    "$JS.API.STREAM.INFO.KV_receipts", "$JS.API.STREAM.INFO.KV_notices", "$JS.API.STREAM.INFO.SESSIONS",
    "$JS.API.STREAM.INFO.OBJ_receipt-payloads",
    "$JS.API.STREAM.MSG.GET.KV_receipts", "$JS.API.STREAM.MSG.GET.KV_notices", "$JS.API.STREAM.MSG.GET.SESSIONS",
    "$JS.API.DIRECT.GET.KV_receipts", "$JS.API.DIRECT.GET.KV_receipts.>",
    "$JS.API.DIRECT.GET.KV_notices", "$JS.API.DIRECT.GET.KV_notices.>",
    "$JS.API.DIRECT.GET.SESSIONS", "$JS.API.DIRECT.GET.SESSIONS.>",
    "$JS.API.DIRECT.GET.OBJ_receipt-payloads", "$JS.API.DIRECT.GET.OBJ_receipt-payloads.>"
  ] }
  subscribe: { allow: ["_INBOX.>", "$KV.receipts.>", "$KV.notices.>", "sessions.>"] }
"""
"""What docs/tenants.md gives a worker, without its jobs."""


def user(name, permissions):
    return f"{{ user: {name}, password: pw, permissions: {{ {permissions} }} }}"


USERS = [
    "{ user: all, password: pw }",
    user("worker", WORKER),
    user("acme", 'publish: { deny: ["$KV.receipts.other.>"], allow: ["$KV.receipts.acme.>", "$JS.API.>"] }'),
    user("no_inbox", 'subscribe: { deny: "_INBOX.>" }'),
    user("nothing", 'publish: { deny: ">" }'),
    *(user(f"u{n}", f'{kind}: {{ deny: ["{subject}"] }}') for n, (kind, subject, _, _) in enumerate(LACKS)),
]


@pytest.fixture(scope="module")
def guarded():
    server = embedded(config=f"accounts {{ A {{ jetstream: enabled, users: [ {', '.join(USERS)} ] }} }}")
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(server.__aenter__())
        try:
            runner.run(provisioned(server.url))
            yield server
        finally:
            runner.run(server.__aexit__(None, None, None))


async def provisioned(url):
    async with connect(url, provision=True, user="all", password="pw"):
        pass


async def diagnosed(server, name, **settings):
    settings = {"user": name, "password": "pw", "connect_timeout": 20.0, "records": False, **settings}
    return [finding async for finding in examine(server.url, **settings)]


def troubles(found):
    ignored = ("replicas", "sync_always")
    return [f for f in found if f.level != "ok" and f.check not in ignored]


async def sequences(server):
    client = await nats.connect(server.url, user="all", password="pw")
    try:
        infos = await client.jetstream().streams_info()
        return sorted((i.config.name, i.state.messages, i.state.last_seq, i.state.bytes) for i in infos)
    finally:
        await client.close()


@pytest.mark.parametrize("name", ["all", "worker"])
async def test_who_may_do_all_that_a_worker_does(guarded, name):
    before = await sequences(guarded)
    found = await diagnosed(guarded, name, records=True)
    assert troubles(found) == []
    assert sum(f.check.endswith("permissions") for f in found) == 4
    assert await sequences(guarded) == before
    assert all(last == 0 for _, _, last, _ in before)


@pytest.mark.parametrize("n", range(len(LACKS)), ids=[f"{kind} {subject}" for kind, subject, _, _ in LACKS])
async def test_who_lacks_one(guarded, n):
    kind, _, store, allow = LACKS[n]
    found = [f for f in troubles(await diagnosed(guarded, f"u{n}")) if f.check.endswith("permissions")]
    assert found, "it was not told"
    for finding in found:
        assert finding.check == f"{store}, permissions"
        assert finding.level == ("error" if kind == "publish" else "warning")
        assert f"may not {kind} to " in finding.text
        assert finding.fix.startswith(f'{kind}: {{ allow: "{allow}" }}')
    assert len(found) == 1


async def test_who_gets_no_answer(guarded):
    (finding,) = await diagnosed(guarded, "no_inbox")
    assert (finding.level, finding.check) == ("error", "inbox")
    assert "_INBOX" in finding.fix


async def test_who_may_do_nothing(guarded):
    found = await diagnosed(guarded, "nothing", records=True)
    levels = {f.check: f.level for f in found}
    assert levels["JetStream"] == levels["bucket receipts, settings"] == levels["receipts"] == "unverified"
    denied = [f for f in found if f.check == "bucket receipts, permissions"]
    assert len(denied) == 5
    assert {f.level for f in denied} == {"error"}


async def test_who_may_write_one_tenant_alone(guarded):
    async def writes(**settings):
        found = await diagnosed(guarded, "acme", **settings)
        return [f for f in troubles(found) if f.check == "bucket receipts, permissions"]

    assert await writes(tenant="acme") == []
    (denied,) = await writes()
    assert "--tenant" in denied.fix
    assert len(await writes(tenant="other")) == 1


async def test_a_client_of_the_hosts_learns_of_it_too(guarded):
    n = LACKS.index(("publish", "$JS.API.STREAM.MSG.GET.KV_receipts", "bucket receipts", LACKS[1][3]))
    async with client_of(guarded.url, user=f"u{n}", password="pw") as client:
        found = [f async for f in examine(client, connect_timeout=5.0, records=False)]
    assert [f.level for f in found if f.check == "bucket receipts, permissions"] == ["error"]


async def test_it_is_told_while_it_is_found(guarded):
    async with contextlib.aclosing(examine(guarded.url, user="all", password="pw")) as found:
        async for finding in found:
            assert finding.check == "inbox"
            break
