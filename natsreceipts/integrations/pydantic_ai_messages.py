"""What Pydantic AI's tools return, and its messages, as the JSON that it keeps a history in, and back from it."""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelRequest, ToolReturn, ToolReturnPart, UserPromptPart
from pydantic_core import to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_ai.messages import ModelMessage

__all__ = ["dumped", "loaded", "plain_result", "tool_result"]


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
