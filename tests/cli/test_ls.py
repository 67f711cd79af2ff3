"""Lists, counts and filters."""

from __future__ import annotations

import json

import pytest
from program import Terminal, program
from scenes import ambiguous_call, stand
from support import Effect, put

from natsreceipts import ReceiptKey

KEYS = ("key", "revision", "updated", "v", "write", "status")


@pytest.fixture
async def some(run, toolkit, nc, namespace):
    """Receipts of each kind, by name."""
    keys = {name: run.key("send", [name]) for name in ("completed", "ambiguous", "failed", "live", "over")}
    await run.execute("send", ["completed"], Effect({"id": "m-1"}))
    await ambiguous_call(run, ["ambiguous"])
    await stand(nc, namespace, keys["failed"], "not applied")
    await stand(nc, namespace, keys["live"], "running", leaseMs=600_000)
    await stand(nc, namespace, keys["over"], "running", leaseMs=1, holder={"token": "t", "worker": "host-b/7"})
    other = toolkit.run("globex", "r 1")
    await other.execute("pay", [], Effect())
    return keys | {"other": other.key("pay", [])}


async def test_a_line_for_each_with_the_key_last(cli, some):
    ended = await cli("receipts", "ls")
    assert ended.code == 0
    assert ended.err == ""
    assert [line.split()[-1] for line in ended.lines] == sorted(key.kv_key for key in some.values())
    line = next(line for line in ended.lines if some["completed"].kv_key in line)
    status, attempts, date, time, _ = line.split()
    assert (status, attempts) == ("completed", "1")
    assert date.count("-") == 2
    assert time.endswith("Z")


async def test_filters(cli, some):
    async def names(*flags):
        found = {obj["key"] for obj in (await cli("receipts", "ls", "--json", *flags)).objects}
        return {name for name, key in some.items() if key.kv_key in found}

    assert await names() == set(some)
    assert await names("--tenant", "globex") == {"other"}
    assert await names("--run", "r 1") == {"other"}
    assert await names("--tool", "pay") == {"other"}
    assert await names("--tenant", "acme", "--status", "running") == {"live", "over"}
    assert await names("--stuck") == {"over"}
    assert await names("--ambiguous") == {"ambiguous"}
    assert await names("--tenant", "nobody") == set()
    said = await cli("receipts", "ls", "--tenant", "nobody")
    assert (said.code, said.out) == (0, "")
    assert "no receipt matches" in said.error


async def test_json_is_the_wire_with_key_revision_and_time(cli, some, toolkit):
    (shown,) = [o for o in (await cli("receipts", "ls", "--json")).objects if o["key"] == some["completed"].kv_key]
    receipt = await toolkit.receipts.get(some["completed"])
    assert tuple(shown)[:6] == KEYS
    assert shown["revision"] == receipt.revision
    assert shown["result"] == {"json": {"id": "m-1"}}
    assert {name: shown[name] for name in shown if name not in KEYS[:3]} == json.loads(receipt.record.to_bytes())
    (stuck,) = (await cli("receipts", "ls", "--json", "--stuck")).objects
    assert stuck["leaseOverSeconds"] >= 0
    (ambiguous,) = (await cli("receipts", "ls", "--json", "--ambiguous")).objects
    assert ambiguous["keptForSeconds"] is None


async def test_ambiguous_ones_by_the_time_left(cli, namespace, nc, bucket):
    assert (await cli("up", "--retention", "1h")).code == 0
    keys = [ReceiptKey.of("acme", "order-42", "send", [n]) for n in range(5)]
    for key in keys:
        await stand(nc, namespace, key, "ambiguous")
    ended = await cli("receipts", "ls", "--ambiguous")
    assert [line.split()[-1] for line in ended.lines] == [key.kv_key for key in keys]
    assert all(" 59 m" in line or " 1 h" in line for line in ended.lines)
    left = [obj["keptForSeconds"] for obj in (await cli("receipts", "ls", "--ambiguous", "--json")).objects]
    assert left == sorted(left)
    assert 3000 < left[0] <= 3600


async def test_what_cannot_be_read_is_told_and_hides_nothing(cli, some, run, nc, namespace):
    bad = [run.key("send", [name]) for name in ("bad", "newer")]
    await put(nc, namespace, bad[0], b"by hand")
    await stand(nc, namespace, bad[1], "ambiguous", v=2)
    for verb in ("ls", "stats"):
        ended = await cli("receipts", verb, "--json")
        assert ended.code == 7
        assert sorted(line.split(":")[1].strip() for line in ended.err.splitlines()) == sorted(k.kv_key for k in bad)
    assert (await cli("receipts", "stats", "--json")).objects[0]["unreadable"] == 2
    assert len((await cli("receipts", "ls")).lines) == len(some)


async def test_erased_ones_are_told_since_their_calls_are_refused(cli, some, nc, namespace):
    key = some["failed"].kv_key
    await put(nc, namespace, some["failed"], b"", headers={"KV-Operation": "DEL"})
    ended = await cli("receipts", "ls")
    assert (ended.code, ended.err) == (0, "")
    assert [line.split()[0] for line in ended.lines if key in line] == ["erased"]
    assert len(ended.lines) == len(some)
    (shown,) = (await cli("receipts", "ls", "--json", "--status", "erased")).objects
    (told,) = (await cli("receipts", "show", key, "--json")).objects
    assert shown == {name: told[name] for name in ("key", "revision", "updated", "status")}
    assert key not in (await cli("receipts", "ls", "--status", "completed")).out
    for flag in ("--ambiguous", "--stuck"):  # what a person on call looks at
        ended = await cli("receipts", "ls", flag)
        assert key not in ended.out
        assert "1 erased by hand" in ended.error
        assert "receipts ls --status erased" in ended.error
    (counted,) = (await cli("receipts", "stats", "--json")).objects
    assert (counted["total"], counted["erased"]) == (5, 1)
    assert any("erased by hand" in line and line.endswith(" 1") for line in (await cli("receipts", "stats")).lines)


async def test_stats(cli, some):
    (counted,) = (await cli("receipts", "stats", "--json")).objects
    assert counted["total"] == 6
    assert counted["statuses"] == {"completed": 2, "ambiguous": 1, "failed": 1, "running": 2}
    assert counted["tools"]["pay"] == {"completed": 1}
    assert (counted["stuck"], counted["erased"]) == (1, 0)
    assert counted["oldestAmbiguous"] == some["ambiguous"].kv_key
    ended = await cli("receipts", "stats")
    assert ended.lines[0].split() == ["total", "running", "completed", "failed", "ambiguous", "tool"]
    assert ended.lines[-1].strip() == some["ambiguous"].kv_key
    (none,) = (await cli("receipts", "stats", "--json", "--tenant", "nobody")).objects
    assert none["total"] == 0


@pytest.mark.parametrize("verb", ["ls", "stats"])
async def test_a_terminal_of_60_columns(server, namespace, some, verb):
    async with Terminal.of("receipts", verb, "--server", server.url, "--namespace", namespace, columns=60) as terminal:
        assert await terminal.end() == 0
    assert some["ambiguous"].kv_key in terminal.seen  # whole: it can be copied
    assert "\x1b[" in terminal.seen


async def test_no_colour(server, namespace, some):
    flags = ("--server", server.url, "--namespace", namespace)
    async with Terminal.of("receipts", "ls", *flags, NO_COLOR="1") as terminal:
        assert await terminal.end() == 0
    assert terminal.seen.startswith("STATUS")
    assert "\x1b[" not in terminal.seen
    assert "\x1b[" not in (await program("receipts", "ls", *flags)).out


async def test_names_cannot_steer_the_terminal(cli, toolkit):
    run = toolkit.run("acme", "order-42")
    await run.execute("evil\x1b[2J\u202etool", [], Effect())
    for arguments in (("ls",), ("stats",), ("show", run.key("evil\x1b[2J\u202etool", []).kv_key)):
        for flags in ((), ("--json",)):
            ended = await cli("receipts", *arguments, *flags)
            assert ended.code == 0
            assert "\x1b" not in ended.out
            assert "\u202e" not in ended.out


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--status", "done"), "use one of running, completed"),
        (("--ambiguous", "--stuck"), "use one of"),
        (("--status", "failed", "--stuck"), "use one of"),
        (("--tenant", ""), "it is empty"),
    ],
)
async def test_what_cannot_be_listed(cli, toolkit, flags, hint):
    ended = await cli("receipts", "ls", *flags)
    assert ended.code == 2
    assert hint in ended.error
    assert ended.out == ""
