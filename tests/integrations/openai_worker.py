"""A worker with an agent of the OpenAI Agents SDK and a scripted model, which may be killed in the middle."""

from __future__ import annotations

import asyncio

from agents import Agent, Runner, function_tool
from crash_nursery import LEASE, Here
from openai_script import QUIET, Script, calls, outputs, says

from natsreceipts import SessionBusy, connect
from natsreceipts.integrations.openai_agents import NatsSession, Turn, guarded


async def work(options):
    here = Here(options)

    @function_tool
    async def send(to: str) -> str:
        return await here.send(to)

    def answer(items):
        """Have the mail sent, once more where it was never started, and repeat what came of it."""
        told = list(outputs(items).values())
        if not told or "never started" in told[-1]:
            return calls(("send", {"to": "ann"}))
        here.point("after the settle")
        return says(told[-1])

    class Watched(Turn):
        async def on_llm_end(self, *args):
            await super().on_llm_end(*args)
            here.point("before the claim")

    tool = guarded(send)
    agent = Agent(name="a", model=Script(answer), tools=[tool])
    async with connect(options["url"], namespace=options["namespace"], lease=LEASE) as toolkit:
        run = toolkit.run("acme", options["run"])
        session, said = None, "Mail Ann."
        if options["session"]:
            session = NatsSession(toolkit.sessions.open("acme", options["run"], dialect="openai-responses"), [tool])
            while True:
                try:
                    said = [] if await session.get_items() else said
                    break
                except SessionBusy as busy:
                    await asyncio.sleep(busy.retry_after)
        async with Watched(run, session) as hooks:
            result = await Runner.run(agent, said, session=session, hooks=hooks, run_config=QUIET)
        here.told(result.final_output)
