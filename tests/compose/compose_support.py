"""Servers that run with the very files of compose/, on ports and folders of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from natsreceipts import connect
from natsreceipts.embedded import _find_executable, free_port

COMPOSE = Path(__file__).parents[2] / "compose"
IMAGE = os.environ.get("NATS_IMAGE", "nats:2-alpine")
USERS = ("acme-admin", "acme-worker", "beta-admin", "beta-worker")


def passwords():
    """One for each user, as the files want them: beginning with a letter, letters and digits only."""
    return {f"{user.upper().replace('-', '_')}_PASSWORD": f"p{secrets.token_hex(12)}" for user in USERS}


def password_of(environment, user):
    return environment[f"{user.upper().replace('-', '_')}_PASSWORD"]


def as_user(url, environment, user, **settings):
    """A toolkit as one of the four users."""
    settings = {"user": user, "password": password_of(environment, user), "connect_timeout": 20.0} | settings
    return connect(url, **settings)


def ran(command, environment=None, *, timeout=120, cwd=None):
    environment = None if environment is None else {**os.environ, **environment}
    return subprocess.run(
        command,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


async def image():
    """The image to test with. Skips the test where no engine can be reached, or the image cannot be had."""
    if shutil.which("docker") is None or (await asyncio.to_thread(ran, ["docker", "info"], timeout=30)).returncode != 0:
        pytest.skip("needs a container engine")
    if (await asyncio.to_thread(ran, ["docker", "image", "inspect", IMAGE])).returncode != 0:
        pulled = await asyncio.to_thread(ran, ["docker", "pull", "-q", IMAGE], timeout=90)
        if pulled.returncode != 0:
            pytest.skip(f"needs the image {IMAGE} (or another one in NATS_IMAGE): {pulled.stderr.strip()}")
    return IMAGE


async def nats_server():
    return await _find_executable(None, 30.0)


class Node:
    """One nats-server with a shipped configuration file."""

    def __init__(self, name, folder):
        self.name = name
        self.folder = folder
        self.port, self.monitor, self.route = free_port(), free_port(), free_port()

    @property
    def url(self):
        return f"nats://127.0.0.1:{self.port}"

    def arguments(self, conf, nodes):
        # What differs from a container: the address, the ports and the name, which the command line may say.
        given = ["-c", str(conf), "-a", "127.0.0.1", "-p", str(self.port), "-m", str(self.monitor), "-n", self.name]
        if len(nodes) > 1:
            given += ["--cluster", f"nats://127.0.0.1:{self.route}"]
            given += ["--routes", ",".join(f"nats://127.0.0.1:{node.route}" for node in nodes)]
        return given

    async def ready(self, process, log):
        async with asyncio.timeout(30):
            while True:
                assert process.poll() is None, log.read_text(errors="replace")
                with contextlib.suppress(OSError, ValueError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    try:
                        line = await reader.readline()
                    finally:
                        writer.close()
                    if json.loads(line.removeprefix(b"INFO "))["server_name"] == self.name:
                        return
                await asyncio.sleep(0.02)

    async def healthy(self):
        """Wait for what the health checks in the compose files ask for, and for a leader, where there are several.

        A node is healthy before it has heard of a leader, and until then nobody answers who makes a stream.
        """
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):  # 503 is one
                    told = await self.look("/healthz?js-server-only=true")
                    meta = (await self.look("/jsz")).get("meta_cluster")
                    if told == {"status": "ok"} and (meta is None or meta.get("leader")):
                        return
                await asyncio.sleep(0.05)

    async def look(self, path):
        """What the monitoring port says."""

        def fetch():
            with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}{path}", timeout=10) as answer:
                return json.load(answer)

        return await asyncio.to_thread(fetch)


@contextlib.asynccontextmanager
async def serving(conf, folder, environment, *, count=1):
    """Run ``count`` servers with one file for as long as the context is open."""
    executable = await nats_server()
    nodes = [Node(f"{secrets.token_hex(4)}-{n}", folder / f"node-{n}") for n in range(count)]
    processes = []
    try:
        for node in nodes:
            node.folder.mkdir()
            env = {**os.environ, **environment, "SERVER_NAME": node.name, "STORE_DIR": str(node.folder)}
            with (node.folder / "log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [executable, *node.arguments(conf, nodes)],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        for node, process in zip(nodes, processes, strict=True):
            await node.ready(process, node.folder / "log")
        yield nodes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            await asyncio.to_thread(process.wait)
