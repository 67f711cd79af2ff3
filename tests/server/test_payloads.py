"""Large and odd payloads: what a record cannot hold moves to the object store, and comes back as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import decimal
import json
import uuid
from contextlib import asynccontextmanager
from enum import Enum
from typing import Annotated, Literal

import nats.js.errors
import pydantic
import pytest
from scenes import history
from support import Effect, client_of, newest, put, revisions, stored, toolkit_of
from typing_extensions import TypedDict

from natsreceipts import (
    CorruptRecord,
    InvalidSetting,
    NotClaimed,
    NotRecorded,
    PayloadMissing,
    ResultTypeMismatch,
)
from natsreceipts.embedded import embedded

ARGS = {"to": "a@b.c"}


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


def payloads_of(namespace):
    return f"{namespace}-receipt-payloads"


async def objects(nc, namespace):
    """The names of the objects, as nats-py lists them."""
    store = await nc.jetstream().object_store(payloads_of(namespace))
    try:
        return [entry.name for entry in await store.list(ignore_deletes=True)]
    except nats.js.errors.NotFoundError:  # there are none
        return []


@asynccontextmanager
async def small_server(max_payload, namespace, **settings):
    config = f"max_payload: {max_payload}"
    async with embedded(config=config) as server, toolkit_of(server.url, namespace, **settings) as toolkit:
        yield toolkit


BIG = {
    "1 MB of text": "é" * 500_000,
    "1 MB of bytes": b"\x00\xff" * 500_000,
    "many numbers": list(range(150_000)),
    "1 MB that JSON does not hold": {1: "x" * 900_000, "when": dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC)},
    "a set": set(range(120_000)),
}


@pytest.mark.parametrize("name", BIG)
async def test_a_large_result(server, namespace, run, toolkit, key, nc, name):
    value = BIG[name]
    effect = Effect(value)
    assert await run.execute("send", ARGS, effect) == value
    assert await run.execute("send", ARGS, effect) == value
    async with toolkit_of(server.url, namespace) as other:
        assert await other.run("acme", "run-1").execute("send", ARGS, effect) == value
    assert effect.entered == 1
    receipt = await toolkit.receipts.get(key)
    assert (receipt.large, receipt.result) == (True, value)
    record = await stored(nc, namespace, key)
    assert record["result"].keys() == {"object"}
    assert record["result"]["object"]["name"].startswith(f"{key.kv_key}.{record['write']}")
    assert len((await newest(nc, namespace, key)).data) < 2000


async def test_a_result_of_20_megabytes(server, namespace, run, toolkit, key):
    value = b"0123456789abcdef" * (20 * 65_536)
    effect = Effect(value)
    assert await run.execute("send", ARGS, effect) == value
    async with toolkit_of(server.url, namespace) as other:
        assert await other.run("acme", "run-1").execute("send", ARGS, effect) == value
    assert effect.entered == 1


async def test_nats_py_reads_the_object(run, key, nc, namespace):
    await run.execute("send", ARGS, Effect("x" * 700_000))
    ref = (await stored(nc, namespace, key))["result"]["object"]
    store = await nc.jetstream().object_store(payloads_of(namespace))
    found = await store.get(ref["name"])
    assert (found.info.size, found.info.digest) == (ref["size"], ref["digest"])
    assert len(found.data) == ref["size"] == 700_005  # a MessagePack text of its length
    assert await objects(nc, namespace) == [ref["name"]]


@pytest.mark.parametrize("off", range(-12, 13, 3))
async def test_around_the_inline_limit(server, namespace, bucket, nc, off):
    """One byte under it stays in the record, one byte over it moves out."""
    async with toolkit_of(server.url, namespace, inline_limit=2000) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", [0], Effect(""))
        bare = len((await newest(nc, namespace, run.key("send", [0]))).data)
        value = "x" * (2000 - bare + off)
        assert await run.execute("send", [1], Effect(value)) == value
        record = await stored(nc, namespace, run.key("send", [1]))
        assert record["result"].keys() == ({"object"} if off > 0 else {"json"})
        assert await run.execute("send", [1], Effect("wrong")) == value


async def test_several_large_payloads_in_one_record(server, namespace, bucket, nc):
    """The largest go first, and only as many as must."""
    async with toolkit_of(server.url, namespace, inline_limit=5000) as toolkit:
        run = toolkit.run("acme", "run-1", effect="resumable")
        args = {"text": "a" * 1500}

        async def body(call):
            for name, size in (("small", 200), ("large", 9000), ("middle", 1800)):
                assert await call.step(name, lambda size=size: "s" * size) == "s" * size
            return "r" * 1600

        assert await run.execute("send", args, body, store_args=True) == "r" * 1600
        key = run.key("send", args)
        record = await stored(nc, namespace, key)
        moved = {name for name, payload in record["steps"].items() if "object" in payload}
        moved |= {name for name in ("args", "result") if "object" in record[name]}
        assert moved == {"large", "middle"}
        assert len((await newest(nc, namespace, key)).data) <= 5000
        assert await run.execute("send", args, Effect("wrong"), store_args=True) == "r" * 1600
        assert (await toolkit.receipts.get(key)).args == args


async def test_objects_have_names_of_their_own(server, namespace, bucket, nc):
    async with toolkit_of(server.url, namespace, inline_limit=1024) as toolkit:
        run = toolkit.run("acme", "run-1", effect="resumable")

        async def body(call):
            for name in "abc":
                await call.step(name, lambda: "x" * 3000)
            return "y" * 3000

        await run.execute("send", ARGS, body)
        record = await stored(nc, namespace, run.key("send", ARGS))
        names = [payload["object"]["name"] for payload in [*record["steps"].values(), record["result"]]]
        assert len(set(names)) == 4
        assert set(names) <= set(await objects(nc, namespace))


# Lost and damaged objects


@pytest.fixture
async def lost(run, key, nc, namespace):
    """A completed call whose result is in the object store; what removes or damages it."""
    await run.execute("send", ARGS, Effect("x" * 500_000))
    ref = (await stored(nc, namespace, key))["result"]["object"]
    js = nc.jetstream()
    store = await js.object_store(payloads_of(namespace))
    stream = f"OBJ_{payloads_of(namespace)}"
    chunks = f"$O.{payloads_of(namespace)}.C.{(await store.get_info(ref['name'])).nuid}"

    async def damage(how):
        if how == "deleted":
            await store.delete(ref["name"])
        elif how == "another":
            await store.put(ref["name"], b"\xa5other")
        elif how == "store purged":
            await js.purge_stream(stream)
        elif how == "a chunk is gone":
            await js.purge_stream(stream, subject=chunks, keep=2)
        elif how == "chunks are gone":
            await js.purge_stream(stream, subject=chunks)
        elif how == "one chunk more":
            await js.publish(chunks, b"and more")
        elif how == "no meta of ours":
            await js.purge_stream(stream, subject=f"$O.{payloads_of(namespace)}.M.*")

    return damage


@pytest.mark.parametrize(
    "how",
    ["deleted", "another", "store purged", "a chunk is gone", "chunks are gone", "one chunk more", "no meta of ours"],
)
async def test_a_payload_that_is_gone_or_damaged(server, namespace, run, toolkit, key, nc, lost, how):
    await lost(how)
    before = await revisions(nc, namespace, key)
    effect = Effect("wrong")
    for options in ({}, {"effect": "idempotent"}, {"result_type": str}):
        with pytest.raises(PayloadMissing) as caught:
            await run.execute("send", ARGS, effect, **options)
        assert caught.value.key == key
        assert caught.value.store == payloads_of(namespace)
    with pytest.raises(PayloadMissing):
        await toolkit.receipts.get(key)
    async with run:
        with pytest.raises(PayloadMissing):
            await run.execute("send", ARGS, effect)
        with pytest.raises(PayloadMissing):
            async with run.call("send", ARGS):
                effect.entered += 1
    assert effect.entered == 0
    assert await revisions(nc, namespace, key) == before
    # What does not load it still works.
    assert [(r.status, r.large, r.result) async for r in toolkit.receipts.list()] == [("completed", True, None)]
    assert [r.status for r in await toolkit.receipts.history(key)] == ["running", "completed"]


async def test_a_lost_object_can_be_put_back(run, key, nc, namespace, lost):
    store = await nc.jetstream().object_store(payloads_of(namespace))
    ref = (await stored(nc, namespace, key))["result"]["object"]
    data = (await store.get(ref["name"])).data
    await lost("deleted")
    with pytest.raises(PayloadMissing):
        await run.execute("send", ARGS, Effect("wrong"))
    await store.put(ref["name"], data)
    assert await run.execute("send", ARGS, Effect("wrong")) == "x" * 500_000


async def test_a_replica_that_does_not_have_the_payload_yet():
    """Half of the reads get to one that is behind: to the test, which answers as such a replica does."""
    reads = "$JS.API.DIRECT.GET.OBJ_receipt-payloads"
    halves = f'[{{ destination: "{reads}.>", weight: 50% }}, {{ destination: "behind.>", weight: 50% }}]'
    asked = []

    async with embedded(config=f'mappings {{ "{reads}.>": {halves} }}') as server, client_of(server.url) as nc:

        async def behind(message):
            asked.append(message.subject)
            await nc.publish(message.reply, b"", headers={"Status": "404", "Description": "Message Not Found"})

        await nc.subscribe("behind.>", cb=behind)
        await nc.flush()
        async with toolkit_of(server.url, "") as toolkit:
            run = toolkit.run("acme", "run-1")
            result = "x" * 300_000
            await run.execute("send", ARGS, Effect(result))
            for _ in range(12):
                assert await run.execute("send", ARGS, Effect("wrong")) == result
    assert asked


async def test_an_object_that_is_no_messagepack(run, key, nc, namespace):
    await run.execute("send", ARGS, Effect("x" * 500_000))
    message = await newest(nc, namespace, key)
    store = await nc.jetstream().object_store(payloads_of(namespace))
    info = await store.put("theirs", b"\xc1\xc1 no MessagePack")
    record = json.loads(message.data)
    record["result"] = {"object": {"name": info.name, "digest": info.digest, "size": info.size}}
    await put(nc, namespace, key, record, last=message.seq)
    with pytest.raises(CorruptRecord):
        await run.execute("send", ARGS, Effect("wrong"))


async def test_the_object_store_is_gone(server, namespace, bucket, nc):
    """A large result cannot be stored: the receipt says so, the result is handed out, and small calls go on."""
    async with toolkit_of(server.url, namespace, lease=0.6) as toolkit:
        run = toolkit.run("acme", "run-1")
        await nc.jetstream().delete_stream(f"OBJ_{payloads_of(namespace)}")
        import natsreceipts.guard as guard

        before, guard._SETTLE_PATIENCE = guard._SETTLE_PATIENCE, 0.5
        try:
            with pytest.raises(NotRecorded) as caught:
                await run.execute("send", ARGS, Effect("x" * 500_000))
        finally:
            guard._SETTLE_PATIENCE = before
        assert (caught.value.has_result, len(caught.value.result)) == (True, 500_000)
        assert await run.execute("send", [2], Effect("small")) == "small"
        assert (await history(nc, namespace, run.key("send", ARGS)))[0] == "running"


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("fault", ["drop", "drop_answer", "cut_after_store"])
async def test_a_fault_while_an_object_is_written(proxy, server, namespace, bucket, nc, fault, nth):
    """Three chunks and the word of them: what is lost is written again under another name."""
    async with toolkit_of(proxy.url, namespace, lease=0.9) as far:
        run = far.run("acme", "run-1")
        lost = getattr(proxy, fault)(lambda m: m.subject.startswith("$O."), nth=nth)
        value = "x" * 300_000
        assert await run.execute("send", ARGS, Effect(value)) == value
        assert len(lost.hits) == 1
    async with toolkit_of(server.url, namespace) as near:
        run = near.run("acme", "run-1")
        assert await run.execute("send", ARGS, Effect("wrong")) == value
        assert (await history(nc, namespace, run.key("send", ARGS)))[-1] == "completed"


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_chunk_that_comes_twice(proxy, server, namespace, bucket, nc, nth):
    """As after a connection that drops while it is written to: the second copy is not stored."""
    value = "x" * 300_000
    async with toolkit_of(proxy.url, namespace) as far, toolkit_of(server.url, namespace) as near:
        proxy.duplicate(lambda m: m.subject.startswith("$O."), nth=nth)
        assert await far.run("acme", "run-1").execute("send", ARGS, Effect(value)) == value
        assert await near.run("acme", "run-1").execute("send", ARGS, Effect("wrong")) == value


@pytest.mark.parametrize("fault", ["drop", "drop_answer", "cut_after_store"])
async def test_a_fault_while_an_object_is_read(proxy, server, namespace, bucket, nc, fault, monkeypatch):
    """No answer is no missing payload."""
    monkeypatch.setattr("natsreceipts.payloads._READ_TIMEOUT", 0.3)
    async with toolkit_of(server.url, namespace) as near, toolkit_of(proxy.url, namespace) as far:
        value = "x" * 300_000
        assert await near.run("acme", "run-1").execute("send", ARGS, Effect(value)) == value
        run = far.run("acme", "run-1")
        effect = Effect("wrong")
        for nth in (1, 2):
            getattr(proxy, fault)(lambda m: m.subject.startswith("$JS.API.DIRECT.GET.OBJ_"), nth=nth)
            with contextlib.suppress(NotClaimed):  # because nobody answered in time
                assert await run.execute("send", ARGS, effect) == value
        assert effect.entered == 0


# A server that takes less


@pytest.mark.parametrize("size", [500, 5_000, 50_000, 70_000, 250_000, 1_000_000])
async def test_a_server_with_a_small_max_payload(size):
    """What it does not take in one message moves out, also below the inline limit."""
    async with small_server(65_536, "small") as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect(b"\xf0" * size)
        assert await run.execute("send", ARGS, effect) == b"\xf0" * size
        assert await run.execute("send", ARGS, effect) == b"\xf0" * size
        assert effect.entered == 1


async def test_a_server_with_a_tiny_max_payload():
    async with small_server(8_192, "tiny") as toolkit:
        run = toolkit.run("acme", "r" * 150)
        for size in (100, 3_000, 5_000, 9_000, 300_000):
            effect = Effect("x" * size)
            assert await run.execute("send", [size], effect) == "x" * size
            assert await run.execute("send", [size], effect) == "x" * size
            assert effect.entered == 1


async def test_large_steps_and_arguments_on_a_server_with_a_small_max_payload():
    async with small_server(65_536, "small") as toolkit:
        run = toolkit.run("acme", "run-1", effect="resumable")
        args = {"text": "a" * 100_000}

        async def body(call):
            return [len(await call.step(name, lambda: "s" * 40_000)) for name in "abc"]

        assert await run.execute("send", args, body, store_args=True) == [40_000] * 3
        assert (await toolkit.receipts.get(run.key("send", args))).status == "completed"


async def test_a_resolve_with_a_large_result_on_a_server_with_a_small_max_payload():
    async with small_server(65_536, "small") as toolkit:
        run = toolkit.run("acme", "run-1")

        async def body():
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await run.execute("send", ARGS, body)
        receipt = await toolkit.receipts.get(run.key("send", ARGS))
        big = "x" * 100_000
        settled = await toolkit.receipts.resolve(
            receipt.key, revision=receipt.revision, completed=big, by="ann", reason="saw it"
        )
        assert settled.result == big
        assert await run.execute("send", ARGS, Effect("wrong")) == big


# Stored arguments


async def test_arguments_are_stored_only_when_asked(run, toolkit, nc, namespace):
    await run.execute("send", ARGS, Effect())
    assert "args" not in await stored(nc, namespace, run.key("send", ARGS))
    assert (await toolkit.receipts.get(run.key("send", ARGS))).args is None


@pytest.mark.parametrize(
    "args", [{"to": ["a@b.c"], "n": 1.5}, [], None, "é", {"text": "x" * 300_000}], ids=lambda a: str(a)[:9]
)
async def test_stored_arguments(run, toolkit, nc, namespace, args):
    key = run.key("send", args)
    shown = []

    async def body():
        shown.append(await stored(nc, namespace, key))
        return "done"

    assert await run.execute("send", args, body, store_args=True) == "done"
    assert "args" in shown[0]  # from the claim on
    record = await stored(nc, namespace, key)
    receipt = await toolkit.receipts.get(key)
    if len(str(args)) > 250_000:
        assert record["args"].keys() == {"object"}
    else:
        assert record["args"] == {"json": args}
    assert receipt.args in (args, None)
    assert await run.execute("send", args, Effect("wrong"), store_args=True) == "done"


async def test_stored_arguments_over_attempts(run, nc, namespace, toolkit):
    async def fails():
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            await run.execute("send", ARGS, fails, effect="idempotent", store_args=True)
    assert await run.execute("send", ARGS, Effect("third"), effect="idempotent", store_args=True) == "third"
    assert (await toolkit.receipts.get(run.key("send", ARGS))).args == ARGS


async def test_a_replay_with_large_arguments_leaves_no_objects_behind(run, nc, namespace):
    """The claim of a call that is there already is refused: its arguments need not be stored for that."""
    args = {"text": "x" * 300_000}
    assert await run.execute("send", args, Effect("once"), store_args=True) == "once"
    before = await objects(nc, namespace)
    for _ in range(3):
        assert await run.execute("send", args, Effect("wrong"), store_args=True) == "once"
    assert await objects(nc, namespace) == before


# Odd values

ODD = {
    "bytes": b"\x00\x01",
    "datetime": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
    "naive datetime": dt.datetime(2026, 1, 2),  # noqa: DTZ001
    "date and time": [dt.date(2026, 1, 2), dt.time(3, 4, 5, 6)],
    "timedelta": {"took": dt.timedelta(days=-1, microseconds=7)},
    "decimal": decimal.Decimal("1.10"),
    "uuid": uuid.UUID(int=7),
    "keys": {1: "a", 2.5: "b", False: "c", None: "d", b"k": "e", (dt.date(2026, 1, 2)): "f"},
    "set": {1, "a", b"b", frozenset({2})},
    "wide int": [2**64, -(2**63) - 1, 10**50],
    "nan free floats": [1.5, 1e300, -0.0, 5e-324],
    "deep": [[[[[[[[[[{"a": b"b"}]]]]]]]]]],
    "surrogate": "\ud800",
    "empty": [[], {}, "", b"", set()],
}


@pytest.mark.parametrize("large", [False, True], ids=["inline", "object"])
@pytest.mark.parametrize("name", ODD)
async def test_odd_values_come_back(run, toolkit, name, large):
    value = [ODD[name], "x" * 300_000 if large else ""]
    first = await run.execute("send", [name], Effect(value))
    again = await run.execute("send", [name], Effect("wrong"))
    receipt = await toolkit.receipts.get(run.key("send", [name]))
    assert receipt.large is large
    for found in (first, again, receipt.result):
        assert found == value
        assert repr(found[0]) == repr(value[0]) or name in {"set", "keys"}


# result_type


class Mail(pydantic.BaseModel):
    id: str
    sent: dt.datetime
    raw: bytes = b"\xff"
    parts: list[int] = []


@dataclasses.dataclass
class Point:
    x: int
    y: decimal.Decimal
    tags: frozenset[str] = frozenset()


class Shape(TypedDict):
    kind: Literal["circle", "square"]
    size: float


class Colour(Enum):
    RED = "red"


class Aliased(pydantic.BaseModel):
    first_name: str = pydantic.Field(alias="firstName")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"


TYPED = {
    "model": (Mail, Mail(id="m", sent=dt.datetime(2026, 1, 2, tzinfo=dt.UTC), parts=[1, 2])),
    "list of models": (list[Mail], [Mail(id="m", sent=dt.datetime(2026, 1, 2, tzinfo=dt.UTC))]),
    "dataclass": (Point, Point(1, decimal.Decimal("2.50"), frozenset({"a"}))),
    "TypedDict": (Shape, {"kind": "circle", "size": 1.0}),
    "Literal": (Literal["yes", "no"], "yes"),
    "union": (int | str | None, "7"),
    "tuple": (tuple[int, str], (1, "a")),
    "set": (set[int], {1, 2}),
    "enum": (Colour, Colour.RED),
    "alias": (Aliased, Aliased(firstName="Ann")),
    "tagged union": (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], Dog()),
    "dict of int keys": (dict[int, Point], {1: Point(1, decimal.Decimal(2))}),
    "None": (None | int, None),
    "bytes": (bytes, b"\xff\x00"),
}


@pytest.mark.parametrize("large", [False, True], ids=["inline", "object"])
@pytest.mark.parametrize("name", TYPED)
async def test_a_typed_result(server, namespace, bucket, name, large):
    kind, value = TYPED[name]
    async with toolkit_of(server.url, namespace, inline_limit=1024) as toolkit:
        run = toolkit.run("acme", "run-1")
        if large:
            kind, value = tuple[kind, str], (value, "x" * 3000)
        first = await run.execute("send", ARGS, Effect(value), result_type=kind)
        again = await run.execute("send", ARGS, Effect("wrong"), result_type=kind)
        async with run.call("send", ARGS, result_type=kind) as call:
            assert call.replayed
        async with run:
            prefetched = await run.execute("send", ARGS, Effect("wrong"), result_type=kind)
        for found in (first, again, call.result, prefetched):
            assert found == value
            assert type(found) is type(value)


async def test_a_recorded_result_that_does_not_fit(run, key, nc, namespace):
    await run.execute("send", ARGS, Effect({"id": 7}))
    effect = Effect("wrong")
    before = await revisions(nc, namespace, key)
    for kind in (Mail, Literal["yes"], list[int], int | None):
        with pytest.raises(ResultTypeMismatch) as caught:
            await run.execute("send", ARGS, effect, result_type=kind)
        assert caught.value.result == {"id": 7}
        assert caught.value.key == key
    async with run:
        with pytest.raises(ResultTypeMismatch):
            await run.execute("send", ARGS, effect, result_type=Mail)
    with pytest.raises(ResultTypeMismatch):
        async with run.call("send", ARGS, result_type=Mail):
            effect.entered += 1
    assert effect.entered == 0
    assert await revisions(nc, namespace, key) == before
    assert await run.execute("send", ARGS, effect) == {"id": 7}


async def test_a_first_result_that_does_not_fit(run, key, nc, namespace):
    """The effect has happened. Whatever is said of the type, the call does not look as if it had not."""
    effect = Effect({"no": "mail"})
    with pytest.raises((NotRecorded, ResultTypeMismatch)) as caught:
        await run.execute("send", ARGS, effect, result_type=Mail)
    assert caught.value.result == {"no": "mail"}
    assert (await history(nc, namespace, key))[-1] in ("completed", "ambiguous")
    with pytest.raises(Exception):  # noqa: B017 - ambiguous, or the same mismatch: never executed
        await run.execute("send", ARGS, effect, result_type=Mail)
    assert effect.entered == 1


async def test_bad_result_types_are_refused(run, nc, namespace, key):
    for bad in (7, "no such type", object()):
        with pytest.raises(InvalidSetting):
            await run.execute("send", ARGS, Effect("wrong"), result_type=bad)
    assert await history(nc, namespace, key) == []


async def test_the_whole_store_is_gone(server, namespace, bucket, nc):
    """A completed call whose store was deleted is told as what it is, through every door, and not executed again."""
    effect = Effect("x" * 300_000)
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", ARGS, effect)
        await nc.jetstream().delete_stream(f"OBJ_{namespace}-receipt-payloads")
        for replay in (
            lambda: run.execute("send", ARGS, effect),
            lambda: _entered(run, ARGS, effect),
            lambda: toolkit.receipts.get(run.key("send", ARGS)),
        ):
            with pytest.raises(PayloadMissing) as caught:
                await replay()
            assert caught.value.key == run.key("send", ARGS)
    assert effect.entered == 1


async def _entered(run, args, effect):
    async with run:
        return await run.execute("send", args, effect)
