"""What it costs to load a session, to append to it, and to go on with it, as it grows.

Run ``python benchmarks/sessions.py`` (it starts a nats-server of its own; ``NATS_URL`` names another one). Times are
the best of three rounds. The last column is the time per entry over that of 1,000 entries: it stays near 1 as long as
nothing grows faster than the session. ``go on`` is what a turn adds on a log that was read before: a wake that finds
nothing to do, and the request for the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from time import perf_counter
from typing import TYPE_CHECKING, Any

import nats

from natsreceipts import connect
from natsreceipts.embedded import embedded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client

SIZES = (1, 1_000, 20_000)
APPENDS = 1_000
ROUNDS = 3


def message(n: int) -> dict[str, Any]:
    """A turn of four: the user, a call, its result, what the model says."""
    turn, part = divmod(n, 4)
    text = [{"type": "text", "text": "x" * 200}]
    if part == 1:
        call = {"type": "toolCall", "id": f"call_{turn}", "name": "send", "arguments": {"to": "ada", "turn": turn}}
        return {"role": "assistant", "content": [call]}
    if part == 2:
        return {"role": "toolResult", "toolCallId": f"call_{turn}", "toolName": "send", "content": text}
    return {"role": "assistant" if part == 3 else "user", "content": text}


async def fill(client: Client, namespace: str, session: str, size: int) -> None:
    """Write a session's entries behind the library's back, which is quicker."""
    parent = None
    for n in range(size):
        record = {"v": 1, "id": f"e{n}", "parentId": parent, "kind": "message", "runId": "run", "dialect": "neutral"}
        parent = f"e{n}"
        await client.publish(f"{namespace}-sessions.acme.{session}", json.dumps(record | {"body": message(n)}).encode())
        if n % 500 == 0:
            await client.flush()
    await client.flush()
    stream = client.jetstream()
    while (await stream.stream_info(f"{namespace}-SESSIONS", subjects_filter=">")).state.subjects.get(
        f"{namespace}-sessions.acme.{session}", 0
    ) < size:
        await asyncio.sleep(0.05)


async def best(work: Callable[[], Awaitable[object]]) -> float:
    found = float("inf")
    for _ in range(ROUNDS):
        start = perf_counter()
        await work()
        found = min(found, perf_counter() - start)
    return found


async def main() -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = os.environ.get("NATS_URL") or (await stack.enter_async_context(embedded())).url
        namespace = f"bench{secrets.token_hex(4)}"
        toolkit = await stack.enter_async_context(connect(url, namespace=namespace, provision=True))
        client = await nats.connect(url)
        stack.push_async_callback(client.close)
        print(f"{'entries':>8}  {'load':>10}  {'context()':>10}  {'go on':>10}  {'load per entry':>16}  against 1,000")
        per_entry: dict[int, float] = {}
        for size in SIZES:
            name = f"s{size}"
            await fill(client, namespace, name, size)
            load = await best(lambda name=name: toolkit.sessions.open("acme", name).load())
            log = toolkit.sessions.open("acme", name)
            await log.load()
            context = await best(log.context)
            go_on = await best(lambda log=log: log.wake(guarded={"send": lambda arguments: arguments}))
            per_entry[size] = load / size
            against = f"{per_entry[size] / per_entry[1_000]:.2f}" if size >= 1_000 else ""
            print(
                f"{size:8,}  {load * 1e3:8.1f}ms  {context * 1e3:8.1f}ms  {(context + go_on) * 1e3:8.1f}ms"
                f"  {per_entry[size] * 1e6:14.1f}µs  {against:>13}"
            )
        for name in ("fresh", "s20000"):
            log = toolkit.sessions.open("acme", name)
            await log.load()
            start = perf_counter()
            for n in range(APPENDS):
                await log.append(message(n), run="run")
            took = perf_counter() - start
            print(f"appends to {name}: {APPENDS / took:,.0f} a second, {took / APPENDS * 1e3:.2f} ms each")
        for stream in (f"{namespace}-SESSIONS", f"KV_{namespace}-receipts", f"OBJ_{namespace}-receipt-payloads"):
            await client.jetstream().delete_stream(stream)


if __name__ == "__main__":
    asyncio.run(main())
