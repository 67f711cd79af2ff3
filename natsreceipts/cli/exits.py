"""The exit codes, and which error ends in which: docs/operations.md lists the same."""

from __future__ import annotations

import enum

from natsreceipts import errors

__all__ = ["Exit", "Failure", "exit_of"]


class Exit(enum.IntEnum):
    """How a command ended."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NO_NATS = 4
    NOT_READY = 5
    NOT_SETTLED = 6
    UNREADABLE = 7
    UNSOUND = 8
    INTERRUPTED = 130
    PIPE_CLOSED = 141

    @property
    def meaning(self) -> str:
        """One line, for people."""
        return _MEANINGS[self]


_MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "something else went wrong",
    Exit.USAGE: "the command line, a key, a name or a connection setting cannot be used",
    Exit.NOT_FOUND: "there is no such record",
    Exit.NO_NATS: "no NATS server answered, or it does not let this user in or do this",
    Exit.NOT_READY: "a bucket is missing, was replaced, or its settings break the promises",
    Exit.NOT_SETTLED: "nothing was written: it moved on, somebody was first, it is not to be settled, or you said no",
    Exit.UNREADABLE: "a record, or a payload of one, cannot be read; what could be read was printed",
    Exit.UNSOUND: "`doctor` found an error",
    Exit.INTERRUPTED: "stopped by Ctrl-C",
    Exit.PIPE_CLOSED: "whoever read the output went away",
}


class Failure(Exception):
    """A command cannot go on: one line that says why and what to do, and how it exits."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        self.code = code
        super().__init__(message)


_OF_ERRORS: tuple[tuple[Exit, tuple[type[Exception], ...]], ...] = (
    (Exit.USAGE, (errors.InvalidName, errors.InvalidSetting, errors.InvalidFact, errors.NotCanonical)),
    (Exit.NOT_FOUND, (errors.ReceiptErased,)),
    (Exit.NO_NATS, (errors.Unreachable, errors.PermissionDenied)),
    (Exit.NOT_READY, (errors.NotProvisioned, errors.BucketReplaced)),
    (Exit.NOT_SETTLED, (errors.StaleRevision, errors.NotResolvable, errors.CallInFlight, errors.SessionBusy)),
    (Exit.NOT_SETTLED, (errors.NoticeConflict, errors.AlreadyConsumed)),
    (Exit.UNREADABLE, (errors.CorruptRecord, errors.UnsupportedRecord, errors.PayloadMissing, errors.SealedError)),
    (Exit.UNREADABLE, (errors.InvalidTranscript,)),
)


def exit_of(error: errors.NatsReceiptsError) -> Exit:
    """The exit code for an error of the library."""
    for code, kinds in _OF_ERRORS:
        if isinstance(error, kinds):
            return code
    return Exit.FAILED
