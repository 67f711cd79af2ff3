"""verify=: asked instead of raising AmbiguousCall, once that is on record, and believed for that revision only."""

from __future__ import annotations

import asyncio
import sys

import pytest
from pydantic import BaseModel
from scenes import history, no_writes, outline, stand
from support import Effect, revisions, said, stored, toolkit_of

from natsreceipts import (
    AmbiguousCall,
    InvalidSetting,
    Landed,
    NatsReceiptsError,
    NotLanded,
    Unknown,
)

ARGS = {"to": "a@b.c"}


class Verifier:
    """Answers what it is told, counts, and can be held."""

    def __init__(self, answer, *, hold=False):
        self.answer = answer
        self.asked = 0
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        if not hold:
            self.go.set()

    async def __call__(self):
        self.asked += 1
        self.started.set()
        await self.go.wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


@pytest.fixture(params=["ambiguous", "running", "failed"])
async def doubtful(request, nc, namespace, key):
    """A receipt that is ambiguous, or that any caller makes so."""
    await stand(nc, namespace, key, request.param, leaseMs=200)
    await asyncio.sleep(0.23 if request.param == "running" else 0)
    return request.param


async def test_it_landed(run, key, doubtful, nc, namespace):
    verify, effect = Verifier(Landed({"id": 1})), Effect("wrong")
    async with run.call("send", ARGS, verify=verify) as call:
        assert (call.replayed, call.result, call.attempt) == (True, {"id": 1}, 1)
    assert await run.execute("send", ARGS, effect, verify=verify) == {"id": 1}
    assert (verify.asked, effect.entered) == (1, 0)
    record = await stored(nc, namespace, key)
    assert record["status"] == "completed"
    assert record["resolved"]["by"].startswith("verifier ")
    assert record["holder"]["token"] == "another"
    before = [] if doubtful == "ambiguous" else [doubtful]
    assert await history(nc, namespace, key) == [*before, "ambiguous", "completed"]


async def test_it_did_not_land(run, key, doubtful, nc, namespace):
    verify, effect = Verifier(NotLanded()), Effect("second")
    assert await run.execute("send", ARGS, effect, verify=verify) == "second"
    assert (verify.asked, effect.entered) == (1, 1)
    assert (await stored(nc, namespace, key))["attempts"] == 2
    assert "open" not in await stored(nc, namespace, key)
    before = [] if doubtful == "ambiguous" else [doubtful]
    assert await history(nc, namespace, key) == [*before, "ambiguous", "failed", "running", "completed"]


class Unsure(Exception):
    pass


@pytest.mark.parametrize("answer", [Unknown(), Unsure("no idea"), AmbiguousCall("x", revision=1, attempts=1)])
async def test_it_does_not_know(run, key, doubtful, nc, namespace, answer):
    verify, effect = Verifier(answer), Effect("wrong")
    with pytest.raises(AmbiguousCall) as caught:
        await run.execute("send", ARGS, effect, verify=verify)
    assert caught.value.key == key
    assert caught.value.__cause__ is (answer if isinstance(answer, Exception) else None)
    assert (verify.asked, effect.entered) == (1, 0)
    assert (await history(nc, namespace, key))[-1] == "ambiguous"
    # The next call asks again, and nothing more is written.
    before = await revisions(nc, namespace, key)
    with pytest.raises(AmbiguousCall):
        await run.execute("send", ARGS, effect, verify=verify)
    assert verify.asked == 2
    assert await revisions(nc, namespace, key) == before


@pytest.mark.parametrize("answer", [None, True, "landed", Landed, {"landed": True}], ids=str)
async def test_a_wrong_answer(run, key, doubtful, nc, namespace, answer):
    effect = Effect("wrong")
    with pytest.raises(InvalidSetting, match="verify"):
        await run.execute("send", ARGS, effect, verify=Verifier(answer))
    assert effect.entered == 0
    assert (await history(nc, namespace, key))[-1] == "ambiguous"


async def test_a_verifier_that_is_not_async(run, key, doubtful):
    """It cannot be awaited: that is an error of the verifier, and the call stays ambiguous."""
    effect = Effect("wrong")
    with pytest.raises((AmbiguousCall, InvalidSetting)):
        await run.execute("send", ARGS, effect, verify=lambda: NotLanded())
    assert effect.entered == 0


@pytest.mark.parametrize("result", [object(), {1: object()}, float], ids=["object", "deep", "type"])
async def test_a_result_that_cannot_be_recorded(run, key, doubtful, nc, namespace, result):
    """Told as one of the library's errors; the call stays ambiguous."""
    effect = Effect("wrong")
    with pytest.raises(NatsReceiptsError):
        await run.execute("send", ARGS, effect, verify=Verifier(Landed(result)))
    assert effect.entered == 0
    assert (await history(nc, namespace, key))[-1] == "ambiguous"


class Mail(BaseModel):
    id: str
    copies: int = 1


async def test_a_result_with_a_type(run, key, doubtful):
    verify = Verifier(Landed(Mail(id="m-1")))
    assert await run.execute("send", ARGS, Effect("wrong"), verify=verify, result_type=Mail) == Mail(id="m-1")


async def test_a_large_result(run, key, doubtful, toolkit):
    big = b"\x00" * 2_000_000
    assert await run.execute("send", ARGS, Effect("wrong"), verify=Verifier(Landed(big))) == big
    assert (await toolkit.receipts.get(key)).large


async def test_it_may_take_the_call(run, key, doubtful):
    seen = []

    async def verify(call):
        seen.append((call.key, call.idempotency_key, call.replayed))
        return Landed("found")

    assert await run.execute("send", ARGS, Effect("wrong"), verify=verify) == "found"
    assert seen == [(key, key.idempotency_key, False)]


async def test_it_is_not_asked_on_a_fresh_or_a_replayed_call(run):
    verify = Verifier(NotLanded())
    assert await run.execute("send", ARGS, Effect("first"), verify=verify) == "first"
    assert await run.execute("send", ARGS, Effect("wrong"), verify=verify) == "first"
    assert verify.asked == 0


async def test_it_is_not_asked_where_no_effect_is_in_doubt(run, key, nc, namespace):
    verify = Verifier(Landed("wrong"))
    await stand(nc, namespace, key, "not applied")
    assert await run.execute("send", ARGS, Effect("second"), verify=verify) == "second"
    other = run.key("send", [2])
    await stand(nc, namespace, other, "ambiguous", effect="idempotent")
    assert await run.execute("send", [2], Effect("third"), effect="idempotent", verify=verify) == "third"
    assert verify.asked == 0


async def test_it_is_not_asked_about_a_live_attempt(run, key, nc, namespace):
    verify = Verifier(NotLanded())
    await stand(nc, namespace, key, "running", leaseMs=60_000)
    with pytest.raises(NatsReceiptsError):
        await run.execute("send", ARGS, Effect("wrong"), verify=verify, wait=0)
    assert verify.asked == 0


@pytest.mark.parametrize("fault", ["none", "delay", "drop_answer"])
async def test_it_is_asked_after_the_ambiguous_write_was_acknowledged(proxy, namespace, bucket, nc, run, key, fault):
    await stand(nc, namespace, key, "running", leaseMs=200)
    await asyncio.sleep(0.23)
    seen = []

    async def verify():
        seen.append(await history(nc, namespace, key))
        return Landed("found")

    async with toolkit_of(proxy.url, namespace, lease=0.9) as far:
        judgements = lambda m: m.subject.startswith("$KV.") and said(m)["status"] == "ambiguous"  # noqa: E731
        times = 1 if fault == "drop_answer" else None
        held = getattr(proxy, "observe" if fault == "none" else fault)(judgements, count=times)
        task = asyncio.create_task(far.run("acme", "run-1").execute("send", ARGS, Effect("wrong"), verify=verify))
        await held.hit()
        if fault == "delay":
            await asyncio.sleep(0.05)
            assert seen == []
            held.cancel()
            await held.release()
        assert await task == "found"
    assert seen == [["running", "ambiguous"]]


@pytest.mark.parametrize("answer", [Landed("wrong"), NotLanded()])
@pytest.mark.parametrize("back", ["running", "completed", "failed"])
async def test_a_rival_that_takes_the_call_back_meanwhile_wins(run, key, doubtful, nc, namespace, answer, back):
    """The answer is about the revision that was ambiguous: it is dropped, and what stands there now is decided on."""
    verify, effect = Verifier(answer, hold=True), Effect("second")
    task = asyncio.create_task(run.execute("send", ARGS, effect, verify=verify, wait=0))
    await verify.started.wait()
    status = "not applied" if back == "failed" else back
    revision = await stand(nc, namespace, key, status, leaseMs=60_000, write="7" * 24)
    verify.go.set()
    if back == "completed":
        assert await task == "theirs"
    elif back == "running":
        with pytest.raises(NatsReceiptsError):
            await task
    else:
        assert await task == "second"
        assert effect.entered == 1
    kept = await revisions(nc, namespace, key)
    assert not any("resolved" in record for record in kept)
    where = [record["write"] for record in kept].index("7" * 24)
    assert len(kept) == where + (3 if back == "failed" else 1), revision


async def test_two_verifiers_at_once(server, namespace, bucket, nc, run, key):
    await stand(nc, namespace, key, "ambiguous")
    yes, no, effect = Verifier(Landed("seen"), hold=True), Verifier(NotLanded(), hold=True), Effect("second")
    async with toolkit_of(server.url, namespace) as one, toolkit_of(server.url, namespace) as two:
        tasks = [
            asyncio.create_task(toolkit.run("acme", "run-1").execute("send", ARGS, effect, verify=verify))
            for toolkit, verify in ((one, yes), (two, no))
        ]
        await yes.started.wait()
        await no.started.wait()
        yes.go.set()
        no.go.set()
        results = await asyncio.gather(*tasks)
    statuses = await history(nc, namespace, key)
    if effect.entered:
        assert results == ["second", "second"]
        assert statuses == ["ambiguous", "failed", "running", "completed"]
    else:
        assert results == ["seen", "seen"]
        assert statuses == ["ambiguous", "completed"]


@pytest.mark.parametrize("fault", ["drop_answer", "cut_after_store", "drop"])
@pytest.mark.parametrize("answer", [Landed("found"), NotLanded()])
async def test_a_lost_answer_of_what_it_saw(proxy, namespace, bucket, nc, run, key, answer, fault):
    await stand(nc, namespace, key, "ambiguous")
    effect = Effect("second")
    async with toolkit_of(proxy.url, namespace, lease=0.9) as far:
        lost = getattr(proxy, fault)(lambda m: m.subject.startswith("$KV.") and "resolved" in said(m))
        result = await far.run("acme", "run-1").execute("send", ARGS, effect, verify=Verifier(answer))
        assert len(lost.hits) == 1
    assert result == ("found" if isinstance(answer, Landed) else "second")
    assert effect.entered == (result == "second")
    statuses = outline(await revisions(nc, namespace, key))
    assert statuses == ["ambiguous", *(["completed"] if result == "found" else ["failed", "running", "completed"])]


async def test_what_it_saw_cannot_be_written(proxy, namespace, bucket, nc, run, key, monkeypatch):
    monkeypatch.setattr("natsreceipts.entering.CLAIM_PATIENCE", 0.4)
    monkeypatch.setattr("natsreceipts.attempts.CLAIM_PATIENCE", 0.4)
    await stand(nc, namespace, key, "ambiguous")
    effect = Effect("wrong")
    async with toolkit_of(proxy.url, namespace, lease=0.6) as far:
        proxy.drop(lambda m: m.subject.startswith("$KV.") and "resolved" in said(m), count=None)
        with pytest.raises(NatsReceiptsError):
            await far.run("acme", "run-1").execute("send", ARGS, effect, verify=Verifier(NotLanded()))
    assert effect.entered == 0
    assert await history(nc, namespace, key) == ["ambiguous"]


async def test_cancelled_while_it_is_asked(run, key, doubtful, nc, namespace):
    verify, effect = Verifier(NotLanded(), hold=True), Effect("wrong")
    task = asyncio.create_task(run.execute("send", ARGS, effect, verify=verify))
    await verify.started.wait()
    before = await history(nc, namespace, key)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert before == await history(nc, namespace, key)
    assert before[-1] == "ambiguous"
    assert effect.entered == 0


ITSELF = """
import asyncio, sys
from natsreceipts import NatsReceiptsError, NotLanded, connect

async def main():
    async with connect(sys.argv[1], namespace=sys.argv[2], lease=6.0) as toolkit:
        run = toolkit.run("acme", "run-1")
        async def body():
            print("entered")
        async def verify():
            await run.execute("send", {"to": "a@b.c"}, body, verify=verify)
            return NotLanded()
        try:
            await run.execute("send", {"to": "a@b.c"}, body, verify=verify)
        except NatsReceiptsError as error:
            print(type(error).__name__)

asyncio.run(main())
"""


async def test_it_repeats_the_call_itself(server, namespace, bucket, nc, run, key):
    """That is an error of the verifier's, and no deadlock. In a process of its own, which can be ended in any case."""
    await stand(nc, namespace, key, "ambiguous")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ITSELF, server.url, namespace), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert out.decode().split() == ["AmbiguousCall"]


async def test_a_held_effect_that_a_verifier_speaks_against(server, namespace, run, key, nc):
    """NotLanded of a call that is in its body after all: the late result goes over it as long as nobody was let in."""
    await stand(nc, namespace, key, "ambiguous")
    verify = Verifier(NotLanded())
    effect = Effect("second", hold=True)
    task = asyncio.create_task(run.execute("send", ARGS, effect, verify=verify))
    await effect.started.wait()
    # The first holder comes back: the second attempt was granted, so it is refused.
    kept = await revisions(nc, namespace, key)
    assert [record["status"] for record in kept] == ["ambiguous", "failed", "running"]
    effect.go.set()
    assert await task == "second"


async def test_a_verifier_may_guard_calls_of_its_own(run, key, doubtful):
    async def verify():
        return Landed(await run.execute("look", ARGS, Effect("found")))

    assert await run.execute("send", ARGS, Effect("wrong"), verify=verify) == "found"
    assert await run.execute("look", ARGS, Effect("wrong")) == "found"


async def test_bad_verifiers_are_refused_before_anything_is_written(run, nc, namespace):
    async with no_writes(nc, namespace):
        for bad in ("verify", 1, Landed(1)):
            with pytest.raises(InvalidSetting):
                await run.execute("send", ARGS, Effect("wrong"), verify=bad)


async def test_it_is_asked_once_for_executions_that_are_shared(run, key, doubtful):
    verify = Verifier(Landed("found"))
    outcomes = await asyncio.gather(*(run.execute("send", ARGS, Effect("wrong"), verify=verify) for _ in range(5)))
    assert outcomes == ["found"] * 5
    assert verify.asked == 1
