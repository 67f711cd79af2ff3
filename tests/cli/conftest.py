"""The command line in this process or as a program of its own, on buckets of the test's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))  # for support.py and scenes.py

from program import Cli, streams_of
from support import bucket_of, toolkit_of


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch, tmp_path):
    """Neither the environment nor the contexts of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("NATS_") and name not in ("NATS_SERVER", "NATS_URL")]:
        monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
async def bucket(nc, namespace):
    """The name of the test's bucket; whatever is in the namespace is removed at the end."""
    yield bucket_of(namespace)
    for stream in await streams_of(nc, namespace):
        await nc.jetstream().delete_stream(stream)


@pytest.fixture
async def toolkit(server, namespace, bucket):
    async with toolkit_of(server.url, namespace, worker="host-a/101") as connected:
        yield connected


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "order-42")


@pytest.fixture
def cli(server, namespace):
    """Runs a verb in this process, on the test's buckets."""
    return Cli("--server", server.url, "--namespace", namespace)


@pytest.fixture
def own_cli(own_server):
    """Runs a verb in this process, on a server of the test's own and without a namespace."""
    return Cli("--server", own_server.url)
