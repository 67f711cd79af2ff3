"""Kill a worker at each of its writes, run it again, and see what has become of its effects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from natsreceipts.embedded import embedded
from natsreceipts.errors import NotProvisioned
from natsreceipts.testing.child import command_for
from natsreceipts.testing.faults import Match, predicate
from natsreceipts.testing.proxy import FaultProxy
from natsreceipts.testing.worker_process import WorkerProcess
from natsreceipts.toolkit import connect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from natsreceipts.receipts import Receipt
    from natsreceipts.testing.frames import Published

__all__ = ["Moment", "Trial", "WorkerFailed", "is_write", "kill_worker"]

Moment: TypeAlias = Literal["before", "after"]

_Hook: TypeAlias = "Callable[[str], Awaitable[object]]"

_ANSWER_SECONDS = 5.0


class WorkerFailed(Exception):
    """The worker did not end well without being killed, so that killing it would show nothing."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Trial:
    """One life of a worker on an empty server: killed at a write, run again to its end."""

    n: int
    """The write that it was killed at, from 1."""
    moment: Moment
    """Whether that write never reached the server, or was stored and its answer never heard."""
    killed_at: Published | None
    """That write; None in the last trial, in which nothing was left to kill it at."""
    folder: Path
    """A folder of this trial's own, for the worker's effects."""
    error: str
    """What the worker ended with when it was run again: empty where it ended well."""
    receipts: tuple[Receipt, ...]
    """All receipts, after that."""
    output: str
    """What the worker printed, in both of its runs."""

    def lines(self, name: str) -> list[str]:
        """The lines of a file in the trial's folder; none where there is no such file."""
        try:
            return (self.folder / name).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []

    def __str__(self) -> str:
        if self.killed_at is None:
            return "not killed"
        status = ""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            status = f" ({json.loads(self.killed_at.payload)['status']})"
        then = f", then {self.error.partition(':')[0]}" if self.error else ""
        return f"killed {self.moment} write {self.n} was stored: {self.killed_at.subject}{status}{then}"

    def __repr__(self) -> str:
        return f"<{self}>"


def is_write(message: Published) -> bool:
    """Whatever a worker publishes, but for requests to JetStream's API and notes that a message is in progress."""
    if message.subject.startswith("$JS.ACK."):
        return message.payload != b"+WPI"
    return not message.subject.startswith("$JS.API.")


async def kill_worker(
    worker: Sequence[str | Path] | Callable[..., object],
    *args: object,
    folder: Path,
    writes: Match = is_write,
    moments: Sequence[Moment] = ("before", "after"),
    setup: _Hook | None = None,
    until: _Hook | None = None,
    env: Mapping[str, str] | None = None,
    namespace: str = "",
    timeout: float = 60.0,
    most: int = 50,
) -> list[Trial]:
    """Kill a worker at its first write, run it again to its end; then at its second, and so on, to its last one.

    Each write is tried twice: the worker dies before the server has it, and after the server has stored it. Each
    trial has an empty nats-server of its own, and the last one is the worker's life without being killed. A guarded
    effect is then found at most once in every trial; one that is not guarded, twice where the worker died between
    the effect and the note of it.

    ``worker`` is a function at the top level of its module (async, as a rule), called in a process of its own as
    ``worker(url, folder, *args)``: where NATS is, and the trial's folder for its effects. One that ends with
    CallInFlight or SessionBusy is run again when that says; give calls a short lease (``connect(url, lease=1)``).
    Or ``worker`` is a command, in which ``{url}`` and ``{folder}`` are filled in, with the variable ``NATS_URL``.

    ``folder`` is where the trials' folders are made (the fixture gives one). ``writes`` says which publishes count.
    ``setup(url)`` prepares each trial's server, with a stream and a job in it for example. A worker that goes on
    for ever is ended when ``until(url)`` returns. ``env`` adds to the environment, ``namespace`` is the worker's,
    for `Trial.receipts`. ``timeout`` bounds each run in seconds, ``most`` the number of writes.

    Raises WorkerFailed where the worker, unkilled, makes no write at all or ends with an error, and where it makes
    more than ``most`` writes; TimeoutError for a run that does not end; TypeError for a worker that cannot be run.
    """
    if isinstance(worker, str | bytes):
        raise TypeError(f"worker={worker!r}: use a list of the command's words, or a function")
    if not callable(worker) and args:
        raise TypeError("a command takes no further arguments: put them among its words")
    bench = _Bench(
        worker=worker,
        args=args,
        folder=_made_in(folder),
        writes=predicate(writes),
        setup=setup,
        until=until,
        env={**os.environ, **(env or {})},
        namespace=namespace,
        timeout=timeout,
    )
    trials: list[Trial] = []
    for n in range(1, most + 1):
        for moment in moments:
            trials.append(await bench.trial(n, moment))
            if trials[-1].killed_at is None:
                if n == 1:
                    raise WorkerFailed(
                        "the worker made no write that could be seen, so there was nothing to kill it at: does it "
                        "connect to the URL that it is given, and note what it has done?"
                    )
                return trials
    raise WorkerFailed(f"the worker made more than {most} writes: raise most=, or count fewer with writes=")


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What is the same in all trials."""

    worker: Sequence[str | Path] | Callable[..., object]
    args: tuple[object, ...]
    folder: Path
    writes: Callable[[Published], bool]
    setup: _Hook | None
    until: _Hook | None
    env: dict[str, str]
    namespace: str
    timeout: float

    async def trial(self, n: int, moment: Moment) -> Trial:
        """One life of the worker."""
        folder = self.folder / f"{n}-{moment}"
        folder.mkdir()
        log, report = self.folder / f"{folder.name}.log", self.folder / f"{folder.name}.json"
        async with embedded() as server, FaultProxy("127.0.0.1", server.port) as proxy:
            if self.setup is not None:
                await self.setup(server.url)
            until = None if self.until is None else _later(self.until, server.url)
            process = WorkerProcess(
                self._command(proxy.url, folder, report), env={**self.env, "NATS_URL": proxy.url}, log=log
            )
            trap = _Trap(proxy, process, self.writes, n, moment)
            async with process:
                status = await self._ended(process, until, log)
            await trap.shut()
            error = ""
            if trap.killed_at is None:
                if status:
                    raise WorkerFailed(f"the worker ended with status {status} without being killed; {_said(log)}")
            else:
                error = await self._again(proxy.url, folder, report, log, until)
            return Trial(
                n=n,
                moment=moment,
                killed_at=trap.killed_at,
                folder=folder,
                error=error,
                receipts=await self._receipts(server.url),
                output=log.read_text(encoding="utf-8", errors="replace"),
            )

    def _command(self, url: str, folder: Path, report: Path) -> list[str]:
        if callable(self.worker):
            task = self.folder / f"{folder.name}.task"
            return command_for(self.worker, (url, folder, *self.args), task, report)
        return [str(word).replace("{url}", url).replace("{folder}", str(folder)) for word in self.worker]

    async def _ended(
        self, process: WorkerProcess, until: Callable[[], Awaitable[object]] | None, log: Path
    ) -> int | None:
        try:
            return await process.end(until=until, timeout=self.timeout)
        except TimeoutError:
            raise TimeoutError(f"the worker did not end within {self.timeout:g} s; {_said(log)}") from None

    async def _again(
        self, url: str, folder: Path, report: Path, log: Path, until: Callable[[], Awaitable[object]] | None
    ) -> str:
        """Run the worker to its end, and return the error that it ended with."""
        deadline = asyncio.get_running_loop().time() + self.timeout
        while True:
            process = WorkerProcess(self._command(url, folder, report), env={**self.env, "NATS_URL": url}, log=log)
            async with process:
                status = await self._ended(process, until, log)
            told = _told(report)
            wait = told.get("retry_after")
            if wait is None or asyncio.get_running_loop().time() + float(wait) > deadline:
                return str(told.get("error") or (f"exit status {status}" if status else ""))
            await asyncio.sleep(float(wait))  # another attempt holds the call: the one that was killed

    async def _receipts(self, url: str) -> tuple[Receipt, ...]:
        try:
            async with connect(url, namespace=self.namespace) as toolkit:
                return tuple([receipt async for receipt in toolkit.receipts.list()])
        except NotProvisioned:  # a worker that keeps none
            return ()


class _Trap:
    """Kills the worker at its n-th write, and lets nothing of it through from there on."""

    def __init__(
        self, proxy: FaultProxy, process: WorkerProcess, writes: Callable[[Published], bool], n: int, moment: Moment
    ) -> None:
        self.killed_at: Published | None = None
        self._process = process
        self._writes = writes
        self._left = n
        self._moment = moment
        self._proxy = proxy
        self._error: Exception | None = None
        self._dropped = proxy.drop(self._falls, count=None)
        self._unheard = proxy.drop_answer(lambda message: message is self.killed_at)

    def _falls(self, message: Published) -> bool:
        """Whether this publish never reaches the server."""
        if self.killed_at is not None:
            return True
        try:
            if not self._writes(message):
                return False
        except Exception as error:  # noqa: BLE001 - the caller's function: raised once the worker has ended
            self._error = self._error or error
            self._process.kill()
            return True
        self._left -= 1
        if self._left:
            return False
        self.killed_at = message
        self._process.kill()
        return self._moment == "before"

    async def shut(self) -> None:
        """Wait until all that the dead worker sent is where it belongs, and let the next one through."""
        if self._error is not None:
            raise self._error
        if self._unheard.hits:
            with contextlib.suppress(TimeoutError):  # a plain message, which nobody answers
                await self._unheard.answered(timeout=_ANSWER_SECONDS)
        await self._proxy.disconnected()
        self._dropped.cancel()
        self._unheard.cancel()


def _later(hook: _Hook, url: str) -> Callable[[], Awaitable[object]]:
    return lambda: hook(url)


def _made_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="trials-", dir=folder))


def _told(report: Path) -> dict[str, Any]:
    """What a function's process left word of: how it ended by an error."""
    try:
        return json.loads(report.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    finally:
        report.unlink(missing_ok=True)


def _said(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return "it said:\n" + "\n".join(lines) if lines else "it said nothing"
