# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""The types of the integrations, as a host sees them. Read by pyright, and not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

from natsreceipts import Call, Effect, Run
from natsreceipts.integrations import CallFailed, Outcome, ToolGuard, current_call
from natsreceipts.integrations.langchain import GuardedTools as LangChainTools
from natsreceipts.integrations.pydantic_ai import GuardedTools as PydanticAITools

if TYPE_CHECKING:
    from natsreceipts.integrations.outcomes import OnUnknown


async def guarded(run: Run) -> None:
    async def body() -> object:
        raise CallFailed("declined")

    on_unknown: OnUnknown = "raise"
    guard = ToolGuard(run, effects={"search": "read", "put": Effect.IDEMPOTENT}, on_unknown=on_unknown)
    outcome = await guard.call("send", {"to": "ann"}, body, distinct=None, declared="read", entry=None)
    assert_type(outcome, Outcome)
    assert_type(outcome.text, str | None)
    assert_type(outcome.is_error, bool)
    assert_type(guard.effect_of("send"), Effect)
    assert_type(guard.run, Run)
    assert_type(current_call(), Call)
    assert_type(current_call().idempotency_key, str)


def capabilities(run: Run) -> None:
    assert_type(PydanticAITools(run, effects={"search": "read"}, on_unknown="tell").guard, ToolGuard)
    assert_type(LangChainTools(run, effects={"search": Effect.READ}, messages_key="messages").guard, ToolGuard)
    PydanticAITools(on_unknown="ignore")  # pyright: ignore[reportArgumentType]
    LangChainTools(on_unknown="ignore")  # pyright: ignore[reportArgumentType]
    PydanticAITools(effect={"search": "read"})  # pyright: ignore[reportCallIssue]
