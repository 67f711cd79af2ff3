"""nats-server takes every file of compose/ as it is, and does what the comments in it say."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest
from compose_support import COMPOSE, as_user, nats_server, password_of, passwords, serving

from natsreceipts import connect, examine

CONFIGURATIONS = sorted(COMPOSE.glob("*.conf"))


def test_all_of_them_are_looked_at():
    assert [path.name for path in CONFIGURATIONS] == [
        "nats-cluster.conf",
        "nats-single.conf",
        "tenants-single.conf",
        "tenants.conf",
    ]


async def checked(conf, environment):
    environment = {"PATH": os.environ["PATH"], "SERVER_NAME": "nats-1", "STORE_DIR": "/data", **environment}
    command = [await nats_server(), "-t", "-c", str(conf)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("conf", CONFIGURATIONS, ids=lambda path: path.name)
async def test_nats_server_takes_the_file(conf):
    done = await checked(conf, passwords())
    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stdout + done.stderr


async def test_without_its_passwords_a_server_does_not_start():
    everything = passwords()
    for missing in everything:
        rest = {name: value for name, value in everything.items() if name != missing}
        done = await checked(COMPOSE / "tenants.conf", rest)
        assert done.returncode != 0
        assert missing in done.stdout + done.stderr


def test_no_secret_is_in_the_files():
    for path in (each for each in COMPOSE.rglob("*") if each.is_file()):
        for line in path.read_text(encoding="utf-8").splitlines():
            code = line.partition("#")[0]
            if "password:" in code.lower():
                assert "password: $" in code.lower(), f"{path.name}: {line}"


async def test_one_node(tmp_path):
    async with serving(COMPOSE / "nats-single.conf", tmp_path, {}) as [node]:
        async with connect(node.url, provision=True) as toolkit:
            assert await toolkit.run("acme", "order-42").execute("send", {}, lambda: "sent") == "sent"
        await node.healthy()
        config = (await node.look("/jsz"))["config"]
        assert config["sync_always"] is True
        assert config["store_dir"].startswith(str(node.folder))


async def test_three_nodes(tmp_path):
    environment = passwords()
    async with serving(COMPOSE / "nats-cluster.conf", tmp_path, environment, count=3) as nodes:
        for node in nodes:
            await node.healthy()
        urls = [node.url for node in nodes]
        async with as_user(urls, environment, "acme-admin", provision=True, replicas=3):
            pass
        async with as_user(urls, environment, "acme-worker") as toolkit:
            assert await toolkit.run("acme", "order-42").execute("send", {}, lambda: "sent", lease=30) == "sent"
        for node in nodes:
            assert (await node.look("/jsz"))["config"]["sync_always"] is True
            assert not (await node.look("/varz")).get("connect_urls")
        assert max([len((await node.look("/jsz"))["meta_cluster"].get("replicas") or []) for node in nodes]) == 2
        monitors = [f"http://127.0.0.1:{node.monitor}" for node in nodes]
        worker = {"user": "acme-worker", "password": password_of(environment, "acme-worker")}
        async with asyncio.timeout(60):  # until all replicas have caught up
            while worse := [each async for each in _worse_than_ok(urls, monitors, worker)]:
                assert [each.check for each in worse] == ["replicas, up to date"]
                await asyncio.sleep(0.1)


async def _worse_than_ok(urls, monitors, credentials):
    async for each in examine(urls, monitor=monitors, connect_timeout=20.0, **credentials):
        if each.level != "ok":
            yield each
