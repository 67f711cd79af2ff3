"""A scripted model behind the `Model` interface of the OpenAI Agents SDK: no network, tracing off."""

from __future__ import annotations

import itertools
import json

from agents import Model, ModelResponse, RunConfig, Usage
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

QUIET = RunConfig(tracing_disabled=True)

_ids = itertools.count(1)


def calls(*made):
    """An answer that calls tools, each ``(name, arguments)`` or ``(name, arguments, id)``."""
    return [
        ResponseFunctionToolCall(
            type="function_call",
            id=f"fc_{next(_ids)}",
            call_id=more[0] if more else f"call_{next(_ids)}",
            name=name,
            arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
            status="completed",
        )
        for name, arguments, *more in made
    ]


def says(text):
    part = ResponseOutputText(type="output_text", text=text, annotations=[])
    return [ResponseOutputMessage(type="message", id="m", role="assistant", status="completed", content=[part])]


class Script(Model):
    """Answers by a function of the input items. ``inputs`` are what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.inputs = []

    async def get_response(self, system_instructions, input, *rest, **options):  # noqa: A002 - the SDK's name
        items = [{"role": "user", "content": input}] if isinstance(input, str) else list(input)
        self.inputs.append(items)
        return ModelResponse(output=self.answer(items), usage=Usage(), response_id=None)

    async def stream_response(self, system_instructions, input, *rest, **options):  # noqa: A002 - the SDK's name
        made = await self.get_response(system_instructions, input)
        response = Response(
            id="r",
            created_at=0,
            model="script",
            object="response",
            output=made.output,
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=True,
        )
        yield ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)


def in_order(*answers):
    """A script of answers, one after the other."""
    left = iter(answers)
    return Script(lambda _: next(left))


def outputs(items):
    """The results in a list of items: what the model reads, by call id."""
    return {item["call_id"]: item["output"] for item in items if item.get("type") == "function_call_output"}
