"""natsreceipts for frameworks and scripts without an event loop: the same names, the same guarantees, no ``await``.

    with natsreceipts.sync.connect("nats://127.0.0.1:4222") as toolkit:
        run = toolkit.run("acme", "order-42")
        result = run.execute("send_email", args, lambda: send_email(**args))

Errors, keys and everything else that is not async are in `natsreceipts`.
"""

from __future__ import annotations

from natsreceipts.sync.calls import Call
from natsreceipts.sync.notices import NoticeBoard
from natsreceipts.sync.receipts import ReceiptStore
from natsreceipts.sync.run import Run, Tool, tool
from natsreceipts.sync.sessions import (
    SessionLog,
    Sessions,
    append_interruption_marker,
    reconcile_interrupted_session,
)
from natsreceipts.sync.toolkit import Toolkit, connect

__all__ = [
    "Call",
    "NoticeBoard",
    "ReceiptStore",
    "Run",
    "SessionLog",
    "Sessions",
    "Tool",
    "Toolkit",
    "append_interruption_marker",
    "connect",
    "reconcile_interrupted_session",
    "tool",
]
