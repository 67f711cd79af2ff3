"""What Pydantic AI's tools return, and its messages, as the JSON that it keeps a history in, and back from it."""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturn,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_core import to_json

from natsreceipts.numbering import Came, Made

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_ai.messages import ModelMessage

    from natsreceipts.numbering import Step

__all__ = ["dumped", "loaded", "plain_result", "tool_result", "turn_with"]


def dumped(messages: Sequence[ModelMessage]) -> list[dict[str, Any]]:
    """Return messages as plain dicts, in the dialect ``pydantic-ai`` of a session."""
    return ModelMessagesTypeAdapter.dump_python(list(messages), mode="json", warnings=False)


def loaded(messages: Sequence[dict[str, Any]]) -> list[ModelMessage]:
    """Return the messages that plain dicts are. Raises pydantic's ValidationError for others."""
    return ModelMessagesTypeAdapter.validate_json(to_json(messages))


def plain_result(value: Any) -> Any:
    """Return what a tool returned as JSON. Raises what pydantic raises for a value that has none."""
    if isinstance(value, ToolReturn):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        said = parts.pop("content")
        kept = {name: plain_result(part) for name, part in parts.items() if part is not None}
        if said is not None:
            kept["content"] = _content(UserPromptPart(said))
        return {"return_value": None, **kept}
    return _content(ToolReturnPart(tool_name="", content=value, tool_call_id=""))


def tool_result(value: Any) -> Any:
    """Return what a tool returned, from its JSON: a value of JSON, what is not text, or a ToolReturn."""
    if isinstance(value, dict):
        made = cast("dict[str, Any]", value)
        if made.get("kind") == "tool-return" and "return_value" in made:
            rest = {name: part for name, part in made.items() if name not in ("kind", "return_value", "content")}
            said = _part({"part_kind": "user-prompt", "content": made["content"]}) if "content" in made else None
            return ToolReturn(tool_result(made["return_value"]), content=said, **rest)
    return _part({"part_kind": "tool-return", "tool_name": "", "tool_call_id": "", "content": value})


def _content(part: ToolReturnPart | UserPromptPart) -> Any:
    return dumped([ModelRequest(parts=[part])])[0]["parts"][0]["content"]


def _part(part: dict[str, Any]) -> Any:
    return cast("Any", loaded([{"kind": "request", "parts": [part]}])[0].parts[0]).content


def turn_with(messages: Sequence[ModelMessage], call: ToolCallPart) -> tuple[list[Step], dict[str, Any]]:
    """The turn that makes a call, and the arguments that the model gave it there (an approval may change them)."""
    steps: list[Step] = []
    args: dict[str, Any] | None = None
    prompted = False
    for message in reversed(messages):
        results = [part for part in message.parts if isinstance(part, ToolReturnPart)]
        if prompted and not results:
            break
        prompted = False
        if isinstance(message, ModelResponse):
            made = [part for part in message.parts if isinstance(part, ToolCallPart)]
            if args is None:
                args = next((each.args_as_dict() for each in made if each.tool_call_id == call.tool_call_id), None)
            steps.append([Made(each.tool_call_id, each.tool_name, each.args_as_dict()) for each in made])
        else:
            # Behind results it does not begin a turn: the framework merges requests that follow each other.
            prompted = not results and any(isinstance(part, UserPromptPart) for part in message.parts)
            steps += [Came(each.tool_call_id) for each in results if each.outcome == "success"]
    return steps[::-1], call.args_as_dict() if args is None else args
