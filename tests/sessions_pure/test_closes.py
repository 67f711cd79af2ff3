"""What closes say, in which shape, and that they are known again; and what hostile input does (nothing)."""

from __future__ import annotations

import json
import pickle

import pytest
from dialect_shapes import ARGS, DIALECTS, a_close, calls, result, shaped, user

from natsreceipts.closes import CloseReason, close_calls, failure_text
from natsreceipts.decision import Effect
from natsreceipts.dialects import InvalidTranscript, dialect_named
from natsreceipts.errors import InvalidSetting, NatsReceiptsError
from natsreceipts.transcript import (
    INTERRUPTED_BY_USER_FOR_TOOL_USE_MARKER,
    INTERRUPTED_BY_USER_MARKER,
    ErrorKind,
    InterruptedResult,
    OrphanToolCall,
    closable_by_append,
    find_orphan_tool_calls,
    interrupted_result_message,
    interrupted_results,
    is_interrupted_close,
    request_view,
    tool_calls_of,
    tool_result_message,
)

NEVER, UNKNOWN = ErrorKind


def orphan(call_id, name="t"):
    return OrphanToolCall(call_id, name, None, 0)


def test_the_markers_and_kinds_are_those_that_others_read():
    assert INTERRUPTED_BY_USER_MARKER == "[Request interrupted by user]"
    assert INTERRUPTED_BY_USER_FOR_TOOL_USE_MARKER == "[Request interrupted by user for tool use]"
    assert [*ErrorKind] == ["interrupted_never_started", "interrupted_outcome_unknown"]


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("effect", "reason", "must", "must_not"),
    [
        ("read", CloseReason.READ, ["only reads", "issue it again"], ["ask before"]),
        ("idempotent", CloseReason.IDEMPOTENT, ["same arguments", "unknown"], ["ask before"]),
        ("resumable", CloseReason.WRITE, ["unknown", "first look", "ask before"], ["may issue", "is safe"]),
        ("opaque", CloseReason.WRITE, ["unknown", "first look", "ask before"], ["may issue", "is safe"]),
        ("write", CloseReason.WRITE, ["unknown", "first look"], ["may issue", "is safe"]),
        ("READ", CloseReason.WRITE, ["unknown", "first look"], ["may issue", "is safe"]),
        (Effect.READ, CloseReason.READ, ["only reads"], []),
        (None, CloseReason.WRITE, ["unknown", "first look"], ["may issue", "is safe"]),
    ],
)
def test_the_effect_decides_the_words(effect, reason, must, must_not):
    (close,) = interrupted_results([orphan("a")], {"t": effect, "other": "read"} if effect else None)
    assert close.error_kind is UNKNOWN is reason.error_kind
    assert close.text == close_calls([(orphan("a"), reason)])[0].text
    assert all(words in close.text for words in ["call of t", *must])
    assert not any(words in close.text for words in ["never started", *must_not])


def test_only_a_live_caller_proves_that_a_call_never_started():
    closes = interrupted_results([orphan("a"), orphan("b")], {"t": "opaque"}, started={"b"})
    assert [close.error_kind for close in closes] == [NEVER, UNKNOWN]
    assert "never started" in closes[0].text
    assert [close.error_kind for close in interrupted_results([orphan("a")], started=())] == [NEVER]
    assert [close.error_kind for close in interrupted_results([orphan("a")], started=None)] == [UNKNOWN]


def test_the_first_of_a_class_says_it_in_full_and_later_ones_point_back():
    batch = [
        (orphan("1", "mail"), CloseReason.WRITE),
        (orphan("2", "look"), CloseReason.READ),
        (orphan("3", "pay"), CloseReason.WRITE),
        (orphan("4", "peek"), CloseReason.READ),
        (orphan("5", "post"), CloseReason.WRITE),
    ]
    closes = close_calls(batch)
    assert [close.tool_call_id for close in closes] == ["1", "2", "3", "4", "5"]
    assert ["above" in close.text for close in closes] == [False, False, True, True, True]
    assert "call of mail above" in closes[2].text
    assert "this call of pay" in closes[2].text
    assert "call of mail above" in closes[4].text
    assert "call of look above" in closes[3].text
    assert len(closes[2].text) < len(closes[0].text)
    # Each batch begins in full.
    assert close_calls(batch[2:])[0].text == closes[0].text.replace("mail", "pay")


@pytest.mark.parametrize("reason", CloseReason)
def test_every_reason_has_words_of_its_own_in_both_forms(reason):
    full, short = close_calls([(orphan("1", "{mail}"), reason), (orphan("2"), reason)])
    assert "{mail}" in full.text
    assert full.error_kind is short.error_kind is (NEVER if reason is CloseReason.NEVER_STARTED else UNKNOWN)
    others = [r for r in CloseReason if r is not reason]
    texts = {
        close.text for other in others for close in close_calls([(orphan("1", "{mail}"), other), (orphan("2"), other)])
    }
    assert not {full.text, short.text} & texts


def test_a_guarded_call_that_is_ambiguous_says_that_it_will_be_refused():
    full, short = close_calls([(orphan("1"), CloseReason.AMBIGUOUS), (orphan("2"), CloseReason.AMBIGUOUS)])
    assert "identical call will be refused until" in full.text
    assert "identical call will be refused until" in short.text
    (again,) = close_calls([(orphan("1"), CloseReason.REPEATABLE)])
    assert "safe to issue again" in again.text


def test_result_orphans_are_not_closed():
    assert interrupted_results([OrphanToolCall("z", "", "result", 0)]) == []


def test_a_failed_call_says_its_error_or_that_it_was_not_carried_out():
    assert failure_text("SMTPError: refused") == "SMTPError: refused"
    assert failure_text(None, "wrong address").startswith("the call was not carried out: wrong address")
    assert failure_text(" ", "  ").startswith("the call was not carried out: ")


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ErrorKind)
def test_a_close_is_plain_json_and_known_again(dialect, kind):
    close = InterruptedResult("a", "mail", "cut off", kind)
    message = interrupted_result_message(close, dialect=dialect)
    stored = json.loads(json.dumps(message))
    assert stored == message
    assert is_interrupted_close(stored, dialect=dialect) is True
    assert kind.value in json.dumps(message)
    assert not is_interrupted_close(json.loads(json.dumps(message).replace(kind.value, "else")), dialect=dialect)
    assert not is_interrupted_close(tool_result_message("a", "mail", "x", dialect=dialect), dialect=dialect)
    assert not is_interrupted_close(
        tool_result_message("a", "mail", "x", is_error=True, dialect=dialect), dialect=dialect
    )
    assert not any(is_interrupted_close(m, dialect=dialect) for m in shaped([user(), calls("a"), result("a")], dialect))


def test_the_shapes_of_closes_and_results():
    close = InterruptedResult("a", "mail", "cut off", NEVER)
    mark = {"errorKind": "interrupted_never_started"}
    assert {d: interrupted_result_message(close, dialect=d) for d in DIALECTS} == {
        "openai-chat": {"role": "tool", "tool_call_id": "a", "content": "cut off", "natsreceipts": mark},
        "openai-responses": {
            "type": "function_call_output", "call_id": "a", "output": "cut off", "status": "incomplete",
            "natsreceipts": mark,
        },
        "anthropic": {
            "role": "user",
            "content": [{
                "type": "tool_result", "tool_use_id": "a", "content": "cut off", "is_error": True, "natsreceipts": mark,
            }],
        },
        "pydantic-ai": {
            "kind": "request",
            "parts": [{
                "part_kind": "tool-return", "tool_name": "mail", "tool_call_id": "a", "content": "cut off",
                "outcome": "interrupted", "metadata": {"natsreceipts": mark},
            }],
        },
        "langchain": {
            "type": "tool",
            "data": {
                "content": "cut off", "type": "tool", "name": "mail", "tool_call_id": "a", "status": "error",
                "artifact": {"natsreceipts": mark},
            },
        },
        "neutral": {
            "role": "toolResult", "toolCallId": "a", "toolName": "mail",
            "content": [{"type": "text", "text": "cut off"}], "isError": True, "details": mark,
        },
    }  # fmt: skip
    value = {"id": 7}
    assert {d: tool_result_message("a", "mail", value, dialect=d) for d in DIALECTS} == {
        "openai-chat": {"role": "tool", "tool_call_id": "a", "content": '{"id":7}'},
        "openai-responses": {"type": "function_call_output", "call_id": "a", "output": '{"id":7}'},
        "anthropic": {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": '{"id":7}'}],
        },
        "pydantic-ai": {
            "kind": "request",
            "parts": [{"part_kind": "tool-return", "tool_name": "mail", "tool_call_id": "a", "content": {"id": 7}}],
        },
        "langchain": {
            "type": "tool",
            "data": {
                "content": '{"id":7}', "type": "tool", "name": "mail", "tool_call_id": "a", "status": "success",
            },
        },
        "neutral": {
            "role": "toolResult", "toolCallId": "a", "toolName": "mail",
            "content": [{"type": "text", "text": '{"id":7}'}], "isError": False,
        },
    }  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("value", "shown"),
    [("plain", "plain"), (None, "null"), ({"k": b"\x00\x01"}, "AAE="), (float("nan"), "NaN"), (object, "class"),
     ("\ud800", "ud800"), ({"k": "\ud800"}, "ud800"), ({1: 2}, "1")],
)  # fmt: skip
def test_any_result_becomes_something_that_json_holds(dialect, value, shown):
    message = tool_result_message("a", "t", value, dialect=dialect)
    assert json.loads(json.dumps(message, allow_nan=False, ensure_ascii=False).encode()) == message
    assert shown in str(message) or (dialect == "pydantic-ai" and value is None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_failed_result_is_marked_where_there_is_a_mark(dialect):
    message = tool_result_message("a", "t", "refused", is_error=True, dialect=dialect)
    mark = {
        "anthropic": "'is_error': True", "pydantic-ai": "'outcome': 'failed'", "langchain": "'status': 'error'",
        "neutral": "'isError': True",
    }.get(dialect, "refused")  # fmt: skip
    assert mark in str(message)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_come_with_their_arguments(dialect):
    (message,) = shaped([calls("a")], dialect)
    assert [(call.id, call.name, call.arguments) for call in tool_calls_of(message, dialect=dialect)] == [
        ("a", "t", ARGS)
    ]
    assert tool_calls_of(shaped([user()], dialect)[0], dialect=dialect) == []


def test_arguments_that_are_no_object_are_none():
    def arguments(text):
        item = {"type": "function_call", "call_id": "a", "name": "t", "arguments": text}
        return tool_calls_of(item, dialect="openai-responses")[0].arguments

    assert arguments("") == arguments("{}") == {}
    assert arguments("{") is arguments("[1]") is arguments("[" * 100_000) is arguments("7") is None
    custom = {"type": "custom_tool_call", "call_id": "a", "name": "t", "input": "{}"}
    assert tool_calls_of(custom, dialect="openai-responses")[0].arguments is None
    custom = {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "t", "input": "{}"}}],
    }
    assert tool_calls_of(custom, dialect="openai-chat")[0].arguments is None
    raw = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "t", "arguments": '{"k": 1}'}}]}
    for dialect in ("openai-chat", "langchain"):
        assert [(c.name, c.arguments) for c in tool_calls_of(raw, dialect=dialect)] == [("t", {"k": 1})]


# ---------------------------------------------------------------- hostile input


class Explodes(dict):
    """Everything that one can do with it raises."""

    def _raise(self, *_args, **_kwargs):
        raise SystemExit("gotcha")

    get = __getitem__ = __contains__ = __iter__ = __len__ = __bool__ = keys = items = values = _raise
    __eq__ = __hash__ = __class__ = property(_raise)


class Liar:
    """An object that pretends to be a dict, and raises when it is asked anything."""

    __class__ = dict

    def __getattr__(self, name):
        raise BaseException(name)


class EvilKey(str):
    """Has the hash of a key that is looked for, and raises when compared."""

    __slots__ = ()

    def __hash__(self):
        return str.__hash__(self)

    def __eq__(self, other):
        raise BaseException("compared")


LOOP: dict = {"role": "user"}
LOOP["content"] = [LOOP]

HOSTILE = [
    None, 7, "text", b"", [], (), {}, object(), dict, Ellipsis, {"role": None}, {"role": []}, {"role": {}, "type": {}},
    {"kind": []}, {"type": 3}, {"type": "tool"}, {"type": "tool", "data": None},
    {"type": "ai", "data": {"tool_calls": 3}},
    {"type": "ai", "data": {"tool_calls": [{"name": "t", "id": None}]}}, {"type": "function_call"},
    {"type": "function_call_output", "call_id": 7}, {"role": "tool"}, {"role": "tool", "tool_call_id": None},
    {"role": "assistant", "tool_calls": [None]}, {"role": "assistant", "tool_calls": [{"id": "a"}]},
    {"role": "assistant", "tool_calls": {"a": 1}}, {"role": "assistant", "content": 3},
    {"role": "assistant", "content": [3]}, {"role": "assistant", "content": [{"type": "toolCall"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": ["x"], "name": "t"}]},
    {"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "t", "input": {}}]},
    {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
    {"role": "user", "content": [{"type": "tool_result"}]}, {"role": "toolResult"},
    {"role": "toolResult", "toolCallId": "a", "details": {"errorKind": []}},
    {"role": "toolResult", "toolCallId": "a", "details": Explodes()},
    {"role": "toolResult", "toolCallId": "a", "details": Liar()},
    {"role": "toolResult", "toolCallId": "a", "details": {EvilKey("errorKind"): 1}},
    {"kind": "request", "parts": None}, {"kind": "response", "parts": [{"part_kind": "tool-call"}]},
    {"kind": "request", "parts": [{"part_kind": "tool-call", "tool_call_id": "a", "tool_name": "t"}]},
    {"kind": "response", "parts": [{"part_kind": "tool-return", "tool_call_id": "a", "tool_name": "t"}]},
    {"kind": "request", "parts": [{"part_kind": "tool-return", "tool_call_id": "a", "tool_name": None}]},
    Explodes(), Explodes(role="user"), Liar(), {EvilKey("role"): 1}, {EvilKey("type"): 1}, {EvilKey("kind"): 1}, LOOP,
    {"natsreceipts": {"errorKind": "interrupted_never_started"}},
    {"role": "tool", "tool_call_id": "a", "natsreceipts": Explodes()},
]  # fmt: skip


def test_is_interrupted_close_never_raises():
    # In a loop: pytest itself does not survive these as parameters.
    for dialect in (*DIALECTS, "", "no such", None, 7, [], Explodes()):
        for message in HOSTILE:
            is_close = is_interrupted_close(message, dialect=dialect)
            assert is_close is False


@pytest.mark.parametrize("details", [None, 7, [], {"errorKind": []}, {"errorKind": {}}, {"errorKind": "timeout"}])
def test_a_tools_own_details_make_no_close(details):
    message = {"role": "toolResult", "toolCallId": "a", "content": [], "details": details}
    messages = [*shaped([calls("a")], "neutral"), message]
    assert find_orphan_tool_calls(messages) == []
    assert request_view(messages).messages[1] is message


def test_a_close_among_real_results_is_no_close():
    block = a_close("a", "anthropic")["content"][0]
    real = {"type": "tool_result", "tool_use_id": "b", "content": ""}
    assert is_interrupted_close(
        {"role": "user", "content": [block, {"type": "text", "text": "x"}]}, dialect="anthropic"
    )
    assert not is_interrupted_close({"role": "user", "content": [block, real]}, dialect="anthropic")
    assert is_interrupted_close({"details": {"errorKind": "interrupted_never_started"}})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("look", [find_orphan_tool_calls, closable_by_append, request_view])
def test_what_is_not_of_the_dialect_is_named_by_its_index(dialect, look):
    refused = 0
    for message in HOSTILE:
        if any(type(value) in (Explodes, Liar, EvilKey) for value in _inside(message)):
            continue  # these raise more than any caller could catch
        try:
            look([*shaped([user()], dialect), message], dialect=dialect)
        except InvalidTranscript as caught:
            error = caught
        else:
            continue
        refused += 1
        assert (error.message_index, error.dialect) == (1, dialect)
        assert "message 1 " in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.reason) == (str(error), error.reason)
    assert refused >= 10
    assert issubclass(InvalidTranscript, NatsReceiptsError)


def _inside(value, depth=2):
    yield value
    if type(value) is dict and depth:
        for item in (*value, *value.values()):
            yield from _inside(item, depth - 1)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_errors_of_a_message_are_not_raised_raw(dialect):
    class Raises(dict):
        def get(self, *_args):
            raise RuntimeError("no")

    with pytest.raises(InvalidTranscript, match=r"message 0 .*RuntimeError") as caught:
        find_orphan_tool_calls([Raises()], dialect=dialect)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        ("anthropic", {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}),
        ("anthropic", {"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "t"}]}),
        (
            "pydantic-ai",
            {"kind": "request", "parts": [{"part_kind": "tool-call", "tool_call_id": "a", "tool_name": "t"}]},
        ),
        (
            "pydantic-ai",
            {"kind": "response", "parts": [{"part_kind": "tool-return", "tool_call_id": "a", "tool_name": "t"}]},
        ),
        ("openai-chat", {"role": "tool", "tool_call_id": EvilKey("a")}),
        ("openai-chat", {"role": "human", "content": ""}),
        ("openai-responses", {"role": "tool", "content": ""}),
        ("langchain", {"lc": 1, "type": "constructor", "id": ["HumanMessage"], "kwargs": {}}),
        ("neutral", {"role": "tool", "content": ""}),
    ],
)
def test_a_message_out_of_its_dialect_is_refused(dialect, message):
    with pytest.raises(InvalidTranscript, match="message 0 "):
        find_orphan_tool_calls([message], dialect=dialect)


@pytest.mark.parametrize(
    ("dialect", "field", "values"),
    [
        ("openai-chat", "role", ["system", "developer", "user", "function", "assistant"]),
        ("openai-responses", "role", ["system", "developer", "user", "assistant"]),
        ("openai-responses", "type", ["item_reference", "mcp_call", "compaction", "one of tomorrow"]),
        ("anthropic", "role", ["user", "assistant", "system"]),
        ("neutral", "role", ["system", "developer", "user", "assistant"]),
        (
            "langchain",
            "type",
            ["human", "system", "function", "chat", "remove", "HumanMessageChunk", "SystemMessageChunk"],
        ),
        ("langchain", "role", ["user", "assistant", "developer"]),
    ],
)
def test_messages_without_calls_are_passed_on(dialect, field, values):
    messages = [{field: value, "content": "text"} for value in values]
    assert request_view(messages, dialect=dialect).messages == messages


def test_langchain_reads_chunks_as_the_messages_that_they_are():
    call = {"name": "t", "args": {}, "id": "a"}
    chunk = {"type": "AIMessageChunk", "data": {"content": "", "tool_calls": [call]}}
    answer = {"type": "ToolMessageChunk", "data": {"content": "", "tool_call_id": "a"}}
    assert [o.tool_call_id for o in find_orphan_tool_calls([chunk], dialect="langchain")] == ["a"]
    assert not find_orphan_tool_calls([chunk, answer], dialect="langchain")
    spoken = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert [c.id for c in tool_calls_of(spoken, dialect="langchain")] == ["a"]


@pytest.mark.parametrize("name", ["", "openai", None, 7, []])
def test_an_unknown_dialect_is_refused(name):
    close = InterruptedResult("a", "t", "x", NEVER)
    for refuse in (
        lambda: find_orphan_tool_calls([], dialect=name),
        lambda: request_view([], dialect=name),
        lambda: interrupted_result_message(close, dialect=name),
        lambda: tool_result_message("a", "t", 1, dialect=name),
        lambda: dialect_named(name),
    ):
        with pytest.raises(InvalidSetting, match="anthropic, langchain"):
            refuse()
