"""Lost answers, lost writes, ghosts, and servers that go away: one owner, one effect, one true outcome each."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from scenes import outline
from support import (
    Effect,
    bucket_of,
    client_of,
    flushed,
    newest,
    put,
    revisions,
    said,
    signs,
    stored,
    toolkit_of,
    until,
)

from natsreceipts import (
    AmbiguousCall,
    BucketReplaced,
    CallInFlight,
    LeaseLost,
    NotApplied,
    NotClaimed,
    NotProvisioned,
    NotRecorded,
    Unreachable,
    connect,
)
from natsreceipts.embedded import free_port

ARGS = {"to": "a@b.c"}
SHORT = 0.9
"""Seconds: a lease whose third, which is how long a lost answer is waited for, a test can sit out."""


@pytest.fixture
async def far(proxy, namespace, bucket):
    """A toolkit behind the proxy, whose leases are short."""
    async with toolkit_of(proxy.url, namespace, lease=SHORT) as toolkit:
        yield toolkit


@pytest.fixture
async def steady(proxy, namespace, bucket, monkeypatch):
    """A toolkit behind the proxy that waits for an answer no longer than `far`, and whose leases are long."""
    monkeypatch.setattr("natsreceipts.fence._SHORTEST_TRY", SHORT / 3)
    async with toolkit_of(proxy.url, namespace) as toolkit:
        yield toolkit


def beating(stage):
    """A lease of which a heartbeat comes soon, where that is waited for."""
    return {"lease": 3.0} if stage == "heartbeat" else {}


def is_write(namespace, status):
    """Writes with this status; ``heartbeat`` is a running record that is not the first."""

    def matches(message):
        if not message.subject.startswith(f"$KV.{bucket_of(namespace)}."):
            return False
        first = message.headers["Nats-Expected-Last-Subject-Sequence"] == "0"
        record = said(message)["status"]
        if status == "claim":
            return record == "running" and first
        if status == "heartbeat":
            return record == "running" and not first
        return record == status

    return matches


# One fault, somewhere in the life of a call


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("stage", ["claim", "heartbeat", "completed"])
@pytest.mark.parametrize("fault", ["drop_answer", "cut_after_store", "drop", "duplicate"])
async def test_a_fault_between_claim_and_settle(far, proxy, server, namespace, nc, fault, stage, times):
    """The first N writes of a stage lose their answers, or do not get through, or come twice."""
    run = far.run("acme", "run-1")
    lost = getattr(proxy, fault)(is_write(namespace, stage), count=times)
    effect = Effect({"id": 1}, hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    await asyncio.wait([asyncio.create_task(effect.started.wait()), task], return_when=asyncio.FIRST_COMPLETED)
    if stage == "heartbeat":
        # Two renewals after the fault has passed
        passed = proxy.observe(is_write(namespace, "heartbeat"))
        await passed.hit(2)
    effect.go.set()
    assert await task == {"id": 1}
    # A resent write is refused where the first one landed, so a stage may need fewer than N.
    assert 1 <= len(lost.hits) <= times
    assert effect.entered == 1
    records = await revisions(nc, namespace, run.key("send", ARGS))
    assert records[-1]["status"] == "completed"
    assert {record["attempts"] for record in records} == {1}
    assert len({record["holder"]["token"] for record in records}) == 1
    assert not any(record.get("open") for record in records)
    assert [record["status"] for record in records].count("completed") == 1
    assert await run.execute("send", ARGS, Effect("wrong")) == {"id": 1}
    async with toolkit_of(server.url, namespace) as other:
        assert await other.run("acme", "run-1").execute("send", ARGS, Effect("wrong")) == {"id": 1}


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("stage", ["claim", "heartbeat", "completed"])
async def test_a_ghost_that_lands_after_its_writer_gave_it_up(far, proxy, namespace, nc, stage, nth):
    """The write was sent again meanwhile: the ghost is refused, whenever it comes."""
    run = far.run("acme", "run-1")
    ghosts = proxy.delay(is_write(namespace, stage), count=nth)
    effect = Effect(7, hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    if stage == "completed":
        await effect.started.wait()
        effect.go.set()
        assert await task == 7
    else:
        resent = proxy.observe(is_write(namespace, stage))
        await resent.hit()
        await effect.started.wait()
        if stage == "heartbeat":
            await resent.hit(2)
    before = await revisions(nc, namespace, run.key("send", ARGS))
    while ghosts.held:
        answer = await ghosts.release()
        assert b"10071" in answer.payload
    after = await revisions(nc, namespace, run.key("send", ARGS))
    assert [r["write"] for r in after[: len(before)]] == [r["write"] for r in before]
    effect.go.set()
    assert await task == 7
    assert effect.entered == 1
    records = await revisions(nc, namespace, run.key("send", ARGS))
    assert len({record["write"] for record in records}) == len(records)
    assert records[-1]["status"] == "completed"
    assert {record["attempts"] for record in records} == {1}


@pytest.mark.parametrize("stage", ["claim", "heartbeat", "completed"])
async def test_a_ghost_that_lands_before_it_is_sent_again(steady, proxy, namespace, nc, stage):
    """The write is in doubt, is looked for, is found missing, lands, and the second send is refused."""
    run = steady.run("acme", "run-1", **beating(stage))
    ghost = proxy.delay(is_write(namespace, stage))
    effect = Effect(7, hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    if stage != "claim":
        await effect.started.wait()
    if stage == "completed":
        effect.go.set()
    await ghost.hit()
    second = proxy.delay(is_write(namespace, stage), count=None)
    await second.hit()
    assert b'"seq"' in (await ghost.release()).payload
    second.cancel()
    while second.held:
        assert b"10071" in (await second.release()).payload
    effect.go.set()
    assert await task == 7
    records = await revisions(nc, namespace, run.key("send", ARGS))
    assert records[-1]["status"] == "completed"
    assert {record["attempts"] for record in records} == {1}
    assert effect.entered == 1


@pytest.mark.parametrize("stage", ["claim", "heartbeat", "completed", "failed", "ambiguous"])
async def test_a_second_send_that_is_refused_because_the_first_one_landed(steady, proxy, namespace, nc, stage):
    """In doubt, looked for, not found, landed after all, sent again: refused with 10071, which is no defeat."""
    run = steady.run("acme", "run-1", **beating(stage))
    key = run.key("send", ARGS)
    ghost = proxy.delay(is_write(namespace, stage))
    effect = Effect(7, hold=True)
    if stage in ("failed", "ambiguous"):
        effect.result = ValueError("the body's own")
    kind = "idempotent" if stage == "failed" else "opaque"
    task = asyncio.create_task(run.execute("send", ARGS, effect, effect=kind))
    if stage != "claim":
        await effect.started.wait()
    if stage not in ("claim", "heartbeat"):
        effect.go.set()
    await ghost.hit()
    await proxy.observe(f"$JS.API.STREAM.MSG.GET.KV_{bucket_of(namespace)}").hit()
    await proxy.stall("to_server")  # the second send waits in the proxy
    assert b'"seq"' in (await ghost.release()).payload
    await proxy.resume("to_server")
    effect.go.set()
    if stage in ("failed", "ambiguous"):
        with pytest.raises(ValueError, match="own"):
            await task
    else:
        assert await task == 7
    records = await revisions(nc, namespace, key)
    assert records[-1]["status"] == (stage if stage in ("failed", "ambiguous") else "completed")
    assert {record["attempts"] for record in records} == {1}
    assert effect.entered == 1
    assert len({record["write"] for record in records}) == len(records)


@pytest.mark.parametrize("fault", ["drop_answer", "cut_after_store", "drop", "delay"])
@pytest.mark.parametrize("kind", ["opaque", "idempotent", "not applied"])
async def test_an_error_whose_settle_is_lost(far, proxy, namespace, nc, fault, kind):
    """The caller gets the body's own error, and never word of a call that it has not lost."""
    run = far.run("acme", "run-1")
    key = run.key("send", ARGS)
    status = "ambiguous" if kind == "opaque" else "failed"
    rule = getattr(proxy, fault)(is_write(namespace, status))
    error = NotApplied("refused") if kind == "not applied" else ValueError("the body's own")
    with pytest.raises(type(error)) as caught:
        await run.execute("send", ARGS, Effect(error), effect="idempotent" if kind == "idempotent" else "opaque")
    assert caught.value is error
    await rule.hit()
    records = await revisions(nc, namespace, key)
    assert outline(records) == ["running", status]
    assert records[-1]["error"]["notApplied"] == (kind == "not applied")


async def test_a_lost_settle_that_was_followed_at_once(far, proxy, server, namespace, nc):
    """It landed as failed, another attempt was granted on it and completed: still it had landed."""
    run = far.run("acme", "run-1")
    lost = proxy.drop_answer(is_write(namespace, "failed"))
    task = asyncio.create_task(run.execute("send", ARGS, Effect(ValueError("mine")), effect="idempotent"))
    await lost.answered()
    async with toolkit_of(server.url, namespace) as other:
        assert await other.run("acme", "run-1").execute("send", ARGS, Effect("theirs"), effect="idempotent") == "theirs"
    with pytest.raises(ValueError, match="mine"):
        await task
    records = await revisions(nc, namespace, run.key("send", ARGS))
    assert outline(records) == ["running", "failed", "running", "completed"]


async def test_an_answer_that_comes_late_is_no_licence(far, proxy, namespace, nc):
    """The claim is acknowledged after a third of the lease: it is renewed before the body is entered."""
    run = far.run("acme", "run-1")
    lost = proxy.drop_answer(is_write(namespace, "claim"))
    seen = []

    async def body():
        seen.extend(await revisions(nc, namespace, run.key("send", ARGS)))
        return "done"

    assert await run.execute("send", ARGS, body) == "done"
    assert len(lost.answers) == 1
    assert len(seen) >= 2
    assert {record["status"] for record in seen} == {"running"}


async def test_a_claim_whose_answer_is_lost_to_a_judge(far, proxy, server, namespace, nc):
    """The claim landed, its writer does not know, and a judge comes first: the writer takes it back and goes on."""
    run = far.run("acme", "run-1")
    proxy.drop_answer(is_write(namespace, "claim"))
    reads = proxy.delay(f"$JS.API.STREAM.MSG.GET.KV_{bucket_of(namespace)}", count=None)
    effect = Effect(7)
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    await reads.hit()
    key = run.key("send", ARGS)
    message = await newest(nc, namespace, key)
    judged = (await stored(nc, namespace, key)) | {"status": "ambiguous", "write": "5" * 24}
    await put(nc, namespace, key, judged, last=message.seq)
    reads.cancel()
    assert await task == 7
    records = await revisions(nc, namespace, key)
    assert [record["status"] for record in records][-2:] == ["running", "completed"]
    assert effect.entered == 1


async def test_a_settle_that_landed_before_a_judge_could_write(far, proxy, server, namespace, nc):
    """The answer of the settle is lost: the caller is told of its completion, and a second caller replays it."""
    run = far.run("acme", "run-1")
    lost = proxy.drop_answer(is_write(namespace, "completed"))
    task = asyncio.create_task(run.execute("send", ARGS, Effect(7)))
    await lost.answered()
    async with toolkit_of(server.url, namespace) as other:
        assert await other.run("acme", "run-1").execute("send", ARGS, Effect("wrong")) == 7
    assert await task == 7


async def test_an_idempotent_settle_that_never_landed_and_was_followed(far, proxy, server, namespace, nc):
    """Its writer is told that it lost the call, with its result, and never that it completed it."""
    run = far.run("acme", "run-1")
    effect = Effect("mine", hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect, effect="idempotent"))
    await effect.started.wait()
    ghost = proxy.delay(is_write(namespace, "completed"), count=None)
    proxy.drop(is_write(namespace, "heartbeat"), count=None)
    effect.go.set()
    await ghost.hit()
    async with toolkit_of(server.url, namespace) as other:
        theirs = await other.run("acme", "run-1").execute("send", ARGS, Effect("theirs"), effect="idempotent")
    assert theirs == "theirs"
    ghost.cancel()
    with pytest.raises(LeaseLost) as caught:
        await task
    assert caught.value.result == "mine"
    assert b"10071" in (await ghost.release()).payload
    assert (await stored(nc, namespace, run.key("send", ARGS)))["result"] == {"json": "theirs"}


# Claims that are given up


@pytest.fixture
def impatience(monkeypatch):
    """A context in which claims give up after a second and settles after one and a half, so that a test can wait."""

    @contextlib.contextmanager
    def impatience():
        with monkeypatch.context() as patch:
            patch.setattr("natsreceipts.entering.CLAIM_PATIENCE", 1.0)
            patch.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 1.0)
            patch.setattr("natsreceipts.guard._SETTLE_PATIENCE", 1.5)
            yield

    return impatience


@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
async def test_a_claim_that_lands_after_it_was_given_up(steady, proxy, server, namespace, nc, impatience, kind):
    run = steady.run("acme", "run-1")
    key = run.key("send", ARGS)
    ghosts = proxy.delay(is_write(namespace, "claim"), count=None)
    effect = Effect("mine")
    with pytest.raises(NotClaimed) as caught, impatience():
        await run.execute("send", ARGS, effect, effect=kind)
    assert caught.value.key == key
    assert caught.value.__cause__ is not None
    assert (effect.entered, await stored(nc, namespace, key)) == (0, None)

    assert b'"seq"' in (await ghosts.release()).payload  # it lands now
    while ghosts.held:
        assert b"10071" in (await ghosts.release()).payload
    ghosts.cancel()
    async with toolkit_of(server.url, namespace) as other:  # to others it is a live call
        with pytest.raises(CallInFlight):
            await other.run("acme", "run-1").execute("send", ARGS, Effect("wrong"), effect=kind, wait=0)
    # ... and to this process one that never had its effect
    assert await run.execute("send", ARGS, effect, effect=kind, wait=0) == "mine"
    record = await stored(nc, namespace, key)
    assert (record["status"], record["attempts"]) == ("completed", 2)
    assert not record.get("open")
    assert effect.entered == 1


async def test_to_another_process_a_ghost_claim_is_ambiguous_in_the_end(far, proxy, server, namespace, nc, impatience):
    run = far.run("acme", "run-1")
    key = run.key("send", ARGS)
    ghosts = proxy.delay(is_write(namespace, "claim"), count=None)
    with pytest.raises(NotClaimed), impatience():
        await run.execute("send", ARGS, Effect("wrong"))
    await ghosts.release()
    ghosts.cancel()
    async with toolkit_of(server.url, namespace) as other:
        with pytest.raises(AmbiguousCall):
            await other.run("acme", "run-1").execute("send", ARGS, Effect("wrong"))
    assert (await stored(nc, namespace, key))["status"] == "ambiguous"
    effect = Effect("mine")  # the process that gave it up still knows better
    assert await run.execute("send", ARGS, effect) == "mine"
    record = await stored(nc, namespace, key)
    assert (record["attempts"], record.get("open", False)) == (2, False)


async def test_a_ghost_claim_that_lands_while_the_next_call_claims(far, proxy, namespace, nc, impatience):
    run = far.run("acme", "run-1")
    ghosts = proxy.delay(is_write(namespace, "claim"), count=None)
    with pytest.raises(NotClaimed), impatience():
        await run.execute("send", ARGS, Effect("wrong"))
    ghosts.cancel()
    effect = Effect("mine", hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    await effect.started.wait()
    while ghosts.held:
        assert b"10071" in (await ghosts.release()).payload
    effect.go.set()
    assert await task == "mine"


async def test_the_settles_answer_and_the_connection_are_lost_for_long(steady, proxy, namespace, nc, impatience):
    """NotRecorded, with the result, although the settle landed: and the next call finds it."""
    run = steady.run("acme", "run-1")
    effect = Effect("mine", hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    await effect.started.wait()
    await_settle = proxy.cut_after_store(is_write(namespace, "completed"))
    with impatience():
        effect.go.set()
        await await_settle.hit()
        await proxy.refuse()
        with pytest.raises(NotRecorded) as caught:
            await task
    assert caught.value.result == "mine"
    await proxy.accept()
    await proxy.connected()
    effect = Effect("wrong")
    assert await until(lambda: _once_connected(run, effect)) == "mine"
    assert effect.entered == 0
    records = await revisions(nc, namespace, run.key("send", ARGS))
    assert [record["status"] for record in records] == ["running", "completed"]


async def _once_connected(run, effect):
    with contextlib.suppress(NotClaimed, NotRecorded):
        return await run.execute("send", ARGS, effect)


# Servers that are not there


async def test_no_server_to_connect_to():
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1") as caught:
        async with connect(f"nats://127.0.0.1:{free_port()}", connect_timeout=0.5):
            pass
    assert loop.time() - started < 20
    assert caught.value.__cause__ is not None


async def test_a_server_that_says_nothing():
    writers = []
    silent = await asyncio.start_server(lambda _reader, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        port = silent.sockets[0].getsockname()[1]
        with pytest.raises(Unreachable):
            async with connect(f"nats://127.0.0.1:{port}", connect_timeout=0.5):
                pass
    finally:
        silent.close()
        for writer in writers:
            writer.close()
            await writer.wait_closed()


async def test_a_server_that_is_gone_before_a_claim(own_server, namespace, impatience):
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await own_server.stop()
        effect = Effect()
        with pytest.raises(NotClaimed) as caught, impatience():
            await run.execute("send", ARGS, effect)
        assert caught.value.key == run.key("send", ARGS)
        assert isinstance(caught.value.__cause__, Unreachable)
        with pytest.raises(NotClaimed), impatience():
            await run.execute("send", ARGS, effect)
        await own_server.restart()
        assert effect.entered == 0
        # Nothing that was reported as not claimed lands later, and the client finds its way back by itself.
        assert await until(lambda: _once_connected(run, effect)) == "done"
        assert (await toolkit.receipts.get(run.key("send", ARGS))).attempts == 1


async def test_reading_from_a_server_that_is_gone(own_server, namespace, monkeypatch):
    monkeypatch.setattr("natsreceipts.receipts._READ_PATIENCE", 0.5)
    async with toolkit_of(own_server.url, namespace) as toolkit:
        await own_server.stop()
        with pytest.raises(Unreachable) as caught:
            await toolkit.receipts.get(toolkit.run("acme", "run-1").key("send", ARGS))
        assert caught.value.key == toolkit.run("acme", "run-1").key("send", ARGS)


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_server_that_is_away_over_the_settle(own_server, namespace, end):
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect("mine", hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect))
        await effect.started.wait()
        await getattr(own_server, end)()
        effect.go.set()
        await asyncio.sleep(0.3)
        assert not task.done()
        await own_server.restart()
        assert await task == "mine"
        assert await run.execute("send", ARGS, Effect("wrong")) == "mine"


async def test_a_server_that_stays_away_over_the_settle(own_server, namespace, impatience):
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        key = run.key("send", ARGS)
        effect = Effect("mine", hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect))
        await effect.started.wait()
        await own_server.kill()
        with pytest.raises(NotRecorded) as caught, impatience():
            effect.go.set()
            await task
        assert (caught.value.result, caught.value.has_result, caught.value.key) == ("mine", True, key)
        with pytest.raises(NotRecorded) as caught, impatience():  # still away: and nothing is executed again
            await run.execute("send", ARGS, effect)
        assert caught.value.result == "mine"
        await own_server.restart()
        assert await until(lambda: _once_connected(run, effect)) == "mine"
        assert effect.entered == 1
        assert (await toolkit.receipts.get(key)).status == "completed"


@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
async def test_an_error_that_could_not_be_recorded_is_finished_by_the_next_call(
    own_server, namespace, impatience, kind
):
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect(ValueError("the body's own"), hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect, effect=kind))
        await effect.started.wait()
        await own_server.kill()
        with pytest.raises(NotRecorded) as caught, impatience():
            effect.go.set()
            await task
        assert not caught.value.has_result
        assert isinstance(caught.value.__context__.__context__ or caught.value.__context__, Exception)
        await own_server.restart()
        effect.result = "second"
        if kind == "opaque":

            async def refused():
                try:
                    await run.execute("send", ARGS, effect)
                except AmbiguousCall as error:
                    return error
                except NotRecorded:
                    return None

            assert "the body's own" in str(await until(refused))
            assert effect.entered == 1
        else:
            assert await until(lambda: _repeat(run, effect, kind)) == "second"
            assert effect.entered == 2


async def _repeat(run, effect, kind):
    with contextlib.suppress(NotClaimed, NotRecorded):
        return await run.execute("send", ARGS, effect, effect=kind)


# Buckets that are not the same any more


async def test_a_replaced_bucket_is_found_out_at_the_claim(own_server, namespace):
    async with toolkit_of(own_server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        for n in range(3):
            await run.execute("send", {"n": n}, Effect())
        await own_server.restart(wipe=True)
        async with toolkit_of(own_server.url, namespace):
            pass
        effect = Effect("wrong")

        async def refused():
            try:
                await run.execute("send", {"n": 0}, effect)
            except BucketReplaced as error:
                return error
            except NotClaimed:  # not connected again yet
                return None

        error = await until(refused)
        assert (error.bucket, error.key) == (bucket_of(namespace), run.key("send", {"n": 0}))
        with pytest.raises(BucketReplaced) as caught:  # for good
            await run.execute("send", {"n": 9}, effect)
        assert caught.value.key == run.key("send", {"n": 9})
        with pytest.raises(BucketReplaced):
            await toolkit.receipts.get(run.key("send", {"n": 0}))
        assert effect.entered == 0


async def test_a_replaced_bucket_with_more_in_it_is_found_out_by_the_clock(server, namespace, nc, bucket):
    """Its sequences are higher than any known one, but the first look at the server's clock tells."""
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", [1], Effect())
        await nc.jetstream().delete_stream(f"KV_{bucket}")
        async with toolkit_of(server.url, namespace) as other:
            for n in range(5):
                await other.run("acme", "other").execute("send", [n], Effect())
            holding = Effect(hold=True)
            task = asyncio.create_task(other.run("acme", "run-1").execute("send", ARGS, holding))
            await holding.started.wait()
            with pytest.raises(BucketReplaced):
                await run.execute("send", ARGS, Effect("wrong"))
            holding.go.set()
            await task


async def test_a_bucket_that_is_deleted(server, namespace, nc, bucket, impatience):
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect("mine", hold=True)
        task = asyncio.create_task(run.execute("send", ARGS, effect))
        await effect.started.wait()
        await nc.jetstream().delete_stream(f"KV_{bucket}")
        with pytest.raises((NotClaimed, NotProvisioned)), impatience():
            await run.execute("send", [2], Effect("wrong"))
        with pytest.raises(NotProvisioned) as caught:
            await toolkit.receipts.get(run.key("send", ARGS))
        assert caught.value.bucket == bucket
        with pytest.raises(NotRecorded) as caught, impatience():
            effect.go.set()
            await task
        assert caught.value.result == "mine"


# Cancellation


async def test_cancelled_while_its_claim_is_in_flight(far, proxy, namespace, nc):
    """The claim is looked for, and settled as failed, not applied: so the next caller executes at once."""
    run = far.run("acme", "run-1")
    key = run.key("send", ARGS)
    ghost = proxy.delay(is_write(namespace, "claim"))
    effect = Effect()
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    await ghost.hit()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    record = await stored(nc, namespace, key)
    assert (record["status"], record["error"]["notApplied"], record["attempts"]) == ("failed", True, 1)
    assert b"10071" in (await ghost.release()).payload
    assert await run.execute("send", ARGS, effect) == "done"
    assert effect.entered == 1
    assert (await stored(nc, namespace, key))["attempts"] == 2


async def test_cancelled_while_its_claims_answer_is_lost(far, proxy, namespace, nc):
    run = far.run("acme", "run-1")
    lost = proxy.drop_answer(is_write(namespace, "claim"))
    effect = Effect()
    async with signs(nc, namespace) as seen:
        task = asyncio.create_task(run.execute("send", ARGS, effect))
        await lost.answered()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(seen.get(), 30)
    record = await stored(nc, namespace, run.key("send", ARGS))
    assert (record["status"], record["error"]["notApplied"]) == ("failed", True)
    assert await run.execute("send", ARGS, effect) == "done"


async def test_cancelled_while_nobody_answers_its_claim(far, proxy, namespace, nc, monkeypatch):
    """Bounded: after a few seconds it is given up, and this process remembers that."""
    monkeypatch.setattr("natsreceipts.guard._HURRIED", 0.5)
    run = far.run("acme", "run-1")
    ghosts = proxy.delay(is_write(namespace, "claim"), count=None)
    task = asyncio.create_task(run.execute("send", ARGS, Effect("wrong")))
    await ghosts.hit()
    started = asyncio.get_running_loop().time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() - started < 12  # and not when a claim gives up by itself
    await ghosts.release()
    ghosts.cancel()
    assert (await stored(nc, namespace, run.key("send", ARGS)))["status"] == "running"
    assert await run.execute("send", ARGS, Effect("mine"), wait=0) == "mine"
    assert not (await stored(nc, namespace, run.key("send", ARGS))).get("open")


async def test_not_claimed_stays_not_claimed_when_its_clean_up_takes_too_long(proxy, namespace, bucket, monkeypatch):
    """The caller was not cancelled, so it is not told so."""
    monkeypatch.setattr("natsreceipts.guard._HURRIED", 0.3)
    async with toolkit_of(proxy.url, namespace, lease=0.6) as toolkit:
        run = toolkit.run("acme", "run-1")
        for n in range(2):
            lost = proxy.drop_answer(is_write(namespace, "claim"))
            renewals = proxy.drop(is_write(namespace, "heartbeat"), count=None)
            failed = proxy.drop(is_write(namespace, "failed"), count=None)
            with pytest.raises(NotClaimed), monkeypatch.context() as patch:
                patch.setattr("natsreceipts.entering.CLAIM_PATIENCE", 0.6)
                patch.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 0.6)
                async with run.call("send", [n]):
                    pass
            for rule in (lost, renewals, failed):
                rule.cancel()
            assert await run.execute("send", [n], Effect("mine"), wait=0) == "mine"


@pytest.mark.parametrize(("kind", "status"), [("opaque", "ambiguous"), ("idempotent", "failed")])
async def test_cancelled_in_its_body(run, toolkit, kind, status):
    effect = Effect(hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect, effect=kind))
    await effect.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    receipt = await toolkit.receipts.get(run.key("send", ARGS))
    assert (receipt.status, receipt.error.type) == (status, "asyncio.exceptions.CancelledError")
    assert not receipt.error.not_applied


async def test_cancelled_in_its_body_and_again_during_the_settle(far, proxy, namespace, nc):
    run = far.run("acme", "run-1")
    held = proxy.delay(is_write(namespace, "ambiguous"))
    effect = Effect(hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect))
    await effect.started.wait()
    task.cancel()
    await held.hit()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await stored(nc, namespace, run.key("send", ARGS)))["status"] == "ambiguous"


@pytest.mark.parametrize("fault", ["drop_answer", "delay", "drop", "cut_after_store"])
async def test_cancelled_during_its_settle(far, proxy, namespace, nc, fault):
    """The effect happened: its completion is written all the same, and the cancellation goes on."""
    run = far.run("acme", "run-1")
    rule = getattr(proxy, fault)(is_write(namespace, "completed"))
    task = asyncio.create_task(run.execute("send", ARGS, Effect("mine")))
    await rule.hit()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await stored(nc, namespace, run.key("send", ARGS)))["status"] == "completed"
    assert await run.execute("send", ARGS, Effect("wrong")) == "mine"


async def test_cancelled_during_a_settle_that_nobody_answers(far, proxy, namespace, nc, monkeypatch):
    """It is kept, and the next call of this process finishes it."""
    monkeypatch.setattr("natsreceipts.guard._HURRIED", 0.4)
    run = far.run("acme", "run-1")
    lost = proxy.drop(is_write(namespace, "completed"), count=None)
    task = asyncio.create_task(run.execute("send", ARGS, Effect("mine")))
    await lost.hit()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await stored(nc, namespace, run.key("send", ARGS)))["status"] == "running"
    lost.cancel()
    assert await run.execute("send", ARGS, Effect("wrong"), wait=0) == "mine"


async def test_cancelled_while_it_waits_for_another(server, namespace, run, nc):
    effect = Effect(hold=True)
    first = asyncio.create_task(run.execute("send", ARGS, effect))
    await effect.started.wait()
    async with toolkit_of(server.url, namespace) as other:
        second = asyncio.create_task(other.run("acme", "run-1").execute("send", ARGS, Effect("wrong")))
        await asyncio.sleep(0.1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
    effect.go.set()
    assert await first == "done"
    assert [r["status"] for r in await revisions(nc, namespace, run.key("send", ARGS))] == ["running", "completed"]


async def test_cancelled_at_every_step_of_a_call(server, namespace, bucket, nc):
    """One turn of the loop later each time: whatever stands then is legal, and a repeat goes on from it."""
    outcomes = set()
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        for step in range(60):
            effect = Effect(step)
            task = asyncio.create_task(run.execute("send", {"step": step}, effect))
            for _ in range(step):
                await asyncio.sleep(0)
            if step >= 40:  # past what turns of the loop reach: wait for the server as well
                await asyncio.sleep((step - 40) / 4000)
            if step == 59:
                await asyncio.wait([task])
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert await task == step
            record = await stored(nc, namespace, run.key("send", {"step": step}))
            status = record["status"] if record else "absent"
            outcomes.add(status)
            if status == "completed":
                assert effect.finished == 1
            elif status == "failed":
                assert record["error"]["notApplied"]
                assert effect.entered == 0
            else:
                assert status in ("absent", "ambiguous")
                assert status == "ambiguous" or effect.entered == 0
            entered = effect.entered
            try:
                assert await run.execute("send", {"step": step}, effect) == step
            except AmbiguousCall:
                assert entered == effect.entered == 1
    assert {"failed", "completed"} <= outcomes


async def test_a_host_client_that_buffers_lets_nothing_land_late(own_server, own_proxy, namespace, nc, impatience):
    """nats-py's default buffer of 2 MiB: what we said was not claimed must not land after the reconnect."""
    async with client_of(own_proxy.url) as mine, toolkit_of(mine, namespace, lease=SHORT) as toolkit:
        run = toolkit.run("acme", "run-1")
        await own_proxy.refuse()
        await own_proxy.cut()
        await until(lambda: _not(mine.is_connected))
        with pytest.raises(NotClaimed), impatience():
            await run.execute("send", ARGS, Effect("wrong"))
        await own_proxy.accept()
        await until(lambda: _is(mine))
        await flushed(mine)
        async with client_of(own_server.url) as direct:
            assert await stored(direct, namespace, run.key("send", ARGS)) is None
        assert await run.execute("send", ARGS, Effect("mine")) == "mine"
        assert (await toolkit.receipts.get(run.key("send", ARGS))).attempts == 1


async def _not(value):
    return not value


async def _is(client):
    return client.is_connected


async def test_the_pulse_of_a_closed_toolkit(server, namespace, bucket):
    """A call that outlives its toolkit ends with an error, and not by hanging."""
    async with toolkit_of(server.url, namespace) as toolkit:
        call = toolkit.run("acme", "run-1").call("send", ARGS)
        await call.__aenter__()
    call.result = 1
    with pytest.raises(NotRecorded):
        await call.__aexit__(None, None, None)


@pytest.mark.parametrize("later", range(8))
async def test_closing_in_the_moment_in_which_a_server_refuses(own_server, namespace, monkeypatch, later):
    """nats-py's reconnecting task may lose that cancel; `_no_task_left` sees a task that goes on after the close."""
    closing, refused = asyncio.Event(), asyncio.Event()

    async def refuse(*_, **__):
        refused.set()
        for _tick in range(8):
            await asyncio.sleep(0)
        closing.set()
        for _tick in range(later):
            await asyncio.sleep(0)
        raise ConnectionRefusedError

    async with toolkit_of(own_server.url, namespace) as toolkit:
        assert await toolkit.run("acme", "run-1").execute("send", ARGS, Effect("sent")) == "sent"
        monkeypatch.setattr("asyncio.open_connection", refuse)
        await own_server.stop()
        await refused.wait()
        closing.clear()
        await closing.wait()
