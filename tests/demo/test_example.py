"""examples/email_worker.py as a script, with a real inbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import nats
import pytest
from aiosmtpd.smtp import SMTP

import natsreceipts
from natsreceipts.embedded import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "email_worker.py"
# A shell's background job, which a test run may be, and what it starts would ignore SIGINT.
INTERRUPTIBLE = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
JOB = {"tenant": "acme", "run": "order-42", "mail": {"to": "ann@example.com", "subject": "Order 42", "text": "Hello."}}


class Inbox:
    def __init__(self):
        self.mails = []

    async def handle_DATA(self, server, session, envelope):  # noqa: N802 - aiosmtpd's name
        self.mails.append(envelope.content.decode())
        return "250 OK"


@contextlib.asynccontextmanager
async def listening(inbox, port):
    server = await asyncio.get_running_loop().create_server(lambda: SMTP(inbox, hostname="inbox"), "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


@contextlib.asynccontextmanager
async def worker(url, port):
    env = {**os.environ, "NATS_URL": url, "SMTP_HOST": "127.0.0.1", "SMTP_PORT": str(port)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INTERRUPTIBLE, str(EXAMPLE)),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process.stdout
        process.send_signal(signal.SIGINT)
        rest = await process.stdout.read()
        assert b"Traceback" not in rest
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until(stream, text):
    said = ""
    async with asyncio.timeout(100):
        while text not in said:
            line = (await stream.readline()).decode()
            assert line, f"{text!r} was not said, but: {said}"
            said += line
    return said


@pytest.fixture
def port():
    """A port that no outgoing connection takes before the inbox does."""
    return free_port()


async def test_it_sends_a_job_that_comes_twice_once(own_server, port):
    inbox = Inbox()
    async with listening(inbox, port), worker(own_server.url, port) as said, await nats.connect(own_server.url) as nc:
        js = nc.jetstream()
        await js.add_stream(name="ORDERS", subjects=["orders.*"], retention="workqueue")
        for _ in range(2):
            await js.publish("orders.acme", json.dumps(JOB).encode())
        for _ in range(2):
            await until(said, "order-42: done")
    async with natsreceipts.connect(own_server.url) as toolkit:
        key = toolkit.run("acme", "order-42").key("send_email", JOB["mail"])
        receipt = await toolkit.receipts.get(key)
    assert receipt.status == "completed"
    assert receipt.result == f"<{key.idempotency_key[:32]}@example.com>"
    assert len(inbox.mails) == 1
    assert f"Message-ID: {receipt.result}" in inbox.mails[0]


async def test_where_nobody_listens_the_mail_is_tried_again_later(own_server, port):
    inbox = Inbox()
    async with worker(own_server.url, port) as said, await nats.connect(own_server.url) as nc:
        js = nc.jetstream()
        await js.add_stream(name="ORDERS", subjects=["orders.*"], retention="workqueue")
        await js.publish("orders.acme", json.dumps(JOB).encode())
        await until(said, "ConnectionRefusedError")
        async with listening(inbox, port):
            await until(said, "order-42: done")
    assert len(inbox.mails) == 1
