"""What hooks are told, what is logged, and that a hook can break nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support import Effect, toolkit_of
from telemetry_scenes import ARGS, EXPECTED, RESULT, SECRETS, a_day, steady

from natsreceipts import InvalidSetting
from natsreceipts.telemetry import (
    CallDecided,
    CallSettled,
    DoubtSettled,
    LostLease,
    RenewalFailed,
    SessionWoken,
    ToolkitClosed,
    WriteConflict,
    log_events,
)


def in_short(event):
    match event:
        case CallDecided(_, decision, attempt, seconds, error):
            return (
                f"{decision} {attempt}"
                + (" known" if seconds is None else "")
                + (f" {type(error).__name__}" if error else "")
            )
        case CallSettled(_, attempt, status, _, _):
            return f"{status} {attempt}"
        case WriteConflict(_, write):
            return f"{write} conflict"
        case DoubtSettled(_, write, landed):
            return f"{write} {'landed' if landed else 'not_landed'}"
        case RenewalFailed(_, attempt, _):
            return f"renewal failed {attempt}"
        case LostLease(_, attempt):
            return f"lost lease {attempt}"


async def test_a_day(server, proxy, namespace, nc, bucket, caplog):
    told = []
    with caplog.at_level(logging.DEBUG, "natsreceipts"):
        await a_day(server, proxy, namespace, nc, [told.append, log_events])
    assert told.pop() == ToolkitClosed()
    woken = [event for event in told if isinstance(event, SessionWoken)]
    assert [(event.tenant, event.session, event.recovered, event.error) for event in woken] == [
        ("acme", "chat", 1, None)
    ]
    by_tool = {}
    for event in told:
        if not isinstance(event, SessionWoken):
            by_tool.setdefault(event.key.tool, []).append(in_short(event))
    assert {tool: steady(tool, shorts) for tool, shorts in by_tool.items()} == EXPECTED
    assert all(event.seconds is None or event.seconds >= 0 for event in told if hasattr(event, "seconds"))
    [kept] = [event for event in told if isinstance(event, CallSettled) and event.status == "not_recorded"]
    assert isinstance(kept.error, Exception)

    # Every event is in the log once, with its fields, and nothing of a user's in any of them.
    records = [record for record in caplog.records if record.name == "natsreceipts"]
    logged = [record for record in records if hasattr(record, "natsreceipts.event")]
    counts = {}
    for record in logged:
        name = getattr(record, "natsreceipts.event")
        counts[name] = counts.get(name, 0) + 1
    kinds = {
        "decided": CallDecided,
        "settled": CallSettled,
        "conflict": WriteConflict,
        "doubt_settled": DoubtSettled,
        "renewal_failed": RenewalFailed,
        "lease_lost": LostLease,
        "woken": SessionWoken,
    }
    assert {name: counts[name] for name in kinds} == {
        name: sum(isinstance(event, kind) for event in told) for name, kind in kinds.items()
    }
    levels = {
        (getattr(record, "gen_ai.tool.name"), getattr(record, "natsreceipts.decision")): record.levelname
        for record in logged
        if getattr(record, "natsreceipts.event") == "decided"
    }
    assert levels == {
        ("fresh", "execute"): "DEBUG",
        ("fresh", "replay"): "INFO",
        ("ambiguous", "execute"): "DEBUG",
        ("ambiguous", "ambiguous"): "WARNING",
        ("retried", "execute"): "INFO",
        ("doubted", "execute"): "DEBUG",
        ("overtaken", "replay"): "INFO",
        ("silent", "execute"): "DEBUG",
        ("lost", "execute"): "DEBUG",
        ("held", "wait"): "INFO",
        ("withdrawn", "withdrawn"): "INFO",
        ("corrupt", "refused"): "WARNING",
        ("kept", "execute"): "DEBUG",
        ("kept", "replay"): "INFO",
        ("once", "execute"): "DEBUG",
    }
    for record in logged:
        text = record.getMessage() + repr(vars(record))
        assert not any(secret in text for secret in SECRETS), text


async def test_warnings_are_logged_without_hooks(server, proxy, namespace, nc, bucket, caplog):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        with caplog.at_level(logging.DEBUG, "natsreceipts"):
            assert await run.execute("send", ARGS, Effect(RESULT)) == RESULT
            assert caplog.records == []
            async with run.call("charge", ARGS) as call:
                record = await toolkit.receipts.get(call.key)
                await toolkit.receipts.resolve(
                    call.key, revision=record.revision, completed=RESULT, by="ann", reason="seen", even_if_running=True
                )
                call.result = "mine"
    [record] = caplog.records
    assert (
        vars(record).items()
        >= {
            "levelname": "WARNING",
            "natsreceipts.event": "resolved_meanwhile",
            "natsreceipts.key": call.key.kv_key,
            "natsreceipts.attempt": 1,
            "gen_ai.tool.name": "charge",
        }.items()
    )


@pytest.mark.parametrize("error", [ValueError("mine"), asyncio.CancelledError()], ids=["error", "cancellation"])
async def test_a_hook_that_raises_is_logged_once_and_breaks_nothing(server, namespace, bucket, caplog, error):
    told = []

    def broken(event):
        raise error

    async with toolkit_of(server.url, namespace, hooks=[broken, told.append]) as toolkit:
        run = toolkit.run("acme", "run-1")
        for n in range(3):
            assert await run.execute("send", {"n": n}, Effect(RESULT)) == RESULT
    assert len(told) == 7
    assert told[-1] == ToolkitClosed()
    [record] = [record for record in caplog.records if "the hook" in record.getMessage()]
    assert record.levelname == "ERROR"
    assert record.exc_info[1] is error


async def test_hooks_are_of_one_toolkit(server, namespace, bucket):
    told = []
    async with (
        toolkit_of(server.url, namespace, hooks=(each for each in [told.append])) as one,
        toolkit_of(server.url, namespace) as other,
    ):
        await other.run("acme", "run-1").execute("send", {"n": 1}, Effect(RESULT))
        assert told == []
        await one.run("acme", "run-1").execute("send", {"n": 2}, Effect(RESULT))
        assert len(told) == 2


async def test_a_wake_that_was_refused(server, namespace, bucket):
    told = []
    async with toolkit_of(server.url, namespace, hooks=[told.append]) as toolkit:
        session = toolkit.sessions.open("acme", "chat")
        call = {"type": "toolCall", "id": "c", "name": "send", "arguments": ARGS}
        await session.append({"role": "assistant", "content": [call]}, run="run-1")
        async with toolkit.run("acme", "run-1").call("send", ARGS) as held:
            with pytest.raises(Exception, match="live") as refused:
                await session.wake(guarded={"send": lambda args: args})
            await session.wake(guarded={}, dry_run=True)  # of which nothing is told
            held.result = RESULT
    [woken] = [event for event in told if isinstance(event, SessionWoken)]
    assert woken.error is refused.value
    assert woken.recovered == 0


async def async_hook(event):
    pass


class AsyncHook:
    async def __call__(self, event):
        pass


@pytest.mark.parametrize(
    "hooks",
    [log_events, None, 1, ["log"], [None], [AsyncHook], [async_hook], [AsyncHook()]],
    ids=["no list", "None", "a number", "text", "no hook", "a class", "async", "async object"],
)
async def test_what_is_no_hook_is_refused(server, namespace, hooks):
    with pytest.raises(InvalidSetting, match="hooks"):
        async with toolkit_of(server.url, namespace, hooks=hooks):
            pass
