"""Records that nobody should have written, and receipts that are gone: never executed, never taken for absent."""

from __future__ import annotations

import json

import pytest
from support import Effect, bucket_of, lax_bucket, put, record_of, redelivery, revisions, stored, toolkit_of

from natsreceipts import (
    AmbiguousCall,
    CallInFlight,
    CallWithdrawn,
    CorruptRecord,
    NotRecorded,
    ReceiptErased,
    UnsupportedRecord,
)

ARGS = {"to": "a@b.c"}


@pytest.fixture
def key(run):
    return run.key("send", ARGS)


async def refused(run, error, *, effect="opaque"):
    """The call must be refused with this error, by both doors, and nothing may be executed."""
    body = Effect("wrong")
    for options in ({}, {"wait": 0}):
        with pytest.raises(error) as caught:
            await run.execute("send", ARGS, body, effect=effect, **options)
        with pytest.raises(error):
            async with run.call("send", ARGS, effect=effect, **options):
                raise AssertionError("the body was entered")
    assert body.entered == 0
    assert caught.value.key == run.key("send", ARGS)
    return caught.value


# Erased


@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
@pytest.mark.parametrize("before", ["nothing", "running", "completed"])
async def test_a_key_with_a_delete_marker(toolkit, run, key, nc, namespace, before, kind):
    """A plain put of a marker passes deny_delete and deny_purge."""
    if before == "running":
        await put(nc, namespace, key, record_of(key))
    elif before == "completed":
        await run.execute("send", ARGS, Effect())
    revision = await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    error = await refused(run, ReceiptErased, effect=kind)
    assert (error.bucket, error.revision) == (bucket_of(namespace), revision)
    with pytest.raises(ReceiptErased):
        await toolkit.receipts.get(key)


@pytest.mark.parametrize("erase", ["delete", "purge"])
async def test_a_key_that_nats_py_deleted(server, nc, namespace, bucket, erase):
    await lax_bucket(nc, namespace)
    async with toolkit_of(server.url, namespace) as toolkit:
        run = toolkit.run("acme", "run-1")
        await run.execute("send", ARGS, Effect())
        kv = await nc.jetstream().key_value(bucket)
        await getattr(kv, erase)(run.key("send", ARGS).kv_key)
        await refused(run, ReceiptErased)


async def test_a_marker_that_the_server_placed(toolkit, run, key, nc, namespace):
    await put(nc, namespace, key, b"", headers={"Nats-Marker-Reason": "MaxAge"})
    await refused(run, ReceiptErased)


async def test_a_receipt_that_is_erased_while_its_body_runs(run, key, nc, namespace):
    with pytest.raises(NotRecorded) as caught:
        async with run.call("send", ARGS) as call:
            await put(nc, namespace, key, b"", headers={"KV-Operation": "PURGE"})
            call.result = "mine"
    assert caught.value.result == "mine"
    assert isinstance(caught.value.__cause__, ReceiptErased)


async def test_on_a_redelivery_an_erased_receipt_is_refused_too(toolkit, run, key, nc, namespace):
    await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    async with redelivery(toolkit):
        await refused(run, ReceiptErased)


# Not readable

CORRUPT = {
    "empty": b"",
    "foreign text": b"hello",
    "foreign bytes": bytes(range(256)),
    "a number": b"1",
    "an array": b"[]",
    "null": b"null",
    "no version": lambda r: r.pop("v"),
    "version 0": {"v": 0},
    "version true": {"v": True},
    "version 1.0": {"v": 1.5},
    "version as text": {"v": "2"},
    "no names": lambda r: r.pop("tenantId"),
    "another tenant": {"tenantId": "other"},
    "another run": {"runId": "run-2"},
    "another tool": {"toolName": "sand"},
    "other arguments": {"argsHash": "0" * 64},
    "an illegal name": {"runId": ""},
    "an illegal hash": {"argsHash": "x"},
    "an unknown status": {"status": "done"},
    "status as number": {"status": 1},
    "unknown effect": {"effect": "maybe"},
    "read effect": {"effect": "read"},
    "no effect": lambda r: r.pop("effect"),
    "attempts 0": {"attempts": 0},
    "attempts -1": {"attempts": -1},
    "attempts true": {"attempts": True},
    "attempts 1.0": {"attempts": 1.5},
    "attempts as text": {"attempts": "1"},
    "lease 0": {"leaseMs": 0},
    "running without lease": lambda r: r.pop("leaseMs"),
    "running without holder": lambda r: r.pop("holder"),
    "holder without token": {"holder": {"worker": "x"}},
    "completed without result": {"status": "completed"},
    "result of no form": {"status": "completed", "result": {}},
    "result of two forms": {"status": "completed", "result": {"json": 1, "msgpack": "AA=="}},
    "result that is no object": {"status": "completed", "result": 7},
    "withdrawn with attempts": {"status": "withdrawn"},
    "open as text": {"open": "false"},
}


@pytest.mark.parametrize("what", CORRUPT)
async def test_a_record_that_does_not_read(toolkit, run, key, nc, namespace, what):
    how = CORRUPT[what]
    value = how
    if isinstance(how, dict):
        value = record_of(key, **how)
    elif callable(how):
        value = record_of(key)
        how(value)
    revision = await put(nc, namespace, key, value)
    error = await refused(run, CorruptRecord)
    assert (error.bucket, error.revision) == (bucket_of(namespace), revision)
    assert key.kv_key in str(error)
    assert f"revision {revision}" in str(error)
    await refused(run, CorruptRecord, effect="idempotent")
    with pytest.raises(CorruptRecord) as caught:
        await toolkit.receipts.get(key)
    assert caught.value.revision == revision
    with pytest.raises(CorruptRecord):
        await toolkit.receipts.get(key.kv_key)
    assert len(await _raw(nc, namespace, key)) == 1  # nothing was written over it


async def _raw(nc, namespace, key):
    bucket = bucket_of(namespace)
    info = await nc.jetstream().stream_info(f"KV_{bucket}")
    return range(info.state.messages)


async def test_a_record_cut_off_anywhere(run, key, nc, namespace):
    whole = json.dumps(record_of(key, status="completed", result={"json": {"a": [1, "ä"]}})).encode()
    for length in range(1, len(whole), 23):
        await put(nc, namespace, key, whole[:length])
        with pytest.raises(CorruptRecord):
            await run.execute("send", ARGS, Effect("wrong"))
    await put(nc, namespace, key, whole)
    assert await run.execute("send", ARGS, Effect("wrong")) == {"a": [1, "ä"]}


@pytest.mark.parametrize(
    "text", ["", "AA", "!!!!", "wQ==", "gqFh", "xwEA", "1AkA", "1AFh", "1AJ4", "xwMBYWJj", "AAA=", "1Gdg"]
)
async def test_a_result_that_is_no_messagepack(toolkit, run, key, nc, namespace, text):
    """Also a trailing byte, unknown extension types and ill-formed known ones."""
    value = record_of(key, status="completed", result={"msgpack": text})
    revision = await put(nc, namespace, key, value)
    error = await refused(run, CorruptRecord)
    assert error.revision == revision
    with pytest.raises(CorruptRecord):
        await toolkit.receipts.get(key)


async def test_a_record_that_turns_corrupt_under_its_holder(run, key, nc, namespace):
    with pytest.raises(NotRecorded) as caught:
        async with run.call("send", ARGS) as call:
            await put(nc, namespace, key, b"junk")
            call.result = "mine"
    assert isinstance(caught.value.__cause__, CorruptRecord)
    assert caught.value.result == "mine"


# Newer


@pytest.mark.parametrize(
    "value",
    [{"v": 2}, {"v": 17, "status": "running", "anything": []}, None],
    ids=["bare", "unlike ours", "like ours"],
)
async def test_a_newer_record(toolkit, run, key, nc, namespace, value):
    value = value or record_of(key, v=2)
    revision = await put(nc, namespace, key, value)
    error = await refused(run, UnsupportedRecord)
    assert (error.bucket, error.revision, error.version) == (bucket_of(namespace), revision, value["v"])
    with pytest.raises(UnsupportedRecord):
        await toolkit.receipts.get(key)


async def test_unknown_fields_are_ignored(toolkit, run, key, nc, namespace):
    holder = {"token": "x", "worker": "y", "colour": "red"}
    result = {"json": 5}
    value = record_of(key, status="completed", result=result, holder=holder, later={"a": 1}, error=None)
    del value["error"]
    await put(nc, namespace, key, value)
    assert await run.execute("send", ARGS, Effect("wrong")) == 5
    assert (await toolkit.receipts.get(key)).result == 5


async def test_unknown_fields_under_a_live_call(run, key, nc, namespace):
    async with run.call("send", ARGS) as call:
        await put(nc, namespace, key, (await stored(nc, namespace, key)) | {"later": 1}, last=call.revision)
        await call.renew()
        call.result = 1
    assert (await stored(nc, namespace, key))["status"] == "completed"


# Odd and legal


async def test_an_ambiguous_record_of_another_worker(run, key, nc, namespace):
    revision = await put(nc, namespace, key, record_of(key, status="ambiguous", attempts=3))
    error = await refused(run, AmbiguousCall)
    assert (error.revision, error.attempts) == (revision, 3)
    await run.execute("send", [2], Effect())
    assert len(await revisions(nc, namespace, key)) == 1


async def test_an_ambiguous_record_to_a_lax_caller_is_still_ambiguous(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, status="ambiguous"))
    await refused(run, AmbiguousCall, effect="idempotent")


async def test_an_idempotent_ambiguous_record_is_executed_again_by_a_lax_caller(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, status="ambiguous", effect="idempotent"))
    assert await run.execute("send", ARGS, Effect("again"), effect="idempotent") == "again"
    record = await stored(nc, namespace, key)
    assert (record["attempts"], record["open"]) == (2, True)


@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
async def test_a_failed_record_that_was_not_applied(run, key, nc, namespace, kind):
    error = {"type": "X", "message": "m", "notApplied": True}
    await put(nc, namespace, key, record_of(key, status="failed", attempts=4, error=error, effect=kind))
    assert await run.execute("send", ARGS, Effect("fifth"), effect=kind) == "fifth"
    record = await stored(nc, namespace, key)
    assert record["attempts"] == 5
    assert not record.get("open")
    assert "error" not in record


async def test_an_open_record_stays_open(run, key, nc, namespace):
    error = {"type": "X", "message": "m", "notApplied": True}
    value = record_of(key, status="failed", attempts=4, error=error, open=True)
    await put(nc, namespace, key, value)
    assert await run.execute("send", ARGS, Effect("fifth")) == "fifth"
    assert (await stored(nc, namespace, key))["open"] is True


async def test_a_failed_record_without_an_error(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, status="failed"))
    await refused(run, AmbiguousCall)


async def test_a_claim_drops_what_the_last_attempt_said(run, key, nc, namespace):
    error = {"type": "X", "message": "m", "notApplied": True}
    await put(
        nc,
        namespace,
        key,
        record_of(
            key,
            status="failed",
            error=error,
            resolved={"by": "ann", "reason": "r"},
            steps={"a": {"json": 1}},
            effect="resumable",
        ),
    )
    seen = []

    async def body():
        seen.append(await stored(nc, namespace, key))
        return 1

    await run.execute("send", ARGS, body, effect="idempotent")
    (claim,) = seen
    assert not {"error", "resolved", "result"} & set(claim)
    assert (claim["steps"], claim["effect"], claim["attempts"]) == ({"a": {"json": 1}}, "resumable", 2)


# Withdrawn by a wake


def withdrawn(key, **fields):
    record = record_of(key, status="withdrawn", attempts=0) | fields
    return {name: value for name, value in record.items() if name not in ("effect", "leaseMs", "holder")}


@pytest.mark.parametrize("kind", ["opaque", "idempotent"])
async def test_a_withdrawn_call_is_refused(run, key, nc, namespace, kind):
    await put(nc, namespace, key, withdrawn(key, fences={"s1": 17}))
    await refused(run, CallWithdrawn, effect=kind)
    assert len(await revisions(nc, namespace, key)) == 1


@pytest.mark.parametrize("status", ["failed", "ambiguous", "running"])
async def test_a_fenced_call_is_refused(run, key, nc, namespace, status):
    error = {"type": "X", "message": "m", "notApplied": True}
    await put(nc, namespace, key, record_of(key, status=status, fences={"s1": 17}, error=error))
    await refused(run, CallWithdrawn)
    assert len(await revisions(nc, namespace, key)) == 1


async def test_a_fenced_call_that_is_completed_is_replayed(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, status="completed", fences={"s1": 17}, result={"json": 3}))
    assert await run.execute("send", ARGS, Effect("wrong")) == 3


async def test_a_withdrawn_record_without_fences_is_as_absent(run, key, nc, namespace):
    await put(nc, namespace, key, withdrawn(key))
    assert await run.execute("send", ARGS, Effect()) == "done"
    record = await stored(nc, namespace, key)
    assert (record["attempts"], record.get("open", False)) == (1, False)


async def test_a_lease_of_many_years(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, leaseMs=10**15))
    with pytest.raises(CallInFlight):
        await run.execute("send", ARGS, Effect("wrong"), wait=0)


async def test_a_completed_result_of_null(run, key, nc, namespace):
    await put(nc, namespace, key, record_of(key, status="completed", result={"json": None}))
    assert await run.execute("send", ARGS, Effect("wrong")) is None


async def test_more_revisions_than_the_history_keeps(run, key, nc, namespace):
    """A call with many heartbeats loses its claim from the history, and still knows its own."""
    async with run.call("send", ARGS) as call:
        for _ in range(12):
            await call.renew()
        call.result = 1
    assert len(await revisions(nc, namespace, key)) == 8
    assert await run.execute("send", ARGS, Effect("wrong")) == 1
