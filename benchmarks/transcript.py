"""What it costs to search a long transcript for orphans, and to lay out a request, in each dialect.

Run ``python benchmarks/transcript.py``. Times are the best of five rounds; the last column is the time per message of
the longest transcript over that of the shortest, which stays near 1 as long as the work is linear.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from natsreceipts.dialects import DIALECTS
from natsreceipts.transcript import find_orphan_tool_calls, request_view, tool_result_message

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1_000, 10_000, 100_000)
ROUNDS = 5
CALLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "openai-chat": lambda i: {
        "role": "assistant",
        "tool_calls": [{"id": i, "type": "function", "function": {"name": "t", "arguments": "{}"}}],
    },
    "openai-responses": lambda i: {"type": "function_call", "call_id": i, "name": "t", "arguments": "{}"},
    "anthropic": lambda i: {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": i, "name": "t", "input": {}}],
    },
    "pydantic-ai": lambda i: {
        "kind": "response",
        "parts": [{"part_kind": "tool-call", "tool_name": "t", "tool_call_id": i, "args": {}}],
    },
    "langchain": lambda i: {"type": "ai", "data": {"content": "", "tool_calls": [{"name": "t", "args": {}, "id": i}]}},
    "neutral": lambda i: {
        "role": "assistant",
        "content": [{"type": "toolCall", "id": i, "name": "t", "arguments": {}}],
    },
}


def transcript(dialect: str, size: int) -> list[dict[str, Any]]:
    """Calls and results in turn; every tenth result is missing."""
    messages: list[dict[str, Any]] = []
    turn = 0
    while len(messages) < size:
        turn += 1
        messages.append(CALLS[dialect](f"call_{turn}"))
        if turn % 10:
            messages.append(tool_result_message(f"call_{turn}", "t", "done", dialect=dialect))
    return messages[:size]


def seconds(work: Callable[..., object], messages: list[dict[str, Any]], dialect: str) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = perf_counter()
        work(messages, dialect=dialect)
        best = min(best, perf_counter() - start)
    return best


def main() -> None:
    print(f"{'milliseconds for':<42}" + "".join(f"{size:>10,}" for size in SIZES) + "   per message")
    for work in (find_orphan_tool_calls, request_view):
        for dialect in DIALECTS:
            times = [seconds(work, transcript(dialect, size), dialect) for size in SIZES]
            growth = times[-1] / SIZES[-1] / (times[0] / SIZES[0])
            shown = "".join(f"{time * 1000:>10.1f}" for time in times)
            print(f"{work.__name__ + ', ' + dialect:<42}{shown}{growth:>14.2f}")


if __name__ == "__main__":
    main()
