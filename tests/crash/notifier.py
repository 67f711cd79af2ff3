"""A run whose steps file notices, or an agent whose turns carry them; either may be killed at any time.

``file`` goes through the steps of one run, and after each filing appends what it came to, then goes on. ``carry``
consumes what is pending, or was consumed by a turn of its own name, and then acts, by appending a line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from worker import append

from natsreceipts import AlreadyConsumed, connect

AGENTS = ["local.planner-1", "local.builder-2"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(options: argparse.Namespace) -> None:
    async with connect(options.url, namespace=options.namespace) as toolkit:
        board = toolkit.notices
        if options.what == "file":
            for n in range(options.steps):
                fact = {"decision": "build", "outcome": "ok", "detail": {"n": n}}
                filed = await board.file(
                    run="run-1", step=f"/n#{n}", request_id=f"step-{n}", addressees=AGENTS, fact=fact
                )
                if options.die_on == n:
                    die()
                for one in filed:
                    append(options.out, f"{n} {one.notice_id} {one.created}")
            return
        for n, notice in enumerate(await board.pending(run="run-1", addressee=AGENTS[0], by=options.turn)):
            try:
                await board.consume(run="run-1", addressee=AGENTS[0], notice_id=notice.notice_id, by=options.turn)
            except AlreadyConsumed:
                continue
            if options.die_on == n:
                die()
            append(options.out, f"{options.turn} {notice.notice_id}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["file", "carry"])
    for name in ("url", "namespace", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turn", default="turn-1")
    parser.add_argument("--die-on", type=int, default=-1)
    asyncio.run(main(parser.parse_args()))
