"""When a holder falls silent: who may judge it, what is written then, and how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json

import nats.js.errors
import pytest
from support import (
    Effect,
    Holder,
    bucket_of,
    newest,
    put,
    record_of,
    revisions,
    said,
    settled_as,
    signs,
    stored,
    toolkit_of,
)

from natsreceipts import AmbiguousCall, CallInFlight, LeaseLost, NotApplied
from natsreceipts.testing import FaultProxy

ARGS = {"to": "a@b.c"}
SHORT = 0.6
"""Seconds: a lease that is left to end."""


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


# A worker of its own that is frozen


async def test_a_frozen_holder_is_judged_and_takes_its_call_back(server, namespace, run, toolkit, key, nc):
    async with Holder.of(server.url, namespace, ARGS, lease=SHORT) as holder:
        assert await holder.says() == "entered 1"
        holder.freeze()
        effect = Effect("wrong")
        with pytest.raises(AmbiguousCall) as caught:
            await run.execute("send", ARGS, effect)
        receipt = await toolkit.receipts.get(key)
        assert (receipt.status, receipt.attempts, receipt.error.type) == ("ambiguous", 1, "LeaseExpired")
        assert caught.value.revision == receipt.revision
        assert caught.value.key == key
        with pytest.raises(AmbiguousCall):  # at once, and without another write
            await run.execute("send", ARGS, effect, wait=0)
        assert (await toolkit.receipts.get(key)).revision == receipt.revision

        holder.thaw()
        await settled_as(toolkit, key, "running")  # its heartbeat takes the call back
        holder.finish()
        assert await holder.says() == "result by the holder at attempt 1"
        assert await run.execute("send", ARGS, effect) == "by the holder at attempt 1"
        assert effect.entered == 0
        record = await stored(nc, namespace, key)
        assert (record["status"], record["attempts"]) == ("completed", 1)
        assert "error" not in record
        assert not record.get("open")


async def test_a_frozen_holder_that_settles_at_once(server, namespace, run, key, nc):
    """Its body ends before a heartbeat could take the call back: the settle goes over the judgement itself."""
    async with Holder.of(server.url, namespace, ARGS, lease=SHORT) as holder:
        assert await holder.says() == "entered 1"
        holder.freeze()
        with pytest.raises(AmbiguousCall):
            await run.execute("send", ARGS, Effect("wrong"))
        holder.finish()
        holder.thaw()
        assert await holder.says() == "result by the holder at attempt 1"
        assert await run.execute("send", ARGS, Effect("wrong")) == "by the holder at attempt 1"


async def test_one_of_several_judges_writes(server, namespace, bucket, toolkit, key, nc):
    judges = 6
    async with Holder.of(server.url, namespace, ARGS, lease=SHORT) as holder, signs(nc, namespace) as seen:
        assert await holder.says() == "entered 1"
        holder.freeze()
        toolkits = [toolkit_of(server.url, namespace, worker=f"judge {n}") for n in range(judges)]
        connected = [await t.__aenter__() for t in toolkits]
        try:
            calls = (t.run("acme", "run-1").execute("send", ARGS, Effect("wrong")) for t in connected)
            errors = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            for t in toolkits:
                await t.__aexit__(None, None, None)
        assert [type(error) for error in errors] == [AmbiguousCall] * judges
        assert len({error.revision for error in errors}) == 1
        records = await revisions(nc, namespace, key)
        assert [record["status"] for record in records].count("ambiguous") == 1
        await asyncio.wait_for(seen.get(), 30)


async def test_a_killed_idempotent_holder_is_followed(server, namespace, run, key, nc):
    async with Holder.of(server.url, namespace, ARGS, lease=SHORT, effect="idempotent") as holder:
        assert await holder.says() == "entered 1"
        holder.kill()
        effect = Effect("second")
        assert await run.execute("send", ARGS, effect, effect="idempotent") == "second"
    assert effect.entered == 1
    records = await revisions(nc, namespace, key)
    assert [(r["status"], r["attempts"]) for r in records][-2:] == [("running", 2), ("completed", 2)]
    assert records[-2]["open"] is True
    assert records[-1]["open"] is True  # nobody has said whether the first attempt landed
    assert records[-1]["holder"]["token"] != records[0]["holder"]["token"]


async def test_a_frozen_idempotent_holder_finds_itself_followed(server, namespace, run, key):
    async with Holder.of(server.url, namespace, ARGS, lease=SHORT, effect="idempotent") as holder:
        assert await holder.says() == "entered 1"
        holder.freeze()
        assert await run.execute("send", ARGS, Effect("second"), effect="idempotent") == "second"
        holder.thaw()
        assert await holder.says() == "error LeaseLost None"  # its body was cancelled
    assert await run.execute("send", ARGS, Effect("wrong"), effect="idempotent") == "second"


async def test_a_frozen_idempotent_holder_whose_body_had_ended(server, namespace, run, key):
    async with Holder.of(server.url, namespace, ARGS, lease=SHORT, effect="idempotent", on_lost="continue") as holder:
        assert await holder.says() == "entered 1"
        holder.freeze()
        assert await run.execute("send", ARGS, Effect("second"), effect="idempotent") == "second"
        holder.finish()
        holder.thaw()
        assert await holder.says() == "error LeaseLost by the holder at attempt 1"  # with its result


async def test_a_live_holder_is_waited_for(server, namespace, run):
    """Its heartbeats keep it alive for longer than a lease."""
    async with Holder.of(server.url, namespace, ARGS, lease=2) as holder:
        assert await holder.says() == "entered 1"
        with pytest.raises(CallInFlight):
            await run.execute("send", ARGS, Effect("wrong"), wait=2.3)
        waiting = asyncio.create_task(run.execute("send", ARGS, Effect("wrong"), wait=60))
        await asyncio.sleep(0)
        holder.finish()
        assert await waiting == "by the holder at attempt 1"


# Judging, looked at more closely


async def test_a_strict_caller_looks_twice(proxy, namespace, bucket, nc, run, key):
    """The lease is long over, and still the record must be seen to stand for a third of lease and margin."""
    await put(nc, namespace, key, record_of(key, leaseMs=900))
    await asyncio.sleep(1.0)  # 900 ms and the margin of 90 ms
    async with toolkit_of(proxy.url, namespace) as toolkit:
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(AmbiguousCall):
            await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("wrong"), wait=0)
        assert loop.time() - started >= 0.33
    (judgement,) = [m for m in proxy.published(f"$KV.{bucket}.>") if said(m)["status"] == "ambiguous"]
    assert said(judgement)["holder"] == {"token": "another", "worker": "elsewhere/1"}


async def test_a_holder_that_renews_between_the_looks_is_not_judged(server, namespace, run, key, nc, proxy, bucket):
    first = await put(nc, namespace, key, record_of(key, leaseMs=900))
    await asyncio.sleep(1.0)
    async with toolkit_of(proxy.url, namespace, lease=0.9) as toolkit:
        clocks = proxy.observe(f"$JS.API.STREAM.INFO.KV_{bucket}")
        task = asyncio.create_task(toolkit.run("acme", "run-1").execute("send", ARGS, Effect("wrong"), wait=0))
        await clocks.hit()  # it has looked once
        second = proxy.delay(f"$JS.API.STREAM.MSG.GET.KV_{bucket}", count=None)
        await put(nc, namespace, key, record_of(key, write="1" * 24, leaseMs=60_000), last=first)
        second.cancel()
        with pytest.raises(CallInFlight):
            await task
    assert [r["status"] for r in await revisions(nc, namespace, key)] == ["running", "running"]


async def test_a_judgement_on_an_old_look_is_refused(namespace, key, nc, proxy, bucket):
    """The holder's write and the judge's cross: one of them stands, and the judge looks again."""
    first = await put(nc, namespace, key, record_of(key, leaseMs=300))
    async with toolkit_of(proxy.url, namespace, lease=9) as toolkit:
        judgement = proxy.delay(lambda m: m.subject.startswith("$KV.") and said(m)["status"] == "ambiguous")
        task = asyncio.create_task(toolkit.run("acme", "run-1").execute("send", ARGS, Effect("wrong")))
        await judgement.hit()
        completed = record_of(key, write="2" * 24, status="completed", result={"json": "after all"})
        await put(nc, namespace, key, completed, last=first)
        await judgement.release()
        assert await task == "after all"
    assert [r["status"] for r in await revisions(nc, namespace, key)] == ["running", "completed"]


async def test_an_idempotent_call_is_reclaimed_when_its_lease_is_over_and_not_before(run, key, nc, namespace):
    loop = asyncio.get_running_loop()
    put_at = loop.time()
    await put(nc, namespace, key, record_of(key, effect="idempotent", leaseMs=2000, steps={"a": {"json": 1}}))
    with pytest.raises(CallInFlight) as caught:
        await run.execute("send", ARGS, Effect("wrong"), effect="idempotent", wait=0)
    assert 0 < caught.value.retry_after <= 2.2
    assert await run.execute("send", ARGS, Effect("second"), effect="idempotent") == "second"
    assert loop.time() - put_at >= 2.2
    record = await stored(nc, namespace, key)
    assert (record["attempts"], record["open"], record["steps"]) == (2, True, {"a": {"json": 1}})


async def test_the_lease_that_counts_is_the_records(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, leaseMs=60_000))
    with pytest.raises(CallInFlight) as caught:
        await run.execute("send", ARGS, Effect("wrong"), lease=0.1, wait=0.3)
    assert 30 < caught.value.retry_after < 63


async def test_a_lax_caller_does_not_repeat_a_strict_call(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, leaseMs=100))
    effect = Effect("wrong")
    with pytest.raises(AmbiguousCall):
        await run.execute("send", ARGS, effect, effect="idempotent")
    assert effect.entered == 0
    assert (await stored(nc, namespace, key))["effect"] == "opaque"


async def test_a_strict_caller_does_not_repeat_a_lax_call(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, effect="idempotent", leaseMs=100))
    effect = Effect("wrong")
    with pytest.raises(AmbiguousCall):
        await run.execute("send", ARGS, effect)
    assert effect.entered == 0
    assert (await stored(nc, namespace, key))["effect"] == "opaque"


async def test_reading_never_judges(toolkit, key, nc, namespace):
    revision = await put(nc, namespace, key, record_of(key, leaseMs=1))
    await asyncio.sleep(0.05)
    assert (await toolkit.receipts.get(key)).status == "running"
    assert (await newest(nc, namespace, key)).seq == revision


# The server falls silent, and nobody is condemned for it


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_restarted_server_condemns_nobody(own_server, namespace, end):
    """The lease ended while the server was away: the holder gets its time to renew before it is judged."""
    async with (
        FaultProxy("127.0.0.1", own_server.port) as proxy,
        toolkit_of(own_server.url, namespace, lease=0.9) as toolkit,
        toolkit_of(proxy.url, namespace, lease=0.9) as other,
    ):
        run = toolkit.run("acme", "run-1")
        effect = Effect("mine", hold=True)
        holder = asyncio.create_task(run.execute("send", ARGS, effect))
        await effect.started.wait()
        await getattr(own_server, end)()
        await asyncio.sleep(1.2)
        clocks = proxy.observe(f"$JS.API.STREAM.INFO.KV_{bucket_of(namespace)}")
        caller = asyncio.create_task(other.run("acme", "run-1").execute("send", ARGS, Effect("wrong")))
        await own_server.restart()
        await clocks.hit(timeout=30)  # it has looked once, and finds the lease over
        second = proxy.delay(f"$JS.API.STREAM.MSG.GET.KV_{bucket_of(namespace)}", count=None)
        effect.go.set()
        assert await holder == "mine"
        second.cancel()
        assert await caller == "mine"
        assert (await toolkit.receipts.get(run.key("send", ARGS))).status == "completed"


async def test_a_call_in_flight_over_a_restart_is_completed(own_server, namespace):
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect(hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect))
        await effect.started.wait()
        await own_server.kill()
        await own_server.restart()
        effect.go.set()
        assert await task == "done"
        assert await run.execute("send", ARGS, Effect("wrong")) == "done"


async def test_an_opaque_body_goes_on_through_silence(own_server, namespace):
    async with toolkit_of(own_server.url, namespace, lease=0.4) as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect(hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect))
        await effect.started.wait()
        await own_server.pause()
        await asyncio.sleep(1.2)
        assert not task.done()
        await own_server.resume()
        effect.go.set()
        assert await task == "done"


async def test_a_resumable_body_is_ended_by_silence(own_server, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.guard._HURRIED", 0.5)
    async with toolkit_of(own_server.url, namespace, lease=0.4) as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect(hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect, effect="idempotent"))
        await effect.started.wait()
        await own_server.pause()
        with pytest.raises(LeaseLost, match="silent"):
            await task
        assert effect.finished == 0
        await own_server.resume()
        assert await run.execute("send", ARGS, Effect("again"), effect="idempotent") == "again"


# A holder whose fence is gone


async def test_a_body_is_cancelled_when_another_attempt_owns_the_call(run, key, nc, namespace):
    effect = Effect(hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect, effect="idempotent", lease=SHORT))
    await effect.started.wait()
    other = record_of(key, effect="idempotent", attempts=2, leaseMs=60_000)
    await put(nc, namespace, key, other)
    with pytest.raises(LeaseLost) as caught:
        await task
    assert (caught.value.has_result, effect.finished) == (False, 0)
    assert caught.value.key == key
    assert await stored(nc, namespace, key) == other


@pytest.mark.parametrize("on_lost", ["cancel", "continue"])
async def test_a_result_that_came_too_late(run, key, nc, namespace, on_lost):
    """on_lost="continue" lets the body end; its result is in the error and nothing is written over."""
    other = record_of(key, effect="idempotent", attempts=2, leaseMs=60_000)
    with pytest.raises(LeaseLost) as caught:
        async with run.call("send", ARGS, effect="idempotent", lease=3, on_lost=on_lost) as call:
            await put(nc, namespace, key, other)
            if on_lost == "continue":
                async with asyncio.timeout(60):
                    while not call.lost:
                        await asyncio.sleep(0.02)
            call.result = "in vain"
    assert call.lost
    assert caught.value.result == "in vain"
    assert await stored(nc, namespace, key) == other
    assert asyncio.current_task().cancelling() == 0


async def test_an_error_of_a_call_that_is_lost(run, key, nc, namespace):
    with pytest.raises(LeaseLost) as caught:
        async with run.call("send", ARGS, effect="idempotent") as call:
            await put(nc, namespace, key, record_of(key, effect="idempotent", attempts=2), last=call.revision)
            raise ValueError("the body's own")
    assert not caught.value.has_result
    assert isinstance(caught.value.__context__, ValueError)


async def test_a_judged_call_that_says_not_applied(run, toolkit, key, nc, namespace):
    with pytest.raises(NotApplied):
        async with run.call("send", ARGS) as call:
            judged = (await stored(nc, namespace, key)) | {"status": "ambiguous", "write": "9" * 24}
            await put(nc, namespace, key, judged, last=call.revision)
            raise NotApplied("refused")
    receipt = await toolkit.receipts.get(key)
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)


async def _resolved(nc, namespace, key, status, **fields):
    """What a resolver writes: the holder's record, ended in its stead."""
    by = {"status": status, "write": "8" * 24, "resolved": {"by": "ann", "reason": "r"}}
    while True:
        message = await newest(nc, namespace, key)
        with contextlib.suppress(nats.js.errors.APIError):  # a renewal was faster
            return await put(nc, namespace, key, json.loads(message.data) | by | fields, last=message.seq)


async def test_a_resolvers_result_stands_for_a_body_that_ended(run, key, nc, namespace, caplog):
    async with run.call("send", ARGS) as call:
        await _resolved(nc, namespace, key, "completed", result={"json": "ann's"})
        call.result = "mine"
    assert call.result == "ann's"
    assert any(record.levelname == "WARNING" and "ann" in record.getMessage() for record in caplog.records)
    assert await run.execute("send", ARGS, Effect("wrong")) == "ann's"


async def test_a_resolvers_result_stands_for_a_body_that_runs(run, key, nc, namespace):
    effect = Effect(hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect, lease=SHORT))
    await effect.started.wait()
    await _resolved(nc, namespace, key, "completed", result={"json": "ann's"})
    assert await task == "ann's"
    assert effect.finished == 0


async def test_a_completion_goes_over_a_resolvers_failed(run, key, nc, namespace):
    """The resolver was wrong, and no new attempt was granted: the holder knows better."""
    async with run.call("send", ARGS) as call:
        error = {"type": "Resolved", "message": "not applied", "notApplied": True}
        await _resolved(nc, namespace, key, "failed", error=error)
        call.result = "it did land"
    record = await stored(nc, namespace, key)
    assert (record["status"], record["result"]) == ("completed", {"json": "it did land"})
    assert "resolved" not in record
    assert "error" not in record


async def test_a_heartbeat_does_not_go_over_a_resolvers_failed(run, key, nc, namespace):
    effect = Effect(hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect, lease=SHORT))
    await effect.started.wait()
    error = {"type": "Resolved", "message": "not applied", "notApplied": True}
    await _resolved(nc, namespace, key, "failed", error=error)
    with pytest.raises(LeaseLost):
        await task
    assert (await stored(nc, namespace, key))["status"] == "failed"
    assert await run.execute("send", ARGS, Effect("second")) == "second"


async def test_a_fence_under_a_running_call_is_kept(run, key, nc, namespace):
    """Another writer may change `write` and `fences` of a live record; every later record carries them."""
    async with run.call("send", ARGS) as call:
        fenced = (await stored(nc, namespace, key)) | {"fences": {"s1": 17}, "write": "7" * 24}
        await put(nc, namespace, key, fenced, last=call.revision)
        await call.renew()
        assert (await stored(nc, namespace, key))["fences"] == {"s1": 17}
        fenced = (await stored(nc, namespace, key)) | {"fences": {"s1": 19}, "write": "6" * 24}
        await put(nc, namespace, key, fenced, last=call.revision)
        call.result = 1
    record = await stored(nc, namespace, key)
    assert (record["status"], record["fences"]) == ("completed", {"s1": 19})


async def test_a_body_whose_receipt_is_erased(run, key, nc, namespace):
    """Whatever is not this attempt's own record means that the fence is lost."""
    effect = Effect(hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect, lease=SHORT))
    await effect.started.wait()
    await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(task, 60)
