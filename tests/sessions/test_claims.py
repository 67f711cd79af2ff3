"""Which entry a guarded call names, and what a fence refuses: told by fences just below and just at that place."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from dialect_shapes import shaped
from session_support import DIALECTS, Desk
from support import Effect, toolkit_of

from natsreceipts import CallWithdrawn, InvalidName, InvalidSetting, tool

serial = itertools.count()
ARGS = {"to": "ada"}


async def names(desk, expected, *, run=None, **options):
    """That a call made here and now names this entry (None: none at all)."""
    run = run or desk.run
    place = expected.seq if expected is not None else 1
    token = expected.token if expected is not None else "chat"
    at, below = {"n": next(serial)}, {"n": next(serial)}
    desk = Desk(desk.toolkit, desk.nc, desk.namespace, desk.dialect, desk.session)
    desk.run = run
    await desk.stands("send", at, "withdrawn", fences={token: place})
    await desk.stands("send", below, "withdrawn", fences={token: place - 1})
    with pytest.raises(CallWithdrawn):
        await run.execute("send", at, Effect(), **options)
    if expected is None:
        with pytest.raises(CallWithdrawn):
            await run.execute("send", below, Effect(), **options)
        assert await run.execute("send", {"n": next(serial)}, Effect("free"), **options) == "free"
    else:
        assert await run.execute("send", below, Effect("ran"), **options) == "ran"


async def test_nothing_is_named_outside_a_session(desk):
    await names(desk(), None)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_append_of_calls_is_named_until_the_next_one(desk, dialect):
    desk = desk(dialect)
    await desk.hears()
    await names(desk, None)
    first = await desk.asks(("t1", "send", ARGS), ("t2", "send", {}))
    await names(desk, first)
    await desk.hears()
    await desk.gets("t1")
    await names(desk, first)
    await desk.log.load()
    await desk.log.context()
    await desk.wakes("send")  # its closes are no calls
    await names(desk, first)
    await desk.log.compact(shaped([{"role": "user", "text": "so far"}], dialect)[0])
    await names(desk, first)
    await desk.log.interrupt(tool_use_in_flight=False)
    await names(desk, first)
    second = await desk.asks(("t3", "send", ARGS))
    assert second.seq > first.seq
    await names(desk, second)


async def test_a_resume_is_named_and_a_suspend_is_not(desk):
    desk = desk()
    first = await desk.asks(("t1", "send", ARGS), ("t2", "send", {}))
    await desk.log.suspend(["t1", "t2"])
    await names(desk, first)
    resumed = await desk.log.resume(["t1"])
    assert resumed.run == "run-1"
    await names(desk, resumed)
    assert (await desk.log.entry_of("t1")).id == resumed.id
    with pytest.raises(InvalidName, match="suspended"):
        await desk.log.entry_of("t2")
    await names(desk, resumed)


async def test_entry_of_is_the_latest_site(desk, other):
    desk = desk()
    first = await desk.asks(("call_0", "send", ARGS), ("t2", "send", {}))
    await desk.gets("call_0")
    second = await desk.asks(("call_0", "send", ARGS))
    again = desk.at(other)
    assert (await again.log.entry_of("t2")).id == first.id
    await names(again, first)
    assert (await again.log.entry_of("call_0")).id == second.id
    await names(again, second)
    with pytest.raises(InvalidName):
        await again.log.entry_of("call_7")
    await names(again, second)


async def test_entry_of_does_not_read_on(desk, other):
    """A worker that stalled must not take a later call that reuses the id for its own."""
    desk = desk()
    first = await desk.asks(("call_0", "send", ARGS))
    stalled = desk.at(other)
    await stalled.log.load()
    await desk.gets("call_0")
    await desk.asks(("call_0", "send", ARGS))
    assert (await stalled.log.entry_of("call_0")).id == first.id


async def test_two_sessions_in_one_task(desk):
    """Each run names its own session's entry."""
    mine, theirs = desk(session="a"), desk(session="b")
    theirs.run = theirs.toolkit.run("acme", "run-2")
    one = await mine.asks(("t1", "send", ARGS), run="run-1")
    two = await theirs.asks(("t1", "send", ARGS), run="run-2")
    await names(mine, one)
    await names(theirs, two)
    three = await mine.asks(("t2", "send", ARGS), run="run-1")
    await names(theirs, two)
    await names(mine, three)


async def test_a_call_answers_to_the_fences_of_every_session_of_its_run(desk):
    """Which of them it was asked for in cannot be known; where it is said, that one counts."""
    mine, theirs = desk(session="a"), desk(session="b")
    one = await mine.asks(("t1", "send", ARGS))
    two = await theirs.asks(("t1", "send", ARGS))
    for expected in (one, two):
        await names(mine, expected)
        await names(mine, expected, entry=expected)
    args = {"n": next(serial)}
    await mine.stands("send", args, "withdrawn", fences={"a": one.seq, "b": two.seq - 1})
    with pytest.raises(CallWithdrawn):
        await mine.run.execute("send", args, Effect())
    assert await mine.run.execute("send", args, Effect("said"), entry=two) == "said"


async def test_an_entry_without_a_run_is_named_by_nobody(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS), run=None)
    await names(desk, None)
    other_run = desk.toolkit.run("acme", "run-2")
    await desk.asks(("t2", "send", ARGS), run="run-1")
    await names(desk, None, run=other_run)
    await names(desk, None, run=desk.toolkit.run("other", "run-1"))


async def test_the_ambient_run_is_the_entrys(desk, run):
    desk = desk()
    async with run:
        entry = await desk.asks(("t1", "send", ARGS), run=None)
        assert entry.run == "run-1"
        await names(desk, entry)
    with pytest.raises(InvalidSetting, match="tenant"):
        await desk.asks(("t2", "send", ARGS), run=desk.toolkit.run("other", "run-1"))
    async with desk.toolkit.run("other", "run-1"):
        assert (await desk.asks(("t2", "send", ARGS), run=None)).run is None


async def test_tasks_inherit_and_do_not_hand_back(desk):
    desk = desk()
    first = await desk.asks(("t1", "send", ARGS))
    second = None

    async def elsewhere():
        nonlocal second
        await names(desk, first)
        second = await desk.asks(("t2", "send", ARGS))
        await names(desk, second)

    await asyncio.create_task(elsewhere())
    await names(desk, first)
    await asyncio.gather(names(desk, first), names(desk, second, entry=second))


async def test_what_is_given_counts_before_what_is_ambient(desk):
    desk = desk()
    first = await desk.asks(("t1", "send", ARGS))
    second = await desk.asks(("t2", "send", ARGS))
    await names(desk, first, entry=first)
    await names(desk, second)
    defaults = desk.toolkit.run("acme", "run-1", entry=first)
    await names(desk, first, run=defaults)
    await names(desk, second, run=defaults, entry=second)
    plain = await desk.asks(("t3", "send", ARGS), run=None)  # says no run, and is given
    await names(desk, plain, entry=plain)


async def test_an_entry_of_elsewhere_is_refused(desk):
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    effect = Effect()
    for run, says in (
        (desk.toolkit.run("other", "run-1"), "tenant"),
        (desk.toolkit.run("acme", "run-2"), "run run-1"),
    ):
        with pytest.raises(InvalidSetting, match=says):
            await run.execute("send", ARGS, effect, entry=entry)
        with pytest.raises(InvalidSetting, match=says):
            run.call("send", ARGS, entry=entry)
    for wrong in ("t1", 7, entry.id, {"seq": 1}):
        with pytest.raises(InvalidSetting, match="entry="):
            await desk.run.execute("send", ARGS, effect, entry=wrong)
    assert effect.entered == 0


async def test_an_entry_of_another_namespace_is_not_named(server, desk, nc, namespace):
    """Its sequence is of another stream, and says nothing about fences here."""
    mine = desk()
    for n in range(5):
        await mine.asks((f"t{n}", "send", ARGS))
    async with toolkit_of(server.url, f"{namespace}x") as elsewhere:
        theirs = Desk(elsewhere, nc, f"{namespace}x", "neutral", "chat")
        await theirs.stands("send", ARGS, "withdrawn", fences={"chat": 3})
        with pytest.raises(CallWithdrawn):
            await theirs.run.execute("send", ARGS, Effect())


@tool
async def send(to: str) -> str:
    return to


async def test_guarded_tools_and_calls_name_it_too(desk, run):
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", {"to": "ada"}, "withdrawn", fences={"chat": entry.seq})
    async with run:
        with pytest.raises(CallWithdrawn):
            await send("ada")
        with pytest.raises(CallWithdrawn):
            async with run.call("send", ARGS):
                raise AssertionError("it was entered")
        call = run.call("send", ARGS)  # what was ambient when it was made
        later = await desk.asks(("t2", "send", ARGS))
        with pytest.raises(CallWithdrawn):
            async with call:
                raise AssertionError("it was entered")
        assert await send("ada") == "ada"
    assert (await desk.receipt("send", ARGS))["fences"] == {"chat": entry.seq}
    assert later.seq > entry.seq


async def test_equal_calls_from_two_entries_share_nothing(desk):
    desk = desk()
    first = await desk.asks(("t1", "send", ARGS))
    second = await desk.asks(("t2", "send", ARGS))
    await desk.stands("send", ARGS, "withdrawn", fences={"chat": first.seq})
    effect = Effect("ran")
    old, new, old_again = await asyncio.gather(
        desk.run.execute("send", ARGS, effect, entry=first),
        desk.run.execute("send", ARGS, effect, entry=second),
        desk.run.execute("send", ARGS, effect, entry=first),
        return_exceptions=True,
    )
    assert new == "ran"
    assert effect.entered == 1
    # Refused, or, where the other was quicker, replayed: never entered.
    assert all(isinstance(each, CallWithdrawn) or each == "ran" for each in (old, old_again))


async def test_equal_calls_from_one_entry_share(desk):
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS), ("t2", "send", ARGS))
    effect = Effect(["the very same"], hold=True)
    calls = [asyncio.create_task(desk.run.execute("send", ARGS, effect, entry=entry)) for _ in range(3)]
    await effect.started.wait()
    effect.go.set()
    results = await asyncio.gather(*calls)
    assert effect.entered == 1
    assert results[0] is results[1] is results[2]


# ---------------------------------------------------------------- what a fence refuses


FENCED = {
    "withdrawn": ("withdrawn", {}),
    "failed, not applied": ("failed", {"error": {"type": "E", "message": "no", "notApplied": True}}),
    "failed, idempotent": ("failed", {"effect": "idempotent"}),
    "running": ("running", {"leaseMs": 60_000}),
    "running, expired": ("running", {"leaseMs": 1}),
    "running, expired, idempotent": ("running", {"leaseMs": 1, "effect": "idempotent"}),
    "ambiguous": ("ambiguous", {}),
}


@pytest.mark.parametrize("name", FENCED)
@pytest.mark.parametrize("where", ["at", "before", "nowhere"])
async def test_a_claim_from_before_a_fence_is_refused(desk, name, where):
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    status, fields = FENCED[name]
    place = entry.seq + (where == "before")
    await desk.stands("send", ARGS, status, **{**fields, "fences": {"chat": place, "elsewhere": 5}})
    effect = Effect()
    run = desk.run if where != "nowhere" else desk.toolkit.run("acme", "run-1")

    async def outside():
        await run.execute("send", ARGS, effect, effect=fields.get("effect", "opaque"), wait=0)

    async with desk.quiet():
        with pytest.raises(CallWithdrawn) as caught:
            if where == "nowhere":
                await _without_entry(outside)
            else:
                await outside()
    assert effect.entered == 0
    assert caught.value.key == desk.key("send", ARGS)
    assert "Wake the session" in str(caught.value)


async def _without_entry(work):
    """Run in a context in which no entry is ambient."""
    import contextvars

    await asyncio.get_running_loop().create_task(work(), context=contextvars.Context())


@pytest.mark.parametrize("where", ["at", "before", "nowhere", "another session"])
async def test_completed_is_replayed_whatever_fences_say(desk, where):
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "completed", fences={"chat": entry.seq + (where == "before"), "x": 10_000})
    effect = Effect()

    async def work():
        assert await desk.run.execute("send", ARGS, effect) == "theirs"
        async with desk.run.call("send", ARGS) as call:
            assert (call.replayed, call.result) == (True, "theirs")

    if where == "another session":
        await desk_of(desk, "x").asks(("t1", "send", ARGS))
    if where == "nowhere":
        await _without_entry(work)
    else:
        await work()
    assert effect.entered == 0


def desk_of(desk, session):
    return Desk(desk.toolkit, desk.nc, desk.namespace, desk.dialect, session)


async def test_the_fence_of_another_session_refuses_nobody_who_says_from_where(desk):
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "withdrawn", fences={"elsewhere": entry.seq + 1000})
    assert await desk.run.execute("send", ARGS, Effect("ran")) == "ran"
    assert (await desk.receipt("send", ARGS))["fences"] == {"elsewhere": entry.seq + 1000}


@pytest.mark.parametrize("effect", ["opaque", "idempotent", "resumable"])
async def test_fences_outlive_everything_that_happens_to_the_call(desk, effect):
    """Claims, heartbeats, steps, settles, judgements and a resolver keep them."""
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    fences = {"chat": entry.seq - 1, "elsewhere": 7}
    await desk.stands("send", ARGS, "withdrawn", fences=fences)
    run = desk.toolkit.run("acme", "run-1", effect=effect, lease=0.6)

    async def fails(call):
        if effect == "resumable":
            await call.step("one", lambda: 1)
        await call.renew()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await run.execute("send", ARGS, fails)
    record = await desk.receipt("send", ARGS)
    assert (record["status"], record["fences"]) == ("ambiguous" if effect == "opaque" else "failed", fences)
    if effect == "opaque":
        receipt = await desk.toolkit.receipts.get(desk.key("send", ARGS))
        by = {"by": "ada", "reason": "looked"}
        await desk.toolkit.receipts.resolve(receipt.key, revision=receipt.revision, not_applied=True, **by)
        assert (await desk.receipt("send", ARGS))["fences"] == fences
    assert await run.execute("send", ARGS, Effect("ran")) == "ran"
    record = await desk.receipt("send", ARGS)
    assert (record["status"], record["attempts"], record["fences"]) == ("completed", 2, fences)


async def test_a_read_is_never_refused(desk):
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "withdrawn", fences={"chat": entry.seq})
    assert await desk.run.execute("send", ARGS, Effect("read"), effect="read") == "read"


@pytest.mark.parametrize("inside", ["prefetched", "reads first"])
async def test_a_run_that_has_read_ahead_is_refused_too(desk, inside):
    from support import redelivery

    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "withdrawn", fences={"chat": entry.seq})
    effect = Effect()
    if inside == "prefetched":
        async with desk.run:
            with pytest.raises(CallWithdrawn):
                await desk.run.execute("send", ARGS, effect)
    else:
        with pytest.raises(CallWithdrawn):
            async with redelivery(desk.toolkit):
                await desk.run.execute("send", ARGS, effect)
    assert effect.entered == 0


async def test_a_caller_that_waits_is_refused_where_a_fence_comes_meanwhile(desk, other):
    """It waits for an attempt; that ends as not applied, a wake tells the model so, and the waiter must not run it."""
    desk = desk()
    entry = await desk.asks(("t1", "send", ARGS))
    effect = Effect()
    revision = await desk.stands("send", ARGS, "running", leaseMs=60_000)
    waiting = asyncio.create_task(desk.run.execute("send", ARGS, effect, entry=entry, wait=60))
    record = await desk.receipt("send", ARGS)
    from support import put

    record |= {
        "status": "failed",
        "error": {"type": "E", "message": "no", "notApplied": True},
        "fences": {"chat": entry.seq},
    }
    await put(desk.nc, desk.namespace, desk.key("send", ARGS), record, last=revision)
    with pytest.raises(CallWithdrawn):
        await waiting
    assert effect.entered == 0
