"""The tests can have their server from testcontainers: ``pytest --nats=container``."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from compose_support import image, ran

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
async def test_the_suites_server_in_a_container():
    pytest.importorskip("testcontainers.community.nats")
    environment = {
        "NATS_IMAGE": await image(),
        "NATS_SERVER": "no such program",  # nothing else can have served
        "NATS_URL": "nats://127.0.0.1:1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--nats=container"]
    command += ["tests/server/test_calls.py", "-k", "test_a_call", "-q", "--rootdir", str(ROOT)]
    done = await asyncio.to_thread(ran, command, environment, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
