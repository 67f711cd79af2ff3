"""Runs the command line: in this process where that is enough, as a program of its own where its edges are tested."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import struct
import sys
import termios
from typing import NamedTuple

PROGRAM = (sys.executable, "-m", "natsreceipts")


async def streams_of(nc, namespace):
    """The names of all streams of a namespace, also of ones that it is the beginning of."""
    found, page = [], None
    while page is None or page:  # the server lists 256 at a time
        page = await nc.jetstream().streams_info(offset=len(found))
        found += [info.config.name for info in page]
    return sorted(name for name in found if namespace in name)


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self):
        return self.out.splitlines()

    @property
    def objects(self):
        """The output as one JSON object a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self):
        """The one line on standard error."""
        (line,) = self.err.splitlines()
        assert line.startswith("natsreceipts: ")
        return line.removeprefix("natsreceipts: ")


class Cli:
    """The program with some flags before the verb, in this process."""

    def __init__(self, *flags):
        self.flags = flags

    async def __call__(self, *arguments):
        """Run it to its end."""
        return await asyncio.to_thread(self._run, [*self.flags, *map(str, arguments)])

    def _run(self, arguments):
        from natsreceipts.cli.app import app
        from natsreceipts.cli.edge import run

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(app, arguments)
        return Ended(int(code), out.getvalue(), err.getvalue())


async def program(*arguments, stdin=asyncio.subprocess.DEVNULL, timeout=60.0, command=PROGRAM, **env):
    """Run the program as a process of its own, to its end."""
    process = await started(*arguments, stdin=stdin, command=command, **env)
    async with asyncio.timeout(timeout):
        out, err = await process.communicate()
    return Ended(process.returncode, out.decode(), err.decode())


async def started(*arguments, stdin=asyncio.subprocess.DEVNULL, command=PROGRAM, **env):
    """Start the program as a process of its own, with pipes for its output."""
    return await asyncio.create_subprocess_exec(
        *command,
        *map(str, arguments),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
    )


class Terminal:
    """The program on a terminal of its own, some columns wide."""

    def __init__(self, process, main):
        self.process = process
        self.seen = ""
        self._main = main

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, *arguments, command=PROGRAM, columns=80, rows=24, cwd=None, **env):
        main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {"TERM": "xterm", **{name: os.environ[name] for name in os.environ if name != "TERM"}, **env}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, arguments),
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                env=environment,
                cwd=cwd,
            )
        finally:
            os.close(terminal)
        os.set_blocking(main, False)
        try:
            yield cls(process, main)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            os.close(main)

    async def until(self, text, timeout=30.0):
        """Read what it shows until ``text`` is in it."""
        async with asyncio.timeout(timeout):
            while text not in self.seen:
                assert await self._read(), f"it ended without saying {text!r}: {self.seen}"

    async def end(self, timeout=30.0):
        """Read to the end, and give the exit code."""
        async with asyncio.timeout(timeout):
            while await self._read():
                pass
            return await self.process.wait()

    def type(self, text):
        os.write(self._main, text.encode())

    def interrupt(self):
        """What Ctrl-C does on a terminal that controls the process."""
        self.process.send_signal(signal.SIGINT)

    async def _read(self):
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._main, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._main)
        try:
            data = os.read(self._main, 65536)
        except OSError:  # Linux says so when the other side is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)
