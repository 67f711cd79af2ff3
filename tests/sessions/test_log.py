"""The log of a session: verbatim, whole and in order, one writer at a time, and nothing written that was refused."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import decimal
import json
import pickle
import random
import time
from urllib.parse import urlsplit

import pytest
from dialect_shapes import calls, result, says, shaped, user
from nats.js.api import StreamConfig
from session_support import (
    DIALECTS,
    Desk,
    assistant,
    cancelled_at,
    entries_on_server,
    last_seqs,
    put_entry,
    stream_of,
    subject_of,
)
from support import client_of, toolkit_of, until
from vendor_rules import RULES

from natsreceipts import (
    BucketReplaced,
    CorruptRecord,
    InvalidName,
    InvalidSetting,
    InvalidTranscript,
    NatsReceiptsError,
    SessionConflict,
    Unreachable,
    UnsupportedRecord,
    append_interruption_marker,
    reconcile_interrupted_session,
)
from natsreceipts.embedded import embedded
from natsreceipts.errors import NotProvisioned, PermissionDenied
from natsreceipts.testing import FaultProxy

NEVER, UNKNOWN = "interrupted_never_started", "interrupted_outcome_unknown"
ARGS = {"to": "ada"}


def say(text):
    return {"role": "user", "content": text}


@pytest.fixture
def log(toolkit):
    return toolkit.sessions.open("acme", "chat")


@pytest.fixture
def again(other):
    """The same session, as another worker has it."""
    return other.sessions.open("acme", "chat")


# ---------------------------------------------------------------- what comes in comes out

TALE = [
    user("hi"),
    calls("t1", "t2", text="text-1"),
    result("t1"),
    result("t2", "✓ \u2028 \x7f \U0001f600"),
    says("so"),
]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_is_appended_is_loaded_verbatim(desk, other, dialect):
    desk = desk(dialect)
    messages = shaped(TALE, dialect)
    entries = [await desk.log.append(message, run="run-1") for message in messages]
    seqs = [entry.seq for entry in entries]
    assert seqs == sorted(set(seqs))
    again = other.sessions.open("acme", "chat")
    for log in (desk.log, again):
        loaded = await log.load()
        assert loaded.messages == messages
        assert json.dumps(loaded.messages) == json.dumps(messages)  # the order of fields, too
        assert [entry.id for entry in loaded.entries] == [entry.id for entry in entries]
        assert [entry.parent_id for entry in loaded.entries] == [None, *(entry.id for entry in entries[:-1])]
        assert [entry.run for entry in loaded.entries] == ["run-1"] * len(messages)
        assert {entry.dialect for entry in loaded.entries} == {dialect}
        assert (loaded.last_seq, loaded.suspended, log.dialect) == (seqs[-1], frozenset(), dialect)
        assert loaded.all_entries == loaded.entries
    times = [entry.time for entry in (await again.load()).entries]
    assert times == sorted(times)
    assert abs((times[0] - dt.datetime.now(dt.UTC)).total_seconds()) < 120
    RULES[dialect]((await again.context()).messages)


PLAIN = [
    {"role": "user", "content": "x", "n": [0, -1, 2**53 + 1, 2**80, 1.5, -0.0, 1e300, 5e-324, True, False, None]},
    {"role": "user", "content": "", "": {"": [[], {}, [[[]]]]}},
    {"role": "user", "content": '\x00\x1f"\\/\u2029\ud7ff\ue000'},
    {"role": "user", "content": "x" * 100_000},
]


@pytest.mark.parametrize("message", PLAIN, ids=range(len(PLAIN)))
async def test_every_plain_value_comes_back(log, again, message):
    entry = await log.append(message)
    assert entry.body == message
    (back,) = (await again.load()).messages
    assert json.dumps(back) == json.dumps(message)


async def test_a_message_is_the_hosts_again_once_it_was_appended(log, again):
    message = say([{"type": "text", "text": "hi"}])
    await log.append(message)
    message["content"][0]["text"] = "changed"
    for each in (log, again):
        assert (await each.load()).messages == [say([{"type": "text", "text": "hi"}])]


async def test_an_empty_session(log, again, nc, namespace):
    for each in (log, again):
        loaded = await each.load()
        assert (loaded.entries, loaded.messages, loaded.last_seq) == ([], [], 0)
        assert (await each.context()).messages == []
    assert await entries_on_server(nc, namespace) == []


@pytest.mark.parametrize("dialect", [None, "anthropic"])
async def test_the_dialect_is_that_of_the_first_entry(toolkit, other, dialect):
    await toolkit.sessions.open("acme", "chat", dialect="anthropic").append(say("hi"))
    log = other.sessions.open("acme", "chat", dialect=dialect)
    await log.append(assistant("anthropic", ("t1", "send", ARGS))[0])
    assert log.dialect == "anthropic"
    assert [entry.dialect for entry in (await log.load()).entries] == ["anthropic"] * 2


async def test_another_dialect_is_refused(toolkit, other, nc, namespace):
    await toolkit.sessions.open("acme", "chat", dialect="anthropic").append(say("hi"))
    log = other.sessions.open("acme", "chat", dialect="openai-chat")
    for verb in (log.load, log.context, log.wake, lambda: log.append(say("ho"))):
        with pytest.raises(InvalidSetting, match="'anthropic'"):
            await verb()
    with pytest.raises(InvalidSetting):
        toolkit.sessions.open("acme", "chat", dialect="latin")
    assert len(await entries_on_server(nc, namespace)) == 1


NAMES = ["chat", "a.b", "a b", "*", ">", "ä", "=", "a=b", "x" * 300, "Chat", "chat-1", "$KV", "\x00"]


async def test_names_are_kept_apart(toolkit, other):
    for tenant in ("acme", "a.b", "x" * 200):
        for name in NAMES:
            await toolkit.sessions.open(tenant, name).append(say(f"{tenant} {name}"))
    for tenant in ("acme", "a.b", "x" * 200):
        for name in NAMES:
            loaded = await other.sessions.open(tenant, name).load()
            assert loaded.messages == [say(f"{tenant} {name}")]
            assert (loaded.entries[0].tenant, loaded.entries[0].session) == (tenant, name)


@pytest.mark.parametrize("name", ["", "\ud800", 7, None, b"x"])
async def test_names_that_cannot_be(toolkit, name):
    for names in (("acme", name), (name, "chat")):
        with pytest.raises(InvalidName):
            toolkit.sessions.open(*names)


async def test_namespaces_are_apart(server, nc, namespace, log):
    await log.append(say("here"))
    async with toolkit_of(server.url, f"{namespace}x") as elsewhere:
        far = elsewhere.sessions.open("acme", "chat")
        assert (await far.load()).messages == []
        await far.append(say("there"))
        assert (await log.load()).messages == [say("here")]
        assert (await far.load()).messages == [say("there")]
    for stream in (stream_of(f"{namespace}x"), f"KV_{namespace}x-receipts", f"OBJ_{namespace}x-receipt-payloads"):
        await nc.jetstream().delete_stream(stream)


async def test_entries_and_conflicts_cross_processes(log, again):
    entry = await log.append(assistant("neutral", ("t1", "send", ARGS))[0], run="run-1")
    assert pickle.loads(pickle.dumps(entry)) == entry
    await again.load()
    await log.append(say("more"))
    with pytest.raises(SessionConflict) as caught:
        await again.append(say("me too"))
    assert pickle.loads(pickle.dumps(caught.value)).missed == caught.value.missed


# ---------------------------------------------------------------- more than one page


async def fill(nc, namespace, session, bodies, *, beside=(), already=0):
    """Write entries behind the library's back, in one chain; ``beside`` are sessions that are written in between."""
    parent = None
    for n, body in enumerate(bodies):
        record = {"v": 1, "id": f"e{n}", "parentId": parent, "kind": "message", "dialect": "neutral", "body": body}
        await nc.publish(subject_of(namespace, session), json.dumps(record).encode())
        parent = f"e{n}"
        for name in beside:
            other = record | {"id": f"{name}{n}", "parentId": None, "body": say("not mine")}
            await nc.publish(subject_of(namespace, name), json.dumps(other).encode())
        if n % 500 == 499:
            await nc.flush()
    await nc.flush()
    total = already + len(bodies) * (1 + len(beside))

    async def stored():
        return (await nc.jetstream().stream_info(stream_of(namespace))).state.messages == total

    await until(stored, timeout=30)


async def test_many_entries_are_loaded_whole_and_in_order(toolkit, nc, namespace, proxy):
    """More than a page by number (4,096), among those of another session, and in time that grows with the entries
    alone: by this process's own time, so that others on the machine do not matter."""
    sizes = {"small": 700, "chat": 5600}
    await fill(nc, namespace, "small", [say(f"{n}") for n in range(700)])
    bodies = [say(f"{n}") for n in range(5600)]
    await fill(nc, namespace, "chat", bodies, beside=["chat-1"], already=700)
    async with toolkit_of(proxy.url, namespace) as far:
        log = far.sessions.open("acme", "chat")
        proxy.forget()
        loaded = await log.load()
        assert len(proxy.published("$JS.API.DIRECT.GET.>")) <= 4, "a few requests, not one for each"
        assert loaded.messages == bodies
        assert [entry.id for entry in loaded.entries] == [f"e{n}" for n in range(5600)]
        entry = await log.append(say("one more"))
        assert entry.parent_id == "e5599"
        assert len((await log.load()).messages) == 5601
    per_entry = {}
    for name, size in sizes.items():
        took = []
        for _ in range(3):
            start = time.process_time()
            await toolkit.sessions.open("acme", name).load()
            took.append(time.process_time() - start)
        per_entry[name] = min(took) / size
    assert per_entry["chat"] < 3 * per_entry["small"], per_entry


async def test_large_entries_are_loaded_whole_and_in_order(toolkit, nc, namespace):
    """More than a page by bytes (4 MiB), and more than one entry near the server's limit."""
    order = random.Random(3)
    bodies = [say(f"{n} " + "x" * order.choice([10, 1000, 300_000, 900_000])) for n in range(60)]
    await fill(nc, namespace, "chat", bodies)
    assert (await toolkit.sessions.open("acme", "chat").load()).messages == bodies


async def test_a_bucket_without_direct_gets(server, nc, namespace, bucket):
    async with toolkit_of(server.url, namespace):
        pass
    js = nc.jetstream()
    config = (await js.stream_info(stream_of(namespace))).config
    config.allow_direct = False
    await js.update_stream(config)
    async with toolkit_of(server.url, namespace) as toolkit:
        log = toolkit.sessions.open("acme", "chat")
        for n in range(20):
            await log.append(say(f"{n}"))
        assert (await toolkit.sessions.open("acme", "chat").load()).messages == [say(f"{n}") for n in range(20)]


# ---------------------------------------------------------------- two writers


async def test_a_writer_that_has_missed_something_is_told_exactly_what(log, again, nc, namespace):
    await log.append(say("0"))
    await again.load()
    missed = [await log.append(say(text)) for text in "123"]
    before = await last_seqs(nc, namespace)
    with pytest.raises(SessionConflict) as caught:
        await again.append(say("mine"))
    assert [(each.id, each.seq, each.body) for each in caught.value.missed] == [
        (each.id, each.seq, each.body) for each in missed
    ]
    assert await last_seqs(nc, namespace) == before
    # What was missed is known now, and the next append goes behind it.
    entry = await again.append(say("mine"))
    assert entry.parent_id == missed[-1].id
    assert (await log.load()).messages == [say(text) for text in ("0", "1", "2", "3", "mine")]


async def test_a_first_entry_is_fought_for_too(log, again):
    await again.load()
    first = await log.append(say("mine"))
    with pytest.raises(SessionConflict) as caught:
        await again.append(say("mine"))
    assert [entry.id for entry in caught.value.missed] == [first.id]


@pytest.mark.parametrize("verb", ["suspend", "resume", "compact", "marker", "branch"])
async def test_every_verb_is_fenced(desk, other, verb):
    desk = desk()
    start = await desk.hears()
    await desk.asks(("t1", "send", ARGS), ("t2", "send", {}))
    if verb == "resume":
        await desk.log.suspend(["t1"])
    if verb in ("marker", "compact"):
        await desk.wakes("send")
    far = desk.at(other).log
    await far.load()
    await desk.hears("in between")
    with pytest.raises(SessionConflict) as caught:
        match verb:
            case "suspend":
                await far.suspend(["t1"])
            case "resume":
                await far.resume(["t1"])
            case "compact":
                await far.compact(say("so far"))
            case "marker":
                await append_interruption_marker(far, tool_use_in_flight=False)
            case "branch":
                await far.branch(start.id)
                await far.append(say("aside"))
    assert len(caught.value.missed) == 1
    assert [entry["kind"] for entry in await desk.entries()][-1] == "message"


async def test_writers_that_race_lose_nothing_and_repeat_nothing(toolkit, other, nc, namespace):
    """Each appends 30 messages, again where it is refused; together they make one chain."""
    refused = 0

    async def writes(log, name):
        nonlocal refused
        seen = 0
        for n in range(30):
            while True:
                known = (log.store.last_seq, len(log.store.entries))
                try:
                    entry = await log.append(say(f"{name} {n}"))
                except SessionConflict as conflict:
                    refused += 1
                    missed = conflict.missed
                else:
                    missed = None
                if missed is not None:
                    assert missed
                    assert missed[0].seq > known[0]
                    assert len(missed) == len(log.store.entries) - known[1]
                    continue
                assert entry.seq > seen
                seen = entry.seq
                break

    logs = [each.sessions.open("acme", "chat") for each in (toolkit, other, other)]
    for log in logs:
        await log.load()
    await asyncio.gather(*(writes(log, name) for log, name in zip(logs, "abc", strict=True)))
    assert refused >= 2
    entries = await entries_on_server(nc, namespace)
    assert sorted(entry["body"]["content"] for entry in entries) == sorted(f"{x} {n}" for x in "abc" for n in range(30))
    for before, entry in zip([None, *entries], entries, strict=False):
        assert entry["parentId"] == (before["id"] if before else None)
    for name in "abc":
        mine = [entry["body"]["content"] for entry in entries if entry["body"]["content"].startswith(name)]
        assert mine == [f"{name} {n}" for n in range(30)]
    for log in logs:
        assert [entry.id for entry in (await log.load()).entries] == [entry["id"] for entry in entries]


# ---------------------------------------------------------------- an id that the host gives


async def test_a_message_with_a_name_is_put_in_once(log, again, nc, namespace):
    first = await log.append(say("job"), entry_id="job-17")
    assert first.id == "job-17"
    for each in (log, again):
        before = await last_seqs(nc, namespace)
        assert (await each.append(say("job"), entry_id="job-17")).seq == first.seq
        assert await last_seqs(nc, namespace) == before
        with pytest.raises(InvalidSetting, match="job-17"):
            await each.append(say("another"), entry_id="job-17")
    await log.append(say("more"))
    assert (await again.append(say("job"), entry_id="job-17")).seq == first.seq
    assert len(await entries_on_server(nc, namespace)) == 2


@pytest.mark.parametrize("bad", ["", 7, "a\nb", b"x"])
async def test_an_id_that_cannot_be(log, nc, namespace, bad):
    with pytest.raises(InvalidName):
        await log.append(say("job"), entry_id=bad)
    assert await entries_on_server(nc, namespace) == []


@pytest.mark.parametrize("same", [True, False])
async def test_two_writers_of_one_name(toolkit, other, nc, namespace, same):
    """Both find nothing, one is refused: it gets what stands there, if that is what it wanted to say."""
    for turn in range(10):
        logs = [each.sessions.open("acme", f"chat-{turn}") for each in (toolkit, other)]
        for log in logs:
            await log.load()
        texts = ["a", "a" if same else "b"]
        got = await asyncio.gather(
            *(log.append(say(text), entry_id="job-17") for log, text in zip(logs, texts, strict=True)),
            return_exceptions=True,
        )
        (stored,) = await entries_on_server(nc, namespace, f"chat-{turn}")
        entries = [each for each in got if not isinstance(each, Exception)]
        assert len(entries) == (2 if same else 1)
        for entry in entries:
            assert (entry.id, entry.seq, entry.body) == (stored["id"], stored["seq"], stored["body"])
        assert all(isinstance(each, InvalidSetting | SessionConflict) for each in got if isinstance(each, Exception))


# ---------------------------------------------------------------- lost answers


async def test_appends_whose_answers_are_lost(toolkit, server, nc, namespace):
    """Each is there once. All at once: most of them wait two seconds for an answer."""

    @contextlib.asynccontextmanager
    async def far_log(name):
        async with FaultProxy("127.0.0.1", urlsplit(server.url).port) as proxy, toolkit_of(proxy.url, namespace) as far:
            yield proxy, far.sessions.open("acme", name)

    async def lost(fault, nth):
        name = f"{fault}-{nth}"
        async with far_log(name) as (proxy, log):
            getattr(proxy, fault)(subject_of(namespace, name), nth=nth)
            for n in range(3):
                await log.append(say(f"{n}"))
        entries = await entries_on_server(nc, namespace, name)
        assert [entry["body"]["content"] for entry in entries] == ["0", "1", "2"]
        assert [entry["parentId"] for entry in entries] == [None, *(entry["id"] for entry in entries[:-1])]

    async def overtaken():
        """It never got through, and somebody else wrote: a conflict, and it is not there."""
        async with far_log("chat") as (proxy, mine):
            await mine.load()
            ghost = proxy.delay(subject_of(namespace))
            appending = asyncio.create_task(mine.append(say("mine")))
            await ghost.hit()
            theirs = await toolkit.sessions.open("acme", "chat").append(say("theirs"))
            with pytest.raises(SessionConflict) as caught:
                await appending
            assert [entry.id for entry in caught.value.missed] == [theirs.id]
            assert b"10071" in (await ghost.release()).payload
        assert [entry["id"] for entry in await entries_on_server(nc, namespace)] == [theirs.id]

    async with asyncio.TaskGroup() as group:
        group.create_task(overtaken())
        for fault in ("drop_answer", "cut_after_store", "drop", "duplicate"):
            for nth in (1, 2):
                group.create_task(lost(fault, nth))


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("then", ["the same", "loads", "another", "wakes", "the same, overtaken"])
async def test_an_append_that_the_host_gave_up(proxy, nc, namespace, log, landed, then):
    """Cancelled over a silent connection, and made again with the same log: it is there once."""
    async with toolkit_of(proxy.url, namespace) as far:
        mine = far.sessions.open("acme", "chat")
        await mine.append(say("0"))
        sent = (proxy.drop_answer if landed else proxy.drop)(subject_of(namespace))
        appending = asyncio.create_task(mine.append(say("1")))
        await (sent.answered() if landed else sent.hit())
        appending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await appending
        overtaken = then == "the same, overtaken"
        if overtaken:
            await log.load()
            await log.append(say("theirs"))
        if then == "loads":
            there = len((await mine.load()).messages) == 2
            assert there == landed
            if not there:
                await mine.append(say("1"))
        elif then == "wakes":
            await mine.wake()
            await mine.context()
            await mine.append(say("1"))
        elif then == "another":
            if landed:
                with pytest.raises(SessionConflict) as caught:
                    await mine.append(say("2"))
                assert [entry.body for entry in caught.value.missed] == [say("1")]
            await mine.append(say("2"))
        elif overtaken and not landed:
            with pytest.raises(SessionConflict):
                await mine.append(say("1"))
            await mine.append(say("1"))
        else:
            entry = await mine.append(say("1"))
            assert entry.body == say("1")
        if overtaken and landed:
            with pytest.raises(SessionConflict) as caught:
                await mine.append(say("2"))
            assert [entry.body for entry in caught.value.missed] == [say("theirs")]
    texts = [entry["body"]["content"] for entry in await entries_on_server(nc, namespace)]
    assert texts == {
        "another": ["0", "1", "2"] if landed else ["0", "2"],
        "the same, overtaken": ["0", "1", "theirs"] if landed else ["0", "theirs", "1"],
    }.get(then, ["0", "1"])


async def test_the_same_message_twice_is_twice(log, nc, namespace):
    await log.append(say("ok"))
    await log.append(say("ok"))
    assert len(await entries_on_server(nc, namespace)) == 2


async def test_an_append_cancelled_at_every_await(toolkit, other, nc, namespace):
    for loaded in (False, True):
        at = 0
        came = True
        while came:
            at += 1
            name = f"chat-{loaded}-{at}"
            log = toolkit.sessions.open("acme", name)
            if loaded:
                await log.append(say("0"))
            came = await cancelled_at(at, log.append(say("1")))
            if came:
                entry = await log.append(say("1"))  # made again: there once
                assert entry.body == say("1")
            await log.append(say("2"))
            texts = [entry["body"]["content"] for entry in await entries_on_server(nc, namespace, name)]
            assert texts == ["0", "1", "2"][not loaded :], (at, texts)
            assert (await other.sessions.open("acme", name).load()).messages == [say(text) for text in texts]
        assert at >= 2


async def test_a_wake_cancelled_at_every_await(toolkit, other, nc, namespace):
    at, came = 0, True
    while came:
        at += 1
        desk = Desk(toolkit, nc, namespace, "anthropic", f"chat-{at}")
        args = [{"at": at, "n": n} for n in range(3)]
        await desk.hears()
        await desk.asks(*((f"t{n}", "send", args[n]) for n in range(3)))
        await desk.stands("send", args[1], "completed")
        await desk.stands("send", args[2], "running", leaseMs=1)
        came = await cancelled_at(at, desk.wakes("send"))
        again = desk if at % 2 else desk.at(other)
        await again.wakes("send")
        found = dict(await again.context())
        assert "never started" in found["t0"]
        assert found["t1"] == "theirs"
        assert "refused" in found["t2"]
        answers = [entry for entry in await desk.entries() if entry.get("receipt")]
        assert [entry["receipt"]["toolCallId"] for entry in answers] == ["t0", "t1", "t2"]
    assert at > 5


async def test_a_silent_server_is_told_as_that(server, nc, namespace, own_server):
    """Restarted in the middle of many appends: each is there once, and in order."""
    async with toolkit_of(own_server.url, namespace, reconnect_time_wait=0.05) as toolkit:
        log = toolkit.sessions.open("acme", "chat")

        async def appends():
            for n in range(120):
                while True:
                    try:
                        await log.append(say(f"{n}"))
                        break
                    except Unreachable:
                        continue
                if n == 30:
                    half.set()

        half = asyncio.Event()
        writing = asyncio.create_task(appends())
        await half.wait()
        await own_server.kill()
        await own_server.restart()
        await writing
        assert (await log.load()).messages == [say(f"{n}") for n in range(120)]
    async with client_of(own_server.url) as client:
        texts = [entry["body"]["content"] for entry in await entries_on_server(client, namespace)]
        assert texts == [f"{n}" for n in range(120)]


# ---------------------------------------------------------------- refused before anything is written

BAD = {
    "an object": {"role": "user", "content": object()},
    "a set": {"role": "user", "content": {1}},
    "a tuple": {"role": "user", "content": ("a",)},
    "bytes": {"role": "user", "content": b"a"},
    "a datetime": {"role": "user", "content": "x", "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)},
    "a decimal": {"role": "user", "content": decimal.Decimal(1)},
    "NaN": {"role": "user", "content": "x", "n": float("nan")},
    "infinity": {"role": "user", "content": "x", "n": float("inf")},
    "a key that is no text": {"role": "user", "content": "x", 1: 2},
    "a lone surrogate": {"role": "user", "content": "\ud800"},
    "no dict": ["role", "user"],
    "nothing": None,
    "a text": "hi",
    "no role": {"content": "hi"},
    "another role": {"role": "wizard", "content": "hi"},
    "a call without an id": {"role": "assistant", "content": [{"type": "toolCall", "name": "t", "arguments": {}}]},
    "a message of another dialect": {"kind": "request", "parts": []},
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_message_is_refused(log, again, nc, namespace, name):
    await log.append(say("0"))
    before = await last_seqs(nc, namespace)
    with pytest.raises(InvalidTranscript):
        await log.append(BAD[name])
    assert await last_seqs(nc, namespace) == before
    await log.append(say("1"))
    assert (await again.load()).messages == [say("0"), say("1")]


@pytest.mark.parametrize("verb", ["append", "compact"])
async def test_depth_has_an_end_before_it_is_written(toolkit, other, nc, namespace, verb):
    """What is accepted can be read again: a log that nobody can load is lost."""
    for depth in [*range(185, 206), 1000, 100_000]:
        message = say(_nested(depth))
        log = toolkit.sessions.open("acme", f"chat-{depth}")
        await log.append(say("0"))
        try:
            await (log.append(message) if verb == "append" else log.compact(message))
        except InvalidTranscript:
            assert depth > 64
        (entry, *_) = reversed((await other.sessions.open("acme", f"chat-{depth}").load()).entries)
        assert entry.message in (message, say("0"))


def _nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


async def test_what_is_too_large_is_refused_and_the_connection_lives(log, again, toolkit, nc, namespace):
    limit = nc.max_payload
    await log.append(say("0"))
    stored = 1
    for size in (limit - 4000, limit - 900, limit - 700, limit - 600, limit - 500, limit - 100, limit, limit * 3):
        before = await last_seqs(nc, namespace)
        refused = ""
        try:
            await log.append(say("x" * size))
            stored += 1
        except InvalidSetting as error:
            refused = str(error)
        if refused:
            assert "nothing was appended" in refused
            assert size > limit - 4000
            assert await last_seqs(nc, namespace) == before
    await log.append(say("1"))
    assert len((await again.load()).messages) == stored + 1
    assert await toolkit.run("acme", "r").execute("t", {}, _done) == "done"


async def _done():
    return "done"


async def test_runs_that_cannot_be(log, nc, namespace, toolkit):
    for bad in ("", "\ud800"):
        with pytest.raises(InvalidName):
            await log.append(say("x"), run=bad)
    with pytest.raises(InvalidSetting, match="tenant"):
        await log.append(say("x"), run=toolkit.run("other", "run-1"))
    assert await entries_on_server(nc, namespace) == []


# ---------------------------------------------------------------- what somebody else wrote

FOREIGN = {
    "no JSON": (b"{no", CorruptRecord),
    "nothing": (b"", CorruptRecord),
    "a list": (b"[]", CorruptRecord),
    "a newer version": (json.dumps({"v": 2, "kind": "dream"}).encode(), UnsupportedRecord),
    "no id": ({"id": ""}, CorruptRecord),
    "another kind": ({"kind": "dream"}, CorruptRecord),
    "no body": ({"body": None}, CorruptRecord),
    "a suspend of nothing": ({"kind": "suspend"}, CorruptRecord),
    "a compaction without a message": ({"kind": "compaction"}, CorruptRecord),
    "another error kind": ({"close": {"toolCallId": "t", "errorKind": "gone"}}, CorruptRecord),
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_an_entry_that_cannot_be_read(log, again, nc, namespace, name):
    value, error = FOREIGN[name]
    await log.append(say("0"))
    seq = await put_entry(
        nc, namespace, **({"body": say("x")} | (value if isinstance(value, dict) else {"body": value}))
    )
    await put_entry(nc, namespace, say("behind it"))
    before = await last_seqs(nc, namespace)
    for each in (log, again):
        verbs = (each.load, each.context, each.wake, lambda each=each: each.append(say("1")))
        for verb in verbs:
            with pytest.raises(error) as caught:
                await verb()
            assert (caught.value.bucket, caught.value.revision) == (stream_of(namespace), seq)
    assert await last_seqs(nc, namespace) == before


async def test_unknown_fields_are_ignored(log, nc, namespace):
    await put_entry(nc, namespace, say("0"), mood="good", close=None)
    await put_entry(nc, namespace, say("1"), id="b", parentId="0" * 24, receipt=None)
    assert (await log.load()).messages == [say("0"), say("1")]
    await log.append(say("2"))


async def test_a_message_that_is_none_of_its_dialect(log, nc, namespace):
    await put_entry(nc, namespace, {"role": "wizard"})
    with pytest.raises(NatsReceiptsError):
        await log.context()
    with pytest.raises(NatsReceiptsError):
        await log.wake()


async def test_parents_that_go_in_a_circle(log, nc, namespace):
    await put_entry(nc, namespace, say("0"), id="a", parentId="b")
    await put_entry(nc, namespace, say("1"), id="b", parentId="a")
    with pytest.raises(CorruptRecord, match="parent"):
        await log.load()


async def test_an_entry_of_a_parent_that_is_not_kept(log, nc, namespace):
    await put_entry(nc, namespace, say("1"), id="b", parentId="gone")
    assert (await log.load()).messages == [say("1")]
    assert (await log.append(say("2"))).parent_id == "b"


# ---------------------------------------------------------------- a stream that is another, or loses its head


@pytest.mark.parametrize("known", ["a log that knew it", "a log that is new"])
async def test_a_stream_that_was_replaced(toolkit, nc, namespace, log, known):
    await log.append(say("0"))
    await log.append(say("1"))
    js = nc.jetstream()
    config = (await js.stream_info(stream_of(namespace))).config
    await js.delete_stream(stream_of(namespace))
    await js.add_stream(config)
    if known == "a log that is new":
        log = toolkit.sessions.open("acme", "other")
        with pytest.raises(BucketReplaced):
            await log.append(say("2"))
    for verb in (log.load, log.context, log.wake, lambda: log.append(say("2"))):
        with pytest.raises(BucketReplaced) as caught:
            await verb()
        assert stream_of(namespace) in str(caught.value)
    assert await entries_on_server(nc, namespace) == []


async def test_no_stream_of_sessions(server, nc, namespace, toolkit):
    await nc.jetstream().delete_stream(stream_of(namespace))
    with pytest.raises(NotProvisioned, match="SESSIONS"):
        async with toolkit_of(server.url, namespace, provision=False):
            pass


@pytest.fixture
async def forgetful(server, namespace, nc, bucket):
    """Two toolkits, on a stream that can be made to forget, as it does when entries expire."""
    config = StreamConfig(name=stream_of(namespace), subjects=[f"{namespace}-sessions.>"], allow_direct=True)
    await nc.jetstream().add_stream(config)
    async with toolkit_of(server.url, namespace) as one, toolkit_of(server.url, namespace) as two:
        yield one, two


async def test_a_log_whose_head_has_expired(forgetful, nc, namespace):
    one, two = forgetful
    desk = Desk(one, nc, namespace, "anthropic", "chat")
    first = await desk.hears()
    called = await desk.asks(("t1", "send", ARGS), ("t2", "look", {}))
    await desk.gets("t1")
    await desk.hears("go on")
    for entry in (first, called):
        await nc.jetstream().delete_msg(stream_of(namespace), entry.seq)
    late = desk.at(two)
    loaded = await late.log.load()
    assert loaded.entries[0].parent_id == called.id
    assert len(loaded.messages) == 2
    assert await late.context() == []  # a result without its call is left out
    assert (await late.wakes("send", "look")).recovered == ()
    # The log that has it all still closes what it knows, of which nothing can be proved any more.
    await late.hears("more")
    with pytest.raises(SessionConflict):
        await desk.hears("more still")
    await desk.hears("more still")
    (recovered,) = (await desk.wakes("send", "look")).recovered
    assert (recovered.tool_call_id, recovered.error_kind) == ("t2", UNKNOWN)
    await desk.context()
    await late.context()


@pytest.mark.parametrize("verb", ["append", "wake", "load"])
async def test_a_log_whose_session_has_expired_goes_on(forgetful, nc, namespace, verb):
    one, two = forgetful
    desk = Desk(one, nc, namespace, "neutral", "chat")
    await desk.hears()
    await desk.asks(("t1", "send", ARGS))
    await nc.jetstream().purge_stream(stream_of(namespace))
    if verb == "append":
        await desk.hears("again")
    elif verb == "load":
        await desk.log.load()
        await desk.hears("again")
    else:
        (recovered,) = (await desk.wakes("send")).recovered
        assert recovered.error_kind == UNKNOWN
    await desk.at(two).hears("and others")
    RULES["neutral"]((await desk.log.context()).messages)
    assert len(await desk.entries()) == 2


# ---------------------------------------------------------------- branches


async def test_branches(log, again):
    first = await log.append(say("0"))
    await log.append(say("a1"))
    last = await log.append(say("a2"))
    await log.branch(first)
    assert (await log.load()).messages == [say("0")]
    assert (await again.load()).messages == [say("0"), say("a1"), say("a2")]  # nothing is written by that
    other = await log.append(say("b1"))
    assert other.parent_id == first.id
    for each in (log, again):
        loaded = await each.load()
        assert loaded.messages == [say("0"), say("b1")]
        assert [entry.body["content"] for entry in loaded.all_entries] == ["0", "a1", "a2", "b1"]
        assert loaded.last_seq == other.seq
    await again.branch(last.id)
    await again.append(say("a3"))
    assert (await log.load()).messages == [say("0"), say("a1"), say("a2"), say("a3")]
    await log.branch(None)
    anew = await log.append(say("c"))
    assert anew.parent_id is None
    assert (await again.load()).messages == [say("c")]
    for unknown in ("gone", ""):
        with pytest.raises(InvalidName):
            await log.branch(unknown)
    await log.append(say("c2"))
    assert (await again.load()).messages == [say("c"), say("c2")]


async def test_a_branch_survives_a_conflict(log, again):
    first = await log.append(say("0"))
    await log.append(say("1"))
    await again.load()
    await again.branch(first)
    await log.append(say("2"))
    with pytest.raises(SessionConflict):
        await again.append(say("aside"))
    assert (await again.append(say("aside"))).parent_id == first.id


async def test_wake_closes_the_active_branch(desk, other):
    desk = desk("anthropic")
    start = await desk.hears()
    await desk.asks(("t1", "send", {"n": 1}))
    await desk.log.branch(start)
    await desk.asks(("t2", "send", {"n": 2}))
    far = desk.at(other)
    (recovered,) = (await far.wakes("send")).recovered
    assert recovered.tool_call_id == "t2"
    assert [call_id for call_id, _ in await far.context()] == ["t2"]


# ---------------------------------------------------------------- on hold


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_suspend_and_resume(desk, other, dialect):
    desk = desk(dialect)
    await desk.hears()
    await desk.asks(("t1", "send", {"n": 1}), ("t2", "send", {"n": 2}))
    held = await desk.log.suspend(["t1", "t2", "t1"])
    assert (held.kind, held.tool_call_ids, held.run, held.message) == ("suspend", ("t1", "t2"), "run-1", None)
    for each in (desk.log, desk.at(other).log):
        assert (await each.load()).suspended == {"t1", "t2"}
        view = await each.context()
        RULES[dialect](view.messages)
        assert [call.tool_call_id for call in view.suspended] == ["t1", "t2"]
        assert view.closed == ()
    far = desk.at(other)
    resumed = await far.log.resume(["t1"])
    assert (resumed.kind, resumed.tool_call_ids, resumed.run) == ("resume", ("t1",), "run-1")
    assert (await far.log.load()).suspended == {"t2"}
    await far.gets("t1")
    assert (await far.wakes("send")).recovered == ()
    await far.log.resume(["t2"])
    assert [each.tool_call_id for each in (await far.wakes("send")).recovered] == ["t2"]
    await far.context()
    assert [entry["kind"] for entry in await desk.entries()].count("suspend") == 1


async def test_what_cannot_be_suspended_or_resumed(desk):
    desk = desk()
    await desk.asks(("t1", "send", {"n": 1}), ("t2", "send", {"n": 2}))
    await desk.gets("t1")
    async with desk.quiet():
        for ids in (["t1"], ["t7"], ["t2", "t7"]):
            with pytest.raises(InvalidName):
                await desk.log.suspend(ids)
        for ids in (["t2"], ["t7"]):
            with pytest.raises(InvalidName):
                await desk.log.resume(ids)
        for bad in ("t2", [], [7], {"t2": 1, 3: 4}):
            with pytest.raises(InvalidSetting):
                await desk.log.suspend(bad)
    await desk.log.suspend({"t2"})
    await desk.log.suspend(["t2"])
    await desk.log.resume(iter_once(["t2"]))
    async with desk.quiet():
        with pytest.raises(InvalidName):
            await desk.log.resume(["t2"])


def iter_once(ids):
    return tuple(ids)


async def test_calls_of_two_runs_are_suspended_apart(desk):
    desk = desk("openai-responses")
    await desk.asks(("t1", "send", {"n": 1}), run="run-1")
    await desk.asks(("t2", "send", {"n": 2}), run="run-2")
    async with desk.quiet():
        with pytest.raises(InvalidSetting, match="several runs"):
            await desk.log.suspend(["t1", "t2"])
    await desk.log.suspend(["t1"])
    assert (await desk.log.suspend(["t2"])).run == "run-2"


async def test_an_id_on_hold_that_is_called_again(desk):
    """Nobody could decide on the first call any more: refused until somebody has."""
    desk = desk()
    await desk.asks(("call_0", "send", {"n": 1}))
    await desk.log.suspend(["call_0"])
    await desk.hears("never mind")
    with pytest.raises(InvalidSetting, match="on hold"):
        await desk.asks(("call_0", "send", {"n": 2}))
    await desk.gets("call_0", "Ann says no.")
    second = await desk.asks(("call_0", "send", {"n": 2}))
    assert (await desk.log.entry_of("call_0")).id == second.id


async def test_an_id_that_was_resumed_and_is_called_again(desk):
    desk = desk()
    await desk.asks(("call_0", "send", {"n": 1}))
    await desk.log.suspend(["call_0"])
    resumed = await desk.log.resume(["call_0"])
    assert (await desk.log.entry_of("call_0")).id == resumed.id
    await desk.gets("call_0")
    again = await desk.asks(("call_0", "send", {"n": 2}))
    assert (await desk.log.entry_of("call_0")).id == again.id


async def test_a_hold_of_another_branch(desk):
    desk = desk()
    await desk.hears()
    called = await desk.asks(("t1", "send", ARGS))
    await desk.log.suspend(["t1"])
    await desk.log.branch(called)
    await desk.log.load()
    assert (await desk.log.load()).suspended == frozenset()
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.tool_call_id == "t1"


# ---------------------------------------------------------------- compaction


def summary(dialect, text="text-summary"):
    return shaped([user(text)], dialect)[0]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_compaction_stands_for_what_was_before(desk, other, dialect):
    desk = desk(dialect)
    await desk.hears("text-0")
    await desk.asks(("t1", "send", ARGS))
    await desk.gets("t1")
    kept = await desk.hears("text-1")
    await desk.asks(("t2", "send", {}))
    await desk.gets("t2")
    entry = await desk.log.compact(summary(dialect), keep_from=kept)
    assert (entry.kind, entry.message) == ("compaction", summary(dialect))
    await desk.hears("text-2")
    for each in (desk, desk.at(other)):
        assert [call_id for call_id, _ in await each.context()] == ["t2"]
        assert _texts(await each.log.context()) == ["text-summary", "text-1", "text-2"]
        loaded = await each.log.load()
        assert [found for found in _flat(loaded.messages) if found.startswith("text-")] == [
            "text-0",
            "text-1",
            "text-2",
        ]
    await desk.log.compact(summary(dialect, "text-all"))
    await desk.hears("text-3")
    for each in (desk, desk.at(other)):
        assert await each.context() == []
        assert _texts(await each.log.context()) == ["text-all", "text-3"]


def _texts(view):
    return [found for found in _flat(view.messages) if found.startswith("text-")]


def _flat(value):
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [found for item in items for found in _flat(item)]


@pytest.mark.parametrize("held", [False, True])
async def test_a_call_without_a_result_is_not_summed_up(desk, held):
    desk = desk("anthropic")
    await desk.hears()
    await desk.asks(("t1", "send", {"n": 1}), ("t2", "send", {"n": 2}))
    first = await desk.gets("t1")
    if held:
        await desk.log.suspend(["t2"])
    later = await desk.hears("go on")
    async with desk.quiet():
        for keep_from in (None, first, later.id):
            with pytest.raises(InvalidSetting, match="have no result"):
                await desk.log.compact(summary("anthropic"), keep_from=keep_from)
        with pytest.raises(InvalidName):
            await desk.log.compact(summary("anthropic"), keep_from="gone")
        with pytest.raises(InvalidSetting, match="cannot call"):
            await desk.log.compact(assistant("anthropic", ("t9", "send", ARGS))[0])
    if held:
        await desk.log.resume(["t2"])
    await desk.wakes("send")
    await desk.log.compact(summary("anthropic"))
    assert await desk.context() == []


async def test_open_calls_that_are_kept_stay_open(desk, other):
    desk = desk()
    await desk.hears("text-0")
    kept = await desk.asks(("t1", "send", {"n": 1}), ("t2", "send", {"n": 2}))
    await desk.log.suspend(["t2"])
    await desk.log.compact(summary("neutral"), keep_from=kept)
    for each in (desk, desk.at(other)):
        assert (await each.log.load()).suspended == {"t2"}
        assert (await each.log.entry_of("t1")).id == kept.id
    (recovered,) = (await desk.at(other).wakes("send")).recovered
    assert recovered.tool_call_id == "t1"
    await desk.log.load()
    assert [call_id for call_id, _ in await desk.context()] == ["t1", "t2"]


@pytest.mark.parametrize(
    "keep",
    [
        "the first compaction",
        "a message that it kept",
        "a message after it",
    ],
)
async def test_a_second_compaction(desk, other, keep):
    """Whatever it keeps is what was shown from there on: no call that is open is lost, nothing is shown twice."""
    desk = desk()
    await desk.hears("text-0")
    kept = await desk.hears("text-1")
    called = await desk.asks(("t1", "send", {"n": 1}))
    first = await desk.log.compact(summary("neutral", "text-first"), keep_from=kept)
    after = await desk.hears("text-2")
    keep_from = {"the first compaction": first, "a message that it kept": kept, "a message after it": after}[keep]
    open_calls = keep != "a message after it"
    shown = {"the first compaction": ["text-first", "text-1"], "a message that it kept": ["text-1"]}.get(keep, [])
    try:
        await desk.log.compact(summary("neutral", "text-second"), keep_from=keep_from)
    except InvalidSetting:
        assert not open_calls or keep == "the first compaction"
        return
    except InvalidName:
        assert keep == "the first compaction"
        return
    assert open_calls
    for each in (desk, desk.at(other)):
        view = await each.log.context()
        assert _texts(view) == ["text-second", *shown, "text-2"]
    (recovered,) = (await desk.at(other).wakes("send")).recovered
    assert recovered.tool_call_id == "t1"
    assert called.seq < first.seq


async def test_a_branch_from_before_a_compaction(desk):
    desk = desk()
    first = await desk.hears("text-0")
    await desk.hears("text-1")
    await desk.log.compact(summary("neutral"))
    await desk.log.branch(first)
    await desk.hears("text-2")
    assert _texts(await desk.log.context()) == ["text-0", "text-2"]


# ---------------------------------------------------------------- reconcile and interrupt


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_reconcile_closes_by_the_log_alone(desk, other, dialect):
    desk = desk(dialect)
    await desk.hears()
    ids = [("t1", "send", {}), ("t2", "look", {}), ("t3", "put", {}), ("t4", "other", {})]
    await desk.asks(*ids)
    await desk.stands("send", {}, "completed")  # nobody asks it
    await desk.log.suspend(["t4"])
    receipts = (await last_seqs(desk.nc, desk.namespace))[0]
    report = await reconcile_interrupted_session(desk.log, {"look": "read", "put": "idempotent"})
    assert (await last_seqs(desk.nc, desk.namespace))[0] == receipts
    assert [(each.tool_call_id, each.tool_name) for each in report.recovered] == [(i, n) for i, n, _ in ids[:3]]
    assert {each.error_kind for each in report.recovered} == {UNKNOWN}
    words = ["first look", "only reads", "same state"]
    assert all(word in each.text for word, each in zip(words, report.recovered, strict=True))
    entries = (await desk.entries())[-3:]
    assert [each.entry_id for each in report.recovered] == [entry["id"] for entry in entries]
    assert [entry["close"] for entry in entries] == [{"toolCallId": f"t{n}", "errorKind": UNKNOWN} for n in (1, 2, 3)]
    assert report.last_seq == entries[-1]["seq"]
    for each in (desk, desk.at(other)):
        async with desk.quiet():
            assert (await reconcile_interrupted_session(each.log)).recovered == ()
            assert (await each.wakes("send")).recovered == ()
    assert [call_id for call_id, _ in await desk.context()] == ["t1", "t2", "t3", "t4"]


async def test_reconcile_with_what_the_live_caller_saw(desk):
    desk = desk()
    await desk.asks(("t1", "send", {}), ("t2", "send", {"n": 2}), ("t3", "send", {"n": 3}))
    report = await reconcile_interrupted_session(desk.log, suspended={"t3"}, started={"t1"})
    assert [(each.tool_call_id, each.error_kind) for each in report.recovered] == [("t1", UNKNOWN), ("t2", NEVER)]
    for bad in ({"suspended": "t3"}, {"started": "t3"}):
        with pytest.raises(InvalidSetting):
            await reconcile_interrupted_session(desk.log, **bad)


async def test_two_reconcilers(desk, other):
    for turn in range(10):
        mine = desk(session=f"chat-{turn}")
        await mine.asks(*((f"t{n}", "send", {"n": n}) for n in range(4)))
        reports = await asyncio.gather(
            *(reconcile_interrupted_session(each.log) for each in (mine, mine.at(other), mine.at(other)))
        )
        told = [each.tool_call_id for report in reports for each in report.recovered]
        assert sorted(told) == ["t0", "t1", "t2", "t3"]
        assert len(await mine.entries()) == 5


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("in_flight", [True, False])
async def test_a_person_who_stops_the_run(desk, dialect, in_flight):
    desk = desk(dialect)
    await desk.hears()
    if in_flight:
        await desk.asks(("t1", "send", ARGS))
        async with desk.quiet():
            with pytest.raises(InvalidSetting, match="t1"):
                await append_interruption_marker(desk.log, tool_use_in_flight=True)
    report = await desk.log.interrupt(tool_use_in_flight=in_flight, started=())
    assert [each.error_kind for each in report.recovered] == [NEVER] * in_flight
    last = (await desk.entries())[-1]
    assert (last["id"], last["kind"], last["seq"]) == (report.marker_id, "marker", report.last_seq)
    marker = "[Request interrupted by user for tool use]" if in_flight else "[Request interrupted by user]"
    assert marker in _flat((await desk.log.context()).messages)
    await desk.context()
    await desk.hears("go on")
    await desk.context()


async def test_an_interruption_over_a_call_on_hold(desk):
    desk = desk("anthropic")
    await desk.asks(("t1", "send", ARGS), ("t2", "send", {}))
    await desk.log.suspend(["t1"])
    report = await desk.log.interrupt(tool_use_in_flight=True)
    assert [each.tool_call_id for each in report.recovered] == ["t2"]
    view = await desk.log.context()
    RULES["anthropic"](view.messages)
    assert [each.tool_call_id for each in view.suspended] == ["t1"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_results_through_the_log(desk, other, dialect):
    desk = desk(dialect)
    await desk.asks(("t1", "send", ARGS), ("t2", "look", {}))
    await desk.log.append_result("t1", {"id": 7})
    await desk.log.append_result("t2", "no such user", is_error=True)
    found = dict(await desk.at(other).context())
    assert found["t1"] in ('{"id":7}', {"id": 7})
    assert found["t2"] == "no such user"
    async with desk.quiet():
        with pytest.raises(InvalidName):
            await desk.log.append_result("t3", "x")
        assert (await desk.wakes("send", "look")).recovered == ()


# ---------------------------------------------------------------- permissions

USERS = {
    "all": "",
    "no_sessions": ', permissions: { publish: { deny: ["ns-sessions.>"] } }',
    "others_sessions": ', permissions: { publish: { deny: ["ns-sessions.acme.>"] } }',
    "no_receipts": ', permissions: { publish: { deny: ["$KV.ns-receipts.>"] } }',
    "no_reads": ', permissions: { publish: { deny: ["$JS.API.DIRECT.GET.ns-SESSIONS"] } }',
}
_USERS = ", ".join(f"{{ user: {name}, password: pw{allowed} }}" for name, allowed in USERS.items())
CONFIG = f"""
accounts {{
  A {{ jetstream: enabled, users: [ {_USERS} ] }}
  SYS {{ users: [ {{ user: sys, password: pw }} ] }}
}}
system_account: SYS
"""


async def test_what_a_user_may_not_do():
    async with embedded(config=CONFIG) as server, contextlib.AsyncExitStack() as stack:
        toolkits = {}
        for name in USERS:
            toolkits[name] = await stack.enter_async_context(
                toolkit_of(server.url, "ns", user=name, password="pw", provision=name == "all")
            )
        nc = await stack.enter_async_context(client_of(server.url, user="all", password="pw"))
        desk = Desk(toolkits["all"], nc, "ns", "neutral", "chat")
        await desk.asks(("t1", "send", ARGS))
        async with desk.quiet(), asyncio.timeout(20):
            for name in ("no_sessions", "others_sessions"):
                with pytest.raises(PermissionDenied, match="sessions"):
                    await desk.at(toolkits[name]).hears()
            with pytest.raises(PermissionDenied, match="receipts"):
                await desk.at(toolkits["no_receipts"]).wakes("send")
            with pytest.raises(PermissionDenied):
                await desk.at(toolkits["no_reads"]).log.load()
            (dry,) = (await desk.at(toolkits["no_receipts"]).wakes("send", dry_run=True)).recovered
            assert dry.error_kind == NEVER
        await toolkits["others_sessions"].sessions.open("other", "chat").append(say("mine"))
        with pytest.raises(PermissionDenied, match="sessions"):  # the fence stands, and nobody is told anything
            await desk.at(toolkits["no_sessions"]).wakes("send")
        assert len(await desk.entries()) == 1
        assert await desk.fence("send", ARGS) is not None
        (recovered,) = (await desk.wakes("send")).recovered
        assert (recovered.error_kind, recovered.said) == (NEVER, "withdrawn")
        await desk.at(toolkits["no_receipts"]).hears()
