"""The errors that a host can get: what happened, to which key, and what to do next.

A class's docstring is its default message. Every error pickles, so that it can cross a process
boundary, and every error that came from elsewhere has that cause chained (``__cause__``).
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Self, cast

from natsreceipts.shell import with_key as on_key

if TYPE_CHECKING:
    from natsreceipts.entries import SessionEntry
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.notice_record import NoticeSpec

__all__ = [
    "AlreadyConsumed",
    "AmbiguousCall",
    "BucketReplaced",
    "CallInFlight",
    "CallTimedOut",
    "CallWithdrawn",
    "CorruptRecord",
    "InvalidFact",
    "InvalidName",
    "InvalidSetting",
    "InvalidTranscript",
    "KeyMissing",
    "LeaseLost",
    "NatsReceiptsError",
    "NoActiveRun",
    "NotApplied",
    "NotCanonical",
    "NotClaimed",
    "NotProvisioned",
    "NotRecorded",
    "NotResolvable",
    "NoticeConflict",
    "PayloadMissing",
    "PermissionDenied",
    "ReceiptErased",
    "ReceiptError",
    "ResultNotSet",
    "ResultTypeMismatch",
    "SealBroken",
    "SealedError",
    "ServerUnavailable",
    "SessionBusy",
    "SessionConflict",
    "StaleRevision",
    "StepRepeated",
    "Unreachable",
    "UnsupportedRecord",
]


def _rebuild(cls: type[NatsReceiptsError], args: tuple[object, ...], state: dict[str, Any]) -> NatsReceiptsError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def brief(value: object, most: int = 80) -> str:
    """A value that was refused, as a message can show it: on one line, cut, and of characters that print."""
    try:
        text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in repr(value)[: most + 1])
    except Exception:  # noqa: BLE001 - ints of more digits than Python converts, and whatever a __repr__ raises
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 3] + "..."


class NatsReceiptsError(Exception):
    """Something went wrong in natsreceipts."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)

    def because(self, cause: BaseException | None) -> Self:
        """Chain ``cause`` and return self, for errors that are handed on before they are raised."""
        self.__cause__ = cause
        return self


class NotCanonical(NatsReceiptsError):
    """A value has no canonical JSON form. ``path`` says where, ``reason`` why (``$.to[3]``)."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"{path} cannot be part of a call's identity: {reason}. Pass plain JSON data: dict with str keys, list, "
            f"str, int, float, bool, None"
        )


class InvalidName(NatsReceiptsError):
    """A name (tenant, run, tool, namespace, …) that cannot be used; nothing was written."""

    def __init__(self, what: str, value: object, reason: str) -> None:
        self.what = what
        self.value = value
        self.reason = reason
        super().__init__(f"{what} {brief(value)} cannot be used: {reason}")


class InvalidSetting(NatsReceiptsError):
    """A setting of a call, a toolkit or a bucket that cannot be used; nothing was written."""


class InvalidTranscript(NatsReceiptsError):
    """A message is not what its dialect says. ``message_index`` counts from 0 in the list that was given."""

    def __init__(self, dialect: str, message_index: int, reason: str) -> None:
        self.dialect = dialect
        self.message_index = message_index
        self.reason = reason
        super().__init__(
            f"message {message_index} cannot be read in the dialect {dialect!r}: {reason}. Pass the messages as plain "
            f"dicts in the shape of that API, or name the dialect that they are in"
        )


class Unreachable(NatsReceiptsError):
    """No NATS server answered. Nothing was concluded from that; try again when the server is back."""

    key: ReceiptKey | str | None = None


class PermissionDenied(NatsReceiptsError):
    """The server refuses this connection a subject that it needs."""

    key: ReceiptKey | str | None = None

    def __init__(self, operation: str, subject: str) -> None:
        self.operation = operation
        self.subject = subject
        super().__init__(
            f"the server does not let this connection {operation} on {subject!r}: "
            f"allow that subject in the user's {operation} permissions, then connect again"
        )


class NotProvisioned(NatsReceiptsError):
    """A bucket or stream that the toolkit needs does not exist, or its settings break the promises."""

    def __init__(
        self, bucket: str, problem: str = "does not exist", *, advice: str | None = None, kind: str = "bucket"
    ) -> None:
        self.bucket = bucket
        self.problem = problem
        make = (
            "make it once with `natsreceipts up`, or natsreceipts.connect(..., provision=True), using credentials that "
            "may create streams"
        )
        super().__init__(f"{kind} {bucket!r} {problem}: {advice or make}")


class ServerUnavailable(NatsReceiptsError):
    """No nats-server of our own could be started (``embedded``)."""


class NoActiveRun(NatsReceiptsError):
    """A guarded tool was called outside a run: wrap the turn in ``async with toolkit.run(tenant, run):``."""


class NotApplied(NatsReceiptsError):
    """Raised *by a tool*: the effect did not happen and can no longer happen, so it may be tried again.

    It speaks only for the innermost guarded call that it leaves; to an outer call it is an ordinary
    error. Raise it only where that is known (the request was refused, the connection never opened):
    a time-out after the request went out is not such a case.
    """

    def __init__(self, message: str = "the tool says that it had no effect, and will have none") -> None:
        super().__init__(message)


class BucketReplaced(NatsReceiptsError):
    """The bucket was deleted, replaced or restored while this toolkit was using it."""

    key: ReceiptKey | str | None = None

    def __init__(self, bucket: str, evidence: str, *, stream: str | None = None) -> None:
        self.bucket = bucket
        self.evidence = evidence
        stream = stream or f"KV_{bucket}"
        kind = "stream" if stream == bucket else "bucket"
        super().__init__(
            f"{kind} {bucket!r} is not the one that this toolkit connected to ({evidence}): records of earlier "
            f"calls may be missing, so nothing more is executed through this connection. Find out what happened "
            f"to the stream {stream}, restore it if records were lost, then connect again"
        )


class ReceiptError(NatsReceiptsError):
    """An error about one call. ``key`` names it: a ReceiptKey, or the KV key where no names are known."""

    key: ReceiptKey | str

    def __init__(self, key: ReceiptKey | str, message: str) -> None:
        self.key = key
        super().__init__(f"{_named(key)}: {message}")


def _named(key: ReceiptKey | str) -> str:
    if isinstance(key, str):
        return shown(key)
    return f"{shown(key.tool)} in run {shown(key.run)} of {shown(key.tenant)} ({key.kv_key})"


def shown(name: str) -> str:
    """A name as a line of text shows it: as it is, or quoted where something in it cannot be printed."""
    return name if name.isprintable() else ascii(name)


class CallInFlight(ReceiptError):
    """Another attempt of this call holds a live lease. Come back in ``retry_after`` seconds."""

    def __init__(self, key: ReceiptKey | str, *, retry_after: float, reason: str = "") -> None:
        self.retry_after = retry_after
        why = reason or "another attempt of this call holds a live lease"
        super().__init__(key, f"{why}; nothing was executed here, come back in {retry_after:.1f} s")


class AmbiguousCall(ReceiptError):
    """An earlier attempt may or may not have had its effect, and nothing here can tell.

    The call is refused until a person or a verifier settles it. ``model_text`` says so to a model.
    ``revision`` is the revision to resolve on, ``attempts`` the number of attempts so far.
    """

    def __init__(self, key: ReceiptKey | str, *, revision: int, attempts: int, detail: str = "") -> None:
        self.revision = revision
        self.attempts = attempts
        self.detail = detail
        because = f" ({detail})" if detail else ""
        super().__init__(
            key,
            f"attempt {attempts} may or may not have had its effect{because}; it is not repeated. Find out in the "
            f"outside world whether it landed, then settle revision {revision} as completed or as not applied",
        )

    @property
    def model_text(self) -> str:
        """What to tell the model as the result of this tool call."""
        tool = self.key if isinstance(self.key, str) else self.key.tool
        return (
            f"The outcome of this call of {tool} is unknown: an earlier attempt was cut off and may or may not have "
            f"taken effect. It was not repeated. An identical call will be refused until a person has settled it. "
            f"Do not assume either outcome: check what you can by other means, or report that it is pending."
        )


class LeaseLost(ReceiptError):
    """This attempt no longer owns the call; its outcome was not recorded.

    ``result`` is what the body returned, if it had returned (``has_result``).
    """

    def __init__(self, key: ReceiptKey | str, reason: str, *, result: object = None, has_result: bool = False) -> None:
        self.result = result
        self.has_result = has_result
        super().__init__(
            key,
            f"this attempt lost the call ({reason}); what it did is not on record here. The receipt says who owns "
            f"the call now: repeat the call to follow it",
        )


class CallTimedOut(ReceiptError, TimeoutError):
    """The body ran longer than ``timeout`` seconds and was cancelled (a thread goes on). The receipt is ``status``."""

    def __init__(self, key: ReceiptKey | str, *, timeout: float, status: str) -> None:
        self.timeout = timeout
        self.status = status
        super().__init__(
            key,
            f"the body ran longer than its time-out of {timeout:g} s and was given up; the receipt is {status}. "
            f"Repeat the call: it goes on from that"
            + (", and says AmbiguousCall until somebody settles it" if status == "ambiguous" else ""),
        )


class CallWithdrawn(ReceiptError):
    """The model was told that this call never started; a claim from before that is refused."""

    def __init__(self, key: ReceiptKey | str, *, entry: SessionEntry | None = None) -> None:
        self.entry = entry
        says = (
            f"and this claim is from before that (entry {entry.seq} of session {entry.session})"
            if entry is not None
            else "and this claim does not say from where in the session it is (no entry= and no ambient entry)"
        )
        super().__init__(
            key,
            f"the session was closed over this call, so the model was told that it did not start or what it came to, "
            f"{says}; nothing was executed. Wake the session, and call from the entry with the model's newest call: "
            f"entry= names it, where the ambient one is another",
        )


class ReceiptErased(ReceiptError):
    """The receipt was deleted by hand. That is not the same as a call that never happened."""

    def __init__(self, key: ReceiptKey | str, *, bucket: str, revision: int) -> None:
        self.bucket = bucket
        self.revision = revision
        super().__init__(
            key,
            f"a delete marker stands at revision {revision} of bucket {bucket!r}, so what happened to this call is "
            f"no longer known; nothing was executed. Find out in the outside world whether the call landed, then "
            f"settle that revision as completed or as not applied",
        )


class ResultNotSet(ReceiptError):
    """A ``call`` body ended well without setting ``call.result``."""

    def __init__(self, key: ReceiptKey | str, *, status: str) -> None:
        self.status = status
        super().__init__(
            key,
            f"the body ended without a result, so nothing was completed by accident and the receipt is {status}. "
            f"Set call.result in the body (None is a result) and settle this call by hand",
        )


class NotClaimed(ReceiptError):
    """The call could not be claimed. Nothing was executed, and this attempt never will be."""

    def __init__(self, key: ReceiptKey | str, reason: str) -> None:
        super().__init__(key, f"could not be claimed ({reason}); nothing was executed. Repeat the call later")


class NotRecorded(ReceiptError):
    """The body ran, and its outcome could not be written down. ``result`` is what it returned.

    ``kept``: this process keeps the outcome, and its next call of the same key first finishes the record.
    ``again``: the effect may be repeated, and the next call does. ``attempts`` is the number of the attempt that ran,
    and ``token`` its nonce: what is raised again of one execution has the same ones (None where no attempt is known).
    """

    def __init__(
        self,
        key: ReceiptKey | str,
        reason: str,
        *,
        result: object = None,
        has_result: bool = False,
        kept: bool = False,
        again: bool = False,
        attempts: int | None = None,
        token: str | None = None,
    ) -> None:
        self.result = result
        self.has_result = has_result
        self.kept = kept
        self.again = again
        self.attempts = attempts
        self.token = token
        finish = "repeat the call in this process, which first finishes the record, or " if kept else ""
        returned = " (.result is what it returned)" if has_result else ""
        super().__init__(
            key,
            f"it was executed, and its outcome could not be recorded{returned}: {reason}. "
            + (
                "Its effect may be repeated, and the next call does so: mend what it returns"
                if again
                else f"Do not execute it again: {finish}settle the receipt by hand"
            ),
        )


class PayloadMissing(ReceiptError):
    """A completed call's result, or a recorded step's output (``step``), is not in the object store any more."""

    def __init__(self, key: ReceiptKey | str, *, store: str, name: str, step: str | None = None) -> None:
        self.store = store
        self.name = name
        self.step = step
        done = "the call is completed" if step is None else f"its step {step!r} is done"
        way_out = (
            "Restore the object, or go on without the result"
            if step is None
            else "Restore the object: the call cannot go on without this output"
        )
        super().__init__(
            key,
            f"{done}, and its payload {name!r} is missing or damaged in object store {store!r}; it is not executed "
            f"again. {way_out}",
        )


class SealedError(ReceiptError):
    """Something that is sealed cannot be opened, or sealed: see `KeyMissing` and `SealBroken`.

    It is never treated as absent: a completed call whose result cannot be opened is not executed again. ``tenant``
    says whose key it is about, ``key_id`` which (None: the one that is sealed with now), ``what`` what is sealed.
    """

    def __init__(self, key: ReceiptKey | str, message: str, *, tenant: str, key_id: str | None, what: str) -> None:
        self.tenant = tenant
        self.key_id = key_id
        self.what = what
        super().__init__(key, message)


class KeyMissing(SealedError):
    """There is no key to open it with, or to seal it with: it was not given here, or the data was shredded."""

    def __init__(self, key: ReceiptKey | str, *, tenant: str, key_id: str | None, what: str) -> None:
        if key_id is None:
            says = f"tenant {tenant!r} has no key to seal with, so nothing was written: give it one"
        else:
            is_sealed = "are sealed" if what == "arguments" else "is sealed"
            says = (
                f"its {what} {is_sealed} with key {key_id!r} of tenant {tenant!r}, which is not to be had here: "
                f"connect with a cipher that has it. If that key was deleted, so was this"
            )
        super().__init__(key, says, tenant=tenant, key_id=key_id, what=what)


class SealBroken(SealedError):
    """The key of that id does not open it: it is another key, or what is sealed was changed or put in another place."""

    def __init__(self, key: ReceiptKey | str, *, tenant: str, key_id: str, what: str) -> None:
        does = "do" if what == "arguments" else "does"
        super().__init__(
            key,
            f"its {what} {does} not open with key {key_id!r} of tenant {tenant!r}: that is not the key it was sealed "
            f"with, or somebody has changed it or put it in another place; it is not executed again",
            tenant=tenant,
            key_id=key_id,
            what=what,
        )


class CorruptRecord(ReceiptError):
    """A value in a bucket that cannot be read. It is never treated as absent."""

    def __init__(
        self,
        bucket: str,
        key: ReceiptKey | str,
        revision: int,
        reason: str,
        *,
        of_session: bool = False,
        of_notice: bool = False,
    ) -> None:
        self.bucket = bucket
        self.revision = revision
        self.reason = reason
        kv_key = key if isinstance(key, str) else key.kv_key
        if of_notice:
            spec = f"{kv_key.rpartition('.')[0]}.spec"
            super().__init__(
                key,
                f"revision {revision} in bucket {bucket!r} cannot be read ({reason}); nothing was written. Lists that "
                f"are not told to leave it out (`unreadable=`) fail over it. Look at it with "
                f"`nats kv get {bucket} {kv_key} --revision {revision} --raw`: somebody else wrote it. Put what "
                f"belongs there, or give the notice up with `nats kv del {bucket} {spec}`",
            )
            return
        if of_session:
            super().__init__(
                key,
                f"entry {revision} in stream {bucket!r} cannot be read ({reason}); nothing was appended. Look at it "
                f"with `nats stream get {bucket} {revision}`: somebody else wrote it. Go on in a new session, with the "
                f"messages of this one that can be read",
            )
            return
        super().__init__(
            key,
            f"revision {revision} in bucket {bucket!r} cannot be read ({reason}); nothing was executed. "
            f"Look at it with `{on_key(f'nats kv get {bucket}', kv_key, f'--revision {revision} --raw')}` and put "
            f"back the last good revision from `{on_key(f'nats kv history {bucket}', kv_key)}`",
        )


class ResultTypeMismatch(ReceiptError):
    """A recorded result does not fit ``result_type``. ``result`` is the recorded value; nothing was executed again."""

    def __init__(self, key: ReceiptKey | str, problem: str, *, result: object) -> None:
        self.result = result
        super().__init__(
            key,
            f"the call is completed, and its recorded result does not fit the result_type that was asked for "
            f"({problem}); it is not executed again. Ask for the type that it was recorded with",
        )


class StepRepeated(ReceiptError):
    """One attempt used the name of a step twice."""

    def __init__(self, key: ReceiptKey | str, step: str) -> None:
        self.step = step
        super().__init__(key, f"step {step!r} was used before in this attempt: give each step a name of its own")


class StaleRevision(ReceiptError):
    """The receipt moved on after it was looked at, so nothing was settled."""

    def __init__(self, key: ReceiptKey | str, *, revision: int, current: int, status: str) -> None:
        self.revision = revision
        self.current = current
        self.status = status
        super().__init__(
            key,
            f"revision {revision} is not the newest: the receipt is {status} at revision {current}. Nothing was "
            f"settled; look at it again and settle that revision if it still needs it",
        )


class NotResolvable(ReceiptError):
    """A receipt in this state is not for a person to settle."""

    def __init__(self, key: ReceiptKey | str, *, status: str, reason: str) -> None:
        self.status = status
        super().__init__(key, f"a receipt that is {status} cannot be settled from outside: {reason}")


class SessionBusy(NatsReceiptsError):
    """A call of the session is running under a live lease: another worker is at it. Nothing was appended.

    Come back in ``retry_after`` seconds.
    """

    def __init__(self, tenant: str, session: str, *, retry_after: float, calls: tuple[str, ...]) -> None:
        self.tenant = tenant
        self.session = session
        self.retry_after = retry_after
        self.calls = calls
        super().__init__(
            f"session {session} of {tenant}: another worker is executing {', '.join(calls)} under a live lease; "
            f"nothing was appended, come back in {retry_after:.1f} s"
        )


class SessionConflict(NatsReceiptsError):
    """Somebody else wrote to the session first. ``missed`` are the entries that this log had not seen.

    Nothing was appended. The log has them now: look at them, and append again if it still makes sense.
    """

    def __init__(self, tenant: str, session: str, *, missed: tuple[SessionEntry, ...]) -> None:
        self.tenant = tenant
        self.session = session
        self.missed = missed
        plural = "entry that this log had" if len(missed) == 1 else "entries that this log had"
        super().__init__(
            f"session {session} of {tenant} has {len(missed)} {plural} not seen (.missed), so nothing was appended. "
            f"Look at them, and append again if that still makes sense"
        )


class UnsupportedRecord(ReceiptError):
    """A record of a newer format than this version reads."""

    def __init__(
        self, bucket: str, key: ReceiptKey | str, revision: int, version: object, *, of_session: bool = False
    ) -> None:
        self.bucket = bucket
        self.revision = revision
        self.version = version
        where = f"entry {revision} in stream" if of_session else f"revision {revision} in bucket"
        super().__init__(
            key,
            f"{where} {bucket!r} has format version {brief(version)}, and this version of natsreceipts reads "
            f"version 1; nothing was executed and nothing written. Upgrade natsreceipts in this worker",
        )


class InvalidFact(NatsReceiptsError):
    """What a notice was to say is beyond its bound; nothing was written. ``field`` names the place, ``limit`` why."""

    def __init__(self, field: str, limit: str) -> None:
        self.field = field
        self.limit = limit
        named = field if field.isprintable() and len(field) <= 80 else brief(field)
        super().__init__(f"{named} cannot stand in a notice: {limit}. A notice is never cut to fit: say less in it")


class NoticeConflict(NatsReceiptsError):
    """Another notice stands under this id. ``existing`` is what it says, ``refused`` what was to be filed.

    ``existing`` is None where the notice was deleted by hand. ``key`` is the KV key.
    """

    def __init__(self, key: str, *, existing: NoticeSpec | None, refused: NoticeSpec) -> None:
        self.key = key
        self.existing = existing
        self.refused = refused
        stands = "a delete marker stands there" if existing is None else "it says something else (`existing`)"
        super().__init__(
            f"{key}: this notice was filed before, and {stands}; `natsreceipts notices show {key}` shows it. It was "
            f"not overwritten. Two decisions need two request ids; a step that is carried out again must say the same"
        )


class AlreadyConsumed(NatsReceiptsError):
    """Another turn has carried this notice: ``by`` names it, ``consumed_at`` says when (milliseconds since the epoch).

    ``key`` is the KV key of the consumption.
    """

    def __init__(self, key: str, *, by: str, consumed_at: int) -> None:
        self.key = key
        self.by = by
        self.consumed_at = consumed_at
        super().__init__(f"{key}: {brief(by)} has carried this notice, {_at(consumed_at)}: leave it out of this turn")


def _at(milliseconds: int) -> str:
    try:
        time = dt.datetime.fromtimestamp(milliseconds / 1000, dt.UTC)
    except (OverflowError, OSError, ValueError, TypeError):  # what no calendar has
        return f"at {milliseconds} ms"
    return f"at {time.isoformat(' ', 'milliseconds').replace('+00:00', 'Z')}"


def with_key(error: NatsReceiptsError, key: ReceiptKey | str) -> NatsReceiptsError:
    """Fill in the key of an error that arose below the level where keys are known."""
    if getattr(error, "key", None) is None:
        cast("Any", error).key = key
        error.args = (f"{_named(key)}: {error.args[0]}", *error.args[1:])
    return error
