"""A worker of its own: makes one guarded call and says on its output how that goes.

It prints ``entered N`` in the body (N: the attempt), leaves the body at a line on its input, and prints
``result VALUE`` or ``error NAME`` at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys

from natsreceipts import connect
from natsreceipts.errors import NatsReceiptsError


async def main(url: str, namespace: str, options: str, args: str) -> None:
    async def body(call):
        print("entered", call.attempt, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        return f"by the holder at attempt {call.attempt}"

    async with connect(url, namespace=namespace, lease=20.0) as toolkit:
        run = toolkit.run("acme", "run-1")
        try:
            result = await run.execute("send", json.loads(args), body, **json.loads(options))
        except NatsReceiptsError as error:
            print("error", type(error).__name__, getattr(error, "result", None), flush=True)
        else:
            print("result", result, flush=True)


asyncio.run(main(*sys.argv[1:]))
