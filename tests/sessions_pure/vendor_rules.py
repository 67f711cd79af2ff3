"""What each API refuses, written from the vendors' own error messages, and from nothing of ours.

Each function raises `Refused` for a list of messages that its API would answer with a 400.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class Refused(Exception):
    """The API answers 400."""


def openai_chat(messages: list[dict[str, Any]]) -> None:
    """Every id is answered by tool messages right after the assistant message, before any other role."""
    waiting: Counter[str] = Counter()
    answered: set[str] = set()
    for at, message in enumerate(messages):
        _known(message, {"role", "content", "tool_calls", "tool_call_id", "name", "refusal", "audio"}, at)
        if message["role"] == "tool":
            if message["tool_call_id"] in answered:
                raise Refused(f"messages[{at}]: tool_call_id was answered before")
            if not waiting[message["tool_call_id"]]:
                raise Refused(f"messages[{at}]: role 'tool' must be a response to a preceding message with tool_calls")
            waiting[message["tool_call_id"]] -= 1
            answered.add(message["tool_call_id"])
            continue
        if +waiting:
            raise Refused(f"messages[{at}]: tool_call_ids did not have response messages: {[*(+waiting)]}")
        waiting = Counter(call["id"] for call in message.get("tool_calls") or [])
        answered = set()
        if any(count > 1 for count in waiting.values()):
            raise Refused(f"messages[{at}]: duplicate tool_call_id")
    if +waiting:
        raise Refused(f"the last tool_call_ids did not have response messages: {[*(+waiting)]}")


def openai_responses(items: list[dict[str, Any]]) -> None:
    """Pairs by call_id, the output anywhere later; both directions; a reasoning item keeps its following item."""
    open_calls: dict[str, str] = {}
    used: set[str] = set()
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        if "natsreceipts" in item:
            raise Refused(f"input[{at}]: unknown parameter")
        if kind in ("function_call", "custom_tool_call"):
            if item["call_id"] in used:
                raise Refused(f"input[{at}]: duplicate call_id")
            used.add(item["call_id"])
            open_calls[item["call_id"]] = kind
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if item["call_id"] not in used:
                raise Refused(f"input[{at}]: No tool call found for function call output")
            if open_calls.pop(item["call_id"], None) != kind.removesuffix("_output"):
                raise Refused(f"input[{at}]: more than one output, or the output of another kind of call")
            if kind == "custom_tool_call_output" and "status" in item:
                raise Refused(f"input[{at}]: unknown parameter: status")
        elif kind == "reasoning":
            after = [later for later in items[at + 1 :] if later.get("type") != "reasoning"]
            follower = after[0] if after else {}
            if follower.get("role") != "assistant" and follower.get("type") not in (
                "function_call",
                "custom_tool_call",
            ):
                raise Refused(f"input[{at}]: reasoning was provided without its required following item")
    if open_calls:
        raise Refused(f"No tool output found for function call {[*open_calls]}")


def anthropic(messages: list[dict[str, Any]]) -> None:
    """All results of one assistant turn in the next user message, before any text in it, nothing between."""
    expected: list[str] = []
    used: set[str] = set()
    for at, message in enumerate(messages):
        _known(message, {"role", "content"}, at)
        content = message["content"]
        if not content:
            raise Refused(f"messages.{at}: all messages must have non-empty content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if any(block["type"] == "text" and not block["text"] for block in blocks):
            raise Refused(f"messages.{at}: text content blocks must be non-empty")
        found = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        for block in blocks:
            if block["type"] == "tool_result" and block.keys() - {"type", "tool_use_id", "content", "is_error"}:
                raise Refused(f"messages.{at}: Extra inputs are not permitted")
        if message["role"] == "assistant" and found:
            raise Refused(f"messages.{at}: tool_result blocks can only be in user messages")
        if set(found) - set(expected):
            raise Refused(f"messages.{at}: unexpected tool_use_id found in tool_result blocks")
        if set(expected) - set(found):
            raise Refused(f"messages.{at}: tool_use ids were found without tool_result blocks immediately after")
        if len(found) != len(set(found)):
            raise Refused(f"messages.{at}: each tool_use must have a single result")
        if any(block["type"] != "tool_result" for block in blocks[: len(found)]):
            raise Refused(f"messages.{at}: tool_result blocks must come first")
        expected = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if len(expected) != len(set(expected)) or used & set(expected):
            raise Refused(f"messages.{at}: tool_use ids must be unique")
        used |= set(expected)
        if expected and message["role"] != "assistant":
            raise Refused(f"messages.{at}: tool_use blocks can only be in assistant messages")
    if expected:
        raise Refused(f"tool_use ids were found without tool_result blocks immediately after: {expected}")


def pydantic_ai(messages: list[dict[str, Any]]) -> None:
    """A turn's returns at the head of the next request, one for each call; what its own repair would leave alone."""
    expected: list[str] = []
    used: set[str] = set()
    for at, message in enumerate(messages):
        if not message["parts"]:
            raise Refused(f"{at}: no parts")
        found = [part["tool_call_id"] for part in message["parts"] if part["part_kind"] == "tool-return"]
        _nothing_of_ours(message, at)
        if sorted(found) != sorted(expected):
            raise Refused(f"{at}: {found} where {expected} was expected")
        if found and message["kind"] != "request":
            raise Refused(f"{at}: a tool-return in a response")
        if any(part["part_kind"] != "tool-return" for part in message["parts"][: len(found)]):
            raise Refused(f"{at}: something before a result")
        expected = [part["tool_call_id"] for part in message["parts"] if part["part_kind"] == "tool-call"]
        if len(expected) != len(set(expected)) or used & set(expected):
            raise Refused(f"{at}: an id twice")
        used |= set(expected)
    if expected:
        raise Refused(f"no results for {expected}")


def langchain(messages: list[dict[str, Any]]) -> None:
    """Every call has its ToolMessage (LangGraph), directly after it and once (the APIs behind it)."""
    flat = [
        {
            "calls": [call["id"] for field in ("tool_calls", "invalid_tool_calls") for call in data.get(field, [])],
            "answers": data["tool_call_id"] if message["type"] == "tool" else None,
        }
        for message in messages
        for data in [message["data"]]
    ]
    for at, message in enumerate(messages):
        _nothing_of_ours(message, at)
    _adjacent(flat)


def neutral(messages: list[dict[str, Any]]) -> None:
    """Results directly after their calls and in their order, ids used once, no mark of a close."""
    flat: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        _nothing_of_ours(message, at)
        blocks = message["content"] if isinstance(message["content"], list) else []
        ids = [block["id"] for block in blocks if block["type"] == "toolCall"]
        flat.append({"calls": ids, "answers": message["toolCallId"] if message["role"] == "toolResult" else None})
    _adjacent(flat)


def _adjacent(flat: list[dict[str, Any]]) -> None:
    expected: list[str] = []
    used: set[str] = set()
    for at, message in enumerate(flat):
        if message["answers"] is not None:
            if not expected or expected.pop(0) != message["answers"]:
                raise Refused(f"{at}: a result out of its place")
            continue
        if expected:
            raise Refused(f"{at}: no results for {expected}")
        expected = list(message["calls"])
        if len(expected) != len(set(expected)) or used & set(expected):
            raise Refused(f"{at}: an id twice")
        used |= set(expected)
    if expected:
        raise Refused(f"no results for {expected}")


def _known(message: dict[str, Any], names: set[str], at: int) -> None:
    if message.keys() - names:
        raise Refused(f"messages.{at}: unknown fields {message.keys() - names}")


def _nothing_of_ours(value: object, at: int) -> None:
    if isinstance(value, dict):
        if "natsreceipts" in value or "errorKind" in value:
            raise Refused(f"{at}: a field of ours")
        for item in value.values():
            _nothing_of_ours(item, at)
    elif isinstance(value, list):
        for item in value:
            _nothing_of_ours(item, at)


RULES = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic,
    "pydantic-ai": pydantic_ai,
    "langchain": langchain,
    "neutral": neutral,
}
