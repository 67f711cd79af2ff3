"""One JetStream message as one turn: acknowledged, kept alive, given back with the right delay, given up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from support import Effect, Message, client_of, put, record_of, toolkit_of, until, writes_to

from natsreceipts import (
    AmbiguousCall,
    BucketReplaced,
    CallInFlight,
    CallWithdrawn,
    CorruptRecord,
    LeaseLost,
    NotClaimed,
    NotRecorded,
    ReceiptErased,
    ReceiptKey,
    UnsupportedRecord,
)

ARGS = {"to": "a@b.c"}
KEY = ReceiptKey("acme", "run-1", "send", "0" * 64)


@asynccontextmanager
async def turns(nc, namespace, *, ack_wait=60.0, messages=1):
    """A stream of turns and a consumer of it; gives a function that waits for the next delivery."""
    js = nc.jetstream()
    await js.add_stream(name=f"TURNS_{namespace}", subjects=[f"turns.{namespace}"])
    try:
        for n in range(messages):
            await js.publish(f"turns.{namespace}", str(n).encode())
        subscription = await js.pull_subscribe(
            f"turns.{namespace}",
            durable="worker",
            config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=ack_wait, max_ack_pending=10),
        )

        async def following(timeout=30.0):
            (message,) = await subscription.fetch(1, timeout=timeout)
            return message

        following.state = subscription.consumer_info
        yield following
        await subscription.unsubscribe()
    finally:
        await js.delete_stream(f"TURNS_{namespace}")


@pytest.fixture
async def following(nc, namespace):
    async with turns(nc, namespace) as following:
        yield following


async def left(following, unacknowledged, undelivered):
    """Wait until so many messages are left: a server takes acknowledgements in some time after they were sent."""

    async def as_said():
        state = await following.state()
        return (state.num_ack_pending, state.num_pending) == (unacknowledged, undelivered)

    await until(as_said)


async def test_it_is_acknowledged_when_the_body_ends_well(toolkit, run, following):
    message = await following()
    async with toolkit.delivery(message) as delivery:
        assert (delivery.number, delivery.redelivered) == (1, False)
        await run.execute("send", ARGS, Effect())
        await left(following, 1, 0)
    await left(following, 0, 0)


async def test_the_hosts_own_error_gives_it_back_at_once(toolkit, following):
    message = await following()
    with pytest.raises(KeyError):
        async with toolkit.delivery(message):
            raise KeyError("the host's own")
    again = await following(timeout=20)  # and not when ack_wait is over
    async with toolkit.delivery(again) as delivery:
        assert (delivery.number, delivery.redelivered) == (2, True)
    await left(following, 0, 0)


async def test_a_redelivery_replays_with_one_read_and_no_write(proxy, namespace, bucket, nc, following):
    async with toolkit_of(proxy.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        effect = Effect({"id": 1})
        with pytest.raises(KeyError):
            async with toolkit.delivery(await following()):
                await run.execute("send", ARGS, effect)
                raise KeyError("after the effect")
        message = await following()
        proxy.forget()
        async with toolkit.delivery(message) as delivery:
            assert delivery.redelivered
            assert await run.execute("send", ARGS, effect) == {"id": 1}
            (read,) = proxy.published()
            assert read.subject.startswith(f"$JS.API.DIRECT.GET.KV_{bucket}.")
            assert await run.execute("send", [2], effect) == {"id": 1}  # read, claim, settle
            assert len(proxy.published(writes_to(namespace))) == 2
        proxy.forget()
        assert await run.execute("send", [3], effect) == {"id": 1}  # outside of it: claim first
        assert [m.subject[:4] for m in proxy.published()] == ["$KV."] * 2
    assert effect.entered == 3


async def test_a_redelivery_on_a_bucket_without_direct_gets(server, namespace, bucket, nc, following):
    await nc.jetstream().create_key_value(bucket=bucket, history=8)  # as nats-py makes it
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        with pytest.raises(KeyError):
            async with toolkit.delivery(await following()):
                await run.execute("send", ARGS, Effect("first"))
                raise KeyError
        async with toolkit.delivery(await following()):
            assert await run.execute("send", ARGS, Effect("wrong")) == "first"


async def test_it_is_kept_in_progress(toolkit, nc, namespace):
    """A body longer than ack_wait is not redelivered meanwhile."""
    async with turns(nc, namespace, ack_wait=2.5) as following:
        async with toolkit.delivery(await following(), progress=0.1):
            with pytest.raises(TimeoutError):
                await following(timeout=3.5)
        await left(following, 0, 0)


PERSON = [
    AmbiguousCall(KEY, revision=1, attempts=1),
    NotRecorded(KEY, "why"),
    ReceiptErased(KEY, bucket="b", revision=1),
    CorruptRecord("b", KEY, 1, "why"),
    UnsupportedRecord("b", KEY, 1, 2),
    BucketReplaced("b", "why"),
]
SOON = [NotClaimed(KEY, "why"), LeaseLost(KEY, "why")]


def _name(error):
    return type(error).__name__


@pytest.mark.parametrize("error", PERSON, ids=_name)
async def test_what_needs_a_person_comes_back_later_and_later(toolkit, error):
    delays = []
    for number in range(1, 30):
        message = Message(number)
        with pytest.raises(type(error)) as caught:
            async with toolkit.delivery(message):
                raise error
        assert caught.value is error
        ((verb, delay),) = message.calls
        assert verb == "nak"
        delays.append(delay)
    assert delays[0] >= 10
    assert delays == sorted(delays)
    assert delays[3] > delays[0]
    assert delays[-1] <= 24 * 3600

    message = Message()
    with pytest.raises(type(error)):
        async with toolkit.delivery(message, terminate=True):
            raise error
    assert message.calls == ["term"]


@pytest.mark.parametrize("error", SOON, ids=_name)
@pytest.mark.parametrize("terminate", [False, True])
async def test_what_passes_comes_back_soon(toolkit, error, terminate):
    message = Message(9)
    with pytest.raises(type(error)):
        async with toolkit.delivery(message, terminate=terminate):
            raise error
    ((verb, delay),) = message.calls
    assert verb == "nak"
    assert 0 < delay <= 10


async def test_a_call_in_flight_comes_back_when_its_lease_may_be_over(toolkit):
    for retry_after, least in ((17.5, 17.5), (0.0, 0.1)):
        message = Message()
        with pytest.raises(CallInFlight):
            async with toolkit.delivery(message, terminate=True):
                raise CallInFlight(KEY, retry_after=retry_after)
        ((verb, delay),) = message.calls
        assert verb == "nak"
        assert least <= delay < retry_after + 5


async def test_a_withdrawn_call_comes_back_with_the_growing_delay(toolkit):
    delays = []
    for number in (1, 2, 3):
        message = Message(number)
        with pytest.raises(CallWithdrawn):
            async with toolkit.delivery(message, terminate=True):
                raise CallWithdrawn(KEY)
        delays.append(message.calls[0][1])
    assert delays == sorted(set(delays))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()], ids=_name)
async def test_a_worker_that_goes_down_gives_it_back_at_once(toolkit, error):
    message = Message(5)
    with pytest.raises(type(error)):
        async with toolkit.delivery(message, terminate=True):
            raise error
    assert message.calls == [("nak", None)]


async def test_the_hosts_own_error_comes_back_and_is_never_given_up(toolkit):
    delays = []
    for number in range(1, 30):
        message = Message(number)
        with pytest.raises(ValueError, match="own"):
            async with toolkit.delivery(message, terminate=True):
                raise ValueError("the host's own")
        ((verb, delay),) = message.calls
        assert verb == "nak"
        delays.append(delay or 0.0)
    assert delays == sorted(delays)
    assert delays[0] <= 5
    assert delays[-1] <= 3600


async def test_an_acknowledgement_that_fails(toolkit):
    """The turn ended well: a redelivery replays it, and its body is not told of an error."""
    message = Message()

    async def failing():
        raise ConnectionError

    message.ack = failing
    async with toolkit.delivery(message):
        pass
    assert message.calls == []


async def test_an_ambiguous_call_ends_a_message_when_told_to(toolkit, run, following, nc, namespace):
    key = run.key("send", ARGS)
    await put(nc, namespace, key, record_of(key, status="ambiguous"))
    with pytest.raises(AmbiguousCall):
        async with toolkit.delivery(await following(), terminate=True):
            await run.execute("send", ARGS, Effect("wrong"))
    await left(following, 0, 0)


async def test_an_ambiguous_call_gives_its_message_back(toolkit, run, following, nc, namespace):
    key = run.key("send", ARGS)
    await put(nc, namespace, key, record_of(key, status="ambiguous"))
    with pytest.raises(AmbiguousCall):
        async with toolkit.delivery(await following()):
            await run.execute("send", ARGS, Effect("wrong"))
    await left(following, 1, 0)  # and not again before its delay is over
    with pytest.raises(TimeoutError):
        await following(timeout=0.5)


async def test_a_connection_that_is_gone_does_not_hide_the_bodys_error(toolkit, server, nc, namespace):
    async with turns(nc, namespace):
        async with client_of(server.url) as other:
            js = other.jetstream()
            subscription = await js.pull_subscribe(f"turns.{namespace}", durable="second")
            (message,) = await subscription.fetch(1, timeout=30)
        with pytest.raises(KeyError):
            async with toolkit.delivery(message):
                raise KeyError("the host's own")


async def test_progress_survives_an_error(toolkit):
    message = Message()

    async def failing():
        message.calls.append("in progress")
        raise ConnectionError

    message.in_progress = failing
    async with asyncio.timeout(30), toolkit.delivery(message, progress=0.01):
        while message.calls.count("in progress") < 3:
            await asyncio.sleep(0.01)
    assert message.calls[-1] == "ack"


async def test_nothing_is_sent_after_the_acknowledgement(toolkit):
    message = Message()
    async with toolkit.delivery(message, progress=0.01):
        await asyncio.sleep(0.05)
    calls = list(message.calls)
    await asyncio.sleep(0.05)
    assert message.calls == calls
    assert calls[-1] == "ack"


class _Deaf(Message):
    """Its first cancellation is swallowed, as nats-py does with one that finds it flushing."""

    def __init__(self):
        super().__init__()
        self.flushing = asyncio.Event()

    async def in_progress(self):
        self.flushing.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            if len(self.calls) > 1:
                raise


async def test_a_delivery_ends_though_nats_py_swallows_a_cancellation(toolkit):
    message = _Deaf()
    async with asyncio.timeout(30):
        async with toolkit.delivery(message, progress=0.01):
            await message.flushing.wait()
    assert message.calls == ["cancelled", "cancelled", "ack"]
    message = _Deaf()
    async with asyncio.timeout(30):
        with pytest.raises(LookupError):
            async with toolkit.delivery(message, progress=0.01):
                await message.flushing.wait()
                raise LookupError
    assert message.calls == ["cancelled", "cancelled", ("nak", 1.0)]
