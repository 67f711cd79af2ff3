"""The demo itself: jobs, workers, four kinds of moments to kill one in, and what became of the mails.

Nothing here waits for a fixed time. A worker is killed from within the thing that it is waiting for: the inbox,
which then never answers, or a proxy between it and NATS, which then never forwards what it had just sent. So each
kill hits exactly between two steps, on machines of any speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import nats
from nats.js.api import ConsumerConfig
from rich.table import Table
from rich.text import Text

from natsreceipts.demo.email_worker import send_email
from natsreceipts.demo.inbox import Inbox
from natsreceipts.embedded import embedded
from natsreceipts.testing import FaultProxy
from natsreceipts.toolkit import connect

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from rich.console import Console

    from natsreceipts.embedded import EmbeddedServer
    from natsreceipts.receipt import Receipt
    from natsreceipts.testing import Published
    from natsreceipts.toolkit import Toolkit

__all__ = ["run"]

_JOBS = 12
_LEASE = 3.0
_ACK_WAIT = 2.5
_MAIL_SECONDS = 0.4
"""What a mail takes, so that a person can follow."""
_OVERALL = 110.0
"""Seconds after which the demo gives up, on a machine that is far too slow."""

_BEFORE, _BETWEEN, _SETTLED = "before the mail", "after the mail", "before the ack"
_KILLS = {2: _BEFORE, 4: _SETTLED, 6: _BETWEEN, 9: _SETTLED, 11: _BEFORE}
"""Which job's worker is killed, and when."""

_DELIVERY = re.compile(r"(order-\d+): delivery (\d+)$")
_DONE = re.compile(r"(order-\d+): done")


@dataclass
class _Job:
    number: int
    kill: str = ""
    killed: list[str] = field(default_factory=list[str])
    deliveries: int = 0
    mails: int = 0
    mails_before: int = 0
    replayed: bool = False
    done: bool = False
    ambiguous: bool = False
    reads: int = 0
    receipt: Receipt | None = None
    kv_key: str = ""

    @property
    def name(self) -> str:
        return f"order-{self.number}"

    @property
    def address(self) -> str:
        return f"customer{self.number}@example.com"

    @property
    def message(self) -> dict[str, Any]:
        mail = {"to": self.address, "subject": f"Order {self.number}", "text": "It is on its way."}
        return {"tenant": "acme", "run": self.name, "mail": mail}

    @property
    def status(self) -> str:
        if self.receipt is None:
            return "none"
        return f"{self.receipt.status}, replayed" if self.replayed else self.receipt.status


class _Worker:
    """A worker process, and whether it was killed."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        self.killed = ""
        self.job: _Job | None = None
        self.said: list[str] = []

    def kill(self, job: _Job, when: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.killed, self.job = when, job
        job.killed.append(when)

    async def stop(self) -> None:
        if not self.killed and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()


class _FailedError(Exception):
    """The demo could not be carried out."""


async def run(console: Console, *, guarded: bool, keep: bool) -> int:
    """Run the demo and return its exit code: 0 where what it promises held."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        with contextlib.suppress(NotImplementedError, ValueError):  # Windows has no signal handlers
            loop.add_signal_handler(signal.SIGTERM, task.cancel)
    async with embedded() as server, connect(server.url, provision=True) as toolkit:
        async with await nats.connect(server.url) as client:  # pyright: ignore[reportUnknownMemberType]
            show = _Show(console, server, toolkit, client, guarded=guarded)
            try:
                async with asyncio.timeout(_OVERALL):
                    await show.play()
            except (TimeoutError, _FailedError) as error:
                console.print(f"The demo came to no end: {error or f'{_OVERALL:g} s are over'}", style="bold red")
                console.print(show.table())
                return 1
            kept = show.conclude(keep=keep)
        if keep:
            console.print(f"\nThe server goes on at {server.url} (pid {server.pid}). Ctrl-C here stops it.")
            with contextlib.suppress(asyncio.CancelledError):
                await loop.create_future()
    return 0 if kept else 1


class _Show:
    def __init__(
        self, console: Console, server: EmbeddedServer, toolkit: Toolkit, client: Client, *, guarded: bool
    ) -> None:
        self._console = console
        self._server = server
        self._toolkit = toolkit
        self._client = client
        self._js = client.jetstream()  # pyright: ignore[reportUnknownMemberType]
        self._guarded = guarded
        self._jobs = [_Job(n, kill=_KILLS.get(n, "")) for n in range(1, _JOBS + 1)]
        self._by_name = {job.name: job for job in self._jobs}
        self._by_address = {job.address: job for job in self._jobs}
        for job in self._jobs:
            key = toolkit.run("acme", job.name).key("send_email", send_email.arguments(**job.message["mail"]))
            job.kv_key = key.kv_key
        self._by_kv_key = {job.kv_key: job for job in self._jobs}
        self._worker: _Worker | None = None
        self._started = time.monotonic()
        self._kills = 0

    # ------------------------------------------------------------------ what happens

    async def play(self) -> None:
        """From the first job to the last receipt."""
        inbox = Inbox(coming=self._mail_coming, arrived=self._mail_arrived, seconds=_MAIL_SECONDS)
        async with FaultProxy("127.0.0.1", self._server.port) as proxy, inbox:
            proxy.drop(self._never_forwarded, count=None)
            await self._queue_jobs()
            how = "under receipts" if self._guarded else "without receipts"
            self._console.print(
                f"{_JOBS} jobs in a JetStream work queue, each to send one mail, {how}. "
                f"Workers are killed in the middle of it (kill -9); a new one takes over.\n"
            )
            self._say("", f"nats-server on {self._server.url}, inbox on port {inbox.port}")
            env = {**os.environ, "NATS_URL": proxy.url, "SMTP_HOST": "127.0.0.1", "SMTP_PORT": str(inbox.port)}
            number = 0
            while not await self._all_settled():
                number += 1
                await self._one_worker(number, {**env, "LEASE": str(_LEASE)})
                await proxy.cut()  # nothing that a dead worker had sent is forwarded now
        for job in self._jobs:
            job.receipt = await self._toolkit.receipts.get(job.kv_key)

    async def _queue_jobs(self) -> None:
        await self._js.add_stream(  # pyright: ignore[reportUnknownMemberType]
            name="ORDERS", subjects=["orders.*"], retention="workqueue"
        )
        config = ConsumerConfig(durable_name="email-worker", filter_subject="orders.*", ack_wait=_ACK_WAIT)
        await self._js.add_consumer("ORDERS", config)  # pyright: ignore[reportUnknownMemberType]
        await self._client.subscribe("$KV.receipts.>", cb=self._receipt_written)  # pyright: ignore[reportUnknownMemberType]
        for job in self._jobs:
            await self._js.publish("orders.acme", json.dumps(job.message).encode())

    async def _one_worker(self, number: int, env: dict[str, str]) -> None:
        """Let a worker run until it is killed or all is settled."""
        command = [sys.executable, "-P", "-m", "natsreceipts.demo.worker"]
        if not self._guarded:
            command.append("without-receipts")
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        worker = self._worker = _Worker(number, process)
        self._say("", f"worker {number} starts (pid {process.pid})")
        reading = asyncio.get_running_loop().create_task(self._listen(worker))
        try:
            while not reading.done() and not await self._all_settled():
                await asyncio.wait([reading], timeout=0.1)
        finally:
            await worker.stop()
            await asyncio.wait([reading])
        if worker.killed and worker.job is not None:
            self._kills += 1
            worker.job.done = False
            self._say(worker.job.name, f"kill -9 worker {number}: {worker.killed}", "red")
        elif not await self._all_settled():
            raise _FailedError(f"worker {number} ended by itself: {' | '.join(worker.said[-5:])}")

    async def _listen(self, worker: _Worker) -> None:
        """Take in what a worker logs, to its end."""
        assert worker.process.stdout is not None
        async for raw in worker.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            worker.said.append(line)
            if match := _DELIVERY.match(line):
                job = self._by_name[match[1]]
                job.deliveries, job.mails_before = int(match[2]), job.mails
                if job.deliveries > 1:
                    self._say(job.name, f"delivered again (delivery {job.deliveries})")
            elif match := _DONE.match(line):
                job = self._by_name[match[1]]
                job.done = True
                if self._guarded and job.mails == job.mails_before:
                    job.replayed = True
                    self._say(job.name, "replayed from its receipt, no mail sent", "cyan")

    async def _all_settled(self) -> bool:
        """Whether each job is acknowledged or ambiguous."""
        if not all(job.done or job.ambiguous for job in self._jobs):
            return False
        state = (await self._js.stream_info("ORDERS")).state
        return state.messages == sum(job.ambiguous for job in self._jobs)

    # ------------------------------------------------------------------ what a worker is killed by

    def _kill(self, job: _Job, when: str) -> bool:
        if self._worker is None or self._worker.killed:
            return False
        self._worker.kill(job, when)
        return True

    def _mail_coming(self, address: str) -> bool:
        job = self._by_address[address]
        if self._guarded:
            return False
        if job.kill == _BEFORE and not job.killed:
            return self._kill(job, "before the mail was sent")
        if job.kill == _BETWEEN and len(job.killed) == 1:
            return self._kill(job, "before it sent the mail again")
        return False

    def _mail_arrived(self, address: str) -> bool:
        job = self._by_address[address]
        job.mails += 1
        again = "" if job.mails == 1 else f", for the {_ordinal(job.mails)} time"
        self._say(job.name, f"mail arrived{again}", "bold magenta" if again else "green")
        if job.kill == _BETWEEN and not job.killed:
            return self._kill(job, f"mail sent, {'not yet on record' if self._guarded else 'answer not heard'}")
        return False

    def _never_forwarded(self, message: Published) -> bool:
        """Look at what a worker sends to NATS. True: it was killed, and this never gets there."""
        worker, subject = self._worker, message.subject
        if worker is None:
            return False
        if worker.killed:
            return True
        if subject.startswith("$JS.ACK."):
            job = self._jobs[_sequence(subject) - 1]
            if job.kill == _SETTLED and not job.killed and message.payload in (b"", b"+ACK"):
                return self._kill(job, f"mail sent{' and on record' if self._guarded else ''}, not yet acked")
        elif subject.startswith("$KV.receipts."):
            job = self._by_kv_key[subject.removeprefix("$KV.receipts.")]
            if job.kill == _BEFORE and not job.killed:
                return self._kill(job, "before the mail was sent")
        elif subject.startswith("$JS.API.") and self._guarded:
            return self._reads(subject + message.payload.decode(errors="replace"))
        return False

    def _reads(self, request: str) -> bool:
        """A worker that waits for a dead one's lease reads the receipt again and again: kill one of them there."""
        for job in self._jobs:
            if job.kill == _BETWEEN and len(job.killed) == 1 and job.kv_key in request:
                job.reads += 1
                return job.reads == 2 and self._kill(job, "while waiting for the dead worker's lease")
        return False

    async def _receipt_written(self, msg: Msg) -> None:
        job = self._by_kv_key[msg.subject.removeprefix("$KV.receipts.")]
        if json.loads(msg.data)["status"] == "ambiguous" and not job.ambiguous:
            job.ambiguous = True
            self._say(job.name, "ambiguous: sent or not? Unknown, so not sent again", "bold yellow")

    # ------------------------------------------------------------------ what is shown

    def _say(self, name: str, what: str, style: str = "") -> None:
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_column(width=6, justify="right", style="dim")
        row.add_column(width=8)
        row.add_column(overflow="fold")
        row.add_row(f"{time.monotonic() - self._started:.1f} s", name, Text(what, style=style))
        self._console.print(row)

    def table(self) -> Table:
        """Per job: how it was delivered and attempted, what arrived, what the receipt says."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("job", no_wrap=True)
        table.add_column("deliveries", justify="right")
        if self._guarded:
            table.add_column("attempts", justify="right")
        table.add_column("mails", justify="right")
        table.add_column("receipt" if self._guarded else "", overflow="fold")
        for job in self._jobs:
            cells: list[Text | str] = [job.name, str(job.deliveries)]
            if self._guarded:
                cells.append(str(job.receipt.attempts) if job.receipt else "-")
                style = "bold yellow" if job.ambiguous else "cyan" if job.replayed else "green"
                cells += [str(job.mails), Text(job.status, style=style)]
            else:
                twice = job.mails > 1
                cells += [
                    Text(str(job.mails), style="bold magenta" if twice else ""),
                    Text("sent more than once" if twice else "", style="bold magenta"),
                ]
            table.add_row(*cells)
        return table

    def conclude(self, *, keep: bool) -> bool:
        """Show the table and the totals, and return whether what the demo promises held."""
        console, jobs = self._console, self._jobs
        console.print()
        console.print(self.table())
        console.print()
        twice = [job for job in jobs if job.mails > 1]
        mails = sum(job.mails for job in jobs)
        text = f"{len(jobs)} jobs, {self._kills} workers killed, {mails} mails. Sent twice: {_names(twice) or 'none'}."
        if not self._guarded:
            console.print(f"{text}\n\nThe same jobs and kills under receipts: natsreceipts demo")
            return bool(twice) and all(job.mails and job.done for job in jobs)
        completed = [job for job in jobs if job.status.startswith("completed")]
        ambiguous = [job for job in jobs if job.status == "ambiguous"]
        replayed = [job for job in completed if job.replayed]
        console.print(f"{text} Completed: {len(completed)} ({len(replayed)} replayed). Ambiguous: {_names(ambiguous)}.")
        for job in ambiguous:
            self._look_at(job, keep=keep)
        console.print("\nThe same jobs and kills without receipts: natsreceipts demo --without-receipts")
        return (
            not twice
            and len(completed) + len(ambiguous) == len(jobs)
            and all(job.mails == 1 for job in completed)
            and [job.kill for job in ambiguous] == [_BETWEEN]
            and all(job.replayed for job in jobs if job.kill == _SETTLED)
        )

    def _look_at(self, job: _Job, *, keep: bool) -> None:
        """Say why a job is ambiguous, and how to see for oneself."""
        there = f"This inbox knows: {'it did' if job.mails else 'it did not'}." if job.mails < 2 else ""
        self._console.print(
            f"\n{job.name}: a worker died in the middle of this call. Whether the mail went out cannot be read off "
            f"anything in NATS, so it was not sent again; a person has to look. {there}"
        )
        where = "Look at its receipt" if keep else "To look at its receipt, run this with --keep, and then"
        self._console.print(
            f"{where} (the first says how to settle it, too; the nats CLI is at github.com/nats-io/natscli):\n"
        )
        for command in (
            f"natsreceipts receipts show {job.kv_key}",
            f"nats kv history receipts {job.kv_key}",
            f"nats kv get receipts {job.kv_key} --raw",
        ):
            self._console.print(f"{command} --server {self._server.url}", soft_wrap=True, style="bold")


def _names(jobs: list[_Job]) -> str:
    return ", ".join(job.name for job in jobs)


def _sequence(ack_subject: str) -> int:
    """The stream sequence in the reply subject of a delivery: $JS.ACK.stream.consumer.delivered.sequence...."""
    tokens = ack_subject.split(".")
    return int(tokens[5] if len(tokens) == 9 else tokens[7])


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")
