"""The pytest plugin of natsreceipts: fixtures for tests of workers and tools. docs/testing.md shows them.

It stands beside the package, so that a test run that uses none of them imports nothing of natsreceipts.
"""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING

import pytest

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # another plugin runs the async tests, and their fixtures
    async_fixture = pytest.fixture

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from typing import Any

    from natsreceipts import Toolkit
    from natsreceipts.testing import FaultProxy, ServerAddress, Trial


@pytest.fixture(scope="session")
def receipts_server() -> Iterator[ServerAddress]:
    """Where a NATS server with JetStream is (``.url``, ``.host``, ``.port``): one for the whole test run.

    The one that the variable NATSRECEIPTS_TEST_URL names, else a nats-server of the run's own.
    """
    from natsreceipts.testing.servers import shared_server

    with shared_server() as address:
        yield address


@pytest.fixture
def receipts_namespace() -> str:
    """A namespace of the test's own, for ``natsreceipts.connect(url, namespace=…)``."""
    return f"t{secrets.token_hex(6)}"


@async_fixture
async def receipts_toolkit(receipts_server: ServerAddress, receipts_namespace: str) -> AsyncIterator[Toolkit]:
    """A connected toolkit in the test's namespace, all of which is deleted at the end."""
    import natsreceipts
    from natsreceipts.testing.servers import remove_namespace

    async with natsreceipts.connect(receipts_server.url, namespace=receipts_namespace, provision=True) as toolkit:
        yield toolkit
    await remove_namespace(receipts_server.url, receipts_namespace)


@async_fixture
async def receipts_proxy(receipts_server: ServerAddress) -> AsyncIterator[FaultProxy]:
    """A `natsreceipts.testing.FaultProxy` before the server: connect to its ``.url``, and lose what you want."""
    from natsreceipts.testing import FaultProxy

    async with FaultProxy(receipts_server.host, receipts_server.port) as proxy:
        yield proxy


@pytest.fixture
def kill_worker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Coroutine[Any, Any, list[Trial]]]:
    """`natsreceipts.testing.kill_worker`, with a folder of its own."""
    from natsreceipts.testing import kill_worker as kill

    return functools.partial(kill, folder=tmp_path_factory.mktemp("kill_worker"))
