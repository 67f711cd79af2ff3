"""Workers that are killed: an agent's turn in each framework, with a tool that writes down what it did."""

from __future__ import annotations

import asyncio
import os
import signal

import natsreceipts
from natsreceipts.integrations import current_call

LEASE = 1.0
MAIL = {"to": "ann"}


def send_mail(folder, to, die):
    """The effect. ``die`` is where the first worker is killed while it is at it: before the effect, or after it."""
    first = not (folder / "started").exists()
    (folder / "started").touch()
    if first and die == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    with (folder / "outbox").open("a") as outbox:
        outbox.write(f"{to} {current_call().idempotency_key}\n")
    if first and die == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return f"sent to {to}"


def noted(folder, messages, output):
    (folder / "read").write_text("\n".join(messages))
    (folder / "output").write_text(output)


async def pydantic_ai_turn(url, folder, die="", twice=False):
    """The turn is started from scratch, and makes new ids."""
    from natsreceipts.integrations.pydantic_ai import GuardedTools

    agent = _pydantic_agent(folder, die, twice, [GuardedTools()])
    async with natsreceipts.connect(url, provision=True, lease=LEASE) as toolkit, toolkit.run("acme", "order-42"):
        result = await agent.run("Tell Ann.")
        noted(folder, _returned(result), result.output)


async def pydantic_ai_session(url, folder, die="", twice=False):
    """The turn is kept in a session, and goes on."""
    from natsreceipts.integrations.pydantic_ai_session import run_turn

    agent = _pydantic_agent(folder, die, twice, [])
    async with natsreceipts.connect(url, provision=True, lease=LEASE) as toolkit:
        session = toolkit.sessions.open("acme", "chat", dialect="pydantic-ai")
        while True:
            try:
                async with toolkit.run("acme", "order-42"):
                    result = await run_turn(agent, "Tell Ann.", session=session, turn="job-1")
            except natsreceipts.SessionBusy as busy:  # its lease is not over yet: a delivery would come back
                await asyncio.sleep(busy.retry_after)
            else:
                break
        noted(folder, _returned(result), result.output)


def _pydantic_agent(folder, die, twice, capabilities):
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import FunctionModel

    def model(messages, info):
        results = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        open_calls = (2 if twice else 1) - len([each for each in results if "never started" not in str(each.content)])
        if open_calls > 0:  # not asked for yet, or never started
            ids = [f"{os.getpid()}-{len(messages)}-{n}" for n in range(open_calls)]
            return ModelResponse([ToolCallPart("send_mail", MAIL, each) for each in ids])
        return ModelResponse([TextPart("unknown" if any("unknown" in str(r.content) for r in results) else "done")])

    agent = Agent(FunctionModel(model), capabilities=capabilities)
    agent.tool_plain(lambda to: send_mail(folder, to, die), name="send_mail")
    return agent


def _returned(result):
    from pydantic_ai.messages import ToolReturnPart

    parts = [part for message in result.all_messages() for part in message.parts]
    return [str(part.content) for part in parts if isinstance(part, ToolReturnPart)]


async def langchain_turn(url, folder, die="", twice=False):
    """The turn is started from scratch, and makes new ids."""
    from langchain.agents import create_agent
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    from natsreceipts.integrations.langchain import GuardedTools

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools, **settings):
            return self

    @tool("send_mail")
    def send(to: str) -> str:
        """Send a mail."""
        return send_mail(folder, to, die)

    ids = [f"{os.getpid()}-{n}" for n in range(2 if twice else 1)]
    calls = [{"name": "send_mail", "args": MAIL, "id": each, "type": "tool_call"} for each in ids]
    model = Scripted(messages=iter([AIMessage("", tool_calls=calls), AIMessage("done")]))
    agent = create_agent(model, [send], middleware=[GuardedTools()])
    async with natsreceipts.connect(url, provision=True, lease=LEASE) as toolkit, toolkit.run("acme", "order-42"):
        messages = (await agent.ainvoke({"messages": [HumanMessage("Tell Ann.")]}))["messages"]
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert [each.tool_call_id for each in results] == ids
    unknown = any("unknown" in str(each.content) for each in results)
    noted(folder, [str(each.content) for each in results], "unknown" if unknown else "done")


def lines(folder, name):
    try:
        return (folder / name).read_text().splitlines()
    except FileNotFoundError:
        return []
