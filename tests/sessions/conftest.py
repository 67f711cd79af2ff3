"""A toolkit on a bucket and a session stream of the test's own, on the shared server."""

from __future__ import annotations

import contextlib

import nats.js.errors
import pytest
from session_support import Desk, stream_of
from support import bucket_of, toolkit_of


@pytest.fixture
async def bucket(nc, namespace):
    """The name of the test's bucket, which is removed at the end with its session stream."""
    yield bucket_of(namespace)
    for stream in (f"KV_{bucket_of(namespace)}", stream_of(namespace)):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await nc.jetstream().delete_stream(stream)


@pytest.fixture
async def toolkit(server, namespace, bucket):
    async with toolkit_of(server.url, namespace) as connected:
        yield connected


@pytest.fixture
async def other(server, namespace, toolkit):
    """A second worker's toolkit."""
    async with toolkit_of(server.url, namespace) as connected:
        yield connected


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "run-1")


@pytest.fixture
def desk(toolkit, nc, namespace):
    """A session in the dialect that the test names: ``desk("anthropic")``."""

    def opened(dialect="neutral", session="chat", *, where=None):
        return Desk(where or toolkit, nc, namespace, dialect, session)

    return opened
