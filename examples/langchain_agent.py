"""A LangChain agent whose worker is killed (kill -9) just after a tool's effect, and whose turn is started again.

    pip install 'natsreceipts[langchain,server]'
    python examples/langchain_agent.py

The middleware GuardedTools puts a receipt around every call of the agent's tools. The model is a script, so that
nothing leaves this machine; put a real one in its place.
"""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false
# pyright: reportUntypedBaseClass=false
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import natsreceipts

FOLDER = Path(os.environ.get("FOLDER", "."))


async def work(url: str) -> None:
    """One worker: in a real one the run's name comes with the message that asks for the turn (toolkit.delivery)."""
    from langchain.agents import create_agent
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    from natsreceipts.integrations import current_call
    from natsreceipts.integrations.langchain import GuardedTools

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **settings: Any) -> Any:
            return self

    @tool
    def charge_card(amount: str) -> str:
        """Charge the customer's card."""
        key = current_call().idempotency_key  # the same for every attempt: a provider that takes one charges once
        return effect(f"charged {amount} ({key[:8]})")

    @tool
    def send_email(to: str) -> str:
        """Tell the customer."""
        sent = effect(f"mailed {to}")
        die_once()  # the mail is out, and nobody was told
        return sent

    def call(name: str, **args: str) -> AIMessage:
        made = {"name": name, "args": args, "id": f"{name}-{os.getpid()}", "type": "tool_call"}
        return AIMessage("", tool_calls=[made])

    script = [call("charge_card", amount="20.00"), call("send_email", to="ann@example.com"), AIMessage("That is all.")]
    model = Scripted(messages=iter(script))
    agent = create_agent(model, [charge_card, send_email], middleware=[GuardedTools()])
    async with natsreceipts.connect(url, provision=True, lease=2.0) as toolkit, toolkit.run("acme", "order-42"):
        state = await agent.ainvoke({"messages": [HumanMessage("Charge order 42, and tell Ann.")]})
    for message in state["messages"]:
        if isinstance(message, ToolMessage):
            print(f"{message.name}: {message.content}")


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
