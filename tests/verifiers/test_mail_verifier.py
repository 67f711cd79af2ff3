"""imap_message against an IMAP server (pymap), in a process of its own."""

from __future__ import annotations

import asyncio
import imaplib
import socket
import subprocess
import sys
import time

import pytest

from natsreceipts import AmbiguousCall, InvalidSetting, Landed, NotLanded
from natsreceipts.verifiers import Undecided, imap_login, imap_message, message_id


class Call:
    idempotency_key = "a" * 64


def mid(call):
    return message_id(call, "example.com")


def test_a_message_id_is_the_same_for_every_attempt():
    assert mid(Call()) == f"<{'a' * 64}@example.com>"
    for bad in ("", "a b", "a>", 'x"', "a\r\nb", "-a", "ä"):
        with pytest.raises(InvalidSetting):
            message_id(Call(), bad)


def test_bad_settings_are_refused():
    for bad in ({"mailboxes": []}, {"mailboxes": "Sent"}, {"mailboxes": ["a\r\nb"]}, {"mailboxes": ["ä"]}):
        with pytest.raises(InvalidSetting):
            imap_message(lambda: None, mid, **{"settled_after": 0} | bad)
    with pytest.raises(InvalidSetting):
        imap_message(lambda: None, mid, settled_after=-1)
    with pytest.raises(InvalidSetting):
        imap_login("h", "u", "p", timeout=0)


async def test_what_is_no_message_id_is_never_sent():
    for bad in ("a@b", "<a b>", '<a"b@c>', "<a\r\nb@c>", "<ä@c>", "<>"):
        with pytest.raises(InvalidSetting):
            await imap_message(lambda: pytest.fail("connected"), lambda call, bad=bad: bad, settled_after=0)(Call())


async def test_nobody_there_says_nothing():
    verify = imap_message(imap_login("127.0.0.1", "a", "b", port=1, tls=False), mid, settled_after=0)
    with pytest.raises(Undecided, match="could not be searched"):
        await verify(Call())


HANGS = """
import imaplib, socket, sys
from natsreceipts import sync
from natsreceipts.verifiers import dbapi, imap_message, message_id, sql_row
silent = socket.create_server(("127.0.0.1", 0))
mail = imap_message(
    lambda: imaplib.IMAP4(*silent.getsockname()), lambda call: message_id(call, "example.com"),
    settled_after=0, timeout=0.2,
)
row = sql_row(
    dbapi(lambda: silent.accept()[0].recv(1) or silent.accept()[0].recv(1)), table="t", key_column="k", columns=["c"],
    placeholder="?", settled_after=0, timeout=0.2,
)
def dies():
    raise ValueError("died")
with sync.connect(sys.argv[1], namespace=sys.argv[2], provision=True) as toolkit:
    run = toolkit.run("acme", "run-1")
    for verify in (None, mail, row):
        try:
            run.execute("send", {}, dies, verify=verify)
        except Exception as error:
            print(type(error).__name__, "TimeoutError" in str(error), flush=True)
"""


async def test_what_hangs_holds_up_neither_the_call_nor_the_end_of_the_program(server, namespace):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HANGS, server.url, namespace), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert out.decode().splitlines() == ["ValueError False", "AmbiguousCall True", "AmbiguousCall True"]


@pytest.fixture(scope="module")
def mail_server():
    """The port of an IMAP server with an account of (demouser, demopass)."""
    pytest.importorskip("pymap")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from pymap.main import main; sys.exit(main())"]
    options = ["--no-service", "admin", "--no-service", "managesieve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, *options, "--no-tls", "dict", "--demo-data"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        end = time.monotonic() + 30
        while True:
            try:
                imaplib.IMAP4("127.0.0.1", port, timeout=10).logout()
                break
            except OSError:
                assert process.poll() is None, process.stderr.read().decode()
                assert time.monotonic() < end
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def sending(mail_server):
    """The effect: the server keeps a copy of what it sends."""

    async def send(call):
        def append():
            connection = imaplib.IMAP4("127.0.0.1", mail_server, timeout=30)
            connection.login("demouser", "demopass")
            mail = f"Message-ID: {mid(call)}\r\nSubject: hello\r\n\r\nHello.\r\n".encode()
            status, answer = connection.append("Sent", None, None, mail)
            assert status == "OK", answer
            connection.logout()

        await asyncio.to_thread(append)

    return send


def looking(port, **settings):
    connect = imap_login("127.0.0.1", "demouser", settings.pop("password", "demopass"), port=port, tls=False)
    return imap_message(connect, mid, **{"settled_after": 0.05} | settings)


async def never():
    raise AssertionError("this must not be executed")


async def again():
    return "sent again"


@pytest.mark.faults
async def test_a_mail_in_the_mailbox_has_landed(run, mail_server, sending, left_behind):
    await left_behind("send", {}, sending)
    landed = mid(run.call("send", {}))
    assert await run.execute("send", {}, never, verify=looking(mail_server)) == landed
    several = looking(mail_server, mailboxes=["INBOX", "Sent"])
    assert await several(run.call("send", {})) == Landed(landed)


@pytest.mark.faults
async def test_a_mail_that_is_not_there_has_not_landed(run, mail_server, left_behind):
    await left_behind("send", {"n": 2})
    assert await run.execute("send", {"n": 2}, again, verify=looking(mail_server)) == "sent again"


@pytest.mark.faults
async def test_what_says_nothing_leaves_it_ambiguous(run, mail_server, sending, left_behind):
    await left_behind("send", {"n": 3})
    for settings, why in (
        ({"settled_after": None}, "proves nothing"),
        ({"mailboxes": ["Nowhere"]}, "cannot be opened"),
        ({"password": "wrong"}, "could not be searched"),
    ):
        with pytest.raises(AmbiguousCall, match=why):
            await run.execute("send", {"n": 3}, never, verify=looking(mail_server, **settings))


@pytest.mark.faults
async def test_a_mail_that_arrives_while_it_is_looked_for(run, mail_server, sending, left_behind):
    await left_behind("send", {"n": 4})
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()
    connect = imap_login("127.0.0.1", "demouser", "demopass", port=mail_server, tls=False)

    def connecting():
        connection = connect()
        logout = connection.logout

        def after():
            loop.call_soon_threadsafe(looked.set)
            return logout()

        connection.logout = after
        return connection

    verify = imap_message(connecting, mid, settled_after=10)
    waiting = asyncio.ensure_future(run.execute("send", {"n": 4}, never, verify=verify))
    await looked.wait()
    await sending(run.call("send", {"n": 4}))
    assert await waiting == mid(run.call("send", {"n": 4}))
    assert await looking(mail_server)(run.call("send", {"n": 5})) == NotLanded()
