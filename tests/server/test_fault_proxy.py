"""The proxy loses exactly what it is told to lose: each fault is checked over a second, direct connection."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager

import nats
import nats.errors
import pytest
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError
from support import flushed

from natsreceipts._jetstream.connection import close_client
from natsreceipts.testing import FaultProxy, Published
from natsreceipts.testing.frames import Parser


@asynccontextmanager
async def client_of(url, **options):
    quiet = {"error_cb": _ignore, "reconnect_time_wait": 0.01, "max_reconnect_attempts": -1}
    client = await nats.connect(url, **quiet | options)
    try:
        yield client
    finally:
        await close_client(client)


async def _ignore(_error):
    pass


@pytest.fixture
async def stream(nc, namespace):
    """A stream with one message per subject, as a KV bucket has it; its name is the first token too."""
    config = StreamConfig(name=namespace, subjects=[f"{namespace}.>"], max_msgs_per_subject=8)
    await nc.jetstream().add_stream(config)
    yield namespace
    await nc.jetstream().delete_stream(namespace)


@pytest.fixture
async def through(proxy):
    async with client_of(proxy.url) as client:
        yield client


async def claim(client, subject, payload=b"claim", *, last=0, timeout=30):
    headers = {"Nats-Expected-Last-Subject-Sequence": str(last)}
    return await client.jetstream().publish(subject, payload, headers=headers, timeout=timeout)


async def unanswered(client, subject, payload=b"claim"):
    """A claim whose writer hears nothing and gives up. What was made of it may still be under way."""
    with pytest.raises(nats.errors.TimeoutError):
        await claim(client, subject, payload, timeout=0.3)


async def stored(nc, stream, subject):
    try:
        return (await nc.jetstream().get_msg(stream, subject=subject)).data or b""  # nats-py: None when empty
    except NotFoundError:
        return None


async def settled(nc, stream):
    """What the server has read by now is stored once this is: a stream takes its messages in, in order, later."""
    await nc.jetstream().publish(f"{stream}.barrier", b"")


# Forwarding


async def test_traffic_passes_unchanged(proxy, through, nc, stream):
    ack = await claim(through, f"{stream}.a", b"hello")
    assert ack.seq == 1
    assert await stored(nc, stream, f"{stream}.a") == b"hello"
    with pytest.raises(APIError, match="wrong last sequence"):
        await claim(through, f"{stream}.a", b"again")
    assert proxy.connections == 1


async def test_publishes_are_recorded_in_order(proxy, through, stream):
    await claim(through, f"{stream}.a", b"1")
    await claim(through, f"{stream}.a", b"2", last=1)
    await through.publish(f"{stream}.b.c", b"plain")
    await flushed(through)
    expected = "Nats-Expected-Last-Subject-Sequence"
    assert proxy.published(f"{stream}.*") == [
        Published(f"{stream}.a", {expected: "0"}, b"1"),
        Published(f"{stream}.a", {expected: "1"}, b"2"),
    ]
    assert [m.payload for m in proxy.published(f"{stream}.>")] == [b"1", b"2", b"plain"]
    assert [m.payload for m in proxy.published(lambda m: m.headers.get(expected) == "1")] == [b"2"]
    assert len(proxy.published()) == 3
    proxy.forget()
    assert proxy.published() == []


@pytest.mark.parametrize("size", [0, 1, 4094, 4096, 65_536, 900_000])
async def test_payloads_of_all_sizes_both_ways(through, nc, stream, size):
    payload = random.Random(size).randbytes(size)
    await claim(through, f"{stream}.big", payload)
    assert await stored(nc, stream, f"{stream}.big") == payload
    assert await stored(through, stream, f"{stream}.big") == payload


async def test_payloads_that_look_like_protocol(proxy, through, nc, stream):
    payload = b"\r\nPUB x 3\r\nabc\r\nHPUB y 12 12\r\n\r\n\r\nPING\r\n-ERR 'no'\r\n" * 50
    await claim(through, f"{stream}.odd", payload)
    assert await stored(nc, stream, f"{stream}.odd") == payload
    assert await stored(through, stream, f"{stream}.odd") == payload
    assert [m.subject for m in proxy.published(f"{stream}.>")] == [f"{stream}.odd"]
    assert proxy.published("x") == proxy.published("y") == []


async def test_many_at_once(proxy, through, nc, stream):
    payloads = [random.Random(n).randbytes(n * 37 % 9000) for n in range(200)]
    await asyncio.gather(*(claim(through, f"{stream}.{n}", payload) for n, payload in enumerate(payloads)))
    assert [await stored(nc, stream, f"{stream}.{n}") for n in range(200)] == payloads
    assert len(proxy.published(f"{stream}.*")) == 200


async def test_a_slow_reader_holds_the_server_back_and_loses_nothing(proxy, nc, namespace):
    """More than all socket buffers hold, so both ways of the proxy have to pause."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        await reader.readline()
        writer.write(f"CONNECT {{}}\r\nSUB {namespace} 1\r\nPING\r\n".encode())
        while await reader.readline() != b"PONG\r\n":
            pass
        payload = bytes(900_000)
        for _ in range(30):
            await nc.publish(namespace, payload)
            await flushed(nc)
        for _ in range(30):
            assert await reader.readline() == f"MSG {namespace} 1 900000\r\n".encode()
            assert await reader.readexactly(900_002) == payload + b"\r\n"
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100, 100_000])
def test_the_parser_cuts_anywhere_and_drops_nothing(chunk):
    wire = (
        b'INFO {"a": "b c"}\r\n+OK\r\nPING\r\nSUB a.> q 1\r\nUNSUB 1 5\r\n'
        b"PUB a 5\r\na\r\nbc\r\npub b _INBOX.1 0\r\n\r\n"
        b"HPUB c _INBOX.2 20 23\r\nNATS/1.0\r\nK: v:1\r\n\r\nxyz\r\n"
        b"MSG d 1 2\r\n\r\n\r\nHMSG e 1 _R 25 27\r\nNATS/1.0 503 No Resp.\r\n\r\n\r\n\r\n"
        b"MSG\td  1\t_R 1\r\nx\r\nPUB broken\r\nPONG\n-ERR 'x y'\r\n"
    )
    parser = Parser()
    frames = [f for at in range(0, len(wire), chunk) for f in parser.feed(wire[at : at + chunk])]
    assert b"".join(f.raw for f in frames) == wire
    publishes = [f for f in frames if f.op in {b"PUB", b"HPUB"}]
    assert [(f.message(), f.reply) for f in publishes] == [
        (Published("a", {}, b"a\r\nbc"), b""),
        (Published("b", {}, b""), b"_INBOX.1"),
        (Published("c", {"K": "v:1"}, b"xyz"), b"_INBOX.2"),
    ]
    messages = [f.message() for f in frames if f.op in {b"MSG", b"HMSG"}]
    assert messages == [
        Published("d", {}, b"\r\n"),
        Published("e", {"Status": "503", "Description": "No Resp."}, b"\r\n"),
        Published("d", {}, b"x"),
    ]
    assert publishes[2].with_reply(b"R") == b"HPUB c R 20 23\r\nNATS/1.0\r\nK: v:1\r\n\r\nxyz\r\n"
    assert publishes[0].with_reply(b"R") == b"PUB a R 5\r\na\r\nbc\r\n"


async def test_connect_urls_do_not_leak():
    async def serve(_reader, writer):
        writer.write(b'INFO {"server_id":"X","connect_urls":["10.0.0.1:4222"],"max_payload":1}\r\n')
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as upstream:
        port = upstream.sockets[0].getsockname()[1]
        async with FaultProxy("127.0.0.1", port) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            line = await reader.readline()
            assert json.loads(line.removeprefix(b"INFO ")) == {"server_id": "X", "max_payload": 1}
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


# Rules


async def test_drop_answer(proxy, through, nc, stream):
    lost = proxy.drop_answer(f"{stream}.a")
    await unanswered(through, f"{stream}.a")
    assert (await lost.hit()).payload == b"claim"
    answer = json.loads((await lost.answered()).payload)
    assert answer["seq"] == 1
    assert await stored(nc, stream, f"{stream}.a") == b"claim"
    assert (await claim(through, f"{stream}.a", b"next", last=1)).seq == 2
    assert proxy.connections == 1
    assert len(lost.hits) == len(lost.answers) == 1


async def test_drop_answer_of_a_refused_write(proxy, through, nc, stream):
    await claim(nc, f"{stream}.a", b"rival")
    lost = proxy.drop_answer(f"{stream}.a")
    await unanswered(through, f"{stream}.a")
    assert json.loads((await lost.answered()).payload)["error"]["err_code"] == 10071
    assert await stored(nc, stream, f"{stream}.a") == b"rival"


async def test_drop_answer_of_a_read(proxy, through, nc, stream):
    await claim(nc, f"{stream}.a")
    lost = proxy.drop_answer(f"$JS.API.STREAM.MSG.GET.{stream}")
    request = through.request(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq":1}', timeout=0.3)
    with pytest.raises(nats.errors.TimeoutError):
        await request
    assert json.loads((await lost.answered()).payload)["message"]["seq"] == 1


async def test_cut_after_store(proxy, through, nc, stream):
    fault = proxy.cut_after_store(f"{stream}.a")
    await unanswered(through, f"{stream}.a")
    await fault.answered()
    assert json.loads(fault.answers[0].payload)["seq"] == 1
    assert await stored(nc, stream, f"{stream}.a") == b"claim"
    await proxy.connected()
    assert (await claim(through, f"{stream}.a", b"next", last=1)).seq == 2


async def test_cut_after_store_cuts_at_the_answer(proxy, nc, stream):
    """On a raw socket: what came before the answer is there, the answer is not, and the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    await reader.readline()
    fault = proxy.cut_after_store(f"{stream}.a")
    writer.write(b"CONNECT {}\r\nSUB me.* 1\r\nPUB me.a 2\r\nhi\r\n")
    writer.write(f"PUB {stream}.a me.b 1\r\nx\r\n".encode())
    assert (await reader.read()).replace(b"+OK\r\n", b"") == b"MSG me.a 1 2\r\nhi\r\n"
    assert json.loads(fault.answers[0].payload)["seq"] == 1
    assert await stored(nc, stream, f"{stream}.a") == b"x"
    writer.close()
    await writer.wait_closed()


async def test_answer_rules_pass_over_publishes_without_reply(proxy, through, nc, stream):
    fault = proxy.cut_after_store(f"{stream}.a")
    await through.publish(f"{stream}.a", b"no reply")
    await flushed(through)
    assert fault.hits == []
    assert proxy.connections == 1


async def test_drop(proxy, through, nc, stream):
    fault = proxy.drop(f"{stream}.*")
    await unanswered(through, f"{stream}.a")
    assert (await fault.hit()).subject == f"{stream}.a"
    assert await stored(nc, stream, f"{stream}.a") is None
    assert (await claim(through, f"{stream}.a", b"again")).seq == 1
    assert [m.payload for m in proxy.published(f"{stream}.a")] == [b"claim", b"again"]


async def test_delay_lands_after_the_client_gave_up(proxy, through, nc, stream):
    late = proxy.delay(f"{stream}.a")
    await unanswered(through, f"{stream}.a", b"late")
    await late.hit()
    assert await stored(nc, stream, f"{stream}.a") is None
    assert (await claim(through, f"{stream}.b", b"other")).seq == 1
    answer = json.loads((await late.release()).payload)
    assert answer["seq"] == 2
    assert await stored(nc, stream, f"{stream}.a") == b"late"
    with pytest.raises(APIError, match="wrong last sequence"):
        await claim(through, f"{stream}.a", b"second")


async def test_delay_is_refused_when_a_rival_was_first(proxy, through, nc, stream):
    late = proxy.delay(f"{stream}.a")
    await unanswered(through, f"{stream}.a", b"late")
    await late.hit()
    await claim(nc, f"{stream}.a", b"rival")
    assert json.loads((await late.release()).payload)["error"]["err_code"] == 10071
    assert await stored(nc, stream, f"{stream}.a") == b"rival"


async def test_delay_outlives_the_client(proxy, nc, stream):
    late = proxy.delay(f"{stream}.a", count=2)
    async with client_of(proxy.url) as client:
        for payload in (b"one", bytes(900_000)):
            await unanswered(client, f"{stream}.a", payload)
        await late.hit(2)
    assert late.held == 2
    await proxy.refuse()
    assert json.loads((await late.release()).payload)["seq"] == 1
    assert await stored(nc, stream, f"{stream}.a") == b"one"
    assert json.loads((await late.release()).payload)["error"]["err_code"] == 10071
    with pytest.raises(RuntimeError, match="nothing is held"):
        await late.release()


async def test_delay_of_a_publish_without_headers_or_reply(proxy, through, nc, stream):
    late = proxy.delay(f"{stream}.a")
    await through.publish(f"{stream}.a", b"plain")
    await late.hit()
    assert json.loads((await late.release()).payload)["seq"] == 1
    assert await stored(nc, stream, f"{stream}.a") == b"plain"


async def test_release_to_nobody_says_so(proxy, through, namespace):
    late = proxy.delay(namespace)
    await through.publish(namespace, b"plain")
    await late.hit()
    assert (await late.release()).headers["Status"] == "503"


async def test_duplicate(proxy, through, nc, stream):
    fault = proxy.duplicate(f"{stream}.a")
    answers = await through.subscribe("answers")
    await through.publish(f"{stream}.a", b"twice", reply="answers")
    await fault.hit()
    assert [json.loads((await answers.next_msg(30)).data)["seq"] for _ in range(2)] == [1, 2]
    assert len(proxy.published(f"{stream}.a")) == 1


async def test_observe(proxy, through, nc, stream):
    seen = proxy.observe(f"{stream}.*", nth=2)
    for n in range(3):
        await claim(through, f"{stream}.{n}", b"%d" % n)
    assert (await seen.hit(2)).payload == b"2"
    assert await stored(nc, stream, f"{stream}.0") == b"0"


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({}, [0]),
        ({"nth": 3}, [2]),
        ({"count": 2}, [0, 1]),
        ({"nth": 2, "count": 2}, [1, 2]),
        ({"count": None}, [0, 1, 2, 3]),
        ({"nth": 3, "count": None}, [2, 3]),
    ],
)
async def test_nth_and_count(proxy, through, nc, stream, options, lost):
    fault = proxy.drop(f"{stream}.*", **options)
    for n in range(4):
        await through.publish(f"{stream}.{n}", b"%d" % n)
    await flushed(through)
    await settled(nc, stream)
    assert [int(m.payload) for m in fault.hits] == lost
    assert [n for n in range(4) if await stored(nc, stream, f"{stream}.{n}") is None] == lost
    assert await fault.hit(len(lost)) == fault.hits[-1]


async def test_a_predicate_sees_headers_and_payload(proxy, through, nc, stream):
    fault = proxy.drop(lambda m: m.payload == b"bad" and "Nats-Expected-Last-Subject-Sequence" in m.headers)
    await claim(through, f"{stream}.a", b"good")
    await unanswered(through, f"{stream}.b", b"bad")
    await fault.hit()
    assert len(fault.hits) == 1
    assert await stored(nc, stream, f"{stream}.b") is None


async def test_a_predicate_that_fails_fails_the_test(proxy, through, stream):
    fault = proxy.drop(lambda m: m.headers["missing"] == "x")
    await claim(through, f"{stream}.a")
    with pytest.raises(KeyError):
        await fault.hit()


async def test_a_publish_goes_to_the_oldest_rule_that_applies(proxy, through, nc, stream):
    first = proxy.drop(f"{stream}.a")
    second = proxy.drop_answer(f"{stream}.>")
    for _ in range(2):
        await unanswered(through, f"{stream}.a")
    await second.answered()
    assert len(first.hits) == len(second.hits) == 1
    assert await stored(nc, stream, f"{stream}.a") == b"claim"


async def test_cancel(proxy, through, stream):
    fault = proxy.drop(f"{stream}.a")
    fault.cancel()
    fault.cancel()
    assert (await claim(through, f"{stream}.a")).seq == 1
    assert fault.hits == []


async def test_waiting_in_vain_says_what_happened(proxy, through, stream):
    fault = proxy.drop(f"{stream}.never")
    await claim(through, f"{stream}.a")
    with pytest.raises(TimeoutError, match=rf"drop of '{stream}.never': 0 matched.*{stream}.a"):
        await fault.hit(timeout=0.01)
    with pytest.raises(TimeoutError, match="1 clients are connected"):
        await proxy.connected(2, timeout=0.01)


@pytest.mark.parametrize("options", [{"nth": 0}, {"count": 0}])
def test_counting_starts_at_one(options):
    with pytest.raises(ValueError, match="start from 1"):
        FaultProxy("127.0.0.1", 1).drop("a", **options)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.c"]),
        ("a.*", ["a.b", "a.c"], ["a", "a.b.c"]),
        ("*.b", ["a.b"], ["a.c", "a.b.b"]),
        ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
        (">", ["a", "a.b"], []),
        ("$KV.x.*.b", ["$KV.x.a.b"], ["$KV.x.a", "$KV.x.a.c"]),
    ],
)
def test_subject_wildcards(pattern, matching, others):
    proxy = FaultProxy("127.0.0.1", 1)
    proxy._published += [Published(subject, {}, b"") for subject in (*matching, *others)]
    assert [m.subject for m in proxy.published(pattern)] == matching


# Connections


async def test_cut_and_reconnect(proxy, stream):
    dropped = asyncio.Event()

    async def note():
        dropped.set()

    async with client_of(proxy.url, disconnected_cb=note) as client:
        await proxy.cut()
        await asyncio.wait_for(dropped.wait(), 30)
        await proxy.connected()
        assert (await claim(client, f"{stream}.a")).seq == 1


async def test_refuse_and_accept(proxy, through, nc, stream):
    await proxy.refuse()
    await proxy.cut()
    assert proxy.connections == 0
    with pytest.raises(nats.errors.NoServersError):
        await nats.connect(proxy.url, max_reconnect_attempts=1, reconnect_time_wait=0, error_cb=_ignore)
    while through.is_connected:
        await asyncio.sleep(0.001)
    await proxy.accept()
    await proxy.connected()
    assert (await claim(through, f"{stream}.a")).seq == 1


async def test_stall_both_ways(proxy, through, nc, stream):
    await proxy.stall()
    await unanswered(through, f"{stream}.a")
    assert proxy.published(f"{stream}.a") == []
    assert await stored(nc, stream, f"{stream}.a") is None
    landed = proxy.observe(f"{stream}.a")
    await proxy.resume()
    await landed.hit()
    await flushed(through)
    await settled(nc, stream)
    assert await stored(nc, stream, f"{stream}.a") == b"claim"
    assert proxy.connections == 1


async def test_stall_to_the_client_only(proxy, through, nc, stream):
    await proxy.stall("to_client")
    writing = asyncio.create_task(claim(through, f"{stream}.a"))
    await proxy.observe(f"{stream}.a").hit()
    while await stored(nc, stream, f"{stream}.a") is None:
        await asyncio.sleep(0)
    assert not writing.done()
    await proxy.resume()
    assert (await writing).seq == 1


async def test_stall_to_the_server_only(proxy, through, nc, namespace):
    messages = await through.subscribe(namespace)
    await flushed(through)
    await proxy.stall("to_server")
    await nc.publish(namespace, b"hello")
    assert (await messages.next_msg(30)).data == b"hello"
    with pytest.raises(nats.errors.TimeoutError):
        await through.request("$JS.API.INFO", timeout=0.1)
    await proxy.resume("to_client")
    with pytest.raises(nats.errors.TimeoutError):
        await through.request("$JS.API.INFO", timeout=0.1)
    await proxy.resume("to_server")
    await through.request("$JS.API.INFO", timeout=30)


async def test_a_stalled_write_of_a_client_that_has_gone_lands_late(proxy, nc, stream):
    client = await nats.connect(proxy.url)
    await proxy.stall("to_server")
    await unanswered(client, f"{stream}.a", b"late")
    await client.close()
    assert await stored(nc, stream, f"{stream}.a") is None
    late = proxy.observe(f"{stream}.a")
    await proxy.resume()
    await late.hit()
    while await stored(nc, stream, f"{stream}.a") is None:
        await asyncio.sleep(0)


async def test_stalled_connections_are_taken_and_hear_nothing(proxy):
    await proxy.stall()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readline(), 0.1)
    await proxy.resume()
    assert (await reader.readline()).startswith(b"INFO ")
    writer.close()
    await writer.wait_closed()


async def test_the_context_ends_with_everything_open_and_stalled(server, stream):
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        proxy.delay(f"{stream}.a")
        client = await nats.connect(proxy.url, allow_reconnect=False)
        await client.publish(f"{stream}.a", b"held for ever")
        await proxy.stall()
        await client.publish(f"{stream}.b", bytes(500_000))
        raw = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(3)]
    assert proxy.connections == 0
    for _, writer in raw:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    await client.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", proxy.port)


async def test_the_context_ends_while_it_is_still_dialling():
    """A connection that was accepted a moment ago: its dial is cancelled before or while it runs."""
    for turns in range(6):
        async with FaultProxy("127.0.0.1", 9) as proxy:
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            for _ in range(turns):
                await asyncio.sleep(0)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_server_that_is_down_looks_like_one(own_server, own_proxy):
    async with client_of(own_proxy.url) as client:
        await own_server.kill()
        while client.is_connected:
            await asyncio.sleep(0.001)
        await own_server.restart()
        await own_proxy.connected()
        while not client.is_connected:
            await asyncio.sleep(0.001)
        await client.jetstream().account_info()


async def test_the_body_may_raise(server):
    with pytest.raises(ZeroDivisionError):
        async with FaultProxy("127.0.0.1", server.port) as proxy, client_of(proxy.url):
            raise ZeroDivisionError
