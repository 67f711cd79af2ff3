"""Workers, a person and faults at random on a real server, and the whole history of every key checked at the end.

A universe is a bucket with three workers, each behind a proxy of its own, a person, and two keys. What happens in it is
drawn from a seed; leases are tiny, so they end at any moment. Many universes run at once, since most of it is waiting.
The seed and what was done are told with a failure. ``pytest -m faults`` runs more of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from scenes import check_history
from support import bucket_of, client_of, revisions, toolkit_of

from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    LeaseLost,
    NotApplied,
    NotClaimed,
    NotRecorded,
    NotResolvable,
    StaleRevision,
    Unreachable,
)
from natsreceipts.testing import FaultProxy

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py's, of connects that were cut off

LEASE = 0.3
STEPS = 80
UNIVERSES = 10
WRITES = ("drop", "drop_answer", "cut_after_store", "duplicate")


@contextlib.contextmanager
def impatience():
    """Whoever gives up gives up while a test can see it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("entering", "attempts", "receipts"):
            patch.setattr(f"natsreceipts.{module}.CLAIM_PATIENCE", 0.8)
        patch.setattr("natsreceipts.guard._SETTLE_PATIENCE", 1.0)
        patch.setattr("natsreceipts.guard._HURRIED", 0.5)
        patch.setattr("natsreceipts.receipts._READ_PATIENCE", 0.5)
        yield


class Worker:
    def __init__(self, name, proxy, toolkit):
        self.name = name
        self.proxy = proxy
        self.toolkit = toolkit
        self.stalled = False
        self.ghosts = []


class Made:
    """One call that a worker made: its body, and what it came to."""

    def __init__(self, universe, worker, args, effect, behaviour):
        self.universe = universe
        self.worker = worker
        self.args = args
        self.effect = effect
        self.behaviour = behaviour
        self.go = asyncio.Event()
        self.entered = 0
        self.token = None
        self.result = f"{worker.name}/{len(universe.made)}"
        self.cancelled = False
        self.task = None
        self.shared = False  # whether it may have shared another's execution, and so another's outcome

    async def body(self, call):
        self.entered += 1
        self.token = call._attempt.token
        self.universe.entries.append((self.args[0], call.attempt, self.token))
        if self.effect == "resumable":
            for name in ("a", "b"):
                await call.step(name, lambda name=name: self.universe.step_ran(self.args[0], name))
        if self.behaviour == "hold":
            await self.go.wait()
        elif self.behaviour == "long":
            await asyncio.sleep(LEASE * 1.6)
        elif self.behaviour == "renew":
            await call.renew()
        elif self.behaviour == "error":
            raise OSError("halfway")
        elif self.behaviour == "not applied":
            raise NotApplied("refused")
        return self.result


class Universe:
    def __init__(self, seed, server, namespace):
        self.seed = seed
        self.random = random.Random(seed)
        self.server = server
        self.namespace = namespace
        self.done = []
        self.made = []
        self.entries = []
        self.workers = []
        self.resolves = []
        self.names = set()
        self.steps = 0
        self.effects = self.random.choice(
            [["opaque"], ["opaque"], ["opaque"], ["idempotent"], ["resumable"], ["opaque", "idempotent", "resumable"]]
        )

    def step_ran(self, key, name):
        return f"{key}/{name}"

    def a_key(self):
        """One of two, which are left behind for new ones after a while: they are completed sooner or later."""
        name = f"k{self.steps // 12 + self.random.randrange(2)}"
        self.names.add(name)
        return name

    def say(self, *what):
        self.done.append(" ".join(map(str, what)))

    async def begin(self, stack):
        self.nc = await stack.enter_async_context(client_of(self.server.url))
        self.near = await stack.enter_async_context(
            toolkit_of(self.server.url, self.namespace, lease=LEASE, history=1000)
        )
        for n in range(3):
            proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", self.server.port))
            toolkit = await stack.enter_async_context(
                toolkit_of(proxy.url, self.namespace, lease=LEASE, worker=f"w{n}")
            )
            self.workers.append(Worker(f"w{n}", proxy, toolkit))
        stack.push_async_callback(self.end)

    async def end(self):
        await self.calm()
        for bucket in (f"KV_{bucket_of(self.namespace)}", f"OBJ_{self.namespace}-receipt-payloads"):
            await self.nc.jetstream().delete_stream(bucket)

    @contextlib.contextmanager
    def telling(self):
        try:
            yield
        except BaseException as error:
            error.add_note(f"seed {self.seed}, effects {self.effects}:\n  " + "\n  ".join(self.done))
            raise

    async def live(self, steps):
        with self.telling():
            for self.steps in range(steps):
                await self.act()
            await self.calm()

    # What may happen

    async def act(self):
        act = self.random.choices(
            ["call", "fault", "delay", "release", "stall", "resume", "cut", "cancel", "finish", "resolve", "wait"],
            [10, 5, 3, 4, 1.5, 3, 1, 2, 4, 4, 5],
        )[0]
        await getattr(self, act)(self.random.choice(self.workers))

    async def call(self, worker):
        args = [self.a_key()]
        effect = self.random.choice(self.effects)
        behaviour = self.random.choices(["ok", "hold", "long", "renew", "error", "not applied"], [3, 3, 2, 1, 2, 2])[0]
        made = Made(self, worker, args, effect, behaviour)
        wait = self.random.choice([0, 0.2, 1.0])
        run = worker.toolkit.run("acme", "run-1", effect=effect, wait=wait)
        self.made.append(made)
        self.say(worker.name, "calls", args[0], effect, behaviour, f"wait={wait}", f"#{len(self.made) - 1}")
        if self.random.random() < 0.7:
            made.shared = True
            made.task = asyncio.create_task(run.execute("send", args, made.body))
        else:
            made.task = asyncio.create_task(self.by_context(run, made))
        await self.pause(0.01)

    async def by_context(self, run, made):
        async with run.call("send", made.args) as call:
            if not call.replayed:
                call.result = await made.body(call)
        return call.result

    async def fault(self, worker):
        kind, nth = self.random.choice(WRITES), self.random.choice([1, 1, 2])
        getattr(worker.proxy, kind)(lambda m: m.subject.startswith("$KV."), nth=nth)
        self.say(worker.name, kind, nth)

    async def delay(self, worker):
        worker.ghosts.append(worker.proxy.delay(lambda m: m.subject.startswith("$KV.")))
        self.say(worker.name, "delay")

    async def release(self, worker):
        for ghost in worker.ghosts:
            while ghost.held:
                answer = await ghost.release()
                self.say(worker.name, "releases", answer.payload[:60])

    async def stall(self, worker):
        worker.stalled = True
        direction = self.random.choice(["both", "to_server", "to_client"])
        await worker.proxy.stall(direction)
        self.say(worker.name, "stalls", direction)

    async def resume(self, worker):
        if worker.stalled:
            worker.stalled = False
            await worker.proxy.resume()
            self.say(worker.name, "resumes")

    async def cut(self, worker):
        await worker.proxy.cut()
        self.say(worker.name, "is cut")

    async def cancel(self, _):
        running = [made for made in self.made if not made.task.done()]
        if running:
            made = self.random.choice(running)
            made.cancelled = True
            made.task.cancel()
            self.say("cancel", f"#{self.made.index(made)}")

    async def finish(self, _):
        held = [made for made in self.made if made.behaviour == "hold" and made.entered and not made.go.is_set()]
        if held:
            made = self.random.choice(held)
            made.go.set()
            self.say("finish", f"#{self.made.index(made)}")

    async def resolve(self, worker):
        where = self.random.choice([worker.toolkit, self.near, self.near])
        names = sorted(self.names)
        self.random.shuffle(names)
        for name in names:  # one that needs it, if there is one
            key = self.near.run("acme", "run-1").key("send", [name])
            with contextlib.suppress(Unreachable):  # this machine is busy
                now = await self.near.receipts.get(key)
                if now is not None and (now.status != "completed" or name == names[-1]):
                    break
        else:
            return
        landed = self.random.random() < 0.4
        number = len(self.resolves)
        outcome = {"completed": f"person/{number}"} if landed else {"not_applied": True}
        anyway = self.random.random() < 0.3
        mine = {"key": key, "reason": f"reason {number}", "task": None}
        self.resolves.append(mine)
        mine["task"] = asyncio.create_task(
            where.receipts.resolve(
                key, revision=now.revision, by="ann", reason=mine["reason"], even_if_running=anyway, **outcome
            )
        )
        self.say("resolve", number, key.args_hash[:4], f"at {now.revision} {now.status}", outcome, f"anyway={anyway}")
        await self.pause(0.02)

    async def wait(self, _):
        await self.pause(LEASE * 0.8)

    async def pause(self, most):
        await asyncio.sleep(self.random.random() * most)

    async def calm(self):
        """Let everything through, and everything end."""
        for worker in self.workers:
            for fault in list(worker.proxy._rules):
                fault.cancel()
            await worker.proxy.resume()
            worker.stalled = False
            await self.release(worker)
        for made in self.made:
            made.go.set()
        tasks = [made.task for made in self.made] + [mine["task"] for mine in self.resolves]
        if tasks:
            async with asyncio.timeout(60):
                await asyncio.wait(tasks)

    # What must be true of it

    async def check(self):
        with self.telling():
            await self.check_all()

    async def check_all(self):
        given_up = {token for worker in self.workers for token in worker.toolkit._attempts._given_up}
        finals = {}
        for name in sorted(self.names):
            key = self.near.run("acme", "run-1").key("send", [name])
            records = await revisions(self.nc, self.namespace, key)
            self.say(f"history of {name}:", *(self.shown(record) for record in records))
            check_history(records, given_up=given_up)
            finals[name] = records[-1] if records else None
            self.check_effects(name, records, given_up)
            self.check_resolves(key, records)
        for number, made in enumerate(self.made):
            self.check_outcome(number, made, finals[made.args[0]])
        for name, record in finals.items():
            await self.check_next(name, record, given_up)

    def shown(self, record):
        error = record.get("error") or {}
        marks = ["open"] if record.get("open") else []
        marks += ["denied"] if error.get("notApplied") else []
        marks += ["resolved"] if "resolved" in record else []
        token = (record.get("holder") or {}).get("token", "")[:4]
        return f"\n    {record['status']} {record['attempts']} {record['effect']} {token} {' '.join(marks)}"

    def check_effects(self, name, records, given_up):
        entries = [(attempt, token) for key, attempt, token in self.entries if key == name]
        assert len({attempt for attempt, _ in entries}) == len(entries), "two bodies were entered in one attempt"
        claimed = {record["holder"]["token"] for record in records}
        assert {token for _, token in entries} <= claimed, "a body was entered without a claim on record"
        assert not {token for _, token in entries} & given_up, "a claim that was given up was entered"
        if self.effects == ["opaque"]:
            denials = sum(
                record["status"] == "failed" and record["error"].get("notApplied", False) for record in records
            )
            assert len(entries) <= 1 + denials, "an opaque effect was entered once too often"

    def check_resolves(self, key, records):
        for mine in self.resolves:
            if mine["key"] != key:
                continue
            stands = [record for record in records if record.get("resolved", {}).get("reason") == mine["reason"]]
            error = mine["task"].exception()
            if error is None:
                assert stands, f"a resolve is told as done and is not on record: {mine}"
                assert mine["task"].result().resolved.reason == mine["reason"]
            elif isinstance(error, StaleRevision | NotResolvable | CallInFlight):
                assert not stands, f"a resolve is told as refused and is on record: {mine}"
            else:
                assert isinstance(error, Unreachable), error

    def check_outcome(self, number, made, final):
        what = (number, made.worker.name, made.args, made.behaviour, made.entered)
        assert made.entered <= 1, what
        if made.task.cancelled():
            assert made.cancelled, what
            return
        error = made.task.exception()
        if error is None:
            assert final["status"] == "completed", (what, "a result was told and is not on record")
            assert final["result"]["json"] == made.task.result(), (what, "another result is on record")
        elif isinstance(error, NotClaimed | AmbiguousCall | CallInFlight):
            assert not made.entered, (what, "it was entered, and is told as not executed", error)
        elif isinstance(error, LeaseLost):
            assert made.entered or made.shared, what
            if error.has_result and final["status"] == "completed":
                assert final["result"]["json"] != error.result, (what, "its result is on record, and told as lost")
        elif isinstance(error, NotRecorded):
            pass  # of this call, or of an earlier one that this process kept
        else:
            assert made.entered or made.shared, (what, error)
            assert isinstance(error, OSError | NotApplied), (what, error)
            assert made.shared or made.behaviour in ("error", "not applied"), (what, error)

    async def check_next(self, name, record, given_up):
        """Whatever stands, a further call ends in the one way that it allows."""
        entered = []

        async def body():
            entered.append(name)
            return "at last"

        effect = self.effects[-1]
        run = self.near.run("acme", "run-1", effect=effect, wait=5)
        call = run.execute("send", [name], body)
        status = record["status"] if record else "absent"
        opaque = effect == "opaque" or (record and record["effect"] == "opaque")
        denied = status == "failed" and record["error"].get("notApplied")
        if status == "completed":
            assert await call == record["result"]["json"]
        elif status == "absent" or denied or not opaque:
            assert await call == "at last"
        else:
            with pytest.raises(AmbiguousCall):
                await call
        assert len(entered) <= 1
        key = run.key("send", [name])
        check_history(await revisions(self.nc, self.namespace, key), given_up=given_up)


async def many(server, namespace, seeds, steps=STEPS):
    universes = [Universe(seed, server, f"{namespace}u{n}") for n, seed in enumerate(seeds)]
    async with contextlib.AsyncExitStack() as stack:
        for universe in universes:
            await universe.begin(stack)
        with impatience():
            await together(universe.live(steps) for universe in universes)
        await together(universe.check() for universe in universes)
    return universes


async def together(work):
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if outcome is not None:
            raise outcome


@pytest.mark.parametrize("batch", range(3))
async def test_universes(server, namespace, batch):
    missing = {"completed", "ambiguous", "failed", "denied", "resolved", " 2 "}
    for further in range(0, 30, 10):  # something happens in them, on a busy machine in some more of them
        seeds = range((batch + further) * UNIVERSES, (batch + further + 1) * UNIVERSES)
        universes = await many(server, f"{namespace}b{further}", seeds)
        histories = [line for universe in universes for line in universe.done if "history of" in line]
        missing -= {word for word in missing if any(word in line for line in histories)}
        if not missing:
            return
    pytest.fail(f"in no history: {missing}")


@pytest.mark.faults
@pytest.mark.parametrize("batch", range(100, 140))
async def test_many_universes(request, server, namespace, batch):
    if "faults" not in (request.config.getoption("-m") or ""):
        pytest.skip("a long run: pytest -m faults")
    await many(server, namespace, range(batch * UNIVERSES, (batch + 1) * UNIVERSES), steps=STEPS * 2)
