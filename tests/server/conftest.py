"""A toolkit on a bucket of the test's own, on the shared server."""

from __future__ import annotations

import contextlib

import nats.js.errors
import pytest
from support import bucket_of, toolkit_of


@pytest.fixture
async def bucket(nc, namespace):
    """The name of the test's bucket, which is removed at the end."""
    yield bucket_of(namespace)
    for name in (bucket_of(namespace), f"{namespace}-notices"):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await nc.jetstream().delete_stream(f"KV_{name}")


@pytest.fixture
async def toolkit(server, namespace, bucket):
    async with toolkit_of(server.url, namespace) as connected:
        yield connected


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "run-1")
