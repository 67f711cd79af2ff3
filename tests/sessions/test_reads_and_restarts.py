"""Sessions listed and watched; reads that get no answer; servers and buckets that go away while a session is woken."""

from __future__ import annotations

import asyncio
import contextlib
import json
from urllib.parse import urlsplit

import pytest
from session_support import DIALECTS, Desk, assistant, entries_on_server, put_entry, stream_of, subject_of
from support import Message, bucket_of, client_of, toolkit_of, until

from natsreceipts import (
    BucketReplaced,
    CallWithdrawn,
    NatsReceiptsError,
    NotResolvable,
    SessionBusy,
    Unreachable,
)
from natsreceipts.testing import FaultProxy

ARGS = {"to": "ada"}
NEVER, UNKNOWN = "interrupted_never_started", "interrupted_outcome_unknown"


def say(text):
    return {"role": "user", "content": text}


# ---------------------------------------------------------------- list and watch


async def listed(toolkit, **options):
    return [(each.tenant, each.session, each.last_seq) async for each in toolkit.sessions.list(**options)]


async def test_sessions_are_listed(toolkit, other):
    assert await listed(toolkit) == []
    last = {}
    for tenant, session in (("acme", "b"), ("acme", "a"), ("zeta", "a"), ("a.b", "c d"), ("acme", "x" * 200)):
        log = toolkit.sessions.open(tenant, session)
        await log.append(say("0"))
        last[tenant, session] = (await log.append(say("1"))).seq
    found = await listed(other)
    assert {(tenant, session) for tenant, session, _ in found} == {
        (tenant, session if len(session) < 180 else None) for tenant, session in last
    }
    assert {seq for _, _, seq in found} == {*last.values()}
    assert await listed(other, tenant="zeta") == [("zeta", "a", last["zeta", "a"])]
    assert await listed(other, tenant="nobody") == []
    assert [(tenant, session) for tenant, session, _ in await listed(other, tenant="a.b")] == [("a.b", "c d")]


async def test_more_sessions_than_one_answer_holds(toolkit, nc, namespace):
    record = {"v": 1, "id": "e", "parentId": None, "kind": "message", "dialect": "neutral", "body": say("x")}
    for n in range(1100):
        await nc.publish(subject_of(namespace, f"s{n}"), json.dumps(record).encode())
    await nc.flush()

    async def stored():
        return (await nc.jetstream().stream_info(stream_of(namespace))).state.messages == 1100

    await until(stored)
    found = await listed(toolkit)
    assert sorted(session for _, session, _ in found) == sorted(f"s{n}" for n in range(1100))


async def test_a_session_is_watched(toolkit, other):
    host, watched = toolkit.sessions.open("acme", "chat"), other.sessions.open("acme", "chat")
    await host.append(say("0"))
    seen = asyncio.Queue()

    async def watches():
        async for entry in watched.watch():
            seen.put_nowait(entry.body["content"])

    watching = asyncio.create_task(watches())
    async with asyncio.timeout(30):
        assert await seen.get() == "0"
        for n in range(1, 20):
            await host.append(say(f"{n}"))
        assert [await seen.get() for _ in range(19)] == [f"{n}" for n in range(1, 20)]
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert seen.empty()


async def test_a_watch_lives_through_a_restart(own_server, namespace):
    settings = {"reconnect_time_wait": 0.05}
    async with (
        toolkit_of(own_server.url, namespace, **settings) as one,
        toolkit_of(own_server.url, namespace, **settings) as two,
    ):
        host, watched = one.sessions.open("acme", "chat"), two.sessions.open("acme", "chat")
        await host.append(say("0"))
        seen = asyncio.Queue()

        async def watches():
            async for entry in watched.watch():
                seen.put_nowait(entry.body["content"])

        watching = asyncio.create_task(watches())
        async with asyncio.timeout(60):
            assert await seen.get() == "0"
            await own_server.kill()
            await own_server.restart()
            for n in range(1, 4):
                while True:
                    try:
                        await host.append(say(f"{n}"))
                        break
                    except Unreachable:
                        continue
            assert [await seen.get() for _ in range(3)] == ["1", "2", "3"]
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


# ---------------------------------------------------------------- reads without an answer


async def test_reads_whose_answers_are_lost(desk, server, namespace):
    """A page, the leader's word, the clock: each is asked again, and wake says the same."""

    async def lost(fault, subject):
        name = f"{fault}{subject.count('.')}{len(subject)}"
        host = desk("anthropic", session=name)
        args = [{"name": name, "n": n} for n in range(3)]
        await host.hears()
        await host.asks(*((f"t{n}", "send", args[n]) for n in range(3)))
        await host.stands("send", args[1], "completed")
        await host.stands("send", args[2], "ambiguous")
        async with FaultProxy("127.0.0.1", urlsplit(server.url).port) as proxy, toolkit_of(proxy.url, namespace) as far:
            lost = getattr(proxy, fault)(subject)
            recovered = (await host.at(far).wakes("send")).recovered
            assert len(lost.hits) >= 1
        assert [each.error_kind for each in recovered] == [NEVER, None, UNKNOWN]
        assert [each.tool_call_id for each in recovered] == ["t0", "t1", "t2"]
        assert len(await host.context()) == 3

    subjects = [
        f"$JS.API.DIRECT.GET.{stream_of(namespace)}",
        f"$JS.API.STREAM.MSG.GET.{stream_of(namespace)}",
        f"$JS.API.STREAM.MSG.GET.KV_{bucket_of(namespace)}",
        f"$JS.API.STREAM.INFO.KV_{bucket_of(namespace)}",
    ]
    await asyncio.gather(
        *(lost(fault, subject) for fault in ("drop_answer", "cut_after_store") for subject in subjects)
    )


# ---------------------------------------------------------------- servers and buckets that go away


async def test_a_server_that_is_killed_while_sessions_are_woken(own_server, namespace):
    """Each wake ends well or says that nobody answered; made again, every call is closed once."""
    settings = {"reconnect_time_wait": 0.05}
    async with toolkit_of(own_server.url, namespace, **settings) as toolkit, client_of(own_server.url) as nc:
        desks = [Desk(toolkit, nc, namespace, dialect, dialect) for dialect in DIALECTS * 3]
        desks = [Desk(toolkit, nc, namespace, desk.dialect, f"{desk.dialect}-{n}") for n, desk in enumerate(desks)]
        for n, desk in enumerate(desks):
            await desk.hears()
            await desk.asks(*((f"t{m}", "send", {"n": n, "m": m}) for m in range(4)))
            await desk.stands("send", {"n": n, "m": 1}, "completed")
            await desk.stands("send", {"n": n, "m": 2}, "running", leaseMs=1)
        begun = asyncio.Event()

        async def wakes(desk):
            while True:
                begun.set()
                with contextlib.suppress(Unreachable, SessionBusy):  # a restart costs every lease a fresh look
                    return await desk.wakes("send")

        waking = [asyncio.create_task(wakes(desk)) for desk in desks]
        await begun.wait()
        await asyncio.sleep(0.02)
        await own_server.kill()
        await own_server.restart()
        await asyncio.gather(*waking)
        for desk in desks:
            told = [entry["receipt"]["toolCallId"] for entry in await desk.entries() if entry.get("receipt")]
            assert told == ["t0", "t1", "t2", "t3"]
            found = dict(await desk.context())
            assert "never started" in found["t0"]
            assert found["t1"] == "theirs"
            assert "unknown" in found["t2"]


async def test_receipts_that_were_replaced_under_a_waker(desk, nc, namespace):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    await desk.run.execute("send", ARGS, _done)
    js = nc.jetstream()
    config = (await js.stream_info(f"KV_{bucket_of(namespace)}")).config
    await js.delete_stream(f"KV_{bucket_of(namespace)}")
    await js.add_stream(config)
    before = await desk.entries()
    for _ in range(2):
        with pytest.raises(BucketReplaced):
            await desk.wakes("send")
    assert await desk.entries() == before
    assert (await js.stream_info(f"KV_{bucket_of(namespace)}")).state.messages == 0


async def _done():
    return "done"


# ---------------------------------------------------------------- what was withdrawn, for everybody else


async def test_a_withdrawn_receipt_for_people(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    await desk.wakes("send")
    key = desk.key("send", ARGS)
    receipts = desk.toolkit.receipts
    receipt = await receipts.get(key)
    assert (receipt.status, receipt.attempts, receipt.effect, receipt.result) == ("withdrawn", 0, None, None)
    assert [each.status async for each in receipts.list(tenant="acme", run="run-1")] == ["withdrawn"]
    with pytest.raises(NotResolvable):
        await receipts.resolve(key, revision=receipt.revision, completed=1, by="ada", reason="?")


@pytest.mark.parametrize("error", ["busy", "withdrawn"])
async def test_a_delivery_comes_again(desk, error):
    """Busy: when the lease may be over. Withdrawn: later and later, since the next one wakes the session first."""
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    delays = []
    for number in (1, 2, 3):
        message = Message(number)
        if error == "busy":
            await desk.stands("send", ARGS, "running", leaseMs=40_000)
            with pytest.raises(SessionBusy):
                async with desk.toolkit.delivery(message):
                    await desk.wakes("send")
        else:
            await desk.stands("send", ARGS, "withdrawn", fences={"chat": entry.seq})
            with pytest.raises(CallWithdrawn):
                async with desk.toolkit.delivery(message):
                    await desk.run.execute("send", ARGS, _done)
        ((what, delay),) = [call for call in message.calls if call != "in progress"]
        assert what == "nak"
        delays.append(delay)
    if error == "busy":
        assert all(20 < delay <= 42 for delay in delays)
    else:
        assert delays[0] < delays[1] < delays[2]


# ---------------------------------------------------------------- entries that read, and make little sense

ODD = {
    "a compaction that calls": {"kind": "compaction", "body": {"message": None, "keepFrom": None}},
    "a close that calls": {"close": {"toolCallId": "t9", "errorKind": NEVER}},
    "the word of a receipt that calls": {
        "receipt": {
            "toolCallId": "t9",
            "toolName": "send",
            "key": "acme.run-1.send." + "0" * 64,
            "revision": 1,
            "status": "ambiguous",
            "attempts": 1,
        }
    },
    "a marker that calls": {"kind": "marker"},
    "a hold of nothing that is called": {"kind": "suspend", "body": {"toolCallIds": ["t77"]}},
    "a release of nothing that is held": {"kind": "resume", "body": {"toolCallIds": ["t77"]}},
    "a compaction that keeps from nowhere": {
        "kind": "compaction",
        "body": {"message": say("so far"), "keepFrom": "gone"},
    },
    "a parent of another session": {"parentId": "gone"},
}


@pytest.mark.parametrize("name", ODD)
async def test_odd_entries_of_others(desk, nc, namespace, name):
    """Nothing but an error of ours, and never a word that is not so."""
    desk = desk()
    await desk.hears()
    call = assistant("neutral", ("t1", "send", ARGS))[0]
    fields = {"body": call, "id": "odd"} | ODD[name]
    if fields["body"].get("message", 1) is None:
        fields = {**fields, "body": {"message": call, "keepFrom": None}}
    await put_entry(nc, namespace, fields.pop("body"), **fields)
    await desk.log.load()
    with contextlib.suppress(NatsReceiptsError):
        await desk.wakes("send")
    with contextlib.suppress(NatsReceiptsError):
        await desk.log.context()
    with contextlib.suppress(NatsReceiptsError):
        await desk.log.interrupt(tool_use_in_flight=False)
    told = [entry for entry in await entries_on_server(nc, namespace) if entry.get("receipt")]
    assert len([entry for entry in told if entry["id"] != "odd"]) <= 1
