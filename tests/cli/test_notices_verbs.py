"""Notices from the command line: listed over all runs, shown, filed once, consumed once."""

from __future__ import annotations

import json

import pytest
from notice_scenes import raw
from scenes import ambiguous_call
from support import Effect, Message

from natsreceipts import AmbiguousCall, CorruptRecord, InvalidName, notice_addressee_id
from natsreceipts.notice import endpoint_of

FILE = ("notices", "file", "--step", "/n#0", "--decision", "build", "--outcome", "approved")


def filed(run, request_id, to, *more):
    return (*FILE, "--run", run, "--request-id", request_id, "--to", to, *more)


async def listed(cli, *flags):
    ended = await cli("notices", "ls", "--json", *flags)
    assert ended.code == 0, ended.err
    return ended.objects


async def test_filed_once_listed_and_consumed_once(cli, toolkit):
    for word in ("filed", "stood there already"):
        ended = await cli(*filed("order-42", "r-1", "planner", "--detail", "by=ann", "--detail", "budget=12"))
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.startswith(word)
    key = ended.out.split()[-1]
    (notice,) = await listed(cli)
    assert notice["key"] == key
    assert notice["fact"] == {"decision": "build", "outcome": "approved", "detail": {"budget": 12, "by": "ann"}}
    assert notice["status"] is None
    assert set(notice) == {"key", "revision", "noticeId", "v", "run", "step", "addressee", "fact", "at", "status"}
    assert (await cli("notices", "consume", key, "--by", "turn-7")).code == 0
    assert (await cli("notices", "consume", key, "--by", "turn-7", "--json")).objects[0]["by"] == "turn-7"
    other = await cli("notices", "consume", key, "--by", "turn-8")
    assert (other.code, other.out) == (6, "")
    assert "'turn-7' has carried this notice" in other.error
    assert (await listed(cli))[0]["status"]["by"] == "turn-7"
    assert await listed(cli, "--pending") == []
    shown = await cli("notices", "show", key)
    assert "carried         by turn-7 at " in shown.out
    assert 'by              "ann"' in shown.out
    assert (await cli("notices", "show", key.replace(".spec", ".status"), "--json")).objects == await listed(cli)


async def test_another_decision_under_the_same_request(cli, toolkit):
    assert (await cli(*filed("order-42", "r-1", "planner"))).code == 0
    ended = await cli(*filed("order-42", "r-1", "planner"), "--outcome", "refused")
    assert (ended.code, ended.out) == (6, "")
    assert "this notice was filed before" in ended.error


async def test_filters_over_runs_and_endpoints(cli, toolkit):
    await cli(*filed("order-1", "r", "planner", "--tenant", "acme"), "--to", "builder")
    await cli(*filed("order-2", "r", "planner", "--endpoint", "elsewhere"))
    await cli(*filed("order-2", "r", "planner"))

    async def found(*flags):
        return sorted((n["key"].split(".")[1], n["run"], n["addressee"]) for n in await listed(cli, *flags))

    here, there, local = ("acme", "order-1"), ("elsewhere", "order-2"), ("local", "order-2")
    assert await found() == sorted([(*here, "planner"), (*here, "builder"), (*there, "planner"), (*local, "planner")])
    assert await found("--tenant", "acme", "--to", "builder") == [(*here, "builder")]
    assert await found("--endpoint", "elsewhere") == [(*there, "planner")]
    assert await found("--run", "order-2") == [(*there, "planner"), (*local, "planner")]
    assert await found("--run", "order-9") == []
    assert (await cli("notices", "ls", "--tenant", "a", "--endpoint", "b")).code == 2
    assert endpoint_of("acme") == "acme"


async def test_what_an_operator_is_told(cli, toolkit, run):
    """The notice of an ambiguous call leads to its receipt, and settling it tells the agent."""
    revision = await ambiguous_call(run, ["it"])
    with pytest.raises(AmbiguousCall):
        async with toolkit.delivery(Message(), operator="ops"):
            await run.execute("send", ["it"], Effect("wrong"))
    (notice,) = await listed(cli, "--to", "ops", "--pending")
    assert notice["step"] == run.key("send", ["it"]).kv_key
    shown = await cli("notices", "show", notice["key"])
    assert f"receipts show {notice['step']}" in shown.out
    said = ("--by", "ann", "--reason", "seen", "--yes", "--revision", revision, "--notify", "planner")
    assert (await cli("receipts", "resolve", notice["step"], "--completed", "1", *said)).code == 0
    (told,) = await listed(cli, "--to", "planner")
    assert told["fact"]["decision"] == "call-resolved"


async def test_what_cannot_be_read_hides_no_other(cli, toolkit, nc, namespace):
    await cli(*filed("order-1", "r", "planner"))
    bad = f"notice.local.order-1.{notice_addressee_id('x')}.{'A' * 43}.spec"
    await (await raw(nc, namespace)).put(bad, b"by hand")
    ended = await cli("notices", "ls", "--json")
    assert ended.code == 7
    assert len(ended.objects) == 1
    assert bad in ended.error
    ended = await cli("notices", "show", bad)
    assert (ended.code, ended.out) == (7, "")
    with pytest.raises(CorruptRecord):
        await toolkit.notices.find()


async def test_a_hostile_notice_cannot_steer_the_terminal(cli, toolkit, nc, namespace):
    agent = "pla\x1b[2Jnner"
    key = f"notice.local.order-1.{notice_addressee_id(agent)}.{'A' * 43}.spec"
    record = {"v": 1, "run": "order-1", "step": "\u202e", "addressee": agent, "at": 2**53 - 1}
    record["fact"] = {"decision": "build", "outcome": "ok"}
    await (await raw(nc, namespace)).put(key, json.dumps(record).encode())
    for verb in (("ls",), ("show", key)):
        ended = await cli("notices", *verb)
        assert ended.code == 0
        assert "\x1b" not in ended.out
        assert "\u202e" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("notices", "show", "notice.x"), 2, "it is not notice.<endpoint>"),
        (("notices", "show", f"notice.local.r.{'A' * 43}.{'B' * 43}.spec"), 3, "there is no notice"),
        (("notices", "consume", f"notice.local.r.{'A' * 43}.{'B' * 43}.spec", "--by", "t"), 3, "there is no notice"),
        (filed("order 1", "r", "planner"), 2, "notices are kept for runs named by"),
        (filed("order-1", "r", "planner", "--detail", "no"), 2, "use NAME=VALUE"),
        (filed("order-1", "r", "planner", "--detail", "No=1"), 2, "detail"),
        (filed("order-1", "r", "planner", "--at", "-1"), 2, "milliseconds"),
    ],
)
async def test_what_is_no_use(cli, toolkit, arguments, code, hint):
    ended = await cli(*arguments)
    assert (ended.code, ended.out) == (code, "")
    assert hint in ended.error


async def test_the_library_finds_the_same(toolkit):
    board = toolkit.notices
    said = {"run": "r-1", "step": "s", "addressee": "a", "fact": {"decision": "d", "outcome": "o"}}
    one = await board.file(request_id="1", **said)
    two = await board.at("x").file(request_id="2", **said)
    assert list(await board.find()) == [one.key, two.key]
    assert list(await board.find(endpoint="x")) == [two.key]
    assert await board.get(one.key) == await board.read(run="r-1", addressee="a", notice_id=one.notice_id)
    assert await board.get(one.key.replace(".r-1.", ".r-2.")) is None
    for wrong in ("", "notice.a.b.c.d.spec", one.key + ".x", 3):
        with pytest.raises(InvalidName):
            await board.get(wrong)
