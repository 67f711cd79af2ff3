"""Connecting: what is refused for good ends at once, and what is no address is refused before it is tried."""

from __future__ import annotations

import asyncio

import pytest

from natsreceipts import InvalidSetting, Unreachable, connect, embedded, examine, provision

USERS = "jetstream: enabled\nauthorization { users: [{user: ann, password: right}] }"
NOBODY = "nats://127.0.0.1:1"


@pytest.mark.parametrize("others", [[], [NOBODY]])
async def test_wrong_credentials_end_at_once(others):
    """Not after the whole time-out: the same credentials are refused a moment later too."""
    before = asyncio.all_tasks()
    async with embedded(config=USERS) as server:
        async with asyncio.timeout(60):
            with pytest.raises(Unreachable, match=r"did not let us in .*Authorization Violation") as refused:
                async with connect([*others, server.url], user="ann", password="wrong", connect_timeout=600):
                    pytest.fail("let in")
        assert "wrong" not in str(refused.value)
    assert asyncio.all_tasks() == before


async def test_a_server_that_is_right_counts_beside_one_that_is_not():
    async with embedded(config=USERS) as wrong, embedded() as right:
        servers = [wrong.url, right.url]
        async with connect(servers, user="ann", password="wrong", provision=True) as toolkit:
            await toolkit.run("acme", "order-1").execute("send", [], lambda: "sent")


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("nats://[foo", "it is no URL"),
        ("nats://127.0.0.1:99999", "no number up to 65535"),
        ("nats://127.0.0.1:abc", "no number up to 65535"),
        ("nats://127.0.0.1:0", "0 is no port"),
        ("::::", "it names no host"),
        ("nats://", "it names no host"),
        ("http://127.0.0.1:4222", "its scheme is none of NATS"),
        ("nats://a b", "spaces or control characters"),
        ("nats://a,nats://b", "take a list"),
        ("nats://" + "a" * 300, "it is no URL"),
        ("nats://ann:se/cret@127.0.0.1:4222", "are written as %2F"),
    ],
)
async def test_what_is_no_address(url, hint):
    async def examined(url):
        return [finding async for finding in examine(url)]

    async def connected(url):
        async with connect(url):
            pytest.fail("connected")

    for use in (connected, provision, examined):
        with pytest.raises(InvalidSetting) as refused:
            await use(url)
        assert hint in str(refused.value)
        assert "se/" not in str(refused.value)
        assert "'se'" not in str(refused.value)


async def test_websockets_beside_others_are_refused():
    with pytest.raises(InvalidSetting, match="for all of them, or for none"):
        async with connect(["nats://127.0.0.1:1", "ws://127.0.0.1:2"]):
            pytest.fail("connected")


@pytest.mark.parametrize("prefix", ["", "a b", "a.>", "*", "a..b", ".a", b"a b", 1])
async def test_what_is_no_inbox_prefix(prefix):
    with pytest.raises(InvalidSetting, match="inbox_prefix"):
        async with connect(NOBODY, inbox_prefix=prefix, connect_timeout=0.1):
            pytest.fail("connected")


async def test_a_seed_that_is_none():
    pytest.importorskip("nkeys")
    async with embedded() as server:
        with pytest.raises(InvalidSetting, match="cannot be connected to with these settings"):
            async with connect(server.url, nkeys_seed_str="SUAAAAAA"):
                pytest.fail("connected")
