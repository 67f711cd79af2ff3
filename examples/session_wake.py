"""An agent whose workers are killed (kill -9) between a tool's call and its result, and whose session goes on.

    python examples/session_wake.py
    python examples/session_wake.py --kill-at charge_card:during --kill-at print_label:after

Each worker wakes the session first. Wake finds the calls that have no result, and looks at their receipts. A result
that is on record is put in. A call that nobody has claimed is proved to have never started. Where an effect may have
happened or not, the model is told just that, until a person has settled it.

The model is a script, so that nothing leaves this machine. The tools have real effects: they write lines into a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import natsreceipts

LEASE = 2.0  # seconds of silence after which a worker may be judged dead: short, since somebody is watching
TASK = "Charge order 42, set it to paid, print its label, and tell ann@example.com."
PLAN: list[list[tuple[str, dict[str, str]]]] = [  # what the model calls, line by line
    [("read_order", {"order": "42"}), ("charge_card", {"order": "42", "amount": "20.00"})],
    [("set_status", {"order": "42", "status": "paid"}), ("print_label", {"order": "42"})],
    [("send_email", {"to": "ann@example.com", "text": "Order 42 is on its way."})],
]
MAY_REPEAT = ("never started", "nothing was changed", "you may issue it again", "safe to issue again")
POINTS = [f"{tool}:{point}" for line in PLAN for tool, _ in line for point in ("before", "during", "after")]
KILLS = ["charge_card:after", "set_status:before", "print_label:during", "send_email:during"]
NAME, FOLDER = os.environ.get("WORKER", ""), Path(os.environ.get("FOLDER", ""))
STARTED = float(os.environ.get("STARTED") or time.time())

# The tools, at least one of each kind


@natsreceipts.tool(effect="read")
def read_order(order: str) -> str:
    may_be_killed("read_order:during")
    return f"order {order} costs 20.00"


@natsreceipts.tool  # opaque: never done again where it may have been done
def charge_card(order: str, amount: str) -> str:
    return have_effect("charge_card", f"{amount} charged for order {order}")


@natsreceipts.tool(effect="idempotent")
def set_status(order: str, status: str) -> str:
    return have_effect("set_status", f"order {order} is {status}")


@natsreceipts.tool(effect="resumable")
async def print_label(order: str, call: natsreceipts.Call) -> str:
    label = await call.step("label", lambda: have_effect("label", f"label of order {order}"))
    may_be_killed("print_label:during")
    await call.step("pickup", lambda: have_effect("pickup", f"pickup of order {order}"))
    return label


@natsreceipts.tool
def send_email(to: str, text: str) -> str:
    return have_effect("send_email", f"mail to {to}: {text}")


TOOLS = {each.name: each for each in (read_order, charge_card, set_status, print_label, send_email)}


def have_effect(tool: str, effect: str) -> str:
    with (FOLDER / "effects").open("a") as effects:
        effects.write(f"{NAME}\t{tool}\t{effect}\n")
    may_be_killed(f"{tool}:during")  # done, and nobody was told
    return effect


# The agent


async def work() -> None:
    """A worker. In a real one the session's name comes with a message (see email_worker.py)."""
    say(f"starts, pid {os.getpid()}")
    async with natsreceipts.connect(os.environ["NATS_URL"], worker=NAME) as toolkit:
        session = toolkit.sessions.open("acme", FOLDER.name)
        await wake(session)
        async with toolkit.run("acme", FOLDER.name, lease=LEASE):
            while True:
                message = model((await session.context()).messages)
                await session.append(message)
                say(f"the model {summary(message)}")
                for call in session.calls_in(message):
                    may_be_killed(f"{call.name}:before")
                    value = await TOOLS[call.name](**(call.arguments or {}))
                    say(f"{call.name}: {value}")
                    may_be_killed(f"{call.name}:after")
                    await session.append_result(call.id, value)
                if not session.calls_in(message):
                    return


async def wake(session: natsreceipts.SessionLog) -> None:
    """Close what the last worker left open."""
    while True:
        try:
            report = await session.wake(guarded=TOOLS)
            break
        except natsreceipts.SessionBusy as busy:  # the lease of a worker is not over: it may be alive, for all we know
            say(f"wake: {', '.join(busy.calls)} may be running, look again in {busy.retry_after:.1f} s")
            await asyncio.sleep(busy.retry_after)
    for call in report.recovered:
        say(f"wake: {call.tool_name}: its receipt is {call.said}; {call.why}. The model reads: {call.text}")
    if not report.recovered:
        say("wake: no call is without a result")


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stands for a chat API: it knows what it reads, and issues a call again where it reads that it may."""
    results = {each["toolName"]: each["content"][0]["text"] for each in messages if each["role"] == "toolResult"}
    number = sum(len(natsreceipts.tool_calls_of(each)) for each in messages)
    for line in PLAN:
        wanted = [(t, a) for t, a in line if t not in results or any(words in results[t] for words in MAY_REPEAT)]
        if wanted:
            calls = [
                {"type": "toolCall", "id": f"call_{n}", "name": t, "arguments": a}
                for n, (t, a) in enumerate(wanted, number)
            ]
            return {"role": "assistant", "content": calls}
    unknown = [tool for tool, text in results.items() if "outcome is unknown" in text]
    text = f"All is done, except that I cannot know about {', '.join(unknown)}." if unknown else "All is done."
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def summary(message: dict[str, Any]) -> str:
    if calls := natsreceipts.tool_calls_of(message):
        return f"calls {', '.join(call.name for call in calls)}"
    text = message["content"] if message["role"] == "user" else message["content"][0]["text"]
    return f"says: {text}" if message["role"] != "toolResult" else f"{message['toolName']}: {text}"


def may_be_killed(point: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / point).unlink()
        say(f"kill -9 at {point}")
        os.kill(os.getpid(), signal.SIGKILL)


def say(what: str, who: str = NAME) -> None:
    line = f"{time.time() - STARTED:5.1f} s  {who:8}  {what}"
    print(textwrap.fill(line, 118, subsequent_indent=" " * 21), flush=True)


# The show


async def show(kills: list[str]) -> bool:
    """Whether the agent came to its end, and nothing was done twice."""
    async with contextlib.AsyncExitStack() as stack:
        url = os.environ.get("NATS_URL") or (await stack.enter_async_context(natsreceipts.embedded())).url
        toolkit = await stack.enter_async_context(natsreceipts.connect(url, provision=True))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="order-42-")))
        os.environ.update(NATS_URL=url, FOLDER=str(folder), STARTED=str(STARTED))
        for point in kills:
            (folder / point).touch()
        session = toolkit.sessions.open("acme", folder.name)
        await ask(session, TASK)
        number = await workers(1)
        effects = [line.split("\t") for line in (folder / "effects").read_text().splitlines()]
        async for receipt in toolkit.receipts.list(tenant="acme", run=folder.name, status="ambiguous"):
            (done,) = [effect for _, tool, effect in effects if tool == receipt.key.tool]
            say(f"sees in the file what {receipt.key.tool} has done, and settles its receipt", "a person")
            await toolkit.receipts.resolve(
                receipt.key, revision=receipt.revision, completed=done, by="a person", reason="seen in the file"
            )
        await ask(session, "And now?")
        await workers(number + 1)

        print("\nThe session's log")
        entries = (await session.load()).entries
        for entry in entries:
            by = f"[wake, receipt {entry.receipt.status}] " if entry.receipt else "[wake] " if entry.close else ""
            print(f"  {entry.body['role']:10}  {by}{textwrap.shorten(summary(entry.body), 78)}")
        print("\nWhat the model reads by now in place of a close")
        logged = {entry.body["toolCallId"]: summary(entry.body) for entry in entries if entry.close}
        for message in (await session.context()).messages:
            if summary(message) != logged.get(message.get("toolCallId", ""), summary(message)):
                print(f"  {message['role']:10}  {summary(message)}")
        effects = [line.split("\t") for line in (folder / "effects").read_text().splitlines()]
    print("\nWhat the tools did")
    for by, tool, effect in effects:
        print(f"  {by:10}  {tool}: {effect}")
    done = [effect for _, tool, effect in effects if tool != "set_status"]  # which may be done twice
    twice = {effect for effect in done if done.count(effect) > 1}
    print(f"\n{len(kills)} workers killed. Done twice: {'; '.join(sorted(twice)) or 'nothing'}.")
    return not twice


async def ask(session: natsreceipts.SessionLog, text: str) -> None:
    say(text, "the user")
    await session.load()  # the workers have written to it
    await session.append({"role": "user", "content": text})


async def workers(number: int) -> int:
    """One worker after the other, each in a process of its own, until one comes to the end. Returns its number."""
    while True:
        command, environment = [sys.executable, __file__, "--worker"], {**os.environ, "WORKER": f"worker {number}"}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True) as worker:
            code = await asyncio.to_thread(worker.wait)
        if code != -signal.SIGKILL:
            assert code == 0, f"worker {number} has failed"
            return number
        number += 1


def end_with_the_show() -> None:
    os.read(0, 1)  # standard input ends when the show is gone, however it went
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        threading.Thread(target=end_with_the_show, daemon=True).start()
        try:
            sys.exit(asyncio.run(work()))
        except natsreceipts.Unreachable:  # the show is gone, and its server with it
            sys.exit(1)
    parser = argparse.ArgumentParser(description="A session that goes on after its workers were killed.")
    how = f"kill a worker before, during or after a call (default: {', '.join(KILLS)}); may be repeated"
    parser.add_argument("--kill-at", action="append", choices=POINTS, metavar="TOOL:POINT", help=how)
    try:
        sys.exit(0 if asyncio.run(show(parser.parse_args().kill_at or KILLS)) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
