"""Fixtures over a real nats-server: one for all the tests of a process, or one of a test's own.

``NATS_URL`` makes the shared server an existing one, ``--nats=container`` a container of testcontainers' (its image
in ``NATS_IMAGE``). Tests that kill, pause or restart a server ask for ``own_server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import secrets
import shutil
import signal
import threading
import warnings
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import hypothesis
import nats
import pytest
from nats.aio.transport import TcpTransport
from standstill import Standstill

from natsreceipts.embedded import embedded
from natsreceipts.errors import ServerUnavailable
from natsreceipts.testing import FaultProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nats.aio.client import Client

    from natsreceipts.embedded import EmbeddedServer


# The same examples in every run, so that a run tells of the change and not of its luck; HYPOTHESIS_PROFILE=explore
# looks for new ones.
hypothesis.settings.register_profile("steady", derandomize=True)
hypothesis.settings.register_profile("explore")
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nats",
        choices=["embedded", "container"],
        help="where the shared server comes from (NATS_URL where there is one, else embedded, unless given)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run again what failed because the machine stood still, and let children be interrupted.

    A shell that starts something in the background has it ignore Ctrl-C, and so would every process of the tests.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Standstill(), "standstill")


_connect = TcpTransport.connect


async def _connect_after_closing(self: TcpTransport, *args: Any, **kwargs: Any) -> None:
    """nats-py leaves the socket of a reconnect that failed halfway to the garbage collector.

    It would warn of it in whatever test runs by then.
    """
    self.close()
    await _connect(self, *args, **kwargs)


TcpTransport.connect = _connect_after_closing


class GivenServer:
    """A server at an address: what ``NATS_URL`` names, or a container. It is not for tests to stop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        self.url = url
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 4222


@contextlib.contextmanager
def container() -> Iterator[GivenServer]:
    """A server in a container. Without an engine this fails: who asks for one wants to know."""
    with warnings.catch_warnings():  # testcontainers' own use of what it has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from testcontainers.community.nats import NatsContainer

        with NatsContainer(os.environ.get("NATS_IMAGE", "nats:2-alpine"), jetstream=True) as started:
            yield GivenServer(started.nats_uri())


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer | GivenServer]:
    """One server for all the tests of this process: use the ``namespace`` fixture to keep them apart."""
    chosen = request.config.getoption("--nats")
    if chosen == "container":
        with container() as given:
            yield given
        return
    if chosen is None and (url := os.environ.get("NATS_URL")):
        yield GivenServer(url)
        return
    shared = embedded()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # a factory leaves the tests' loop alone
        runner.run(shared.__aenter__())
        try:
            yield shared
        finally:
            runner.run(shared.__aexit__(None, None, None))


@pytest.fixture
def namespace() -> str:
    """A fresh namespace, ``[a-z0-9]+``."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
async def own_server(request: pytest.FixtureRequest) -> AsyncIterator[EmbeddedServer]:
    """A server that the test may kill, pause and restart. Skipped where only the shared one is to be had."""
    own = embedded()
    try:
        await own.__aenter__()
    except ServerUnavailable as error:
        if os.environ.get("NATS_URL") or request.config.getoption("--nats") == "container":
            pytest.skip(f"needs a server of its own: {error}")
        raise
    try:
        yield own
    finally:
        await own.__aexit__(None, None, None)


@pytest.fixture
async def proxy(server: EmbeddedServer | GivenServer) -> AsyncIterator[FaultProxy]:
    """A proxy before ``server``, to lose what the test says."""
    host = server.host if isinstance(server, GivenServer) else "127.0.0.1"
    async with FaultProxy(host, server.port) as faults:
        yield faults


@pytest.fixture
async def own_proxy(own_server: EmbeddedServer) -> AsyncIterator[FaultProxy]:
    """A proxy before ``own_server``."""
    async with FaultProxy("127.0.0.1", own_server.port) as faults:
        yield faults


@pytest.fixture
async def nc(server: EmbeddedServer | GivenServer) -> AsyncIterator[Client]:
    """A plain nats-py client connected to ``server``."""
    client = await nats.connect(server.url)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="session")
def nats_cli() -> str:
    """The path of the real ``nats`` CLI. Without it the test is skipped, or fails where it has to be there."""
    found = shutil.which("nats")
    if found is None:
        problem = "needs the nats CLI on the PATH: go install github.com/nats-io/natscli/nats@v0.5.0"
        if os.environ.get("NATSRECEIPTS_NEEDS_NATS_CLI"):
            pytest.fail(problem)
        pytest.skip(problem)
    return found


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest) -> None:
    """Being autouse it is set up first and checks last: no other fixture is open then, so nothing may run."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_task_check")


@pytest.fixture
async def _task_check() -> AsyncIterator[None]:
    yield
    for _ in range(20):  # tasks that were cancelled and not waited for
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"the test left tasks behind: {sorted(task.get_name() + repr(task.get_coro()) for task in left)}"
