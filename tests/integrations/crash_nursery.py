"""Workers of one framework that are killed: a process that has imported it once forks them.

Run as a program with the name of a module, for each JSON line on its input it forks a process that awaits the module's
``work(options)``, and prints ``ID STATUS`` when that has ended.

A worker makes one call of ``send`` in one turn. Where it dies, how often the effect has then happened once the turn was
started again, and what the model may be left with, is the same in all frameworks:
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

LEASE = 1.0

POINTS = {
    "before the claim": (1, {"sent"}),
    "before the effect": (0, {"unknown"}),
    "in the effect": (1, {"unknown"}),
    "in the settle": (1, {"sent", "unknown"}),
    "after the settle": (1, {"sent"}),
    "at the end": (1, {"sent"}),
}


class Here:
    """The places of a worker at which it may die, and the effect that it has."""

    def __init__(self, options):
        self.die_at = options["die_at"]
        self.folder = Path(options["folder"])

    def point(self, name):
        if name == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def send(self, to):
        """The body of the tool: one line in a file."""
        self.point("before the effect")
        write(self.folder / "effects", to)
        self.point("in the effect")
        await asyncio.sleep(0)
        if self.die_at == "in the settle":
            asyncio.get_running_loop().call_soon(self.point, self.die_at)
        return "m-1"

    def told(self, text):
        """What the model is left with."""
        word = "sent" if "m-1" in text else "unknown" if "unknown" in text or "cannot tell" in text else text
        write(self.folder / "told", word)
        self.point("at the end")


def write(path, line):
    """One line, in one write."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


class Nursery:
    """Forks workers of one module, and tells how each of them ended."""

    def __init__(self, process):
        self._process = process
        self._ids = itertools.count()
        self._ends = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, module):
        paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": ":".join(paths)},
        )
        nursery = cls(process)
        try:
            yield nursery
        finally:
            process.stdin.close()
            await nursery._reader
            await process.wait()

    async def _read(self):
        while line := await self._process.stdout.readline():
            number, status = line.split()
            self._ends.pop(int(number)).set_result(int(status))
        for end in self._ends.values():
            if not end.done():
                end.set_exception(RuntimeError("the nursery has ended: see what it said"))

    async def works(self, **options):
        """Let a worker run to its end or its death: its exit status."""
        number = next(self._ids)
        end = self._ends[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps(options | {"id": number}).encode() + b"\n")
        return await end

    async def trial(self, point, folder, **options):
        """Kill a worker at a point, let another one start the turn again, and check what came of it."""
        folder.mkdir(parents=True)
        options |= {"folder": str(folder), "run": folder.name.replace(" ", "-")}
        assert await self.works(**options, die_at=point) == -signal.SIGKILL, point
        assert await self.works(**options, die_at="") == 0, point
        effects, told = POINTS[point]
        assert len(lines(folder / "effects")) == effects, point
        assert lines(folder / "told")[-1] in told, (point, lines(folder / "told"))


def _child(module, options):
    """In a process of its own: the exit status of another one."""
    if os.fork() == 0:
        status = 1
        try:
            signal.alarm(200)
            asyncio.run(module.work(options))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.wait()
    return os.waitstatus_to_exitcode(status)


def main():
    logging.getLogger("natsreceipts").setLevel(logging.ERROR)  # the lease is short, and meant to be
    module = importlib.import_module(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        options = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.write(1, f"{options['id']} {_child(module, options)}\n".encode())
            os._exit(0)


if __name__ == "__main__":
    main()
