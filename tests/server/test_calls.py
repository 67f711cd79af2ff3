"""One caller: what a guarded call writes, returns, raises and replays."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import decimal
import enum
import math
import typing
import uuid

import pydantic
import pytest
from support import LEASE, Effect, client_of, flushed, put, record_of, revisions, said, stored, toolkit_of, writes_to

from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    CallTimedOut,
    InvalidName,
    InvalidSetting,
    LeaseLost,
    NotApplied,
    NotCanonical,
    NotRecorded,
    ResultNotSet,
)
from natsreceipts.embedded import embedded

ARGS = {"to": "a@b.c", "amount": 3}


# Executing and replaying


async def test_a_call_is_executed_once_and_then_replayed(run):
    effect = Effect({"id": "m-1"})
    assert await run.execute("send", ARGS, effect) == {"id": "m-1"}
    assert await run.execute("send", dict(reversed(ARGS.items())), effect) == {"id": "m-1"}
    assert effect.entered == 1


async def test_a_call_as_a_context_manager(run, toolkit):
    async with run.call("send", ARGS) as call:
        assert (call.replayed, call.attempt, call.lost) == (False, 1, False)
        assert call.key == run.key("send", ARGS)
        assert call.idempotency_key == call.key.idempotency_key
        with pytest.raises(AttributeError, match=r"call\.result"):
            _ = call.result
        claimed = call.revision
        call.result = "sent"
    assert call.result == "sent"
    receipt = await toolkit.receipts.get(call.key)
    assert receipt.revision == call.revision > claimed > 0
    assert (receipt.status, receipt.attempts, receipt.effect, receipt.result) == ("completed", 1, "opaque", "sent")

    async with run.call("send", ARGS) as again:
        assert (again.replayed, again.attempt, again.result) == (True, 1, "sent")
    assert again.revision == call.revision


async def test_none_is_a_result(run):
    effect = Effect(None)
    assert await run.execute("send", ARGS, effect) is None
    assert await run.execute("send", ARGS, effect) is None
    assert effect.entered == 1


async def test_a_replay_ignores_what_its_body_does(run):
    await run.execute("send", ARGS, Effect("first"))
    with pytest.raises(InvalidSetting, match="replayed"):
        async with run.call("send", ARGS) as call:
            call.result = "second"
    with pytest.raises(KeyError):
        async with run.call("send", ARGS):
            raise KeyError("the host's own")
    assert await run.execute("send", ARGS, Effect("third")) == "first"


async def test_a_call_is_entered_once(run):
    call = run.call("send", ARGS)
    async with call:
        call.result = 1
    with pytest.raises(InvalidSetting, match="entered once"):
        async with call:
            pass


async def test_another_connection_replays(server, namespace, run):
    await run.execute("send", ARGS, Effect((1, 2)))
    async with toolkit_of(server.url, namespace) as other:
        effect = Effect()
        assert await other.run("acme", "run-1").execute("send", ARGS, effect) == [1, 2]
        assert effect.entered == 0
        assert await other.run("acme", "run-2").execute("send", ARGS, effect) == "done"
        assert await other.run("other", "run-1").execute("send", ARGS, effect) == "done"
        assert effect.entered == 2


async def test_a_fresh_call_costs_two_writes_and_nothing_else(proxy, namespace, bucket):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        proxy.forget()
        await run.execute("send", ARGS, Effect())
        claim, settle = proxy.published()
        assert claim.subject == settle.subject == f"$KV.{bucket}.{run.key('send', ARGS).kv_key}"
        assert claim.headers == {"Nats-Expected-Last-Subject-Sequence": "0"}
        assert settle.headers == {"Nats-Expected-Last-Subject-Sequence": "1"}
        assert (said(claim)["status"], said(settle)["status"]) == ("running", "completed")
        assert said(claim)["write"] != said(settle)["write"]
        assert said(claim)["holder"] == said(settle)["holder"]

        proxy.forget()
        await run.execute("send", ARGS, Effect())
        refused, read = proxy.published()  # a replay is a refused claim and a read
        assert refused.subject == claim.subject
        assert read.subject.startswith(("$JS.API.STREAM.MSG.GET.", "$JS.API.DIRECT.GET."))


async def test_what_stands_in_the_bucket(run, nc, namespace):
    await run.execute("send", ARGS, Effect({"id": 1}), lease=7)
    claim, settle = await revisions(nc, namespace, run.key("send", ARGS))
    key = run.key("send", ARGS)
    assert set(claim) == {
        *("v", "write", "status", "tenantId", "runId", "toolName", "argsHash"),
        *("effect", "attempts", "leaseMs", "holder"),
    }
    assert claim["v"] == 1
    assert claim["status"] == "running"
    assert (claim["tenantId"], claim["runId"], claim["toolName"]) == ("acme", "run-1", "send")
    assert claim["argsHash"] == key.args_hash
    assert (claim["effect"], claim["attempts"], claim["leaseMs"]) == ("opaque", 1, 7000)
    assert set(claim["holder"]) == {"token", "worker"}
    changed = ("write", "status", "result")
    assert {k: v for k, v in settle.items() if k not in changed} == {k: v for k, v in claim.items() if k not in changed}
    assert settle["result"] == {"json": {"id": 1}}


async def test_a_read_writes_nothing_and_is_always_executed(proxy, namespace, bucket):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        proxy.forget()
        effect = Effect((1,))
        assert await run.execute("look", ARGS, effect, effect="read") == (1,)
        assert await run.execute("look", ARGS, effect, effect="read") == (1,)
        async with run.call("look", ARGS, effect="read") as call:
            await call.renew()
            assert (call.attempt, call.revision, call.replayed) == (1, 0, False)
            call.result = 3
        with pytest.raises(ResultNotSet):
            async with run.call("look", ARGS, effect="read"):
                pass
        with pytest.raises(CallTimedOut):
            await run.execute("look", ARGS, Effect(hold=True), effect="read", timeout=0.05)
        assert effect.entered == 2
        assert proxy.published() == []


async def test_a_read_calls_itself_if_it_likes(run):
    async def outer():
        return await run.execute("look", ARGS, Effect("inner"), effect="read")

    assert await run.execute("look", ARGS, outer, effect="read") == "inner"


async def test_distinct_sets_equal_calls_apart(run):
    effect = Effect()
    await run.execute("send", ARGS, effect)
    await run.execute("send", ARGS, effect, distinct="second")
    await run.execute("send", ARGS, effect, distinct="second")
    assert effect.entered == 2
    assert run.key("send", ARGS) != run.key("send", ARGS, distinct="second")


async def test_the_body_may_take_the_call(run):
    async def one(call):
        return call.idempotency_key

    async def with_default(value=5):
        return value

    class Service:
        async def method(self, call):
            return call.attempt

        async def __call__(self):
            return "called"

    assert await run.execute("a", ARGS, one) == run.key("a", ARGS).idempotency_key
    assert await run.execute("b", ARGS, with_default) == 5
    assert await run.execute("c", ARGS, Service().method) == 1
    assert await run.execute("d", ARGS, Service()) == "called"
    assert await run.execute("f", ARGS, lambda call: with_default(call.attempt)) == 1


async def test_a_decorated_body_may_take_the_call(run):
    import functools

    def logged(fn):
        @functools.wraps(fn)
        async def wrapper(*args, **kwargs):
            return await fn(*args, **kwargs)

        return wrapper

    @logged
    async def body(call):
        return call.attempt

    assert await run.execute("send", ARGS, body) == 1


async def test_bad_arguments_names_and_settings_write_nothing(proxy, namespace, bucket):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        proxy.forget()
        effect = Effect()
        with pytest.raises(NotCanonical, match=r"\$\.when"):
            await run.execute("send", {"when": dt.datetime.now(tz=dt.UTC)}, effect)
        with pytest.raises(InvalidName):
            await run.execute("", ARGS, effect)
        for bad in (
            {"effect": "wrote"},
            {"lease": 0},
            {"lease": float("nan")},
            {"lease": True},
            {"wait": -1},
            {"timeout": 0},
            {"timeout": -3},
            {"on_lost": "panic"},
            {"not_applied": (ValueError("instance"),)},
            {"not_applied": ("ValueError",)},
            {"lease": 10**5000},
            {"lease": 10**400},
            {"wait": 1e300},
            {"timeout": 10**5000},
            {"effect": 10**5000},
            {"on_lost": 10**5000},
            {"not_applied": 10**5000},
            {"store_args": 10**5000},
            {"entry": 10**5000},
        ):
            with pytest.raises(InvalidSetting, match=next(iter(bad))):
                await run.execute("send", ARGS, effect, **bad)
        with pytest.raises(InvalidSetting, match="leese: no option"):
            await run.execute("send", ARGS, effect, leese=3)
        with pytest.raises(InvalidName):
            toolkit.run("", "run-1")
        with pytest.raises(InvalidName):
            toolkit.run("acme", "\ud800")
        with pytest.raises(InvalidSetting):
            toolkit.run("acme", "run-1", effect="wrote")
        assert effect.entered == 0
        assert proxy.published() == []


async def test_a_run_sets_the_defaults_of_its_calls(toolkit, nc, namespace):
    run = toolkit.run("acme", "run-1", effect="idempotent", lease=11)
    await run.execute("send", ARGS, Effect())
    await run.execute("send", [1], Effect(), effect="opaque")
    first, second = [await stored(nc, namespace, run.key("send", args)) for args in (ARGS, [1])]
    assert (first["effect"], first["leaseMs"]) == ("idempotent", 11_000)
    assert (second["effect"], second["leaseMs"]) == ("opaque", 11_000)


async def test_odd_names_are_told_apart(toolkit):
    effect = Effect()
    names = ["a.b", "a b", "ä", "a=2Eb", "*", ">", "a\nb", "x" * 300, "x" * 301, "=H", ".", "\U0001f600"]
    for name in names:
        assert await toolkit.run(name, name).execute(name, {}, effect) == "done"
        assert (await toolkit.receipts.get(toolkit.run(name, name).key(name, {}))).key.tool == name
    assert effect.entered == len(names)


async def test_two_hundred_calls_at_once(run, toolkit):
    entered = []

    async def body(n):
        entered.append(n)
        return n

    results = await asyncio.gather(*(run.execute("send", {"n": n}, lambda n=n: body(n)) for n in range(200)))
    assert results == list(range(200))
    assert sorted(entered) == list(range(200))
    again = await asyncio.gather(*(run.execute("send", {"n": n}, lambda n=n: body(n)) for n in range(200)))
    assert again == results
    assert len(entered) == 200


# The normal form of results


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Model(pydantic.BaseModel):
    name: str
    tags: tuple[str, ...] = ()
    when: dt.datetime | None = None


class Point(typing.NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Data:
    a: int
    inner: Point


class Text(str):
    __slots__ = ()


def _deep(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


NOON = dt.datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30)))

NORMAL = {
    "tuple": ((1, (2, 3)), [1, [2, 3]]),
    "text": ('ä\u2028\x00\x7f"\\', ...),
    "lone surrogate": ("a\ud800b", ...),
    "lone surrogate as key": ({"\udfff": 1}, ...),
    "bytes": (b"\x00\xff", ...),
    "bytearray": (bytearray(b"ab"), b"ab"),
    "int of 63 bits": (2**63 - 1, ...),
    "int of 64 bits": (2**64 - 1, ...),
    "int beyond 64 bits": ([2**64, -(2**63) - 1, 10**40], ...),
    "int beyond 64 bits beside bytes": ([10**40, b""], ...),
    "int of 4,300 digits": (10**4299, ...),
    "int of 4,300 digits beside bytes": ([10**4299, b""], ...),
    "float": ([1.0, -0.0, 1e308, 5e-324, 0.1], ...),
    "infinities": ([math.inf, -math.inf], ...),
    "keys that are no strings": ({1: "a", None: "b", 2.5: "d", b"k": "e"}, ...),
    "key of a date": ({dt.date(2026, 1, 2): 1}, ...),
    "datetime": (NOON, ...),
    "naive datetime": (NOON.replace(tzinfo=None), ...),
    "date, time, timedelta": ([dt.date(1, 1, 1), dt.time(1, 2, 3, 4), dt.timedelta(-1, 2, 3)], ...),
    "decimal": (decimal.Decimal("1.10"), ...),
    "uuid": (uuid.UUID(int=7), ...),
    "sets": ([{1, 2}, frozenset({"a"})], ...),
    "enumeration": ([Colour.RED, Level.LOW, {Colour.RED: 1}], ["red", 1, {"red": 1}]),
    "pydantic model": (Model(name="x", tags=("a",)), {"name": "x", "tags": ["a"], "when": None}),
    "pydantic model with a time": (Model(name="x", when=NOON), {"name": "x", "tags": [], "when": NOON}),
    "dataclass": (Data(1, Point(2, 3)), {"a": 1, "inner": [2, 3]}),
    "string subclass": ({Text("k"): Text("v")}, {"k": "v"}),
    "99 levels": (_deep(99), ...),
    "100 levels": (_deep(100), ...),
    "101 levels": (_deep(101), ...),
    "400 levels": (_deep(400), ...),
}


@pytest.mark.parametrize("name", NORMAL)
async def test_the_first_caller_gets_what_a_replay_gives(server, namespace, run, name):
    value, expected = NORMAL[name]
    expected = value if expected is ... else expected
    first = await run.execute("send", ARGS, Effect(value))
    async with toolkit_of(server.url, namespace) as other:
        second = await other.run("acme", "run-1").execute("send", ARGS, Effect("wrong"))
    assert first == expected
    assert second == expected
    assert _types(first) == _types(second) == _types(expected)


def _types(value):
    if isinstance(value, dict):
        return {(type(k), k): _types(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_types(v) for v in value]
    return type(value)


async def test_nan_comes_back_as_nan(run):
    first = await run.execute("send", ARGS, Effect([math.nan]))
    second = await run.execute("send", ARGS, Effect("wrong"))
    assert math.isnan(first[0])
    assert math.isnan(second[0])


@pytest.mark.parametrize("value", [10**4300, {"a": 10**4300}, [10**4300, b""], 1 << 20_000], ids=range(4))
async def test_an_int_of_more_digits_than_python_reads(run, value):
    """It is recorded faithfully, or not at all: never so that a replay cannot read it."""
    try:
        assert await run.execute("send", ARGS, Effect(value)) == value
    except NotRecorded:
        with pytest.raises(AmbiguousCall):
            await run.execute("send", ARGS, Effect("wrong"))
    else:
        assert await run.execute("send", ARGS, Effect("wrong")) == value


async def test_a_result_that_json_holds_stands_as_json(run, nc, namespace):
    await run.execute("a", ARGS, Effect({"ä": [1, 2.5, None, True, "x"]}))
    await run.execute("b", ARGS, Effect(b"x"))
    assert (await stored(nc, namespace, run.key("a", ARGS)))["result"] == {"json": {"ä": [1, 2.5, None, True, "x"]}}
    assert set((await stored(nc, namespace, run.key("b", ARGS)))["result"]) == {"msgpack"}


class Hostile:
    """A value that fails in its own way."""


class FailingModel(pydantic.BaseModel):
    x: int = 1

    def model_dump(self, **_):
        raise ZeroDivisionError("dump")


_CYCLE = []
_CYCLE.append(_CYCLE)


@pytest.mark.parametrize(
    "value",
    [Hostile(), object, lambda: 1, {"a": [Hostile()]}, FailingModel(), _CYCLE, {(1, 2): 3}, {(1, 2)}, _deep(500), 1j],
    ids=["instance", "class", "function", "nested", "model", "cycle", "tuple key", "tuple in set", "deep", "complex"],
)
@pytest.mark.parametrize(("kind", "status"), [("opaque", "ambiguous"), ("idempotent", "failed")])
async def test_a_result_that_cannot_be_recorded(run, toolkit, value, kind, status):
    effect = Effect(value)
    with pytest.raises(NotRecorded) as caught:
        await run.execute("send", ARGS, effect, effect=kind)
    assert caught.value.has_result
    assert caught.value.result is value
    assert caught.value.key == run.key("send", ARGS)
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert receipt.status == status
    assert not receipt.error.not_applied
    if kind == "opaque":
        with pytest.raises(AmbiguousCall):
            await run.execute("send", ARGS, effect)
        assert effect.entered == 1


async def test_a_result_around_max_payload():
    """However large it is, it is replayed or it was never completed; the connection lives through both."""
    async with embedded(config="max_payload: 32768") as server, toolkit_of(server.url, "big") as toolkit:
        run = toolkit.run("acme", "run-1")
        for size in (40_000, 400_000, *range(31_700, 32_800, 50)):
            big = "x" * size
            try:
                assert await run.execute("send", {"size": size}, Effect(big)) == big
                status = "completed"
            except NotRecorded as unrecorded:
                status = "ambiguous"
                given = unrecorded.result
            assert status == "completed" or given == big
            assert (await toolkit.receipts.get(run.key("send", {"size": size}))).status == status
            async with toolkit_of(server.url, "big") as other:
                again = other.run("acme", "run-1").execute("send", {"size": size}, Effect("wrong"))
                if status == "completed":
                    assert await again == big
                else:
                    with pytest.raises(AmbiguousCall):
                        await again
        assert await run.execute("send", [], Effect()) == "done"


async def test_an_error_with_a_text_near_max_payload():
    """What stands in a record beside payloads is bounded, or told as what could not be written."""
    async with embedded(config="max_payload: 4096") as server, toolkit_of(server.url, "big") as toolkit:
        run = toolkit.run("acme", "run-1")
        error = ValueError("\u20ac" * 5000)
        with pytest.raises((ValueError, NotRecorded)) as caught:
            await run.execute("send", ARGS, Effect(error))
        assert caught.value is error or isinstance(caught.value, NotRecorded)
        assert await run.execute("send", [], Effect()) == "done"


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("make", [Mute, lambda: ValueError("\ud800" + "y" * 9999), lambda: ValueError(b"\xff")])
async def test_an_error_with_an_odd_text(run, toolkit, make):
    error = make()
    with pytest.raises(type(error)) as caught:
        await run.execute("send", ARGS, Effect(error))
    assert caught.value is error
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert receipt.status == "ambiguous"
    assert len(receipt.error.message) < 2100


# Endings


@pytest.mark.parametrize(
    ("kind", "status"), [("opaque", "ambiguous"), ("idempotent", "failed"), ("resumable", "failed")]
)
async def test_an_error_leaves(run, toolkit, kind, status):
    effect = Effect(ConnectionError("reset"))
    with pytest.raises(ConnectionError) as caught:
        await run.execute("send", ARGS, effect, effect=kind)
    assert caught.value is effect.result
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert receipt.status == status
    assert (receipt.error.type, receipt.error.message) == ("ConnectionError", "reset")
    assert not receipt.error.not_applied

    effect.result = "fine"
    if kind == "opaque":
        for _ in range(2):
            with pytest.raises(AmbiguousCall, match="reset") as refused:
                await run.execute("send", ARGS, effect)
            assert refused.value.revision == receipt.revision
            assert refused.value.attempts == 1
            assert "send" in refused.value.model_text
        assert effect.entered == 1
    else:
        assert await run.execute("send", ARGS, effect, effect=kind) == "fine"
        assert effect.entered == 2
        assert (await toolkit.receipts.get(run.key("send", ARGS))).attempts == 2


async def test_a_failed_record_of_a_lax_tool_is_ambiguous_to_a_strict_one(run, toolkit):
    with pytest.raises(ValueError, match="x"):
        await run.execute("send", ARGS, Effect(ValueError("x")), effect="idempotent")
    effect = Effect()
    with pytest.raises(AmbiguousCall):
        await run.execute("send", ARGS, effect, effect="opaque")
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert (receipt.status, receipt.effect, receipt.attempts) == ("ambiguous", "opaque", 1)
    with pytest.raises(AmbiguousCall):  # the stricter one counts from here on
        await run.execute("send", ARGS, effect, effect="idempotent")
    assert effect.entered == 0


async def test_the_stricter_effect_is_recorded(run, toolkit):
    for n, (first, second, third) in enumerate(
        [("idempotent", "resumable", "resumable"), ("resumable", "idempotent", "resumable")]
    ):
        with pytest.raises(ValueError, match="x"):
            await run.execute("send", {"n": n}, Effect(ValueError("x")), effect=first)
        await run.execute("send", {"n": n}, Effect(), effect=second)
        assert (await toolkit.receipts.get(run.key("send", {"n": n}))).effect == third


class Declined(Exception):
    pass


class VeryDeclined(Declined):
    pass


@pytest.mark.parametrize("error", [NotApplied, Declined, VeryDeclined])
@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
async def test_not_applied_is_executed_again(run, toolkit, error, kind):
    effect = Effect(error("refused"))
    with pytest.raises(error):
        await run.execute("send", ARGS, effect, not_applied=(Declined,), effect=kind)
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)
    effect.result = "now it went"
    assert await run.execute("send", ARGS, effect, effect=kind) == "now it went"
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert (receipt.status, receipt.attempts, receipt.error) == ("completed", 2, None)


async def test_a_single_class_may_be_listed(run, toolkit):
    with pytest.raises(Declined):
        await run.execute("send", ARGS, Effect(Declined()), not_applied=Declined)
    assert (await toolkit.receipts.get(run.key("send", ARGS))).status == "failed"


async def test_not_applied_speaks_only_for_the_innermost_call(run, toolkit):
    async def outer():
        return await run.execute("inner", ARGS, Effect(NotApplied("refused")))

    with pytest.raises(NotApplied):
        await run.execute("outer", ARGS, outer)
    assert (await toolkit.receipts.get(run.key("inner", ARGS))).error.not_applied
    receipt = await toolkit.receipts.get(run.key("outer", ARGS))
    assert (receipt.status, receipt.error.not_applied) == ("ambiguous", False)


@pytest.mark.parametrize("first", ["outer", "nobody"])
async def test_a_shared_inner_calls_not_applied_speaks_for_neither_outer_call(run, toolkit, first):
    """Two outer calls share the execution of an inner one, which says that it was not applied."""
    inner = Effect(NotApplied("refused"), hold=True)

    async def outer():
        return await run.execute("inner", ARGS, inner)

    if first == "outer":
        one = asyncio.create_task(run.execute("one", ARGS, outer))
    else:
        one = asyncio.create_task(run.execute("inner", ARGS, inner))
    await inner.started.wait()
    joining = asyncio.Event()

    async def joined():
        joining.set()
        return await outer()

    other = asyncio.create_task(run.execute("other", ARGS, joined))
    await joining.wait()
    await asyncio.sleep(0)
    inner.go.set()
    assert [type(e) for e in await asyncio.gather(one, other, return_exceptions=True)] == [NotApplied] * 2
    assert inner.entered == 1
    assert (await toolkit.receipts.get(run.key("inner", ARGS))).status == "failed"
    assert (await toolkit.receipts.get(run.key("other", ARGS))).status == "ambiguous"
    if first == "outer":
        assert (await toolkit.receipts.get(run.key("one", ARGS))).status == "ambiguous"


async def test_an_error_that_is_raised_twice_speaks_twice(run, toolkit):
    """A host may keep one instance and raise it whenever that is so."""
    refused = NotApplied("always")
    for n in range(2):
        with pytest.raises(NotApplied):
            await run.execute("send", [n], Effect(refused))
        assert (await toolkit.receipts.get(run.key("send", [n]))).status == "failed"


async def test_not_applied_from_a_replayed_or_read_inner_call(run, toolkit):
    async def outer():
        async with run.call("look", ARGS, effect="read"):
            raise NotApplied("the inner call says so")

    with pytest.raises(NotApplied):
        await run.execute("outer", ARGS, outer)
    assert (await toolkit.receipts.get(run.key("outer", ARGS))).status == "ambiguous"


async def test_a_new_not_applied_raised_by_the_outer_body_counts(run, toolkit):
    async def outer():
        try:
            await run.execute("inner", ARGS, Effect(NotApplied("refused")))
        except NotApplied as error:
            raise NotApplied("and nothing else was done") from error

    with pytest.raises(NotApplied, match="nothing else"):
        await run.execute("outer", ARGS, outer)
    assert (await toolkit.receipts.get(run.key("outer", ARGS))).status == "failed"


async def test_an_inner_calls_time_out_does_not_speak_for_the_outer_call(run, toolkit):
    """CallTimedOut is a TimeoutError and so an OSError: classes that hosts list, of errors of their own bodies."""

    async def outer():
        return await run.execute("inner", ARGS, Effect(hold=True), timeout=0.05)

    with pytest.raises(CallTimedOut):
        await run.execute("outer", ARGS, outer, not_applied=(OSError,))
    assert (await toolkit.receipts.get(run.key("inner", ARGS))).status == "ambiguous"
    assert (await toolkit.receipts.get(run.key("outer", ARGS))).status == "ambiguous"


async def test_not_applied_does_not_speak_for_an_attempt_that_may_have_landed(run, toolkit, nc, namespace):
    key = run.key("send", ARGS)
    await put(nc, namespace, key, record_of(key, effect="idempotent", leaseMs=1))
    effect = Effect(NotApplied("this time"))
    with pytest.raises(NotApplied):
        await run.execute("send", ARGS, effect, effect="idempotent")
    record = await stored(nc, namespace, key)
    assert (record["status"], record["attempts"], record["open"]) == ("failed", 2, True)
    assert not record["error"]["notApplied"]
    with pytest.raises(AmbiguousCall):  # so to a strict caller it is ambiguous
        await run.execute("send", ARGS, effect, effect="opaque")
    assert (await stored(nc, namespace, key))["open"] is True
    assert effect.entered == 1


async def test_a_body_without_a_result(run, toolkit):
    with pytest.raises(ResultNotSet) as caught:
        async with run.call("send", ARGS):
            pass
    assert caught.value.status == "ambiguous"
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert (receipt.status, receipt.error.type) == ("ambiguous", "natsreceipts.errors.ResultNotSet")
    with pytest.raises(ResultNotSet) as caught:
        async with run.call("other", ARGS, effect="idempotent"):
            pass
    assert caught.value.status == "failed"


@pytest.mark.parametrize(("kind", "status"), [("opaque", "ambiguous"), ("idempotent", "failed")])
async def test_a_body_that_hangs_is_ended(run, toolkit, kind, status):
    effect = Effect(hold=True)
    with pytest.raises(CallTimedOut) as caught:
        await run.execute("send", ARGS, effect, timeout=0.1, effect=kind)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.status, caught.value.timeout) == (status, 0.1)
    assert caught.value.key == run.key("send", ARGS)
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert (receipt.status, receipt.error.type) == (status, "natsreceipts.errors.CallTimedOut")
    assert asyncio.current_task().cancelling() == 0


async def test_a_body_that_ends_in_spite_of_its_time_out(run):
    async def stubborn():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "after all"

    async with run.call("send", ARGS, timeout=0.05) as call:
        call.result = await stubborn()
    assert call.result == "after all"
    assert asyncio.current_task().cancelling() == 0
    assert await run.execute("send", ARGS, Effect("wrong")) == "after all"


async def test_a_time_out_does_not_reach_beyond_its_call(run):
    async with run.call("send", ARGS, timeout=0.05) as call:
        call.result = 1
    await asyncio.sleep(0.1)
    assert asyncio.current_task().cancelling() == 0


async def test_a_hosts_own_time_out_stays_its_own(run, toolkit):
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(None) as limit, run.call("send", ARGS, timeout=600):
            limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
    assert not isinstance(caught.value, CallTimedOut)
    assert (await toolkit.receipts.get(run.key("send", ARGS))).status == "ambiguous"


# Renewing


async def test_renewing_by_hand(run, nc, namespace):
    async with run.call("send", ARGS) as call:
        before = call.revision
        await call.renew()
        assert call.revision > before
        await asyncio.gather(call.renew(), call.renew())
        call.result = 1
    records = await revisions(nc, namespace, call.key)
    assert [r["status"] for r in records] == ["running"] * 4 + ["completed"]
    assert len({r["write"] for r in records}) == 5
    revision = call.revision
    await call.renew()  # after the end: nothing
    assert call.revision == revision


async def test_renewing_a_call_that_is_lost(run, nc, namespace):
    with pytest.raises(LeaseLost) as caught:
        async with run.call("send", ARGS, effect="idempotent") as call:
            taken = record_of(call.key, effect="idempotent", attempts=2)
            await put(nc, namespace, call.key, taken, last=call.revision)
            with pytest.raises(LeaseLost):
                await call.renew()
            assert call.lost
            call.result = "made in vain"
    assert caught.value.has_result
    assert caught.value.result == "made in vain"
    assert caught.value.key == call.key
    assert (await stored(nc, namespace, call.key)) == taken


async def test_renewing_when_nobody_answers(proxy, namespace, bucket):
    async with toolkit_of(proxy.url, namespace, lease=0.6) as toolkit:
        run = toolkit.run("acme", "run-1")
        async with run.call("send", ARGS) as call:
            await proxy.stall()
            with pytest.raises(LeaseLost, match="could not be renewed"):
                await call.renew()
            assert not call.lost
            await proxy.resume()
            call.result = 1
        assert await run.execute("send", ARGS, Effect("wrong")) == 1


# In one process


async def test_a_call_inside_itself_is_refused(run):
    async def body():
        with pytest.raises(CallInFlight) as caught:
            await run.execute("send", ARGS, Effect("inner"))
        assert caught.value.retry_after == 0
        with pytest.raises(CallInFlight):
            async with run.call("send", ARGS):
                pass

        async def elsewhere():
            return await run.execute("send", ARGS, Effect("inner"))

        with pytest.raises(CallInFlight):
            await asyncio.create_task(elsewhere())

        async def between():
            return await run.execute("send", ARGS, Effect("inner"))

        with pytest.raises(CallInFlight):
            await run.execute("middle", ARGS, between)
        return "outer"

    assert await run.execute("send", ARGS, body) == "outer"
    assert await run.execute("send", ARGS, Effect("wrong")) == "outer"


async def test_after_its_body_a_call_is_not_inside_itself(run):
    async with run.call("send", ARGS) as call:
        call.result = 1
    async with run.call("send", ARGS) as call:
        pass
    assert call.replayed


async def test_equal_calls_share_one_execution(proxy, namespace, bucket):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        proxy.forget()
        effect = Effect({"id": 1})
        runs = [toolkit.run("acme", "run-1") for _ in range(20)]
        results = await asyncio.gather(*(run.execute("send", ARGS, effect) for run in runs))
        assert results == [{"id": 1}] * 20
        assert effect.entered == 1
        assert len(proxy.published(writes_to(namespace))) == 2


async def test_equal_calls_share_one_error(run):
    effect = Effect(NotApplied("once"))
    results = await asyncio.gather(*(run.execute("send", ARGS, effect) for _ in range(5)), return_exceptions=True)
    assert [type(r) for r in results] == [NotApplied] * 5
    assert effect.entered == 1


async def test_bodies_of_call_are_not_shared(run):
    effect = Effect(hold=True)
    replayed = []

    async def one():
        async with run.call("send", ARGS) as call:
            replayed.append(call.replayed)
            if not call.replayed:
                call.result = await effect()
        return call.result

    tasks = [asyncio.create_task(one()) for _ in range(5)]
    await effect.started.wait()
    effect.go.set()
    assert await asyncio.gather(*tasks) == ["done"] * 5
    assert sorted(replayed) == [False, True, True, True, True]


async def test_one_waiters_cancellation_detaches_it(run):
    effect = Effect(hold=True)
    tasks = [asyncio.create_task(run.execute("send", ARGS, effect)) for _ in range(3)]
    await effect.started.wait()
    for task in tasks[:2]:
        task.cancel()
    first = await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert [type(r) for r in first] == [asyncio.CancelledError] * 2
    assert not tasks[2].done()
    effect.go.set()
    assert await tasks[2] == "done"
    assert effect.entered == 1


async def test_the_last_waiters_cancellation_ends_the_body(run, toolkit):
    ended = []

    async def body():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    started = asyncio.Event()
    tasks = [asyncio.create_task(run.execute("send", ARGS, body)) for _ in range(3)]
    await started.wait()
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [asyncio.CancelledError] * 3
    assert ended == [True]
    assert (await toolkit.receipts.get(run.key("send", ARGS))).status == "ambiguous"


async def test_a_cancellation_in_the_moment_in_which_the_body_has_failed(run, toolkit):
    """The cancellation is all that the caller gets, and asyncio has no error to complain of that nobody looked at."""
    effect = Effect(OSError("nobody hears of it"), hold=True)
    caller = asyncio.create_task(run.execute("send", ARGS, effect))
    await effect.started.wait()
    (shared,) = run._executions._shared.values()
    shared.task.add_done_callback(lambda _: caller.cancel())
    effect.go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not shared.task._log_traceback
    assert (await toolkit.receipts.get(run.key("send", ARGS))).status == "ambiguous"


async def test_a_call_that_follows_an_abandoned_one_decides_for_itself(run):
    effect = Effect(hold=True)
    first = asyncio.create_task(run.execute("send", ARGS, effect, effect="idempotent"))
    await effect.started.wait()
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(run.execute("send", ARGS, Effect("second"), effect="idempotent"))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == "second"


async def test_who_joins_an_execution_waits_no_longer_than_it_says(run):
    effect = Effect(hold=True)
    first = asyncio.create_task(run.execute("send", ARGS, effect))
    await effect.started.wait()
    with pytest.raises(CallInFlight):
        await run.execute("send", ARGS, Effect("wrong"), wait=0.1)
    assert not first.done()
    effect.go.set()
    assert await first == "done"


async def test_two_calls_that_execute_each_other_do_not_hang(run):
    both = asyncio.Barrier(2)

    async def one():
        await both.wait()
        return await run.execute("two", ARGS, two, wait=0.2)

    async def two():
        await both.wait()
        return await run.execute("one", ARGS, one, wait=0.2)

    calls = (run.execute("one", ARGS, one), run.execute("two", ARGS, two))
    async with asyncio.timeout(60):
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert CallInFlight in {type(result) for result in results}


async def test_calls_of_different_effects_are_not_shared(run):
    effect = Effect(hold=True)
    first = asyncio.create_task(run.execute("send", ARGS, effect))
    await effect.started.wait()
    with pytest.raises(CallInFlight):
        await run.execute("send", ARGS, Effect("wrong"), effect="idempotent", wait=0)
    effect.go.set()
    assert await first == "done"


async def test_nested_calls(run, toolkit):
    async def inner(call):
        return call.attempt

    async def outer():
        results = await asyncio.gather(*(run.execute("inner", [n], inner) for n in range(3)))
        return [*results, await run.execute("inner", [0], inner)]

    assert await run.execute("outer", ARGS, outer) == [1, 1, 1, 1]
    assert await run.execute("outer", ARGS, Effect("wrong")) == [1, 1, 1, 1]
    assert (await toolkit.receipts.get(run.key("inner", [2]))).status == "completed"


# Reading


async def test_reading_a_receipt(toolkit, run):
    key = run.key("send", ARGS)
    assert await toolkit.receipts.get(key) is None
    before = dt.datetime.now(tz=dt.UTC) - dt.timedelta(seconds=60)
    await run.execute("send", ARGS, Effect({"id": 1}))
    receipt = await toolkit.receipts.get(key)
    assert receipt == await toolkit.receipts.get(key.kv_key)
    assert receipt.key == key
    assert receipt.kv_key == key.kv_key
    assert before < receipt.updated
    assert receipt.lease == LEASE
    assert "/" in receipt.worker
    assert receipt.resolved is None


async def test_a_hosts_own_client_is_not_closed(server, namespace, bucket):
    async with client_of(server.url) as mine:
        async with toolkit_of(mine, namespace) as toolkit:
            assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect()) == "done"
        assert mine.is_connected
        async with toolkit_of(mine, namespace) as toolkit, toolkit_of(mine, namespace) as second:
            assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("wrong")) == "done"
            assert await second.run("acme", "run-2").execute("send", ARGS, Effect()) == "done"
        await flushed(mine)
