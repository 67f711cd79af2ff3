"""What the doctor is shown: a namespace of the test's own, and which findings it comes to."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "server"))  # for support.py

import pytest
from support import bucket_of, toolkit_of

from natsreceipts import examine


@pytest.fixture
async def bucket(nc, namespace):
    """The name of the test's bucket; whatever is in the namespace is removed at the end."""
    yield bucket_of(namespace)
    for info in await nc.jetstream().streams_info():
        if info.config.name.removeprefix("KV_").removeprefix("OBJ_").startswith(f"{namespace}-"):
            await nc.jetstream().delete_stream(info.config.name)


@pytest.fixture
async def toolkit(server, namespace, bucket):
    async with toolkit_of(server.url, namespace) as connected:
        yield connected


@pytest.fixture
def diagnose(server, namespace):
    """Examine the test's namespace, and give its findings by what was checked, without the namespace in it."""

    async def look(where=None, **settings):
        settings = {"namespace": namespace, "connect_timeout": 20.0, **settings}
        found = [finding async for finding in examine(where or server.url, **settings)]
        named = [finding.check.replace(f"{settings['namespace']}-", "") for finding in found]
        assert all(finding.fix for finding in found if finding.level in ("warning", "error"))
        return Findings(zip(named, found, strict=True))

    return look


class Findings:
    def __init__(self, found):
        self.all = list(found)

    def levels(self, *levels):
        """What was checked with such an outcome."""
        return {check for check, finding in self.all if finding.level in levels}

    def __getitem__(self, check):
        (found,) = [finding for name, finding in self.all if name == check]
        return found

    def those(self, check):
        return [finding for name, finding in self.all if name == check]
