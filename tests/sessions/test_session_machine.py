"""A hypothesis state machine over one session: two hosts, stalled workers, a person, the vendor's rules at each step.

One thing at a time, in any order that hypothesis thinks of: what a model was told of a call stays true for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import pytest
from dialect_shapes import result, shaped, user
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from session_support import DIALECTS, Desk, assistant, last_seqs
from support import client_of, revisions, toolkit_of
from vendor_rules import RULES

from natsreceipts import AmbiguousCall, CallWithdrawn, InvalidName, InvalidSetting, NotApplied, SessionConflict
from natsreceipts.transcript import tool_calls_of

NEVER = "interrupted_never_started"
HOSTS = st.sampled_from(["a", "b"])
IDS = st.lists(st.sampled_from(["call_0", "call_1", "call_2"]), min_size=1, max_size=3, unique=True)
serial = itertools.count()


class Session(RuleBasedStateMachine):
    url = ""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.namespace = f"machine{next(serial)}x{id(self)}"
        self.stack = None
        self.sites = []
        """(entry, id, args) of every call that was ever logged: a worker may hold each of them still."""
        self.effects = []
        """(place, id, n) of every effect that was entered."""
        self.no_more = {}
        """(place, id) of calls of which the model was told that they never ran, and did not."""
        self.may_repeat = {}
        """By n, how often it was said that the effect had not landed."""
        self.landed = set()

    def do(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @initialize(dialect=st.sampled_from(DIALECTS))
    def begin(self, dialect):
        self.dialect = dialect
        self.do(self._begin())

    async def _begin(self):
        self.stack = contextlib.AsyncExitStack()
        self.nc = await self.stack.enter_async_context(client_of(self.url))
        self.hosts = {}
        for name in ("a", "b"):
            toolkit = await self.stack.enter_async_context(toolkit_of(self.url, self.namespace, history=1000))
            self.hosts[name] = Desk(toolkit, self.nc, self.namespace, self.dialect, "chat")

    async def put(self, name, message, **options):
        """Append, again where the log had missed something."""
        log = self.hosts[name].log
        try:
            return await log.append(message, **options)
        except SessionConflict:
            return await log.append(message, **options)

    # ------------------------------------------------------------------ what hosts do

    @rule(name=HOSTS)
    def says(self, name):
        self.do(self._says(name))

    async def _says(self, name):
        for message in shaped([user("more")], self.dialect):
            await self.put(name, message)
        await self.check()

    @rule(name=HOSTS, ids=IDS, first=st.integers(0, 2))
    def asks(self, name, ids, first):
        self.do(self._asks(name, ids, first))

    async def _asks(self, name, ids, first):
        calls = [(call_id, "send", {"n": first + n % 2}) for n, call_id in enumerate(ids)]
        for message in assistant(self.dialect, *calls):
            try:
                entry = await self.put(name, message, run="run-1")
            except InvalidSetting:
                suspended = (await self.hosts[name].log.load()).suspended
                assert suspended.intersection(call.id for call in tool_calls_of(message, dialect=self.dialect))
                break
            for call in tool_calls_of(entry.body, dialect=self.dialect):
                self.sites.append((entry, call.id, call.arguments))
        await self.check()

    @precondition(lambda self: self.sites)
    @rule(name=HOSTS, which=st.integers(0, 30), ends=st.sampled_from(["ok", "ok", "not applied", "landed", "gone"]))
    def works(self, name, which, ends):
        self.do(self._works(name, self.sites[-1 - which % len(self.sites)], ends))

    async def _works(self, name, site, ends):
        entry, call_id, args = site

        async def effect():
            place = (entry.seq, call_id)
            assert place not in self.no_more, f"it ran after the model was told: {self.no_more[place]}"
            n = args["n"]
            self.effects.append((*place, n))
            assert [each[2] for each in self.effects].count(n) <= 1 + self.may_repeat.get(n, 0), "it ran twice"
            if ends == "not applied":
                self.effects.pop()
                raise NotApplied("refused")
            if ends in ("ok", "landed"):
                self.landed.add(n)
            if ends in ("landed", "gone"):
                raise ConnectionResetError(ends)
            return f"result {n}"

        with contextlib.suppress(CallWithdrawn, AmbiguousCall, NotApplied, ConnectionResetError):
            value = await self.hosts[name].run.execute("send", args, effect, entry=entry)
            if entry is self.sites[-1][0]:  # a worker that is not behind
                for message in shaped([result(call_id, value)], self.dialect):
                    await self.put(name, message)
        await self.check()

    @rule(name=HOSTS)
    def wakes(self, name):
        self.do(self._wakes(name))

    async def _wakes(self, name):
        desk = self.hosts[name]
        report = await desk.wakes("send")
        view = await desk.log.context()
        RULES[self.dialect](view.messages)
        ran = [effect[:2] for effect in self.effects]
        for each in report.recovered:
            site = desk.log.store.branch().sites[each.tool_call_id]
            for entry in {site.entry.seq, site.claims_from.seq}:  # its worker may not know of the resume
                place = (entry, each.tool_call_id)
                if each.error_kind == NEVER:
                    assert place not in ran, "told that it never started, and it ran"
                if each.error_kind == NEVER or (each.error_kind is None and each.said == "failed"):
                    self.no_more[place] = each.text
        other = self.hosts["b" if name == "a" else "a"]
        before = await last_seqs(self.nc, self.namespace)
        assert (await other.wakes("send")).recovered == ()
        assert await last_seqs(self.nc, self.namespace) == before
        await self.check()

    @rule(name=HOSTS)
    def settles(self, name):
        self.do(self._settles(name))

    async def _settles(self, name):
        """A person looks at what is ambiguous, and says what is so."""
        desk = self.hosts[name]
        for n in range(4):
            receipt = await desk.toolkit.receipts.get(desk.key("send", {"n": n}))
            if receipt is None or receipt.status != "ambiguous":
                continue
            said = {"completed": f"result {n}"} if n in self.landed else {"not_applied": True}
            await desk.toolkit.receipts.resolve(
                receipt.key, revision=receipt.revision, by="ada", reason="I looked", **said
            )
            if n not in self.landed:
                self.may_repeat[n] = self.may_repeat.get(n, 0) + 1
        await self.check()

    @rule(name=HOSTS, ids=IDS, verb=st.sampled_from(["suspend", "resume"]))
    def holds(self, name, ids, verb):
        self.do(self._holds(name, ids, verb))

    async def _holds(self, name, ids, verb):
        log = self.hosts[name].log
        await log.load()
        with contextlib.suppress(InvalidName, InvalidSetting):
            entry = await getattr(log, verb)(ids)
            if verb == "resume":
                for call_id in ids:
                    call = log.store.branch().sites[call_id].call
                    self.sites.append((entry, call_id, call.arguments))
        await self.check()

    @rule(name=HOSTS, keep=st.one_of(st.none(), st.integers(0, 5)))
    def compacts(self, name, keep):
        self.do(self._compacts(name, keep))

    async def _compacts(self, name, keep):
        log = self.hosts[name].log
        await log.load()
        shown = log.store.branch().shown
        keep_from = shown[-1 - keep % len(shown)] if shown and keep is not None else None
        with contextlib.suppress(InvalidName, InvalidSetting):
            await log.compact(shaped([user("so far")], self.dialect)[0], keep_from=keep_from)
        await self.check()

    @rule(name=HOSTS, back=st.integers(1, 6))
    def branches(self, name, back):
        self.do(self._branches(name, back))

    async def _branches(self, name, back):
        log = self.hosts[name].log
        entries = (await log.load()).entries
        if entries:
            await log.branch(entries[-1 - back % len(entries)])
            await self._says(name)

    # ------------------------------------------------------------------ what must hold

    async def check(self):
        views = []
        for desk in self.hosts.values():
            view = await desk.log.context()
            RULES[self.dialect](view.messages)
            views.append(json.dumps(view.messages))
        assert views[0] == views[1], "two workers read the same log, and not the same"
        fresh = self.hosts["a"].at(self.hosts["b"].toolkit)
        assert json.dumps((await fresh.log.context()).messages) == views[0], "a log that read on is not as a new one"
        for mine, new in zip(await _state(self.hosts["a"].log), await _state(fresh.log), strict=True):
            assert mine == new

    def teardown(self):
        if self.stack is not None:
            self.do(self._finish())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    async def _finish(self):
        for n in range(4):
            fences = {}
            for record in await revisions(self.nc, self.namespace, self.hosts["a"].key("send", {"n": n})):
                now = record.get("fences") or {}
                assert all(now.get(name, -1) >= place for name, place in fences.items()), "a fence went down"
                fences = now
        for stream in (f"{self.namespace}-SESSIONS", f"KV_{self.namespace}-receipts"):
            await self.nc.jetstream().delete_stream(stream)
        await self.nc.jetstream().delete_stream(f"OBJ_{self.namespace}-receipt-payloads")
        await self.stack.aclose()


async def _state(log):
    loaded = await log.load()
    branch = log.store.branch()
    sites = {call_id: (site.entry.seq, site.claims_from.seq) for call_id, site in branch.sites.items()}
    return (
        [entry.id for entry in loaded.entries],
        loaded.suspended,
        sites,
        [entry.id for entry in branch.shown],
        [entry.id for entry in loaded.all_entries],
    )


def _run(server, *, examples, steps):
    Session.url = server.url
    run_state_machine_as_test(
        Session,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.timeout(400)  # a failure takes its time to shrink
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_session_in_any_order(server):
    _run(server, examples=7, steps=14)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_many_sessions_in_any_order(server):
    _run(server, examples=300, steps=40)
