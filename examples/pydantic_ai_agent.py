"""A Pydantic AI agent whose worker is killed (kill -9) just after a tool's effect, and whose turn is started again.

    pip install 'natsreceipts[pydantic-ai,server]'
    python examples/pydantic_ai_agent.py

The capability GuardedTools puts a receipt around every call of the agent's tools. The model is a script, so that
nothing leaves this machine; put a real one in its place.
"""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import natsreceipts

FOLDER = Path(os.environ.get("FOLDER", "."))


async def work(url: str) -> None:
    """One worker: in a real one the run's name comes with the message that asks for the turn (toolkit.delivery)."""
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from natsreceipts.integrations import current_call
    from natsreceipts.integrations.pydantic_ai import GuardedTools

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if len(messages) == 1:
            return ModelResponse([ToolCallPart("charge_card", {"amount": "20.00"})])
        if len(messages) == 3:
            return ModelResponse([ToolCallPart("send_email", {"to": "ann@example.com"})])
        results = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        return ModelResponse([TextPart("\n".join(f"{each.tool_name}: {each.content}" for each in results))])

    agent = Agent(FunctionModel(model), capabilities=[GuardedTools()])

    @agent.tool_plain
    async def charge_card(amount: str) -> str:
        key = current_call().idempotency_key  # the same for every attempt: a provider that takes one charges once
        return effect(f"charged {amount} ({key[:8]})")

    @agent.tool_plain
    async def send_email(to: str) -> str:
        sent = effect(f"mailed {to}")
        die_once()  # the mail is out, and nobody was told
        return sent

    async with natsreceipts.connect(url, provision=True, lease=2.0) as toolkit, toolkit.run("acme", "order-42"):
        result = await agent.run("Charge order 42, and tell Ann.")
        print(f"the agent says:\n{result.output}")


def effect(what: str) -> str:
    with (FOLDER / "effects").open("a") as effects:
        effects.write(f"{what}\n")
    return what


def die_once() -> None:
    if not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        print("kill -9", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    """Start the worker until it comes to an end, as a supervisor would."""
    async with natsreceipts.embedded() as server:
        with tempfile.TemporaryDirectory() as folder:
            command, environment = [sys.executable, __file__, server.url], {**os.environ, "FOLDER": folder}
            while (status := await asyncio.to_thread(subprocess.call, command, env=environment)) == -signal.SIGKILL:
                print("the worker was killed; the turn is started again", flush=True)
            if status:
                sys.exit(status)
            print(f"what was done:\n{(Path(folder) / 'effects').read_text()}", end="")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]) if len(sys.argv) > 1 else main())
