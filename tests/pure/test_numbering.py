"""Equal calls of a turn: two are two, a retried turn makes the same two, and a failed one is that one again."""

from __future__ import annotations

import pytest

from natsreceipts import NotCanonical, tool_result_message
from natsreceipts.dialects import DIALECTS
from natsreceipts.dialects.base import ToolCall
from natsreceipts.numbering import Came, Made, call_number, distinct_of, turn_of

A = {"to": "ann"}
B = {"to": "bob"}


def made(*ids, tool="send", args=A):
    return [Made(each, tool, args) for each in ids]


def number(turn, call_id, args=A):
    return call_number(turn, "send", args, call_id)


def test_the_first_is_as_if_there_were_no_numbers():
    assert number([made("a")], "a") == 1
    assert distinct_of(1) is None
    assert distinct_of(2) == "call 2"


def test_equal_calls_of_one_message_are_told_apart_by_their_order():
    turn = [made("a", "b", "c")]
    assert [number(turn, each) for each in "abc"] == [1, 2, 3]


def test_only_equal_calls_count():
    turn = [[*made("x", args=B), *made("y", tool="read"), *made("a")], [*made("b", args={"to": "ann", "n": 1.0})]]
    assert number(turn, "a") == 1
    assert number([*turn, made("c", args={"n": 1, "to": "ann"})], "c", {"to": "ann", "n": 1}) == 1


def test_an_equal_call_after_a_result_is_another_one():
    turn = [made("a"), Came("a"), made("b")]
    assert (number(turn, "a"), number(turn, "b")) == (1, 2)


def test_an_equal_call_after_one_that_came_to_nothing_is_that_one_again():
    assert number([made("a"), made("b")], "b") == 1
    assert number([made("a", "b"), Came("b"), made("c")], "c") == 1
    assert number([made("a", "b"), Came("b"), made("c", "d")], "d") == 3


def test_a_turn_that_is_started_again_makes_the_same_calls_whatever_their_ids():
    first = [made("a", "b"), Came("a"), Came("b"), made("c")]
    again = [made("x", "y"), Came("x"), Came("y"), made("z")]
    assert [number(first, each) for each in "abc"] == [number(again, each) for each in "xyz"] == [1, 2, 3]


def test_an_id_that_is_used_again_is_the_later_call():
    assert number([made("call_0"), Came("call_0"), made("call_0")], "call_0") == 2
    assert number([made("call_0"), Came("call_0"), made("call_0", args=B)], "call_0", B) == 1


@pytest.mark.parametrize("call_id", [None, "unheard-of"])
def test_a_call_that_the_turn_does_not_show_comes_next(call_id):
    assert number([], call_id) == 1
    assert number([made("a"), Came("a")], call_id) == 2


def test_calls_without_ids_are_counted_too():
    assert number([[Made(None, "send", A), Made("a", "send", A)]], "a") == 2


def test_arguments_without_a_canonical_form():
    assert number([made("a", args={"x": float("nan")}), made("b")], "b") == 1
    with pytest.raises(NotCanonical):
        call_number([], "send", {"x": float("nan")})


# ---------------------------------------------------------------- as a session's log shows it


def message_with(dialect, *calls):
    """The model's message with these calls, as one dict or several."""
    shapes = {
        "neutral": lambda: {
            "role": "assistant",
            "content": [{"type": "toolCall", "id": i, "name": n, "arguments": a} for i, n, a in calls],
        },
        "anthropic": lambda: {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls],
        },
        "openai-chat": lambda: {
            "role": "assistant",
            "tool_calls": [{"id": i, "function": {"name": n, "arguments": a}} for i, n, a in calls],
        },
        "langchain": lambda: {
            "type": "ai",
            "data": {"content": "", "tool_calls": [{"id": i, "name": n, "args": a} for i, n, a in calls]},
        },
        "pydantic-ai": lambda: {
            "kind": "response",
            "parts": [{"part_kind": "tool-call", "tool_call_id": i, "tool_name": n, "args": a} for i, n, a in calls],
        },
    }
    if dialect == "openai-responses":
        return [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in calls]
    return [shapes[dialect]()]


def transcript(dialect, *steps):
    """Messages of steps: a text is the user's, a list of ids makes the call, (id, failed) is its result."""
    out, ends = [], []
    for step in steps:
        if isinstance(step, str):
            out.append(DIALECTS[dialect].user_message(step))
        elif isinstance(step, list):
            out += message_with(dialect, *[(each, "send", A) for each in step])
        else:
            call_id, failed = step
            out.append(tool_result_message(call_id, "send", "text", is_error=failed, dialect=dialect))
        ends.append(len(out) - 1)
    return out, ends


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_log_is_numbered_as_the_frameworks_number(dialect):
    def numbers(*steps):
        messages, ends = transcript(dialect, *steps)
        turn = turn_of(messages, ends[-1], DIALECTS[dialect])
        return [number(turn, each) for each in steps[-1]]

    another = 2 if DIALECTS[dialect].marks_errors else 1  # where a result may be a failure for all one can tell
    assert numbers("hi", ["a", "b"]) == [1, 2]
    assert numbers("hi", ["a"], ("a", False), ["b"]) == [another]
    assert numbers("hi", ["a"], ("a", True), ["b"]) == [1]
    merged = dialect == "pydantic-ai"  # what is said behind results stands with them there
    assert numbers("hi", ["a"], ("a", False), "again", ["b"]) == [2 if merged else 1]
    assert numbers(["a"], ("a", False), ["a"]) == [another]


def test_items_that_stand_together_are_one_message():
    messages, _ = transcript("openai-responses", "hi", ["a", "b", "c"])
    turns = [turn_of(messages, index, DIALECTS["openai-responses"]) for index in (1, 2, 3)]
    assert [number(turn, each) for turn, each in zip(turns, "abc", strict=True)] == [1, 2, 3]


def test_what_a_tool_adds_for_the_model_does_not_begin_a_turn():
    result = tool_result_message("a", "send", "sent", dialect="pydantic-ai")
    result["parts"].append({"part_kind": "user-prompt", "content": "a picture"})
    messages = [DIALECTS["pydantic-ai"].user_message("hi"), *message_with("pydantic-ai", ("a", "send", A)), result]
    messages += message_with("pydantic-ai", ("b", "send", A))
    assert number(turn_of(messages, 3, DIALECTS["pydantic-ai"]), "b") == 2


def test_what_the_user_says_behind_results_stands_with_them_where_requests_are_merged():
    said = DIALECTS["pydantic-ai"].user_message("go on")
    result = tool_result_message("a", "send", "sent", dialect="pydantic-ai")
    merged = {**result, "parts": [*result["parts"], *said["parts"]]}
    first, second = (message_with("pydantic-ai", (each, "send", A)) for each in "ab")
    for between in ([result, said], [merged]):
        messages = [said, *first, *between, *second]
        assert number(turn_of(messages, len(messages) - 1, DIALECTS["pydantic-ai"]), "b") == 2


def test_the_arguments_of_a_call_may_be_text():
    call = ToolCall("a", "send", '{"to": "ann"}')
    assert call_number([[Made(call.id, call.name, call.arguments)]], "send", A, "a") == 1
