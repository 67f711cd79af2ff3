"""Guarded tools of the OpenAI Agents SDK, in runs of the SDK's own with a scripted model."""

from __future__ import annotations

import asyncio
import copy

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    FunctionTool,
    ModelBehaviorError,
    Runner,
    ToolOutputImage,
    ToolOutputText,
    UserError,
    function_tool,
)
from openai_script import QUIET, calls, in_order, outputs, says

import natsreceipts
from natsreceipts import NotApplied, NotClaimed
from natsreceipts.integrations import current_call
from natsreceipts.integrations.openai_agents import Turn, guarded


@pytest.fixture
async def toolkit(server, namespace):
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True, lease=10) as connected:
        yield connected


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "run-1")


class Outbox:
    def __init__(self):
        self.mails = []

    def tool(self, **options):
        @function_tool(**options)
        async def send(to: str, text: str = "Hi.") -> str:
            """Send a mail."""
            self.mails.append((to, text))
            return f"m-{len(self.mails)}"

        return send


async def play(run, tool, *answers, **options):
    """A turn with one tool. What the model was asked last, and the result."""
    model = in_order(*answers, says("done"))
    agent = Agent(name="a", model=model, tools=[tool])
    async with Turn(run) as hooks:
        result = await Runner.run(agent, "Go.", hooks=hooks, run_config=QUIET, **options)
    return outputs(model.inputs[-1]), result


async def receipts(toolkit):
    return [receipt async for receipt in toolkit.receipts.list()]


async def test_a_turn_that_is_started_again_gets_the_first_result(toolkit, run):
    outbox = Outbox()
    send = guarded(outbox.tool())
    first, _ = await play(run, send, calls(("send", {"to": "ann"}, "a")))
    again, result = await play(run, send, calls(("send", {"to": "ann"}, "b")))
    assert (first, again) == ({"a": "m-1"}, {"b": "m-1"})
    assert result.final_output == "done"
    assert outbox.mails == [("ann", "Hi.")]
    [receipt] = await receipts(toolkit)
    assert (receipt.status, receipt.result, receipt.key.tool) == ("completed", "m-1", "send")
    assert receipt.key == run.key("send", {"to": "ann"})


async def test_streamed(run):
    outbox = Outbox()
    model = in_order(calls(("send", {"to": "ann"}, "a")), says("done"))
    agent = Agent(name="a", model=model, tools=[guarded(outbox.tool())])
    async with Turn(run) as hooks:
        result = Runner.run_streamed(agent, "Go.", hooks=hooks, run_config=QUIET)
        async for _ in result.stream_events():
            pass
    assert result.final_output == "done"
    assert outbox.mails == [("ann", "Hi.")]


async def test_equal_calls_of_one_answer_are_two_and_of_a_turn_again_the_same_two(run):
    outbox = Outbox()
    send = guarded(outbox.tool())
    ann = ("send", {"to": "ann"})
    first, _ = await play(run, send, calls((*ann, "a"), (*ann, "b")), calls((*ann, "c")))
    assert sorted(first.values()) == ["m-1", "m-2", "m-3"]
    again, _ = await play(run, send, calls((*ann, "d"), (*ann, "e")), calls((*ann, "f")))
    assert again == {"d": first["a"], "e": first["b"], "f": first["c"]}
    assert len(outbox.mails) == 3


async def test_without_hooks_equal_calls_are_one(run):
    outbox = Outbox()
    model = in_order(calls(("send", {"to": "ann"}, "a"), ("send", {"to": "ann"}, "b")), says("done"))
    agent = Agent(name="a", model=model, tools=[guarded(outbox.tool(), run=run)])
    await Runner.run(agent, "Go.", run_config=QUIET)
    assert outputs(model.inputs[-1]) == {"a": "m-1", "b": "m-1"}
    assert len(outbox.mails) == 1


class Refused(Exception):
    pass


@pytest.mark.parametrize("policy", ["default", "own", "none"])
async def test_an_exception_is_on_record_as_what_it_is(toolkit, run, policy):
    """And the model reads what the tool's own policy makes of it."""
    options = {"default": {}, "own": {"failure_error_function": lambda _, e: f"No: {e}"}}.get(policy)

    async def send(to: str) -> str:
        raise Refused("no such address")

    made = function_tool(send, **({"failure_error_function": None} if options is None else options))
    tool = guarded(made)
    turn = play(run, tool, calls(("send", {"to": "ann"}, "a")))
    if policy == "none":
        with pytest.raises(UserError) as caught:
            await turn
        assert isinstance(caught.value.__cause__, Refused)
    else:
        told, _ = await turn
        unguarded = in_order(calls(("send", {"to": "ann"}, "a")), says("done"))
        await Runner.run(Agent(name="a", model=unguarded, tools=[made]), "Go.", run_config=QUIET)
        assert told["a"].startswith(outputs(unguarded.inputs[-1])["a"])
        assert "outcome of this call of send is unknown" in told["a"]
    [receipt] = await receipts(toolkit)
    assert receipt.status == "ambiguous"
    assert (receipt.error.type.rpartition(".")[2], receipt.error.message) == ("Refused", "no such address")
    if policy != "none":
        told, _ = await play(run, tool, calls(("send", {"to": "ann"}, "b")))
        assert "outcome of this call of send is unknown" in told["b"]


async def test_what_did_not_happen_may_be_tried_again(toolkit, run):
    tries = []

    @function_tool
    async def send(to: str) -> str:
        tries.append(to)
        if len(tries) == 1:
            raise NotApplied("the provider could not be reached")
        return "sent"

    told, _ = await play(run, guarded(send), calls(("send", {"to": "ann"}, "a")), calls(("send", {"to": "ann"}, "b")))
    assert told["b"] == "sent"
    [receipt] = await receipts(toolkit)
    assert (receipt.status, receipt.attempts) == ("completed", 2)


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"text": "x"}', '{"to": 3}'])
async def test_arguments_that_do_not_fit_are_no_attempt(toolkit, run, arguments):
    outbox = Outbox()
    told, _ = await play(run, guarded(outbox.tool()), calls(("send", arguments, "a")))
    assert told["a"].startswith("An error occurred while running the tool. Please try again.")
    [receipt] = await receipts(toolkit)
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)
    assert outbox.mails == []


async def test_a_model_that_misbehaves_within_the_tool_is_the_tools_error(toolkit, run):
    @function_tool
    async def send(to: str) -> str:
        raise ModelBehaviorError("an agent inside said something odd")

    await play(run, guarded(send), calls(("send", {"to": "ann"}, "a")))
    [receipt] = await receipts(toolkit)
    assert receipt.status == "ambiguous"


async def test_on_unknown_raise(run):
    outbox = Outbox()
    send = guarded(outbox.tool(), on_unknown="raise")
    with pytest.raises(ZeroDivisionError):
        async with run.call("send", {"to": "ann"}):
            raise ZeroDivisionError
    with pytest.raises(natsreceipts.AmbiguousCall):
        await play(run, send, calls(("send", {"to": "ann"}, "a")))
    assert outbox.mails == []


@pytest.mark.parametrize("by_hand", [False, True])
async def test_what_ends_the_turn_is_not_told_to_the_model(server, run, by_hand):
    """Nothing could be claimed: the model must not hear of an error that it might work around."""
    outbox = Outbox()
    tool = outbox.tool()
    if by_hand:
        tool = FunctionTool("send", "", tool.params_json_schema, tool.on_invoke_tool)

        async def by_hand_invoked(ctx, arguments):
            return await outbox.tool().on_invoke_tool(ctx, arguments)

        tool.on_invoke_tool = by_hand_invoked
    tool = guarded(tool)

    async def refuses(*args, **options):
        raise NotClaimed(run.key("send", {"to": "ann"}), "a test")

    run.execute = refuses
    with pytest.raises(NotClaimed):
        await play(run, tool, calls(("send", {"to": "ann"}, "a")))
    assert outbox.mails == []


async def test_a_tool_made_by_hand(toolkit, run):
    async def invoke(ctx, arguments):
        return f"{ctx.tool_call_id} {arguments}"

    tool = FunctionTool(
        name="raw", description="", params_json_schema={}, on_invoke_tool=invoke, strict_json_schema=False
    )
    told, _ = await play(run, guarded(tool), calls(("raw", "not json", "a")))
    assert told == {"a": "a not json"}
    told, _ = await play(run, guarded(tool), calls(("raw", "not json", "b")))
    assert told == {"b": "a not json"}


async def test_a_copy_is_guarded_too(run):
    outbox = Outbox()
    send = copy.copy(guarded(outbox.tool()))
    for call_id in "ab":
        await play(run, send, calls(("send", {"to": "ann"}, call_id)))
    assert len(outbox.mails) == 1


async def test_an_agent_as_a_tool_is_refused():
    inner = Agent(name="inner", model=in_order(says("x")))
    with pytest.raises(natsreceipts.InvalidSetting, match="guard the tools of that agent"):
        guarded(inner.as_tool("inner", "asks it"))


async def test_an_effect_that_may_be_repeated(toolkit, run):
    async def status(to: str) -> str:
        raise Refused("busy")

    tool = guarded(function_tool(status), effect="idempotent")
    for call_id in "ab":
        await play(run, tool, calls(("status", {"to": "ann"}, call_id)))
    [receipt] = await receipts(toolkit)
    assert (receipt.status, receipt.attempts, receipt.effect) == ("failed", 2, "idempotent")


RESULTS = {
    "text": "x",
    "number": 3,
    "object": {"a": [1, None]},
    "tuple": (1, 2),
    "bytes": b"x",
    "set": {1},
    "a class's": Refused("x"),
    "structured": ToolOutputText(text="x"),
    "structured list": [ToolOutputText(text="x"), ToolOutputImage(image_url="https://example.com/a.png")],
    "structured dict": {"type": "text", "text": "x"},
    "empty list": [],
    "None": None,
}


@pytest.mark.parametrize("name", RESULTS)
async def test_the_model_reads_of_a_result_what_it_would_without_a_guard(run, name):
    @function_tool
    async def get() -> object:
        return RESULTS[name]

    plain = in_order(calls(("get", "{}", "a")), says("done"))
    await Runner.run(Agent(name="a", model=plain, tools=[get]), "Go.", run_config=QUIET)
    want = outputs(plain.inputs[-1])["a"]
    assert (await play(run, guarded(get), calls(("get", "{}", "a"))))[0]["a"] == want
    assert (await play(run, guarded(get), calls(("get", "{}", "b"))))[0]["b"] == want


async def test_the_tool_sees_its_call(run):
    keys = []

    @function_tool
    async def send(to: str) -> str:
        keys.append(current_call().idempotency_key)
        return "sent"

    await play(run, guarded(send), calls(("send", {"to": "ann"}, "a")))
    assert keys == [run.key("send", {"to": "ann"}).idempotency_key]


async def test_a_time_out_of_the_sdks_leaves_the_call_ambiguous(toolkit, run):
    started = asyncio.Event()

    @function_tool(timeout=0.2)
    async def send(to: str) -> str:
        started.set()
        await asyncio.Event().wait()
        return "sent"

    told, _ = await play(run, guarded(send), calls(("send", {"to": "ann"}, "a")))
    if started.is_set():
        [receipt] = await receipts(toolkit)
        assert receipt.status == "ambiguous"
    assert "timed out" in told["a"]


async def test_a_policy_on_approval_is_still_asked(run):
    outbox = Outbox()

    async def unless_ann(_ctx, arguments, _call_id):
        return arguments["to"] != "ann"

    send = guarded(outbox.tool(needs_approval=unless_ann))
    model = in_order(calls(("send", {"to": "bob", "text": "x"}, "a")), says("done"))
    agent = Agent(name="a", model=model, tools=[send])
    async with Turn(run) as hooks:
        result = await Runner.run(agent, "Go.", hooks=hooks, run_config=QUIET)
        assert [each.raw_item.call_id for each in result.interruptions] == ["a"]
        assert outbox.mails == []
        state = result.to_state()
        state.approve(result.interruptions[0])
        result = await Runner.run(agent, state, hooks=hooks, run_config=QUIET)
    assert result.final_output == "done"
    assert outbox.mails == [("bob", "x")]
