"""One receipt told: fields, timeline, payloads, what to do; also of erased and unreadable ones."""

from __future__ import annotations

import datetime as dt
import json
import re

import pytest
from program import Terminal
from scenes import ambiguous_call, stand
from support import Effect, Holder, put, record_of, toolkit_of

from natsreceipts import AmbiguousCall, NotApplied

ARGS = {"to": "ann@example.com"}


def statuses(shown):
    return [revision["status"] for revision in shown["history"]]


async def shown(cli, key, *flags):
    ended = await cli("receipts", "show", key.kv_key, "--json", *flags)
    assert ended.code == 0, ended.err
    (told,) = ended.objects
    return told


async def test_killed_reclaimed_ambiguous_and_resolved(cli, server, namespace, toolkit):
    """A worker is killed, another takes over and is killed, the tool has become opaque, a person settles it."""
    options = {"effect": "idempotent", "lease": 1.0}
    for attempt in (1, 2):
        async with Holder.of(server.url, namespace, ARGS, **options) as holder:
            assert await holder.says() == f"entered {attempt}"
            holder.kill()
    run = toolkit.run("acme", "run-1")
    with pytest.raises(AmbiguousCall):
        await run.execute("send", ARGS, Effect("wrong"), lease=1.0)
    key = run.key("send", ARGS)
    revision = (await toolkit.receipts.get(key)).revision
    said = ("--by", "ann", "--reason", "seen in the outbox", "--yes")
    ended = await cli("receipts", "resolve", key.kv_key, "--completed", '"m-1"', "--revision", revision, *said)
    assert ended.code == 0, ended.err

    told = await shown(cli, key)
    assert told["status"] == "completed"
    assert told["result"] == {"json": "m-1"}
    story = [(revision["status"], revision["attempts"]) for revision in told["history"]]
    assert [step for n, step in enumerate(story) if step not in story[:n]] == [
        *(("running", 1), ("running", 2), ("ambiguous", 2), ("completed", 2)),
    ]
    events = [revision["event"] for revision in told["history"]]
    assert events[0].startswith("attempt 1 begins by ")
    assert sum("attempt 2 takes over from attempt 1" in event for event in events) == 1
    assert "attempt 2 may or may not have taken effect: LeaseExpired" in events[-2]
    assert events[-1] == "settled as completed by ann: seen in the outbox"
    times = [revision["time"] for revision in told["history"]]
    assert times == sorted(times)

    ended = await cli("receipts", "show", key.kv_key)
    text = ended.out.split("What happened, by the server's clock")[1].split("What to do")
    shown_times = re.findall(r"^  (\S+ \S+Z)", text[0], re.MULTILINE)
    assert shown_times == [f"{time[:10]} {time[11:23]}Z" for time in times]
    assert "Nothing: every later attempt gets this result." in text[1]
    assert "settled         by ann: seen in the outbox" in ended.out


async def test_a_failed_attempt_and_the_next(cli, run):
    with pytest.raises(NotApplied):
        await run.execute("send", ARGS, Effect(NotApplied("refused")))
    key = run.key("send", ARGS)
    told = await shown(cli, key)
    assert statuses(told) == ["running", "failed"]
    assert "attempt 1 had no effect: natsreceipts.errors.NotApplied: refused" in told["history"][1]["event"]
    assert told["next"] == ["Nothing: the next attempt executes the call."]
    await run.execute("send", ARGS, Effect())
    told = await shown(cli, key)
    assert [revision["event"].split(" by")[0] for revision in told["history"][2:]] == ["attempt 2 begins", "completed"]


async def test_steps_and_renewals(cli, run):
    async with run.call("send", ARGS, effect="resumable") as call:
        await call.step("upload", lambda: "there")
        await call.renew()
        call.result = None
    told = await shown(cli, call.key)
    events = [revision["event"] for revision in told["history"]]
    assert events[1] == "step upload on record by host-a/101"
    assert events[2].startswith("lease renewed by host-a/101, lease ")
    assert told["steps"] == {"upload": {"json": "there"}}


async def test_what_to_do_with_an_ambiguous_one(cli, run, namespace, server):
    await ambiguous_call(run, ARGS)
    key = run.key("send", ARGS)
    told = await shown(cli, key)
    assert told["idempotencyKey"] == key.idempotency_key
    text = (await cli("receipts", "show", key.kv_key)).out
    assert key.idempotency_key in text
    command = f"natsreceipts --server {server.url} --namespace {namespace} receipts resolve {key.kv_key} --by YOU"
    assert sum(line.strip().startswith(f"$ {command}") for line in text.splitlines()) == 2


async def test_a_live_one_is_waited_for(cli, run, nc, namespace):
    live, over, again = (run.key("send", [n]) for n in range(3))
    await stand(nc, namespace, live, "running", leaseMs=600_000)
    await stand(nc, namespace, over, "running", leaseMs=1)
    await stand(nc, namespace, again, "running", leaseMs=1, effect="idempotent")
    told = await shown(cli, live)
    assert 0 < told["leaseLeftSeconds"] <= 602
    assert told["next"][0].startswith("Wait: its worker (elsewhere/1) is at it")
    told = await shown(cli, over)
    assert told["leaseLeftSeconds"] < 0
    assert told["next"][0].startswith("Its lease is over, so the next caller finds it ambiguous.")
    assert (await shown(cli, again))["next"] == ["Nothing: its lease is over, and the next attempt takes over."]


async def test_payloads_in_every_form(cli, server, namespace, bucket):
    async with toolkit_of(server.url, namespace, inline_limit=4000) as toolkit:
        run = toolkit.run("acme", "order-42", store_args=True)
        await run.execute("plain", ARGS, Effect({"id": [1]}))
        await run.execute("packed", ARGS, Effect({"at": dt.date(2025, 1, 2)}))
        await run.execute("large", ARGS, Effect(["x" * 60] * 100))
        told = {tool: await shown(cli, run.key(tool, ARGS)) for tool in ("plain", "packed", "large")}
        assert told["plain"]["args"] == {"json": ARGS}
        assert told["plain"]["result"] == {"json": {"id": [1]}}
        assert told["packed"]["result"]["text"] == "{'at': datetime.date(2025, 1, 2)}"
        assert set(told["packed"]["result"]) == {"msgpack", "text"}
        assert told["large"]["result"]["json"] == ["x" * 60] * 100
        assert set(told["large"]["result"]) == {"object", "json"}
        text = (await cli("receipts", "show", run.key("large", ARGS).kv_key)).out
        assert "… (102 lines, --json has all)" in text
        assert '"to": "ann@example.com"' in text


async def test_a_payload_that_is_gone(cli, server, namespace, bucket, nc):
    async with toolkit_of(server.url, namespace, inline_limit=2000) as toolkit:
        run = toolkit.run("acme", "order-42")
        await run.execute("send", ARGS, Effect("x" * 5000))
        key = run.key("send", ARGS)
        await nc.request(f"$JS.API.STREAM.PURGE.OBJ_{namespace}-receipt-payloads", b"")
        for flags in ((), ("--json",)):
            ended = await cli("receipts", "show", key.kv_key, *flags)
            assert ended.code == 7
            assert "is missing or damaged in object store" in " ".join(ended.out.split())
            assert ended.err == ""


async def test_one_bad_revision_hides_no_other(cli, server, run, nc, namespace):
    key = run.key("send", ARGS)
    await stand(nc, namespace, key, "running")
    await put(nc, namespace, key, b"by \x1bhand")
    ended = await cli("receipts", "show", key.kv_key)
    assert ended.code == 7
    assert ended.err == ""
    assert "attempt 1 begins by elsewhere/1" in ended.out
    assert "unreadable" in ended.out
    assert f"$ nats --server {server.url} kv revert {namespace}-receipts {key.kv_key} " in ended.out
    await put(nc, namespace, key, record_of(key, status="ambiguous"))
    told = await shown(cli, key)
    assert statuses(told) == ["running", "unreadable", "ambiguous"]
    assert "cannot be read" in told["history"][1]["problem"]


async def test_an_erased_one(cli, server, run, nc, namespace):
    await run.execute("send", ARGS, Effect())
    key = run.key("send", ARGS)
    await put(nc, namespace, key, b"", headers={"KV-Operation": "DEL"})
    told = await shown(cli, key)
    assert told["status"] == "erased"
    assert told["key"] == key.kv_key
    assert statuses(told) == ["running", "completed", "erased"]
    assert "revision 2 has its result: put that back" in told["next"][0]
    assert told["next"][1] == f"$ nats --server {server.url} kv revert {namespace}-receipts {key.kv_key} 2"
    other = run.key("send", ["other"])
    await stand(nc, namespace, other, "running")
    await put(nc, namespace, other, b"", headers={"KV-Operation": "PURGE"})
    told = await shown(cli, other)
    assert told["next"][0].startswith("What happened to this call is no longer known, and it is refused.")
    assert len(told["next"]) == 3
    assert "erased by hand" in (await cli("receipts", "show", key.kv_key)).out


async def test_history_that_is_no_longer_kept_is_told(cli, run, nc, namespace):
    key = run.key("send", ARGS)
    for _ in range(12):
        await stand(nc, namespace, key, "ambiguous", attempts=3)
    told = await shown(cli, key)
    assert len(told["history"]) == 8
    assert told["history"][0]["event"].startswith("the first revision that is still kept: ")


async def test_every_state_and_field_has_words(cli, run, nc, namespace):
    fields = {"open": True, "fences": {"s1": 17}, "steps": {"upload": {"json": 1}}}
    for status in ("running", "completed", "failed", "ambiguous", "not applied", "withdrawn"):
        key = run.key("send", [status])
        await stand(nc, namespace, key, status, **(fields if status != "withdrawn" else {}))
        ended = await cli("receipts", "show", key.kv_key)
        assert ended.code == 0, ended.err
        assert "fence" in ended.out
        assert ended.out.count("What to do") == 1


@pytest.mark.parametrize(
    ("key", "code", "hint"),
    [
        ("acme.order-42.send." + "0" * 64, 3, "-receipts 'acme.order-42.>'"),
        ("acme.order-42", 2, "it is not <tenant>.<run>.<tool>.<64 hex digits>"),
        ("", 2, "it is empty"),
        ("no\nkey", 2, "cannot be used"),
    ],
)
async def test_a_wrong_key(cli, toolkit, key, code, hint):
    ended = await cli("receipts", "show", key)
    assert (ended.code, ended.out) == (code, "")
    assert hint in ended.error


async def test_60_columns(server, namespace, run):
    await ambiguous_call(run, {"to": "ann@example.com", "text": "It is on its way."})
    key = run.key("send", {"to": "ann@example.com", "text": "It is on its way."})
    flags = ("--server", server.url, "--namespace", namespace)
    async with Terminal.of("receipts", "show", key.kv_key, *flags, columns=60, NO_COLOR="1") as terminal:
        assert await terminal.end() == 0
    prose = [line for line in terminal.seen.splitlines() if line.startswith(("   ", "  It"))]
    assert prose
    assert all(len(line) <= 60 for line in prose)
    assert json.dumps(key.kv_key)[1:-1] in terminal.seen
