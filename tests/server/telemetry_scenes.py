"""One worker's day, with everything in it that a toolkit tells its hooks of: a tool of its own for each scene."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import Context

import pytest
from support import Effect, bucket_of, put, said, toolkit_of

from natsreceipts import AmbiguousCall, CallInFlight, CallWithdrawn, CorruptRecord, LeaseLost, NotApplied, NotRecorded
from natsreceipts.run import delivered

SECRETS = ("ann@example.com", "s3cret-result", "s3cret-error")
"""An argument, a result and an error's text: what nothing that is told may hold."""

ARGS = {"to": SECRETS[0]}
RESULT = {"id": SECRETS[1]}

EXPECTED = {
    "fresh": ["execute 1", "completed 1", "claim conflict", "replay 1", "replay 1 known", "replay 1"],
    "ambiguous": ["execute 1", "ambiguous 1", "claim conflict", "ambiguous 0 AmbiguousCall"],
    "retried": ["execute 1", "failed 1", "claim conflict", "execute 2", "completed 2"],
    "doubted": ["claim landed", "execute 1", "settle landed", "completed 1"],
    "overtaken": ["claim not_landed", "claim conflict", "replay 1"],
    "silent": ["execute 1", "renewal failed 1", "completed 1"],
    "lost": ["execute 1", "renew conflict", "lost lease 1", "settle conflict", "lost 1"],
    "held": ["claim conflict", "wait 0 CallInFlight"],
    "withdrawn": ["claim conflict", "withdrawn 0 CallWithdrawn"],
    "corrupt": ["claim conflict", "refused 0 CorruptRecord"],
    "kept": ["execute 1", "not_recorded 1", "settle landed", "completed 1", "claim conflict", "replay 1"],
    "once": ["execute 1", "completed 1"],
}
"""By tool, in order."""


def steady(tool, shorts):
    """What a scene tells, without what it may tell on a slow machine: a lease of 3 s is none for that."""
    if tool != "silent":
        return shorts
    return list(dict.fromkeys(each for each in shorts if each != "settle landed"))


async def a_day(server, proxy, namespace, nc, hooks, *, around=contextlib.nullcontext):
    """Let all of it happen, on a real server, with ``around(tool)`` around each scene."""
    async with (
        toolkit_of(proxy.url, namespace, hooks=hooks) as toolkit,
        toolkit_of(server.url, namespace) as rival,
    ):
        day = _Day(proxy, namespace, nc, toolkit, rival)
        for tool in (*EXPECTED, "looked"):
            with around(tool):
                await getattr(day, tool)()


@contextlib.contextmanager
def impatient():
    """Lost answers are waited for no longer than this. Only where they do get lost: a slow machine loses none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("natsreceipts.fence._SHORTEST_TRY", 0.3)
        yield


class _Day:
    def __init__(self, proxy, namespace, nc, toolkit, rival):
        self.proxy = proxy
        self.namespace = namespace
        self.nc = nc
        self.toolkit = toolkit
        self.run = toolkit.run("acme", "order-42")
        self.rival = rival

    def by_rival(self, tool, effect):
        """The same call by another worker, which knows of no body around it."""
        call = self.rival.run("acme", "order-42").execute(tool, ARGS, effect)
        return asyncio.create_task(call, context=Context())

    def writes(self, tool, status, *, first=None):
        """The worker's writes of this status to the tool's receipt; ``first``: claims only, or none."""

        def matches(message):
            if not message.subject.startswith(f"$KV.{bucket_of(self.namespace)}.acme.order-42.{tool}."):
                return False
            is_first = message.headers["Nats-Expected-Last-Subject-Sequence"] == "0"
            return said(message)["status"] == status and first in (None, is_first)

        return matches

    async def fresh(self):
        assert await self.run.execute("fresh", ARGS, Effect(RESULT)) == RESULT
        assert await self.run.execute("fresh", ARGS, Effect("wrong")) == RESULT
        async with self.run:
            assert await self.run.execute("fresh", ARGS, Effect("wrong")) == RESULT
        scope = delivered.set(2)
        try:
            assert await self.run.execute("fresh", ARGS, Effect("wrong")) == RESULT
        finally:
            delivered.reset(scope)

    async def ambiguous(self):
        with pytest.raises(TimeoutError):
            await self.run.execute("ambiguous", ARGS, Effect(TimeoutError(SECRETS[2])))
        with pytest.raises(AmbiguousCall):
            await self.run.execute("ambiguous", ARGS, Effect("wrong"))

    async def retried(self):
        with pytest.raises(NotApplied):
            await self.run.execute("retried", ARGS, Effect(NotApplied(SECRETS[2])))
        assert await self.run.execute("retried", ARGS, Effect(RESULT)) == RESULT

    async def doubted(self):
        self.proxy.drop_answer(self.writes("doubted", "running"))
        self.proxy.drop_answer(self.writes("doubted", "completed"))
        with impatient():
            assert await self.run.execute("doubted", ARGS, Effect(RESULT)) == RESULT

    async def overtaken(self):
        lost = self.proxy.drop(self.writes("overtaken", "running"), count=None)
        with impatient():
            late = asyncio.create_task(self.run.execute("overtaken", ARGS, Effect("wrong")))
            await lost.hit()
            assert await self.by_rival("overtaken", Effect(RESULT)) == RESULT  # who is not behind the proxy
            lost.cancel()
            assert await late == RESULT

    async def silent(self):
        async with self.run.call("silent", ARGS, lease=3.0) as call:
            lost = self.proxy.drop(self.writes("silent", "running", first=False), count=None)
            with pytest.raises(LeaseLost):
                await call.renew()
            lost.cancel()
            call.result = RESULT

    async def lost(self):
        with pytest.raises(LeaseLost):
            async with self.run.call("lost", ARGS) as call:
                await self.rival.receipts.resolve(
                    call.key, revision=call.revision, not_applied=True, by="ann", reason="x", even_if_running=True
                )
                assert await self.by_rival("lost", Effect(RESULT)) == RESULT
                with contextlib.suppress(LeaseLost):
                    await call.renew()
                call.result = RESULT

    async def held(self):
        effect = Effect(RESULT, hold=True)
        holder = self.by_rival("held", effect)
        await effect.started.wait()
        with pytest.raises(CallInFlight):
            await self.run.execute("held", ARGS, Effect("wrong"), wait=0)
        effect.go.set()
        assert await holder == RESULT

    async def withdrawn(self):
        session = self.toolkit.sessions.open("acme", "chat")
        asked = {
            "role": "assistant",
            "content": [{"type": "toolCall", "id": "c", "name": "withdrawn", "arguments": ARGS}],
        }
        await session.append({"role": "user", "content": SECRETS[0]})
        entry = await session.append(asked, run="order-42")
        assert len((await session.wake(guarded={"withdrawn": lambda args: args})).recovered) == 1
        with pytest.raises(CallWithdrawn):
            await self.run.execute("withdrawn", ARGS, Effect("wrong"), entry=entry)

    async def corrupt(self):
        await put(self.nc, self.namespace, self.run.key("corrupt", ARGS), b"not a record")
        with pytest.raises(CorruptRecord):
            await self.run.execute("corrupt", ARGS, Effect("wrong"))

    async def kept(self):
        lost = self.proxy.drop(self.writes("kept", "completed"), count=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("natsreceipts.guard._SETTLE_PATIENCE", 0.5)
            with pytest.raises(NotRecorded):
                await self.run.execute("kept", ARGS, Effect(RESULT))
        lost.cancel()
        assert await self.run.execute("kept", ARGS, Effect("wrong")) == RESULT

    async def once(self):
        effect = Effect(RESULT, hold=True)
        both = [asyncio.create_task(self.run.execute("once", ARGS, effect)) for _ in range(2)]
        await effect.started.wait()
        effect.go.set()
        assert await asyncio.gather(*both) == [RESULT, RESULT]

    async def looked(self):
        """A read leaves no receipt, and is not told."""
        assert await self.run.execute("looked", ARGS, Effect(RESULT), effect="read") == RESULT
