"""The compose files are what Compose takes, and come up where there is an engine to run them.

``NATS_IMAGE`` names the image, as it does for whoever uses the files.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from contextlib import asynccontextmanager

import pytest
from compose_support import COMPOSE, IMAGE, as_user, image, passwords, ran

from natsreceipts import NatsReceiptsError, connect
from natsreceipts.embedded import free_port

FILES = {
    "one node": ["compose.yaml"],
    "tenants": ["compose.yaml", "tenants.yaml"],
    "cluster": ["cluster.yaml"],
    "monitored": ["compose.yaml", "monitoring.yaml"],
    "monitored tenants": ["compose.yaml", "tenants.yaml", "monitoring.yaml"],
    "monitored cluster": ["cluster.yaml", "monitoring.yaml", "monitoring-cluster.yaml"],
}


def compose_command():
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and ran([*command, "version"]).returncode == 0:
            return command
    pytest.skip("needs Compose: `docker compose` or `docker-compose`")


def given(files):
    return [part for name in files for part in ("-f", str(COMPOSE / name))]


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_compose_takes_the_files(files):
    done = ran([*compose_command(), *given(files), "config"], passwords())
    assert done.returncode == 0, done.stderr
    assert IMAGE in done.stdout


@pytest.mark.parametrize("files", [FILES["tenants"], FILES["cluster"]], ids=["tenants", "cluster"])
@pytest.mark.parametrize("value", [None, ""], ids=["missing", "empty"])
def test_compose_refuses_without_a_password(files, value):
    command = compose_command()
    if (COMPOSE / ".env").exists():
        pytest.skip("compose/.env gives the passwords")
    for name in passwords():
        environment = passwords()
        del environment[name]
        if value is not None:
            environment[name] = value
        done = ran([*command, *given(files), "config"], environment)
        assert done.returncode != 0
        assert name in done.stderr


@asynccontextmanager
async def up(files, environment):
    """Compose's services, with ports and volumes of the test's own, for as long as the context is open."""
    command = compose_command()
    await image()
    project = [*command, "-p", f"natsreceipts{secrets.token_hex(4)}", *given(files)]
    try:
        started = await asyncio.to_thread(ran, [*project, "up", "-d"], environment)
        assert started.returncode == 0, started.stderr
        yield project
    finally:
        down = await asyncio.to_thread(ran, [*project, "down", "-v", "-t", "2"], environment)
        assert down.returncode == 0, down.stderr


async def healthy(project, environment):
    """Wait for the health checks, which need an image with wget in it: the default one is, nats:2 is not."""
    containers = (await asyncio.to_thread(ran, [*project, "ps", "-q"], environment)).stdout.split()
    assert containers
    for container in containers:
        if (await asyncio.to_thread(ran, ["docker", "exec", container, "wget", "--help"])).returncode > 1:
            continue
        status = ["docker", "inspect", "-f", "{{.State.Health.Status}}", container]
        async with asyncio.timeout(90):
            while (await asyncio.to_thread(ran, status)).stdout.strip() != "healthy":
                await asyncio.sleep(0.2)


async def provisioned(open_toolkit, **settings):
    """Make the buckets as soon as the servers let that happen."""
    async with asyncio.timeout(90):
        while True:
            try:
                async with open_toolkit(provision=True, connect_timeout=5.0, **settings):
                    return
            except NatsReceiptsError:
                await asyncio.sleep(0.1)


@pytest.mark.timeout(400)
async def test_one_node_comes_up():
    environment = {"NATS_PORT": str(free_port()), "NATS_MONITOR_PORT": str(free_port())}
    url = f"nats://127.0.0.1:{environment['NATS_PORT']}"
    async with up(FILES["one node"], environment) as project:
        await provisioned(lambda **settings: connect(url, **settings))
        await healthy(project, environment)
        async with connect(url, connect_timeout=20.0) as toolkit:
            assert await toolkit.run("acme", "order-42").execute("send", {}, lambda: "sent") == "sent"
        # The volume outlives the container.
        again = await asyncio.to_thread(ran, [*project, "up", "-d", "--force-recreate"], environment)
        assert again.returncode == 0, again.stderr
        async with connect(url, connect_timeout=30.0) as toolkit:
            assert await toolkit.run("acme", "order-42").execute("send", {}, lambda: "again") == "sent"


@pytest.mark.timeout(400)
async def test_two_tenants_come_up():
    environment = {"NATS_PORT": str(free_port()), "NATS_MONITOR_PORT": str(free_port()), **passwords()}
    url = f"nats://127.0.0.1:{environment['NATS_PORT']}"
    async with up(FILES["tenants"], environment):
        for tenant in ("acme", "beta"):
            await provisioned(lambda tenant=tenant, **more: as_user(url, environment, f"{tenant}-admin", **more))
            async with as_user(url, environment, f"{tenant}-worker") as toolkit:
                assert await toolkit.run("shared", "order-42").execute("send", {}, lambda own=tenant: own) == tenant


@pytest.mark.timeout(400)
async def test_a_cluster_comes_up_and_survives_a_node():
    ports = [free_port() for _ in range(6)]
    names = [f"NATS_{kind}_{n}" for kind in ("PORT", "MONITOR_PORT") for n in (1, 2, 3)]
    environment = {**dict(zip(names, map(str, ports), strict=True)), **passwords()}
    urls = [f"nats://127.0.0.1:{port}" for port in ports[:3]]
    async with up(FILES["cluster"], environment) as project:
        await provisioned(lambda **more: as_user(urls, environment, "acme-admin", **more), replicas=3)
        await healthy(project, environment)
        async with as_user(urls, environment, "acme-worker", lease=30.0) as toolkit:
            run = toolkit.run("acme", "order-42")
            assert await run.execute("send", {"n": 1}, lambda: "sent") == "sent"
            stopped = await asyncio.to_thread(ran, [*project, "kill", "nats-2"], environment)
            assert stopped.returncode == 0, stopped.stderr
            assert await run.execute("send", {"n": 1}, lambda: "again") == "sent"
            assert await run.execute("send", {"n": 2}, lambda: "sent too") == "sent too"
