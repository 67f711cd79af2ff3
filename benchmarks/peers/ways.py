"""Each way to guard one call: a claim before the effect, the result after it, kept under the call's key.

Every way is an async context manager that gives one call to make again and again, each time with a new key: a
coroutine function, or (for a library without one) a function that blocks, which is measured in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Work = Callable[[], Awaitable[object]] | Callable[[], object]

ARGS = {
    "to": ["ada@example.com", "grace@example.com"],
    "subject": "Your order has shipped",
    "body": "Hello, your order 42 is on its way and will be with you soon.",
    "urgent": False,
}
RESULT = {"id": "m-0123456789", "status": "sent", "at": 1764496800.5, "to": ARGS["to"], "note": "x" * 80}

_fresh = itertools.count()


def _needs(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise servers.Absent(f"pip install {name.replace('_', '-')}: {error}") from error


def _synced_nats(synced: bool) -> str | None:
    return "jetstream { sync_interval: always }" if synced else None


@contextlib.asynccontextmanager
async def kv_floor(synced: bool) -> AsyncIterator[Work]:
    """nats-py's own KV: create, then update. What nothing on JetStream can go below."""
    import nats
    import nats.js.api

    import natsreceipts

    async with natsreceipts.embedded(config=_synced_nats(synced)) as server:
        client = await nats.connect(server.url)
        config = nats.js.api.KeyValueConfig(bucket="floor", history=8, direct=True)
        kv = await client.jetstream().create_key_value(config)
        claim = json.dumps({"status": "running", "pad": "x" * 330}).encode()
        settle = json.dumps({"status": "completed", "result": RESULT, "pad": "x" * 330}).encode()

        async def work() -> None:
            key = f"acme.bench.send_email.{next(_fresh):064d}"
            await kv.update(key, settle, last=await kv.create(key, claim))

        try:
            yield work
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def natsreceipts_execute(synced: bool) -> AsyncIterator[Work]:
    """run.execute of this package."""
    import natsreceipts

    async with (
        natsreceipts.embedded(config=_synced_nats(synced)) as server,
        natsreceipts.connect(server.url, provision=True) as toolkit,
    ):
        run = toolkit.run("acme", "bench")

        async def effect() -> object:
            return RESULT

        async def work() -> None:
            await run.execute("send_email", {**ARGS, "n": next(_fresh)}, effect)

        yield work


def _exactly_once(store: Any) -> Work:
    from exactly_once.core import once

    async def work() -> None:
        async with once(store, key=f"send_email:{next(_fresh)}") as guard:
            if guard.fresh:
                guard.result = RESULT

    return work


@contextlib.asynccontextmanager
async def exactly_once_redis(synced: bool) -> AsyncIterator[Work]:
    """exactly-once on Redis, its async API."""
    exactly_once = _needs("exactly_once")
    with servers.redis(synced=synced) as url:
        store = exactly_once.Store.redis(url)
        try:
            yield _exactly_once(store)
        finally:
            await store.aclose()


@contextlib.asynccontextmanager
async def exactly_once_postgres(synced: bool) -> AsyncIterator[Work]:
    """exactly-once on PostgreSQL, its async API."""
    exactly_once = _needs("exactly_once")
    with servers.postgres(synced=synced) as url:
        store = exactly_once.Store.postgres(url)
        try:
            yield _exactly_once(store)
        finally:
            await store.aclose()


@contextlib.asynccontextmanager
async def idemkit_redis(synced: bool) -> AsyncIterator[Work]:
    """idemkit on Redis, with its default settings."""
    idemkit = _needs("idemkit")
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    with servers.redis(synced=synced) as url:
        async with idemkit.RedisBackend.from_url(url) as backend:

            @idemkit.idempotent(backend=backend, config=idemkit.MethodConfig(scope=lambda _: "acme"))
            async def send_email(*, args: dict[str, object]) -> object:
                return RESULT

            async def work() -> None:
                await send_email(args={**ARGS, "n": next(_fresh)})

            yield work


@contextlib.asynccontextmanager
async def agent_once_sqlite(synced: bool) -> AsyncIterator[Work]:
    """agent-once on SQLite, which is on disk before it answers; it blocks, so it is measured in threads."""
    if not synced:
        raise servers.Absent("it has one setting: on disk before it answers")
    once = _needs("once")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        guard = once.Once(f"{folder}/once.db")

        @guard.tool
        def send_email(args: dict[str, object]) -> object:
            return RESULT

        def work() -> None:
            with guard.scope("bench"):
                send_email({**ARGS, "n": next(_fresh)})

        yield work


@contextlib.asynccontextmanager
async def powertools_redis(synced: bool) -> AsyncIterator[Work]:
    """AWS Lambda Powertools on Redis; it blocks, so it is measured in threads."""
    _needs("aws_lambda_powertools")
    _needs("boto3")
    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    with servers.redis(synced=synced) as url:
        client = redis.Redis.from_url(url, decode_responses=True)

        @idempotent_function(
            data_keyword_argument="args",
            persistence_store=CachePersistenceLayer(client=client),
            config=IdempotencyConfig(expires_after_seconds=3600),
        )
        def send_email(args: dict[str, object]) -> object:
            return RESULT

        def work() -> None:
            send_email(args={**ARGS, "n": next(_fresh)})

        try:
            yield work
        finally:
            client.close()


@contextlib.asynccontextmanager
async def dbos_postgres(synced: bool) -> AsyncIterator[Work]:
    """DBOS on PostgreSQL: a workflow of one step, under the call's key."""
    _needs("dbos")
    from dbos import DBOS, SetWorkflowID

    with servers.postgres(synced=synced) as url:
        DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "run_admin_server": False})

        @DBOS.step()
        async def send_email(args: dict[str, object]) -> object:
            return RESULT

        @DBOS.workflow()
        async def call(args: dict[str, object]) -> object:
            return await send_email(args)

        DBOS.launch()

        async def work() -> None:
            number = next(_fresh)
            with SetWorkflowID(f"send_email:{number}"):
                await call({**ARGS, "n": number})

        try:
            yield work
        finally:
            DBOS.destroy()
            # It made its own executor the loop's, and has shut it down.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())


WAYS: dict[str, Callable[[bool], contextlib.AbstractAsyncContextManager[Work]]] = {
    "nats-py KV, create + update": kv_floor,
    "natsreceipts": natsreceipts_execute,
    "exactly-once, Redis": exactly_once_redis,
    "exactly-once, PostgreSQL": exactly_once_postgres,
    "idemkit, Redis": idemkit_redis,
    "Powertools, Redis": powertools_redis,
    "agent-once, SQLite": agent_once_sqlite,
    "DBOS, PostgreSQL": dbos_postgres,
}
