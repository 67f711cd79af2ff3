"""A server's address, and sync toolkits in a namespace of the test's own. These tests are no coroutines."""

from __future__ import annotations

import pytest

from natsreceipts import sync


@pytest.fixture
def connected(server, namespace):
    """Connects to the test's namespace, as often as it is called."""

    def connect(**settings):
        return sync.connect(server.url, **{"namespace": namespace, "provision": True} | settings)

    return connect


@pytest.fixture
def toolkit(connected):
    with connected() as toolkit:
        yield toolkit


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "run-1")
