"""Making what is missing and checking what is there, from the command line and from Python."""

from __future__ import annotations

import pytest
from program import streams_of
from support import bucket_of, lax_bucket, toolkit_of, until

import natsreceipts
from natsreceipts import InvalidSetting, provision


async def config(nc, namespace):
    return (await nc.jetstream().stream_info(f"KV_{bucket_of(namespace)}")).config


def states(ended):
    return {line.split(": ")[1].split(";")[0] for line in ended.lines}


async def test_it_makes_what_connect_makes(cli, server, namespace, nc, bucket):
    ended = await cli("up", "--retention", "90d", "--history", "12")
    assert (ended.code, ended.err) == (0, "")
    assert states(ended) == {"made"}
    js = nc.jetstream()

    async def all_made():  # a list of streams may lag behind the making
        found = await streams_of(nc, namespace)
        return found if len(found) == len(ended.lines) else None

    made = await until(all_made)
    configs = {name: (await js.stream_info(name)).config for name in made}
    for name in made:
        await js.delete_stream(name)
    async with toolkit_of(server.url, namespace, retention=90 * 86_400, history=12):
        assert {name: (await js.stream_info(name)).config for name in await streams_of(nc, namespace)} == configs
    again = await cli("up", "--history", "9")
    assert (again.code, states(again)) == (0, {"there"})
    assert {name: (await js.stream_info(name)).config for name in made} == configs


async def test_a_dry_run_makes_nothing(cli, namespace, nc):
    ended = await cli("up", "--dry-run")
    assert (ended.code, states(ended)) == (0, {"would be made"})
    assert await streams_of(nc, namespace) == []
    with pytest.raises(natsreceipts.NotProvisioned, match="natsreceipts up"):
        async with natsreceipts.connect(nc, namespace=namespace):
            pass
    assert (await cli("receipts", "ls")).code == 5


async def test_what_is_weaker_is_told(cli, namespace, nc, bucket):
    await lax_bucket(nc, namespace)
    ended = await cli("up")
    assert ended.code == 0
    assert ended.lines[0].split(": ")[1].startswith("there;")
    assert "weaker than it should be: lets keys be purged (deny_purge is off)" in ended.out
    stores = {store["name"]: store for store in (await cli("up", "--json")).objects}
    assert stores[bucket]["state"] == "there"
    assert stores[bucket]["weaker"]
    assert stores[bucket]["refused"] == []


async def test_what_breaks_a_promise_is_refused(cli, namespace, nc, bucket):
    await cli("up")
    made = await config(nc, namespace)
    made.max_msgs_per_subject = 1
    await nc.jetstream().update_stream(made)
    ended = await cli("up")
    assert ended.code == 5
    assert "cannot be used: keeps 1 revisions of a key" in ended.out
    assert (await cli("receipts", "ls")).code == 5


async def test_payloads_that_go_before_their_receipts_are_told(namespace, nc, bucket):
    await provision(nc, namespace=namespace, retention=3600)
    js = nc.jetstream()
    payloads = (await js.stream_info(f"OBJ_{namespace}-receipt-payloads")).config
    payloads.max_age = 600
    await js.update_stream(payloads)
    stores = {store.name: store for store in await provision(nc, namespace=namespace, dry_run=True)}
    assert stores[bucket].weaker == ()
    assert stores[f"{namespace}-receipt-payloads"].weaker == (
        "drops payloads after 600 s, before the receipts that name them",
    )


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--history", "7"), "keeps 7 revisions of a key"),
        (("--retention", "4m"), "less than 10 leases"),
        (("--retention", "soon"), "as 90d"),
        (("--replicas", "0"), "use a number from 1 to 5"),
        (("--namespace", "a.b"), "use 1 to 64 of"),
    ],
)
async def test_what_cannot_be_made(cli, flags, hint):
    ended = await cli("up", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert hint in ended.error


async def test_more_replicas_than_servers(cli, namespace):
    ended = await cli("up", "--replicas", "3", "--timeout", "2s")
    assert (ended.code, ended.out) == (5, "")
    assert "could not be made" in ended.error


async def test_the_library_refuses_the_same(nc):
    with pytest.raises(InvalidSetting):
        await provision(nc, history=0)
