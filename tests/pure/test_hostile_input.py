# ruff: noqa: PT017 - an error is one of two good ends here
"""Every decoder on bytes that nobody of ours wrote: a right answer or an error that says what it is.

Never another exception, and never "there is nothing". HYPOTHESIS_PROFILE=explore looks for longer.
"""

from __future__ import annotations

import base64
import json
import math
import re

import msgpack
import pytest
from hostile import HUGE, NAMES, fuzz, json_values, mutated, raw
from hypothesis import example, given
from hypothesis import strategies as st

from natsreceipts.errors import (
    CorruptRecord,
    InvalidFact,
    InvalidName,
    InvalidTranscript,
    NatsReceiptsError,
    NotCanonical,
    UnsupportedRecord,
)
from natsreceipts.identity import ReceiptKey, args_hash, canonical_json, key_token, name_from_token, split_kv_key
from natsreceipts.notice import (
    RunNoticeFact,
    check_endpoint,
    check_run,
    endpoint_of,
    notice_addressee_id,
    run_notice_id,
)
from natsreceipts.notice_record import NoticeSpec, NoticeStatus, read_spec, read_status
from natsreceipts.payload import NotEncodable, unpack
from natsreceipts.transcript import find_orphan_tool_calls, request_view, tool_calls_of
from natsreceipts.wire import Payload, encode_payload, quick_result, read_entry, read_receipt

KEY = ReceiptKey("acme", "r", "t", "0" * 64)
NAMED = {"tenantId": "acme", "runId": "r", "toolName": "t", "argsHash": "0" * 64}
RUNNING = {
    "v": 1, "write": "n", "status": "running", **NAMED, "effect": "opaque", "attempts": 1, "leaseMs": 1000,
    "holder": {"token": "t", "worker": "w"},
}  # fmt: skip
RECEIPTS = [
    RUNNING,
    {**RUNNING, "status": "completed", "result": {"json": {"id": "m-1", "n": [1, None, "x"]}}},
    {**RUNNING, "status": "completed", "result": {"msgpack": base64.b64encode(msgpack.packb([1, b"x"])).decode()}},
    {**RUNNING, "status": "completed", "result": {"object": {"name": "k.n", "digest": "SHA-256=x", "size": 3}}},
    {**RUNNING, "status": "failed", "error": {"type": "E", "message": "m", "notApplied": True}, "open": True},
    {**RUNNING, "status": "ambiguous", "steps": {"a": {"json": 1}}, "fences": {"s1": 17}, "attempts": 3},
    {**RUNNING, "status": "completed", "result": {"json": 1}, "resolved": {"by": "ann", "reason": "looked"}},
    {"v": 1, "write": "n", "status": "withdrawn", **NAMED, "attempts": 0, "fences": {"s1": 4}},
]


@fuzz(83)
@given(mutated(RECEIPTS) | json_values.map(raw) | st.binary(max_size=40))
@example(raw({**RUNNING, "leaseMs": 10**400}))
@example(raw({**RUNNING, "attempts": 10**400}))
@example(b"[" * 100_000)
@example(b'{"v":1,"result":' + b'{"json":' * 10_000)
def test_receipts(value):
    try:
        record = read_receipt("receipts", KEY, 7, value)
    except (CorruptRecord, UnsupportedRecord) as error:
        record = None
        assert KEY.kv_key in str(error)
        assert error.revision == 7
    quick = quick_result(KEY, 7, value)
    if record is None:
        return
    assert record.key == KEY
    assert (record.status == "withdrawn") == (record.attempts == 0)
    assert (record.lease_ms or 0) / 1000 < 10**15
    assert record.attempts + 1 < 2**62
    for payload in [record.result, record.args, *(record.steps or {}).values()]:
        if payload is not None:
            try:
                payload.value()
            except ValueError as unreadable:
                assert str(unreadable)
    if quick is not None:
        assert record.status == "completed"
        assert record.result is not None
        assert _same(quick.result, record.result.value())
        assert quick.attempts == record.attempts


def _same(one, other):
    return repr(one) == repr(other) or (one != one and other != other)


@fuzz(83)
@given(st.binary(max_size=60) | json_values.map(lambda value: msgpack.packb(str(value))))
@example(bytes.fromhex("c70100"))
@example(msgpack.packb(msgpack.ExtType(4, b"x")))
def test_messagepack(data):
    for packed in (data, *(msgpack.packb(msgpack.ExtType(code, data)) for code in range(12))):
        try:
            unpack(packed)
        except ValueError as error:
            assert str(error)
        with pytest.raises(ValueError, match="base64"):
            Payload.model_validate_json(raw({"msgpack": "!" + base64.b64encode(packed).decode()})).value()


def test_messagepack_that_is_nested_too_deeply():
    """Not an error of Python's, and no overflow of the stack beneath it."""
    for code in range(12):
        nested = msgpack.packb([])
        for _ in range(5000):
            nested = msgpack.packb(msgpack.ExtType(code, nested))
        with pytest.raises(ValueError, match="not a MessagePack value"):
            unpack(nested)


@fuzz(40)
@given(json_values)
def test_what_is_recorded_is_read_back(value):
    try:
        payload, plain = encode_payload(value)
    except ValueError as refused:
        assert str(refused)
        return
    assert _same(Payload.model_validate_json(payload).value(), plain)


ENTRY = {
    "v": 1,
    "id": "e",
    "parentId": None,
    "kind": "message",
    "runId": "r",
    "dialect": "neutral",
    "body": {"role": "user"},
}
SAID = {"toolCallId": "c", "toolName": "t", "key": KEY.kv_key, "revision": 3, "status": "ambiguous", "attempts": 1}
ENTRIES = [
    ENTRY,
    {
        **ENTRY,
        "parentId": "d",
        "close": {"toolCallId": "c", "errorKind": "interrupted_outcome_unknown"},
        "receipt": SAID,
    },
    {**ENTRY, "kind": "suspend", "body": {"toolCallIds": ["c", "d"]}},
    {**ENTRY, "kind": "compaction", "body": {"message": {"role": "user"}, "keepFrom": None}},
]


@fuzz(66)
@given(mutated(ENTRIES) | json_values.map(raw) | st.binary(max_size=40))
@example(raw({**ENTRY, "receipt": {**SAID, "key": ReceiptKey("other", "r", "t", "0" * 64).kv_key}}))
@example(raw({**ENTRY, "receipt": {**SAID, "key": "acme.>"}}))
@example(raw({**ENTRY, "receipt": {**SAID, "key": "acme.r.t." + "0" * 64 + " 0\r\nPUB x 0\r\n"}}))
def test_entries(value):
    try:
        record = read_entry("SESSIONS", "acme.chat", 7, value)
    except (CorruptRecord, UnsupportedRecord) as error:
        assert "acme.chat" in str(error)
        return
    if record.receipt is not None:
        assert split_kv_key(record.receipt.key)[0] == "acme"
    if record.kind in ("suspend", "resume"):
        assert all(type(each) is str for each in record.body["toolCallIds"])
    if record.kind == "compaction":
        assert isinstance(record.body["message"], dict)


ADDRESSEE = "agent:ops"
STEM = f"notice.local.run-1.{notice_addressee_id(ADDRESSEE)}.{run_notice_id('q', ADDRESSEE)}"
FACT = RunNoticeFact.of({"decision": "approved", "outcome": "done", "detail": {"n": 1, "ok": True, "who": "ann"}})
SPECS = [json.loads(NoticeSpec(run="run-1", step="s", addressee=ADDRESSEE, fact=FACT, at=5).to_bytes())]
STATUSES = [json.loads(NoticeStatus(consumed_at=5, by="turn", observed_spec_revision=2).to_bytes())]


@fuzz(66)
@given(mutated(SPECS) | json_values.map(raw) | st.binary(max_size=40))
@example(b"[" * 100_000)
def test_notice_specs(value):
    try:
        spec = read_spec("notices", f"{STEM}.spec", 7, value)
    except (CorruptRecord, UnsupportedRecord) as error:
        assert STEM in str(error)
        return
    assert (spec.run, spec.addressee) == ("run-1", ADDRESSEE)
    assert 0 <= spec.at < 2**53
    assert read_spec("notices", f"{STEM}.spec", 7, spec.to_bytes()) == spec


@fuzz(50)
@given(mutated(STATUSES) | json_values.map(raw) | st.binary(max_size=40))
def test_notice_statuses(value):
    try:
        status = read_status("notices", f"{STEM}.status", 7, value)
    except (CorruptRecord, UnsupportedRecord) as error:
        assert STEM in str(error)
        return
    assert status.by
    assert read_status("notices", f"{STEM}.status", 7, status.to_bytes()) == status


MESSAGES = {
    "openai-chat": [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "t", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ],
    "openai-responses": [
        {"type": "function_call", "call_id": "c", "name": "t", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ],
    "anthropic": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "t", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "done"}]},
    ],
    "pydantic-ai": [
        {"kind": "response", "parts": [{"part_kind": "tool-call", "tool_name": "t", "tool_call_id": "c", "args": {}}]},
        {"kind": "request", "parts": [
            {"part_kind": "tool-return", "tool_name": "t", "tool_call_id": "c", "content": "done"}]},
    ],
    "langchain": [
        {"type": "ai", "data": {"content": "", "tool_calls": [{"name": "t", "args": {}, "id": "c"}]}},
        {"type": "tool", "data": {"content": "done", "tool_call_id": "c"}},
    ],
    "neutral": [
        {"role": "assistant", "content": [{"type": "toolCall", "id": "c", "name": "t", "arguments": {}}]},
        {"role": "toolResult", "toolCallId": "c", "toolName": "t", "content": [{"type": "text", "text": "done"}],
         "isError": False},
    ],
}  # fmt: skip


@pytest.mark.parametrize("dialect", MESSAGES)
@fuzz(40)
@given(data=st.data())
def test_messages_of_any_dialect(dialect, data):
    messages = []
    for _ in range(data.draw(st.integers(1, 3))):
        value = data.draw(mutated(MESSAGES[dialect]) | json_values.map(raw))
        try:
            messages.append(json.loads(value))
        except (ValueError, RecursionError):
            continue
    before = repr(messages)
    for look in (
        find_orphan_tool_calls,
        request_view,
        lambda each, dialect: [tool_calls_of(m, dialect=dialect) for m in each],
    ):
        try:
            look(messages, dialect=dialect)
        except InvalidTranscript as error:
            assert error.reason
    assert repr(messages) == before


@pytest.mark.parametrize("dialect", MESSAGES)
def test_messages_that_are_nested_deeply(dialect):
    deep = {"x": 1}
    for _ in range(50_000):
        deep = {"content": deep}
    for look in (find_orphan_tool_calls, request_view):
        for message in ({"role": "user", "content": [deep]}, deep):
            try:
                look([message], dialect=dialect)
            except InvalidTranscript as error:
                assert error.reason


# ---------------------------------------------------------------- names and arguments

hostile_names = st.sampled_from(NAMES) | st.text(max_size=30) | st.text("./*>=$ \r\n\x00aH0", max_size=20)

TOKEN = re.compile(r"[A-Za-z0-9_=-]+")


@fuzz(66)
@given(hostile_names, hostile_names, hostile_names)
def test_no_name_reaches_beyond_its_place(tenant, run, tool):
    try:
        key = ReceiptKey(tenant, run, tool, "0" * 64)
    except InvalidName as error:
        assert len(str(error)) < 2000
        return
    tokens = key.kv_key.split(".")
    assert len(tokens) == 4
    assert all(TOKEN.fullmatch(token) and len(token) <= 180 for token in tokens)
    assert split_kv_key(key.kv_key) == tuple(tokens)
    if tenant != "acme":
        assert tokens[0] != "acme"
    assert name_from_token(tokens[0]) in (tenant, None)


@fuzz(66)
@given(hostile_names | hostile_names.map(lambda name: f"acme.r.{name}.{'0' * 64}"))
def test_no_text_is_taken_for_the_key_of_a_receipt(text):
    try:
        tokens = split_kv_key(text)
    except InvalidName as error:
        assert len(str(error)) < 2000
        return
    assert all(TOKEN.fullmatch(token) for token in tokens)


@fuzz(50)
@given(hostile_names)
def test_no_name_reaches_another_endpoint_or_run(name):
    for check in (check_run, check_endpoint):
        try:
            check(name)
        except InvalidName as error:
            assert len(str(error)) < 2000
        else:
            assert TOKEN.fullmatch(name)
    try:
        endpoint = endpoint_of(name)
    except InvalidName:
        return
    check_endpoint(endpoint)
    assert endpoint != "local"


@fuzz(50)
@given(json_values | st.sampled_from(HUGE) | hostile_names)
@example({"x": "\ud800"})
@example([math.inf])
def test_any_arguments_have_one_hash_or_none(value):
    try:
        text = canonical_json(value)
    except NotCanonical as error:
        assert "$" in str(error)
        return
    assert re.fullmatch(r"[0-9a-f]{64}", args_hash(value))
    assert canonical_json(json.loads(text)) == text


def test_arguments_that_are_deep_or_huge():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, {"n": 10**5000}, {"x": "x" * 3_000_000}, {"k" * 1_000_000: 1}):
        try:
            args_hash(value)
        except NotCanonical as error:
            assert len(str(error)) < 2000


@fuzz(33)
@given(json_values)
def test_any_fact_is_one_within_its_bound_or_is_refused(value):
    try:
        fact = RunNoticeFact.of(value)
    except InvalidFact as error:
        assert len(str(error)) < 2000
        return
    assert RunNoticeFact.of(fact.fields()) == fact


@pytest.mark.parametrize("name", ["\ud800", "", 7, None, b"acme", ["acme"], True])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(NatsReceiptsError):
        key_token(name)
    with pytest.raises(NatsReceiptsError):
        ReceiptKey(name, "r", "t", "0" * 64)


@pytest.mark.parametrize(("depth", "held"), [(14, True), (20, False), (399, False)])
def test_sets_within_sets(depth, held):
    value = frozenset({1})
    for _ in range(depth):
        value = frozenset({value, 2})
    if held:
        payload, plain = encode_payload(value)
        assert Payload.model_validate_json(payload).value() == plain == value
    else:
        with pytest.raises(NotEncodable):
            encode_payload(value)
