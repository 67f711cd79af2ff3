"""The validators themselves: each accepts a good transcript and refuses each kind of broken one."""

from __future__ import annotations

import pytest
from dialect_shapes import DIALECTS, a_close, calls, close, reasoning, result, says, shaped, user
from vendor_rules import RULES, Refused

GOOD = [user(), calls("a", "b"), result("a"), result("b"), says(), user(), calls("c"), result("c"), user()]
BROKEN = {
    "tail orphan": [user(), calls("a")],
    "one of two": [user(), calls("a", "b"), result("a"), user()],
    "mid orphan": [calls("a"), says(), user(), calls("b"), result("b")],
    "orphan result": [user(), result("z"), user()],
    "result before its call": [result("a"), calls("a"), user()],
    "duplicate result": [calls("a"), result("a"), result("a"), user()],
    "two results, one of another": [calls("a", "b"), result("a"), result("a"), user()],
    "one id twice in a message": [calls("a", "a"), result("a"), result("a"), user()],
    "close kept with its mark": [calls("a"), close("a"), user()],
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_good_transcript_is_accepted(dialect):
    RULES[dialect](shaped(GOOD, dialect, grouped=True))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_transcript_is_refused(dialect, name):
    with pytest.raises(Refused):
        RULES[dialect](shaped(BROKEN[name], dialect, grouped=True))


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "openai-responses"])
def test_a_text_between_call_and_result_is_refused(dialect):
    with pytest.raises(Refused):
        RULES[dialect](shaped([calls("a"), user(), result("a"), user()], dialect, grouped=True))


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "openai-chat"])
def test_an_id_used_in_two_turns_is_refused(dialect):
    with pytest.raises(Refused):
        RULES[dialect](shaped([calls("a"), result("a"), calls("a"), result("a"), user()], dialect))


def test_chat_accepts_an_id_used_in_two_turns():
    RULES["openai-chat"](shaped([calls("a"), result("a"), calls("a"), result("a"), user()], "openai-chat"))


def test_responses_accepts_an_output_later_on_and_refuses_loose_reasoning():
    accept = RULES["openai-responses"]
    accept(shaped([reasoning(), calls("a"), user(), result("a"), reasoning(), says()], "openai-responses"))
    for broken in ([user(), reasoning()], [reasoning(), user()], [calls("a"), reasoning(), result("a")]):
        with pytest.raises(Refused):
            accept(shaped(broken, "openai-responses"))


def test_anthropic_refuses_results_behind_text_and_spread_over_two_messages():
    accept = RULES["anthropic"]
    call, one, two = shaped([calls("a", "b"), result("a"), result("b")], "anthropic")
    text = {"type": "text", "text": "hi"}
    accept([call, {"role": "user", "content": [*one["content"], *two["content"], text]}])
    for broken in (
        [call, one, two],
        [call, {"role": "user", "content": [text, *one["content"], *two["content"]]}],
        [call, {"role": "user", "content": [*one["content"], *a_close("b", "anthropic")["content"]]}],
    ):
        with pytest.raises(Refused):
            accept(broken)
