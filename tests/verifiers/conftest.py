"""Toolkits in a namespace of the test's own, and a call whose outcome nobody knows."""

from __future__ import annotations

import pytest
from support import toolkit_of


@pytest.fixture
async def toolkit(server, namespace):
    async with toolkit_of(server.url, namespace) as toolkit:
        yield toolkit


@pytest.fixture
def run(toolkit):
    return toolkit.run("acme", "run-1")


@pytest.fixture
def left_behind(run):
    """Make a call of which nobody can know whether it landed: the body's ``effect`` is made, and then it dies."""

    async def leave(tool, args, effect=None):
        async def body(call):
            if effect is not None:
                await effect(call)
            raise TimeoutError("no answer")

        with pytest.raises(TimeoutError):
            await run.execute(tool, args, body)

    return leave
