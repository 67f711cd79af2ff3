"""A worker that makes guarded calls whose effect is one line in a file, and that may be killed at any time.

It goes through a run's calls in order, from one run to the next, and writes down what it was told about each:
``KEY completed TOKEN`` or ``KEY ambiguous -``. A token is new for each time that an effect is entered, and is the
call's result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal

from natsreceipts import AmbiguousCall, LeaseLost, connect

KINDS = ("opaque", "idempotent")


def append(path: str, line: str, *, sync: bool = True) -> None:
    """One line, in one write, on disk before it returns."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def following(run, kind: str, args: object, effect) -> str:
    """Follow whoever owns the call now, until that is known."""
    while True:
        with contextlib.suppress(LeaseLost):
            return await run.execute(kind, args, effect, effect=kind)


async def main(options: argparse.Namespace) -> None:
    async with connect(options.url, namespace=options.namespace, lease=options.lease) as toolkit:
        print("ready", flush=True)
        for number in range(options.runs):
            run = toolkit.run("acme", f"run-{number}")
            for n in range(options.calls):
                kind = KINDS[n % 2]
                key = run.key(kind, {"n": n}).kv_key
                point = options.die_at if (options.die_in, n) == (number, options.die_on) else ""
                lease = {} if point or not options.die_at else {"lease": 30.0}  # only what it leaves behind is to end

                async def effect(key=key, point=point) -> str:
                    token = secrets.token_hex(6)
                    if point == "after the claim":
                        die()
                    await asyncio.sleep(options.pause)
                    append(options.effects, f"{key} {token}", sync=point != "in the effect")
                    if point in ("in the effect", "after the effect"):
                        die()
                    await asyncio.sleep(options.pause)
                    if point == "in the settle":
                        asyncio.get_running_loop().call_soon(die)
                    return token

                if point == "before the claim":
                    die()
                try:
                    try:
                        result = await run.execute(kind, {"n": n}, effect, effect=kind, **lease)
                    except LeaseLost:
                        if kind == "opaque":  # nobody else may run it
                            raise
                        result = await following(run, kind, {"n": n}, effect)
                except AmbiguousCall:
                    append(options.told, f"{key} ambiguous -", sync=False)
                else:
                    append(options.told, f"{key} completed {result}", sync=False)
                if point == "after the settle":
                    die()
        print("finished", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("url", "namespace", "effects", "told"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--lease", type=float, default=0.4)
    parser.add_argument("--pause", type=float, default=0.003)
    parser.add_argument("--die-at", default="")
    parser.add_argument("--die-in", type=int, default=0)
    parser.add_argument("--die-on", type=int, default=0)
    asyncio.run(main(parser.parse_args()))
