"""The frameworks themselves as judges of what is sent; each is skipped where it is not installed.

They read the messages with their own classes, and then say: pydantic-ai by what its repair would still change,
LangGraph by its check of a history, and LangChain's clients by what they would put on the wire, which the rules of the
two APIs behind them judge in turn.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import warnings

import pytest
from dialect_shapes import calls, close, reasoning, result, says, shaped, user
from hypothesis import given, settings
from test_any_transcript import TRANSCRIPTS
from test_request_view import BROKEN
from vendor_rules import RULES

from natsreceipts.transcript import ErrorKind, InterruptedResult, interrupted_result_message, request_view

CLOSE = InterruptedResult("a", "mail", "cut off", ErrorKind.INTERRUPTED_NEVER_STARTED)
MIXED = [
    user("hi"), calls("a", "b"), result("b"), user("next"), calls("a"), close("a"), says(), result("z"), reasoning(),
    calls("c"), user("go on"),
]  # fmt: skip


def framework(name):
    """The framework's module; the test is skipped without it, unless the run says that it must be there."""
    if os.environ.get("NATSRECEIPTS_FRAMEWORKS"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


# ---------------------------------------------------------------- pydantic-ai


def as_pydantic_ai(messages):
    adapter = framework("pydantic_ai.messages").ModelMessagesTypeAdapter
    return adapter.validate_python(messages)


def repair(history):
    module = framework("pydantic_ai.messages")
    if not hasattr(module, "repair_messages"):
        pytest.skip("this pydantic-ai has no repair_messages")
    return module.repair_messages(history)


def accepted_by_pydantic_ai(messages):
    """Read, and left alone by its own repair, but for requests side by side, which are merged into one."""

    def parts(history):
        found = []
        for message in history:
            for part in message.parts:
                found.append((message.kind, part.part_kind, getattr(part, "tool_call_id", None), part.content
                              if hasattr(part, "content") else None))  # fmt: skip
        return found

    history = as_pydantic_ai(messages)
    assert parts(repair(history)) == parts(history)


@pytest.mark.parametrize("name", [name for name in BROKEN if BROKEN[name]])
def test_pydantic_ai_has_nothing_left_to_repair(name):
    messages = shaped(BROKEN[name], "pydantic-ai", grouped=True)
    accepted_by_pydantic_ai(request_view(messages, dialect="pydantic-ai").messages)


def test_pydantic_ai_repairs_what_is_broken():
    broken = as_pydantic_ai(shaped([user(), calls("a"), user(), result("z"), says()], "pydantic-ai"))
    repaired = repair(broken)
    found = [part.tool_call_id for message in repaired for part in message.parts if part.part_kind == "tool-return"]
    assert found == ["a"]


@settings(max_examples=60, deadline=None)
@given(events=TRANSCRIPTS)
def test_pydantic_ai_has_nothing_left_to_repair_in_any_transcript(events):
    accepted_by_pydantic_ai(request_view(shaped(events, "pydantic-ai"), dialect="pydantic-ai").messages)


def test_pydantic_ai_keeps_a_close_as_it_was_minted():
    adapter = framework("pydantic_ai.messages").ModelMessagesTypeAdapter
    message = interrupted_result_message(CLOSE, dialect="pydantic-ai")
    (dumped,) = adapter.dump_python(adapter.validate_python([message]), mode="json")
    assert message["parts"][0].items() <= dumped["parts"][0].items()


@pytest.mark.filterwarnings("default")
def test_an_agent_goes_on_from_a_broken_history():
    framework("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import UserError
    from pydantic_ai.messages import ModelResponse, TextPart
    from pydantic_ai.models.function import FunctionModel

    seen = []

    def model(messages, _info):
        seen.append(messages)
        return ModelResponse(parts=[TextPart("well")])

    agent = Agent(FunctionModel(model))
    broken = shaped([user(), calls("a", "b"), result("b")], "pydantic-ai")
    with pytest.raises(UserError, match="unprocessed tool calls"):
        asyncio.run(agent.run("go on", message_history=as_pydantic_ai(broken[:2])))
    view = request_view(broken, dialect="pydantic-ai")
    answer = asyncio.run(agent.run("go on", message_history=as_pydantic_ai(view.messages)))
    assert answer.output == "well"
    returns = [part for message in seen[-1] for part in message.parts if part.part_kind == "tool-return"]
    assert [(part.tool_call_id, part.outcome) for part in returns] == [("a", "interrupted"), ("b", "success")]
    assert returns[0].content == view.closed[0].text


# ---------------------------------------------------------------- LangChain


def as_langchain(messages):
    from_dict = framework("langchain_core.messages").messages_from_dict
    return from_dict(copy.deepcopy(messages))


def check_langgraph(history):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = framework("langgraph.prebuilt.chat_agent_executor")
    module._validate_chat_history(history)


def openai_request(history):
    model = framework("langchain_openai").ChatOpenAI(model="gpt-4o", api_key="none")
    return model._get_request_payload(history)["messages"]


def anthropic_request(history):
    model = framework("langchain_anthropic").ChatAnthropic(model="any-model", api_key="none")
    return model._get_request_payload(history)["messages"]


def test_langgraph_refuses_a_call_without_a_message():
    with pytest.raises(ValueError, match="do not have a corresponding ToolMessage"):
        check_langgraph(as_langchain(shaped([user(), calls("a"), user()], "langchain")))


@pytest.mark.parametrize("name", BROKEN)
def test_langgraph_accepts_the_request(name):
    history = as_langchain(request_view(shaped(BROKEN[name], "langchain"), dialect="langchain").messages)
    check_langgraph(history)


@pytest.mark.parametrize("name", [*BROKEN, "mixed"])
def test_the_apis_behind_langchain_accept_the_request(name):
    abstract = [user("hi"), *(BROKEN | {"mixed": MIXED})[name], user("go on")]
    messages = request_view(shaped(abstract, "langchain"), dialect="langchain").messages
    RULES["openai-chat"](openai_request(as_langchain(messages)))
    RULES["anthropic"](anthropic_request(as_langchain(messages)))


def test_the_apis_behind_langchain_refuse_the_log_itself():
    from vendor_rules import Refused

    history = as_langchain(shaped(MIXED, "langchain"))
    for name, request in (("openai-chat", openai_request), ("anthropic", anthropic_request)):
        with pytest.raises(Refused):
            RULES[name](request(history))


@settings(max_examples=60, deadline=None)
@given(events=TRANSCRIPTS)
def test_langgraph_accepts_any_request(events):
    check_langgraph(as_langchain(request_view(shaped(events, "langchain"), dialect="langchain").messages))


def test_langchain_keeps_a_close_as_it_was_minted():
    to_dict = framework("langchain_core.messages").messages_to_dict
    message = interrupted_result_message(CLOSE, dialect="langchain")
    (dumped,) = to_dict(as_langchain([message]))
    assert dumped["type"] == message["type"]
    assert message["data"].items() <= dumped["data"].items()


def test_langchain_reads_both_forms_of_a_request():
    convert = framework("langchain_core.messages").convert_to_messages
    tool_call = {"name": "t", "args": {}, "id": "a", "type": "tool_call"}
    flat = request_view([{"type": "ai", "content": "", "tool_calls": [tool_call]}], dialect="langchain").messages
    assert [message.type for message in convert(flat)] == ["ai", "tool"]
    nested = request_view([{"type": "ai", "data": {"content": "", "tool_calls": [tool_call]}}], dialect="langchain")
    assert [message.type for message in as_langchain(nested.messages)] == ["ai", "tool"]
