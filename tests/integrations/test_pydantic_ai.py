"""Guarded tools in Pydantic AI: the real framework with a model of functions."""

from __future__ import annotations

import asyncio
import json

import pytest
from frameworks import framework
from pydantic import BaseModel, TypeAdapter, ValidationError
from support import toolkit_of

framework("pydantic_ai")

from pydantic_ai import Agent, ModelRetry, Tool, ToolReturn  # noqa: E402
from pydantic_ai.capabilities import AbstractCapability  # noqa: E402
from pydantic_ai.exceptions import (  # noqa: E402
    ApprovalRequired,
    CallDeferred,
    RunCancelled,
    ToolFailed,
    UnexpectedModelBehavior,
)
from pydantic_ai.messages import (  # noqa: E402
    BinaryContent,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import FunctionModel  # noqa: E402
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolApproved  # noqa: E402
from pydantic_ai.toolsets import FunctionToolset  # noqa: E402

from natsreceipts import AmbiguousCall, InvalidSetting, LeaseLost, NoActiveRun  # noqa: E402
from natsreceipts.dialects import DIALECTS  # noqa: E402
from natsreceipts.integrations import current_call  # noqa: E402
from natsreceipts.integrations.pydantic_ai import GuardedTools  # noqa: E402
from natsreceipts.integrations.pydantic_ai_messages import dumped, loaded, plain_result, tool_result, turn_with  # noqa: E402
from natsreceipts.numbering import call_number, turn_of  # noqa: E402


@pytest.fixture
async def toolkit(server, namespace):
    async with toolkit_of(server.url, namespace) as toolkit:
        yield toolkit


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "order-42")


def scripted(*turns):
    """A model that makes the calls of one turn after the other, with new ids each time it is asked, and then ends."""
    ids = iter(range(1_000_000))

    def answer(messages, info):
        step = sum(isinstance(message, ModelResponse) for message in messages)
        if step < len(turns):
            return ModelResponse([ToolCallPart(name, args, f"id-{next(ids)}") for name, args in turns[step]])
        return ModelResponse([TextPart("done")])

    return FunctionModel(answer)


def agent_of(model, *tools, run=None, **settings):
    options = {name: settings.pop(name) for name in ("effects", "on_unknown") if name in settings}
    return Agent(model, tools=tools, capabilities=[GuardedTools(run, **options)], **settings)


def returns(result):
    return [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolReturnPart)]


class Sender:
    """A tool that has an effect, and then does what it was made to do."""

    def __init__(self, *outcomes):
        self.sent = []
        self.outcomes = list(outcomes)

    async def send(self, to: str) -> str:
        self.sent.append(to)
        outcome = self.outcomes.pop(0) if self.outcomes else f"sent to {to}"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


SEND = ("send", {"to": "ann"})


class Mail(BaseModel):
    to: str
    copies: int = 1


async def test_a_turn_that_is_started_again_replays(run):
    tool = Sender()
    agent = agent_of(scripted([SEND]), tool.send)
    async with run:
        results = [await agent.run("go") for _ in range(2)]
    assert [result.output for result in results] == ["done"] * 2
    assert [returns(result)[0].content for result in results] == ["sent to ann"] * 2
    assert tool.sent == ["ann"]


async def test_two_equal_calls_are_two_and_stay_two(run):
    tool = Sender("one", "two", "three")
    agent = agent_of(scripted([SEND, SEND], [SEND]), tool.send)
    async with run:
        results = [await agent.run("go") for _ in range(2)]
    assert tool.sent == ["ann"] * 3
    assert [[part.content for part in returns(result)] for result in results] == [["one", "two", "three"]] * 2


async def test_the_arguments_are_those_that_the_model_gave(run, toolkit):
    async def send(mail: Mail, urgent: bool = False) -> str:
        return f"{mail.copies} to {mail.to}"

    agent = agent_of(scripted([("send", '{"mail": {"to": "ann", "copies": "2"}}')]), send)
    async with run:
        await agent.run("go")
    receipt = await toolkit.receipts.get(run.key("send", {"mail": {"to": "ann", "copies": "2"}}))
    assert receipt.result == "2 to ann"


async def test_a_tool_that_raises_ends_the_run_and_then_nobody_knows(run):
    tool = Sender(ConnectionResetError("cut"))
    agent = agent_of(scripted([SEND]), tool.send)
    async with run:
        with pytest.raises(ConnectionResetError):
            await agent.run("go")
        (told,) = returns(await agent.run("go"))
    assert (told.outcome, "unknown" in told.content) == ("failed", True)
    assert tool.sent == ["ann"]


async def test_the_model_does_not_get_around_it_by_asking_again(run):
    tool = Sender(ConnectionResetError("cut"))
    agent = agent_of(scripted([SEND], [SEND, SEND]), tool.send)
    async with run:
        with pytest.raises(ConnectionResetError):
            await agent.run("go")
        told = returns(await agent.run("go"))
    assert [each.outcome for each in told] == ["failed", "failed", "success"]  # the last is another, second mail
    assert tool.sent == ["ann"] * 2


async def test_the_host_may_have_the_error(run):
    tool = Sender(ConnectionResetError("cut"))
    agent = agent_of(scripted([SEND]), tool.send, on_unknown="raise")
    async with run:
        for error in (ConnectionResetError, AmbiguousCall):
            with pytest.raises(error):
                await agent.run("go")
    assert tool.sent == ["ann"]


async def test_a_failure_that_the_tool_reports(run):
    tool = Sender(ToolFailed("no such address"))
    agent = agent_of(scripted([SEND]), tool.send)
    async with run:
        told = [returns(await agent.run("go"))[0] for _ in range(2)]
    assert [(each.outcome, each.content) for each in told] == [("failed", "no such address")] * 2
    assert tool.sent == ["ann"]


async def test_a_retry_that_the_tool_asks_for_is_no_failure(run, toolkit):
    tool = Sender(ModelRetry("say it nicely"), "sent")
    agent = agent_of(scripted([SEND], [SEND]), tool.send)
    async with run:
        result = await agent.run("go")
    assert returns(result)[-1].content == "sent"
    receipt = await toolkit.receipts.get(run.key("send", {"to": "ann"}))
    assert (receipt.status, receipt.attempts) == ("completed", 2)


async def test_one_retry_too_many(run, toolkit):
    tool = Sender(ModelRetry("no"), ModelRetry("no"))
    agent = agent_of(scripted([SEND], [SEND], [SEND]), tool.send)
    async with run:
        with pytest.raises(UnexpectedModelBehavior):
            await agent.run("go")
    receipt = await toolkit.receipts.get(run.key("send", {"to": "ann"}))
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)


async def test_a_validation_error_in_the_tool_is_not_the_models_mistake(run):
    """The framework would ask the model to try again, although the mail may be on its way."""

    class Answer(BaseModel):
        id: int

    sent = []

    async def send(to: str) -> int:
        sent.append(to)
        return Answer.model_validate({"id": "none"}).id

    agent = agent_of(scripted([SEND], [("send", {"to": "Ann"})]), send)
    async with run:
        first, second = returns(await agent.run("go"))
    assert "id" in first.content
    assert "outcome of this call of send is unknown" in first.content
    assert (first.outcome, second.outcome, sent) == ("failed", "failed", ["ann", "Ann"])
    again = agent_of(scripted([SEND]), send, effects={"send": "idempotent"}, run=run, retries=0)
    with pytest.raises(AmbiguousCall):  # it was opaque
        await agent_of(scripted([SEND]), send, run=run, on_unknown="raise").run("go")
    assert returns(await again.run("go"))[0].outcome == "failed"


async def test_a_validation_error_of_a_tool_that_may_be_repeated_is_the_frameworks(run):
    async def send(to: str) -> str:
        return str(TypeAdapter(int).validate_python(to))

    agent = agent_of(scripted([SEND]), send, effects={"send": "idempotent"}, retries=0)
    async with run:
        with pytest.raises(UnexpectedModelBehavior) as raised:
            await agent.run("go")
    assert isinstance(raised.value.__cause__, ValidationError)


async def test_effects_in_metadata(run, toolkit):
    toolset = FunctionToolset()
    done = []

    @toolset.tool_plain(metadata={"effect": "read"})
    def look(at: str) -> str:
        done.append(at)
        return "seen"

    @toolset.tool_plain(metadata={"effect": "harmless"})
    def other() -> str:
        return "done"

    guarded = [GuardedTools(run)]
    agent = Agent(scripted([("look", {"at": "a"})]), toolsets=[toolset], capabilities=guarded)
    for _ in range(2):
        await agent.run("go")
    assert done == ["a", "a"]
    assert [receipt async for receipt in toolkit.receipts.list()] == []
    with pytest.raises(InvalidSetting, match="harmless"):
        await Agent(scripted([("other", {})]), toolsets=[toolset], capabilities=guarded).run("go")


async def test_a_call_that_waits_for_approval(run, toolkit):
    sent = []
    toolset = FunctionToolset()

    @toolset.tool_plain
    async def send(to: str) -> str:
        sent.append(to)
        return f"sent to {to}"

    agent = Agent(
        scripted([SEND, SEND]),
        toolsets=[toolset.approval_required()],
        capabilities=[GuardedTools()],
        output_type=[str, DeferredToolRequests],
    )
    async with run:
        waiting = await agent.run("go")
        assert len(waiting.output.approvals) == 2
        assert sent == []
        receipts = [receipt async for receipt in toolkit.receipts.list()]
        assert [(each.status, each.error.not_applied) for each in receipts] == [("failed", True)] * 2
        approvals = dict.fromkeys((each.tool_call_id for each in waiting.output.approvals), True)
        for _ in range(2):  # the worker was killed after the first time, say
            result = await agent.run(
                message_history=waiting.all_messages(), deferred_tool_results=DeferredToolResults(approvals=approvals)
            )
            assert [part.content for part in returns(result)] == ["sent to ann"] * 2
    assert sent == ["ann"] * 2


async def test_an_approval_that_changes_the_arguments(run, toolkit):
    tool = Sender()
    agent = Agent(
        scripted([SEND]),
        toolsets=[FunctionToolset([tool.send]).approval_required()],
        capabilities=[GuardedTools(run)],
        output_type=[str, DeferredToolRequests],
    )
    waiting = await agent.run("go")
    (call,) = waiting.output.approvals
    changed = DeferredToolResults(approvals={call.tool_call_id: ToolApproved(override_args={"to": "bob"})})
    for _ in range(2):
        await agent.run(message_history=waiting.all_messages(), deferred_tool_results=changed)
    assert tool.sent == ["bob"]
    assert (await toolkit.receipts.get(run.key("send", {"to": "bob"}))).status == "completed"


@pytest.mark.parametrize("signal", [CallDeferred(), ApprovalRequired()])
async def test_a_tool_that_defers_itself(run, toolkit, signal):
    tool = Sender(signal)
    agent = agent_of(scripted([SEND]), tool.send, run=run, output_type=[str, DeferredToolRequests])
    assert isinstance((await agent.run("go")).output, DeferredToolRequests)
    receipt = await toolkit.receipts.get(run.key("send", {"to": "ann"}))
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)
    assert "not carried out yet" in receipt.error.message


async def test_what_has_to_end_the_turn_ends_it(run):
    tool = Sender(LeaseLost(run.key("send", {"to": "ann"}), "another worker has it"))
    with pytest.raises(LeaseLost):
        await agent_of(scripted([SEND]), tool.send, run=run).run("go")
    with pytest.raises(NoActiveRun):
        await agent_of(scripted([SEND]), tool.send).run("go")


async def test_the_idempotency_key_is_there_in_a_sync_tool_too(run):
    keys = []

    def send(to: str) -> str:
        keys.append(current_call().idempotency_key)
        return "sent"

    await agent_of(scripted([SEND]), send, run=run).run("go")
    assert keys == [run.key("send", {"to": "ann"}).idempotency_key]


async def test_results_come_back_as_the_framework_would_keep_them(run):
    image = BinaryContent(b"\x00\xff", media_type="image/png")

    class Found(BaseModel):
        n: int

    async def look() -> list:
        return [Found(n=1), image]

    async def shoot() -> ToolReturn:
        return ToolReturn(Found(n=2), content=["what I see", image], metadata={"took": 0.1})

    agent = agent_of(scripted([("look", {}), ("shoot", {})]), look, shoot, run=run)
    for _ in range(2):
        result = await agent.run("go")
        seen, shot = returns(result)
        assert seen.content[0] == {"n": 1}
        assert seen.content[1].data == b"\x00\xff"
        assert (shot.content, shot.metadata) == ({"n": 2}, {"took": 0.1})
        prompts = [p for m in result.all_messages() for p in m.parts if isinstance(p, UserPromptPart)]
        assert prompts[-1].content[0] == "what I see"
        assert prompts[-1].content[1].data == b"\x00\xff"


@pytest.mark.parametrize(
    "value", ["text", 3, None, {"kind": "binary", "label": "x"}, {"kind": "tool-return"}, [1, "a"]]
)
def test_plain_results_stay_what_they_are(value):
    assert json.loads(json.dumps(plain_result(value))) == value
    assert tool_result(plain_result(value)) == value


def test_messages_are_of_the_dialect():
    messages = [ModelRequest([UserPromptPart("hi")]), ModelResponse([ToolCallPart("send", {"to": "ann"}, "a")])]
    assert [type(each) for each in loaded(dumped(messages))] == [ModelRequest, ModelResponse]
    assert DIALECTS["pydantic-ai"].view(dumped(messages)[1]).calls[0].arguments == {"to": "ann"}


async def test_a_cancelled_run_leaves_word(run, toolkit):
    entered = asyncio.Event()

    async def send(to: str) -> str:
        entered.set()
        await asyncio.Event().wait()
        return "never"

    turn = asyncio.create_task(agent_of(scripted([SEND]), send, run=run).run("go"))
    await entered.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert (await toolkit.receipts.get(run.key("send", {"to": "ann"}))).status == "ambiguous"


@pytest.mark.parametrize("merged", [False, True])
def test_a_history_is_numbered_as_its_log(merged):
    """What wake reads in a session's log and what the capability reads in the history give the same numbers."""

    def made(*ids):
        return ModelResponse([ToolCallPart("send", {"to": "ann"}, each) for each in ids])

    said = UserPromptPart("go on")
    sent, failed = ToolReturnPart("send", "sent", "a"), ToolReturnPart("send", "no", "b", outcome="failed")
    between = [ModelRequest([sent, failed, said])] if merged else [ModelRequest([sent, failed]), ModelRequest([said])]
    messages = [made("z"), ModelRequest([said]), made("a", "b"), *between, made("c", "d")]
    turn = turn_of(dumped(messages), len(messages) - 1, DIALECTS["pydantic-ai"])
    for call, number in zip(messages[-1].parts, (2, 3), strict=True):
        mine, args = turn_with(messages, call)
        assert [call_number(each, "send", args, call.tool_call_id) for each in (turn, mine)] == [number] * 2


class Rejecting(AbstractCapability):
    """A hook that is not content with what a tool returned."""

    async def after_tool_execute(self, ctx, *, call, tool_def, args, result):
        raise ModelRetry("say it nicely")


async def test_a_hook_that_rejects_the_result_does_not_have_it_done_again(run):
    tool = Sender()
    capabilities = [GuardedTools(run), Rejecting()]
    agent = Agent(scripted([SEND], [SEND]), tools=[tool.send], capabilities=capabilities, retries=5)
    for _ in range(2):
        assert (await agent.run("go")).output == "done"
    assert tool.sent == ["ann"]


async def never(to):
    await asyncio.Event().wait()


@pytest.mark.parametrize("retries", [0, 3])
async def test_a_tool_whose_time_is_over_is_not_done_again(run, toolkit, retries):
    """Pydantic AI asks for a retry in the tool's stead, which is not the tool's word that it has done nothing."""
    sent = []

    async def send(to: str) -> str:
        sent.append(to)
        return await never(to)

    tool = Tool(send, timeout=0.2)
    for _ in range(2):
        result = await agent_of(scripted([SEND], [SEND]), tool, run=run, retries=retries).run("go")
        assert all("outcome of this call of send is unknown" in each.content for each in returns(result))
    assert sent == ["ann"]
    assert (await toolkit.receipts.get(run.key("send", {"to": "ann"}))).status == "ambiguous"


async def test_a_read_whose_time_is_over_is_asked_again(run):
    asked = []

    async def search(to: str) -> str:
        asked.append(to)
        return "found" if len(asked) > 1 else await never(to)

    call = ("search", {"to": "ann"})
    tool = Tool(search, timeout=0.2)
    result = await agent_of(scripted([call], [call]), tool, run=run, effects={"search": "read"}, retries=3).run("go")
    assert [each.content for each in returns(result)][-1] == "found"


async def test_an_agent_in_a_tool_that_was_cancelled_leaves_its_call_in_doubt(run):
    tool = Sender(RunCancelled("stopped"))
    result = await agent_of(scripted([SEND], [SEND]), tool.send, run=run).run("go")
    assert all("outcome of this call of send is unknown" in each.content for each in returns(result))
    assert tool.sent == ["ann"]


@pytest.mark.parametrize("behavior", ["retry", "failed"])
@pytest.mark.parametrize("heard", [False, True])
async def test_a_tool_of_an_mcp_server_is_not_done_again(run, heard, behavior):
    pytest.importorskip("fastmcp")
    from fastmcp import Client, FastMCP
    from mcp.shared.exceptions import MCPError
    from pydantic_ai.mcp import MCPToolset

    server, sent = FastMCP("mail"), []

    @server.tool
    async def send(to: str) -> str:
        sent.append(to)
        raise ConnectionError("cut off")

    class Waiting(Client):
        async def call_tool(self, **request):
            answer = await super().call_tool(**request)
            if heard:
                return answer
            raise MCPError(-32000, "Request 'tools/call' timed out")

    tools = MCPToolset(Waiting(server), tool_error_behavior=behavior)
    result = await agent_of(scripted([SEND], [SEND]), run=run, toolsets=[tools], retries=3).run("go")
    said = "cut off" if heard else "outcome of this call of send is unknown"
    assert [said in each.content for each in returns(result)] == [True, True]
    assert sent == ["ann"]
