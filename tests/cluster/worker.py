"""A worker of the campaign: calls, sessions, notices and settlements, all of them written down.

It may be killed or frozen at any time. On SIGTERM it begins nothing more, ends what it has begun, and goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

from outside import Lines, Outside

from natsreceipts import (
    AlreadyConsumed,
    AmbiguousCall,
    CallInFlight,
    CallWithdrawn,
    Landed,
    NatsReceiptsError,
    NotApplied,
    NotClaimed,
    NotResolvable,
    SessionBusy,
    SessionConflict,
    StaleRevision,
    Unknown,
    Unreachable,
    connect,
    notice_addressee_id,
    run_notice_id,
)

TENANT = "acme"
TOOL = "send"
AGENT = "agent"
KINDS = ("opaque", "idempotent", "opaque", "resumable", "opaque", "idempotent", "opaque", "resumable", "opaque", "read")
CALLS_IN_A_RUN = 100
CALLS_IN_A_TURN = 2

_NOTHING_DONE = (
    AlreadyConsumed,
    AmbiguousCall,
    CallInFlight,
    CallWithdrawn,
    NotClaimed,
    NotResolvable,
    SessionBusy,
    SessionConflict,
    StaleRevision,
)


class Broke(Exception):
    """What an effect raises that is no word about whether it landed."""


class Worker:
    """One process."""

    def __init__(self, toolkit: Any, options: dict[str, Any]) -> None:
        self.toolkit = toolkit
        self.name = options["name"]
        self.lease = options["lease"]
        self.rate = options["rate"]
        self.start = options["start"]
        self.pause = options["pause"]
        self.dice = random.Random(options["seed"])
        folder = Path(options["folder"])
        self.outside = Outside(folder)
        self.record = Lines(folder / f"operations-{self.name}", sync=False)
        self.stopping = asyncio.Event()
        self.count = 0

    # ------------------------------------------------------------------ writing down

    def begin(self, do: str, key: str, **asked: Any) -> str:
        self.count += 1
        op = f"{self.name}:{self.count}"
        line = {"id": op, "worker": self.name, "do": do, "key": key, "began": time.monotonic()}
        self.record.add({**line, "asked": asked})
        return op

    def end(self, op: str, error: BaseException | None = None, **said: Any) -> None:
        outcome = "ok"
        if error is not None:
            done_nothing = isinstance(error, _NOTHING_DONE) or "nothing was appended" in str(error)
            outcome = "failed" if done_nothing else "unknown"
            said["text"] = str(error)[:300]
            for name in ("revision", "by", "attempts"):
                if isinstance(getattr(error, name, None), int | str):
                    said[name] = getattr(error, name)
        name = type(error).__name__ if error is not None else ""
        self.record.add({"id": op, "ended": time.monotonic(), "outcome": outcome, "error": name, "said": said})

    # ------------------------------------------------------------------ calls

    def effect(self, op: str, key: str, kind: str, **place: Any) -> Any:
        """The body of a call: what it does is in the file outside before it says so."""
        luck, length = self.dice.random(), self.dice.random()
        seconds = self.lease * 2 * self.dice.random() if length < 0.04 else 0.02 * length
        token = secrets.token_hex(6)
        large = f".{'x' * 3000}" if self.dice.random() < 0.05 else ""  # which moves to the object store

        def note(phase: str, **more: Any) -> None:
            self.outside.note(op=op, worker=self.name, key=key, effect=kind, phase=phase, **place, **more)

        async def body(call: Any) -> str:
            held = call.revision if kind != "read" else 0
            note("entered", revision=held)
            await asyncio.sleep(seconds / 2)
            if luck < 0.06:
                note("refused", revision=held)
                raise NotApplied("refused")
            if luck < 0.09:
                note("broke", revision=held)
                raise Broke
            if kind == "resumable":
                for name in ("one", "two", "three"):

                    async def step(name: str = name) -> str:
                        note("step", revision=held, step=name)
                        await asyncio.sleep(seconds / 4)
                        return name

                    await call.step(name, step)
            if kind == "opaque" and luck < 0.3:
                await call.renew()
            note("landed", revision=held, token=token)
            await asyncio.sleep(seconds / 2)
            if luck > 0.98:
                note("broke", revision=held)
                raise Broke
            return token + large

        return body

    def which(self) -> int:
        """The number of a call that other workers make about now, or of an old one."""
        begun = int((time.monotonic() - self.start) * self.rate)
        luck = self.dice.random()
        first = 0 if luck < 0.1 else max(0, begun - (2 if luck < 0.6 else 12))
        return self.dice.randint(first, begun)

    async def call(self, run: Any, tool: str, args: Any, kind: str, **options: Any) -> Any:
        """One guarded call; None where it came to no result."""
        key = run.key(tool, args).kv_key
        entry = options.get("entry")
        place = {"session": entry.token, "entry": entry.seq} if entry is not None else {}
        op = self.begin("call", key, effect=kind, **place)
        body = self.effect(op, key, kind, **place)
        wait = self.dice.choice((0.0, 0.5, 3.0))
        verify = self.verifier(key) if self.dice.random() < 0.3 else None
        within = self.dice.random() * 0.3 if self.dice.random() < 0.04 else None
        try:
            async with asyncio.timeout(within):
                if self.dice.random() < 0.5:
                    async with run.call(tool, args, effect=kind, wait=wait, verify=verify, **options) as call:
                        if not call.replayed:
                            call.result = await body(call)
                    self.end(op, result=_token_in(call.result), revision=call.revision, replayed=call.replayed)
                    return call.result
                result = await run.execute(tool, args, body, effect=kind, wait=wait, verify=verify, **options)
                self.end(op, result=_token_in(result))
                return result
        except Exception as error:
            self.end(op, error)
            if isinstance(error, CallInFlight):
                await asyncio.sleep(min(error.retry_after, self.lease))
            return None

    def verifier(self, key: str) -> Any:
        async def verify() -> Any:
            receipt = await self.toolkit.receipts.get(key)
            return self.outside.verdict(key, receipt.worker) if receipt is not None else Unknown()

        return verify

    async def calls(self) -> None:
        while not self.stopping.is_set():
            m = self.which()
            run = self.toolkit.run(TENANT, f"run-{m // CALLS_IN_A_RUN}")
            kind = KINDS[m % len(KINDS)]
            if self.dice.random() < 0.05:
                async with run:
                    await self.call(run, kind, {"n": m}, kind)
            else:
                await self.call(run, kind, {"n": m}, kind)
            await asyncio.sleep(self.pause * self.dice.random())

    # ------------------------------------------------------------------ settling and looking

    async def looks(self) -> None:
        """Read receipts, and settle what is ambiguous as it is outside."""
        while not self.stopping.is_set():
            m = self.which()
            kind = KINDS[m % len(KINDS)]
            key = self.toolkit.run(TENANT, f"run-{m // CALLS_IN_A_RUN}").key(kind, {"n": m}).kv_key
            if kind != "read":
                await self.look(key)
            await asyncio.sleep(self.pause * self.dice.random())

    async def look(self, key: str) -> None:
        op = self.begin("read", key)
        try:
            receipt = await self.toolkit.receipts.get(key)
        except NatsReceiptsError as error:
            self.end(op, error)
            return
        if receipt is None:
            self.end(op, revision=0)
            return
        self.end(op, revision=receipt.revision, status=receipt.status)
        if receipt.status in ("ambiguous", "running"):
            await self.settle(key, receipt)

    async def settle(self, key: str, receipt: Any) -> None:
        verdict = self.outside.verdict(key, receipt.worker)
        if isinstance(verdict, Unknown):
            return
        if receipt.status == "running" and not (isinstance(verdict, Landed) or self.dice.random() < 0.3):
            return
        said = {"completed": verdict.result} if isinstance(verdict, Landed) else {"not_applied": True}
        op = self.begin("resolve", key, revision=receipt.revision, **said)
        sure = self.dice.random() < 0.5
        try:
            settled = await self.toolkit.receipts.resolve(
                key, revision=receipt.revision, **said, by=op, reason="seen outside", even_if_running=sure
            )
        except NatsReceiptsError as error:
            self.end(op, error)
        else:
            self.end(op, revision=settled.revision, status=settled.status)

    # ------------------------------------------------------------------ notices

    async def notifies(self) -> None:
        """File notices that others file too, and consume what is pending, as others do."""
        while not self.stopping.is_set():
            m = self.which() // 8
            run = f"run-{m // CALLS_IN_A_RUN}"
            board = self.toolkit.run(TENANT, run).notices
            stem = f"notice.{board.endpoint}.{run}.{notice_addressee_id(AGENT)}"
            step, request = f"step-{m}", f"request-{m}"
            key = f"{stem}.{run_notice_id(request, AGENT)}"
            fact = {"decision": "approve", "outcome": "approved", "detail": {"n": m}}
            op = self.begin("file", key, step=step)
            try:
                await board.file(step=step, request_id=request, addressee=AGENT, fact=fact)
                self.end(op)
            except NatsReceiptsError as error:
                self.end(op, error)
            with contextlib.suppress(Unreachable):
                pending = await board.pending(addressee=AGENT)
                for notice in pending[:3]:
                    await self.consume(board, f"{stem}.{notice.notice_id}", notice.notice_id)
            await asyncio.sleep(3 * self.pause * self.dice.random())

    async def consume(self, board: Any, key: str, notice_id: str) -> None:
        by = f"turn-{self.name}-{self.count}"
        for _ in range(self.dice.choice((1, 3))):
            op = self.begin("consume", key, by=by)
            try:
                await board.consume(addressee=AGENT, notice_id=notice_id, by=by)
                self.end(op)
                return
            except Unreachable as error:
                self.end(op, error)
            except NatsReceiptsError as error:
                self.end(op, error)
                return

    # ------------------------------------------------------------------ sessions

    async def talks(self) -> None:
        """Be the agent of a session that others want to be the agent of, too."""
        while not self.stopping.is_set():
            name = f"session-{self.which() // 60}-{self.dice.randint(0, 1)}"
            with contextlib.suppress(NatsReceiptsError):
                await self.turn(name)
            await asyncio.sleep(self.pause * self.dice.random())

    async def noted(self, op: str, work: Any, told: Any) -> Any:
        try:
            result = await work
        except BaseException as error:
            self.end(op, error)
            raise
        self.end(op, **told(result))
        return result

    async def turn(self, name: str) -> None:
        """Wake the session, and go on where it stands: some way, or until somebody else writes."""
        log = self.toolkit.sessions.open(TENANT, name, dialect="neutral")
        run = self.toolkit.run(TENANT, f"talk-{name}")
        key = f"{TENANT}.{name}"
        op = self.begin("wake", key)
        guarded = {TOOL: lambda arguments: arguments}
        await self.noted(
            op,
            log.wake(guarded=guarded),
            lambda report: {"entries": [each.entry_id for each in report.recovered if each.entry_id]},
        )
        for _ in range(self.dice.randint(1, 3)):
            turn, items = _state_of(await log.load())
            wanted = [n for n, came in items.items() if came == "never"]
            if not wanted:
                await self.say(log, key, {"role": "user", "content": f"turn {turn + 1}"})
                turn, wanted = turn + 1, list(range(CALLS_IN_A_TURN))
            if self.stopping.is_set() or turn > 8:
                return
            asks = [
                {
                    "type": "toolCall",
                    "id": f"call_{n}",
                    "name": TOOL,
                    "arguments": {"session": name, "turn": turn, "n": n},
                }
                for n in wanted
            ]
            await self.say(log, key, {"role": "assistant", "content": [{"type": "text", "text": "so"}, *asks]}, run)
            for ask in asks:
                await self.carry_out(log, key, run, ask)

    async def carry_out(self, log: Any, key: str, run: Any, ask: dict[str, Any]) -> None:
        entry = await log.entry_of(ask["id"])
        value = await self.call(run, TOOL, ask["arguments"], "opaque", entry=entry)
        if value is None:
            raise NatsReceiptsError("no result: the next wake says why")
        text = {"type": "text", "text": _token_in(value)}
        said = {"role": "toolResult", "toolCallId": ask["id"], "toolName": TOOL, "content": [text], "isError": False}
        await self.say(log, key, said)

    async def say(self, log: Any, key: str, message: dict[str, Any], run: Any = None) -> None:
        op = self.begin("append", key)
        mark = f"by-op {op} "
        if isinstance(message["content"], str):
            message["content"] += f" {mark}"
        elif message["role"] == "assistant":
            message["content"][0]["text"] = mark
        else:
            message["details"] = {"op": mark}
        await self.noted(op, log.append(message, run=run), lambda entry: {"seq": entry.seq, "id": entry.id})


def _token_in(result: str) -> str:
    return result.partition(".")[0]


def _state_of(loaded: Any) -> tuple[int, dict[int, str | None]]:
    """The number of the turn, and what the model was told of each of its calls; None: nothing yet."""
    turn, items, by_id = -1, {}, {}
    for entry in loaded.entries:
        body = entry.body
        if body["role"] == "user" and str(body["content"]).startswith("turn "):
            turn, items, by_id = turn + 1, {}, {}
        elif body["role"] == "assistant":
            for part in body["content"]:
                if part["type"] == "toolCall":
                    by_id[part["id"]] = part["arguments"]["n"]
                    items[part["arguments"]["n"]] = None
        elif body["role"] == "toolResult" and body["toolCallId"] in by_id:
            # (What an earlier turn's call came to after all may stand here, too.)
            never = entry.close is not None and entry.close.error_kind.value.endswith("never_started")
            items[by_id[body["toolCallId"]]] = "never" if never else "result"
    return turn, items


async def main(options: dict[str, Any]) -> None:
    """Until SIGTERM, and to the end of what was begun."""
    while True:
        try:
            await work(options)
            return
        except (Unreachable, NatsReceiptsError) as error:
            print("begins anew:", error, flush=True)
            await asyncio.sleep(0.2)


async def work(options: dict[str, Any]) -> None:
    connection = {"ping_interval": 1, "max_outstanding_pings": 2} if options["brisk"] else {}
    async with connect(
        options["urls"],
        namespace=options["namespace"],
        lease=options["lease"],
        inline_limit=1024,
        worker=options["name"],
        connect_timeout=3.0,
        reconnect_time_wait=0.2,
        **connection,
    ) as toolkit:
        worker = Worker(toolkit, options)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stopping.set)
        print("ready", flush=True)
        async with asyncio.TaskGroup() as group:
            for _ in range(options["callers"]):
                group.create_task(worker.calls())
            if options["all"]:
                for role in (worker.looks, worker.notifies, worker.talks):
                    group.create_task(role())


if __name__ == "__main__":
    logging.getLogger("natsreceipts").setLevel(logging.ERROR)  # the lease is short, and meant to be
    asyncio.run(main(json.loads(sys.argv[1])))
