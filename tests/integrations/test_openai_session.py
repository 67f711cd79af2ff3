"""A session log as the Session of the OpenAI Agents SDK."""

from __future__ import annotations

import pytest

pytest.importorskip("agents")

from agents import Agent, Runner, SQLiteSession, function_tool
from agents.memory import Session, SessionSettings
from openai_script import QUIET, Script, calls, in_order, outputs, says

import natsreceipts
from natsreceipts import InvalidSetting, SessionBusy, SessionConflict
from natsreceipts.integrations.openai_agents import NatsSession, Turn, guarded

DIALECT = "openai-responses"


@pytest.fixture
async def toolkit(server, namespace):
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True, lease=10) as connected:
        yield connected


@pytest.fixture
def desk(toolkit):
    return Desk(toolkit)


class Desk:
    """A session as a worker has it, and a tool whose effects are counted."""

    def __init__(self, toolkit):
        self.toolkit = toolkit
        self.run = toolkit.run("acme", "run-1")
        self.mails = []

        @function_tool
        async def send(to: str) -> str:
            self.mails.append(to)
            if to == "nobody":
                raise ConnectionError("cut off")
            return f"m-{len(self.mails)}"

        self.plain = send
        self.tool = guarded(send)
        self.session = self.opened()

    def opened(self, **options):
        """As another worker would open it."""
        log = self.toolkit.sessions.open("acme", "chat", dialect=DIALECT)
        return NatsSession(log, [self.tool], **options)

    async def play(self, text, *answers, session=None, **options):
        session = session or self.session
        model = in_order(*answers, says("done"))
        agent = Agent(name="a", model=model, tools=[self.tool], **options)
        async with Turn(self.run, session) as hooks:
            await Runner.run(agent, text, session=session, hooks=hooks, run_config=QUIET)
        return model

    async def cut_off(self, *made, text="Go."):
        """A turn that ends after the model's answer was logged, and before its tools were executed."""

        class Cut(Turn):
            async def on_llm_end(self, *args):
                await super().on_llm_end(*args)
                raise ConnectionResetError

        agent = Agent(name="a", model=in_order(calls(*made)), tools=[self.tool])
        with pytest.raises(ConnectionResetError):
            async with Cut(self.run, self.session) as hooks:
                await Runner.run(agent, text, session=self.session, hooks=hooks, run_config=QUIET)


def without_ids(items):
    return [{name: part for name, part in item.items() if name != "id"} for item in items]


def kinds(items):
    return [item.get("role") or item["type"] for item in items]


def test_it_is_a_session(desk):
    assert isinstance(desk.session, Session)


async def test_a_conversation_is_kept_as_the_sdks_own_session_keeps_it(desk):
    def answers():
        return calls(("send", {"to": "ann"}, "a"), ("send", {"to": "bob"}, "b")), calls(("send", {"to": "cy"}, "c"))

    await desk.play("Mail them.", *answers())
    ours = await desk.opened().get_items()
    theirs = SQLiteSession("x")
    agent = Agent(name="a", model=in_order(*answers(), says("done")), tools=[desk.tool])
    async with Turn(desk.run) as hooks:
        await Runner.run(agent, "Mail them.", session=theirs, hooks=hooks, run_config=QUIET)
    without_ids = [
        [{k: v for k, v in item.items() if k != "id"} for item in items] for items in (ours, await theirs.get_items())
    ]
    assert without_ids[0] == without_ids[1]
    model = await desk.play("And now?", session=desk.opened())
    assert model.inputs[0][:-1] == ours
    assert desk.mails == ["ann", "bob", "cy"]


async def test_an_answer_is_in_the_log_before_its_tools_are_executed(desk):
    seen = []

    @function_tool
    async def look() -> str:
        seen.extend(kinds((await desk.toolkit.sessions.open("acme", "chat", dialect=DIALECT).load()).messages))
        return "seen"

    desk.tool = guarded(look)
    await desk.play("Look.", calls(("look", "{}")))
    assert seen == ["user", "function_call"]


async def test_a_call_that_never_started_is_closed_and_made_anew(desk):
    await desk.cut_off(("send", {"to": "ann"}, "a"))
    session = desk.opened()
    items = await session.get_items()
    assert "never started" in outputs(items)["a"]
    assert all("natsreceipts" not in item for item in items)
    model = await desk.play([], calls(("send", {"to": "ann"}, "b")), session=session)
    assert outputs(model.inputs[-1])["b"] == "m-1"
    assert desk.mails == ["ann"]


async def test_a_call_that_was_executed_is_closed_with_its_result(desk):
    await desk.cut_off(("send", {"to": "ann"}, "a"), ("send", {"to": "ann"}, "b"))
    await desk.run.execute("send", {"to": "ann"}, _sent, distinct="call 2", entry=await desk.session.log.entry_of("b"))
    told = outputs(await desk.opened().get_items())
    assert told["b"] == "sent"
    assert "never started" in told["a"]


async def _sent():
    return "sent"


async def test_a_call_whose_outcome_nobody_knows(desk):
    await desk.play("Go.", calls(("send", {"to": "nobody"}, "a")))
    await desk.cut_off(("send", {"to": "nobody"}, "b"))
    told = outputs(await desk.opened().get_items())
    assert "please try again" in told["a"].lower()
    assert "cannot tell whether it took effect" in told["b"]
    assert desk.mails == ["nobody"]


@pytest.mark.parametrize("effect", ["unguarded", "read"])
async def test_a_tool_that_leaves_no_receipt(desk, effect):
    """That there is none says nothing."""

    @function_tool
    async def look(at: str) -> str:
        return "seen"

    desk.tool = look if effect == "unguarded" else guarded(look, effect=effect)
    await desk.cut_off(("look", {"at": "ann"}, "a"))
    told = outputs(await desk.opened().get_items())["a"]
    assert "never started" not in told


async def begun(desk, said, *answers, turn):
    """A turn as the docs begin it, and as another worker would: what it came to, and the model."""
    session = desk.opened()
    model = in_order(*answers, says("done"))
    agent = Agent(name="a", model=model, tools=[desk.tool])
    async with Turn(desk.toolkit.run("acme", turn), session) as hooks:
        output = await hooks.begin(said, turn=turn)
        if output is None:
            output = (await Runner.run(agent, [], session=session, hooks=hooks, run_config=QUIET)).final_output
    return output, model


async def test_a_turn_that_has_ended_does_not_ask_the_model_again(desk):
    mail = calls(("send", {"to": "ann"}))
    output, model = await begun(desk, "Go.", mail, says("gone"), turn="job-1")
    assert (output, len(model.inputs), desk.mails) == ("gone", 2, ["ann"])
    output, model = await begun(desk, "Go.", mail, turn="job-1")
    assert (output, model.inputs, desk.mails) == ("gone", [], ["ann"])


async def test_the_same_words_in_another_turn_are_said_again(desk):
    for turn in ("job-1", "job-2"):
        _, model = await begun(desk, "Go.", calls(("send", {"to": "ann"})), turn=turn)
    assert kinds(model.inputs[0]) == ["user", "function_call", "function_call_output", "assistant", "user"]
    assert desk.mails == ["ann", "ann"]


async def test_a_turn_that_was_begun_goes_on_and_says_nothing_twice(desk):
    said = [{"role": "user", "content": "Go."}, {"role": "user", "content": "Now."}]
    await desk.session.log.append(said[0], entry_id="job-1")  # a worker that died between the two
    mail = calls(("send", {"to": "ann"}))
    session, left = desk.opened(), iter([mail])

    def answer(items):
        if (made := next(left, None)) is None:
            raise ConnectionError("the model is away")
        return made

    agent = Agent(name="a", model=Script(answer), tools=[desk.tool])
    with pytest.raises(ConnectionError):
        async with Turn(desk.toolkit.run("acme", "job-1"), session) as hooks:
            assert await hooks.begin(said, turn="job-1") is None
            await Runner.run(agent, [], session=session, hooks=hooks, run_config=QUIET)
    output, model = await begun(desk, said, turn="job-1")
    assert kinds(model.inputs[0]) == ["user", "user", "function_call", "function_call_output"]
    assert (output, desk.mails) == ("done", ["ann"])


async def test_what_cannot_begin_a_turn(desk):
    for session, said in ((None, "Go."), (desk.session, [])):
        async with Turn(desk.run, session) as hooks:
            with pytest.raises(InvalidSetting):
                await hooks.begin(said, turn="job-1")


async def test_another_worker_is_at_it(desk):
    await desk.cut_off(("send", {"to": "ann"}, "a"))
    async with desk.run.call("send", {"to": "ann"}, entry=await desk.session.log.entry_of("a")) as call:
        with pytest.raises(SessionBusy):
            await desk.play("Hello?", session=desk.opened())
        call.result = "m-1"
    assert outputs(await desk.opened().get_items()) == {"a": "m-1"}


async def test_two_writers(desk):
    await desk.play("Hi.")
    late = desk.opened()
    await late.get_items()
    await desk.play("Me again.")
    with pytest.raises(SessionConflict):
        await late.add_items([{"role": "user", "content": "And me."}])


async def test_equal_calls_are_numbered_from_the_log(desk):
    """Where the worker that made the first of them is gone."""
    ann = ("send", {"to": "ann"})
    await desk.play("Go.", calls((*ann, "a")))
    session = desk.opened()
    await session.pop_item()  # the model's last words
    model = await desk.play([], calls((*ann, "b")), session=session)
    assert outputs(model.inputs[-1]) == {"a": "m-1", "b": "m-2"}
    assert desk.mails == ["ann", "ann"]
    model = await desk.play("Again.", calls((*ann, "c")))
    assert outputs(model.inputs[-1])["c"] == "m-1"  # another turn of the same run: that is a turn that began again


async def test_pop_item_and_clear_session(desk):
    session, theirs = desk.session, SQLiteSession("x")
    items = [{"role": "user", "content": str(n)} for n in range(3)]
    for each in (session, theirs):
        await each.add_items(items)
        assert await each.pop_item() == items[2]
        assert await each.pop_item() == items[1]
        await each.add_items([items[2]])
        assert await each.get_items() == [items[0], items[2]]
        await each.clear_session()
        assert await each.get_items() == []
        assert await each.pop_item() is None
        await each.add_items([items[1]])
        assert await each.get_items() == [items[1]]
    assert await desk.opened().get_items() == [items[1]]
    assert len((await session.log.load()).all_entries) == 5


async def test_the_last_items(desk):
    session, theirs = desk.session, SQLiteSession("x")
    items = [{"role": "user", "content": str(n)} for n in range(3)]
    for each in (session, theirs):
        await each.add_items(items)
    for limit in (None, 1, 2, 3, 9):
        assert await session.get_items(limit) == await theirs.get_items(limit)
    assert await session.get_items(0) == []
    model = await desk.play("4", session=desk.opened(session_settings=SessionSettings(limit=1)))
    assert [item["content"] for item in model.inputs[0]] == ["2", "4"]


async def test_a_call_that_waits_for_a_person(desk):
    """It is put on hold, is not closed meanwhile, and is executed once it was approved, in another process."""
    desk.tool.needs_approval = True
    model = in_order(calls(("send", {"to": "ann"}, "a")), says("done"))
    agent = Agent(name="a", model=model, tools=[desk.tool])
    async with Turn(desk.run, desk.session) as hooks:
        result = await Runner.run(agent, "Go.", session=desk.session, hooks=hooks, run_config=QUIET)
    await desk.session.log.suspend([each.raw_item.call_id for each in result.interruptions])
    state = result.to_state()
    assert "on hold" in outputs(await desk.opened().get_items())["a"]
    assert desk.mails == []
    state.approve(result.interruptions[0])
    session = desk.opened()
    async with Turn(desk.run, session) as hooks:
        result = await Runner.run(agent, state, session=session, hooks=hooks, run_config=QUIET)
    assert (result.final_output, desk.mails) == ("done", ["ann"])
    assert outputs(await desk.opened().get_items()) == {"a": "m-1"}


async def test_a_call_that_a_person_refused(desk):
    desk.tool.needs_approval = True
    model = in_order(calls(("send", {"to": "ann"}, "a")), says("done"))
    agent = Agent(name="a", model=model, tools=[desk.tool])
    async with Turn(desk.run, desk.session) as hooks:
        result = await Runner.run(agent, "Go.", session=desk.session, hooks=hooks, run_config=QUIET)
    await desk.session.log.suspend(["a"])
    state = result.to_state()
    state.reject(result.interruptions[0])
    async with Turn(desk.run, desk.session) as hooks:
        await Runner.run(agent, state, session=desk.session, hooks=hooks, run_config=QUIET)
    assert "not approved" in outputs(await desk.opened().get_items())["a"]
    assert desk.mails == []


async def test_streamed(desk):
    model = in_order(calls(("send", {"to": "ann"}, "a")), says("done"))
    agent = Agent(name="a", model=model, tools=[desk.tool])
    async with Turn(desk.run, desk.session) as hooks:
        result = Runner.run_streamed(agent, "Go.", session=desk.session, hooks=hooks, run_config=QUIET)
        async for _ in result.stream_events():
            pass
    assert kinds(await desk.opened().get_items()) == ["user", "function_call", "function_call_output", "assistant"]


async def test_without_the_hooks_calls_are_logged_with_their_results(desk):
    model = in_order(calls(("send", {"to": "ann"}, "a")), says("done"))
    agent = Agent(name="a", model=model, tools=[desk.tool])
    async with desk.run:
        await Runner.run(agent, "Go.", session=desk.session, run_config=QUIET)
    assert kinds(await desk.opened().get_items()) == ["user", "function_call", "function_call_output", "assistant"]


async def test_a_tool_that_is_guarded_in_another_run_is_refused(desk):
    """Wake would look for its receipts in the turn's run, and find none."""
    desk.tool = guarded(desk.plain, run=desk.toolkit.run("acme", "run-2"))
    with pytest.raises(InvalidSetting, match="run-2"):
        await desk.play("Go.", calls(("send", {"to": "ann"}, "a")))
    assert desk.mails == []


def test_a_log_in_another_dialect_is_refused(toolkit):
    with pytest.raises(InvalidSetting, match="openai-responses"):
        NatsSession(toolkit.sessions.open("acme", "chat"))
