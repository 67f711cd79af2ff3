"""Ready-made ``verify=`` functions: did the effect of an attempt that died land? (docs/verifiers.md)

    verify = http_lookup("https://bank.example/charges/{idempotency_key}", settled_after=30)
    await run.execute("charge", args, charge, verify=verify)

Each looks in one place by the call's idempotency key, and answers `Landed` where it finds what the call leaves there.
What it does not find did not land only once it has not been there for ``settled_after`` seconds, your word for how
long it may still be on its way. Whatever else it meets is `Undecided`, and the call stays ambiguous.
"""

from __future__ import annotations

from natsreceipts.verifiers.http import http_lookup
from natsreceipts.verifiers.looking import Subject, Undecided, Verifier
from natsreceipts.verifiers.mail import imap_login, imap_message, message_id
from natsreceipts.verifiers.sql import dbapi, sql_row

__all__ = [
    "Subject",
    "Undecided",
    "Verifier",
    "dbapi",
    "http_lookup",
    "imap_login",
    "imap_message",
    "message_id",
    "sql_row",
]
