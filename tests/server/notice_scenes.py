"""What the tests of notices share: the bucket as others see it, and a watch whose notices can be waited for."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

from natsreceipts import notice_addressee_id

FACT = {"decision": "build", "outcome": "ok"}
AGENT = "local.planner-1"


def stem(notice_id, run="run-1", agent=AGENT, endpoint="local"):
    """The key of a notice but for its last token."""
    return f"notice.{endpoint}.{run}.{notice_addressee_id(agent)}.{notice_id}"


def subjects(namespace):
    return f"$KV.{namespace}-notices.>"


async def raw(nc, namespace):
    """The notices bucket as nats-py's own KV."""
    return await nc.jetstream().key_value(f"{namespace}-notices")


async def keys_of(nc, namespace):
    """Every key of the bucket, with the number of its kept revisions."""
    state = await nc.request(
        f"$JS.API.STREAM.INFO.KV_{namespace}-notices", json.dumps({"subjects_filter": ">"}).encode(), timeout=5
    )
    found = json.loads(state.data)["state"].get("subjects") or {}
    return {subject.removeprefix(f"$KV.{namespace}-notices."): n for subject, n in found.items()}


async def last_sequence(nc, namespace):
    return (await nc.jetstream().stream_info(f"KV_{namespace}-notices")).state.last_seq


async def filed(board, *request_ids, **said):
    """File one notice for each request id; what filing returned."""
    given = {"run": "run-1", "step": "/n#0", "addressee": AGENT, "fact": FACT} | said
    return [await board.file(request_id=request_id, **given) for request_id in request_ids]


@asynccontextmanager
async def watched(notices):
    """Run a watch in a task of its own, and give a function that waits for the next n notices."""
    queue = asyncio.Queue()

    async def run():
        async with aclosing(notices) as found:
            async for notice in found:
                queue.put_nowait(notice)

    task = asyncio.create_task(run())

    async def take(n, timeout=20.0):
        async with asyncio.timeout(timeout):
            found = []
            while len(found) < n:
                getter = asyncio.create_task(queue.get())
                await asyncio.wait([getter, task], return_when=asyncio.FIRST_COMPLETED)
                if not getter.done():
                    getter.cancel()
                    await asyncio.wait([getter])
                    task.result()
                found.append(getter.result())
            return found

    take.queue = queue
    take.task = task
    try:
        yield take
    finally:
        task.cancel()
        await asyncio.wait([task])
