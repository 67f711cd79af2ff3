"""`@tool`: functions that find their run, bind their arguments, and are guarded."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import threading

import pytest
from support import Effect, settled_as, stored, toolkit_of

from natsreceipts import (
    AmbiguousCall,
    InvalidSetting,
    NoActiveRun,
    NotApplied,
    NotCanonical,
    NotRecorded,
    tool,
)


class Log(list):
    """What was entered, in order."""


@pytest.fixture
def log():
    return Log()


async def test_a_tool_is_executed_once_in_its_run(run, toolkit, log):
    @tool
    async def send(to, *, subject="hi", times=1):
        """Send a mail."""
        log.append((to, subject, times))
        return f"sent to {to}"

    assert (send.name, send.effect, send.__doc__) == ("send", "opaque", "Send a mail.")
    async with run:
        assert await send("a") == "sent to a"
        assert await send(to="a") == "sent to a"  # the same call, however it is written
        assert await send("a", subject="hi", times=1) == "sent to a"
        assert await send("a", subject="ho") == "sent to a"
    assert log == [("a", "hi", 1), ("a", "ho", 1)]
    key = run.key("send", {"to": "a", "subject": "hi", "times": 1})
    assert (await toolkit.receipts.get(key)).status == "completed"
    assert send.arguments("a") == {"to": "a", "subject": "hi", "times": 1}


async def test_outside_a_run_a_tool_is_refused(run, log):
    @tool
    async def send():
        log.append(1)

    with pytest.raises(NoActiveRun):
        await send()
    async with run:
        await send()
    with pytest.raises(NoActiveRun):
        await send()
    assert log == [1]


async def test_options_and_name(run, toolkit, nc, namespace):
    @tool(name="mail.send", effect="idempotent", lease=12, not_applied=(KeyError,))
    async def send(n):
        raise KeyError(n)

    assert (send.name, send.effect) == ("mail.send", "idempotent")
    async with run:
        with pytest.raises(KeyError):
            await send(1)
    record = await stored(nc, namespace, run.key("mail.send", {"n": 1}))
    assert (record["effect"], record["leaseMs"], record["error"]["notApplied"]) == ("idempotent", 12_000, True)


async def test_bad_options_are_refused_when_the_tool_is_made():
    for options in ({"effect": "wrote"}, {"lease": -1}, {"leese": 3}, {"timeout": "3"}):
        with pytest.raises(InvalidSetting):
            tool(**options)
    with pytest.raises(InvalidSetting):

        @tool
        async def both(a, /, **kwargs):
            pass


async def test_the_idempotency_key_is_filled_in_and_not_hashed(run, toolkit):
    @tool
    async def charge(amount, idempotency_key):
        return idempotency_key

    @tool
    async def refund(amount, *, idempotency_key=None):
        return idempotency_key

    async with run:
        key = run.key("charge", {"amount": 5})
        assert await charge(5) == key.idempotency_key
        assert await refund(amount=5) == run.key("refund", {"amount": 5}).idempotency_key
        assert await refund(5, idempotency_key="mine") == run.key("refund", {"amount": 5}).idempotency_key
    assert charge.arguments(5) == {"amount": 5}


async def test_a_tool_called_wrongly_writes_nothing(proxy, namespace, bucket):
    @tool
    async def send(to, idempotency_key):
        return to

    @tool
    def sync(to):
        return to

    async with toolkit_of(proxy.url, namespace) as toolkit, toolkit.run("acme", "run-1"):
        proxy.forget()
        for call in (send, lambda: send("a", "b", "c"), lambda: sync(tu="x"), lambda: send("a", "key by position")):
            with pytest.raises(TypeError):
                await call()
        with pytest.raises(NotCanonical, match="to"):
            await send(object())
        assert proxy.published() == []


async def test_positional_only_and_variadic_arguments(run, log):
    @tool
    async def one(a, /, b=2, *rest):
        log.append(("one", a, b, rest))

    @tool
    async def two(a, **others):
        log.append(("two", a, others))

    async with run:
        await one(1)
        await one(1, 2)
        await one(1, 2, 3)
        await one(1, b=2)
        await two(1, z=1, y=2)
        await two(a=1, y=2, z=1)
        await two(1, y=2)
    assert [entry[0] for entry in log] == ["one", "one", "two", "two"]


async def test_no_two_calls_of_variadic_tools_are_one(run, log):
    @tool
    async def both(*args, **kwargs):
        log.append((args, kwargs))
        return [list(args), kwargs]

    async with run:
        assert await both(1, args=2) == [[1], {"args": 2}]
        assert await both(9, args=2) == [[9], {"args": 2}]
    assert len(log) == 2


async def test_a_sync_tool_runs_in_a_thread(run):
    where = []
    variable = contextvars.ContextVar("variable", default=None)

    @tool
    def work(n, idempotency_key):
        where.append((threading.current_thread() is threading.main_thread(), variable.get()))
        return n + 1

    async with run:
        variable.set("here")
        assert await work(1) == 2
        assert await work(1) == 2
    assert where == [(False, "here")]


async def test_a_sync_tools_errors(run, toolkit):
    @tool
    def refused():
        raise NotApplied("no")

    @tool
    def broken():
        raise ValueError("x")

    async with run:
        with pytest.raises(NotApplied):
            await refused()
        with pytest.raises(ValueError, match="x"):
            await broken()
        with pytest.raises(AmbiguousCall):
            await broken()
    assert (await toolkit.receipts.get(run.key("refused", {}))).status == "failed"


async def test_a_plain_function_that_returns_an_awaitable(run, log):
    """A decorator that is not async makes one of every async function."""

    def traced(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            log.append("traced")
            return fn(*args, **kwargs)

        return wrapper

    @tool
    @traced
    async def send(to):
        log.append(to)
        return f"sent to {to}"

    async with run:
        assert await send("a") == "sent to a"
        assert await send("a") == "sent to a"
    assert log == ["traced", "a"]


async def test_a_callable_object_and_a_partial(run, log):
    class Sender:
        async def __call__(self, to):
            log.append(to)
            return to

    async def send(prefix, to):
        log.append(prefix + to)
        return prefix + to

    by_object = tool(name="by_object")(Sender())
    by_partial = tool(name="by_partial")(functools.partial(send, "x"))
    async with run:
        assert await by_partial("a") == "xa"
        assert await by_object("a") == "a"
    assert log == ["xa", "a"]


async def test_nested_runs(toolkit, log):
    @tool
    async def send(n):
        log.append(n)
        return n

    outer, inner = toolkit.run("acme", "outer"), toolkit.run("acme", "inner")
    async with outer:
        await send(1)
        async with inner:
            await send(2)
            async with inner:  # the same one again
                await send(1)
            await send(1)
        await send(2)
        await send(1)
    with pytest.raises(NoActiveRun):
        await send(1)
    assert log == [1, 2, 1, 2]


async def test_an_error_leaves_the_run(toolkit):
    @tool
    async def send():
        return 1

    with pytest.raises(KeyError):
        async with toolkit.run("acme", "run-1"):
            raise KeyError
    with pytest.raises(NoActiveRun):
        await send()


async def test_runs_of_tasks_do_not_mix(toolkit):
    @tool
    async def whose(n):
        return n

    async def turn(name):
        async with toolkit.run("acme", name) as run:
            await asyncio.sleep(0)
            await asyncio.gather(*(whose(n) for n in range(3)))
            return [(await toolkit.receipts.get(run.key("whose", {"n": n}))).key.run for n in range(3)]

    results = await asyncio.gather(*(turn(f"run-{n}") for n in range(5)))
    assert results == [[f"run-{n}"] * 3 for n in range(5)]


async def test_tools_that_call_tools(run, toolkit, log):
    @tool
    async def inner(n):
        log.append(("inner", n))
        return n

    @tool
    async def outer(n):
        log.append(("outer", n))
        return [await inner(n), await inner(n + 1), await inner(n)]

    async with run:
        assert await outer(1) == [1, 2, 1]
        assert await outer(1) == [1, 2, 1]
    assert log == [("outer", 1), ("inner", 1), ("inner", 2)]


async def test_equal_tool_calls_at_once_share_one_execution(run):
    effect = Effect("done")

    @tool
    async def send(to):
        return await effect()

    async with run:
        assert await asyncio.gather(*(send("a") for _ in range(10))) == ["done"] * 10
    assert effect.entered == 1


async def test_a_mutable_argument_is_read_once(run, log):
    @tool
    async def send(items):
        items.append("more")
        log.append(1)

    async with run:
        await send(["a"])
        await send(["a"])
    assert log == [1]


async def test_a_read_tool_is_always_executed(run, log):
    @tool(effect="read")
    async def look():
        log.append(1)
        return (1, 2)

    async with run:
        assert await look() == await look() == (1, 2)
    assert log == [1, 1]


@pytest.mark.parametrize(("kind", "status"), [("opaque", "ambiguous"), ("idempotent", "failed")])
async def test_a_sync_tool_that_is_cancelled(run, toolkit, kind, status):
    """Its thread goes on: an idempotent call is not given to another attempt before the thread has ended."""
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    @tool(effect=kind)
    def work():
        started.set()
        go.wait(60)
        ended.set()
        return "in the end"

    async def turn():
        async with run:
            return await work()

    task = asyncio.create_task(turn())
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    try:
        if kind == "opaque":
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await toolkit.receipts.get(run.key("work", {}))).status == status
        else:
            await asyncio.sleep(0.2)
            receipt = await toolkit.receipts.get(run.key("work", {}))
            assert (receipt.status, ended.is_set()) == ("running", False)
    finally:
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(ended.wait, 10)


@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
async def test_a_sync_tool_that_is_cancelled_before_a_thread_was_free(run, toolkit, log, kind):
    """It has not begun, so it must not begin after its caller was told that it is cancelled."""
    loop = asyncio.get_running_loop()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    go = threading.Event()

    @tool(effect=kind)
    def work():
        log.append("entered")

    async def turn():
        async with run:
            await work()

    try:
        pool.submit(go.wait, 10)  # the only thread is busy
        task = asyncio.create_task(turn())
        await settled_as(toolkit, run.key("work", {}), "running")
        task.cancel()
        await settled_as(toolkit, run.key("work", {}), "failed")
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        pool.submit(lambda: None).result(10)  # whatever was queued has run by now
        assert log == []
    finally:
        go.set()
        await loop.shutdown_default_executor()


async def test_a_result_of_a_tool_that_cannot_be_recorded(run):
    @tool
    def work():
        return object()

    async with run:
        with pytest.raises(NotRecorded):
            await work()
