"""A hypothesis state machine: three workers, a person and lost answers, and after every step a legal history.

Where `test_state_machine.py` lets many things happen at once, this one does one thing at a time, so that a failure
shrinks to a short story.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scenes import check_history
from support import bucket_of, client_of, revisions, toolkit_of

from natsreceipts import AmbiguousCall, CallInFlight, LeaseLost, NotApplied, NotRecorded
from natsreceipts.testing import FaultProxy

LEASE = 0.5
NAMES = st.sampled_from(["a", "b", "c"])
CALLS = st.sampled_from([1, 2])
serial = itertools.count()


class Worker:
    """One worker behind a proxy of its own, and the call that it is in, if it is in one."""

    def __init__(self, proxy, toolkit):
        self.proxy = proxy
        self.toolkit = toolkit
        self.task = None
        self.call = None
        self.entered = asyncio.Event()
        self.end = None


class Calls(RuleBasedStateMachine):
    url = ""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.namespace = f"stateful{next(serial)}x{id(self)}"
        self.workers = {}
        self.effects = []
        self.said_not_applied = []
        self.results = {}

    def do(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @initialize()
    def begin(self):
        self.do(self._begin())

    async def _begin(self):
        self.stack = contextlib.AsyncExitStack()
        port = int(self.url.rpartition(":")[2])
        self.nc = await self.stack.enter_async_context(client_of(self.url))
        whole = {"lease": LEASE, "history": 1000}  # so that the check sees every revision
        self.person = await self.stack.enter_async_context(toolkit_of(self.url, self.namespace, **whole))
        for name in ("a", "b", "c"):
            proxy = await self.stack.enter_async_context(FaultProxy("127.0.0.1", port))
            toolkit = await self.stack.enter_async_context(toolkit_of(proxy.url, self.namespace, lease=LEASE))
            self.workers[name] = Worker(proxy, toolkit)

    def key(self, call):
        return self.person.run("acme", "run").key("pay", call)

    @rule(name=NAMES, call=CALLS)
    def begins(self, name, call):
        """A worker that is idle makes a call: it is let in, or told why not."""
        worker = self.workers[name]
        if worker.task is None:
            self.do(self._begins(worker, call))

    async def _begins(self, worker, call):
        worker.entered.clear()
        worker.end = self.loop.create_future()

        async def body(guarded):
            self.effects.append((call, guarded.attempt))
            worker.entered.set()
            return await worker.end

        worker.call = call
        worker.task = asyncio.create_task(worker.toolkit.run("acme", "run").execute("pay", call, body, wait=0))
        entered = asyncio.create_task(worker.entered.wait())
        await asyncio.wait([worker.task, entered], return_when=asyncio.FIRST_COMPLETED)
        entered.cancel()
        await asyncio.wait([entered])
        if not worker.entered.is_set():
            await self._ended(worker)

    async def _ended(self, worker):
        call, task = worker.call, worker.task
        worker.task = None
        try:
            result = await task
        except (CallInFlight, AmbiguousCall, LeaseLost, NotRecorded, NotApplied, RuntimeError, asyncio.CancelledError):
            return
        assert self.results.setdefault(call, result) == result, "two results for one call"

    @rule(name=NAMES, how=st.sampled_from(["ends", "fails", "not applied", "cancelled"]))
    def ends(self, name, how):
        """The body of a worker ends in one way or another."""
        worker = self.workers[name]
        if worker.task is None:
            return
        if how == "cancelled":
            worker.task.cancel()
        elif not worker.end.done():
            if how == "ends":
                worker.end.set_result(f"result {next(serial)}")
            else:
                if how == "not applied":
                    self.said_not_applied.append(worker.call)
                error = NotApplied("refused") if how == "not applied" else RuntimeError("reset")
                worker.end.set_exception(error)
        self.do(self._ended(worker))

    @rule(name=NAMES, fault=st.sampled_from(["drop_answer", "cut_after_store", "drop", "duplicate"]))
    def loses(self, name, fault):
        """The next write of a worker is lost, or its answer is."""
        getattr(self.workers[name].proxy, fault)(f"$KV.{bucket_of(self.namespace)}.>")

    @rule(call=CALLS, landed=st.booleans())
    def settles(self, call, landed):
        """A person settles an ambiguous call that nobody is in."""
        if any(worker.task is not None and worker.call == call for worker in self.workers.values()):
            return
        self.do(self._settles(call, landed))

    async def _settles(self, call, landed):
        receipt = await self.person.receipts.get(self.key(call))
        if receipt is None or receipt.status != "ambiguous":
            return
        said = {"completed": f"by hand {call}"} if landed else {"not_applied": True}
        if not landed:
            self.said_not_applied.append(call)
        settled = await self.person.receipts.resolve(
            receipt.key, revision=receipt.revision, by="ann", reason="looked", **said
        )
        if landed:
            self.results[call] = settled.result

    @precondition(lambda self: any(worker.task is not None for worker in self.workers.values()))
    @rule(name=NAMES)
    def stalls(self, name):
        """A worker in a call hears nothing for longer than its lease, and then goes on."""
        worker = self.workers[name]
        if worker.task is not None:
            self.do(self._stalls(worker))

    async def _stalls(self, worker):
        await worker.proxy.stall()
        with contextlib.suppress(AmbiguousCall, CallInFlight):
            await self.person.run("acme", "run").execute("pay", worker.call, _never, wait=2 * LEASE)
        await worker.proxy.resume()

    @invariant()
    def the_history_is_legal(self):
        if self.workers:
            self.do(self._check())

    async def _check(self):
        for call in (1, 2):
            records = await revisions(self.nc, self.namespace, self.key(call))
            if records:
                check_history(records, given_up=[record["holder"]["token"] for record in records if "holder" in record])
            entered = sum(1 for made, _ in self.effects if made == call)
            assert entered <= 1 + self.said_not_applied.count(call), "an opaque effect was entered twice"

    def teardown(self):
        if self.workers:
            self.do(self._finish())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    async def _finish(self):
        for worker in self.workers.values():
            if worker.task is not None:
                worker.task.cancel()
                await self._ended(worker)
        await self.stack.aclose()


async def _never():
    raise AssertionError("a person's look is never an attempt: the call was claimed before")


@pytest.mark.timeout(400)  # a failure takes its time to shrink
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_one_thing_at_a_time(server):
    Calls.url = server.url
    run_state_machine_as_test(
        Calls,
        settings=settings(
            max_examples=10,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
