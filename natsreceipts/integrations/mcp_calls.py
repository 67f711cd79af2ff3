"""What the integrations of MCP servers share: how a call is keyed, with which effect it is executed, what is told.

A call's identity is its run, its tool and its raw arguments, and what the client sends along as an idempotency key:

==========================  =========================================================================================
the client sends            then
==========================  =========================================================================================
the same key again          the same call: executed once, and the recorded result is returned
another key                 another call, though the arguments be equal
no key                      equal calls of one run are one call, the safe way to be wrong; ``require_key`` refuses them
the same key and others     another call: a key does not stand for the arguments
==========================  =========================================================================================

An effect is what the host says in ``effects``. For other tools their annotations are hints, where they are given:
``readOnlyHint`` means ``read``, ``idempotentHint`` means ``idempotent``, and neither, or a contradiction (a read that
is destructive), the run's own, ``opaque`` unless it says otherwise. ``destructiveHint`` says nothing about repeating.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    URL_ELICITATION_REQUIRED,
    CallToolRequestParams,
    CallToolResult,
    TextContent,
    ToolAnnotations,
)
from pydantic import BaseModel

from natsreceipts.decision import Effect
from natsreceipts.dialects.base import OWN_FIELD
from natsreceipts.errors import InvalidSetting
from natsreceipts.integrations.outcomes import CallFailed, OnUnknown, ToolGuard

if TYPE_CHECKING:
    from natsreceipts.run import Run

__all__ = ["IDEMPOTENCY_KEYS", "REPLAYED", "McpCalls", "Unfinished", "effect_hinted", "run_from", "text_of", "told"]

IDEMPOTENCY_KEYS: Final = ("io.modelcontextprotocol/idempotencyKey", "io.modelcontextprotocol/idempotency-key")
"""Where in a request's ``_meta`` its idempotency key is looked for, in this order. The specification names none yet."""

REPLAYED: Final = f"{OWN_FIELD}/replayed"
"""In the ``_meta`` of a result: this request has executed nothing, the result is a recorded one."""

_LONGEST_KEY = 1024

_ASKING = frozenset({URL_ELICITATION_REQUIRED, MISSING_REQUIRED_CLIENT_CAPABILITY})
"""Codes of protocol errors by which a tool asks for something, instead of carrying the call out."""


class Unfinished(Exception):
    """A tool has not carried out a call (yet). ``answer`` is what it said instead, or raised."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        super().__init__(f"the call was not carried out yet: {type(answer).__name__}")


def effect_hinted(annotations: ToolAnnotations | None) -> Effect | None:
    """The effect that a tool's annotations hint at; None where they do not weaken the default."""
    if annotations is None:
        return None
    if annotations.read_only_hint:
        return None if annotations.destructive_hint else Effect.READ
    return Effect.IDEMPOTENT if annotations.idempotent_hint else None


class McpCalls:
    """How the calls of one server are guarded. Parameters as those of `natsreceipts.integrations.mcp`."""

    def __init__(
        self,
        *,
        effects: Mapping[str, Effect | str] | None,
        on_unknown: OnUnknown,
        require_key: bool,
        meta_keys: Sequence[str],
    ) -> None:
        if isinstance(meta_keys, str) or not all(isinstance(cast("object", each), str) for each in meta_keys):
            raise InvalidSetting(f"meta_keys={meta_keys!r}: use a list of names in _meta")
        if require_key and not meta_keys:
            raise InvalidSetting("require_key=True needs a name in meta_keys")
        self._options: dict[str, Any] = {"effects": effects, "on_unknown": on_unknown, "control_flow": (Unfinished,)}
        ToolGuard(**self._options)  # refuses now what it would refuse at the first call
        self.named = frozenset(effects or {})
        """The tools whose effects the host has named."""
        self.require_key = require_key
        self.meta_keys = tuple(meta_keys)

    async def execute(
        self,
        run: Run,
        params: CallToolRequestParams,
        meta: Mapping[str, Any] | None,
        body: Callable[[], Awaitable[BaseModel | dict[str, Any] | None]],
        *,
        hinted: Effect | None,
    ) -> CallToolResult | dict[str, Any]:
        """Execute a call, or tell what became of it. ``meta``: the request's ``_meta``.

        A result with ``isError`` is what the call came to; another shape than a tool's result (a task, say) comes back
        as a dict. Raises Unfinished, MCPError for a key that is none, and what `ToolGuard.call` raises.
        """
        guard = ToolGuard(run, **self._options)
        effect = guard.effect_of(params.name, hinted)
        key = self._key(meta)
        if key is None and self.require_key and effect is not Effect.READ:
            return told(_NO_KEY.format(tool=params.name, key=self.meta_keys[0]))
        executed: list[dict[str, Any]] = []

        async def once() -> Any:
            result = _on_the_wire(await _unless_it_asks(body))
            executed.append(result)
            if result.get("isError") and effect is not Effect.OPAQUE:
                raise CallFailed(text_of(CallToolResult.model_validate(result)))
            return result

        outcome = await guard.call(params.name, params.arguments or {}, once, distinct=key, declared=effect)
        if outcome.is_error and not executed:
            return told(cast("str", outcome.text))
        value: dict[str, Any] = executed[0] if outcome.is_error else outcome.value
        if not executed:
            value = {**value, "_meta": {**(value.get("_meta") or {}), REPLAYED: True}}
        return CallToolResult.model_validate(value) if "content" in value else value

    def _key(self, meta: Mapping[str, Any] | None) -> str | None:
        for name in self.meta_keys:
            key = (meta or {}).get(name)
            if key is None:
                continue
            if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY:
                raise MCPError(INVALID_PARAMS, f"_meta[{name!r}]: use a text of 1 to {_LONGEST_KEY:,} characters")
            return key
        return None


async def _unless_it_asks(body: Callable[[], Awaitable[Any]]) -> Any:
    try:
        result = await body()
    except MCPError as error:
        if error.error.code in _ASKING:
            raise Unfinished(error) from error
        raise
    if _on_the_wire(result).get("resultType") == "input_required":
        raise Unfinished(result)
    return result


def _on_the_wire(result: BaseModel | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(result, BaseModel):
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)
    return result or {}


async def run_from(run_of: Callable[[Any], Run | Awaitable[Run]], context: Any) -> Run:
    """The run that the host gives."""
    run = run_of(context)
    return await run if isinstance(run, Awaitable) else run


def text_of(result: CallToolResult) -> str:
    """The texts of a result, line by line."""
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


def told(text: str) -> CallToolResult:
    """A result that says what became of a call, where it is not the tool that says it."""
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


_NO_KEY: Final = (
    "This call of {tool} was not executed: it has an effect, and the request has no idempotency key in _meta[{key!r}], "
    "by which a retry could be told from another call."
)
