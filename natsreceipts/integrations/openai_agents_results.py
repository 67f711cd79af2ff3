"""Results of tools of the OpenAI Agents SDK, as they can be recorded."""

from __future__ import annotations

from typing import Any, cast

from agents import ToolOutputFileContent, ToolOutputImage, ToolOutputText
from pydantic import BaseModel

from natsreceipts.payload import NotEncodable, normal_form

__all__ = ["recordable"]

_STRUCTURED = (ToolOutputText, ToolOutputImage, ToolOutputFileContent)


def recordable(result: Any, *, typed: bool) -> Any:
    """What a tool returned, as plain data of which the SDK makes the same text for the model."""
    if isinstance(result, _STRUCTURED) or (typed and isinstance(result, BaseModel)):
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)
    if isinstance(result, list | tuple):
        parts = cast("list[Any]", result)
        if any(isinstance(each, _STRUCTURED) for each in parts):
            return [recordable(each, typed=False) for each in parts]
    value = cast("object", result)
    try:
        plain, _ = normal_form(value)
    except NotEncodable:
        return str(value)
    return plain if typed or (type(plain) is type(value) and plain == value) else str(value)
