"""An agent with a scripted model, which goes on with its session wherever it stands, and may be killed at any time.

Run as a program it is a nursery: for each JSON line on its input it forks a worker (so that a hundred of them do not
import everything a hundred times), and prints ``ID STATUS`` when that has ended.

The model asks for ``CALLS`` calls in each turn, under ids that it uses again in every message, and asks once more for
what it was told never started. The effect of a call is one line in a file: ``KV_KEY PLACE ID TOKEN``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import signal
import sys
import traceback

from dialect_shapes import result, says, shaped, user
from session_support import assistant

from natsreceipts import SessionBusy, connect
from natsreceipts.transcript import tool_calls_of

CALLS = 3
TOOL = "send"


def guarded():
    return {TOOL: lambda arguments: arguments}


def state_of(loaded, dialect):
    """What the model sees: the number of the turn, and what became of each of its calls; None where it has ended."""
    turn, items, ended = -1, {}, True
    by_id = {}
    for entry in loaded.entries:
        text = json.dumps(entry.body)
        if '"turn ' in text:
            turn, items, by_id, ended = turn + 1, {}, {}, False
            continue
        if '"text-done ' in text:
            ended = True
            continue
        calls = tool_calls_of(entry.body, dialect=dialect)
        for call in calls:
            by_id[call.id] = call.arguments["n"]
            items[call.arguments["n"]] = None
        if not calls:
            (call_id,) = (each for each in by_id if f'"{each}"' in text)
            kind = entry.close.error_kind.value if entry.close is not None else "result"
            items[by_id[call_id]] = kind
    return turn, items, ended


class Agent:
    def __init__(self, toolkit, options):
        self.session = options["session"]
        self.dialect = options["dialect"]
        self.effects = options["effects"]
        self.turns = options["turns"]
        self.die_at = options["die_at"]
        self.order = random.Random(options["seed"])
        self.points = 0
        self.run = toolkit.run("acme", f"run-{self.session}")
        self.log = toolkit.sessions.open("acme", self.session, dialect=self.dialect)

    def point(self):
        """A place to die at: here, at the next await, or within a few milliseconds."""
        self.points += 1
        if self.points == self.die_at:
            how = self.order.choice(["now", "soon", "later", "later"])
            if how == "now":
                die()
            elif how == "soon":
                asyncio.get_running_loop().call_soon(die)
            else:
                asyncio.get_running_loop().call_later(self.order.random() * 0.004, die)

    async def goes_on(self):
        self.point()
        while True:
            try:
                await self.log.wake(guarded=guarded())
                break
            except SessionBusy as busy:
                await asyncio.sleep(busy.retry_after)
        self.point()
        while True:
            turn, items, ended = state_of(await self.log.load(), self.dialect)
            await self.log.context()
            self.point()
            if ended and turn + 1 == self.turns:
                return
            if ended:
                await self.say(user(f"turn {turn + 1}"))
                continue
            wanted = [n for n in range(CALLS) if items.get(n, "interrupted_never_started").endswith("never_started")]
            if not wanted:
                await self.say(says(f"text-done {turn}"))
                continue
            calls = [(f"call_{n}", TOOL, {"turn": turn, "n": n}) for n in wanted]
            for message in assistant(self.dialect, *calls):
                await self.log.append(message, run=self.run)
                self.point()
            if self.order.random() < 0.5:
                made = await asyncio.gather(*(self.executes(*call) for call in calls))
                for call, value in zip(calls, made, strict=True):
                    await self.say(result(call[0], value))
            else:
                for call in calls:
                    await self.say(result(call[0], await self.executes(*call)))

    async def say(self, abstract):
        self.point()
        for message in shaped([abstract], self.dialect):
            await self.log.append(message)
        self.point()

    async def executes(self, call_id, tool, args):
        entry = await self.log.entry_of(call_id)
        key = self.run.key(tool, args)

        async def effect():
            token = secrets.token_hex(6)
            self.point()
            await asyncio.sleep(self.order.random() * 0.002)
            write(self.effects, f"{key.kv_key} {entry.seq} {call_id} {token}")
            self.point()
            await asyncio.sleep(self.order.random() * 0.002)
            return token

        self.point()
        value = await self.run.execute(tool, args, effect, entry=entry)
        self.point()
        return value


def write(path, line):
    """One line, in one write."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


async def work(options):
    async with connect(options["url"], namespace=options["namespace"], lease=options["lease"]) as toolkit:
        await Agent(toolkit, options).goes_on()


def worker(options):
    """In a process of its own: its exit status."""
    if os.fork() == 0:
        status = 1
        try:
            signal.alarm(60)
            asyncio.run(work(options))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.wait()
    return os.waitstatus_to_exitcode(status)


def main():
    logging.getLogger("natsreceipts").setLevel(logging.ERROR)  # the lease is short, and meant to be
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        options = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.write(1, f"{options['id']} {worker(options)}\n".encode())
            os._exit(0)


if __name__ == "__main__":
    main()
