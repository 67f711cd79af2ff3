"""A worker that sends one mail per job, and does not send it again where a crash cut it off.

It takes jobs from the stream ORDERS, as many workers as you like:

    nats pub orders.acme '{"tenant": "acme", "run": "order-42",
                           "mail": {"to": "ann@example.com", "subject": "Order 42", "text": "It is on its way."}}'
"""

# nats-py is typed in part
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import smtplib
from email.message import EmailMessage
from typing import TYPE_CHECKING

import nats

import natsreceipts

if TYPE_CHECKING:
    from nats.aio.msg import Msg

NATS_URL = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
SMTP = os.environ.get("SMTP_HOST", "127.0.0.1"), int(os.environ.get("SMTP_PORT", "25"))
LEASE = float(os.environ.get("LEASE", "30"))  # seconds of silence after which a worker may be judged dead

log = logging.getLogger("email_worker")


@natsreceipts.tool(not_applied=(ConnectionRefusedError,))  # no connection, no mail: that may be tried again
def send_email(to: str, subject: str, text: str, idempotency_key: str = "") -> str:
    """Send one mail and return its Message-ID, which is the same for every attempt at it."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "orders@example.com", to, subject
    mail["Message-ID"] = f"<{idempotency_key[:32]}@example.com>"
    mail.set_content(text)
    with smtplib.SMTP(*SMTP, local_hostname="email-worker", timeout=60) as smtp:
        smtp.send_message(mail)
    return str(mail["Message-ID"])


async def handle(toolkit: natsreceipts.Toolkit, msg: Msg) -> None:
    """One job is one run: when its message is delivered again, the calls that were made are replayed."""
    async with toolkit.delivery(msg, progress=LEASE / 6) as delivery:
        job = json.loads(msg.data)
        log.info("%s: delivery %d", job["run"], delivery.number)
        async with toolkit.run(job["tenant"], job["run"], lease=LEASE):
            message_id = await send_email(**job["mail"])
        log.info("%s: done, Message-ID %s", job["run"], message_id)


async def main() -> None:
    """Take one job after the other, until cancelled."""
    async with await nats.connect(NATS_URL) as nc, natsreceipts.connect(nc, provision=True) as toolkit:
        js = nc.jetstream()
        await js.add_stream(name="ORDERS", subjects=["orders.*"], retention="workqueue")
        jobs = await js.pull_subscribe("orders.*", durable="email-worker", stream="ORDERS")
        while True:
            with contextlib.suppress(TimeoutError):  # no job for a while: ask again
                for msg in await jobs.fetch(1, timeout=30):
                    try:
                        await handle(toolkit, msg)
                    except natsreceipts.NatsReceiptsError as error:
                        log.warning("given back: %s", error)
                    except Exception:
                        log.exception("given back")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
