"""What is no input of a session's verbs: refused with an error that says what to pass, and nothing is written."""

from __future__ import annotations

import pytest
from session_support import nothing_written, stream_of
from support import bucket_of

from natsreceipts import (
    ErrorKind,
    InvalidName,
    InvalidSetting,
    InvalidTranscript,
    NatsReceiptsError,
    Unreachable,
    interrupted_results,
    reconcile_interrupted_session,
    tool,
)

UNKNOWN = ErrorKind.INTERRUPTED_OUTCOME_UNKNOWN


@tool(name="send")
async def send(to: str) -> str:
    return to


async def an_async_function(arguments):
    raise AssertionError(arguments)


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("wake", {"guarded": 5}),
        ("wake", {"guarded": "send"}),
        ("wake", {"guarded": ["send"]}),
        ("wake", {"guarded": send}),
        ("wake", {"guarded": {"send": None}}),
        ("wake", {"guarded": {"send": an_async_function}}),
        ("wake", {"effects": ["read"]}),
        ("wake", {"effects": "read"}),
        ("wake", {"effects": {"send": "harmless"}}),
        ("wake", {"started": 5}),
        ("wake", {"started": "t1"}),
        ("wake", {"started": [1]}),
        ("suspend", {"tool_call_ids": 5}),
        ("suspend", {"tool_call_ids": "t1"}),
        ("suspend", {"tool_call_ids": []}),
        ("suspend", {"tool_call_ids": [["t1"]]}),
        ("resume", {"tool_call_ids": None}),
        ("entry_of", {"tool_call_id": []}),
        ("entry_of", {"tool_call_id": "t9"}),
        ("append_result", {"tool_call_id": [], "value": 1}),
        ("append_result", {"tool_call_id": "t9", "value": 1}),
        ("branch", {"entry": 5}),
        ("branch", {"entry": "no such entry"}),
        ("compact", {"message": {"role": "user", "content": "x"}, "keep_from": []}),
        ("append", {"message": {"role": "user", "content": "x"}, "run": 5}),
        ("append", {"message": {"role": "user", "content": "x"}, "run": ""}),
        ("append", {"message": {"role": "user", "content": "x"}, "entry_id": 5}),
        ("append", {"message": {"role": "user", "content": "x"}, "entry_id": ""}),
        ("append", {"message": 5}),
    ],
)
async def test_it_is_refused(desk, nc, namespace, verb, arguments):
    desk = desk()
    await desk.asks(("t1", "send", {"to": "ann"}))
    async with nothing_written(nc, namespace):
        with pytest.raises((InvalidSetting, InvalidName, InvalidTranscript)) as caught:
            await getattr(desk.log, verb)(**arguments)
    if arguments.get("run") == 5:
        assert "run" in str(caught.value).split()[0]


@pytest.mark.parametrize("effects", [["x"], "x", {"send": "harmless"}])
async def test_effects_of_a_reconcile(desk, effects):
    with pytest.raises(InvalidSetting):
        await reconcile_interrupted_session(desk().log, effects)


async def test_tools_may_be_listed(desk):
    desk = desk()
    await desk.asks(("t1", "send", {"to": "ann"}))
    (recovered,) = (await desk.log.wake(guarded=[send])).recovered
    assert recovered.said == "absent"
    assert recovered.error_kind == ErrorKind.INTERRUPTED_NEVER_STARTED


@pytest.mark.parametrize("answer", [None, "ann", 5, ("ann",), (None, "x"), ({}, 5), ({}, "x", "y")])
async def test_a_key_function_that_gives_no_arguments_proves_nothing(desk, answer):
    """One that forgot its return would have wake look in the wrong place, and say that the call never started."""
    desk = desk()
    await desk.asks(("t1", "send", {"to": "ann"}))
    (recovered,) = (await desk.log.wake(guarded={"send": lambda _: answer})).recovered
    assert (recovered.said, recovered.error_kind) == (None, UNKNOWN)
    assert recovered.text == interrupted_results([_Call()])[0].text


class _Call:
    tool_call_id, tool_name = "t1", "send"


@pytest.mark.parametrize("call", [("t" * 5000, "send"), ("t1", "s" * 5000)])
async def test_names_that_no_close_could_repeat_are_refused(desk, nc, namespace, call):
    async with nothing_written(nc, namespace):
        with pytest.raises(InvalidTranscript, match="characters"):
            await desk().asks((*call, {}))


async def test_what_a_host_does_to_what_it_got_does_not_reach_the_log(desk):
    desk = desk("anthropic")
    await desk.hears("hello")
    (await desk.log.load()).messages[0]["cache_control"] = {"type": "ephemeral"}
    (await desk.log.context()).messages[0]["cache_control"] = {"type": "ephemeral"}
    assert "cache_control" not in str((await desk.log.load()).messages)
    assert "cache_control" not in str((await desk.log.context()).messages)


async def test_a_stream_that_is_gone_is_not_an_empty_one(toolkit, desk, nc, namespace, monkeypatch):
    """A server answers a direct get that nobody serves with a status, which must not pass for the end of a list."""
    monkeypatch.setattr("natsreceipts.sessions.CLAIM_PATIENCE", 1.0)
    monkeypatch.setattr("natsreceipts.receipts._READ_PATIENCE", 1.0)
    await desk().hears("hello")
    for stream in (stream_of(namespace), f"KV_{bucket_of(namespace)}"):
        await nc.jetstream().delete_stream(stream)
    with pytest.raises(NatsReceiptsError):
        await toolkit.sessions.open("acme", "chat").load()
    with pytest.raises(Unreachable):
        [each async for each in toolkit.sessions.list()]
    with pytest.raises(Unreachable):
        [each async for each in toolkit.receipts.list()]
