"""Calls without an event loop: the body runs in the caller's thread, under the guard that async calls have."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import queue
import threading
import time

import pytest

import natsreceipts
from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    CallTimedOut,
    InvalidSetting,
    Landed,
    LeaseLost,
    NoActiveRun,
    NotApplied,
    NotLanded,
    NotRecorded,
    ResultNotSet,
    StepRepeated,
    Unknown,
    Unreachable,
    sync,
)
from natsreceipts.sync.portal import Portal

PATIENCE = 30.0


def until(look, what):
    """Wait until ``look`` gives something, and return it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {PATIENCE} s: {what}")


def never():
    raise AssertionError("this was to be replayed")


def in_thread(fn):
    """Run it in a thread; what is returned waits for its end, and returns or raises what it came to."""
    came_to = queue.SimpleQueue()

    def work():
        try:
            came_to.put((fn(), None))
        except BaseException as error:
            came_to.put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def joined():
        value, error = came_to.get(timeout=PATIENCE)
        thread.join(PATIENCE)
        if error is not None:
            raise error
        return value

    return joined


class Gated:
    """A body that says that it has begun, and ends when it may."""

    def __init__(self, result="done"):
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.result = result

    def __call__(self):
        self.begun.set()
        assert self.may_end.wait(PATIENCE)
        return self.result


# ---------------------------------------------------------------- the two doors


def test_a_call_is_executed_in_the_callers_thread_and_then_replayed(run):
    threads = []

    def fn(call):
        threads.append(threading.get_ident())
        assert (call.attempt, call.replayed, call.lost) == (1, False, False)
        assert call.idempotency_key == run.key("send", {"to": "ann"}).idempotency_key
        return ("a", 1)

    assert run.execute("send", {"to": "ann"}, fn) == ["a", 1]
    assert run.execute("send", {"to": "ann"}, never) == ["a", 1]
    assert run.execute("send", {"to": "ann"}, lambda: "other", distinct="again") == "other"
    assert threads == [threading.get_ident()]


def test_the_body_of_a_call_sets_its_result(run, toolkit):
    with run.call("send", {"to": "ann"}) as call:
        assert not call.replayed
        call.renew()
        call.result = {"id": (1, 2)}
    assert call.result == {"id": [1, 2]}
    with run.call("send", {"to": "ann"}) as again:
        assert again.replayed
        with pytest.raises(InvalidSetting, match="was replayed"):
            again.result = 1
    assert again.result == {"id": [1, 2]}
    assert again.revision == toolkit.receipts.get(call.key).revision
    with pytest.raises(InvalidSetting, match="entered once"), call:
        pass


def test_a_body_without_a_result_completes_nothing(run, toolkit):
    with pytest.raises(ResultNotSet) as raised, run.call("send", {}):
        pass
    assert raised.value.status == "ambiguous"
    assert toolkit.receipts.get(run.key("send", {})).status == "ambiguous"


@pytest.mark.parametrize("effect", ["opaque", "idempotent"])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_what_a_body_raises_comes_out_as_it_was(run, toolkit, effect, kind):
    error = kind(3)
    with pytest.raises(type(error)) as raised, run.call("send", {}, effect=effect):
        raise error
    assert raised.value is error
    assert raised.value.__traceback__.tb_next is None
    receipt = toolkit.receipts.get(run.key("send", {}))
    assert receipt.status == ("ambiguous" if effect == "opaque" else "failed")
    assert receipt.error.type == ("RuntimeError" if kind is StopIteration else kind.__name__)


def test_a_tool_says_that_it_had_no_effect(run, toolkit):
    def refused():
        raise NotApplied

    with pytest.raises(NotApplied):
        run.execute("send", {}, refused)
    with pytest.raises(KeyError):
        run.execute("send", {}, lambda: {}["x"], not_applied=(KeyError,))
    assert toolkit.receipts.get(run.key("send", {})).status == "failed"
    assert run.execute("send", {}, lambda: "sent") == "sent"
    assert toolkit.receipts.get(run.key("send", {})).attempts == 3


def test_a_call_inside_its_own_body_is_in_flight_and_another_is_not(run):
    def outer(call):
        with pytest.raises(CallInFlight, match="own body"):
            run.execute("send", {}, never)
        return run.execute("send", {"n": 2}, lambda: "inner")

    assert run.execute("send", {}, outer) == "inner"
    assert run.execute("send", {}, never) == "inner"


def test_not_applied_speaks_for_the_innermost_call_only(run, toolkit):
    def inner():
        raise NotApplied

    def outer():
        return run.execute("inner", {}, inner)

    with pytest.raises(NotApplied):
        run.execute("outer", {}, outer)
    assert toolkit.receipts.get(run.key("inner", {})).status == "failed"
    assert toolkit.receipts.get(run.key("outer", {})).status == "ambiguous"


def test_a_read_leaves_no_receipt(run, toolkit):
    assert [run.execute("look", {}, lambda: 1, effect="read"), run.execute("look", {}, lambda: 2, effect="read")] == [
        1,
        2,
    ]
    assert toolkit.receipts.get(run.key("look", {})) is None


def test_async_functions_are_refused(run, toolkit):
    async def fn():
        return 1

    with pytest.raises(InvalidSetting, match="is async"):
        run.execute("send", {}, fn)
    assert toolkit.receipts.get(run.key("send", {})) is None
    with pytest.raises(NotApplied, match="coroutine"):
        run.execute("send", {}, lambda: fn())
    assert run.execute("send", {}, lambda: 2) == 2
    with pytest.raises(InvalidSetting, match="is async"):
        sync.tool(fn)
    with pytest.raises(InvalidSetting, match="cannot be cancelled"):
        run.call("send", {}, on_lost="cancel")
    with pytest.raises(InvalidSetting, match="no option"):
        run.call("send", {}, sometimes=True)


# ---------------------------------------------------------------- tools and steps


@sync.tool
def send_email(to: str, text: str = "hi", idempotency_key: str = "") -> str:
    sent.append((to, text, idempotency_key))
    return f"to {to}"


@sync.tool(effect="resumable", name="plan")
def plan(count: int, call: sync.Call) -> list[int]:
    return [call.step(f"n{n}", lambda n=n: n * n) for n in range(count)]


sent = []


def test_tools_find_their_run(toolkit):
    sent.clear()
    with pytest.raises(NoActiveRun):
        send_email("ann")
    with toolkit.run("acme", "r1") as run:
        assert send_email("ann") == "to ann"
        assert send_email(to="ann", text="hi") == "to ann"
        with toolkit.run("acme", "r2"):
            assert send_email("ann") == "to ann"
        assert send_email("bob") == "to bob"
        assert plan(3) == [0, 1, 4]
    with pytest.raises(NoActiveRun):
        send_email("ann")
    assert [to for to, _, _ in sent] == ["ann", "ann", "bob"]
    assert sent[0][2] == run.key("send_email", {"to": "ann", "text": "hi"}).idempotency_key
    assert toolkit.receipts.get(run.key("plan", {"count": 3})).steps == ("n0", "n1", "n2")


def test_a_retried_run_replays_what_it_prefetched(connected):
    sent.clear()
    for _ in range(2):
        with connected() as toolkit, toolkit.run("acme", "r1"):
            assert send_email("ann") == "to ann"
    assert len(sent) == 1


def test_steps_are_executed_in_the_callers_thread_and_skipped_on_a_reclaim(run):
    done = []

    def carry_out(call, fail):
        for n in range(3):
            if fail and n == 2:
                raise ConnectionError
            call.step(f"s{n}", lambda n=n: done.append((n, threading.get_ident())))
        return "all"

    with pytest.raises(ConnectionError):
        run.execute("plan", {}, lambda call: carry_out(call, True), effect="resumable")
    with pytest.raises(OverflowError):
        run.execute("plan", {}, lambda call: call.step("s9", _overflow), effect="resumable")

    def twice(call):
        call.step("s0", never)
        with pytest.raises(StepRepeated):
            call.step("s0", never)
        with pytest.raises(InvalidSetting, match="is async"):
            call.step("s7", _async)
        return carry_out_rest(call)

    def carry_out_rest(call):
        call.step("s1", never)
        call.step("s2", lambda: done.append((2, threading.get_ident())))
        return call.attempt

    assert run.execute("plan", {}, twice, effect="resumable") == 3
    assert done == [(n, threading.get_ident()) for n in range(3)]


def _overflow():
    raise OverflowError


async def _async():
    pass


# ---------------------------------------------------------------- outcomes that nobody knows


def ambiguous(run, args):
    """Leave an opaque call behind whose outcome nobody knows."""
    with pytest.raises(TimeoutError):
        run.execute("send", args, lambda: (_ for _ in ()).throw(TimeoutError()))


def test_verifiers_are_asked_in_the_callers_thread(run):
    asked = []

    def verify(verdict):
        def look(call):
            asked.append((threading.get_ident(), call.idempotency_key))
            with pytest.raises(CallInFlight):
                run.execute("send", call_args[0], never)
            return verdict

        return look

    for n, verdict in enumerate((Landed("it did"), NotLanded(), Unknown())):
        call_args = [{"n": n}]
        ambiguous(run, {"n": n})
        if isinstance(verdict, Unknown):
            with pytest.raises(AmbiguousCall):
                run.execute("send", {"n": n}, never, verify=verify(verdict))
        else:
            fn = never if isinstance(verdict, Landed) else lambda: "now"
            assert run.execute("send", {"n": n}, fn, verify=verify(verdict)) in ("it did", "now")
    assert asked == [(threading.get_ident(), run.key("send", {"n": n}).idempotency_key) for n in range(3)]


def test_a_verifier_may_be_async_and_may_fail(toolkit, run):
    async def verify():
        await asyncio.sleep(0)
        return Landed(5)

    def broken():
        raise OSError

    ambiguous(run, {})
    with pytest.raises(AmbiguousCall, match="verify= failed"):
        run.execute("send", {}, never, verify=broken)
    assert toolkit.run("acme", "run-1", verify=verify).execute("send", {}, never) == 5
    receipt = toolkit.receipts.get(run.key("send", {}))
    assert "test_a_verifier_may_be_async_and_may_fail.<locals>.verify" in receipt.resolved.by


def test_a_call_is_resolved(run, toolkit):
    ambiguous(run, {})
    with pytest.raises(AmbiguousCall) as raised:
        run.execute("send", {}, never)
    settled = toolkit.receipts.resolve(
        run.key("send", {}), revision=raised.value.revision, completed="by hand", by="ann", reason="asked them"
    )
    assert settled.status == "completed"
    assert run.execute("send", {}, never) == "by hand"


# ---------------------------------------------------------------- a call that is lost while its body runs


def take_away(toolkit, key, **how):
    """Settle the call of a live attempt in its stead."""
    revision = toolkit.receipts.get(key).revision
    toolkit.receipts.resolve(key, revision=revision, by="ann", reason="test", even_if_running=True, **how)


def test_a_lost_call_says_so_in_its_body_and_carries_its_result_out(run, toolkit):
    key = run.key("send", {})
    second = Gated("second")
    with pytest.raises(LeaseLost) as raised, run.call("send", {}) as call:
        take_away(toolkit, key, not_applied=True)
        end = in_thread(lambda: run.execute("send", {}, second))
        assert second.begun.wait(PATIENCE)
        with pytest.raises(LeaseLost):
            call.renew()
        assert call.lost
        second.may_end.set()
        assert end() == "second"
        call.result = "first"
    assert (raised.value.has_result, raised.value.result) == (True, "first")
    assert toolkit.receipts.get(key).result == "second"


def test_the_heartbeat_sees_that_a_call_is_lost_and_no_thread_is_stopped(run, toolkit):
    def body(call):
        take_away(toolkit, run.key("send", {}), not_applied=True)
        until(lambda: call.lost, "a heartbeat that finds it lost")
        return "done all the same"

    assert run.execute("send", {}, body, lease=0.5) == "done all the same"  # the resolver was wrong, and nobody began
    assert toolkit.receipts.get(run.key("send", {})).status == "completed"


def test_a_result_that_somebody_put_on_record_stands(run, toolkit):
    def body(call):
        take_away(toolkit, run.key("send", {}), completed="theirs")
        return "ours"

    assert run.execute("send", {}, body) == "theirs"

    def told(call):
        take_away(toolkit, run.key("send", {"n": 2}), completed="theirs")
        call.renew()

    assert run.execute("send", {"n": 2}, told) == "theirs"


def test_a_lease_is_renewed_while_the_body_blocks(run, toolkit, connected):
    key = run.key("send", {})

    def body(call):
        first = toolkit.receipts.get(key).revision
        until(lambda: toolkit.receipts.get(key).revision >= first + 2, "two heartbeats")
        return 1

    assert run.execute("send", {}, body, lease=0.6) == 1


@pytest.mark.parametrize("effect", ["opaque", "idempotent"])
def test_a_body_that_hangs_is_written_down_and_told_at_its_end(run, toolkit, effect):
    key = run.key("send", {})

    def body(call):
        if effect == "opaque":
            until(lambda: toolkit.receipts.get(key).status == "ambiguous", "the time-out")
        else:  # which is not settled before its body ends
            until(lambda: call._inner._interrupted_by, "the time-out")
        return "late"

    with pytest.raises(CallTimedOut):
        run.execute("send", {}, body, timeout=0.1, effect=effect)
    until(lambda: toolkit.receipts.get(key).status == "completed", "the late completion")
    assert run.execute("send", {}, never, effect=effect) == "late"


def test_a_late_body_without_a_result_stays_ambiguous(run, toolkit):
    key = run.key("send", {})
    with pytest.raises(CallTimedOut), run.call("send", {}, timeout=0.05):
        until(lambda: toolkit.receipts.get(key).status == "ambiguous", "the time-out")
    until(lambda: toolkit.receipts.get(key).error.type.endswith("ResultNotSet"), "the late word")
    assert toolkit.receipts.get(key).status == "ambiguous"


# ---------------------------------------------------------------- threads


def test_equal_calls_in_two_threads_are_executed_once(run):
    body = Gated()
    first = in_thread(lambda: run.execute("send", {}, body))
    assert body.begun.wait(PATIENCE)
    second = in_thread(lambda: run.execute("send", {}, never))
    with pytest.raises(CallInFlight):
        run.execute("send", {}, never, wait=0)
    body.may_end.set()
    assert (first(), second()) == ("done", "done")


def test_many_threads_share_a_toolkit(toolkit):
    def work(n):
        with toolkit.run("acme", f"r{n % 4}"):
            return [send_email(f"{n % 4}-{k}") for k in range(5)]

    sent.clear()
    ends = [in_thread(functools.partial(work, n)) for n in range(12)]
    assert [end() for end in ends] == [[f"to {n % 4}-{k}" for k in range(5)] for n in range(12)]
    assert len(sent) == 20


def test_a_toolkit_that_is_closed_over_a_body_says_so(connected, toolkit):
    body = Gated()
    with connected() as other:
        run = other.run("acme", "run-1")
        end = in_thread(lambda: run.execute("send", {}, body))
        waiting = in_thread(lambda: list(other.receipts.watch()))
        assert body.begun.wait(PATIENCE)
    assert toolkit.receipts.get(run.key("send", {})).status == "ambiguous"
    body.may_end.set()
    with pytest.raises(NotRecorded) as raised:
        end()
    assert (raised.value.result, raised.value.has_result) == ("done", True)
    with pytest.raises(Unreachable):
        waiting()
    with pytest.raises(Unreachable, match="nothing was done"):
        run.execute("send", {"n": 2}, never)
    with pytest.raises(Unreachable, match="closed"):
        other.receipts.get(run.key("send", {}))
    with pytest.raises(Unreachable):
        next(other.receipts.watch())


def test_a_generator_over_a_call_that_is_dropped_leaves_it_ambiguous(run, toolkit):
    def generator():
        with run.call("send", {}) as call:
            yield call
            call.result = 1

    found = generator()
    call = next(found)
    del found
    gc.collect()
    assert toolkit.receipts.get(call.key).status == "ambiguous"
    assert run.execute("send", {"n": 2}, lambda: 1) == 1  # and is not thought to be around this one


def test_a_generator_that_the_loops_own_thread_drops_blocks_nothing(run, toolkit, monkeypatch):
    def generator():
        with run.call("send", {}) as call:
            yield call

    found = generator()
    call = next(found)
    portal = run._portal
    held = [found]
    del found
    dropped = threading.Event()
    portal.soon(lambda: (held.clear(), dropped.set()))
    assert dropped.wait(PATIENCE)
    until(lambda: toolkit.receipts.get(call.key).status == "ambiguous", "what the generator left")
    with pytest.raises(AmbiguousCall):  # and not CallInFlight, as inside its own body
        run.execute("send", {}, never)


# ---------------------------------------------------------------- where it is not to be used


async def test_a_thread_with_a_running_loop_is_refused(server, namespace):
    with pytest.raises(InvalidSetting, match="an event loop runs in this thread"):
        sync.connect(server.url, namespace=namespace, provision=True).__enter__()

    def elsewhere():
        with sync.connect(server.url, namespace=namespace, provision=True) as toolkit:
            return toolkit.run("acme", "r").execute("send", {}, lambda: 1), toolkit

    result, toolkit = await asyncio.to_thread(elsewhere)
    assert result == 1
    with pytest.raises(InvalidSetting, match="an event loop"):
        toolkit.receipts.get(natsreceipts.ReceiptKey("a", "b", "c", "0" * 64))


def test_what_cannot_be_connected_to_is_refused(server):
    with pytest.raises(InvalidSetting, match="its own loop"):
        sync.connect(object())
    with pytest.raises(Unreachable):
        sync.connect("nats://127.0.0.1:1", connect_timeout=0.2).__enter__()
    with pytest.raises(natsreceipts.NotProvisioned):
        sync.connect(server.url, namespace="not-there").__enter__()
    assert not [thread for thread in threading.enumerate() if thread.name == "natsreceipts.sync"]


def test_an_interrupt_just_after_the_claim_leaves_it_not_applied(run, toolkit, monkeypatch):
    call = run.call("send", {})

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("natsreceipts.sync.portal.Errand.bring_back", interrupted)
        with pytest.raises(KeyboardInterrupt), call:
            never()
    receipt = toolkit.receipts.get(call.key)
    assert (receipt.status, receipt.error.not_applied) == ("failed", True)
    assert run.execute("send", {}, lambda: 2) == 2


def interrupted_once(monkeypatch, which, when):
    """A Ctrl-C just before or just after the given handing over of work to the loop (counted from 0), once."""
    soon, count = Portal.soon, itertools.count()

    def interrupted(self, fn):
        interrupts = threading.current_thread() is threading.main_thread() and next(count) == which
        if interrupts and when == "before":
            raise KeyboardInterrupt
        given = soon(self, fn)
        if interrupts:
            raise KeyboardInterrupt
        return given

    monkeypatch.setattr(Portal, "soon", interrupted)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_a_call_is_handed_over_leaves_nothing_that_waits(run, toolkit, monkeypatch, when):
    with monkeypatch.context() as patch:
        interrupted_once(patch, 0, when)
        with pytest.raises(KeyboardInterrupt), run.call("send", {}):
            never()
    receipt = toolkit.receipts.get(run.key("send", {}))
    assert receipt is None or (receipt.status, receipt.error.not_applied) == ("failed", True)
    assert run.execute("send", {}, lambda: 2) == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_a_call_is_left_loses_no_result(run, toolkit, monkeypatch, when):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), run.call("send", {}) as call:
        call.result = "sent"
        interrupted_once(patch, 0, when)
    assert toolkit.receipts.get(call.key).status == "completed"
    assert run.execute("send", {}, never) == "sent"


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_a_read_is_handed_over_is_raised(run, toolkit, monkeypatch, when):
    with monkeypatch.context() as patch:
        interrupted_once(patch, 0, when)
        with pytest.raises(KeyboardInterrupt):
            toolkit.receipts.get(run.key("send", {}))
    assert toolkit.receipts.get(run.key("send", {})) is None


def test_a_signal_handler_may_call_while_its_thread_hands_something_over(run, toolkit, monkeypatch):
    """So may a finalizer, which the garbage collector runs wherever it likes."""
    hand_over, found = asyncio.BaseEventLoop.call_soon_threadsafe, []

    def interrupted(self, callback, *args, **kwargs):
        if threading.current_thread() is thread and not found:
            found.append("in the handler")
            found.append(toolkit.receipts.get(run.key("send", {})))
        return hand_over(self, callback, *args, **kwargs)

    thread = threading.Thread(target=lambda: found.append(run.execute("send", {}, lambda: 1)), daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", interrupted)
        thread.start()
        thread.join(PATIENCE)
    assert found == ["in the handler", None, 1]


def test_a_body_whose_own_loop_is_cancelled_comes_out_so(run, toolkit):
    async def work():
        raise asyncio.CancelledError("mine")

    with pytest.raises(asyncio.CancelledError, match="mine"):
        run.execute("send", {}, lambda: asyncio.run(work()))
    receipt = toolkit.receipts.get(run.key("send", {}))
    assert (receipt.status, receipt.error.type) == ("ambiguous", "asyncio.exceptions.CancelledError")


# ---------------------------------------------------------------- the same names


def signature_of(fn):
    return [(p.name, p.kind, p.default is inspect.Parameter.empty) for p in inspect.signature(fn).parameters.values()]


@pytest.mark.parametrize(
    ("ours", "theirs", "left_out"),
    [
        (sync.ReceiptStore, natsreceipts.ReceiptStore, set()),
        (sync.NoticeBoard, natsreceipts.NoticeBoard, set()),
        (sync.Sessions, natsreceipts.Sessions, set()),
        (sync.SessionLog, natsreceipts.SessionLog, {"store"}),
        (sync.Run, natsreceipts.Run, set()),
        (sync.Toolkit, natsreceipts.Toolkit, {"close", "delivery"}),
        (sync.Call, natsreceipts.Call, {"in_thread", "beside", "start_heartbeat"}),
    ],
)
def test_the_names_and_parameters_are_those_of_the_async_classes(ours, theirs, left_out):
    names = {name for name in vars(theirs) if not name.startswith("_")} - left_out
    for name in sorted(names):
        if not callable(getattr(theirs, name)) or (name in ("lost", "replayed", "key") and ours is sync.Call):
            assert hasattr(ours, name), name
            continue
        assert signature_of(getattr(ours, name)) == signature_of(getattr(theirs, name)), name
    for name in ("connect", "tool", "reconcile_interrupted_session", "append_interruption_marker"):
        ours_, theirs_ = signature_of(getattr(sync, name)), signature_of(getattr(natsreceipts, name))
        assert ours_[1:] == theirs_[1:], name
