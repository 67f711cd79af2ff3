"""A holder that is cut off, and what others do meanwhile, in every order: one effect for each attempt that was granted.

A scenario is a word of these letters; the holder is in its body and cut off from the start:

    E  the holder's body ends
    T  its connection flows again, with all that it sent meanwhile
    A  another worker makes the same call
    B  the same, and where it is let in it stays in its body to the end
    C  a person says that it landed
    F  a person says that it did not land and can no longer
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest
from scenes import check_history, resolved_over
from support import Effect, revisions, toolkit_of, until

from natsreceipts import AmbiguousCall, CallInFlight, LeaseLost
from natsreceipts.testing import FaultProxy

LEASE = 0.5
MINE, SECOND, SEEN = "mine", "second", "seen"


def words(letters):
    return sorted({"".join(order) for order in itertools.permutations(letters)})


ALL = [
    *words("ET"),
    *words("AET"),
    *words("CET"),
    *words("FET"),
    *words("ACET"),
    *words("AFET"),
    *random.Random(7).sample(words("AAFET"), 20),
    *words("BFET"),
]
GROUPS = [ALL[n::10] for n in range(10)]


class Scene:
    """One scenario: what is expected is computed beside what is done."""

    def __init__(self, word, near, holder, proxy, nc, namespace, effect):
        self.word = word
        self.near = near
        self.nc = nc
        self.namespace = namespace
        self.proxy = proxy
        self.effect = effect
        self.args = {"word": word}
        self.run = near.run("acme", "run-1", effect=effect)
        self.key = self.run.key("send", self.args)
        self.mine = Effect(MINE, hold=True)
        self.second = Effect(SECOND)
        self.follower = None
        run = holder.run("acme", "run-1", effect=effect, lease=LEASE)
        self.task = asyncio.create_task(run.execute("send", self.args, self.mine))
        # What is expected: of the record, and of the holder
        self.status = "running"
        self.result = None
        self.attempts = 1
        self.alive = True
        self.ended = self.thawed = False
        self.outcome = None

    async def play(self):
        await self.mine.started.wait()
        await self.proxy.stall()
        for letter in self.word:
            await getattr(self, f"do_{letter.lower()}")()
            if self.alive and self.thawed:
                await self.settled()
        await self.check()

    async def receipt(self):
        return await self.near.receipts.get(self.key)

    async def do_e(self):
        self.ended = True
        self.mine.go.set()

    async def do_t(self):
        self.thawed = True
        self.revision = (await self.receipt()).revision
        await self.proxy.resume()

    async def settled(self):
        """Wait until a holder that is connected has come to terms with what stands there."""
        owns = self.status in ("running", "ambiguous") and self.attempts == 1
        if self.ended and (owns or (self.status == "failed" and self.attempts == 1)):
            self.alive, self.outcome = False, MINE
            self.status, self.result = "completed", MINE
        elif self.status == "completed" and self.result == SEEN and self.attempts == 1:
            self.alive, self.outcome = False, SEEN
        elif owns:
            # It renews, or takes the call back.
            async def back():
                now = await self.receipt()
                return now.status == "running" and now.revision > self.revision

            await until(back)
            self.status = "running"
            return
        else:
            self.alive, self.outcome = False, LeaseLost
        await asyncio.wait([self.task])

    async def do_a(self):
        call = self.run.execute("send", self.args, self.second, wait=0 if self.alive and self.thawed else 30)
        if self.status == "completed":
            assert await call == self.result
        elif self.status == "failed":
            assert await call == SECOND
            self.status, self.result, self.attempts = "completed", SECOND, 2
        elif self.alive and self.thawed:
            with pytest.raises((CallInFlight, AmbiguousCall)) as caught:
                await call
            if isinstance(caught.value, AmbiguousCall):  # right only where everything stood still for a lease
                assert await self.silent_before(caught.value.revision) > LEASE
                self.status, self.revision = "ambiguous", caught.value.revision
        else:
            with pytest.raises(AmbiguousCall):
                await call
            self.status = "ambiguous"

    async def silent_before(self, revision):
        """Seconds between a judgement and the write before it, by the server's clock."""
        written = {receipt.revision: receipt.updated for receipt in await self.near.receipts.history(self.key)}
        before = max(other for other in written if other < revision)
        return (written[revision] - written[before]).total_seconds()

    async def do_b(self):
        if self.status != "failed":
            await self.do_a()
            return
        self.second = Effect(SECOND, hold=True)
        self.follower = asyncio.create_task(self.run.execute("send", self.args, self.second))
        await self.second.started.wait()
        self.status, self.attempts = "running", 2

    async def do_c(self):
        await self.resolve("completed", completed=SEEN)

    async def do_f(self):
        await self.resolve("failed", not_applied=True)

    async def resolve(self, status, **outcome):
        if self.status in ("completed", "failed") or self.follower is not None:
            return
        await resolved_over(self.near, self.key, **outcome)
        self.status = status
        self.result = SEEN if status == "completed" else None

    async def check(self):
        async with asyncio.timeout(60):
            if self.outcome is LeaseLost:
                with pytest.raises(LeaseLost) as caught:
                    await self.task
                # With the result of a body that had ended: that effect has happened, and is on no record.
                cut_off = self.ended and self.word.index("E") < self.word.index("T")
                assert (caught.value.has_result, caught.value.result) == ((True, MINE) if cut_off else (False, None))
            else:
                assert await self.task == self.outcome
        if self.follower is not None:
            self.second.go.set()
            assert await self.follower == SECOND
            self.status, self.result = "completed", SECOND
        receipt = await self.receipt()
        assert (receipt.status, receipt.attempts) == (self.status, self.attempts)
        if self.status == "completed":
            assert receipt.result == self.result
            assert await self.run.execute("send", self.args, Effect("wrong")) == self.result
        assert self.mine.entered == 1
        assert self.second.entered == self.attempts - 1
        check_history(await revisions(self.nc, self.namespace, self.key))


@pytest.mark.parametrize("group", GROUPS, ids=range(len(GROUPS)))
async def test_every_order(server, namespace, bucket, nc, group):
    """Many scenarios at once, each with a connection of its own for its holder."""

    async def scene(word, near):
        async with (
            FaultProxy("127.0.0.1", server.port) as proxy,
            toolkit_of(proxy.url, namespace, lease=LEASE, worker=word) as holder,
        ):
            playing = Scene(word, near, holder, proxy, nc, namespace, "opaque")
            try:
                await playing.play()
            except Exception as error:
                error.add_note(f"in scenario {word}, expected {playing.status}, {playing.outcome}")
                raise
            finally:
                await proxy.resume()
                playing.mine.go.set()
                playing.second.go.set()
                await asyncio.wait([task for task in (playing.task, playing.follower) if task is not None])

    async with toolkit_of(server.url, namespace, lease=LEASE, history=64) as near:
        outcomes = await asyncio.gather(*(scene(word, near) for word in group), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


def test_there_are_enough_orders():
    assert len(ALL) >= 80


@pytest.mark.parametrize("ends", ["while cut off", "after it", "never"])
@pytest.mark.parametrize("effect", ["idempotent", "resumable"])
async def test_a_resumable_holder_that_is_cut_off(server, namespace, bucket, nc, effect, ends):
    """Its body is ended by a lease of silence; another attempt follows and its result is the call's."""
    async with (
        toolkit_of(server.url, namespace, lease=LEASE) as near,
        FaultProxy("127.0.0.1", server.port) as proxy,
        toolkit_of(proxy.url, namespace, lease=LEASE) as far,
    ):
        mine, second = Effect(MINE, hold=True), Effect(SECOND)
        task = asyncio.create_task(far.run("acme", "run-1").execute("send", [1], mine, effect=effect))
        await mine.started.wait()
        await proxy.stall()
        if ends == "while cut off":
            mine.go.set()
        run = near.run("acme", "run-1")
        assert await run.execute("send", [1], second, effect=effect) == SECOND
        await proxy.resume()
        if ends == "after it":
            mine.go.set()
        with pytest.raises(LeaseLost) as caught:
            await task
        if ends != "after it":  # then it ends before it is told, or the other way round
            assert caught.value.has_result == (ends == "while cut off")
        assert (mine.entered, second.entered) == (1, 1)
        key = run.key("send", [1])
        check_history(await revisions(nc, namespace, key))
        receipt = await near.receipts.get(key)
        assert (receipt.result, receipt.attempts) == (SECOND, 2)


@pytest.mark.parametrize("how", ["completed", "failed", "ambiguous"])
async def test_renewals_that_are_held_back_and_land_late(server, namespace, bucket, nc, how):
    """Ghosts of a holder that was judged or settled meanwhile: not one of them is stored."""
    async with (
        toolkit_of(server.url, namespace, lease=LEASE) as near,
        FaultProxy("127.0.0.1", server.port) as proxy,
        toolkit_of(proxy.url, namespace, lease=LEASE) as far,
    ):
        run = near.run("acme", "run-1")
        key = run.key("send", [1])
        mine = Effect(MINE, hold=True)
        task = asyncio.create_task(far.run("acme", "run-1").execute("send", [1], mine))
        await mine.started.wait()
        ghosts = proxy.delay(lambda m: m.subject.startswith("$KV."), count=None)
        await ghosts.hit()
        if how == "ambiguous":
            with pytest.raises(AmbiguousCall):
                await run.execute("send", [1], Effect("wrong"))
        else:
            await resolved_over(near, key, **({"completed": SEEN} if how == "completed" else {"not_applied": True}))
        before = await revisions(nc, namespace, key)
        ghosts.cancel()
        while ghosts.held:
            assert b"10071" in (await ghosts.release()).payload
        mine.go.set()
        if how == "failed":
            # Its heartbeat finds out before the body's end, or the end goes over it.
            with contextlib.suppress(LeaseLost):
                assert await task == MINE
        else:
            assert await task == (SEEN if how == "completed" else MINE)
        after = await revisions(nc, namespace, key)
        assert [r["write"] for r in after[: len(before)]] == [r["write"] for r in before]
        check_history(after)


@pytest.mark.parametrize("follower", [False, True])
@pytest.mark.parametrize("how", ["swallows its cancellation", "goes on"])
async def test_a_body_that_ends_over_a_persons_failed(server, namespace, bucket, nc, how, follower):
    """It has happened all the same: that stands as long as no new attempt was granted."""
    on_lost = "continue" if how == "goes on" else "cancel"
    async with toolkit_of(server.url, namespace, lease=LEASE) as one, toolkit_of(server.url, namespace) as two:
        run = two.run("acme", "run-1")
        key = run.key("send", [1])
        lost, go, second = asyncio.Event(), asyncio.Event(), Effect(SECOND)

        async def body(call):
            try:
                while not call.lost:
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                assert how == "swallows its cancellation"
            lost.set()
            await go.wait()
            return MINE

        task = asyncio.create_task(one.run("acme", "run-1").execute("send", [1], body, on_lost=on_lost))

        async def claimed():
            return await two.receipts.get(key)

        await until(claimed)
        await resolved_over(two, key, not_applied=True)
        await lost.wait()
        if follower:
            assert await run.execute("send", [1], second) == SECOND
        go.set()
        if follower:
            with pytest.raises(LeaseLost) as caught:
                await task
            assert (caught.value.has_result, caught.value.result) == (True, MINE)
        else:
            assert await task == MINE
        assert await run.execute("send", [1], Effect("wrong")) == (SECOND if follower else MINE)
        check_history(await revisions(nc, namespace, key))
