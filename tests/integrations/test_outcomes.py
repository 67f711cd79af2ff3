"""How an outcome reaches the model: the same whatever framework asks."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support import PATIENCE, toolkit_of

from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    CallTimedOut,
    InvalidSetting,
    LeaseLost,
    NoActiveRun,
    NotApplied,
    PayloadMissing,
    ReceiptErased,
    tool,
)
from natsreceipts.integrations import CallFailed, ToolGuard, current_call
from natsreceipts.integrations.outcomes import CallRaised, NotCarriedOut, Outcome
from natsreceipts.numbering import distinct_of

ARGS = {"to": "ann"}


class Deferred(Exception):
    """A framework's control flow."""


@pytest.fixture
async def toolkit(server, namespace):
    async with toolkit_of(server.url, namespace) as toolkit:
        yield toolkit


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "order-42")


class Body:
    """What a framework would execute: returns or raises the next of what it was made with, the last one for ever."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.entered = 0

    async def __call__(self):
        self.entered += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


async def receipt_of(toolkit, run, name="send", distinct=None):
    return await toolkit.receipts.get(run.key(name, ARGS, distinct=distinct))


async def test_a_result_is_given_again(toolkit, run):
    guard, body = ToolGuard(run), Body({"id": ("m", 1)})
    for _ in range(2):
        assert await guard.call("send", ARGS, body) == Outcome({"id": ["m", 1]})
    assert body.entered == 1
    assert (await receipt_of(toolkit, run)).result == {"id": ["m", 1]}


async def test_equal_calls_that_are_numbered_are_two(toolkit, run):
    guard, body = ToolGuard(run), Body("first", "second")
    for _ in range(2):
        outcomes = [await guard.call("send", ARGS, body, distinct=distinct_of(n)) for n in (1, 2)]
        assert [each.value for each in outcomes] == ["first", "second"]
    assert body.entered == 2


async def test_a_failure_that_the_tool_reports_says_the_same_at_a_replay(toolkit, run):
    guard, body = ToolGuard(run), Body(CallFailed("card declined"), "charged")
    for _ in range(2):
        outcome = await guard.call("send", ARGS, body)
        assert (outcome.text, outcome.is_error) == ("card declined", True)
    assert body.entered == 1
    assert (await receipt_of(toolkit, run)).status == "completed"


@pytest.mark.parametrize("effect", ["idempotent", "resumable"])
async def test_a_failure_of_a_tool_that_may_be_repeated_does_not_stay(toolkit, run, effect):
    guard, body = ToolGuard(run, effects={"send": effect}), Body(CallFailed("try later"), "done")
    assert await guard.call("send", ARGS, body) == Outcome(text="try later")
    receipt = await receipt_of(toolkit, run)
    assert (receipt.status, receipt.error.message) == ("failed", "try later")
    assert await guard.call("send", ARGS, body) == Outcome("done")


async def test_a_read_leaves_no_receipt(toolkit, run):
    guard, body = ToolGuard(run, effects={"send": "read"}), Body("a", CallFailed("b"), "c")
    outcomes = [await guard.call("send", ARGS, body) for _ in range(3)]
    assert [(each.value, each.text) for each in outcomes] == [("a", None), (None, "b"), ("c", None)]
    assert await receipt_of(toolkit, run) is None


@pytest.mark.parametrize("value", [{"natsreceipts": "failed", "text": "x"}, {"natsreceipts": 1}, [{"natsreceipts": 2}]])
async def test_a_result_that_looks_like_ours_stays_the_tools(run, value):
    guard, body = ToolGuard(run), Body(value)
    for _ in range(2):
        assert await guard.call("send", ARGS, body) == Outcome(value)
    assert body.entered == 1


async def test_control_flow_is_no_outcome(toolkit, run):
    guard = ToolGuard(run, control_flow=(Deferred,))
    deferred = Deferred()
    body = Body(deferred, "done")
    with pytest.raises(Deferred) as raised:
        await guard.call("send", ARGS, body)
    assert raised.value is deferred
    receipt = await receipt_of(toolkit, run)
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)
    assert await guard.call("send", ARGS, body) == Outcome("done")
    assert (await receipt_of(toolkit, run)).attempts == 2


async def test_a_body_may_say_so_of_any_error(toolkit, run):
    guard, body = ToolGuard(run), Body(NotCarriedOut(ValueError("no such argument")), "done")
    with pytest.raises(ValueError, match="no such argument"):
        await guard.call("send", ARGS, body)
    assert await guard.call("send", ARGS, body) == Outcome("done")


async def test_an_error_of_the_tool_is_raised_and_then_nobody_knows(toolkit, run, caplog):
    guard, body = ToolGuard(run), Body(ConnectionResetError("cut"))
    with pytest.raises(ConnectionResetError):
        await guard.call("send", ARGS, body)
    with caplog.at_level(logging.WARNING, "natsreceipts"):
        outcome = await guard.call("send", ARGS, body)
    assert "unknown" in outcome.text
    assert "send" in outcome.text
    assert "the model is told of it" in caplog.text
    assert body.entered == 1
    with pytest.raises(AmbiguousCall) as raised:
        await ToolGuard(run, on_unknown="raise").call("send", ARGS, body)
    assert raised.value.model_text == outcome.text


async def test_an_error_that_the_framework_would_tell(toolkit, run):
    error = ConnectionResetError("cut")
    guard, body = ToolGuard(run), Body(CallRaised("Error: cut. Please fix your mistakes.", error))
    first, again = [await guard.call("send", ARGS, body) for _ in range(2)]
    assert first.text == f"Error: cut. Please fix your mistakes.\n{again.text}"
    receipt = await receipt_of(toolkit, run)
    assert (receipt.status, receipt.error.message) == ("ambiguous", "cut")
    with pytest.raises(AmbiguousCall) as raised:
        await ToolGuard(run, on_unknown="raise").call("send", ARGS, body, distinct="2")
    second = await receipt_of(toolkit, run, distinct="2")
    assert (raised.value.revision, raised.value.attempts) == (second.revision, 1)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [NotApplied("refused"), ConnectionRefusedError("refused")])
async def test_an_error_that_had_no_effect(toolkit, error):
    run = toolkit.run("acme", "order-42", not_applied=(ConnectionRefusedError,))
    guard, body = ToolGuard(run), Body(CallRaised("Error: refused", error), error, "done")
    assert await guard.call("send", ARGS, body) == Outcome(text="Error: refused")
    assert (await receipt_of(toolkit, run)).error.not_applied
    with pytest.raises(type(error)):
        await guard.call("send", ARGS, body)
    assert await guard.call("send", ARGS, body) == Outcome("done")


async def test_an_error_that_may_be_repeated(toolkit, run):
    guard = ToolGuard(run, effects={"send": "idempotent"})
    body = Body(CallRaised("Error: cut", ConnectionResetError("cut")), "done")
    assert await guard.call("send", ARGS, body) == Outcome(text="Error: cut")
    assert await guard.call("send", ARGS, body) == Outcome("done")


async def test_another_attempt_is_waited_for(toolkit, server, namespace):
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slowly():
        entered.set()
        await go_on.wait()
        return "sent"

    async with toolkit_of(server.url, namespace) as other:
        holder = asyncio.create_task(ToolGuard(other.run("acme", "order-42")).call("send", ARGS, slowly))
        await asyncio.wait_for(entered.wait(), PATIENCE)
        impatient = toolkit.run("acme", "order-42", wait=0)
        outcome = await ToolGuard(impatient).call("send", ARGS, Body("twice"))
        assert "still at it" in outcome.text
        with pytest.raises(CallInFlight):
            await ToolGuard(impatient, on_unknown="raise").call("send", ARGS, Body("twice"))
        patient = asyncio.create_task(ToolGuard(toolkit.run("acme", "order-42")).call("send", ARGS, Body("twice")))
        await asyncio.sleep(0)
        go_on.set()
        assert await patient == await holder == Outcome("sent")


async def test_a_time_out(toolkit):
    async def hang():
        await asyncio.Event().wait()

    run = toolkit.run("acme", "order-42", timeout=0.05)
    first = await ToolGuard(run).call("send", ARGS, hang)
    again = await ToolGuard(run).call("send", ARGS, Body("sent"))
    assert first == again
    assert "unknown" in first.text
    repeatable = ToolGuard(run, effects={"put": "idempotent"})
    assert "safe to issue again" in (await repeatable.call("put", ARGS, hang)).text
    with pytest.raises(CallTimedOut):
        await ToolGuard(run, on_unknown="raise").call("send", ARGS, hang, distinct="2")


async def test_arguments_that_are_no_json(run):
    body = Body("sent")
    outcome = await ToolGuard(run, on_unknown="raise").call("send", {"n": float("inf")}, body)
    assert "$.n" in outcome.text
    assert "Nothing was executed" in outcome.text
    assert body.entered == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda key: PayloadMissing(key, store="s", name="n"), "Do not issue it again"),
        (lambda key: ReceiptErased(key, bucket="b", revision=3), "no longer on record"),
        (lambda key: LeaseLost(key, "gone"), None),
    ],
)
async def test_what_a_model_may_be_told(run, error, said):
    body = Body(error(run.key("send", ARGS)))
    if said is None:
        with pytest.raises(LeaseLost):
            await ToolGuard(run).call("send", ARGS, body)
    else:
        assert said in (await ToolGuard(run).call("send", ARGS, body)).text


async def test_an_error_of_another_call_is_the_tools_own(run):
    other = AmbiguousCall(run.key("other", ARGS), revision=1, attempts=1)
    with pytest.raises(AmbiguousCall):
        await ToolGuard(run).call("send", ARGS, Body(other))


async def test_an_operator_hears_of_what_only_the_model_is_told(toolkit, run, nc, namespace):
    js = nc.jetstream()
    await js.add_stream(name=f"{namespace}JOBS", subjects=[f"{namespace}.jobs"])
    jobs = await js.pull_subscribe(f"{namespace}.jobs", stream=f"{namespace}JOBS")
    await js.publish(f"{namespace}.jobs", b"")
    (msg,) = await jobs.fetch(1, timeout=PATIENCE)
    guard = ToolGuard(run)
    with pytest.raises(ConnectionResetError):
        await guard.call("send", ARGS, Body(ConnectionResetError()))
    async with toolkit.delivery(msg, operator="ops"):
        for _ in range(2):
            assert (await guard.call("send", ARGS, Body("sent"))).is_error
    (notice,) = await run.notices.list_run()
    assert notice.spec.fact.decision == "ambiguous-call"
    await jobs.unsubscribe()


async def test_the_call_is_there_for_its_tool(run):
    with pytest.raises(NoActiveRun):
        current_call()
    seen = []

    async def body():
        seen.append(current_call().idempotency_key)
        seen.append(await asyncio.to_thread(lambda: current_call().idempotency_key))

    await ToolGuard(run).call("send", ARGS, body)
    assert seen == [run.key("send", ARGS).idempotency_key] * 2
    with pytest.raises(NoActiveRun):
        current_call()


async def test_steps_of_a_tool_that_resumes(run):
    done = []

    async def body():
        await current_call().step("upload", lambda: done.append("upload"))
        if len(done) == 1:
            done.append("cut")
            raise ConnectionResetError
        return "done"

    guard = ToolGuard(run, effects={"send": "resumable"})
    with pytest.raises(ConnectionResetError):
        await guard.call("send", ARGS, body)
    assert await guard.call("send", ARGS, body) == Outcome("done")
    assert done == ["upload", "cut"]


async def test_the_ambient_run(toolkit, run):
    guard, body = ToolGuard(), Body("sent")
    with pytest.raises(NoActiveRun):
        await guard.call("send", ARGS, body)
    async with run:
        assert await guard.call("send", ARGS, body) == Outcome("sent")
    assert (await receipt_of(toolkit, run)).status == "completed"


def test_effects(toolkit):
    run = toolkit.run("acme", "order-42", effect="resumable")
    guard = ToolGuard(run, effects={"put": "idempotent"})
    assert [guard.effect_of("put", "read"), guard.effect_of("get", "read"), guard.effect_of("send")] == [
        "idempotent",
        "read",
        "resumable",
    ]
    assert ToolGuard(toolkit.run("acme", "x")).effect_of("send") == "opaque"
    with pytest.raises(InvalidSetting, match="'harmless' of tool 'get'"):
        guard.effect_of("get", "harmless")
    with pytest.raises(InvalidSetting):
        ToolGuard(run, effects={"send": "harmless"})
    with pytest.raises(InvalidSetting, match="on_unknown"):
        ToolGuard(run, on_unknown="ignore")


async def test_wake_tells_a_reported_failure_as_one(toolkit, run):
    session = toolkit.sessions.open("acme", "chat")
    call = {"type": "toolCall", "id": "a", "name": "send", "arguments": ARGS}
    await session.append({"role": "assistant", "content": [call]}, run=run)
    await ToolGuard(run).call("send", ARGS, Body(CallFailed("card declined")))
    report = await session.wake(guarded={"send": lambda arguments: arguments})
    assert [each.text for each in report.recovered] == ["card declined"]
    assert (await session.context()).messages[-1]["isError"] is True


async def test_a_tool_that_is_guarded_already(run):
    """A @tool function as a framework's tool: as ``read`` it keeps its own receipt, and only that."""
    sent = []

    @tool
    async def send(to):
        sent.append(to)
        return "sent"

    async with run:
        for _ in range(2):
            outcome = await ToolGuard(effects={"send": "read"}).call("send", ARGS, lambda: send(**ARGS))
            assert outcome == Outcome("sent")
        assert sent == ["ann"]
        with pytest.raises(CallInFlight, match="inside its own body"):
            await ToolGuard().call("send", {"to": "bob"}, lambda: send("bob"))
