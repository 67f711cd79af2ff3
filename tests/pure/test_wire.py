"""The bytes of records and payloads: what is written is what is read, and nothing else is."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import uuid

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from natsreceipts.decision import Effect
from natsreceipts.errors import CorruptRecord, UnsupportedRecord
from natsreceipts.identity import ReceiptKey
from natsreceipts.payload import NotEncodable
from natsreceipts.wire import Holder, Payload, ReceiptRecord, encode_payload, fresh_body, fresh_receipt, read_receipt

KEY = ReceiptKey("acme", "r", "t", "0" * 64)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**63, max_value=2**200),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.datetimes(),
    st.datetimes(timezones=st.timezones(), allow_imaginary=False),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
)
keys = st.one_of(st.text(), st.integers(), st.binary(), st.none(), st.dates())
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(keys, inner), st.frozensets(st.text()), st.sets(st.integers())
    ),
    max_leaves=12,
)


def read_back(payload: bytes):
    return Payload.model_validate_json(payload).value()


@given(values)
def test_a_value_comes_back_equal_and_the_first_caller_gets_the_same(value):
    payload, first = encode_payload(value)
    again = read_back(payload)
    assert again == value
    assert first == value
    assert repr(first) == repr(again)


@given(st.recursive(st.one_of(leaves, st.just(math.nan)), lambda i: st.tuples(i, st.lists(i)), max_leaves=6))
def test_tuples_come_back_as_lists_both_times(value):
    payload, first = encode_payload(value)
    assert repr(first) == repr(read_back(payload))
    assert "(" not in repr(type(first))


class Colour(enum.StrEnum):
    RED = "red"


class Plain(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Point:
    x: int
    when: dt.date


class Model(pydantic.BaseModel):
    name: str
    raw: bytes = b"\xff"


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2,)), [1, [2]]),
        (Colour.RED, "red"),
        (Plain.ONE, 1),
        (Text("x"), "x"),
        ({"k": Text("x")}, {"k": "x"}),
        (Point(1, dt.date(2026, 1, 2)), {"x": 1, "when": dt.date(2026, 1, 2)}),
        (Model(name="n"), {"name": "n", "raw": b"\xff"}),
        (bytearray(b"ab"), b"ab"),
        ({"a": 1.0, "b": -0.0, "c": 1e300}, {"a": 1.0, "b": -0.0, "c": 1e300}),
        (math.inf, math.inf),
        ("\ud800", "\ud800"),
        ({"\ud800": 1}, {"\ud800": 1}),
        pytest.param(10**1500, 10**1500, id="1,501 digits"),
        pytest.param(10**6000, 10**6000, id="6,001 digits"),
        (uuid.UUID(int=7), uuid.UUID(int=7)),
        (decimal.Decimal("1.10"), decimal.Decimal("1.10")),
        ({1: "a", "1": "b"}, {1: "a", "1": "b"}),
        (True, True),
        ({"n": None}, {"n": None}),
    ],
)
def test_the_normal_form(value, plain):
    payload, first = encode_payload(value)
    again = read_back(payload)
    assert (first, type(first)) == (plain, type(plain))
    assert (again, type(again)) == (plain, type(plain))


def test_nan_comes_back():
    payload, first = encode_payload({"x": math.nan})
    assert math.isnan(first["x"])
    assert math.isnan(read_back(payload)["x"])


@pytest.mark.parametrize("depth", [90, 110, 190, 199, 210, 390])
def test_depth_is_no_trap(depth):
    value: object = "deep"
    for _ in range(depth):
        value = [value]
    payload, first = encode_payload(value)
    record = fresh_receipt(
        fresh_body(KEY, effect=Effect.OPAQUE, lease_ms=1, token="t", worker=b'"w"'),
        write="w",
        status="completed",
        result=payload,
    )
    read = read_receipt("b", KEY, 1, record)
    assert read.result is not None
    assert read.result.value() == first == value


def cyclic():
    value: list[object] = []
    value.append(value)
    return value


class Hostile:
    def __eq__(self, other):
        return True

    __hash__ = None


class Explodes(pydantic.BaseModel):
    x: int = 1

    @pydantic.model_serializer
    def boom(self):
        raise RuntimeError("boom")


@pytest.mark.parametrize(
    "value",
    [object(), cyclic(), Hostile(), {"k": Hostile()}, {(1, 2): 3}, lambda: 1, (x for x in "ab"), {"f": open}, range(3)],
)
def test_what_cannot_be_recorded_is_refused(value):
    with pytest.raises(NotEncodable):
        encode_payload(value)


@given(
    names,
    names,
    names,
    st.sampled_from(["opaque", "idempotent", "resumable"]),
    st.integers(1, 10**7),
    st.text(),
    values,
)
def test_a_fresh_record_is_what_the_model_would_write(tenant, run, tool, effect, lease_ms, worker, value):
    worker = worker.encode(errors="ignore").decode()
    key = ReceiptKey(tenant, run, tool, "a" * 64)
    body = fresh_body(key, effect=Effect(effect), lease_ms=lease_ms, token="tok", worker=to_json(worker))
    payload, _ = encode_payload(value)
    for status, result in (("running", b""), ("completed", payload)):
        record = ReceiptRecord(
            v=1,
            write="nonce",
            status=status,
            tenant_id=tenant,
            run_id=run,
            tool_name=tool,
            args_hash="a" * 64,
            effect=Effect(effect),
            attempts=1,
            lease_ms=lease_ms,
            holder=Holder(token="tok", worker=worker),
            **({"result": Payload.model_validate_json(result)} if result else {}),
        )
        fresh = fresh_receipt(body, write="nonce", status=status, result=result)
        assert json.loads(fresh) == json.loads(record.to_bytes())
        assert read_receipt("b", key, 1, fresh) == record
        assert list(json.loads(fresh)) == list(json.loads(record.to_bytes()))


GOOD = {
    "v": 1,
    "write": "n",
    "status": "running",
    "tenantId": "acme",
    "runId": "r",
    "toolName": "t",
    "argsHash": "0" * 64,
    "effect": "opaque",
    "attempts": 1,
    "leaseMs": 1000,
    "holder": {"token": "t", "worker": "w"},
}


def test_unknown_fields_are_ignored():
    assert read_receipt("b", KEY, 1, json.dumps({**GOOD, "later": {"x": 1}}).encode()).status == "running"


@pytest.mark.parametrize(
    "change",
    [
        {"v": None},
        {"v": 0},
        {"v": "1"},
        {"v": True},
        {"v": 1.5},
        {"status": "done"},
        {"attempts": 0},
        {"attempts": True},
        {"attempts": "1"},
        {"effect": None},
        {"effect": "read"},
        {"holder": None},
        {"leaseMs": None},
        {"leaseMs": 0},
        {"status": "completed"},
        {"status": "completed", "result": {}},
        {"status": "completed", "result": {"json": 1, "msgpack": "kQ=="}},
        {"status": "completed", "result": {"msgpack": None}},
        {"status": "completed", "result": {"object": {"name": "n"}}},
        {"status": "withdrawn"},
        {"tenantId": "other"},
        {"runId": ""},
        {"argsHash": "1" * 64},
        {"argsHash": "x"},
    ],
)
def test_an_inconsistent_record_is_corrupt(change):
    record = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    for key in (KEY, KEY.kv_key):
        with pytest.raises(CorruptRecord) as caught:
            read_receipt("bucket-1", key, 7, json.dumps(record).encode())
        assert (caught.value.bucket, caught.value.revision) == ("bucket-1", 7)
        assert KEY.kv_key in str(caught.value)


@pytest.mark.parametrize("value", [b"", b"{", b"null", b"[]", b"1", b"\xff\xfe", b'{"v":1}', b"not json"])
def test_foreign_bytes_are_corrupt(value):
    with pytest.raises(CorruptRecord):
        read_receipt("b", KEY, 1, value)


@pytest.mark.parametrize("record", [{"v": 2}, {**GOOD, "v": 2}, {**GOOD, "v": 10**30, "status": "new"}])
def test_a_newer_record_is_told_apart(record):
    with pytest.raises(UnsupportedRecord) as caught:
        read_receipt("b", KEY, 3, json.dumps(record).encode())
    assert caught.value.version == record["v"]


@pytest.mark.parametrize("packed", ["!!", "kQ", "wQ==", "xwEL/w==", "3gAB"])
def test_an_unreadable_payload_is_a_value_error(packed):
    with pytest.raises(ValueError, match="not "):
        Payload.model_validate_json(json.dumps({"msgpack": packed})).value()
