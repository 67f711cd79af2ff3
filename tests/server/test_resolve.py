"""A person settles what nobody knows: on the revision that was looked at, once, and with the outcome told as it is."""

from __future__ import annotations

import asyncio

import pytest
from scenes import ambiguous_call, counted_writes, history, no_writes, revision_of, stand
from support import Effect, bucket_of, newest, put, revisions, said, stored, toolkit_of, writes_to

from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    InvalidName,
    InvalidSetting,
    NotResolvable,
    ReceiptErased,
    ReceiptKey,
    StaleRevision,
    Unreachable,
)

ARGS = {"to": "a@b.c"}
SHORT = 0.3
BY = {"by": "ann", "reason": "looked at the outbox"}


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


@pytest.fixture
def receipts(toolkit):
    return toolkit.receipts


# What it says, and to whom


@pytest.mark.parametrize("result", ["m-1", None, {"id": 1, "when": b"\x00"}, [1, (2, 3)]])
async def test_an_ambiguous_call_that_landed(server, namespace, run, receipts, key, nc, result):
    revision = await ambiguous_call(run, ARGS)
    settled = await receipts.resolve(key, revision=revision, completed=result, **BY)
    assert (settled.status, settled.attempts, settled.revision) == ("completed", 1, revision + 1)
    assert (settled.resolved.by, settled.resolved.reason) == ("ann", "looked at the outbox")
    assert settled.error is None
    effect = Effect("wrong")
    plain = [1, [2, 3]] if isinstance(result, list) else result
    assert settled.result == plain
    assert await run.execute("send", ARGS, effect) == plain
    async with toolkit_of(server.url, namespace) as other, other.run("acme", "run-1").call("send", ARGS) as call:
        assert call.replayed
        assert (call.result, call.attempt, call.revision) == (plain, 1, settled.revision)
    assert effect.entered == 0
    assert await history(nc, namespace, key) == ["running", "ambiguous", "completed"]


async def test_an_ambiguous_call_that_did_not_land(run, receipts, key, nc, namespace):
    revision = await ambiguous_call(run, ARGS)
    settled = await receipts.resolve(key, revision=revision, not_applied=True, **BY)
    assert (settled.status, settled.attempts, settled.error.not_applied) == ("failed", 1, True)
    assert settled.resolved.by == "ann"
    async with run.call("send", ARGS) as call:
        assert (call.replayed, call.attempt) == (False, 2)
        call.result = "second"
    assert await run.execute("send", ARGS, Effect("wrong")) == "second"
    assert await history(nc, namespace, key) == ["running", "ambiguous", "failed", "running", "completed"]
    last = await stored(nc, namespace, key)
    assert last["attempts"] == 2
    assert not {"resolved", "error", "open"} & last.keys()


async def test_a_running_call_whose_lease_is_over(run, receipts, key, nc, namespace):
    revision = await stand(nc, namespace, key, "running", leaseMs=300)
    await asyncio.sleep(0.35)  # the lease, by the server's clock
    settled = await receipts.resolve(key, revision=revision, completed="found", **BY)
    assert settled.status == "completed"
    assert await history(nc, namespace, key) == ["running", "ambiguous", "completed"]
    kept = await revisions(nc, namespace, key)
    assert {record["holder"]["token"] for record in kept} == {"another"}
    assert len({record["write"] for record in kept}) == 3
    assert await run.execute("send", ARGS, Effect("wrong")) == "found"
    said_by = [(r.status, r.resolved and r.resolved.by) for r in await receipts.history(key)]
    assert said_by == [("running", None), ("ambiguous", None), ("completed", "ann")]


async def test_a_running_call_that_renews_between_the_looks_is_not_settled(far, proxy, key, nc, namespace):
    revision = await stand(nc, namespace, key, "running", leaseMs=500)
    await asyncio.sleep(0.56)
    clocks = proxy.observe(f"$JS.API.STREAM.INFO.KV_{bucket_of(namespace)}")
    task = asyncio.create_task(far.receipts.resolve(key, revision=revision, completed=1, **BY))
    await clocks.hit()  # it has looked once
    second = proxy.delay(f"$JS.API.STREAM.MSG.GET.KV_{bucket_of(namespace)}", count=None)
    renewed = await stand(nc, namespace, key, "running", leaseMs=60_000, write="1" * 24)
    second.cancel()
    with pytest.raises(StaleRevision) as caught:
        await task
    assert (caught.value.revision, caught.value.current, caught.value.status) == (revision, renewed, "running")
    assert await history(nc, namespace, key) == ["running", "running"]


async def test_a_live_call(run, receipts, key, nc, namespace):
    revision = await stand(nc, namespace, key, "running", leaseMs=60_000)
    async with no_writes(nc, namespace):
        with pytest.raises(CallInFlight) as caught:
            await receipts.resolve(key, revision=revision, completed="x", **BY)
    assert 30 < caught.value.retry_after <= 62
    settled = await receipts.resolve(key, revision=revision, completed="x", even_if_running=True, **BY)
    assert settled.status == "completed"
    assert await history(nc, namespace, key) == ["running", "completed"]
    assert await run.execute("send", ARGS, Effect("wrong")) == "x"


async def test_a_holder_tells_the_revision_that_was_settled_in_its_stead(run, receipts, key):
    async with run.call("send", ARGS) as call:
        settled = await receipts.resolve(key, revision=call.revision, completed="x", even_if_running=True, **BY)
        call.result = "mine"
    assert (call.replayed, call.result, call.revision) == (True, "x", settled.revision)


async def test_a_live_call_that_did_not_land(run, receipts, key, nc, namespace):
    revision = await stand(nc, namespace, key, "running", leaseMs=60_000)
    settled = await receipts.resolve(key, revision=revision, not_applied=True, even_if_running=True, **BY)
    assert settled.error.not_applied
    assert await run.execute("send", ARGS, Effect("second")) == "second"


@pytest.mark.parametrize("anyway", [False, True])
@pytest.mark.parametrize("outcome", [{"completed": "x"}, {"not_applied": True}])
@pytest.mark.parametrize("status", ["completed", "withdrawn", "not applied"])
async def test_what_is_not_for_a_person_to_settle(receipts, key, nc, namespace, status, outcome, anyway):
    revision = await stand(nc, namespace, key, status)
    async with no_writes(nc, namespace):
        with pytest.raises(NotResolvable):
            await receipts.resolve(key, revision=revision, even_if_running=anyway, **outcome, **BY)


async def test_what_was_never_called(receipts, key, nc, namespace):
    async with no_writes(nc, namespace):
        with pytest.raises(NotResolvable):
            await receipts.resolve(key, revision=1, completed="x", **BY)


async def test_a_failed_attempt_that_may_have_landed(run, receipts, key, nc, namespace):
    """It counts for an opaque caller as ambiguous, so a person may settle it."""
    revision = await stand(nc, namespace, key, "failed")
    settled = await receipts.resolve(key, revision=revision, completed="found", **BY)
    assert settled.status == "completed"
    assert await run.execute("send", ARGS, Effect("wrong")) == "found"


async def test_a_failed_attempt_that_is_repeated_anyway(receipts, key, nc, namespace):
    revision = await stand(nc, namespace, key, "failed", effect="idempotent")
    async with no_writes(nc, namespace):
        with pytest.raises(NotResolvable):
            await receipts.resolve(key, revision=revision, completed="x", **BY)


# An erased receipt


@pytest.fixture(params=["ReceiptKey", "KV key"])
def named(request, key):
    return key if request.param == "ReceiptKey" else key.kv_key


@pytest.mark.parametrize("before", [True, False])
async def test_an_erased_receipt_that_landed(run, receipts, key, named, nc, namespace, before):
    if before:
        assert await run.execute("send", ARGS, Effect("first")) == "first"
    marker = await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    with pytest.raises(ReceiptErased):
        await run.execute("send", ARGS, Effect("wrong"))
    settled = await receipts.resolve(named, revision=marker, completed="restored", **BY)
    assert (settled.status, settled.result, settled.key) == ("completed", "restored", key)
    assert await run.execute("send", ARGS, Effect("wrong")) == "restored"


async def test_an_erased_receipt_that_did_not_land(run, receipts, key, named, nc, namespace):
    marker = await put(nc, namespace, key, b"", headers={"KV-Operation": "PURGE"})
    settled = await receipts.resolve(named, revision=marker, not_applied=True, **BY)
    assert (settled.status, settled.error.not_applied) == ("failed", True)
    effect = Effect("again")
    assert await run.execute("send", ARGS, effect) == "again"
    assert effect.entered == 1


async def test_an_erased_receipt_at_another_revision(receipts, key, named, nc, namespace):
    before = await stand(nc, namespace, key, "ambiguous")
    marker = await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    async with no_writes(nc, namespace):
        with pytest.raises(StaleRevision) as caught:
            await receipts.resolve(named, revision=before, not_applied=True, **BY)
    assert (caught.value.current, caught.value.status) == (marker, "erased")


async def test_an_erased_receipt_with_a_hashed_name(toolkit, nc, namespace):
    """The KV key alone does not tell the name that was hashed."""
    key = toolkit.run("acme", "r" * 300).key("send", ARGS)
    marker = await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    async with no_writes(nc, namespace):
        with pytest.raises(InvalidName):
            await toolkit.receipts.resolve(key.kv_key, revision=marker, not_applied=True, **BY)
    settled = await toolkit.receipts.resolve(key, revision=marker, not_applied=True, **BY)
    assert settled.key == key


@pytest.mark.parametrize("names", [("Zürich & co", "run/1", "send it"), ("a.b", "*", ">"), ("=H", "x" * 181, "é" * 99)])
async def test_a_receipt_with_odd_names(toolkit, nc, namespace, names):
    tenant, run_name, tool = names
    run = toolkit.run(tenant, run_name)
    key = run.key(tool, ARGS)
    revision = await stand(nc, namespace, key, "ambiguous")
    settled = await toolkit.receipts.resolve(key.kv_key, revision=revision, completed="x", **BY)
    assert settled.key == key
    assert await run.execute(tool, ARGS, Effect("wrong")) == "x"


# The revision


@pytest.mark.parametrize("wrong", [-1, +1, +1000])
@pytest.mark.parametrize("anyway", [False, True])
@pytest.mark.parametrize("status", ["ambiguous", "running", "completed", "withdrawn", "failed"])
async def test_another_revision_than_the_newest(receipts, key, nc, namespace, status, anyway, wrong):
    await stand(nc, namespace, key, "running", write="2" * 24)
    revision = await stand(nc, namespace, key, status)
    async with no_writes(nc, namespace):
        with pytest.raises(StaleRevision) as caught:
            await receipts.resolve(key, revision=revision + wrong, completed="x", even_if_running=anyway, **BY)
    error = caught.value
    assert (error.revision, error.current, error.status) == (revision + wrong, revision, status)
    assert str(revision) in str(error)
    assert error.key == key


async def test_a_call_that_moves_after_the_look(far, proxy, nc, namespace, key):
    """Overtaken between the look and the write: never written over what stands there now."""
    revision = await stand(nc, namespace, key, "ambiguous")
    ghost = proxy.delay(writes_to(namespace), count=None)
    task = asyncio.create_task(far.receipts.resolve(key, revision=revision, not_applied=True, **BY))
    await ghost.hit()
    back = await stand(nc, namespace, key, "completed", write="3" * 24)
    ghost.cancel()
    while ghost.held:
        assert b"10071" in (await ghost.release()).payload
    with pytest.raises(StaleRevision) as caught:
        await task
    assert (caught.value.current, caught.value.status) == (back, "completed")
    assert await history(nc, namespace, key) == ["ambiguous", "completed"]


@pytest.mark.parametrize("status", ["ambiguous", "running"])
async def test_of_several_people_one_wins(server, namespace, bucket, nc, run, key, status):
    revision = await stand(nc, namespace, key, status, leaseMs=300)
    await asyncio.sleep(0.34 if status == "running" else 0)
    async with toolkit_of(server.url, namespace) as one, toolkit_of(server.url, namespace) as two:
        outcomes = await asyncio.gather(
            *(
                at.receipts.resolve(key, revision=revision, by=f"person {n}", reason="looked", **outcome)
                for n, (at, outcome) in enumerate(
                    [(one, {"completed": "x"}), (two, {"not_applied": True}), (one, {"completed": "y"})]
                )
            ),
            return_exceptions=True,
        )
    settled = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    stale = [outcome for outcome in outcomes if isinstance(outcome, StaleRevision)]
    assert (len(settled), len(stale)) == (1, 2), outcomes
    assert settled[0].resolved.by == (await stored(nc, namespace, key))["resolved"]["by"]
    statuses = await history(nc, namespace, key)
    assert statuses == (["running"] * (status == "running")) + ["ambiguous", settled[0].status]


# Lost answers


@pytest.fixture
async def far(proxy, namespace, bucket, monkeypatch):
    monkeypatch.setattr("natsreceipts.fence._SHORTEST_TRY", 0.3)
    async with toolkit_of(proxy.url, namespace, lease=0.9) as toolkit:
        yield toolkit


@pytest.mark.parametrize("outcome", [{"completed": "x"}, {"not_applied": True}])
@pytest.mark.parametrize("fault", ["drop_answer", "cut_after_store", "drop", "duplicate"])
async def test_a_lost_answer(far, proxy, namespace, nc, key, fault, outcome):
    revision = await stand(nc, namespace, key, "ambiguous")
    lost = getattr(proxy, fault)(lambda m: m.subject.startswith("$KV.") and "resolved" in said(m))
    settled = await far.receipts.resolve(key, revision=revision, **outcome, **BY)
    assert len(lost.hits) == 1
    assert settled.revision == await revision_of(nc, namespace, key)
    assert settled.status == ("completed" if "completed" in outcome else "failed")
    assert await history(nc, namespace, key) == ["ambiguous", settled.status]


@pytest.mark.parametrize("fault", ["drop_answer", "cut_after_store", "drop"])
async def test_a_lost_answer_of_the_judgement_before(far, proxy, namespace, nc, key, fault):
    revision = await stand(nc, namespace, key, "running", leaseMs=900)
    await asyncio.sleep(1.0)
    lost = getattr(proxy, fault)(lambda m: m.subject.startswith("$KV.") and said(m)["status"] == "ambiguous")
    settled = await far.receipts.resolve(key, revision=revision, completed="x", **BY)
    assert len(lost.hits) == 1
    assert settled.status == "completed"
    assert await history(nc, namespace, key) == ["running", "ambiguous", "completed"]


async def test_a_lost_answer_that_others_follow(far, proxy, namespace, nc, key, run):
    """It landed, and the call has gone on since: that it landed is what is told."""
    revision = await stand(nc, namespace, key, "ambiguous")
    lost = proxy.drop_answer(lambda m: m.subject.startswith("$KV.") and "resolved" in said(m))
    task = asyncio.create_task(far.receipts.resolve(key, revision=revision, not_applied=True, **BY))
    await lost.answered()
    assert await run.execute("send", ARGS, Effect("second")) == "second"
    settled = await task
    assert (settled.status, settled.resolved.by, settled.revision) == ("failed", "ann", revision + 1)
    assert await history(nc, namespace, key) == ["ambiguous", "failed", "running", "completed"]


async def test_a_lost_write_that_others_overtake(far, proxy, namespace, nc, key):
    revision = await stand(nc, namespace, key, "ambiguous")
    lost = proxy.drop(lambda m: m.subject.startswith("$KV.") and "resolved" in said(m), count=None)
    task = asyncio.create_task(far.receipts.resolve(key, revision=revision, not_applied=True, **BY))
    await lost.hit()
    theirs = await stand(nc, namespace, key, "completed", write="4" * 24)
    lost.cancel()
    with pytest.raises(StaleRevision) as caught:
        await task
    assert (caught.value.current, caught.value.status) == (theirs, "completed")
    assert await history(nc, namespace, key) == ["ambiguous", "completed"]


async def test_nobody_answers(far, proxy, namespace, nc, key, monkeypatch):
    monkeypatch.setattr("natsreceipts.receipts.CLAIM_PATIENCE", 0.6)
    revision = await stand(nc, namespace, key, "ambiguous")
    lost = proxy.drop(writes_to(namespace), count=None)
    with pytest.raises(Unreachable, match="look at the receipt before"):
        await far.receipts.resolve(key, revision=revision, completed="x", **BY)
    assert lost.hits
    assert await history(nc, namespace, key) == ["ambiguous"]


async def test_the_judgement_before_it_cannot_be_written(far, proxy, namespace, nc, key, monkeypatch):
    monkeypatch.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 0.5)
    revision = await stand(nc, namespace, key, "running", leaseMs=300)
    await asyncio.sleep(0.34)
    proxy.drop(writes_to(namespace), count=None)
    with pytest.raises(Unreachable):
        await far.receipts.resolve(key, revision=revision, completed="x", **BY)
    assert await history(nc, namespace, key) == ["running"]


@pytest.mark.parametrize("landed", [True, False])
async def test_the_history_that_would_tell_is_dropped(far, proxy, namespace, nc, key, landed):
    """More has followed than the bucket keeps: whether it was settled is not known, and not told as a no."""
    revision = await stand(nc, namespace, key, "ambiguous")
    is_resolve = lambda m: m.subject.startswith("$KV.") and "resolved" in said(m)  # noqa: E731
    lost = proxy.drop_answer(is_resolve) if landed else proxy.drop(is_resolve, count=None)
    task = asyncio.create_task(far.receipts.resolve(key, revision=revision, not_applied=True, **BY))
    await lost.hit()
    looks = proxy.drop(f"$JS.API.STREAM.MSG.GET.KV_{bucket_of(namespace)}", count=None)  # not before all has followed
    if landed:
        await lost.answered()
    for n in range(9):
        await stand(nc, namespace, key, "running", attempts=2 + n)
    lost.cancel()
    looks.cancel()
    with pytest.raises(Unreachable, match="not known"):
        await task


async def test_it_landed_and_cannot_be_read_back(proxy, namespace, bucket, nc, key, monkeypatch):
    """A write of ours that landed is not told as a failure."""
    revision = await stand(nc, namespace, key, "ambiguous")
    async with toolkit_of(proxy.url, namespace) as far:
        written = proxy.observe(writes_to(namespace))
        task = asyncio.create_task(far.receipts.resolve(key, revision=revision, completed="x", **BY))
        await written.hit()
        monkeypatch.setattr("natsreceipts.receipts._READ_PATIENCE", 0.3)
        proxy.drop(f"$JS.API.STREAM.MSG.GET.KV_{bucket_of(namespace)}", count=None)
        settled = await task
    assert (settled.status, settled.result, settled.revision) == ("completed", "x", revision + 1)


async def test_it_landed_and_its_payload_cannot_be_read_back(server, namespace, bucket, nc, key, proxy, monkeypatch):
    revision = await stand(nc, namespace, key, "ambiguous")
    async with toolkit_of(proxy.url, namespace, inline_limit=1024) as far:
        monkeypatch.setattr("natsreceipts.payloads._READ_TIMEOUT", 0.2)
        proxy.drop(lambda m: m.subject.startswith(f"$JS.API.DIRECT.GET.OBJ_{namespace}"), count=None)
        settled = await far.receipts.resolve(key, revision=revision, completed="x" * 5000, **BY)
        assert settled.status == "completed"


async def test_a_receipt_erased_over_the_resolver(far, proxy, namespace, nc, key):
    """Overtaken by a delete marker: nothing was settled, and the revision that stands there is named."""
    revision = await stand(nc, namespace, key, "ambiguous")
    ghost = proxy.delay(writes_to(namespace), count=None)
    task = asyncio.create_task(far.receipts.resolve(key, revision=revision, completed=1, **BY))
    await ghost.hit()
    marker = await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    ghost.cancel()
    await ghost.release()
    with pytest.raises(StaleRevision) as caught:
        await task
    assert (caught.value.current, caught.value.status) == (marker, "erased")


# What is asked of it


@pytest.mark.parametrize(
    "wrong",
    [
        {"by": ""},
        {"by": "   "},
        {"by": None},
        {"by": 7},
        {"reason": ""},
        {"reason": None},
        {"reason": "\ud800"},
        {"by": "\udfff"},
        {"not_applied": True},
        {"completed": object()},
        {"completed": {1: {2: object()}}},
        {"not_applied": 1},
        {"not_applied": "yes"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_bad_arguments_write_nothing(receipts, key, nc, namespace, wrong):
    revision = await stand(nc, namespace, key, "running", leaseMs=300)
    await asyncio.sleep(0.34)  # so that a judgement would be due
    async with no_writes(nc, namespace):
        with pytest.raises(InvalidSetting):
            await receipts.resolve(key, revision=revision, **{"completed": "x", **BY, **wrong})


async def test_no_outcome_at_all(receipts, key, nc, namespace):
    revision = await stand(nc, namespace, key, "ambiguous")
    async with no_writes(nc, namespace):
        for outcome in ({}, {"not_applied": False}):
            with pytest.raises(InvalidSetting):
                await receipts.resolve(key, revision=revision, **outcome, **BY)


@pytest.mark.parametrize(
    "bad", ["a", "a.b.c", "a.b.c.d", "a..b.c", "", "*.b.c." + "0" * 64, "a.b.>", "a b.c.d." + "0" * 64]
)
async def test_bad_keys_write_nothing(receipts, nc, namespace, bad):
    async with no_writes(nc, namespace):
        with pytest.raises(InvalidName):
            await receipts.resolve(bad, revision=1, completed="x", **BY)


@pytest.mark.parametrize("status", ["ambiguous", "running"])
async def test_a_reason_that_no_record_can_hold(receipts, key, nc, namespace, status):
    """Too long for the server: that is the argument's fault, and no server that did not answer."""
    revision = await stand(nc, namespace, key, status, leaseMs=300)
    await asyncio.sleep(0.34 if status == "running" else 0)
    async with no_writes(nc, namespace):
        with pytest.raises(InvalidSetting):
            await receipts.resolve(key, revision=revision, completed="x", by="ann", reason="x" * 2_000_000)
    assert (await receipts.get(key)).status == status


async def test_a_large_result_moves_to_the_object_store(server, run, receipts, key, nc, namespace):
    revision = await ambiguous_call(run, ARGS)
    big = {"text": "x" * 2_000_000, "raw": b"\x00" * 10}
    settled = await receipts.resolve(key, revision=revision, completed=big, **BY)
    assert settled.large
    assert settled.result == big
    assert (await stored(nc, namespace, key))["result"].keys() == {"object"}
    assert len((await newest(nc, namespace, key)).data) < 2000
    assert await run.execute("send", ARGS, Effect("wrong")) == big


async def test_a_large_result_without_an_object_store(receipts, key, nc, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.receipts.CLAIM_PATIENCE", 0.3)
    revision = await stand(nc, namespace, key, "ambiguous")
    await nc.jetstream().delete_stream(f"OBJ_{namespace}-receipt-payloads")
    with pytest.raises(Unreachable) as caught:
        await receipts.resolve(key, revision=revision, completed="x" * 500_000, **BY)
    assert caught.value.key == key
    assert key.kv_key in str(caught.value)
    assert await history(nc, namespace, key) == ["ambiguous"]


async def test_a_large_result_comes_back_as_a_replay_gives_it(run, receipts, key, nc, namespace):
    revision = await stand(nc, namespace, key, "ambiguous")
    settled = await receipts.resolve(key, revision=revision, completed=[(1, 2), "x" * 500_000], **BY)
    assert settled.result == await run.execute("send", ARGS, Effect("wrong")) == [[1, 2], "x" * 500_000]


@pytest.mark.parametrize("outcome", [{"completed": "x"}, {"not_applied": True}])
async def test_open_is_dropped(run, receipts, key, nc, namespace, outcome):
    revision = await stand(nc, namespace, key, "ambiguous", open=True, attempts=3)
    await receipts.resolve(key, revision=revision, **outcome, **BY)
    assert not (await stored(nc, namespace, key)).get("open")
    if "not_applied" in outcome:
        # The tool's own word counts again, since the person spoke for all attempts before.
        assert await run.execute("send", ARGS, Effect("fourth")) == "fourth"
        assert (await stored(nc, namespace, key))["attempts"] == 4


@pytest.mark.parametrize("status", ["ambiguous", "running"])
async def test_open_is_kept_by_the_judgement_and_dropped_by_the_resolve(receipts, key, nc, namespace, status):
    revision = await stand(nc, namespace, key, status, open=True, attempts=2, leaseMs=300)
    await asyncio.sleep(0.34 if status == "running" else 0)
    await receipts.resolve(key, revision=revision, not_applied=True, **BY)
    opens = [bool(record.get("open")) for record in await revisions(nc, namespace, key)]
    assert opens == [True] * (len(opens) - 1) + [False]


async def test_what_stays_of_the_record(receipts, key, nc, namespace):
    fields = {"steps": {"up": {"json": 1}}, "args": {"json": ARGS}, "fences": {"s": 9}, "effect": "resumable"}
    revision = await stand(nc, namespace, key, "ambiguous", attempts=2, **fields)
    await receipts.resolve(key, revision=revision, completed="x", **BY)
    record = await stored(nc, namespace, key)
    assert {name: record[name] for name in fields} == fields
    assert (record["attempts"], record["holder"]["token"], record["leaseMs"]) == (2, "another", 600)
    assert "error" not in record


async def test_a_resolve_costs_one_write(receipts, key, nc, namespace):
    revision = await stand(nc, namespace, key, "ambiguous")
    async with counted_writes(nc, namespace, least=1) as writes:
        await receipts.resolve(key, revision=revision, completed="x", **BY)
    assert len(writes) == 1
    assert writes[0].headers["Nats-Expected-Last-Subject-Sequence"] == str(revision)


async def test_a_waiting_caller_hears_of_a_resolve(server, namespace, run, receipts, key, nc):
    """It waits for a live attempt, which a person completes over its head."""
    revision = await stand(nc, namespace, key, "running", leaseMs=60_000)
    async with counted_writes(nc, namespace):
        waiting = asyncio.create_task(run.execute("send", ARGS, Effect("wrong")))
        await asyncio.sleep(0.1)
        await receipts.resolve(key, revision=revision, completed="x", even_if_running=True, **BY)
        async with asyncio.timeout(15):  # and not at its next look
            assert await waiting == "x"


async def test_a_key_of_another_tenant_with_the_same_arguments_is_left_alone(toolkit, receipts, key, nc, namespace):
    other = ReceiptKey("other", key.run, key.tool, key.args_hash)
    revision = await stand(nc, namespace, key, "ambiguous")
    theirs = await stand(nc, namespace, other, "ambiguous")
    await receipts.resolve(key, revision=revision, completed="x", **BY)
    assert (await receipts.get(other)).revision == theirs
    with pytest.raises(AmbiguousCall):
        await toolkit.run("other", key.run).execute("send", ARGS, Effect("wrong"))
