"""Tool-call receipts for AI agents on NATS JetStream: a killed worker's side effect does not happen twice.

Guard a tool's call, and a retry of it, in this process or another, gets the first one's result:

    async with natsreceipts.connect("nats://127.0.0.1:4222") as toolkit:
        run = toolkit.run("acme", "order-42")
        result = await run.execute("send_email", args, lambda: send_email(**args))
"""

from __future__ import annotations

from natsreceipts.decision import Effect, Landed, NotLanded, Unknown
from natsreceipts.dialects.base import ToolCall
from natsreceipts.doctor import Finding, examine
from natsreceipts.embedded import EmbeddedServer, embedded
from natsreceipts.entries import SessionEntry
from natsreceipts.errors import (
    AlreadyConsumed,
    AmbiguousCall,
    BucketReplaced,
    CallInFlight,
    CallTimedOut,
    CallWithdrawn,
    CorruptRecord,
    InvalidFact,
    InvalidName,
    InvalidSetting,
    InvalidTranscript,
    KeyMissing,
    LeaseLost,
    NatsReceiptsError,
    NoActiveRun,
    NotApplied,
    NotCanonical,
    NotClaimed,
    NoticeConflict,
    NotProvisioned,
    NotRecorded,
    NotResolvable,
    PayloadMissing,
    PermissionDenied,
    ReceiptErased,
    ReceiptError,
    ResultNotSet,
    ResultTypeMismatch,
    SealBroken,
    SealedError,
    ServerUnavailable,
    SessionBusy,
    SessionConflict,
    StaleRevision,
    StepRepeated,
    Unreachable,
    UnsupportedRecord,
)
from natsreceipts.guard import Call
from natsreceipts.identity import ReceiptKey, args_hash, canonical_json, hmac_digest, sha256_hex
from natsreceipts.notice import RunNoticeFact, notice_addressee_id, run_notice_id
from natsreceipts.notice_record import FiledNotice, Notice, NoticeSpec, NoticeStatus
from natsreceipts.notice_table import render_notices
from natsreceipts.notices import NoticeBoard
from natsreceipts.provisioning import Provisioned, provision
from natsreceipts.receipt import Receipt, Revision, Sealed
from natsreceipts.receipts import ReceiptStore
from natsreceipts.reconcile import ReconcileReport, RecoveredCall
from natsreceipts.run import Run
from natsreceipts.server_time import ServerTime
from natsreceipts.sessions import (
    LoadedSession,
    SessionLog,
    Sessions,
    SessionSummary,
    append_interruption_marker,
    reconcile_interrupted_session,
)
from natsreceipts.toolkit import Toolkit, connect
from natsreceipts.tools import Tool, tool
from natsreceipts.transcript import (
    INTERRUPTED_BY_USER_FOR_TOOL_USE_MARKER,
    INTERRUPTED_BY_USER_MARKER,
    ErrorKind,
    InterruptedResult,
    LeftOut,
    OrphanToolCall,
    RenamedCall,
    RequestView,
    closable_by_append,
    find_orphan_tool_calls,
    interrupted_result_message,
    interrupted_results,
    is_interrupted_close,
    request_view,
    tool_calls_of,
    tool_result_message,
)

__all__ = [
    "INTERRUPTED_BY_USER_FOR_TOOL_USE_MARKER",
    "INTERRUPTED_BY_USER_MARKER",
    "AlreadyConsumed",
    "AmbiguousCall",
    "BucketReplaced",
    "Call",
    "CallInFlight",
    "CallTimedOut",
    "CallWithdrawn",
    "CorruptRecord",
    "Effect",
    "EmbeddedServer",
    "ErrorKind",
    "FiledNotice",
    "Finding",
    "InterruptedResult",
    "InvalidFact",
    "InvalidName",
    "InvalidSetting",
    "InvalidTranscript",
    "KeyMissing",
    "Landed",
    "LeaseLost",
    "LeftOut",
    "LoadedSession",
    "NatsReceiptsError",
    "NoActiveRun",
    "NotApplied",
    "NotCanonical",
    "NotClaimed",
    "NotLanded",
    "NotProvisioned",
    "NotRecorded",
    "NotResolvable",
    "Notice",
    "NoticeBoard",
    "NoticeConflict",
    "NoticeSpec",
    "NoticeStatus",
    "OrphanToolCall",
    "PayloadMissing",
    "PermissionDenied",
    "Provisioned",
    "Receipt",
    "ReceiptErased",
    "ReceiptError",
    "ReceiptKey",
    "ReceiptStore",
    "ReconcileReport",
    "RecoveredCall",
    "RenamedCall",
    "RequestView",
    "ResultNotSet",
    "ResultTypeMismatch",
    "Revision",
    "Run",
    "RunNoticeFact",
    "SealBroken",
    "Sealed",
    "SealedError",
    "ServerTime",
    "ServerUnavailable",
    "SessionBusy",
    "SessionConflict",
    "SessionEntry",
    "SessionLog",
    "SessionSummary",
    "Sessions",
    "StaleRevision",
    "StepRepeated",
    "Tool",
    "ToolCall",
    "Toolkit",
    "Unknown",
    "Unreachable",
    "UnsupportedRecord",
    "append_interruption_marker",
    "args_hash",
    "canonical_json",
    "closable_by_append",
    "connect",
    "embedded",
    "examine",
    "find_orphan_tool_calls",
    "hmac_digest",
    "interrupted_result_message",
    "interrupted_results",
    "is_interrupted_close",
    "notice_addressee_id",
    "provision",
    "reconcile_interrupted_session",
    "render_notices",
    "request_view",
    "run_notice_id",
    "sha256_hex",
    "tool",
    "tool_calls_of",
    "tool_result_message",
]
