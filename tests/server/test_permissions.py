"""What a user may not do: told as what it is, with the key, in good time, and nothing executed."""

from __future__ import annotations

import asyncio

import pytest
from support import LEASE, Effect, bucket_of, client_of, redelivery, toolkit_of

from natsreceipts import (
    CallInFlight,
    NatsReceiptsError,
    NotClaimed,
    NotProvisioned,
    NotRecorded,
    PermissionDenied,
    Unreachable,
    connect,
)
from natsreceipts.embedded import embedded

ARGS = {"to": "a@b.c"}
BUCKET = bucket_of("ns")
KV = f"$KV.{BUCKET}.>"
MSG_GET = f"$JS.API.STREAM.MSG.GET.KV_{BUCKET}"
INFO = f"$JS.API.STREAM.INFO.KV_{BUCKET}"
DIRECT = f"$JS.API.DIRECT.GET.KV_{BUCKET}.>"
INBOX = "_INBOX.>"

USERS = {
    # name: (denied publishes, denied subscriptions)
    "all": ([], []),
    "no_writes": ([KV], []),
    "no_writes_to_acme": ([f"$KV.{BUCKET}.acme.>"], []),
    "no_inbox": ([], [INBOX]),
    "no_reads": ([MSG_GET], []),
    "no_info": ([INFO], []),
    "no_direct": ([DIRECT], []),
    "no_hints": ([], ["$KV.>"]),
    "no_create": (["$JS.API.STREAM.CREATE.>"], []),
}


def _users():
    for name, (publish, subscribe) in USERS.items():
        rules = [
            f"{kind}: {{ deny: {_list(denied)} }}"
            for kind, denied in zip(("publish", "subscribe"), (publish, subscribe), strict=True)
            if denied
        ]
        permissions = f", permissions: {{ {', '.join(rules)} }}" if rules else ""
        yield f"{{ user: {name}, password: pw{permissions} }}"


def _list(subjects):
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


CONFIG = f"""
accounts {{
  A {{ jetstream: enabled, users: [ {", ".join(_users())} ] }}
  SYS {{ users: [ {{ user: sys, password: pw }} ] }}
}}
system_account: SYS
"""


@pytest.fixture
async def guarded():
    async with embedded(config=CONFIG) as server, as_user(server, "all"):
        yield server


@pytest.fixture
def patient(monkeypatch):
    """Whoever waits for an answer that does not come waits for longer than any machine stands still."""
    for name in ("fence._SHORTEST_TRY", "fence._LONGEST_TRY", "receipts._READ_PATIENCE"):
        monkeypatch.setattr(f"natsreceipts.{name}", 9.0)


SOON = 6.0
"""Seconds: much less than that."""


def as_user(server, name, **settings):
    return toolkit_of(server.url, "ns", user=name, password="pw", **{"provision": name == "all"} | settings)


async def timed(awaitable):
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        return await awaitable, loop.time() - started
    except NatsReceiptsError as error:
        return error, loop.time() - started


async def test_writes_are_denied(guarded, patient):
    effect = Effect("wrong")
    async with as_user(guarded, "no_writes") as toolkit:
        run = toolkit.run("acme", "run-1")
        error, took = await timed(run.execute("send", ARGS, effect))
        assert isinstance(error, PermissionDenied)
        assert took < SOON
        assert error.key == run.key("send", ARGS)
        assert error.operation == "publish"
        assert error.subject == f"$KV.{BUCKET}.{error.key.kv_key}"
        assert error.key.kv_key in str(error)
        assert await toolkit.receipts.get(error.key) is None
        error, took = await timed(run.execute("send", ARGS, effect))  # and again: it is not remembered wrongly
        assert isinstance(error, PermissionDenied)
    assert effect.entered == 0


async def test_writes_of_one_tenant_are_denied(guarded):
    async with as_user(guarded, "no_writes_to_acme") as toolkit:
        error, _ = await timed(toolkit.run("acme", "run-1").execute("send", ARGS, Effect("wrong")))
        assert isinstance(error, PermissionDenied)
        # Subjects come back in lower case in the server's errors: names with capitals are matched all the same.
        assert await toolkit.run("Other", "Run-1").execute("Send", ARGS, Effect()) == "done"
        both = await asyncio.gather(
            toolkit.run("acme", "run-1").execute("send", ARGS, Effect("wrong")),
            toolkit.run("other", "run-2").execute("send", ARGS, Effect()),
            return_exceptions=True,
        )
        assert isinstance(both[0], PermissionDenied)
        assert both[1] == "done"


async def test_the_inbox_is_denied(guarded):
    with pytest.raises(PermissionDenied) as caught:
        async with as_user(guarded, "no_inbox"):
            raise AssertionError("connected")
    assert caught.value.operation == "subscribe"
    assert caught.value.subject.startswith("_INBOX.")


async def test_reads_are_denied(guarded, patient):
    """A replay may come from a direct get; whatever is not completed must be read from the leader."""
    async with as_user(guarded, "all") as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", [1], Effect("first"))
        with pytest.raises(ValueError, match="x"):
            await run.execute("send", ARGS, Effect(ValueError("x")))
    effect = Effect("wrong")
    async with as_user(guarded, "no_reads") as toolkit:
        run = toolkit.run("acme", "run-1")
        assert await run.execute("send", [2], Effect()) == "done"  # a fresh call reads nothing
        error, took = await timed(run.execute("send", ARGS, effect))
        assert isinstance(error, PermissionDenied)
        assert (error.subject, error.key) == (MSG_GET, run.key("send", ARGS))
        assert took < SOON
        error, took = await timed(toolkit.receipts.get(run.key("send", ARGS)))
        assert isinstance(error, PermissionDenied)
        assert error.key == run.key("send", ARGS)
        assert took < SOON
        answer, _ = await timed(run.execute("send", [1], effect))
        assert answer == "first" or isinstance(answer, PermissionDenied)
    assert effect.entered == 0


async def test_the_settings_are_denied(guarded):
    """STREAM.INFO is needed to look at the settings, and for the clock."""
    with pytest.raises(PermissionDenied) as caught:
        async with as_user(guarded, "no_info"):
            raise AssertionError("connected")
    assert caught.value.subject == INFO


async def test_direct_gets_are_denied(guarded, patient):
    """A redelivery reads first, from any replica. Where it may not, the claim decides."""
    async with as_user(guarded, "no_direct") as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect()
        async with redelivery(toolkit):
            for _ in range(2):
                answer, took = await timed(run.execute("send", ARGS, effect))
                assert answer == "done"
                assert took < SOON
        assert await run.execute("send", ARGS, effect) == "done"
        assert effect.entered == 1


async def test_hints_are_denied(guarded):
    """A hint is a help and not the truth: without it a waiter still finds out."""
    effect = Effect("mine", hold=True)
    async with as_user(guarded, "all", lease=3) as toolkit, as_user(guarded, "no_hints") as other:
        task = asyncio.create_task(toolkit.run("acme", "run-1").execute("send", ARGS, effect))
        await effect.started.wait()
        with pytest.raises(CallInFlight):
            await other.run("acme", "run-1").execute("send", ARGS, Effect("wrong"), wait=0.1)
        waiting = asyncio.create_task(other.run("acme", "run-1").execute("send", ARGS, Effect("wrong")))
        await asyncio.sleep(0.1)
        effect.go.set()
        assert await task == "mine"
        assert await waiting == "mine"


async def test_making_a_bucket_is_denied(guarded):
    with pytest.raises(PermissionDenied):
        async with connect(guarded.url, namespace="new", provision=True, user="no_create", password="pw"):
            raise AssertionError("connected")
    with pytest.raises(NotProvisioned):
        async with connect(guarded.url, namespace="new", user="no_create", password="pw"):
            raise AssertionError("connected")
    async with as_user(guarded, "no_create") as toolkit:  # one that is there can be used
        assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect()) == "done"


async def test_a_wrong_password(guarded):
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(Unreachable, match="credentials") as caught:
        async with connect(guarded.url, user="all", password="wrong", connect_timeout=1.0):
            raise AssertionError("connected")
    assert caught.value.__cause__ is not None
    assert loop.time() - started < 20


async def test_writes_are_denied_halfway(guarded):
    """A settle that is not permitted: the result is in the error."""
    config = CONFIG.replace(
        "user: all, password: pw", f'user: all, password: pw, permissions: {{ publish: {{ deny: ["{KV}"] }} }}'
    )
    async with as_user(guarded, "all") as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect("mine", hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect))
        await effect.started.wait()
        guarded._config = config
        await guarded.restart()
        effect.go.set()
        with pytest.raises(NotRecorded) as caught:
            await asyncio.wait_for(task, 60)
        assert caught.value.result == "mine"
        assert isinstance(caught.value.__cause__, PermissionDenied)


# With a client that the host opened, whose errors go to the host's own callback


@pytest.fixture
def host(guarded):
    def opened(name):
        return client_of(guarded.url, user=name, password="pw")

    return opened


async def test_a_hosts_client_that_may_not_write(host, monkeypatch):
    monkeypatch.setattr("natsreceipts.entering.CLAIM_PATIENCE", 3.0)
    monkeypatch.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 3.0)
    effect = Effect("wrong")
    async with host("no_writes") as mine, connect(mine, namespace="ns", lease=LEASE) as toolkit:
        run = toolkit.run("acme", "run-1")
        error, took = await timed(run.execute("send", ARGS, effect))
        assert isinstance(error, PermissionDenied | NotClaimed)
        assert error.key == run.key("send", ARGS)
        assert took < 30
        assert any(isinstance(cause, PermissionDenied) for cause in _causes(error))
    assert effect.entered == 0


async def test_a_hosts_client_that_may_not_have_an_inbox(host):
    async with host("no_inbox") as mine:
        with pytest.raises(PermissionDenied) as caught:
            async with connect(mine, namespace="ns"):
                raise AssertionError("connected")
        assert caught.value.operation == "subscribe"
        assert mine.is_connected


async def test_a_hosts_client_that_may_not_read(guarded, host, monkeypatch):
    monkeypatch.setattr("natsreceipts.entering.CLAIM_PATIENCE", 3.0)
    monkeypatch.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 3.0)
    async with as_user(guarded, "all") as toolkit:
        with pytest.raises(ValueError, match="x"):
            await toolkit.run("acme", "run-1").execute("send", ARGS, Effect(ValueError("x")))
    effect = Effect("wrong")
    async with host("no_reads") as mine, connect(mine, namespace="ns", lease=LEASE) as toolkit:
        error, took = await timed(toolkit.run("acme", "run-1").execute("send", ARGS, effect))
        assert isinstance(error, PermissionDenied | NotClaimed)
        assert any(isinstance(cause, PermissionDenied) for cause in _causes(error))
        assert took < 30
    assert effect.entered == 0


async def test_a_hosts_client_that_may_not_see_the_settings(host):
    async with host("no_info") as mine:
        with pytest.raises(NatsReceiptsError) as caught:
            async with connect(mine, namespace="ns", connect_timeout=1.0):
                raise AssertionError("connected")
        assert any(isinstance(cause, PermissionDenied) for cause in _causes(caught.value))


def _causes(error):
    while error is not None:
        yield error
        error = error.__cause__
