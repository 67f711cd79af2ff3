"""The command line on receipts in several buckets: it makes them, and whatever it says of a key is of its bucket."""

from __future__ import annotations

import pytest
from program import streams_of
from support import Effect, toolkit_of

from natsreceipts._jetstream import partition_of

ARGS = {"to": "a@b.c"}
N = 4


@pytest.fixture
def names(namespace):
    """The buckets of the receipts."""
    return [f"{namespace}-receipts-{number}" for number in range(N)]


def told(ended):
    """What became of each store, by its name."""
    lines = [line.removeprefix("object store ").removeprefix("bucket ").removeprefix("stream ") for line in ended.lines]
    return {line.split()[0].rstrip(":"): line.split(": ")[1].split(";")[0] for line in lines}


@pytest.fixture
async def toolkit(server, namespace, bucket):
    async with toolkit_of(server.url, namespace, partitions=N) as connected:
        yield connected


def key_of(toolkit, number):
    return toolkit.run("acme", f"run-{number}").key("send", ARGS).kv_key


async def test_up_makes_as_many_as_it_is_told(cli, nc, namespace, names, bucket):
    tried = await cli("up", "--partitions", N, "--dry-run")
    assert tried.code == 0, tried.err
    assert [name for name in told(tried) if "-receipts" in name] == names
    assert set(told(tried).values()) == {"would be made"}
    assert await streams_of(nc, namespace) == []
    made = await cli("up", "--partitions", N)
    assert told(made) == dict.fromkeys(told(tried), "made")
    # From then on the number is known, whoever asks.
    for again in (await cli("up"), await cli("up", "--partitions", N, "--dry-run")):
        assert told(again) == dict.fromkeys(told(tried), "there")
    for flags in (["--partitions", 2], ["--partitions", 1, "--dry-run"]):
        refused = await cli("up", *flags)
        assert (refused.code, refused.out) == (5, "")
        assert "has 4 partitions" in refused.error


async def test_a_dry_run_knows_the_number_by_the_buckets(cli, nc, namespace, names, toolkit):
    """Where the stream that says it is gone."""
    await nc.jetstream().delete_stream(f"{namespace}-SESSIONS")
    ended = await cli("up", "--dry-run")
    there = dict.fromkeys([*names, f"{namespace}-notices", f"{namespace}-receipt-payloads"], "there")
    assert told(ended) == there | {f"{namespace}-SESSIONS": "would be made"}
    assert (await cli("up", "--dry-run", "--partitions", 2)).code == 5


@pytest.mark.parametrize("number", ["0", "65", "some"])
async def test_numbers_that_cannot_be(cli, number):
    ended = await cli("up", "--partitions", number)
    assert (ended.code, ended.out) == (2, "")


async def test_all_of_them_are_listed_and_counted(cli, toolkit):
    for number in range(8):
        await toolkit.run("acme", f"run-{number}").execute("send", ARGS, Effect(number))
    keys = sorted(key_of(toolkit, number) for number in range(8))
    assert {partition_of(key, N) for key in keys} == set(range(N))
    ended = await cli("receipts", "ls")
    assert [line.split()[-1] for line in ended.lines] == keys
    one = await cli("receipts", "ls", "--run", "run-3", "--tenant", "acme")
    assert [line.split()[-1] for line in one.lines] == [key_of(toolkit, 3)]
    (stats,) = (await cli("receipts", "stats", "--json")).objects
    assert stats["statuses"] == {"completed": 8}


async def test_advice_names_the_bucket_that_holds_the_key(cli, nc, namespace, toolkit):
    run = toolkit.run("acme", "run-1")
    await run.execute("send", ARGS, Effect("sent"))
    key = key_of(toolkit, 1)
    holds = f"{namespace}-receipts-{partition_of(key, N)}"
    assert f"revision 2 in bucket {holds}" in (await cli("receipts", "show", key)).out
    (shown,) = (await cli("receipts", "show", key, "--json")).objects
    assert shown["bucket"] == holds
    missing = key.replace(".send.", ".other.")
    ended = await cli("receipts", "show", missing)
    assert ended.code == 3
    assert f" kv ls {holds} 'acme.run-1.>'" in ended.error
    await (await nc.jetstream().key_value(holds)).delete(key)
    ended = await cli("receipts", "show", key)
    assert f" kv revert {holds} {key} 2" in ended.out
    await nc.publish(f"$KV.{holds}.{key}", b"done")
    await nc.flush()
    ended = await cli("receipts", "ls")
    assert ended.code == 7
    assert f"in bucket '{holds}'" in ended.error
    assert f" kv get {holds} {key} --revision 4" in ended.error


async def test_one_is_settled_where_it_is(cli, toolkit):
    for number in range(4):
        with pytest.raises(ValueError, match="broken"):
            await toolkit.run("acme", f"run-{number}").execute("send", ARGS, Effect(ValueError("broken")))
    waiting = [line.split()[-1] for line in (await cli("receipts", "ls", "--ambiguous")).lines]
    assert sorted(waiting) == sorted(key_of(toolkit, number) for number in range(4))
    receipt = await toolkit.receipts.get(waiting[2])
    settle = ("--completed", '"sent"', "--by", "ann", "--reason", "seen", "--yes", "--revision", receipt.revision)
    ended = await cli("receipts", "resolve", waiting[2], *settle)
    assert ended.code == 0, ended.err
    settled = await toolkit.receipts.get(waiting[2])
    assert (settled.status, settled.result) == ("completed", "sent")
