"""An agent of the OpenAI Agents SDK, whose worker is killed in the middle of a tool call. Another one goes on.

    pip install 'natsreceipts[openai-agents,server]'
    python examples/openai_agent.py                      # killed when the mail is sent and on record
    python examples/openai_agent.py --kill-at during     # … when it is sent, and not yet on record
    python examples/openai_agent.py --kill-at before     # … claimed and not sent, which no record can tell from that

It starts a nats-server of its own; the model is a script, so that no key is needed. The worker is the part for you.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from agents import Agent, Model, ModelResponse, RunConfig, Runner, Usage, function_tool
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

import natsreceipts
from natsreceipts.integrations.openai_agents import NatsSession, Turn, guarded


async def worker(url: str, outbox: Path, kill_at: str) -> None:
    """One turn of the session ``order-42``, from wherever it stands."""

    @function_tool
    async def send_email(to: str, text: str) -> str:
        """Send a mail."""
        die(kill_at == "before")
        with outbox.open("a") as file:
            file.write(f"To: {to}\n{text}\n")
        print("  the mail is sent")
        die(kill_at == "during")
        return "accepted as <m-1@example.com>"

    tool = guarded(send_email)
    agent = Agent(name="dispatcher", model=Scripted(kill_at), tools=[tool])
    async with natsreceipts.connect(url, provision=True, lease=2) as toolkit:
        session = NatsSession(toolkit.sessions.open("acme", "order-42", dialect="openai-responses"), [tool])
        history = await awake(session)
        async with Turn(toolkit.run("acme", "order-42"), session) as hooks:
            said: Any = [] if history else "Tell Ann that order 42 is on its way."
            result = await Runner.run(agent, said, session=session, hooks=hooks, run_config=QUIET)
        print(f"  the agent says: {result.final_output}")


async def awake(session: NatsSession) -> list[Any]:
    """The session's items, once no other worker is at one of its calls. (A worker on JetStream gives the job back.)"""
    while True:
        try:
            items: list[Any] = list(await session.get_items())
        except natsreceipts.SessionBusy as busy:
            print(f"  a worker holds the call, or died less than a lease ago: again in {busy.retry_after:.1f} s")
            await asyncio.sleep(busy.retry_after)
        else:
            for item in items:
                if item.get("type") == "function_call_output":
                    print(f"  the model is going to read: {item['output']}")
            return items


# ------------------------------------------------------------------ the rest is for the show

QUIET = RunConfig(tracing_disabled=True)


def die(now: bool) -> None:
    if now:
        print("  kill -9", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Scripted(Model):
    """Has the mail sent, once more if it was never started, and then says what came of it."""

    def __init__(self, kill_at: str) -> None:
        self.kill_at = kill_at

    async def get_response(self, system_instructions: str | None, input: Any, *_: Any, **__: Any) -> ModelResponse:  # noqa: A002
        results = [item["output"] for item in input if item.get("type") == "function_call_output"]
        if not results or "never started" in results[-1]:
            arguments = json.dumps({"to": "ann@example.com", "text": "Order 42 is on its way."})
            call_id = f"call_{len(input)}"
            call = ResponseFunctionToolCall(
                type="function_call", call_id=call_id, name="send_email", arguments=arguments
            )
            return ModelResponse(output=[call], usage=Usage(), response_id=None)
        die(self.kill_at == "after")
        told = "Ann was told." if "accepted" in results[-1] else "I cannot know whether Ann was told. Please look."
        text = ResponseOutputText(type="output_text", text=told, annotations=[])
        message = ResponseOutputMessage(type="message", id="m", role="assistant", status="completed", content=[text])
        return ModelResponse(output=[message], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


async def show(kill_at: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outbox = Path(folder) / "outbox"
        outbox.touch()
        async with natsreceipts.embedded() as server:
            for number, point in enumerate((kill_at, "never"), 1):
                print(f"worker {number}", flush=True)
                command = [sys.executable, __file__, "--worker", server.url, str(outbox), "--kill-at", point]
                process = await asyncio.create_subprocess_exec(*command)
                await process.wait()
        print(f"mails sent: {outbox.read_text().count('To: ')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", choices=["before", "during", "after", "never"], default="after")
    parser.add_argument("--worker", nargs=2, metavar=("URL", "OUTBOX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        logging.getLogger("natsreceipts").setLevel(logging.ERROR)  # the lease is short, for the show
        asyncio.run(worker(options.worker[0], Path(options.worker[1]), options.kill_at))
    else:
        asyncio.run(show(options.kill_at))
