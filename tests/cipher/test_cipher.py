"""Sealed payloads: nothing of them is to be read in NATS, and a key that is missing or wrong is never "absent"."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging

import pytest
from support import put, revisions, stored, toolkit_of

from natsreceipts import (
    AmbiguousCall,
    InvalidSetting,
    KeyMissing,
    Landed,
    NotClaimed,
    NotRecorded,
    PayloadMissing,
    SealBroken,
    Sealed,
    SealedError,
    Unreachable,
    hmac_digest,
)
from natsreceipts.integrations.outcomes import ToolGuard
from natsreceipts.telemetry import log_events

pytest.importorskip("cryptography")
from natsreceipts.cipher import Cipher, Key, key_file, new_key

PEPPER = hmac_digest(b"pepper")
SECRET = "Xylophone-4711"
"""What must not be found anywhere."""


@pytest.fixture
def keys():
    return {"acme": [new_key("k1")], "other": [new_key("k1")]}


@pytest.fixture
def connected(server, namespace, keys):
    def connect(given=keys, **settings):
        cipher = Cipher(given) if given is not None else None
        return toolkit_of(server.url, namespace, **{"cipher": cipher, "digest": PEPPER} | settings)

    return connect


@pytest.fixture
async def toolkit(connected):
    async with connected() as toolkit:
        yield toolkit


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "run-1")


async def never():
    raise AssertionError("this must not be executed")


def body(result):
    async def fn():
        return result

    return fn


async def dump(nc, namespace):
    """Every byte that any stream of the namespace holds, with base64 in it opened once."""
    js, found = nc.jetstream(), b""
    for name in (
        f"KV_{namespace}-receipts",
        f"OBJ_{namespace}-receipt-payloads",
        f"KV_{namespace}-notices",
        f"{namespace}-SESSIONS",
    ):
        state = (await js.stream_info(name)).state
        for seq in range(state.first_seq, state.last_seq + 1):
            with contextlib.suppress(Exception):
                message = await js.get_msg(name, seq=seq)
                found += message.subject.encode() + b"\n" + (message.data or b"") + b"\n"
                with contextlib.suppress(ValueError):
                    found += inside(json.loads(message.data))
    return found


def inside(value):
    if isinstance(value, dict):
        return b"".join(inside(each) for pair in value.items() for each in pair)
    if isinstance(value, list):
        return b"".join(map(inside, value))
    with contextlib.suppress(ValueError, TypeError):
        return base64.b64decode(value, validate=True)
    return b""


async def everything(toolkit):
    """Leave one of everything that carries a user's data behind."""
    run = toolkit.run("acme", "run-1", store_args=True)
    await run.execute("send", {"to": SECRET}, body({"said": SECRET}))
    await run.execute("pack", {"to": SECRET}, body({"said": SECRET.encode(), 1: SECRET}))
    await run.execute("large", {"to": SECRET}, body([SECRET] * 40_000))

    async def steps(call):
        await call.step("one", lambda: SECRET)
        raise ConnectionError(f"cannot reach {SECRET}")

    with pytest.raises(ConnectionError):
        await run.execute("plan", {"to": SECRET}, steps, effect="resumable")

    async def fails():
        raise TimeoutError(f"no answer for {SECRET}")

    with pytest.raises(TimeoutError):
        await run.execute("doubt", {"to": SECRET}, fails)
    with pytest.raises(TimeoutError):
        await run.execute("resolved", {"to": SECRET}, fails)
    doubtful = await toolkit.receipts.get(run.key("resolved", {"to": SECRET}))
    await toolkit.receipts.resolve(
        doubtful.kv_key, revision=doubtful.revision, completed=[SECRET], by="ann", reason="she looked", notify="planner"
    )
    session = toolkit.sessions.open("acme", "chat-1", dialect="neutral")
    await session.append({"role": "user", "content": f"Tell {SECRET}."})
    call = {"type": "toolCall", "id": "c1", "name": "send", "arguments": {"to": SECRET}}
    await session.append({"role": "assistant", "content": [call]}, run="run-1")
    await session.suspend(["c1"])
    await session.resume(["c1"])
    await session.wake(guarded={"send": lambda arguments: arguments})
    await session.compact({"role": "user", "content": f"{SECRET} was told."})
    return run, session


async def test_a_dump_holds_no_byte_of_arguments_or_results(connected, nc, namespace):
    async with connected() as toolkit:
        run, session = await everything(toolkit)
        found = await dump(nc, namespace)
        assert len(found) > 400_000  # the large result, too
        for needle in (SECRET, SECRET[:9], "said", "Tell", "was told", "cannot reach", "no answer"):
            assert needle.encode() not in found, needle
            assert base64.b64encode(needle.encode())[:-4] not in found, needle
        assert [entry.kind for entry in (await session.load()).entries][-1] == "compaction"
    async with connected() as again:
        run = again.run("acme", "run-1")
        to = {"to": SECRET}
        assert await run.execute("send", to, never) == {"said": SECRET}
        assert await run.execute("pack", to, never) == {"said": SECRET.encode(), 1: SECRET}
        assert await run.execute("large", to, never) == [SECRET] * 40_000
        assert await run.execute("resolved", to, never) == [SECRET]
        with pytest.raises(AmbiguousCall, match=SECRET):
            await run.execute("doubt", to, never)

        async def goes_on(call):
            return await call.step("one", never)

        assert await run.execute("plan", to, goes_on, effect="resumable") == SECRET
        receipt = await again.receipts.get(run.key("send", to))
        assert (receipt.result, receipt.args) == ({"said": SECRET}, to)
        assert SECRET in (await again.receipts.get(run.key("doubt", to))).error.message
        listed = {r.key.tool: r async for r in again.receipts.list()}
        assert (listed["send"].result, listed["send"].args) == ({"said": SECRET}, to)
        for record in (receipt, await again.receipts.get(run.key("plan", to))):
            for payload in (record.record.args, record.record.result, *(record.record.steps or {}).values()):
                if payload is not None:
                    assert SECRET in str(await again.receipts.payload(record, payload))
        session = again.sessions.open("acme", "chat-1")
        messages = (await session.load()).messages
        assert messages[0] == {"role": "user", "content": f"Tell {SECRET}."}
        assert (await session.context()).messages[0]["content"] == f"{SECRET} was told."


async def test_without_the_cipher_it_is_all_there(connected, nc, namespace):
    """That the dump would show it."""
    async with connected(None) as toolkit:
        await everything(toolkit)
    found = await dump(nc, namespace)
    assert found.count(SECRET.encode()) > 40_000


async def test_keys_are_rotated(connected, keys, nc, namespace):
    async with connected() as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", {}, body("old"))
        keys["acme"].insert(0, new_key("k2"))
        await run.execute("send", {"n": 2}, body("new"))
        assert (await stored(nc, namespace, run.key("send", {"n": 2})))["result"]["sealed"]["key"] == "k2"
        assert await run.execute("send", {}, never) == "old"
        session = toolkit.sessions.open("acme", "s", dialect="neutral")
        await session.append({"role": "user", "content": "one"})
        keys["acme"].insert(0, new_key("k3"))
        await session.append({"role": "user", "content": "two"})
    async with connected() as toolkit:
        assert [m["content"] for m in (await toolkit.sessions.open("acme", "s").load()).messages] == ["one", "two"]
        del keys["acme"][2]
        with pytest.raises(KeyMissing, match="'k1'"):
            await toolkit.run("acme", "run-1").execute("send", {}, never)
        assert await toolkit.run("acme", "run-1").execute("send", {"n": 2}, never) == "new"


async def test_without_its_key_a_tenants_data_is_gone_and_nothing_is_executed_again(connected, keys, nc, namespace):
    async with connected() as toolkit:
        run, _ = await everything(toolkit)
        await toolkit.run("other", "run-1").execute("send", {}, body("theirs"))
        kept = await revisions(nc, namespace, run.key("send", {"to": SECRET}))
        del keys["acme"]
        for tool in ("send", "pack", "large", "resolved"):
            with pytest.raises(KeyMissing) as raised:
                await run.execute(tool, {"to": SECRET}, never)
            assert (raised.value.tenant, raised.value.key) == ("acme", run.key(tool, {"to": SECRET}))
        with pytest.raises(KeyMissing):
            await run.execute("new", {}, never)
        assert await toolkit.receipts.get(run.key("new", {})) is None
        with pytest.raises(KeyMissing):
            await toolkit.receipts.get(run.key("send", {"to": SECRET}))
        listed = {r.key.tool: r async for r in toolkit.receipts.list(tenant="acme")}
        assert listed["send"].status == "completed"
        assert listed["send"].result == listed["send"].args == Sealed("k1")
        assert listed["doubt"].error.message == "(sealed with key k1)"
        assert await revisions(nc, namespace, run.key("send", {"to": SECRET})) == kept
        for verb in ("load", "context", "wake"):
            with pytest.raises(KeyMissing):
                await getattr(toolkit.sessions.open("acme", "chat-1"), verb)()
        assert await toolkit.run("other", "run-1").execute("send", {}, never) == "theirs"


@pytest.mark.parametrize("given", ["none", "wrong"])
async def test_a_toolkit_without_the_key_or_with_another_is_told_so(connected, toolkit, keys, given):
    await everything(toolkit)
    wrong = {"acme": [new_key("k1")]} if given == "wrong" else None
    kind = SealBroken if given == "wrong" else KeyMissing
    async with connected(wrong) as other:
        run = other.run("acme", "run-1")
        for tool in ("send", "pack", "large", "resolved"):
            with pytest.raises(kind):
                await run.execute(tool, {"to": SECRET}, never)
        with pytest.raises(AmbiguousCall, match="cannot be opened"):
            await run.execute("doubt", {"to": SECRET}, never)

        async def goes_on(call):
            return await call.step("one", never)

        with pytest.raises(kind):
            await run.execute("plan", {"to": SECRET}, goes_on, effect="resumable")
        with pytest.raises(kind):
            await other.sessions.open("acme", "chat-1").load()
        (doubtful,) = [r async for r in other.receipts.list(tool="doubt")]
        if given == "none":
            with pytest.raises(KeyMissing):
                await other.receipts.resolve(
                    doubtful.kv_key, revision=doubtful.revision, completed=SECRET, by="ann", reason="looked"
                )
        settled = await other.receipts.resolve(
            doubtful.kv_key, revision=doubtful.revision, not_applied=True, by="ann", reason="it is not there"
        )
        assert settled.status == "failed"


async def test_what_is_sealed_does_not_open_in_another_place(connected, toolkit, nc, namespace, server):
    run = toolkit.run("acme", "run-1", store_args=True)
    for n in (1, 2):
        await run.execute("send", {"n": n}, body(f"result {n}"))
    one, two = (run.key("send", {"n": n}) for n in (1, 2))
    theirs, ours = await stored(nc, namespace, one), await stored(nc, namespace, two)
    for changed in (
        {"result": theirs["result"]},
        {"result": ours["args"]},
        {"result": {"sealed": {"key": "k1", "data": "AAAA"}}},
        {"result": {"sealed": {"key": "k1", "data": flipped(ours["result"]["sealed"]["data"])}}},
    ):
        await put(nc, namespace, two, ours | changed)
        with pytest.raises(SealBroken):
            await run.execute("send", {"n": 2}, never)
    await put(nc, namespace, two, ours)
    assert await run.execute("send", {"n": 2}, never) == "result 2"
    # An entry in another session, or under another id.
    session = toolkit.sessions.open("acme", "chat-1", dialect="neutral")
    await session.append({"role": "user", "content": SECRET})
    js, stream = nc.jetstream(), f"{namespace}-SESSIONS"
    entry = await js.get_msg(stream, seq=(await js.stream_info(stream)).state.last_seq)
    await js.publish(f"{namespace}-sessions.acme.chat-2", entry.data)
    with pytest.raises(SealBroken):
        await toolkit.sessions.open("acme", "chat-2").load()
    renamed = json.dumps(json.loads(entry.data) | {"id": "another"}).encode()
    await js.publish(f"{namespace}-sessions.acme.chat-1", renamed)
    with pytest.raises(SealBroken):
        await toolkit.sessions.open("acme", "chat-1").load()


def flipped(data):
    raw = bytearray(base64.b64decode(data))
    raw[-1] ^= 1
    return base64.b64encode(raw).decode()


async def test_the_same_value_is_never_sealed_alike(run, nc, namespace):
    boxes = set()
    for n in range(4):
        await run.execute("send", {"n": n}, body("the same"))
        boxes.add((await stored(nc, namespace, run.key("send", {"n": n})))["result"]["sealed"]["data"])
    assert len(boxes) == 4


async def test_old_plain_records_stay_readable(connected, keys):
    async with connected(None) as plain:
        await plain.run("acme", "r").execute("send", {}, body("plain"))
        session = plain.sessions.open("acme", "s", dialect="neutral")
        await session.append({"role": "user", "content": "plain"})
    async with connected() as toolkit:
        assert await toolkit.run("acme", "r").execute("send", {}, never) == "plain"
        session = toolkit.sessions.open("acme", "s")
        await session.append({"role": "user", "content": "sealed"})
        assert [m["content"] for m in (await session.load()).messages] == ["plain", "sealed"]


async def test_a_large_result_whose_object_is_gone_is_missing_and_not_sealed(run, nc, namespace):
    await run.execute("large", {}, body(["x" * 1000] * 600))
    store = await nc.jetstream().object_store(f"{namespace}-receipt-payloads")
    record = await stored(nc, namespace, run.key("large", {}))
    assert record["result"]["object"]["sealedWith"] == "k1"
    await store.delete(record["result"]["object"]["name"])
    with pytest.raises(PayloadMissing):
        await run.execute("large", {}, never)


async def test_a_verifiers_result_is_sealed(run, nc, namespace):
    async def verify():
        return Landed(SECRET)

    async def fails():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await run.execute("send", {}, fails)
    assert await run.execute("send", {}, never, verify=verify) == SECRET
    assert "sealed" in (await stored(nc, namespace, run.key("send", {})))["result"]


async def test_a_key_that_goes_while_the_body_runs_leaves_the_outcome_sealed(connected, keys):
    async with connected() as toolkit:
        run = toolkit.run("acme", "run-1")
        key = keys["acme"][0]

        async def shredding():
            keys["acme"].clear()
            return SECRET

        assert await run.execute("send", {}, shredding) == SECRET
        with pytest.raises(KeyMissing):
            await run.execute("send", {}, never)
        keys["acme"].append(key)
        assert await run.execute("send", {}, never) == SECRET


async def test_keys_may_come_from_a_function(connected, keys):
    asked = []

    async def from_a_service(tenant, key_id):
        asked.append((tenant, key_id))
        return next((key for key in keys.get(tenant, []) if key_id in (None, key.id)), None)

    def plainly(tenant, key_id):
        return keys["acme"][0] if key_id in (None, "k1") else None

    async with connected(from_a_service) as toolkit:
        await toolkit.run("acme", "r").execute("send", {}, body(1))
        assert asked == [("acme", None)]
    async with connected(plainly) as toolkit:
        assert await toolkit.run("acme", "r").execute("send", {}, never) == 1

    def down(tenant, key_id):
        raise ConnectionError("the key service is down")

    async with connected(down) as toolkit:
        for n in (1, 2):
            with pytest.raises(NotClaimed, match="ConnectionError") as raised:
                await toolkit.run("acme", "r").execute("send", {"n": n} if n > 1 else {}, never)
            assert isinstance(raised.value.__cause__.__cause__, ConnectionError)
        assert await toolkit.receipts.get(toolkit.run("acme", "r").key("send", {"n": 2})) is None
        with pytest.raises(Unreachable, match="ConnectionError"):
            await toolkit.receipts.get(toolkit.run("acme", "r").key("send", {}))
        with pytest.raises(Unreachable, match="ConnectionError"):
            await toolkit.sessions.open("acme", "chat", dialect="neutral").append({"role": "user", "content": "hi"})
    async with connected(lambda tenant, key_id: b"x" * 32) as toolkit:
        with pytest.raises(InvalidSetting, match="bytes"):
            await toolkit.run("acme", "r").execute("send", {"n": 3}, never)


async def test_a_key_service_that_is_down_is_no_word_of_the_body_around(connected, keys):
    """A body in which another call cannot be made has had its own effect, whatever kind of error says so."""
    service = {"up": True}

    def find(tenant, key_id):
        if not service["up"]:
            raise ConnectionError("the key service is down")
        return keys["acme"][0]

    async with connected(find) as toolkit:
        run = toolkit.run("acme", "r")

        async def outer():
            service["up"] = False
            await run.execute("inner", {}, never)

        with pytest.raises(NotClaimed):
            await run.execute("outer", {}, outer, not_applied=(ConnectionError,))
        service["up"] = True
        assert (await toolkit.receipts.get(run.key("outer", {}))).status == "ambiguous"


async def test_nothing_that_was_sealed_is_logged(connected, caplog):
    """Nor what a verifier, or a function that makes a key for wake, says of it."""

    async def fails():
        raise TimeoutError(f"no answer for {SECRET}")

    def breaks(*_):
        raise ValueError(f"cannot read {SECRET}")

    with caplog.at_level(logging.DEBUG, "natsreceipts"):
        async with connected(hooks=[log_events]) as toolkit:
            await everything(toolkit)
            run = toolkit.run("acme", "run-1")

            async def verify(_call):
                breaks()

            with pytest.raises(AmbiguousCall, match=SECRET):
                await run.execute("doubt", {"to": SECRET}, never, verify=verify)
            outcome = await ToolGuard(run).call("doubt", {"to": SECRET}, never)
            assert "unknown" in outcome.text
            session = toolkit.sessions.open("acme", "chat-2", dialect="neutral")
            call = {"type": "toolCall", "id": "c1", "name": "send", "arguments": {"to": SECRET}}
            await session.append({"role": "assistant", "content": [call]}, run="run-1")
            await session.wake(guarded={"send": breaks})
    assert "the verifier failed (ValueError)" in caplog.text
    assert "the model is told" in caplog.text
    assert "cannot be made (ValueError)" in caplog.text
    for record in caplog.records:
        assert SECRET not in record.getMessage() + str(record.__dict__), record


async def test_a_plain_digest_is_warned_of(connected, caplog):
    with caplog.at_level(logging.WARNING, "natsreceipts"):
        async with connected(digest=hmac_digest(b"x")):
            pass
        assert "guess" not in caplog.text
        from natsreceipts import sha256_hex

        async with connected(digest=sha256_hex):
            pass
    assert "test a guess" in caplog.text


def test_what_is_no_key_is_refused(tmp_path):
    for bad in (("", b"x" * 32), ("a b", b"x" * 32), ("k", b"x" * 16), ("k", "x" * 32), ("k" * 65, b"x" * 32)):
        with pytest.raises(InvalidSetting):
            Key(*bad)
    assert "secret" not in repr(new_key("k"))
    assert new_key("k").secret != new_key("k").secret
    with pytest.raises(InvalidSetting):
        Cipher(7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        new_key("k").id = "other"


async def test_a_key_file_holds_the_keys_in_order(tmp_path):
    one, two = new_key("k1"), new_key("k2")
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"acme": {k.id: base64.b64encode(k.secret).decode() for k in (two, one)}}))
    cipher = key_file(path)
    assert await cipher.current("acme") == two
    assert await cipher.named("acme", "k1") == one
    assert await cipher.named("acme", "k3") is None
    assert await cipher.current("other") is None
    for bad in (
        "[]",
        "{",
        '{"acme": {"k1": "short"}}',
        '{"acme": {"k1": "????"}}',
        '{"acme": ["k1"]}',
        '{"acme": {"k1": 7}}',
    ):
        path.write_text(bad)
        with pytest.raises(InvalidSetting):
            key_file(path)


def test_the_errors_pickle():
    import pickle

    for error in (
        KeyMissing("a.b", tenant="a", key_id=None, what="body"),
        SealBroken("a.b", tenant="a", key_id="k", what="result"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.tenant) == (str(error), "a")
        assert isinstance(again, SealedError)
    assert not issubclass(KeyMissing, NotRecorded)
