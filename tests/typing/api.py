# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What the types of the public names promise. pyright checks this file in strict mode; nothing runs it.

A comment that ignores an error is an assertion here: pyright complains where the error is not there.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, Literal, assert_type

import natsreceipts
from natsreceipts import (
    AlreadyConsumed,
    AmbiguousCall,
    BucketReplaced,
    Call,
    CallInFlight,
    CallTimedOut,
    CallWithdrawn,
    CorruptRecord,
    Effect,
    ErrorKind,
    FiledNotice,
    InvalidFact,
    LeaseLost,
    LoadedSession,
    NatsReceiptsError,
    NotApplied,
    NotCanonical,
    Notice,
    NoticeBoard,
    NoticeConflict,
    NoticeSpec,
    NoticeStatus,
    NotProvisioned,
    NotRecorded,
    PermissionDenied,
    Receipt,
    ReceiptError,
    ReceiptKey,
    ReceiptStore,
    ReconcileReport,
    RecoveredCall,
    RequestView,
    Run,
    RunNoticeFact,
    SessionBusy,
    SessionConflict,
    SessionEntry,
    SessionLog,
    Sessions,
    SessionSummary,
    ToolCall,
    Toolkit,
    Unreachable,
    UnsupportedRecord,
    cipher,
    sync,
    tool,
    verifiers,
)
from natsreceipts.otel import OpenTelemetryHook
from natsreceipts.telemetry import (
    CallDecided,
    CallSettled,
    DoubtSettled,
    Event,
    Hook,
    LostLease,
    RenewalFailed,
    SessionWoken,
    ToolkitClosed,
    WriteConflict,
    log_events,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Mail:
    """What a host's own function returns."""


async def send(to: str) -> Mail:
    """A function of the host's."""
    return Mail()


async def with_call(call: Call) -> int:
    """A body that takes the call."""
    assert_type(call.attempt, int)
    assert_type(call.revision, int)
    assert_type(call.idempotency_key, str)
    assert_type(call.replayed, bool)
    assert_type(call.lost, bool)
    assert_type(call.key, ReceiptKey)
    await call.renew()
    return 1


async def toolkits() -> None:
    """connect, runs and calls."""
    async with natsreceipts.connect("nats://127.0.0.1:4222", namespace="prod", provision=True, lease=30) as toolkit:
        assert_type(toolkit, Toolkit)
        assert_type(toolkit.receipts, ReceiptStore)
        assert_type(toolkit.run("acme", "run-1"), Run)
        assert_type(toolkit.sessions, Sessions)
        assert_type(toolkit.sessions.open("acme", "chat-7", dialect="anthropic"), SessionLog)
        assert_type(toolkit.notices, NoticeBoard)
        assert_type(toolkit.notices.at("prod_acme"), NoticeBoard)
        assert_type(toolkit.run("acme", "run-1").notices, NoticeBoard)
    async with natsreceipts.connect(["nats://a", "nats://b"]):
        pass
    natsreceipts.connect(17)  # pyright: ignore[reportArgumentType]


async def execute(run: Run) -> None:
    """`execute` returns what its function does."""
    assert_type(await run.execute("send", {"to": "a"}, lambda: send("a")), Mail)
    assert_type(await run.execute("send", {"to": "a"}, with_call, effect="idempotent", lease=10), int)
    assert_type(await run.execute("send", [], with_call, distinct="x", effect=Effect.OPAQUE), int)
    await run.execute("send", [], send)  # pyright: ignore[reportArgumentType, reportCallIssue]
    await run.execute("send", [], Mail)  # pyright: ignore[reportArgumentType, reportCallIssue]
    await run.execute(b"send", [], with_call)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert_type(run.key("send", {}), ReceiptKey)


async def call(run: Run) -> None:
    """`call` is a context manager around its body."""
    async with run.call("send", {"to": "a"}, not_applied=(ValueError,), timeout=None) as guarded:
        assert_type(guarded, Call)
        assert_type(guarded.result, Any)
        guarded.result = Mail()
        guarded.attempt = 2  # pyright: ignore[reportAttributeAccessIssue]
    async with run as entered:
        assert_type(entered, Run)


@tool
async def asynchronous(to: str, *, times: int = 1) -> Mail:
    """A tool without options."""
    return Mail()


@tool
def synchronous(to: str) -> bytes:
    """A tool that is not async."""
    return to.encode()


@tool(effect="idempotent", name="mail.send", lease=10)
async def with_options(to: str, idempotency_key: str = "") -> list[int]:
    """A tool with options."""
    return [1]


@tool(effect=Effect.READ)
def synchronous_with_options(n: int) -> dict[str, int]:
    """A tool with options that is not async."""
    return {"n": n}


async def tools() -> None:
    """A tool keeps its parameters and its result."""
    assert_type(await asynchronous("a", times=2), Mail)
    assert_type(await synchronous("a"), bytes)
    assert_type(await with_options("a"), list[int])
    assert_type(await synchronous_with_options(n=1), dict[str, int])
    assert_type(asynchronous.name, str)
    assert_type(asynchronous.effect, Effect)
    assert_type(asynchronous.arguments("a"), dict[str, Any])
    await asynchronous(1)  # pyright: ignore[reportArgumentType]
    await asynchronous("a", tries=1)  # pyright: ignore[reportCallIssue]
    await synchronous()  # pyright: ignore[reportCallIssue]
    await with_options("a", "b", "c")  # pyright: ignore[reportCallIssue]
    await synchronous_with_options("1")  # pyright: ignore[reportArgumentType]


async def reading(receipts: ReceiptStore, key: ReceiptKey) -> None:
    """Receipts as they stand."""
    receipt = await receipts.get(key)
    assert_type(receipt, Receipt | None)
    assert_type(await receipts.get(key.kv_key), Receipt | None)
    if receipt is not None:
        assert_type(receipt.key, ReceiptKey)
        assert_type(receipt.kv_key, str)
        assert_type(receipt.revision, int)
        assert_type(receipt.attempts, int)
        assert_type(receipt.updated, dt.datetime)
        assert_type(receipt.effect, Effect | None)
        assert_type(receipt.result, Any)
        receipt.revision = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(await receipts.history(key), list[Receipt])
    assert_type(await receipts.revisions(key), list[natsreceipts.Revision])
    time = await receipts.server_time()
    assert_type(time, natsreceipts.ServerTime)
    if receipt is not None:
        assert_type(time.lease_left(receipt), float | None)
    listed: AsyncIterator[Receipt] = receipts.list(tenant="acme", status="ambiguous")
    async for one in listed:
        assert_type(one, Receipt)
    receipts.list(status="done")  # pyright: ignore[reportArgumentType]
    assert_type(await receipts.resolve(key, revision=1, not_applied=True, by="ann", reason="asked"), Receipt)
    await receipts.resolve(key, revision=1, completed=1, by="ann", reason="asked", notify="planner")


async def notices(board: NoticeBoard) -> None:
    """Notices: one to one agent, several to several."""
    fact = RunNoticeFact("build", "ok", {"n": 1, "why": "x", "late": True})
    one = await board.file(run="r", step="s", request_id="q", addressee="a", fact=fact, at=1)
    assert_type(one, FiledNotice)
    assert_type(one.created, bool)
    plain = {"decision": "build", "outcome": "ok"}
    assert_type(await board.file(step="s", request_id="q", addressees=["a", "b"], fact=plain), list[FiledNotice])
    await board.file(step="s", request_id="q", addressee="a", addressees=["b"], fact=fact)  # pyright: ignore[reportCallIssue]
    await board.file(step="s", request_id="q", fact=fact)  # pyright: ignore[reportCallIssue]
    assert_type(await board.read(run="r", addressee="a", notice_id=one.notice_id), Notice | None)
    assert_type(await board.list(run="r", addressee="a"), list[Notice])
    assert_type(await board.list_run(run="r"), list[Notice])
    assert_type(await board.pending(addressee="a"), list[Notice])
    assert_type(await board.pending(run="r", addressee="a", by="turn-7"), list[Notice])
    assert_type(await board.unconsumed_steps(run="r"), set[str])
    assert_type(await board.consume(addressee="a", notice_id=one.notice_id, by="turn-1"), NoticeStatus)
    watch = board.watch(run="r", addressee="a")
    assert_type(watch, AsyncGenerator[Notice, None])
    async for notice in watch:
        assert_type(notice.spec, NoticeSpec)
        assert_type(notice.spec.fact.decision, str)
        assert_type(notice.spec.at, int)
        assert_type(notice.spec_revision, int)
        assert_type(notice.consumed, NoticeStatus | None)
        assert_type(board.render([notice]), str)
        notice.notice_id = "x"  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(natsreceipts.notice_addressee_id("a"), str)
    assert_type(natsreceipts.run_notice_id("q", "a"), str)


async def sessions(session: SessionLog, run: Run) -> None:
    """A session's log."""
    message: dict[str, Any] = {"role": "user", "content": "Hello."}
    entry = await session.append(message, run=run)
    assert_type(entry, SessionEntry)
    assert_type(await session.append(message, run="run-1", entry_id="job-1"), SessionEntry)
    for call in session.calls_in(message):
        assert_type(call, ToolCall)
        assert_type(call.id, str)
        assert_type(call.name, str)
        assert_type(call.arguments, dict[str, Any] | None)
        assert_type(await session.append_result(call.id, {"any": b"value"}, is_error=True), SessionEntry)
    assert_type(natsreceipts.tool_calls_of(message, dialect="anthropic"), list[ToolCall])
    assert_type(entry.seq, int)
    assert_type(entry.parent_id, str | None)
    assert_type(entry.run, str | None)
    assert_type(entry.time, dt.datetime | None)
    assert_type(entry.message, dict[str, Any] | None)
    assert_type(entry.tool_call_ids, tuple[str, ...])
    if entry.close is not None:
        assert_type(entry.close.error_kind, ErrorKind)
    if entry.receipt is not None:
        assert_type(entry.receipt.key, str)
        assert_type(entry.receipt.attempts, int)
    entry.seq = 3  # pyright: ignore[reportAttributeAccessIssue]
    loaded = await session.load()
    assert_type(loaded, LoadedSession)
    assert_type(loaded.entries, list[SessionEntry])
    assert_type(loaded.all_entries, list[SessionEntry])
    assert_type(loaded.messages, list[dict[str, Any]])
    assert_type(loaded.suspended, frozenset[str])
    assert_type(loaded.last_seq, int)
    assert_type(await session.suspend(["call_1"]), SessionEntry)
    assert_type(await session.resume(["call_1"]), SessionEntry)
    assert_type(await session.entry_of("call_1"), SessionEntry)
    assert_type(await session.compact(message, keep_from=entry), SessionEntry)
    assert_type(await session.compact(message, keep_from=entry.id), SessionEntry)
    await session.branch(entry)
    await session.branch(None)
    request = await session.context()
    assert_type(request, RequestView)
    assert_type(request.messages, list[dict[str, Any]])
    watched: AsyncIterator[SessionEntry] = session.watch()
    async for one in watched:
        assert_type(one, SessionEntry)
    await session.append("Hello.")  # pyright: ignore[reportArgumentType]
    await session.append(message, 1)  # pyright: ignore[reportCallIssue]
    assert_type(await run.execute("send", {}, with_call, entry=entry), int)


async def waking(session: SessionLog) -> None:
    """Wake, reconcile and interrupt give reports."""
    report = await session.wake(
        guarded={"send": asynchronous, "pay": lambda arguments: (arguments, "1"), "ask": synchronous},
        effects={"search": "read", "look": Effect.READ},
        started={"call_1"},
        dry_run=True,
    )
    assert_type(report, ReconcileReport)
    assert_type(report.last_seq, int)
    assert_type(report.marker_id, str | None)
    assert_type(report.recovered, tuple[RecoveredCall, ...])
    for call in report.recovered:
        assert_type(call.tool_call_id, str)
        assert_type(call.tool_name, str)
        assert_type(call.entry_id, str)
        assert_type(call.text, str)
        assert_type(call.why, str)
        assert_type(call.error_kind, ErrorKind | None)
        assert_type(call.said, str | None)
        assert_type(call.kv_key, str | None)
        assert_type(call.revision, int)
    assert_type(await session.interrupt(tool_use_in_flight=True), ReconcileReport)
    reconciled = await natsreceipts.reconcile_interrupted_session(session, {"search": "read"}, {"call_2"}, started=[])
    assert_type(reconciled, ReconcileReport)
    assert_type(await natsreceipts.append_interruption_marker(session, tool_use_in_flight=False), str)
    await session.wake(guarded=[asynchronous])
    await session.interrupt()  # pyright: ignore[reportCallIssue]
    await natsreceipts.append_interruption_marker(session)  # pyright: ignore[reportCallIssue]


async def listing(sessions: Sessions) -> None:
    """The sessions that there are."""
    listed: AsyncIterator[SessionSummary] = sessions.list(tenant="acme")
    async for one in listed:
        assert_type(one.session, str | None)
        assert_type(one.last_seq, int)
        assert_type(one.updated, dt.datetime)


def keys() -> None:
    """Identity."""
    key = ReceiptKey("acme", "run-1", "send", natsreceipts.args_hash({"a": 1}))
    assert_type(key.string, str)
    assert_type(key.kv_key, str)
    assert_type(key.idempotency_key, str)
    assert_type(natsreceipts.canonical_json([1]), str)


def errors(error: NatsReceiptsError) -> None:
    """The fields that a host reads."""
    match error:
        case CallInFlight():
            assert_type(error.retry_after, float)
        case AmbiguousCall():
            assert_type(error.model_text, str)
            assert_type(error.revision, int)
            assert_type(error.attempts, int)
        case SessionBusy():
            assert_type(error.retry_after, float)
            assert_type(error.calls, tuple[str, ...])
        case SessionConflict():
            assert_type(error.session, str)
            assert_type(error.missed, tuple[SessionEntry, ...])
        case CallWithdrawn():
            assert_type(error.key, ReceiptKey | str)
        case LeaseLost() | NotRecorded():
            assert_type(error.result, object)
            assert_type(error.has_result, bool)
        case CallTimedOut():
            timed_out: TimeoutError = error
            assert_type(timed_out.__cause__, BaseException | None)
            assert_type(error.timeout, float)
        case CorruptRecord():
            assert_type(error.bucket, str)
            assert_type(error.revision, int)
            assert_type(error.reason, str)
        case UnsupportedRecord():
            assert_type(error.version, object)
        case ReceiptError():
            assert_type(error.key, ReceiptKey | str)
        case Unreachable() | PermissionDenied() | BucketReplaced():
            assert_type(error.key, ReceiptKey | str | None)
        case NotProvisioned():
            assert_type(error.bucket, str)
        case NotCanonical():
            assert_type(error.path, str)
        case NotApplied():
            raise error
        case InvalidFact():
            assert_type(error.field, str)
            assert_type(error.limit, str)
        case NoticeConflict():
            assert_type(error.existing, NoticeSpec | None)
            assert_type(error.refused, NoticeSpec)
        case AlreadyConsumed():
            assert_type(error.by, str)
            assert_type(error.consumed_at, int)
        case _:
            pass


async def doctor() -> None:
    async for finding in natsreceipts.examine("nats://127.0.0.1:4222", namespace="prod", monitor=["http://x"], most=9):
        assert_type(finding, natsreceipts.Finding)
        assert_type(finding.text, str)
        assert_type(finding.fix, str | None)
        assert_type(finding.keys, tuple[str, ...])


def count_replays(event: Event) -> None:
    """A hook."""
    match event:
        case CallDecided(key=key, decision="replay", seconds=seconds):
            assert_type(key, ReceiptKey)
            assert_type(seconds, float | None)
        case CallSettled():
            assert_type(event.status, Literal["completed", "failed", "ambiguous", "lost", "not_recorded"])
            assert_type(event.error, BaseException | None)
        case WriteConflict() | DoubtSettled():
            assert_type(event.write, Literal["claim", "renew", "settle", "judge", "resolve"])
        case RenewalFailed() | LostLease():
            assert_type(event.attempt, int)
        case SessionWoken(recovered=recovered):
            assert_type(recovered, int)
        case _:
            assert_type(event, CallDecided | ToolkitClosed)


def hooks() -> None:
    """What `connect` takes."""
    counting: Hook = count_replays
    telemetry = OpenTelemetryHook(tools={"send"}, tracer_provider=None)
    natsreceipts.connect(hooks=[counting, log_events, telemetry])
    natsreceipts.connect(hooks=(print,))
    natsreceipts.connect(hooks=log_events)  # pyright: ignore[reportArgumentType]
    natsreceipts.connect(hooks=[lambda: None])  # pyright: ignore[reportArgumentType]


@sync.tool
def blocking(to: str, *, times: int = 1) -> Mail:
    """A tool of code without an event loop."""
    return Mail()


@sync.tool(effect="resumable", lease=10)
def blocking_with_options(call: sync.Call) -> int:
    """A tool with options, and with its call."""
    assert_type(call.key, ReceiptKey)
    assert_type(call.lost, bool)
    assert_type(call.renew(), None)
    return call.step("one", lambda: 1)


def looking_there() -> verifiers.Verifier:
    """Ready-made verifiers."""
    verifiers.http_lookup("https://bank/{idempotency_key}")  # pyright: ignore[reportCallIssue]
    mail = verifiers.imap_message(
        verifiers.imap_login("mail", "ann", "secret"),
        lambda call: verifiers.message_id(call, "a.b"),
        settled_after=None,
    )
    assert_type(mail, verifiers.Verifier)
    verifiers.sql_row(  # pyright: ignore[reportCallIssue]
        verifiers.dbapi(lambda: sqlite3.connect("x")),
        table="payments",
        key_column="k",
        columns=["id"],
        placeholder="&",
    )
    return verifiers.http_lookup(lambda call: f"https://bank/{call.key.run}", settled_after=30, read=lambda r: r.json())


async def sealing() -> None:
    """Keys of sealed payloads."""
    key = cipher.new_key("2027-01")
    assert_type(key, cipher.Key)

    async def asked(tenant: str, key_id: str | None) -> cipher.Key | None:
        return key

    for keys in (cipher.Cipher({"acme": [key]}), cipher.Cipher(asked), cipher.key_file("keys.json")):
        async with natsreceipts.connect("nats://127.0.0.1:4222", cipher=keys):
            pass
    cipher.Cipher({"acme": key})  # pyright: ignore[reportArgumentType]
    natsreceipts.connect("nats://127.0.0.1:4222", cipher=key)  # pyright: ignore[reportArgumentType]


def without_a_loop(key: ReceiptKey) -> None:
    """The same names, and no await."""
    with sync.connect("nats://127.0.0.1:4222", namespace="prod", provision=True, lease=30) as toolkit:
        assert_type(toolkit, sync.Toolkit)
        run = toolkit.run("acme", "run-1", verify=lambda: natsreceipts.Unknown())
        assert_type(run, sync.Run)
        assert_type(run.execute("send", {"to": "a"}, lambda: 1), int)
        assert_type(run.execute("send", {"to": "a"}, blocking_with_options.fn, effect="idempotent"), Any)
        with run.call("send", {"to": "a"}) as guarded:
            assert_type(guarded, sync.Call)
            guarded.result = Mail()
            guarded.attempt = 2  # pyright: ignore[reportAttributeAccessIssue]
        with run as entered:
            assert_type(entered, sync.Run)
            assert_type(blocking("a", times=2), Mail)
            blocking(1)  # pyright: ignore[reportArgumentType]
        assert_type(toolkit.receipts.get(key), Receipt | None)
        assert_type(toolkit.receipts.list(tenant="acme", status="ambiguous"), Iterator[Receipt])
        assert_type(toolkit.receipts.watch(), Iterator[Receipt])
        assert_type(toolkit.receipts.history(key), list[Receipt])
        assert_type(
            toolkit.receipts.resolve(key, revision=1, not_applied=True, by="ann", reason="asked", notify="planner"),
            Receipt,
        )
        session = toolkit.sessions.open("acme", "chat-7", dialect="anthropic")
        assert_type(session, sync.SessionLog)
        assert_type(session.append({"role": "user", "content": "Hello."}, run=run), SessionEntry)
        assert_type(session.wake(guarded=[blocking]), ReconcileReport)
        assert_type(session.watch(), Iterator[SessionEntry])
        assert_type(sync.append_interruption_marker(session, tool_use_in_flight=False), str)
        fact = RunNoticeFact("build", "ok")
        assert_type(run.notices.file(step="s", request_id="q", addressee="a", fact=fact), FiledNotice)
        assert_type(toolkit.notices.watch(run="r", addressee="a"), Iterator[Notice])
        run.execute("pay", {}, lambda: 1, verify=looking_there())
    sync.connect(17)  # pyright: ignore[reportArgumentType]
