"""The server that a test run shares."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from pydantic_core import from_json, to_json

from natsreceipts._jetstream import opened
from natsreceipts.embedded import embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

__all__ = ["ServerAddress", "remove_namespace", "shared_server"]

_SECONDS = 10.0


class ServerAddress(NamedTuple):
    """Where the server of a test run is."""

    url: str
    host: str
    port: int


@contextlib.contextmanager
def shared_server() -> Generator[ServerAddress, None, None]:
    """The server that ``NATSRECEIPTS_TEST_URL`` names, else a nats-server of our own. Raises ServerUnavailable."""
    if given := os.environ.get("NATSRECEIPTS_TEST_URL"):
        parts = urlsplit(given if "://" in given else f"nats://{given}")
        yield ServerAddress(given, parts.hostname or "127.0.0.1", parts.port or 4222)
        return
    server = embedded()
    _run(server.__aenter__)
    try:
        yield ServerAddress(server.url, "127.0.0.1", server.port)
    finally:
        _run(lambda: server.__aexit__(None, None, None))


def _run(call: Callable[[], Coroutine[object, object, object]]) -> None:
    """In a thread, as an event loop may be running here, or be set for the tests."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(call())).result()


async def remove_namespace(url: str, namespace: str) -> None:
    """Delete all buckets and streams of a namespace."""
    async with opened(url, connect_timeout=_SECONDS, options={}) as link:
        names: list[str] = []
        while True:
            asked = to_json({"offset": len(names)})
            answer = from_json((await link.request("$JS.API.STREAM.NAMES", asked, timeout=_SECONDS)).data)
            page: list[str] = answer.get("streams") or []
            names += page
            if not page or len(names) >= int(answer["total"]):
                break
        for name in names:
            if name.startswith((f"{namespace}-", f"KV_{namespace}-", f"OBJ_{namespace}-")):
                await link.request(f"$JS.API.STREAM.DELETE.{name}", b"", timeout=_SECONDS)
