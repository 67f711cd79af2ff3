"""Two tenants with the shipped permissions: each works, and neither reaches what is the other's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil

import nats
import nats.js.errors
import pytest
from compose_support import COMPOSE, as_user, password_of, passwords, serving

from natsreceipts import NatsReceiptsError, PermissionDenied, Unreachable, connect, examine
from natsreceipts.embedded import embedded

EMPTY = "$KV.receipts.empty"
SECRET = "the mail to Bea"
LARGE = "a payload of Bea's, " * 20_000
STREAMS = ("KV_receipts", "KV_notices", "OBJ_receipt-payloads", "SESSIONS")


class Site:
    """A server with both tenants, provisioned by their admins."""

    def __init__(self, url, monitor, environment):
        self.url = url
        self.monitor = monitor
        self.environment = environment

    def toolkit(self, user, **settings):
        return as_user(self.url, self.environment, user, **settings)

    @contextlib.asynccontextmanager
    async def client(self, user, **settings):
        refusals = []

        async def note(error):
            refusals.append(str(error))

        given = {"user": user, "password": password_of(self.environment, user), "error_cb": note} | settings
        client = await nats.connect(self.url, allow_reconnect=False, **given)
        client.refusals = refusals
        try:
            yield client
        finally:
            await client.close()

    async def state(self, admin):
        """Everything that an account's streams say of themselves, but for what reading changes."""
        async with self.client(admin) as client:
            names = json.loads((await client.request("$JS.API.STREAM.NAMES", b"")).data)["streams"] or []
            said = {}
            for name in names:
                answer = json.loads((await client.request(f"$JS.API.STREAM.INFO.{name}", b"")).data)
                state = {key: value for key, value in answer["state"].items() if key != "consumer_count"}
                said[name] = (answer["created"], answer["config"], state)
            return said


@pytest.fixture
async def site(tmp_path):
    environment = passwords()
    async with serving(COMPOSE / "tenants-single.conf", tmp_path, environment) as [node]:
        here = Site(node.url, f"http://127.0.0.1:{node.monitor}", environment)
        for admin in ("acme-admin", "beta-admin"):
            async with here.toolkit(admin, provision=True):
                pass
            async with here.client(admin) as client:
                await client.jetstream().add_stream(name="JOBS", subjects=["jobs.*"], retention="workqueue")
        yield here


async def work(toolkit, result, large):
    """One of each: a guarded call, one with a payload too large for a record, a session, a notice told and carried."""
    run = toolkit.run("shared", "order-42")
    assert await run.execute("send", {"n": 1}, lambda: result) == result
    assert await run.execute("draw", {"n": 2}, lambda: large) == large
    log = toolkit.sessions.open("shared", "chat")
    await log.append({"role": "user", "content": result})
    fact = {"decision": "mail", "outcome": "approved", "detail": {"of": result}}
    filed = await run.notices.file(step="/notify", request_id="told-0", addressee="local.planner-1", fact=fact)
    await run.notices.consume(addressee="local.planner-1", notice_id=filed.notice_id, by="turn-1")


async def test_both_work_under_equal_names(site):
    for worker, result, large in (("acme-worker", "the mail to Ann", "A" * 400_000), ("beta-worker", SECRET, LARGE)):
        async with site.toolkit(worker) as toolkit:
            await work(toolkit, result, large)
        async with site.toolkit(worker) as toolkit:  # another process of the tenant's finds it all
            run = toolkit.run("shared", "order-42")
            assert await run.execute("send", {"n": 1}, lambda: "again") == result
            assert await run.execute("draw", {"n": 2}, lambda: "again") == large
            loaded = await toolkit.sessions.open("shared", "chat").load()
            assert [message["content"] for message in loaded.messages] == [result]
            assert len([receipt async for receipt in toolkit.receipts.list(tenant="shared")]) == 2
            [notice] = await run.notices.list(addressee="local.planner-1")
            assert notice.spec.fact.detail == {"of": result}


@pytest.mark.parametrize("user", ["acme-worker", "beta-worker", "beta-admin"])
async def test_the_doctor_finds_nothing_wrong(site, user):
    """With the shipped permissions all of it can be looked at, and nothing lacks; only a second server does."""
    tenant = user.removesuffix("-worker").removesuffix("-admin")
    async with site.toolkit(user) as toolkit:
        await work(toolkit, "the mail", LARGE)
    before = await site.state(f"{tenant}-admin")
    credentials = {"user": user, "password": password_of(site.environment, user)}
    found = [each async for each in examine(site.url, monitor=site.monitor, connect_timeout=20.0, **credentials)]
    assert [each.check for each in found if each.level != "ok"] == ["replicas"]
    levels = {each.check: each.level for each in found}
    assert sum(check.endswith(", permissions") for check in levels) == 4
    assert [levels[check] for check in levels if check.startswith("sync_always, ")] == ["ok"]
    assert {"receipts, readable", "sessions, readable", "notices, readable", "payloads, orphans"} <= set(levels)
    assert await site.state(f"{tenant}-admin") == before


async def test_the_permissions_with_partitions(tmp_path):
    """As docs/tenants.md says: each subject of `receipts` becomes one for each partition."""
    for name in ("nats-single.conf", "tenants-single.conf", "tenants.conf"):
        shutil.copy(COMPOSE / name, tmp_path)
    rules = (tmp_path / "tenants.conf").read_text("utf-8")
    named = r'"[^"\n]*\b(?:KV\.|KV_)(receipts)\b[^"\n]*"'
    several = re.sub(named, lambda rule: ", ".join(rule[0].replace("receipts", f"receipts-{n}") for n in (0, 1)), rules)
    assert several != rules
    (tmp_path / "tenants.conf").write_text(several, "utf-8")
    environment = passwords()
    async with serving(tmp_path / "tenants-single.conf", tmp_path, environment) as [node]:
        async with as_user(node.url, environment, "acme-admin", provision=True, partitions=2):
            pass
        async with as_user(node.url, environment, "acme-worker") as toolkit:
            await work(toolkit, "the mail to Ann", LARGE)
            for number in range(4):
                assert await toolkit.run("acme", f"run-{number}").execute("send", {}, lambda: "sent") == "sent"
            assert len({toolkit.receipts.bucket(receipt.key) async for receipt in toolkit.receipts.list()}) == 2
        credentials = {"user": "acme-worker", "password": password_of(environment, "acme-worker")}
        found = [each async for each in examine(node.url, connect_timeout=20.0, **credentials)]
        assert {each.check for each in found if each.level != "ok"} == {"replicas", "sync_always"}
        assert sum(each.check.endswith(", permissions") for each in found) == 5


async def test_a_worker_takes_jobs_of_its_own(site):
    for admin, worker in (("acme-admin", "acme-worker"), ("beta-admin", "beta-worker")):
        async with site.client(admin) as client:
            await client.jetstream().publish("jobs.mail", admin.encode())
        async with site.client(worker) as client, connect(client) as toolkit:
            jobs = await client.jetstream().pull_subscribe("jobs.*", durable="mailer", stream="JOBS")
            [msg] = await jobs.fetch(1, timeout=20)
            async with toolkit.delivery(msg):
                run = toolkit.run("shared", "order-1")
                assert await run.execute("send", {}, lambda msg=msg: msg.data.decode()) == admin
            assert client.refusals == []


def attempts(kv_key):
    """What somebody might send who wants what the neighbour has: subject, payload, headers, reply subject."""
    record = f"$KV.receipts.{kv_key}"
    last = json.dumps({"last_by_subj": record}).encode()
    forged = b'{"v":1,"status":"completed"}'
    external = [{"name": "KV_receipts", "external": {"api": api, "deliver": "stolen"}} for api in ("$JS.API", "BETA")]
    made = {"name": "STOLEN", "subjects": ["$KV.receipts.>", "sessions.>", "$O.receipt-payloads.>"]}
    consumer = {"stream_name": "KV_receipts", "config": {"deliver_subject": "stolen", "filter_subject": record}}
    yield record, forged, None, None  # write
    yield record, forged, {"Nats-Expected-Last-Subject-Sequence": "1"}, None
    yield record, b"", {"KV-Operation": "DEL"}, None  # erase
    yield record, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, None
    yield "sessions.shared.chat", forged, None, None
    yield "$KV.notices.notice.shared.order-42.x.y.spec", forged, None, None
    yield "$JS.API.STREAM.MSG.GET.KV_receipts", last, None, None  # read
    yield "$JS.API.STREAM.MSG.GET.SESSIONS", b'{"last_by_subj":"sessions.shared.chat"}', None, None
    yield f"$JS.API.DIRECT.GET.KV_receipts.{record}", b"", None, None
    yield "$JS.API.DIRECT.GET.KV_receipts", b'{"multi_last":["$KV.receipts.>"]}', None, None
    yield "$JS.API.DIRECT.GET.KV_notices", b'{"multi_last":["$KV.notices.>"]}', None, None
    yield "$JS.API.DIRECT.GET.OBJ_receipt-payloads", b'{"seq":1,"next_by_subj":"$O.receipt-payloads.>"}', None, None
    yield "$JS.API.STREAM.NAMES", b"", None, None  # list
    yield "$JS.API.STREAM.LIST", b"", None, None
    yield "$JS.API.STREAM.INFO.KV_receipts", b'{"subjects_filter":">"}', None, None
    yield "$JS.API.CONSUMER.CREATE.KV_receipts", json.dumps(consumer).encode(), None, None  # watch
    named = {"stream_name": "KV_receipts", "config": {"name": "thief", "durable_name": "thief", "ack_policy": "none"}}
    yield "$JS.API.CONSUMER.CREATE.KV_receipts.thief", json.dumps(named).encode(), None, None
    yield "$JS.API.CONSUMER.DURABLE.CREATE.KV_receipts.thief", json.dumps(named).encode(), None, None
    yield "$JS.API.CONSUMER.MSG.NEXT.KV_receipts.thief", b'{"batch":100,"no_wait":true}', None, None
    for verb in ("NAMES", "LIST"):
        yield f"$JS.API.CONSUMER.{verb}.KV_receipts", b"", None, None
    for stream in STREAMS:  # carry off, and put something else in its place
        yield f"$JS.API.STREAM.SNAPSHOT.{stream}", b'{"deliver_subject":"stolen","no_consumers":true}', None, None
        yield f"$JS.API.STREAM.RESTORE.{stream}", json.dumps({"config": {"name": stream}}).encode(), None, None
        yield f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}", b"", None, None
        yield f"$JS.API.STREAM.PEER.REMOVE.{stream}", b'{"peer":"nats-1"}', None, None
    yield "$JS.API.STREAM.MSG.GET.OBJ_receipt-payloads", b'{"seq":1}', None, None
    for prefix in ("$JS.BETA.API", "$JS.hub.API", "BETA.$JS.API"):  # by way of a domain, or of the account's name
        yield f"{prefix}.STREAM.MSG.GET.KV_receipts", last, None, None
    for question in ("JSZ", "CONNZ", "SUBSZ", "INFO", "STATZ"):  # ask, or tell, the server itself
        yield f"$SYS.REQ.ACCOUNT.BETA.{question}", b'{"account":"BETA","streams":true,"config":true}', None, None
        yield f"$SYS.REQ.ACCOUNT.PING.{question}", b'{"account":"BETA","accounts":["BETA"]}', None, None
        yield f"$SYS.REQ.SERVER.PING.{question}", b'{"account":"BETA","accounts":true,"streams":true}', None, None
    yield "$JS.API.ACCOUNT.PURGE.BETA", b"", None, None
    yield "$JS.API.ACCOUNT.STREAM.MOVE.BETA.KV_receipts", b"{}", None, None
    yield "$JS.API.META.LEADER.STEPDOWN", b"", None, None
    yield "$JS.API.SERVER.REMOVE", b'{"peer":"nats-1"}', None, None
    yield "$JS.API.STREAM.PURGE.KV_receipts", b"", None, None  # purge
    yield "$JS.API.STREAM.MSG.DELETE.KV_receipts", b'{"seq":1}', None, None
    yield "$JS.API.STREAM.UPDATE.KV_receipts", b'{"name":"KV_receipts","max_age":1000000000}', None, None
    for stream in STREAMS:
        yield f"$JS.API.STREAM.DELETE.{stream}", b"", None, None
    yield "$JS.API.STREAM.CREATE.STOLEN", json.dumps(made).encode(), None, None  # make
    for n, source in enumerate(external):
        config = {"name": f"MIRROR{n}", "mirror": source}
        yield f"$JS.API.STREAM.CREATE.MIRROR{n}", json.dumps(config).encode(), None, None
        config = {"name": f"SOURCED{n}", "sources": [source]}
        yield f"$JS.API.STREAM.CREATE.SOURCED{n}", json.dumps(config).encode(), None, None


def bounced(kv_key):
    """The same by way of the server, which asks nobody whether the reply subject may be published to.

    What it sends there is the body of a record that the user may write.
    """
    yield f"$JS.API.DIRECT.GET.KV_receipts.$KV.receipts.{kv_key}", b"", None, f"$KV.receipts.{kv_key}"
    for stream in STREAMS:
        yield f"$JS.API.DIRECT.GET.KV_receipts.{EMPTY}", b"", None, f"$JS.API.STREAM.DELETE.{stream}"


async def intrude(site, user, sent, *, meanwhile):
    """Send all of that as a user, and return the refusals and whatever was heard."""
    async with site.client(user) as client:
        heard = []

        async def hear(msg):
            heard.append(msg)

        inbox = client.new_inbox()
        for subject in (
            f"{inbox}.>",
            ">",
            "$KV.receipts.>",
            "$KV.notices.>",
            "sessions.>",
            "stolen",
            "$JS.>",
            "$SYS.>",
        ):
            await client.subscribe(subject, cb=hear)
        await client.request(EMPTY, b"", timeout=20)
        for n, (subject, payload, headers, reply) in enumerate(sent):
            await client.publish(subject, payload, headers=headers, reply=reply or f"{inbox}.{n}")
        await meanwhile()
        barrier = "JOBS" if user.endswith("admin") else "SESSIONS"
        await client.request(f"$JS.API.STREAM.INFO.{barrier}", b"", timeout=20)
        return client.refusals, "\n".join(_text(msg) for msg in heard)


def _text(msg):
    """A message with whatever it carries in base64."""
    text = f"{msg.subject} {msg.headers} {msg.data.decode(errors='replace')}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text += base64.b64decode(json.loads(msg.data)["message"]["data"]).decode(errors="replace")
    return text


@pytest.fixture
async def bea(site):
    """The neighbour's work: the KV key of a completed call, and a call to make meanwhile."""
    async with site.toolkit("beta-worker") as toolkit:
        await work(toolkit, SECRET, LARGE)

        async def one_more():
            await toolkit.run("shared", "order-43").execute("send", {"n": 3}, lambda: SECRET)

        yield toolkit.run("shared", "order-42").key("send", {"n": 1}).kv_key, one_more


@pytest.mark.parametrize("intruder", ["acme-worker", "acme-admin"])
async def test_a_neighbour_reaches_nothing(site, bea, intruder):
    kv_key, one_more = bea
    before = await site.state("beta-admin")
    refusals, told = await intrude(site, intruder, [*attempts(kv_key), *bounced(kv_key)], meanwhile=one_more)
    for theirs in (SECRET, "order-43", "a payload of Bea", "beta-"):
        assert theirs not in told
    assert ("permissions violation" in "".join(refusals).lower()) is (intruder == "acme-worker")
    after = await site.state("beta-admin")
    created, config, state = before.pop("KV_receipts")  # which got the two revisions of the call in between
    assert after["KV_receipts"][:2] == (created, config)
    assert after["KV_receipts"][2]["messages"] == state["messages"] + 2
    assert after.pop("KV_receipts")[2]["last_seq"] == state["last_seq"] + 2
    assert after == before
    async with site.toolkit("beta-worker") as toolkit:
        run = toolkit.run("shared", "order-42")
        assert await run.execute("send", {"n": 1}, lambda: "again") == SECRET
        assert await run.execute("draw", {"n": 2}, lambda: "again") == LARGE
        loaded = await toolkit.sessions.open("shared", "chat").load()
        assert [message["content"] for message in loaded.messages] == [SECRET]


async def test_the_same_attempts_succeed_at_home(site, bea):
    """The neighbour's admin does read, overhear, copy and delete all of it: the attempts are real ones."""
    kv_key, one_more = bea
    before = await site.state("beta-admin")

    async def one_more_or_not():  # its bucket may be deleted by then
        with contextlib.suppress(NatsReceiptsError):
            await one_more()

    _, told = await intrude(site, "beta-admin", attempts(kv_key), meanwhile=one_more_or_not)
    for theirs in (SECRET, "order-43", "a payload of Bea"):
        assert theirs in told
    after = await site.state("beta-admin")
    assert not set(STREAMS) & set(after)
    assert set(after) - set(before)
    assert after != before


async def test_with_the_toolkit_there_is_nothing_to_see(site, bea):
    kv_key, _ = bea
    async with site.toolkit("acme-worker") as toolkit:
        assert await toolkit.receipts.get(kv_key) is None
        assert [receipt async for receipt in toolkit.receipts.list(tenant="shared")] == []
        assert not (await toolkit.sessions.open("shared", "chat").load()).entries
        run = toolkit.run("shared", "order-42")
        assert await run.notices.list_run() == []
        assert await run.execute("send", {"n": 1}, lambda: "Ann's own") == "Ann's own"
    async with site.toolkit("beta-worker") as toolkit:
        receipt = await toolkit.receipts.get(kv_key)
        assert receipt.result == SECRET


async def test_a_worker_is_refused_when_it_would_change_its_streams(site):
    async with site.toolkit("acme-worker") as toolkit:
        await work(toolkit, "the mail to Ann", "A" * 400_000)
        kv_key = toolkit.run("shared", "order-42").key("send", {"n": 1}).kv_key
    before = await site.state("acme-admin")

    async def nothing():
        pass

    forbidden = ("$JS.API.STREAM.CREATE", "$JS.API.STREAM.UPDATE", "$JS.API.STREAM.DELETE", "$JS.API.STREAM.PURGE")
    forbidden += ("$JS.API.STREAM.MSG.DELETE", "$JS.API.CONSUMER.CREATE.KV_receipts")
    refusals, _ = await intrude(site, "acme-worker", attempts(kv_key), meanwhile=nothing)
    for subject in forbidden:
        assert any(subject.lower() in refusal.lower() for refusal in refusals), subject
    after = await site.state("acme-admin")
    assert set(after) == set(before)
    for name, (created, config, _state) in before.items():
        assert after[name][:2] == (created, config)
    with pytest.raises(PermissionDenied):
        async with site.toolkit("acme-worker", provision=True, namespace="more"):
            raise AssertionError("connected")


async def test_which_does_not_hold_against_malice(site):
    """As docs/tenants.md says: within an account, the server does for a worker what that may not ask for itself."""
    async with site.toolkit("beta-worker") as toolkit:
        kv_key = toolkit.run("shared", "order-42").key("send", {"n": 1}).kv_key
    neighbours = await site.state("beta-admin")

    async def nothing():
        pass

    await intrude(site, "acme-worker", list(bounced(kv_key))[1:2], meanwhile=nothing)
    async with asyncio.timeout(20):
        while STREAMS[0] in await site.state("acme-admin"):
            await asyncio.sleep(0.02)
    assert await site.state("beta-admin") == neighbours


async def test_who_is_let_in(site):
    def password(user):
        return password_of(site.environment, user)

    async def try_to_connect(credentials):
        with pytest.raises(Unreachable, match="credentials") as caught:
            async with connect(site.url, connect_timeout=5.0, **credentials):
                raise AssertionError("connected")
        assert "authorization" in str(caught.value.__cause__).lower()

    await asyncio.gather(
        *map(
            try_to_connect,
            [
                {},
                {"user": "beta-worker", "password": password("acme-worker")},
                {"user": "beta-worker", "password": ""},
                {"user": "beta-admin", "password": password("beta-worker")},
                {"user": "nobody", "password": password("beta-worker")},
            ],
        )
    )


async def test_workers_with_keys_instead_of_passwords(tmp_path):
    """As docs/tenants.md shows it: the server knows the public half only."""
    nkeys = pytest.importorskip("nkeys")
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    given = passwords()
    given["ACME_WORKER_NKEY"] = nkeys.from_seed(bytearray(seed)).public_key.decode()
    conf = tmp_path / "tenants.conf"
    text = (COMPOSE / "tenants.conf").read_text(encoding="utf-8")
    password = "user: acme-worker, password: $ACME_WORKER_PASSWORD"
    assert password in text
    text = "jetstream { store_dir: $STORE_DIR }\n" + text.replace(password, "nkey: $ACME_WORKER_NKEY")
    conf.write_text(text, encoding="utf-8")
    async with serving(conf, tmp_path, given) as [node]:
        here = Site(node.url, "", given)
        async with here.toolkit("acme-admin", provision=True):
            pass
        async with connect(node.url, nkeys_seed_str=seed.decode(), connect_timeout=20.0) as toolkit:
            await work(toolkit, "the mail to Ann", "A" * 400_000)


ONE_ACCOUNT = """
accounts { ALL { jetstream: enabled, users: [
  { user: admin, password: pw }
  { user: acme-worker, password: pw, permissions: {
    publish: { allow: ["$KV.acme-receipts.>", "$JS.API.DIRECT.GET.KV_acme-receipts.>"] }
    subscribe: { allow: ["_INBOX_acme.>"] } } }
] } }
"""


async def test_permissions_within_one_account_do_not_fence_off():
    """Why it is an account per tenant: the server sends its answer wherever a request says, whoever asked."""
    async with (
        embedded(config=ONE_ACCOUNT) as server,
        connect(server.url, namespace="acme", provision=True, user="admin", password="pw"),
        connect(server.url, namespace="beta", provision=True, user="admin", password="pw") as toolkit,
        await nats.connect(server.url, user="admin", password="pw") as admin,
        await nats.connect(server.url, user="acme-worker", password="pw", inbox_prefix=b"_INBOX_acme") as intruder,
    ):
        kv_key = toolkit.run("beta", "order-42").key("send", {}).kv_key
        forged = b"not written by the neighbour"
        await intruder.request(f"$KV.acme-receipts.{kv_key}", forged, timeout=20)
        await intruder.publish(
            f"$JS.API.DIRECT.GET.KV_acme-receipts.$KV.acme-receipts.{kv_key}", reply=f"$KV.beta-receipts.{kv_key}"
        )
        kv = await admin.jetstream().key_value("beta-receipts")
        async with asyncio.timeout(20):
            while await _value(kv, kv_key) != forged:
                await asyncio.sleep(0.02)


async def _value(kv, key):
    try:
        return (await kv.get(key)).value
    except nats.js.errors.KeyNotFoundError:
        return None
