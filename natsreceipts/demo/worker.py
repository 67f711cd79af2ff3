"""One worker process of the demo: the email worker, which ends with the demo whatever happens to that.

With the argument ``without-receipts`` the same mails are sent the usual way: take the message, send, acknowledge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import threading
from typing import TYPE_CHECKING

from natsreceipts.demo import email_worker

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from natsreceipts.toolkit import Toolkit


async def handle_without_receipts(_: Toolkit, msg: Msg) -> None:
    """One job, unguarded."""
    job = json.loads(msg.data)
    email_worker.log.info("%s: delivery %d", job["run"], msg.metadata.num_delivered)
    send = email_worker.send_email.fn
    message_id = await asyncio.to_thread(send, **job["mail"], idempotency_key=secrets.token_hex(16))
    await msg.ack()
    email_worker.log.info("%s: done, Message-ID %s", job["run"], message_id)


def _end_with_the_demo() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Run until killed, or until standard input ends."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    if "without-receipts" in sys.argv[1:]:
        email_worker.handle = handle_without_receipts
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(email_worker.main())


if __name__ == "__main__":
    main()
