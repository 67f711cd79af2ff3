"""The shapes of messages that a session can be kept in, by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from natsreceipts.dialects.anthropic import Anthropic
from natsreceipts.dialects.base import Message
from natsreceipts.dialects.langchain import LangChain
from natsreceipts.dialects.neutral import Neutral
from natsreceipts.dialects.openai_chat import OpenAIChat
from natsreceipts.dialects.openai_responses import OpenAIResponses
from natsreceipts.dialects.pydantic_ai import PydanticAI
from natsreceipts.errors import InvalidSetting, InvalidTranscript, brief

if TYPE_CHECKING:
    from collections.abc import Mapping

    from natsreceipts.dialects.base import Dialect

__all__ = ["DIALECTS", "InvalidTranscript", "Message", "dialect_named"]

DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (OpenAIChat(), OpenAIResponses(), Anthropic(), PydanticAI(), LangChain(), Neutral())
    }
)
"""Every dialect, by the name that a session's entries carry."""


def dialect_named(name: object) -> Dialect:
    """Return the dialect of that name. Raises InvalidSetting for a name that is none."""
    dialect = DIALECTS.get(name) if isinstance(name, str) else None
    if dialect is None:
        raise InvalidSetting(f"there is no dialect {brief(name)}: use one of {', '.join(sorted(DIALECTS))}")
    return dialect
