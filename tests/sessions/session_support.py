"""What the tests of sessions share: messages with calls in every dialect, logs, and what stands on the server."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import nats.js.errors
from dialect_shapes import DIALECTS, result, result_texts, shaped, user
from scenes import stand
from support import bucket_of, stored
from vendor_rules import RULES

from natsreceipts import SessionBusy

__all__ = ["DIALECTS", "Desk", "assistant", "entries_on_server", "last_seqs", "nothing_written", "stream_of"]


def stream_of(namespace):
    return f"{namespace}-SESSIONS"


def subject_of(namespace, session="chat", tenant="acme"):
    return f"{namespace}-sessions.{tenant}.{session}"


def assistant(dialect, *calls, text=""):
    """The messages with these calls, each ``(id, tool, args)``: in Responses one for each call."""
    match dialect:
        case "openai-chat":
            tool_calls = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for i, n, a in calls
            ]
            return [{"role": "assistant", "content": text or None, "tool_calls": tool_calls}]
        case "openai-responses":
            return [
                {"type": "function_call", "id": f"fc_{i}", "call_id": i, "name": n, "arguments": json.dumps(a)}
                for i, n, a in calls
            ]
        case "anthropic":
            return [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls],
                }
            ]
        case "pydantic-ai":
            parts = [{"part_kind": "tool-call", "tool_name": n, "args": a, "tool_call_id": i} for i, n, a in calls]
            return [{"kind": "response", "parts": parts, "model_name": "m"}]
        case "langchain":
            tool_calls = [{"name": n, "args": a, "id": i, "type": "tool_call"} for i, n, a in calls]
            data = {"content": text, "type": "ai", "tool_calls": tool_calls, "invalid_tool_calls": []}
            return [{"type": "ai", "data": data}]
        case "neutral":
            blocks = [{"type": "toolCall", "id": i, "name": n, "arguments": a} for i, n, a in calls]
            return [{"role": "assistant", "content": blocks}]
    raise AssertionError(dialect)


async def last_seqs(nc, namespace):
    """The last sequences of the receipts' and of the sessions' stream: what any write moves."""
    found = []
    for stream in (f"KV_{bucket_of(namespace)}", stream_of(namespace)):
        found.append((await nc.jetstream().stream_info(stream)).state.last_seq)
    return tuple(found)


@asynccontextmanager
async def nothing_written(nc, namespace):
    """Nothing is stored meanwhile, neither of receipts nor of sessions."""
    before = await last_seqs(nc, namespace)
    yield
    assert await last_seqs(nc, namespace) == before


async def entries_on_server(nc, namespace, session="chat", tenant="acme"):
    """Every entry of a session as raw JSON, with its sequence."""
    found, sequence = [], 1
    while True:
        try:
            message = await nc.jetstream().get_msg(
                stream_of(namespace), seq=sequence, subject=subject_of(namespace, session, tenant), next=True
            )
        except nats.js.errors.NotFoundError:
            return found
        found.append(json.loads(message.data) | {"seq": message.seq})
        sequence = message.seq + 1


async def put_entry(nc, namespace, body, *, session="chat", dialect="neutral", headers=None, **fields):
    """Write an entry behind the library's back, and return its sequence."""
    record = {"v": 1, "id": "0" * 24, "parentId": None, "kind": "message", "runId": None, "dialect": dialect}
    data = body if isinstance(body, bytes) else json.dumps(record | {"body": body} | fields).encode()
    return (await nc.jetstream().publish(subject_of(namespace, session), data, headers=headers)).seq


class Desk:
    """A session as a host uses it, in one dialect, and its receipts as other workers leave them."""

    def __init__(self, toolkit, nc, namespace, dialect, session):
        self.toolkit = toolkit
        self.nc = nc
        self.namespace = namespace
        self.dialect = dialect
        self.session = session
        self.run = toolkit.run("acme", "run-1")
        self.log = toolkit.sessions.open("acme", session, dialect=dialect)

    def at(self, toolkit):
        """The same session, with another worker."""
        return Desk(toolkit, self.nc, self.namespace, self.dialect, self.session)

    async def hears(self, text="hi"):
        """The user says something."""
        for message in shaped([user(text)], self.dialect):
            entry = await self.log.append(message)
        return entry

    async def asks(self, *calls, run="run-1"):
        """The model calls tools, each ``(id, tool, args)``. The entry of the last message."""
        for message in assistant(self.dialect, *calls):
            entry = await self.log.append(message, run=run)
        return entry

    async def gets(self, call_id, text="done"):
        """The worker appends a result."""
        for message in shaped([result(call_id, text)], self.dialect):
            entry = await self.log.append(message)
        return entry

    def key(self, tool, args, **more):
        return self.run.key(tool, args, **more)

    async def stands(self, tool, args, status, **fields):
        """Put the receipt of a call into a state."""
        return await stand(self.nc, self.namespace, self.key(tool, args), status, **fields)

    async def receipt(self, tool, args):
        """The newest record of a call, as raw JSON; None where there is none."""
        return await stored(self.nc, self.namespace, self.key(tool, args))

    async def fence(self, tool, args):
        """The fence of this session in the receipt of a call."""
        record = await self.receipt(tool, args)
        return ((record or {}).get("fences") or {}).get(self.session)

    async def wakes(self, *tools, **options):
        """Wake with these tools guarded, by their arguments as they are. A lease of a millisecond is waited out."""
        guarded = {name: (lambda arguments: arguments) for name in tools} | options.pop("guarded", {})
        while True:
            try:
                return await self.log.wake(guarded=guarded, **options)
            except SessionBusy as busy:
                if busy.retry_after > 0.01:
                    raise
                await asyncio.sleep(busy.retry_after)

    async def context(self):
        """The request, which the vendor's own rules accept without a close on the wire only; (id, text) of results."""
        view = await self.log.context()
        RULES[self.dialect](view.messages)
        assert view.closed == ()
        return result_texts(view.messages, self.dialect)

    async def entries(self):
        return await entries_on_server(self.nc, self.namespace, self.session)

    def quiet(self):
        return nothing_written(self.nc, self.namespace)


class Steps:
    """Awaits a coroutine and counts where it is suspended; at the ``at``-th suspension its task is cancelled."""

    def __init__(self, coroutine, at):
        self._coroutine = coroutine
        self._at = at
        self.count = 0

    def __await__(self):
        sent, thrown = None, None
        while True:
            try:
                if thrown is None:
                    waited_for = self._coroutine.send(sent)
                else:
                    error, thrown = thrown, None
                    waited_for = self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self._at:
                asyncio.current_task().cancel()
            try:
                sent = yield waited_for
            except BaseException as error:  # handed on to the coroutine, as a task does
                thrown = error


async def cancelled_at(at, coroutine):
    """Run a coroutine, cancelled at its ``at``-th await: whether it came so far."""
    steps = Steps(coroutine, at)

    async def drive():
        return await steps

    task = asyncio.create_task(drive())
    try:
        await task
    except asyncio.CancelledError:
        return True
    assert steps.count < at, "the cancellation was swallowed"
    return False
