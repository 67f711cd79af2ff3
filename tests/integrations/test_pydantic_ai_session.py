"""A turn of a Pydantic AI agent in a session: what stands in the log, and how a turn that was cut off goes on."""

from __future__ import annotations

import pytest
from frameworks import framework
from support import toolkit_of

framework("pydantic_ai")

from pydantic_ai import Agent  # noqa: E402
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart  # noqa: E402
from pydantic_ai.models.function import FunctionModel  # noqa: E402
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults  # noqa: E402

from natsreceipts import InvalidSetting, SessionConflict  # noqa: E402
from natsreceipts.integrations.pydantic_ai_messages import dumped  # noqa: E402
from natsreceipts.integrations.pydantic_ai_session import run_turn  # noqa: E402


@pytest.fixture
async def toolkit(server, namespace):
    async with toolkit_of(server.url, namespace) as toolkit:
        yield toolkit


@pytest.fixture
def session(toolkit):
    return toolkit.sessions.open("acme", "chat", dialect="pydantic-ai")


@pytest.fixture
def world(toolkit):
    return World(toolkit)


class World:
    """An agent with tools that count, and a model that counts how often it is asked."""

    def __init__(self, toolkit):
        self.run = toolkit.run("acme", "chat")
        self.sent, self.paid, self.asked = [], [], []
        self.fails = None
        self.agent = Agent(
            FunctionModel(self.answer), system_prompt="Be brief.", output_type=[str, DeferredToolRequests]
        )
        self.script = [[("send", {"to": "ann"}), ("pay", {"amount": 20})]]

        @self.agent.tool_plain
        async def send(to: str) -> str:
            self.sent.append(to)
            if self.fails is not None:
                raise self.fails
            return f"sent to {to}"

        @self.agent.tool_plain(requires_approval=True)
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

    def answer(self, messages, info):
        self.asked.append(dumped(messages))
        step = sum(isinstance(message, ModelResponse) for message in messages)
        if step < len(self.script):
            calls = [
                ToolCallPart(name, args, f"id-{len(self.asked)}-{n}")
                for n, (name, args) in enumerate(self.script[step])
            ]
            return ModelResponse(calls)
        return ModelResponse([TextPart(f"done after {len(messages)} messages")])

    async def turn(self, session, prompt="go", turn="job-1", **settings):
        return await run_turn(self.agent, prompt, session=session, turn=turn, run=self.run, **settings)


def kinds(loaded):
    return [[part["part_kind"] for part in message["parts"]] for message in loaded.messages]


PLAIN = [["system-prompt", "user-prompt"], ["tool-call"], ["tool-return"], ["text"]]


async def test_every_message_is_in_the_log_once(world, session):
    world.script = [[("send", {"to": "ann"})]]
    result = await world.turn(session)
    loaded = await session.load()
    assert kinds(loaded) == PLAIN
    assert loaded.messages == dumped(result.all_messages())
    assert loaded.entries[0].id == "job-1"
    assert {entry.run for entry in loaded.entries} == {"chat"}


async def test_a_turn_that_has_ended_gives_its_output_again(world, session, toolkit):
    world.script = [[("send", {"to": "ann"})]]
    outputs = [(await world.turn(session)).output for _ in range(2)]
    elsewhere = toolkit.sessions.open("acme", "chat")
    outputs.append((await world.turn(elsewhere)).output)
    assert len(set(outputs)) == 1
    assert (len(world.asked), world.sent) == (2, ["ann"])
    assert kinds(await session.load()) == PLAIN


async def test_the_next_turn_has_the_history(world, session):
    world.script = [[("send", {"to": "ann"})]]
    await world.turn(session)
    world.script = [[], [], [("send", {"to": "bob"})]]
    await world.turn(session, "and now?", "job-2")
    assert world.sent == ["ann", "bob"]
    assert kinds(await session.load()) == [*PLAIN, ["user-prompt"], ["tool-call"], ["tool-return"], ["text"]]
    assert [part["part_kind"] for part in world.asked[-1][0]["parts"]] == ["system-prompt", "user-prompt"]


async def test_a_turn_that_was_cut_off_goes_on(world, session):
    """The tool raises, and the host's process ends with that: nobody knows whether the mail went out."""
    world.script = [[("send", {"to": "ann"})], [("send", {"to": "ann"})]]
    world.fails = ConnectionResetError("cut")
    with pytest.raises(ConnectionResetError):
        await world.turn(session)
    world.fails = None
    result = await world.turn(session)
    assert result.output.startswith("done")
    assert world.sent == ["ann"]  # the model has asked again, and was told that nobody knows
    messages = (await session.load()).messages
    outcomes = [part.get("outcome") for message in messages for part in message["parts"] if "outcome" in part]
    assert outcomes == ["interrupted", "failed"]
    prompts = [part for message in messages for part in message["parts"] if part["part_kind"] == "user-prompt"]
    assert len(prompts) == 1


async def test_calls_that_wait_for_approval_are_suspended(world, session):
    waiting = await world.turn(session)
    (call,) = waiting.output.approvals
    loaded = await session.load()
    assert loaded.suspended == {call.tool_call_id}
    assert world.sent == ["ann"]

    again = await world.turn(session)  # the job is delivered again
    assert [each.tool_call_id for each in again.output.approvals] == [call.tool_call_id]
    assert (await session.load()).last_seq == loaded.last_seq
    assert (len(world.asked), world.sent, world.paid) == (1, ["ann"], [])

    yes = DeferredToolResults(approvals={call.tool_call_id: True})
    for _ in range(2):
        result = await world.turn(session, None, "approval-1", deferred_tool_results=yes)
        assert result.output.startswith("done")
    assert (len(world.asked), world.sent, world.paid) == (2, ["ann"], [20])
    loaded = await session.load()
    assert loaded.suspended == frozenset()
    returned = [part["part_kind"] for message in world.asked[-1] for part in message["parts"]]
    assert returned.count("tool-return") == 2


async def test_a_person_says_no(world, session):
    (call,) = (await world.turn(session)).output.approvals
    result = await world.turn(
        session, None, "job-1", deferred_tool_results=DeferredToolResults(approvals={call.tool_call_id: False})
    )
    assert result.output.startswith("done")
    assert (world.sent, world.paid) == (["ann"], [])


async def test_the_user_goes_on_while_a_call_waits(world, session):
    (call,) = (await world.turn(session)).output.approvals
    result = await world.turn(session, "never mind", "job-2")
    assert result.output.startswith("done")
    assert (await session.load()).suspended == {call.tool_call_id}
    assert world.paid == []


async def test_another_writer_is_noticed(world, session, toolkit):
    other = toolkit.sessions.open("acme", "chat", dialect="pydantic-ai")
    answer = world.answer

    async def meanwhile(messages, info):
        await other.load()
        await other.append({"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "me too"}]})
        return answer(messages, info)

    world.agent.model = FunctionModel(meanwhile)
    with pytest.raises(SessionConflict):
        await world.turn(session)
    assert world.sent == []


async def test_a_session_of_another_dialect(world, toolkit):
    session = toolkit.sessions.open("acme", "other")
    await session.append({"role": "user", "content": "hi"})
    with pytest.raises(InvalidSetting, match="pydantic-ai"):
        await world.turn(session)


async def test_two_equal_calls_that_were_cut_off_are_told_apart(world, session, toolkit):
    """The first was made, the second never: wake has to look at two receipts."""
    world.script = [[("send", {"to": "ann"}), ("send", {"to": "ann"})]]
    call = {"part_kind": "tool-call", "tool_name": "send", "args": {"to": "ann"}}
    await session.append(
        {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "go"}]}, entry_id="job-1"
    )
    response = {"kind": "response", "parts": [call | {"tool_call_id": "a"}, call | {"tool_call_id": "b"}]}
    await session.append(response, run="chat")
    await world.run.execute("send", {"to": "ann"}, sent_before)
    await world.turn(session)
    results = {
        part["tool_call_id"]: part for message in world.asked[0] for part in message["parts"] if "outcome" in part
    }
    assert results["a"]["content"] == "sent before"
    assert "never started" in results["b"]["content"]


async def sent_before():
    return "sent before"
