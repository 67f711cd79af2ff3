"""Broken transcripts of each kind in each dialect, repaired; and what a dialect's rules ask beyond that."""

from __future__ import annotations

import copy

import pytest
from dialect_shapes import (
    DIALECTS,
    a_close,
    calls,
    close,
    reasoning,
    result,
    result_texts,
    says,
    shaped,
    user,
)
from vendor_rules import RULES, Refused

from natsreceipts.transcript import (
    InterruptedResult,
    LeftOut,
    RenamedCall,
    find_orphan_tool_calls,
    is_interrupted_close,
    request_view,
    tool_result_message,
)

BROKEN = {
    "tail orphan": [user(), calls("a")],
    "mid orphan": [user(), calls("a"), user("next"), calls("b"), result("b"), says(), user()],
    "mid orphan before the model's own text": [user(), calls("a"), says(), user()],
    "orphan result": [user(), result("z"), says(), user()],
    "orphan close": [user(), close("z"), says(), user()],
    "orphan result alone": [result("z")],
    "duplicate result": [user(), calls("a"), result("a"), result("a", "again"), user()],
    "duplicate result later": [user(), calls("a"), result("a"), says(), user(), result("a", "again"), user()],
    "reused id": [calls("a"), result("a"), calls("a"), result("a", "other"), user()],
    "reused id while open": [calls("a"), user(), calls("a"), result("a"), user()],
    "reused id, never answered": [calls("a"), calls("a"), calls("a")],
    "one id twice in a message": [calls("a", "a"), result("a"), user()],
    "close, then the real result": [calls("a"), close("a"), user(), result("a"), user()],
    "the real result, then a close": [calls("a"), result("a"), user(), close("a"), user()],
    "two closes": [calls("a"), close("a"), close("a"), user()],
    "parallel calls half answered": [user(), calls("a", "b", "c"), result("b"), user()],
    "parallel calls answered out of order": [calls("a", "b", "c"), result("c"), result("a"), result("b"), user()],
    "parallel calls answered in two turns": [calls("a", "b"), result("b"), user(), result("a"), says()],
    "result before its call": [result("a"), calls("a"), user()],
    "text between": [calls("a"), user(), result("a"), user()],
    "the answer far away": [calls("a"), says(), user(), calls("b"), result("b"), user(), result("a"), user()],
    "nothing": [],
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_transcript_becomes_one_that_the_rules_accept(dialect, name, grouped):
    messages = shaped(BROKEN[name], dialect, grouped=grouped)
    before = copy.deepcopy(messages)
    view = request_view(messages, dialect=dialect)
    RULES[dialect](view.messages)
    assert messages == before
    # There is nothing left to repair in it, and a second look changes nothing.
    again = request_view(view.messages, dialect=dialect)
    assert again.messages == view.messages
    assert again.closed == again.left_out == again.renamed == ()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_good_transcript_is_sent_as_it_is(dialect):
    good = [user(), calls("a", "b", text="so"), result("a"), result("b"), says(), user(), calls("c"), result("c")]
    messages = shaped(good, dialect, grouped=True)
    view = request_view(messages, dialect=dialect)
    assert view.messages == messages
    assert all(new is old for new, old in zip(view.messages, messages, strict=True))
    assert view.closed == view.suspended == view.left_out == view.renamed == ()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_first_real_result_is_the_one_that_is_sent(dialect):
    messages = shaped(
        [calls("a", "b"), close("a"), result("b", "B"), user(), result("a", "A"), result("a", "late"), close("b")],
        dialect,
    )
    view = request_view(messages, dialect=dialect)
    assert result_texts(view.messages, dialect) == [("a", "A"), ("b", "B")]
    at = [m for m in range(len(messages)) if is_interrupted_close(messages[m], dialect=dialect)]
    assert view.left_out == (
        LeftOut("void_close", "a", at[0]),
        LeftOut("duplicate_result", "a", at[1] - 1),
        LeftOut("void_close", "b", at[1]),
    )
    assert not find_orphan_tool_calls(messages, dialect=dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_has_no_call_is_left_out_and_announced(dialect):
    messages = shaped([user(), result("z"), user(), close("y"), says()], dialect)
    view = request_view(messages, dialect=dialect)
    assert view.left_out == (LeftOut("orphan_result", "z", 1), LeftOut("orphan_result", "y", 3))
    assert result_texts(view.messages, dialect) == []
    assert len(view.messages) == 3
    messages = shaped([result("z"), calls("a"), result("a"), close("a"), result("y"), result("a")], dialect)
    left_out = request_view(messages, dialect=dialect).left_out
    assert [(item.reason, item.message_index) for item in left_out] == [
        ("orphan_result", 0), ("void_close", 3), ("orphan_result", 4), ("duplicate_result", 5),
    ]  # fmt: skip
    messages = shaped([user(), result("z"), user(), close("y"), says()], dialect)
    assert [(o.kind, o.tool_call_id, o.message_index) for o in find_orphan_tool_calls(messages, dialect=dialect)] == [
        ("result", "z", 1), ("result", "y", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_orphans_of_both_kinds_come_in_the_order_of_their_messages(dialect):
    messages = shaped([result("z"), calls("a"), user(), result("y"), calls("b")], dialect)
    found = find_orphan_tool_calls(messages, dialect=dialect)
    assert [(o.kind, o.tool_call_id) for o in found] == [("result", "z"), (None, "a"), ("result", "y"), (None, "b")]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_missing_result_is_closed_on_the_wire_only_and_in_place(dialect):
    messages = shaped([calls("a", "b", "c"), result("b", "B"), user("next")], dialect)
    view = request_view(messages, dialect=dialect)
    assert [c.tool_call_id for c in view.closed] == ["a", "c"]
    first, second = (c.text for c in view.closed)
    assert result_texts(view.messages, dialect) == [("a", first), ("b", "B"), ("c", second)]
    assert "above" in second
    assert "above" not in first
    assert [o.tool_call_id for o in find_orphan_tool_calls(messages, dialect=dialect)] == ["a", "c"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_suspended_call_is_no_orphan_and_is_not_closed(dialect):
    messages = shaped([calls("a", "b"), result("b", "B"), user("next")], dialect)
    assert not find_orphan_tool_calls(messages, {"a"}, dialect=dialect)
    view = request_view(messages, dialect=dialect, suspended={"a", "b", "nobody"})
    RULES[dialect](view.messages)
    assert view.closed == ()
    assert [(c.tool_call_id, c.tool_name) for c in view.suspended] == [("a", "t")]
    # A call on hold has not failed.
    assert not any(
        mark in str(view.messages) for mark in ("is_error", "'isError': True", "'status': 'error'", "incomplete")
    )
    (_, held), answered = result_texts(view.messages, dialect)
    assert "on hold" in held
    assert answered == ("b", "B")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_suspending_holds_the_last_site_of_an_id_only(dialect):
    messages = shaped([calls("a"), user(), calls("a")], dialect)
    (orphan,) = find_orphan_tool_calls(messages, {"a"}, dialect=dialect)
    assert (orphan.tool_call_id, orphan.message_index) == ("a", 0)
    view = request_view(messages, dialect=dialect, suspended={"a"})
    RULES[dialect](view.messages)
    assert (len(view.closed), [c.message_index for c in view.suspended]) == (1, [2])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_suspended_call_with_a_result_is_answered(dialect):
    messages = shaped([calls("a"), result("a", "A"), user()], dialect)
    view = request_view(messages, dialect=dialect, suspended=["a"])
    assert view.suspended == ()
    assert result_texts(view.messages, dialect) == [("a", "A")]


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "openai-chat"])
def test_a_reused_id_gets_another_one_that_depends_on_nothing_later(dialect):
    long = "c" * 60
    start = [calls("a", "a_2"), result("a"), result("a_2"), calls("a"), result("a", "2nd"), calls(long), result(long)]
    more = [*start, calls("a", "a_3", long), result("a"), result("a_3"), result(long), user()]
    first, second = (request_view(shaped(given, dialect), dialect=dialect) for given in (start, more))
    RULES[dialect](second.messages)
    assert second.messages[: len(first.messages)] == first.messages
    # "a_2" is taken, so the second "a" is "a_3"; so the real "a_3" that comes later is another one.
    assert [(c.tool_call_id, c.wire_id) for c in first.renamed] == [("a", "a_3")]
    assert [c.wire_id for c in second.renamed] == ["a_3", "a_4", "a_3_2", long[:58] + "_2"]
    assert ("a_3", "2nd") in result_texts(second.messages, dialect)


def test_chat_keeps_ids_that_begin_anew_in_each_turn():
    messages = shaped([calls("a"), result("a"), calls("a"), result("a", "2nd"), user()], "openai-chat")
    view = request_view(messages, dialect="openai-chat")
    assert view.messages == messages
    messages = shaped([calls("a", "a"), result("a")], "openai-chat")
    assert request_view(messages, dialect="openai-chat").renamed == (RenamedCall("a", "a_2", 0),)


# ---------------------------------------------------------------- one dialect's own


def test_anthropic_keeps_what_else_is_in_the_users_message():
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/i.png"}}
    text = {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}
    (call,) = shaped([calls("a", "b")], "anthropic")
    ((b,),) = (m["content"] for m in shaped([result("b", "B")], "anthropic"))
    duplicate, orphan = {**b, "content": "again"}, {**b, "tool_use_id": "z"}
    view = request_view(
        [call, {"role": "user", "content": [text, orphan, b, image]}, {"role": "user", "content": [duplicate, text]}],
        dialect="anthropic",
    )
    carrier, rest = view.messages[1:]
    assert carrier["content"][1:] == [b, text, image]
    assert carrier["content"][0]["tool_use_id"] == "a"
    assert carrier["content"][0]["is_error"] is True
    assert rest == {"role": "user", "content": [text]}


def test_anthropic_puts_closes_into_the_users_next_message():
    view = request_view(shaped([calls("a"), user("hi")], "anthropic"), dialect="anthropic")
    assert [block["type"] for block in view.messages[1]["content"]] == ["tool_result", "text"]
    assert len(view.messages) == 2
    view = request_view(shaped([calls("a"), {"role": "user", "text": ""}], "anthropic"), dialect="anthropic")
    RULES["anthropic"](view.messages)


def test_pydantic_ai_keeps_the_request_around_the_results():
    call, one = shaped([calls("a", "b"), result("b", "B")], "pydantic-ai")
    prompt = {"part_kind": "user-prompt", "content": "and now"}
    retry = {"part_kind": "retry-prompt", "content": "no such day", "tool_name": "t", "tool_call_id": "a"}
    feedback = {"part_kind": "retry-prompt", "content": "answer in JSON", "tool_name": None, "tool_call_id": "a"}
    request = {"kind": "request", "parts": [prompt, *one["parts"], feedback], "instructions": "be kind", "run_id": "r"}
    view = request_view([call, request], dialect="pydantic-ai")
    assert [c.tool_call_id for c in view.closed] == ["a"]
    assert view.messages[1] | {"parts": None} == request | {"parts": None}
    assert [part["part_kind"] for part in view.messages[1]["parts"]] == [
        "tool-return", "tool-return", "user-prompt", "retry-prompt",
    ]  # fmt: skip
    answered = request_view([call, {**request, "parts": [retry, *one["parts"]]}], dialect="pydantic-ai")
    assert (answered.closed, answered.left_out) == ((), ())


def test_pydantic_ai_ignores_what_the_provider_ran_itself():
    native = {"part_kind": "builtin-tool-call", "tool_name": "web_search", "args": {}, "tool_call_id": "n"}
    assert not find_orphan_tool_calls([{"kind": "response", "parts": [native]}], dialect="pydantic-ai")


def test_responses_keeps_parallel_calls_together_and_reasoning_in_front_of_its_item():
    dialect = "openai-responses"
    items = shaped(
        [reasoning(), calls("a"), reasoning(), calls("b"), user("wait"), result("b"), result("a"), reasoning(), says()],
        dialect,
    )
    view = request_view(items, dialect=dialect)
    RULES[dialect](view.messages)
    assert [item.get("type", "message") for item in view.messages] == [
        "reasoning", "function_call", "reasoning", "function_call", "function_call_output", "function_call_output",
        "message", "reasoning", "message",
    ]  # fmt: skip
    # One after the other stays one after the other.
    items = shaped([calls("a"), result("a"), reasoning(), calls("b"), result("b")], dialect)
    assert request_view(items, dialect=dialect).messages == items


@pytest.mark.parametrize(
    ("abstract", "loose"),
    [
        ([user(), reasoning()], [1]),
        ([user(), reasoning(), reasoning()], [1, 2]),
        ([reasoning(), user()], [0]),
        ([calls("a"), reasoning(), result("a")], [1]),
        ([calls("a"), reasoning()], [1]),
        ([reasoning(), reasoning(), calls("a"), result("a")], []),
        ([calls("a"), reasoning(), result("a"), says()], []),
    ],
)
def test_responses_leaves_out_reasoning_that_nothing_follows(abstract, loose):
    items = shaped(abstract, "openai-responses")
    view = request_view(items, dialect="openai-responses")
    RULES["openai-responses"](view.messages)
    assert view.left_out == tuple(LeftOut("loose_reasoning", None, index) for index in loose)


@pytest.mark.parametrize("kind", ["mcp_approval_response", "computer_call_output"])
def test_responses_knows_what_the_host_says_from_what_the_model_says(kind):
    (thought,) = shaped([reasoning()], "openai-responses")
    view = request_view([thought, {"type": kind}], dialect="openai-responses")
    assert view.messages == [{"type": kind}]
    view = request_view([thought, {"type": "web_search_call"}], dialect="openai-responses")
    assert view.left_out == ()


def test_responses_answers_a_custom_tool_in_its_own_kind():
    dialect = "openai-responses"
    call = {"type": "custom_tool_call", "call_id": "a", "name": "shell", "input": "ls"}
    for answer in ([], [a_close("a", dialect)], [tool_result_message("a", "shell", "x", dialect=dialect)]):
        view = request_view([call, *answer], dialect=dialect)
        RULES[dialect](view.messages)
        assert view.messages[1]["type"] == "custom_tool_call_output"
    with pytest.raises(Refused):
        RULES[dialect]([call, tool_result_message("a", "shell", "x", dialect=dialect)])


def test_responses_passes_hosted_tools_on():
    items = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "computer_call", "call_id": "c", "action": {}},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    ]
    view = request_view(items, dialect="openai-responses")
    assert view.messages == items


def test_chat_knows_custom_tools():
    call = {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls"}}]}
    (orphan,) = find_orphan_tool_calls([call], dialect="openai-chat")
    assert (orphan.tool_call_id, orphan.tool_name) == ("a", "sh")
    RULES["openai-chat"](request_view([call], dialect="openai-chat").messages)


def test_langchain_speaks_the_flat_form_where_the_caller_does():
    tool_call = {"name": "t", "args": {}, "id": "a", "type": "tool_call"}
    flat = {"type": "ai", "content": "", "tool_calls": [tool_call], "invalid_tool_calls": []}
    (_, closed) = request_view([flat], dialect="langchain").messages
    assert (closed["type"], closed["tool_call_id"], closed["status"]) == ("tool", "a", "error")
    answered = {"type": "tool", "content": "x", "tool_call_id": "a"}
    assert request_view([flat, answered], dialect="langchain").messages == [flat, answered]
    (_, nested) = request_view([{"type": "ai", "data": flat}, answered], dialect="langchain").messages
    assert nested == {"type": "tool", "data": answered}
    said = {"role": "tool", "content": "x", "tool_call_id": "a"}
    (_, nested) = request_view([{"type": "ai", "data": flat}, said], dialect="langchain").messages
    assert nested == {"type": "tool", "data": {"content": "x", "tool_call_id": "a"}}
    bare = {"type": "tool", "data": {"content": "x", "tool_call_id": "a"}}
    assert request_view([flat, bare], dialect="langchain").messages[1] == answered


def test_langchain_renames_an_id_wherever_the_message_repeats_it():
    def ai(call_id):
        return {
            "type": "ai",
            "data": {
                "type": "ai",
                "content": [
                    "text", {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": call_id, "name": "t", "input": {}},
                    {"type": "function_call", "call_id": call_id, "id": "fc_1"},
                ],
                "tool_calls": [{"name": "t", "args": {}, "id": call_id, "type": "tool_call"}],
                "invalid_tool_calls": [{"name": "t", "args": "{", "id": "b" + call_id, "type": "invalid_tool_call"}],
                "additional_kwargs": {"tool_calls": [{"id": call_id, "function": {"name": "t", "arguments": "{}"}}]},
            },
        }  # fmt: skip

    view = request_view([ai("a"), ai("a")], dialect="langchain")
    assert view.messages[0] == ai("a")
    assert view.messages[3] == {
        "type": "ai",
        "data": {
            **ai("a_2")["data"],
            "invalid_tool_calls": [{"name": "t", "args": "{", "id": "ba_2", "type": "invalid_tool_call"}],
        },
    }
    RULES["langchain"](view.messages)


def test_langchain_reads_calls_from_before_there_were_tool_calls():
    old = {"id": "a", "function": {"name": "t", "arguments": "{}"}, "type": "function"}
    message = {"type": "ai", "data": {"content": "", "additional_kwargs": {"tool_calls": [old]}}}
    (orphan,) = find_orphan_tool_calls([message], dialect="langchain")
    assert (orphan.tool_call_id, orphan.tool_name) == ("a", "t")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_our_own_mark_is_taken_from_a_result(dialect):
    ours = a_close("a", dialect)
    match dialect:
        case "neutral":
            ours["details"]["seen"] = 1
        case "pydantic-ai":
            ours["parts"][0]["metadata"]["seen"] = 1
        case "langchain":
            ours["data"]["artifact"]["seen"] = 1
        case _:
            pass
    view = request_view([*shaped([calls("a")], dialect), ours], dialect=dialect)
    RULES[dialect](view.messages)
    text = str(view.messages)
    assert ("seen" in text) is (dialect in ("neutral", "pydantic-ai", "langchain"))
    details = tool_result_message("a", "t", "x", dialect="neutral") | {"details": {"exit": 1, "errorKind": "mine"}}
    assert request_view([*shaped([calls("a")], "neutral"), details]).messages[1] is details


def test_what_a_view_reports_is_what_it_sent():
    view = request_view(shaped([calls("a")], "neutral"))
    (closed,) = view.closed
    assert isinstance(closed, InterruptedResult)
    assert view.messages[1]["content"] == [{"type": "text", "text": closed.text}]
    assert view.messages[1]["isError"] is True
    assert "details" not in view.messages[1]
