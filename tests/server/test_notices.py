"""Notices are filed once, carried by one turn, listed in one order; and others see them as the layout has them."""

from __future__ import annotations

import asyncio
import json

import pytest
from nats.js.api import StreamConfig
from notice_scenes import AGENT, FACT, filed, keys_of, last_sequence, stem
from support import toolkit_of

from natsreceipts import (
    AlreadyConsumed,
    InvalidFact,
    InvalidName,
    InvalidSetting,
    NatsReceiptsError,
    NoticeBoard,
    NoticeConflict,
    NotProvisioned,
    RunNoticeFact,
    connect,
    run_notice_id,
)

pytestmark = pytest.mark.usefixtures("bucket")


@pytest.fixture
def board(toolkit):
    return toolkit.notices


# Filing


async def test_a_notice_is_filed_once(board, nc, namespace):
    said = {"run": "run-1", "step": "/n#0", "request_id": "q", "addressee": AGENT}
    first = await board.file(**said, fact={**FACT, "detail": {"a": 1, "b": "x"}})
    notice_id = run_notice_id("q", AGENT)
    assert first == (f"{stem(notice_id)}.spec", notice_id, True)
    again = await board.file(**said, fact=RunNoticeFact("build", "ok", {"b": "x", "a": 1.0}))
    assert (again.key, again.notice_id, again.created) == (*first[:2], False)
    assert await keys_of(nc, namespace) == {first.key: 1}
    read = await board.read(run="run-1", addressee=AGENT, notice_id=notice_id)
    assert (read.notice_id, read.spec_revision, read.consumed) == (notice_id, 1, None)
    assert (read.spec.step, read.spec.addressee, read.spec.run) == ("/n#0", AGENT, "run-1")


async def test_the_first_instant_stands(board):
    said = {"run": "run-1", "step": "/n#0", "request_id": "q", "addressee": AGENT, "fact": FACT}
    assert (await board.file(**said, at=17)).created
    assert not (await board.file(**said)).created
    assert not (await board.file(**said, at=17)).created
    with pytest.raises(NoticeConflict) as caught:
        await board.file(**said, at=18)
    assert (caught.value.existing.at, caught.value.refused.at) == (17, 18)
    ((notice),) = await board.list(run="run-1", addressee=AGENT)
    assert notice.spec.at == 17


async def test_the_instant_is_the_servers_now(board, nc, namespace):
    (one,) = await filed(board, "q")
    message = await nc.jetstream().get_msg(f"KV_{namespace}-notices", seq=1)
    ((notice),) = await board.list(run="run-1", addressee=AGENT)
    assert one.created
    assert abs(notice.spec.at - message.time.timestamp() * 1000) < 5000


@pytest.mark.parametrize(
    "other",
    [
        {"step": "/n#1"},
        {"fact": FACT | {"outcome": "no"}},
        {"fact": FACT | {"detail": {}}},
        {"fact": FACT | {"detail": {"a": True}}},
    ],
    ids=str,
)
async def test_another_notice_under_the_same_id(board, nc, namespace, other):
    said = {"run": "run-1", "step": "/n#0", "request_id": "q", "addressee": AGENT, "fact": FACT, "at": 1}
    if "detail" in other.get("fact", {}) and other["fact"]["detail"]:
        said["fact"] = FACT | {"detail": {"a": 1}}
    first = await board.file(**said)
    with pytest.raises(NoticeConflict) as caught:
        await board.file(**said | other)
    error = caught.value
    assert error.key == first.key
    assert (error.existing.step, error.existing.fact) == (said["step"], RunNoticeFact.of(said["fact"]))
    refused = said | other
    assert (error.refused.step, error.refused.fact) == (refused["step"], RunNoticeFact.of(refused["fact"]))
    assert await keys_of(nc, namespace) == {first.key: 1}


async def test_one_call_to_several_agents(board, nc, namespace):
    names = [f"agent {n}" for n in range(70)]
    said = {"run": "run-1", "step": "/n#0", "request_id": "q", "fact": FACT}
    first = await board.file(**said, addressees=names)
    assert [one.notice_id for one in first] == [run_notice_id("q", name) for name in names]
    assert [one.key for one in first] == [f"{stem(run_notice_id('q', name), agent=name)}.spec" for name in names]
    assert all(one.created for one in first)
    again = await board.file(**said, addressees=(*names, "one more"))
    assert [one.created for one in again] == [False] * 70 + [True]
    assert len(await keys_of(nc, namespace)) == 71
    assert len({notice.spec.at for notice in await board.list_run(run="run-1")}) == 2


async def test_one_of_several_is_in_conflict(board):
    """The others hear of it all the same."""
    await filed(board, "q", addressee="b")
    said = {"run": "run-1", "step": "/n#0", "request_id": "q", "fact": FACT | {"outcome": "no"}}
    with pytest.raises(NoticeConflict) as caught:
        await board.file(**said, addressees=["a", "b", "c"])
    assert caught.value.refused.addressee == "b"
    told = {notice.spec.addressee: notice.spec.fact.outcome for notice in await board.list_run(run="run-1")}
    assert told == {"a": "no", "b": "ok", "c": "no"}


async def test_two_filers_at_once(board, nc, namespace):
    outcomes = await asyncio.gather(*(filed(board, "q", at=1) for _ in range(32)))
    assert sorted(one.created for (one,) in outcomes) == [False] * 31 + [True]
    assert list((await keys_of(nc, namespace)).values()) == [1]


BAD_FILES = [
    ({"run": "a.b"}, InvalidName),
    ({"run": "*"}, InvalidName),
    ({"run": None}, InvalidSetting),
    ({"run": 7}, InvalidName),
    ({"step": ""}, InvalidName),
    ({"step": "a\nb"}, InvalidName),
    ({"step": "\ud800"}, InvalidName),
    ({"step": None}, InvalidName),
    ({"step": "x" * 1025}, InvalidName),
    ({"request_id": ""}, InvalidName),
    ({"request_id": 7}, InvalidName),
    ({"addressee": ""}, InvalidName),
    ({"addressee": "a\x7f"}, InvalidName),
    ({"addressee": "\udfff"}, InvalidName),
    ({"addressee": b"a"}, InvalidName),
    ({"addressee": None}, InvalidSetting),
    ({"addressees": ["a"]}, InvalidSetting),
    ({"addressee": None, "addressees": "abc"}, InvalidSetting),
    ({"addressee": None, "addressees": []}, InvalidSetting),
    ({"addressee": None, "addressees": ["a", ""]}, InvalidName),
    ({"addressee": None, "addressees": ["a", None]}, InvalidName),
    ({"fact": None}, InvalidFact),
    ({"fact": {"decision": "A", "outcome": "ok"}}, InvalidFact),
    ({"fact": FACT | {"detail": {"a": None}}}, InvalidFact),
    ({"fact": FACT | {"detail": {"a": float("nan")}}}, InvalidFact),
    ({"at": -1}, InvalidSetting),
    ({"at": 1.0}, InvalidSetting),
    ({"at": True}, InvalidSetting),
    ({"at": 2**53}, InvalidSetting),
    ({"at": "1"}, InvalidSetting),
    ({"at": 10**5000}, InvalidSetting),
    ({"addressee": None, "addressees": 10**5000}, InvalidSetting),
    ({"addressee": None, "addressees": "x" * 100_000}, InvalidSetting),
    ({"run": 10**5000}, InvalidName),
]
BAD_CONSUMPTIONS = [
    ({"by": ""}, InvalidName),
    ({"by": "a\nb"}, InvalidName),
    ({"by": "\ud800"}, InvalidName),
    ({"by": None}, InvalidName),
    ({"by": "x" * 1025}, InvalidName),
    ({"at": -1}, InvalidSetting),
    ({"at": 0.5}, InvalidSetting),
    ({"at": False}, InvalidSetting),
    ({"at": 2**53}, InvalidSetting),
    ({"at": 10**5000}, InvalidSetting),
    ({"run": "a.b"}, InvalidName),
    ({"addressee": ""}, InvalidName),
    ({"notice_id": "*"}, InvalidName),
    ({"notice_id": ">"}, InvalidName),
    ({"notice_id": "x" * 42}, InvalidName),
    ({"notice_id": "x" * 43}, InvalidName),
    ({"notice_id": None}, InvalidName),
    ({"addressee": "another"}, InvalidName),
]


async def test_what_is_refused_leaves_the_bucket_untouched(board, nc, namespace):
    (one,) = await filed(board, "first")
    before = await last_sequence(nc, namespace)
    said = {"run": "run-1", "step": "/n#0", "request_id": "q", "addressee": AGENT, "fact": FACT}
    for bad, kind in BAD_FILES:
        with pytest.raises(kind) as caught:
            await board.file(**said | bad)
        assert len(str(caught.value).encode()) < 300
    consumption = {"run": "run-1", "addressee": AGENT, "notice_id": one.notice_id, "by": "turn-1"}
    for bad, kind in BAD_CONSUMPTIONS:
        with pytest.raises(kind):
            await board.consume(**consumption | bad)
    assert await last_sequence(nc, namespace) == before
    assert (await board.read(run="run-1", addressee=AGENT, notice_id=one.notice_id)).consumed is None


async def test_names_that_cannot_be_asked_for(board):
    for ask in (board.list, board.pending):
        with pytest.raises(InvalidName):
            await ask(run="*", addressee=AGENT)
        with pytest.raises(InvalidName):
            await ask(run="run-1", addressee="")
    for ask in (board.list_run, board.unconsumed_steps):
        with pytest.raises(InvalidName):
            await ask(run=">")
        with pytest.raises(InvalidSetting, match="run="):
            await ask()
    with pytest.raises(InvalidName):
        board.watch(run="a.b", addressee=AGENT)  # at once, not at the first notice
    with pytest.raises(InvalidName):
        board.at("A")


# Consuming


async def test_a_notice_is_consumed_once(board, nc, namespace):
    (one,) = await filed(board, "q")
    consumption = {"run": "run-1", "addressee": AGENT, "notice_id": one.notice_id}
    status = await board.consume(**consumption, by="turn-1", at=5)
    assert (status.by, status.consumed_at, status.observed_spec_revision) == ("turn-1", 5, 1)
    assert await board.consume(**consumption, by="turn-1") == status  # the turn repeats itself
    assert await board.consume(**consumption, by="turn-1", at=9) == status
    with pytest.raises(AlreadyConsumed) as caught:
        await board.consume(**consumption, by="turn-2", at=5)
    assert (caught.value.by, caught.value.consumed_at) == ("turn-1", 5)
    assert caught.value.key == f"{stem(one.notice_id)}.status"
    assert (await board.read(**consumption)).consumed == status
    assert await keys_of(nc, namespace) == {one.key: 1, f"{stem(one.notice_id)}.status": 1}


async def test_the_look_before_decides_nothing(board, nc, namespace):
    """No request of a consumption reads the status before it writes it."""
    (one,) = await filed(board, "q")
    seen = []

    async def take(message):
        seen.append(message)

    everything = await nc.subscribe(">", cb=take)
    await nc.flush()
    await board.consume(run="run-1", addressee=AGENT, notice_id=one.notice_id, by="turn-1", at=1)
    await nc.flush()
    await everything.unsubscribe()
    key = f"{stem(one.notice_id)}.status"
    asked = [m for m in seen if key.encode() in m.data or m.subject.endswith(key)]
    writes = [m for m in asked if m.headers and "Nats-Expected-Last-Subject-Sequence" in m.headers]
    assert len(writes) == 1
    assert [m for m in asked if m.subject.startswith("$JS.API")] == []
    assert "Nats-Msg-Id" not in writes[0].headers


async def test_turns_that_race(server, namespace, board):
    """Of 32 turns one gets through, and 31 are told which; 20 times over."""
    async with toolkit_of(server.url, namespace) as other:
        boards = [board, other.notices]
        for n in range(20):
            ((one),) = await filed(board, f"q{n}")
            said = {"run": "run-1", "addressee": AGENT, "notice_id": one.notice_id}
            outcomes = await asyncio.gather(
                *(boards[turn % 2].consume(**said, by=f"turn-{turn}") for turn in range(32)), return_exceptions=True
            )
            won = [turn for turn, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]
            lost = [outcome for outcome in outcomes if isinstance(outcome, AlreadyConsumed)]
            assert (len(won), len(lost)) == (1, 31)
            winner = outcomes[won[0]]
            assert {(error.by, error.consumed_at) for error in lost} == {(f"turn-{won[0]}", winner.consumed_at)}
            assert (await board.read(**said)).consumed == winner


# Listing


async def test_the_order(board):
    """By instant, and within a millisecond by id, in whatever order they were filed."""
    for at in (5, 3, 4, 3):
        await filed(board, *(f"q{at}-{n}" for n in range(7)), at=at)
    found = await board.list(run="run-1", addressee=AGENT)
    assert [(n.spec.at, n.notice_id) for n in found] == sorted((n.spec.at, n.notice_id) for n in found)
    assert len(found) == 21
    assert found == await board.list_run(run="run-1")


async def test_who_is_listed(board, toolkit):
    await filed(board, "a", at=1)
    await filed(board, "b", addressee="another", at=2)
    await filed(board, "c", run="run-2", at=3)
    await filed(board.at("prod_acme"), "d", at=4)

    async def steps(board, **asked):
        listed = board.list(**asked) if "addressee" in asked else board.list_run(**asked)
        return [notice.spec.at for notice in await listed]

    assert await steps(board, run="run-1", addressee=AGENT) == [1]
    assert await steps(board, run="run-1", addressee="another") == [2]
    assert await steps(board, run="run-1", addressee="nobody") == []
    assert await steps(board, run="run-1") == [1, 2]
    assert await steps(board, run="run-2") == [3]
    assert await steps(board, run="run-3") == []
    assert await steps(toolkit.notices.at("prod_acme"), run="run-1") == [4]


async def test_pending_and_the_steps_that_were_not_heard(board):
    one, two = await filed(board, "a", "b", step="/told#0", at=1)
    (three,) = await filed(board, "c", step="/told#1", at=2)
    assert await board.unconsumed_steps(run="run-1") == {"/told#0", "/told#1"}
    said = {"run": "run-1", "addressee": AGENT, "by": "turn-1"}
    await board.consume(**said, notice_id=one.notice_id)
    await board.consume(**said, notice_id=three.notice_id)
    assert [n.notice_id for n in await board.pending(run="run-1", addressee=AGENT)] == [two.notice_id]
    assert await board.unconsumed_steps(run="run-1") == {"/told#0"}
    await board.consume(**said, notice_id=two.notice_id)
    assert await board.pending(run="run-1", addressee=AGENT) == []
    assert await board.unconsumed_steps(run="run-1") == set()
    table = board.render(await board.list_run(run="run-1"))
    assert table.count("by turn-1 at ") == 3


async def test_what_a_turn_has_to_carry_when_it_is_carried_out_again(board):
    """What it had consumed before it was killed, and what nobody has; not what other turns have."""
    mine, theirs, pending = await filed(board, "a", "b", "c", at=1)
    said = {"run": "run-1", "addressee": AGENT}
    await board.consume(**said, notice_id=mine.notice_id, by="turn-7")
    await board.consume(**said, notice_id=theirs.notice_id, by="turn-8")

    async def ids(**asked):
        return {notice.notice_id for notice in await board.pending(**said, **asked)}

    assert await ids() == {pending.notice_id}
    assert await ids(by="turn-7") == {mine.notice_id, pending.notice_id}
    assert await ids(by="turn-9") == {pending.notice_id}
    for bad in ("", "a\nb", 7):
        with pytest.raises(InvalidName, match="by"):
            await ids(by=bad)


class Lagging:
    """A bucket whose batched reads come from a replica that has not heard of the newest notices yet."""

    def __init__(self, bucket, up_to):
        self._bucket = bucket
        self._up_to = up_to

    def __getattr__(self, name):
        return getattr(self._bucket, name)

    async def since(self, pattern, revision, *, timeout):
        entries, whole = await self._bucket.since(pattern, revision, timeout=timeout)
        return [entry for entry in entries if entry.revision <= self._up_to], whole


async def test_a_replica_that_lags(board):
    """Then a list is short; the question whether a step may be ignored is not answered from that."""
    one, two = await filed(board, "a", "b", step="/told#0")
    await board.consume(run="run-1", addressee=AGENT, notice_id=one.notice_id, by="turn-1")
    await filed(board, "c", step="/told#1")
    for up_to in range(5):
        lagging = NoticeBoard(Lagging(board._bucket, up_to))
        assert len(await lagging.list_run(run="run-1")) <= up_to
        assert await lagging.unconsumed_steps(run="run-1") == {"/told#0", "/told#1"}
    assert two.created


async def fill(nc, namespace, count, *, consumed=0, run="run-1"):
    """Notices as another system files them, many at a time."""
    js = nc.jetstream(publish_async_max_pending=500)
    for half, n in (("spec", count), ("status", consumed)):
        for at in range(n):
            notice_id = run_notice_id(str(at), AGENT)
            spec = {"v": 1, "run": run, "step": f"/n#{at}", "addressee": AGENT, "fact": FACT, "at": count - at}
            status = {"v": 1, "consumedAt": 1, "by": "turn-1", "observedSpecRevision": 1}
            value = json.dumps(spec if half == "spec" else status).encode()
            await js.publish_async(f"$KV.{namespace}-notices.{stem(notice_id, run)}.{half}", value)
    await js.publish_async_completed()


async def test_five_thousand_notices(board, nc, namespace):
    await fill(nc, namespace, 5000, consumed=1000)
    found = await board.list(run="run-1", addressee=AGENT)
    assert [notice.spec.at for notice in found] == list(range(1, 5001))
    assert len(await board.pending(run="run-1", addressee=AGENT)) == 4000
    assert len(await board.list_run(run="run-1")) == 5000
    assert len(await board.unconsumed_steps(run="run-1")) == 4000


async def test_a_bucket_without_direct_gets(server, namespace, nc):
    config = {"name": f"KV_{namespace}-notices", "subjects": [f"$KV.{namespace}-notices.>"]}
    await nc.jetstream().add_stream(StreamConfig(**config, max_msgs_per_subject=8))
    async with toolkit_of(server.url, namespace) as toolkit:
        await fill(nc, namespace, 1100, consumed=3)
        assert len(await toolkit.notices.list(run="run-1", addressee=AGENT)) == 1100
        assert len(await toolkit.notices.pending(run="run-1", addressee=AGENT)) == 1097


# The board of a run


async def test_the_board_of_a_run(toolkit, nc, namespace):
    run = toolkit.run("acme", "run-1")
    one = await run.notices.file(step="/n#0", request_id="q", addressee=AGENT, fact=FACT)
    assert one.key.startswith("notice.acme.run-1.")
    assert [n.notice_id for n in await run.notices.list(addressee=AGENT)] == [one.notice_id]
    assert await toolkit.notices.at("acme").list(run="run-1", addressee=AGENT) == await run.notices.list_run()
    await run.notices.consume(addressee=AGENT, notice_id=one.notice_id, by="turn-1")
    assert await run.notices.pending(addressee=AGENT) == []
    assert await run.notices.unconsumed_steps(run="run-1") == set()
    for other in ("run-2", 10**5000):
        with pytest.raises(InvalidSetting, match="run-1"):
            await run.notices.list_run(run=other)
    assert await toolkit.notices.list_run(run="run-1") == []


async def test_tenants_do_not_see_each_other(toolkit, nc, namespace):
    names = ["acme", "Acme", "local", "a.b", "a_b", "x-" + "0" * 40, "ä"]
    for name in names:
        await toolkit.run(name, "run-1").notices.file(step=name, request_id="q", addressee=AGENT, fact=FACT)
    for name in names:
        (notice,) = await toolkit.run(name, "run-1").notices.list_run()
        assert notice.spec.step == name
    assert len(await keys_of(nc, namespace)) == len(names)
    assert await toolkit.notices.list_run(run="run-1") == []


@pytest.mark.parametrize("name", ["order 42", "a.b", "x" * 65, "ä"])
async def test_a_run_without_room_is_refused_when_its_board_is_opened(toolkit, name):
    run = toolkit.run("acme", name)
    with pytest.raises(InvalidName, match="run"):
        _ = run.notices


async def test_the_bucket_is_made_as_that_of_the_receipts_is(server, namespace, nc):
    async with toolkit_of(server.url, namespace, history=20, retention=3600):
        infos = [
            json.loads((await nc.request(f"$JS.API.STREAM.INFO.KV_{namespace}-{name}")).data)["config"]
            for name in ("receipts", "notices")
        ]
    for config in infos:
        for own in ("name", "subjects", "metadata"):
            config.pop(own, None)
    assert infos[0] == infos[1]


async def test_a_missing_bucket(server, namespace, nc):
    async with toolkit_of(server.url, namespace):
        pass
    await nc.jetstream().delete_stream(f"KV_{namespace}-notices")
    with pytest.raises(NotProvisioned, match="notices"):
        async with toolkit_of(server.url, namespace, provision=False):
            raise AssertionError("connected")


async def test_the_bucket_without_a_namespace(own_server):
    async with connect(own_server.url, provision=True) as toolkit:
        (one,) = await filed(toolkit.notices, "q")
        assert one.created
    async with connect(own_server.url) as toolkit:
        assert len(await toolkit.notices.list_run(run="run-1")) == 1


async def test_errors_are_ours(board):
    for kind in (AlreadyConsumed, NoticeConflict, InvalidFact):
        assert issubclass(kind, NatsReceiptsError)
