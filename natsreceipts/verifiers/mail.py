"""Look for a mail by its Message-ID in a mailbox, over IMAP (the standard library's imaplib, in a thread)."""

from __future__ import annotations

import asyncio
import contextlib
import imaplib
import re
import ssl
from typing import TYPE_CHECKING, cast

from natsreceipts.decision import Landed, NotLanded, Verdict
from natsreceipts.errors import InvalidSetting
from natsreceipts.verifiers.looking import Subject, Undecided, Verifier, beside, check_seconds, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["imap_login", "imap_message", "message_id"]

_MESSAGE_ID = re.compile(r"<[!#-\[\]-~]{1,400}>")
"""What can stand between quotes in an IMAP command as it is: printable ASCII without spaces, quotes, backslashes."""

_DOMAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,200}[A-Za-z0-9])?")


def message_id(call: Subject, domain: str) -> str:
    """The Message-ID by which the mail of a call can be found: ``<idempotency key@domain>``. For the tool's header.

    Raises InvalidSetting for what is no domain.
    """
    if not _DOMAIN.fullmatch(domain):
        raise InvalidSetting(f"domain={domain!r}: use a domain of yours")
    return f"<{call.idempotency_key}@{domain}>"


def imap_login(
    host: str, user: str, password: str, *, port: int = 993, tls: bool = True, timeout: float = 10.0
) -> Callable[[], imaplib.IMAP4]:
    """For ``connect=`` of `imap_message`: a connection that is logged in. ``timeout``: seconds of each answer.

    ``tls=False`` sends the password as it is: on this machine, or within what is encrypted already. For another way to
    log in (XOAUTH2, client certificates) write such a function yourself. Raises InvalidSetting.
    """
    check_seconds("timeout", timeout, zero=False)

    def connect() -> imaplib.IMAP4:
        connection = (
            imaplib.IMAP4_SSL(host, port, ssl_context=ssl.create_default_context(), timeout=timeout)
            if tls
            else imaplib.IMAP4(host, port, timeout=timeout)
        )
        try:
            connection.login(user, password)
        except BaseException:
            connection.shutdown()
            raise
        return connection

    return connect


def imap_message(
    connect: Callable[[], imaplib.IMAP4],
    message_id: Callable[[Subject], str],
    *,
    mailboxes: Sequence[str] = ("Sent",),
    settled_after: float | None,
    timeout: float = 30.0,
) -> Verifier:
    """A verifier that searches mailboxes for the mail that the call sends; `Landed` with its Message-ID.

    ``connect``: opens a connection that is logged in (`imap_login`); called in a thread, for each look.
    ``message_id``: of the call, as the tool puts it into the mail (``lambda call: message_id(call, "example.com")``).
    ``mailboxes`` are opened read-only, by the names that the server uses.

    Not found is `NotLanded` once it was not there for ``settled_after`` seconds, and only a mailbox into which the
    *server* puts a copy of everything that it sends can be believed in that. Where the tool itself files the copy after
    it has sent the mail, it may have died in between: settled_after=None, so that absence proves nothing. What the
    server refuses, and what it does not answer within ``timeout`` seconds of one look, in all, raises `Undecided`.
    Raises InvalidSetting.
    """
    if settled_after is not None:
        check_seconds("settled_after", settled_after)
    check_seconds("timeout", timeout, zero=False)
    if isinstance(mailboxes, str) or not mailboxes or not all(_plain(name) for name in mailboxes):
        raise InvalidSetting(f"mailboxes={mailboxes!r}: use a list of names, as the server writes them, in ASCII")
    quoted = [_quoted(name) for name in mailboxes]

    async def verify_over_imap(call: Subject) -> Verdict:
        wanted = message_id(call)
        if not _MESSAGE_ID.fullmatch(wanted):
            raise InvalidSetting(f"message_id= gave {wanted[:200]!r}, which is no Message-ID in angle brackets")

        async def look() -> Verdict:
            try:
                async with asyncio.timeout(timeout):
                    found = await beside(lambda: _found(connect, quoted, wanted))
            except (imaplib.IMAP4.error, OSError) as error:
                raise Undecided(f"the mailbox could not be searched: {type(error).__name__}: {error}") from error
            return Landed(wanted) if found else NotLanded()

        return await settled(look, settled_after, where="the mailbox")

    verify_over_imap.__qualname__ = "imap_message"
    return verify_over_imap


def _found(connect: Callable[[], imaplib.IMAP4], mailboxes: Sequence[str], wanted: str) -> bool:
    connection = connect()
    try:
        found = any(_is_in(connection, mailbox, wanted) for mailbox in mailboxes)
    except BaseException:
        connection.shutdown()
        raise
    with contextlib.suppress(imaplib.IMAP4.error, OSError):
        connection.logout()
    return found


def _is_in(connection: imaplib.IMAP4, mailbox: str, wanted: str) -> bool:
    status, answer = connection.select(mailbox, readonly=True)
    if status != "OK":
        raise imaplib.IMAP4.error(f"mailbox {mailbox} cannot be opened: {answer!r}")
    status, answer = connection.uid("SEARCH", "HEADER", "Message-ID", f'"{wanted}"')
    lines = cast("list[bytes | None]", answer)
    if status != "OK" or not lines:
        raise imaplib.IMAP4.error(f"mailbox {mailbox} cannot be searched: {answer!r}")
    return any(line and line.split() for line in lines)


def _plain(name: object) -> bool:
    return isinstance(name, str) and name.isascii() and name.isprintable() and bool(name)


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
