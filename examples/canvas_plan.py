"""A plan of 20 operations on a canvas, carried out by workers that are killed on the way (kill -9).

    python examples/canvas_plan.py
    python examples/canvas_plan.py --kill-at 1:before --kill-at 12:after --kill-at 12:after

The canvas is an HTTP service in a process of its own. It appends a shape whenever it is asked to. The plan is one
guarded call with effect="resumable", and each operation in it a `call.step`, whose output is in the receipt before
the next one begins. When a worker dies, the next one takes the plan up and skips the steps that are on record.

What this does not do: a step is recorded after it was done, and a worker can die in between. Such a step WILL be
executed again, since nothing in NATS tells it from one that was never done. "resumable" is your word that this is
harmless. Here it is, because each step hands the canvas a key that is the same in every attempt
(`call.idempotency_key` and the step's name), and the canvas answers a key that it knows with its first answer. For
a service that cannot recognise a repeat, leave the tool "opaque": then a person looks, and nothing is done twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import http.server
import json
import os
import secrets
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import natsreceipts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

LEASE = 1.5  # seconds of silence after which the next worker takes over: short, since somebody is watching
PLAN = [{"shape": ("circle", "square", "star")[n % 3], "x": 7 * n, "y": n * n} for n in range(1, 21)]
POINTS = [f"{n}:{point}" for n in range(1, len(PLAN) + 1) for point in ("before", "during", "after")]
KILLS = ["3:before", "9:during", "17:after"]  # between two steps; in the request; done, and not yet on record
NAME = os.environ.get("WORKER", "")
STARTED = float(os.environ.get("STARTED") or time.time())

# The tool


async def carry_out(call: natsreceipts.Call) -> list[str]:
    """The body of the guarded call. Its result: the ids of the new shapes."""
    say(f"has the plan, attempt {call.attempt}")
    return [await operation(call, number) for number in range(1, len(PLAN) + 1)]


async def operation(call: natsreceipts.Call, number: int) -> str:
    """One step: what the canvas answers or, where an earlier attempt recorded this step, what it answered then."""
    may_be_killed(f"{number}:before")
    name = f"op-{number}"
    key = f"{call.idempotency_key}.{name}"
    return await call.step(name, lambda: asyncio.to_thread(ask_canvas, number, key))


def ask_canvas(number: int, key: str) -> str:
    """Have the shape of this operation appended. Asked again with the same key, the canvas does not do it again."""
    body = json.dumps(PLAN[number - 1]).encode()

    def sent() -> Iterator[bytes]:
        yield body[:10]
        may_be_killed(f"{number}:during")
        yield body[10:]

    headers = {"Idempotency-Key": key, "Content-Length": str(len(body)), "User-Agent": NAME}
    answer = request("POST", sent(), headers)
    say(f"op {number}: {answer['said']}, {answer['id']}")
    may_be_killed(f"{number}:after")
    return answer["id"]


def request(method: str, body: Iterator[bytes] | None = None, headers: dict[str, str] | None = None) -> Any:
    with contextlib.closing(http.client.HTTPConnection(os.environ["CANVAS"], timeout=30)) as canvas:
        canvas.request(method, "/", body, headers or {})
        return json.load(canvas.getresponse())


async def work() -> None:
    """A worker. In a real one the run comes with a message, which is delivered again (see email_worker.py)."""
    say(f"starts, pid {os.getpid()}")
    async with natsreceipts.connect(os.environ["NATS_URL"], worker=NAME) as toolkit:
        run = toolkit.run("acme", os.environ["RUN"])
        await run.execute("canvas_plan", PLAN, carry_out, effect="resumable", lease=LEASE)


def may_be_killed(point: str) -> None:
    if os.environ["KILL_AT"] == point:
        say(f"kill -9 at {point}")
        os.kill(os.getpid(), signal.SIGKILL)


def say(what: str) -> None:
    print(f"{time.time() - STARTED:5.1f} s  {NAME:8}  {what}", flush=True)


# The service


class Canvas(http.server.BaseHTTPRequestHandler):
    """It takes one request at a time, so looking a key up and appending are one."""

    shapes: ClassVar[list[dict[str, Any]]] = []
    answers: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[tuple[str, str, str]]] = []

    def do_POST(self) -> None:
        key, length = str(self.headers["Idempotency-Key"]), int(str(self.headers["Content-Length"]))
        body = self.rfile.read(length)
        said = "cut off" if len(body) < length else "known, answered again" if key in self.answers else "done"
        self.asked.append((key, str(self.headers["User-Agent"]), said))
        if said == "done":
            self.answers[key] = f"shape-{len(self.shapes) + 1}"
            self.shapes.append({**json.loads(body), "id": self.answers[key]})
        if said != "cut off":
            self.answer({"id": self.answers[key], "said": said})

    def do_GET(self) -> None:
        self.answer({"shapes": self.shapes, "asked": self.asked})

    def answer(self, value: object) -> None:
        self.send_response_only(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


def serve() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Canvas) as server:
        print(f"127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


# The show


@contextlib.asynccontextmanager
async def child(role: str, stdout: int | None = None) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """This file in a process of its own, which ends with the context, or with this process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, role), stdin=asyncio.subprocess.PIPE, stdout=stdout, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def end_with_the_show() -> None:
    os.read(0, 1)  # standard input ends when the show is gone, however it went
    os._exit(1)


async def show(kills: list[str]) -> bool:
    """Whether the call is completed and each operation was done once."""
    async with contextlib.AsyncExitStack() as stack:
        url = os.environ.get("NATS_URL") or (await stack.enter_async_context(natsreceipts.embedded())).url
        toolkit = await stack.enter_async_context(natsreceipts.connect(url, provision=True))
        canvas = await stack.enter_async_context(child("--canvas", asyncio.subprocess.PIPE))
        assert canvas.stdout is not None
        address = (await canvas.stdout.readline()).decode().strip()
        run = toolkit.run("acme", f"plan-{secrets.token_hex(4)}")
        key = run.key("canvas_plan", PLAN)
        os.environ.update(NATS_URL=url, CANVAS=address, RUN=run.run, STARTED=str(STARTED))
        receipt, killed = None, 0
        for number in range(1, len(kills) + 4):  # one that fails by itself is followed by the next, but not for ever
            os.environ.update(WORKER=f"worker {number}", KILL_AT=[*kills, ""][killed])
            async with child("--worker") as worker:
                killed += await worker.wait() == -signal.SIGKILL
            receipt = await toolkit.receipts.get(key)
            if receipt is not None:
                say(f"receipt: {receipt.status}, {len(receipt.steps)} of {len(PLAN)} steps are on record")
                if receipt.status == "completed":
                    break
        seen: dict[str, list[Any]] = await asyncio.to_thread(request, "GET")

    print("\nop  shape   asked  done  by whom the canvas was asked, and what it said")
    once, repeated = len(seen["shapes"]) == len(PLAN), list[str]()
    for number, wanted in enumerate(PLAN, 1):
        asked = [f"{who}: {said}" for k, who, said in seen["asked"] if k == f"{key.idempotency_key}.op-{number}"]
        done = sum(shape == {**wanted, "id": shape["id"]} for shape in seen["shapes"])
        print(f"{number:2}  {wanted['shape']:6}  {len(asked):5}  {done:4}  {'; '.join(asked)}")
        once = once and done == 1
        if len(asked) > 1:
            repeated.append(f"op {number} was asked {times(len(asked))}, done {times(done)}")
    print("", *repeated, sep="\n")
    print(f"{len(PLAN)} operations, {killed} workers killed, {len(seen['shapes'])} shapes on the canvas")
    return once and receipt is not None and receipt.result == [shape["id"] for shape in seen["shapes"]]


def times(number: int) -> str:
    return ["never", "once", "twice"][number] if number < 3 else f"{number} times"


if __name__ == "__main__":
    if sys.argv[1:] in (["--canvas"], ["--worker"]):
        threading.Thread(target=end_with_the_show, daemon=True).start()
        sys.exit(serve() if sys.argv[1] == "--canvas" else asyncio.run(work()))
    parser = argparse.ArgumentParser(description="A plan of 20 operations, carried out by workers that are killed.")
    how = f"kill a worker before, during or after an operation (default: {', '.join(KILLS)}); may be repeated"
    parser.add_argument("--kill-at", action="append", choices=POINTS, metavar="OP:POINT", help=how)
    parser.add_argument("--no-kills", action="store_true", help="let the first worker do it all")
    options = parser.parse_args()
    try:
        kills = [] if options.no_kills else sorted(options.kill_at or KILLS, key=POINTS.index)
        sys.exit(0 if asyncio.run(show(kills)) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
