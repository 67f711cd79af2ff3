"""Guarded tools in LangChain's agents and LangGraph's ToolNode: the real framework with a scripted model."""

from __future__ import annotations

import itertools

import pytest
from frameworks import framework
from pydantic import BaseModel
from support import toolkit_of

framework("langchain.agents")

from langchain.agents import create_agent  # noqa: E402
from langchain.agents.middleware import ToolRetryMiddleware  # noqa: E402
from langchain_core.language_models import GenericFakeChatModel  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, messages_to_dict  # noqa: E402
from langchain_core.tools import InjectedToolCallId, StructuredTool, ToolException, tool  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402
from langgraph.graph import START, MessagesState, StateGraph  # noqa: E402
from langgraph.types import Command, interrupt  # noqa: E402
from typing_extensions import Annotated  # noqa: E402, UP035 - as the framework's users write it

from natsreceipts import AmbiguousCall, InvalidSetting, LeaseLost, NotApplied  # noqa: E402
from natsreceipts.dialects import DIALECTS  # noqa: E402
from natsreceipts.integrations import current_call  # noqa: E402
from natsreceipts.integrations.langchain import GuardedTools  # noqa: E402
from natsreceipts.numbering import call_number, turn_of  # noqa: E402


@pytest.fixture
async def toolkit(server, namespace):
    async with toolkit_of(server.url, namespace) as toolkit:
        yield toolkit


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "order-42")


IDS = itertools.count()
SEND = ("send", {"to": "ann"})


def calling(*calls):
    made = [{"name": name, "args": args, "id": f"id-{next(IDS)}", "type": "tool_call"} for name, args in calls]
    return AIMessage("", tool_calls=made)


class Scripted(GenericFakeChatModel):
    """Makes the calls of one turn after the other, and then ends."""

    def bind_tools(self, tools, **settings):
        return self


def scripted(*turns):
    return Scripted(messages=iter([*(calling(*turn) for turn in turns), AIMessage("done")]))


def sender(*outcomes, name="send", **settings):
    """A tool that has an effect, and then does what it was made to do. ``.sent`` is what it did."""
    sent, left = [], list(outcomes)

    async def send(to: str) -> str:
        """Send a mail."""
        sent.append(to)
        outcome = left.pop(0) if left else f"sent to {to}"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    made = StructuredTool.from_function(coroutine=send, name=name, **settings)
    return made, sent


async def asked(tools, *turns, run=None, middleware=(), **settings):
    agent = create_agent(scripted(*turns), tools, middleware=[*middleware, GuardedTools(run, **settings)])
    return (await agent.ainvoke({"messages": [HumanMessage("go")]}))["messages"]


def results(messages):
    return [message for message in messages if isinstance(message, ToolMessage)]


# ---------------------------------------------------------------- create_agent


async def test_a_turn_that_is_started_again_replays_under_its_own_ids(run):
    send, sent = sender()
    async with run:
        for _ in range(2):
            messages = await asked([send], [SEND])
            (call,) = messages[1].tool_calls
            (answer,) = results(messages)
            assert (answer.content, answer.tool_call_id, answer.name) == ("sent to ann", call["id"], "send")
            assert messages[-1].content == "done"
    assert sent == ["ann"]


async def test_two_equal_calls_are_two_and_stay_two(run):
    send, sent = sender("one", "two", "three")
    for _ in range(2):
        messages = await asked([send], [SEND, SEND], [SEND], run=run)
        assert [each.content for each in results(messages)] == ["one", "two", "three"]
    assert sent == ["ann"] * 3


async def test_a_tool_that_raises_ends_the_turn_and_then_nobody_knows(run):
    send, sent = sender(ConnectionResetError("cut"))
    with pytest.raises(ConnectionResetError):
        await asked([send], [SEND], run=run)
    (told,) = results(await asked([send], [SEND], run=run))
    assert (told.status, "unknown" in told.content) == ("error", True)
    with pytest.raises(AmbiguousCall):
        await asked([send], [SEND], run=run, on_unknown="raise")
    assert sent == ["ann"]


async def test_arguments_that_the_tool_does_not_take(run, toolkit):
    send, sent = sender()
    told, done = results(await asked([send], [("send", {"whom": "ann"})], [SEND], run=run))
    assert (told.status, done.status, sent) == ("error", "success", ["ann"])
    assert "unknown" not in told.content
    receipt = await toolkit.receipts.get(run.key("send", {"whom": "ann"}))
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)


async def test_a_failure_that_the_tool_reports(run):
    send, sent = sender(ToolException("no such address"), handle_tool_error=True)
    for _ in range(2):
        (told,) = results(await asked([send], [SEND], run=run))
        assert (told.content, told.status) == ("no such address", "error")
    assert sent == ["ann"]


async def test_effects(run, toolkit):
    look, looked = sender(name="look", metadata={"effect": "read"})
    put, _ = sender(name="put")
    for _ in range(2):
        await asked([look, put], [("look", {"to": "a"}), ("put", {"to": "a"})], run=run, effects={"put": "idempotent"})
    assert looked == ["a", "a"]
    assert [(each.key.tool, each.effect) async for each in toolkit.receipts.list()] == [("put", "idempotent")]


async def test_the_idempotency_key_is_there_in_a_sync_tool_too(run):
    keys = []

    @tool
    def send(to: str) -> str:
        """Send a mail."""
        keys.append(current_call().idempotency_key)
        return "sent"

    await asked([send], [SEND], run=run)
    assert keys == [run.key("send", {"to": "ann"}).idempotency_key]


async def test_what_has_to_end_the_turn_ends_it(run):
    send, _ = sender(LeaseLost(run.key("send", {"to": "ann"}), "another worker has it"))
    with pytest.raises(LeaseLost):
        await asked([send], [SEND], run=run)


async def test_a_retrying_middleware_outside_does_not_repeat_it(run):
    send, sent = sender(ConnectionResetError("cut"))
    retry = ToolRetryMiddleware(max_retries=2, initial_delay=0.0, jitter=False)
    (told,) = results(await asked([send], [SEND], run=run, middleware=[retry]))
    assert (told.status, sent) == ("error", ["ann"])


def test_a_synchronous_call_is_refused(run):
    send, sent = sender()
    agent = create_agent(scripted([SEND]), [send], middleware=[GuardedTools(run)])
    with pytest.raises(InvalidSetting, match="ainvoke"):
        agent.invoke({"messages": [HumanMessage("go")]})
    with pytest.raises(InvalidSetting, match="ainvoke"):
        graph_of(GuardedTools(run).tool_node([send])).invoke({"messages": [calling(SEND)]})
    assert sent == []


# ---------------------------------------------------------------- ToolNode


def graph_of(node, **settings):
    builder = StateGraph(MessagesState)
    builder.add_node("tools", node)
    builder.add_edge(START, "tools")
    return builder.compile(**settings)


async def test_a_node_that_runs_again_after_an_interrupt_does_not_repeat_its_siblings(run, toolkit):
    send, sent = sender()
    asked_for = []

    @tool
    async def ask(what: str) -> str:
        """Ask a person."""
        asked_for.append(what)
        return f"a person says {interrupt(what)}"

    graph = graph_of(GuardedTools(run).tool_node([send, ask]), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    state = await graph.ainvoke({"messages": [calling(SEND, ("ask", {"what": "pay?"}))]}, config)
    assert [each.value for each in state["__interrupt__"]] == ["pay?"]
    receipt = await toolkit.receipts.get(run.key("ask", {"what": "pay?"}))
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)
    state = await graph.ainvoke(Command(resume="yes"), config)
    assert [each.content for each in results(state["messages"])] == ["sent to ann", "a person says yes"]
    assert (sent, asked_for) == (["ann"], ["pay?"] * 2)


async def test_an_error_that_the_node_tells_the_model(run):
    send, sent = sender(ConnectionResetError("cut"))
    graph = graph_of(GuardedTools(run).tool_node([send], handle_tool_errors=True))
    first, again = [
        results((await graph.ainvoke({"messages": [calling(SEND)]}))["messages"])[0].content for _ in range(2)
    ]
    assert first.startswith("Error: ConnectionResetError('cut')")
    assert first.endswith(again)
    assert "do not" in again.lower()
    assert sent == ["ann"]


async def test_an_error_without_an_effect_that_the_node_tells_the_model(toolkit):
    run = toolkit.run("acme", "order-42", not_applied=(ConnectionRefusedError,))
    send, sent = sender(ConnectionRefusedError("no"), "sent")
    graph = graph_of(GuardedTools(run).tool_node([send], handle_tool_errors=True))
    first, again = [results((await graph.ainvoke({"messages": [calling(SEND)]}))["messages"])[0] for _ in range(2)]
    assert "unknown" not in first.content
    assert (first.status, again.content, sent) == ("error", "sent", ["ann"] * 2)


@pytest.mark.parametrize("error", [NotApplied(), None])
async def test_ours_is_no_tool_error_to_the_node(run, error):
    error = error or LeaseLost(run.key("send", {"to": "ann"}), "another worker has it")
    send, _ = sender(error)
    graph = graph_of(GuardedTools(run).tool_node([send], handle_tool_errors=True))
    with pytest.raises(type(error)):
        await graph.ainvoke({"messages": [calling(SEND)]})


async def test_messages_elsewhere_in_the_state(run):
    class State(BaseModel):
        talk: list

    send, sent = sender("one", "two")
    builder = StateGraph(State)
    builder.add_node("tools", GuardedTools(run, messages_key="talk").tool_node([send]))
    builder.add_edge(START, "tools")
    for _ in range(2):
        state = await builder.compile().ainvoke({"talk": [calling(SEND, SEND)]})
        assert [each.content for each in state["talk"]] == ["one", "two"]
    assert sent == ["ann"] * 2


async def test_commands_and_artifacts_come_back_for_this_call(run):
    done = []

    @tool
    async def book(what: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Book."""
        done.append(what)
        message = ToolMessage(f"booked {what}", tool_call_id=tool_call_id)
        return Command(update={"messages": [message]})

    @tool(response_format="content_and_artifact")
    async def paint(what: str) -> tuple[str, dict]:
        """Paint."""
        done.append(what)
        return f"painted {what}", {"pixels": b"\x00\xff", "size": (1, 2)}

    graph = graph_of(GuardedTools(run).tool_node([book, paint]))
    for _ in range(2):
        message = calling(("book", {"what": "a"}), ("paint", {"what": "b"}))
        booked, painted = results((await graph.ainvoke({"messages": [message]}))["messages"])
        assert [each.tool_call_id for each in (booked, painted)] == [call["id"] for call in message.tool_calls]
        assert (booked.content, booked.name) == ("booked a", "book")
        assert painted.content == "painted b"
        assert painted.artifact["pixels"] == b"\x00\xff"
    assert done == ["a", "b"]


@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_a_tool_that_is_told_its_arguments_are_wrong_by_itself(run, handled, sync):
    """A ValidationError of the tool's own: it was entered, so that nobody knows."""

    def sends(to: str) -> str:
        """Send a mail."""
        return str(Answer.model_validate({"id": to}).id)

    async def asends(to: str) -> str:
        """Send a mail."""
        return sends(to)

    send = tool("send")(sends if sync else asends)
    send.handle_validation_error = handled
    graph = graph_of(GuardedTools(run).tool_node([send]))
    (told,) = results((await graph.ainvoke({"messages": [calling(SEND)]}))["messages"])
    assert "outcome of this call of send is unknown" in told.content


class Answer(BaseModel):
    id: int


@pytest.mark.parametrize("shape", [["a"], ["a", "b"]])
def test_a_history_is_numbered_as_its_log(shape):
    """What wake reads in a session's log and what the middleware reads in the state give the same numbers."""
    first, second = calling(SEND, SEND), calling(*[SEND for _ in shape])
    answered = [ToolMessage("sent", tool_call_id=first.tool_calls[0]["id"], name="send")]
    failed = [ToolMessage("no", tool_call_id=first.tool_calls[1]["id"], name="send", status="error")]
    messages = [HumanMessage("hi"), calling(SEND), HumanMessage("go"), first, *answered, *failed, second]
    guard = GuardedTools()
    turn = turn_of(messages_to_dict(messages), len(messages) - 1, DIALECTS["langchain"])
    for call in second.tool_calls:
        numbers = {call_number(each, "send", call["args"], call["id"]) for each in (turn, guard._turn(messages))}
        assert len(numbers) == 1
    assert call_number(turn, "send", {"to": "ann"}, second.tool_calls[0]["id"]) == 2
