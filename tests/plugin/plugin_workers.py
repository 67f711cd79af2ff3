"""Workers for kill_worker, each wrong or right in one way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import nats

import natsreceipts

ARGS = {"to": "ann"}


def note(folder, text, name="effects"):
    with (folder / name).open("a") as file:
        file.write(f"{text}\n")


async def guarded(url, folder, text="mail", *, lease=2.0):
    async with natsreceipts.connect(url, provision=True, lease=lease) as toolkit:
        await toolkit.run("acme", "order-42").execute("send", ARGS, lambda: note(folder, text))


async def unguarded(url, folder):
    """The effect, and then the note of it: the usual way."""
    async with natsreceipts.connect(url, provision=True) as toolkit:
        note(folder, "mail")
        await toolkit.sessions.open("acme", "chat").append({"role": "user", "content": "sent"})


async def never_writes(url, folder):
    note(folder, url)


def fails(url, folder):
    raise LookupError("no such order")


async def hangs(url, folder):
    print("hanging", flush=True)
    await asyncio.get_running_loop().create_future()


async def many_writes(url, folder):
    async with await nats.connect(url) as client:
        for n in range(9):
            await client.publish("notes", str(n).encode())
        await client.flush()


async def with_a_child(url, folder):
    """The effect is had by a process that the worker has started, which must not outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(folder, child.pid, "children")
    async with await nats.connect(url) as client:
        await client.publish("notes", b"started")
        await client.flush()
    child.kill()
    child.wait()


async def jobs_for_ever(url, folder):
    async with await nats.connect(url) as client, natsreceipts.connect(client, provision=True, lease=2.0) as toolkit:
        js = client.jetstream()
        jobs = await js.pull_subscribe("jobs.*", durable="mailer", stream="JOBS")
        while True:
            try:
                [msg] = await jobs.fetch(1, timeout=5)
            except TimeoutError:
                continue
            try:
                async with toolkit.delivery(msg), toolkit.run("acme", json.loads(msg.data)["run"]) as run:
                    await run.execute("send", ARGS, lambda: note(folder, "mail"))
            except natsreceipts.NatsReceiptsError as error:
                print(error, flush=True)


if __name__ == "__main__":
    asyncio.run(jobs_for_ever(sys.argv[1], Path(sys.argv[2])))
