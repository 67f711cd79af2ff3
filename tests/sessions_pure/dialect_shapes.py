"""Abstract transcripts, written out in each dialect by hand: what the vendors' own clients would have logged.

An abstract message is ``{"role": "user", "text"}``, ``{"role": "assistant", "calls": [{"id", "name"}], "text"}``,
``{"role": "toolResult", "toolCallId", "text", "close"}`` or ``{"role": "reasoning"}`` (only Responses has it).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from natsreceipts.transcript import ErrorKind, InterruptedResult, interrupted_result_message

if TYPE_CHECKING:
    from collections.abc import Sequence

DIALECTS = ("openai-chat", "openai-responses", "anthropic", "pydantic-ai", "langchain", "neutral")
ARGS = {"to": "ada"}


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "text": text}


def calls(*ids: str, text: str = "", name: str = "t") -> dict[str, Any]:
    return {"role": "assistant", "calls": [{"id": id_, "name": name} for id_ in ids], "text": text}


def says(text: str = "well") -> dict[str, Any]:
    return {"role": "assistant", "calls": [], "text": text}


def result(call_id: str, text: str = "done") -> dict[str, Any]:
    return {"role": "toolResult", "toolCallId": call_id, "text": text}


def close(call_id: str) -> dict[str, Any]:
    return {"role": "toolResult", "toolCallId": call_id, "close": True}


def reasoning() -> dict[str, Any]:
    return {"role": "reasoning"}


def a_close(call_id: str, dialect: str, kind: ErrorKind = ErrorKind.INTERRUPTED_OUTCOME_UNKNOWN) -> dict[str, Any]:
    return interrupted_result_message(InterruptedResult(call_id, "t", "closed", kind), dialect=dialect)


def shaped(abstract: Sequence[dict[str, Any]], dialect: str, *, grouped: bool = False) -> list[dict[str, Any]]:
    """The messages in a dialect. ``grouped``: neighbours of the user's side in one message, where a dialect can."""
    return [message for message, _ in shaped_with_origins(abstract, dialect, grouped=grouped)]


def shaped_with_origins(
    abstract: Sequence[dict[str, Any]], dialect: str, *, grouped: bool = False
) -> list[tuple[dict[str, Any], int]]:
    """The messages, each with the index of the abstract message that it (first) came from."""
    out: list[tuple[dict[str, Any], int]] = []
    for index, message in enumerate(abstract):
        for new in _one(message, dialect, index):
            before = out[-1][0] if out else {}
            if grouped and dialect == "anthropic" and before.get("role") == new["role"] == "user":
                out[-1] = ({"role": "user", "content": _blocks(before) + _blocks(new)}, out[-1][1])
            elif grouped and dialect == "pydantic-ai" and before.get("kind") == new["kind"] == "request":
                out[-1] = ({**before, "parts": before["parts"] + new["parts"]}, out[-1][1])
            else:
                out.append((new, index))
    return out


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _one(message: dict[str, Any], dialect: str, index: int) -> list[dict[str, Any]]:
    role, text = message["role"], message.get("text") or ""
    if role == "reasoning":
        item = {"type": "reasoning", "id": f"rs_{index}", "summary": [], "encrypted_content": "…"}
        return [item] if dialect == "openai-responses" else []
    if message.get("close"):
        return [a_close(message["toolCallId"], dialect)]
    called = message.get("calls") or []
    match dialect, role:
        case "openai-chat", "user":
            return [{"role": "user", "content": text}]
        case "openai-chat", "assistant":
            tool_calls = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": json.dumps(ARGS)}}
                for c in called
            ]
            said: dict[str, Any] = {"role": "assistant", "content": text or None}
            return [{**said, "tool_calls": tool_calls} if tool_calls else said]
        case "openai-chat", "toolResult":
            return [{"role": "tool", "tool_call_id": message["toolCallId"], "content": text}]
        case "openai-responses", "user":
            return [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        case "openai-responses", "assistant":
            content = [{"type": "output_text", "text": text, "annotations": []}]
            head = {"type": "message", "id": f"msg_{index}", "role": "assistant", "content": content}
            items = [
                {"type": "function_call", "id": f"fc_{index}_{n}", "call_id": c["id"], "name": c["name"],
                 "arguments": json.dumps(ARGS), "status": "completed"}
                for n, c in enumerate(called)
            ]  # fmt: skip
            return [head, *items] if text or not items else items
        case "openai-responses", "toolResult":
            return [{"type": "function_call_output", "call_id": message["toolCallId"], "output": text}]
        case "anthropic", "user":
            return [{"role": "user", "content": text}]
        case "anthropic", "assistant":
            uses = [{"type": "tool_use", "id": c["id"], "name": c["name"], "input": ARGS} for c in called]
            texts = [{"type": "text", "text": text or "…"}] if text or not uses else []
            return [{"role": "assistant", "content": texts + uses}]
        case "anthropic", "toolResult":
            block = {"type": "tool_result", "tool_use_id": message["toolCallId"], "content": text}
            return [{"role": "user", "content": [block]}]
        case "pydantic-ai", "user":
            return [{"kind": "request", "parts": [{"part_kind": "user-prompt", "content": text}]}]
        case "pydantic-ai", "assistant":
            parts: list[dict[str, Any]] = [{"part_kind": "text", "content": text}] if text or not called else []
            parts += (
                {"part_kind": "tool-call", "tool_name": c["name"], "args": ARGS, "tool_call_id": c["id"]}
                for c in called
            )
            return [{"kind": "response", "parts": parts, "model_name": "m"}]
        case "pydantic-ai", "toolResult":
            part = {
                "part_kind": "tool-return",
                "tool_name": "t",
                "content": text,
                "tool_call_id": message["toolCallId"],
            }
            return [{"kind": "request", "parts": [part]}]
        case "langchain", "user":
            return [{"type": "human", "data": {"content": text, "type": "human"}}]
        case "langchain", "assistant":
            # The last of several is of text that was not JSON.
            split = max(1, len(called) - 1)
            good = [{"name": c["name"], "args": ARGS, "id": c["id"], "type": "tool_call"} for c in called[:split]]
            bad = [
                {"name": c["name"], "args": "{", "id": c["id"], "error": None, "type": "invalid_tool_call"}
                for c in called[split:]
            ]
            data = {"content": text, "type": "ai", "tool_calls": good, "invalid_tool_calls": bad}
            return [{"type": "ai", "data": data}]
        case "langchain", "toolResult":
            data = {"content": text, "type": "tool", "tool_call_id": message["toolCallId"], "status": "success"}
            return [{"type": "tool", "data": data}]
        case "neutral", "user":
            return [{"role": "user", "content": text}]
        case "neutral", "assistant":
            texts = [{"type": "text", "text": text}] if text or not called else []
            blocks = [{"type": "toolCall", "id": c["id"], "name": c["name"], "arguments": ARGS} for c in called]
            return [{"role": "assistant", "content": texts + blocks}]
        case "neutral", "toolResult":
            return [{
                "role": "toolResult", "toolCallId": message["toolCallId"], "toolName": "t",
                "content": [{"type": "text", "text": text}], "isError": False,
            }]  # fmt: skip
        case _:
            raise AssertionError(message)


def result_texts(messages: Sequence[dict[str, Any]], dialect: str) -> list[tuple[str, str]]:
    """(id, text) of every result in messages of a dialect, in order."""
    found: list[tuple[str, str]] = []
    for message in messages:
        match dialect:
            case "openai-chat" if message["role"] == "tool":
                found.append((message["tool_call_id"], message["content"]))
            case "openai-responses" if str(message.get("type")).endswith("call_output"):
                found.append((message["call_id"], message["output"]))
            case "anthropic":
                blocks = [] if isinstance(message["content"], str) else message["content"]
                found += ((b["tool_use_id"], b["content"]) for b in blocks if b["type"] == "tool_result")
            case "pydantic-ai":
                returns = [part for part in message["parts"] if part["part_kind"] == "tool-return"]
                found += ((part["tool_call_id"], part["content"]) for part in returns)
            case "langchain" if message["type"] == "tool":
                found.append((message["data"]["tool_call_id"], message["data"]["content"]))
            case "neutral" if message["role"] == "toolResult":
                found.append((message["toolCallId"], message["content"][0]["text"]))
            case _:
                pass
    return found


def other_texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Every text that begins with ``text-``, in order, wherever it stands."""
    found: list[str] = []

    def look(value: object) -> None:
        if isinstance(value, str):
            if value.startswith("text-"):
                found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                look(item)
        elif isinstance(value, list):
            for item in value:
                look(item)

    look(list(messages))
    return found
