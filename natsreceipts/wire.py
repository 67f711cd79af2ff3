"""The records as they stand in the buckets: the only place where their bytes are made or read.

Every value is JSON with ``"v": 1`` and camelCase names (docs/wire.md), so ``nats kv get BUCKET KEY --raw | jq``
reads it. Unknown fields of a known version are ignored; a newer version raises `UnsupportedRecord`, anything
that does not read as a consistent record raises `CorruptRecord`, and neither is ever treated as absent.
"""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self, cast

import pydantic
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import from_json, to_json

from natsreceipts.decision import Effect
from natsreceipts.dialects.base import ErrorKind  # noqa: TC001 - pydantic reads it
from natsreceipts.errors import CorruptRecord, NatsReceiptsError, UnsupportedRecord
from natsreceipts.identity import ReceiptKey, split_kv_key
from natsreceipts.payload import NotEncodable, normal_form, pack, unpack

__all__ = [
    "CloseInfo",
    "EntryKind",
    "EntryRecord",
    "ErrorInfo",
    "Holder",
    "ObjectRef",
    "Payload",
    "ReceiptRecord",
    "ReceiptSaid",
    "Recorded",
    "ResolvedBy",
    "SealedBox",
    "Status",
    "encode_payload",
    "error_info",
    "fresh_body",
    "fresh_receipt",
    "quick_result",
    "read_entry",
    "read_receipt",
]

Status = Literal["running", "completed", "failed", "ambiguous", "withdrawn"]

_SAFE = 2**53 - 1
"""The largest whole number that a record holds: what JavaScript reads exactly, too."""

_ERROR_TEXT = 2000
"""Characters of an error's message that a record keeps."""


class _Wire(pydantic.BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        strict=True,
        frozen=True,
        protected_namespaces=(),
    )

    def to_bytes(self) -> bytes:
        """The UTF-8 JSON of the fields that were set, under their wire names."""
        return self.__pydantic_serializer__.to_json(self, by_alias=True, exclude_unset=True)


class SealedBox(_Wire):
    """What is sealed, in base64: nonce, ciphertext and tag. ``key`` is the id of one of the tenant's keys."""

    key: str
    data: str

    def raw(self) -> bytes:
        """What is sealed, as bytes. Raises ValueError."""
        try:
            return base64.b64decode(self.data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error


class ObjectRef(_Wire):
    """Where a payload is that was moved to the object store. ``size`` in bytes.

    ``sealed_with``: the id of the key that it is sealed with; the object is then what a `SealedBox` holds.
    """

    name: str
    digest: str
    size: int
    sealed_with: str | None = None


class Payload(_Wire):
    """A result, a step's output or stored arguments: exactly one of the four forms."""

    json_value: Any = Field(default=None, alias="json")
    msgpack: str | None = None
    object: ObjectRef | None = None
    sealed: SealedBox | None = None

    @pydantic.model_validator(mode="after")
    def _one_form(self) -> Self:
        given = self.model_fields_set
        others = (self.msgpack, self.object, self.sealed)
        if len(given) != 1 or (given != {"json_value"} and others == (None, None, None)):
            raise ValueError("a payload has one of json, msgpack, object and sealed")
        return self

    @property
    def sealed_with(self) -> str | None:
        """The id of the key that it is sealed with, wherever it is kept."""
        if self.sealed is not None:
            return self.sealed.key
        return self.object.sealed_with if self.object is not None else None

    def value(self) -> Any:
        """The recorded value. Raises ValueError where it is unreadable, sealed, or in the object store."""
        if self.sealed is not None:
            raise ValueError("it is sealed")
        if self.object is not None:
            raise ValueError("it is in the object store")
        if self.msgpack is None:
            return self.json_value
        try:
            return unpack(base64.b64decode(self.msgpack, validate=True))
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error


def encode_payload(value: object) -> tuple[bytes, Any]:
    """The JSON of a payload for a value, and the value as a replay would give it. Raises `payload.NotEncodable`."""
    # What comes back equal from JSON, as deep down as it will stand in a record, is held by JSON: no look at the
    # types is needed, and a look in Python costs twice as much. Whatever differs or fails is looked at.
    try:
        text = b'{"json":%b}' % to_json(value, inf_nan_mode="null")
        plain = from_json(b"[[[%b]]]" % text)[0][0][0]["json"]
        if plain == value:
            return text, plain
    except Exception:  # noqa: BLE001, S110 - foreign values may fail in any way here, and are looked at below
        pass
    plain, json_holds = normal_form(value)
    if json_holds:
        return b'{"json":%b}' % to_json(plain), plain
    packed = pack(plain)
    try:
        return b'{"msgpack":"%b"}' % base64.b64encode(packed), unpack(packed)
    except ValueError as error:
        raise NotEncodable(f"it could not be read back: {error}") from error


class Holder(_Wire):
    """Whose attempt it is: a nonce of the attempt, and which worker, for people (``host/pid``)."""

    token: str
    worker: str


class ErrorInfo(_Wire):
    """Why an attempt did not complete; ``not_applied`` speaks of the call, not of the attempt.

    Where the message is sealed, ``message`` is empty.
    """

    type: str
    message: str
    not_applied: bool = False
    sealed: SealedBox | None = None


def error_info(error: BaseException, *, not_applied: bool = False) -> ErrorInfo:
    """What a record keeps of an exception: its class and the first 2,000 characters of its message.

    An exception with a ``recorded_as`` only carries that one, of which this is then said.
    """
    carried = getattr(error, "recorded_as", None)
    error = carried if isinstance(carried, BaseException) else error
    kind = type(error)
    try:
        text = str(error)
    except Exception as unreadable:  # noqa: BLE001 - a host's exception may fail at its own text
        text = f"(its text could not be made: {type(unreadable).__name__})"
    return ErrorInfo(
        type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=text[:_ERROR_TEXT].encode(errors="backslashreplace").decode(),
        not_applied=not_applied,
    )


@lru_cache(maxsize=4096)
def _names(tenant: str, run: str, tool: str) -> bytes:
    return b'"tenantId":%b,"runId":%b,"toolName":%b,"argsHash":"' % (to_json(tenant), to_json(run), to_json(tool))


def fresh_body(key: ReceiptKey, *, effect: Effect, lease_ms: int, token: str, worker: bytes) -> bytes:
    """The fields that the two records of a fresh call have in common. ``worker`` as JSON.

    A fresh call's records are put together from their pieces, for a fifth of what the model costs (measured); a
    test holds both ways to the same bytes.
    """
    rest = f'{key.args_hash}","effect":"{effect.value}","attempts":1,"leaseMs":{lease_ms},"holder":{{"token":"{token}"'
    return b'%b%b,"worker":%b}' % (_names(key.tenant, key.run, key.tool), rest.encode(), worker)


def fresh_receipt(body: bytes, *, write: str, status: Status, result: bytes = b"") -> bytes:
    """A record of a fresh call: running, or with its result (a payload's JSON) completed."""
    said = b',"result":%b' % result if result else b""
    return b'{"v":1,"write":"%b","status":"%b",%b%b}' % (write.encode(), status.encode(), body, said)


class ResolvedBy(_Wire):
    """Who settled the call from outside, and why."""

    by: str
    reason: str


class ReceiptRecord(_Wire):
    """One revision of a receipt (design of the record: docs/wire.md).

    ``write`` is a nonce of the write that made this revision. Milliseconds in ``lease_ms``. Times are not in the
    value: they are the server's timestamps of the revisions.
    """

    v: int = Field(ge=1, le=1)
    write: str
    status: Status
    tenant_id: str
    run_id: str
    tool_name: str
    args_hash: str
    effect: Effect | None = None
    attempts: int = Field(ge=0, le=_SAFE)
    lease_ms: int | None = Field(default=None, ge=1, le=_SAFE)
    holder: Holder | None = None
    args: Payload | None = None
    steps: dict[str, Payload] | None = None
    result: Payload | None = None
    error: ErrorInfo | None = None
    resolved: ResolvedBy | None = None
    open: bool = False
    fences: dict[str, int] | None = None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.status == "withdrawn":
            if self.attempts:
                raise ValueError("a withdrawn record has no attempts")
            return self
        if self.attempts < 1 or self.effect is None or self.effect is Effect.READ:
            raise ValueError(f"a {self.status} record has an effect and at least one attempt")
        if self.status == "running" and (self.holder is None or self.lease_ms is None):
            raise ValueError("a running record has a holder and a lease")
        if self.status == "completed" and self.result is None:
            raise ValueError("a completed record has a result")
        return self

    @property
    def key(self) -> ReceiptKey:
        """The names that the record is about."""
        return ReceiptKey(self.tenant_id, self.run_id, self.tool_name, self.args_hash)

    @property
    def not_applied(self) -> bool:
        """Whether the record says that the call did not have its effect and can no longer have it."""
        return self.status == "failed" and self.error is not None and self.error.not_applied


def read_receipt(bucket: str, key: ReceiptKey | str, revision: int, value: bytes) -> ReceiptRecord:
    """Read one revision of the receipt ``key`` (a KV key where no names are known).

    Raises `UnsupportedRecord` for a newer format and `CorruptRecord` for a value that does not read, is not
    consistent in itself, or whose names are not those of its key.
    """
    try:
        record = ReceiptRecord.model_validate_json(value)
    except pydantic.ValidationError as error:
        version = _version(value)
        if type(version) is int and version > 1:
            raise UnsupportedRecord(bucket, key, revision, version) from error
        raise CorruptRecord(bucket, key, revision, _first_problem(error)) from error
    try:
        if isinstance(key, ReceiptKey):
            names = (record.tenant_id, record.run_id, record.tool_name, record.args_hash)
            names_match = names == (key.tenant, key.run, key.tool, key.args_hash)
        else:
            names_match = record.key.kv_key == key
    except NatsReceiptsError as error:
        raise CorruptRecord(bucket, key, revision, str(error)) from error
    if not names_match:
        raise CorruptRecord(bucket, key, revision, "its names are those of another call")
    return record


class Recorded(NamedTuple):
    """A completed call's result, of which attempt, and under which revision."""

    result: Any
    attempts: int
    revision: int


def quick_result(key: ReceiptKey, revision: int, value: bytes) -> Recorded | None:
    """The result of a record that plainly holds this call's, in JSON.

    For replays: a fifth of what `read_receipt` costs. None says nothing: read it in full.
    """
    try:
        record = from_json(value)
        result = record["result"]
        plainly = (
            type(record["v"]) is int
            and record["v"] == 1
            and record["status"] == "completed"
            and record["argsHash"] == key.args_hash
            and record["toolName"] == key.tool
            and record["runId"] == key.run
            and record["tenantId"] == key.tenant
            and type(record["attempts"]) is int
            and 0 < record["attempts"] <= _SAFE
            and len(result) == 1
        )
        return Recorded(result["json"], record["attempts"], revision) if plainly else None
    except (ValueError, KeyError, TypeError):
        return None


EntryKind = Literal["message", "marker", "suspend", "resume", "compaction"]


class CloseInfo(_Wire):
    """That a result is a close: of which call, and in which of the two honest states it leaves it."""

    tool_call_id: str
    error_kind: ErrorKind


class ReceiptSaid(_Wire):
    """What a receipt said when a result was written into a session by its word.

    ``key`` is the receipt's KV key, ``revision`` the one that was read or written (0: there was none), ``status`` what
    it said, ``attempts`` how many there were.
    """

    tool_call_id: str
    tool_name: str
    key: str
    revision: int = Field(ge=0, le=_SAFE)
    status: str
    attempts: int = Field(ge=0, le=_SAFE)


class EntryRecord(_Wire):
    """One entry of a session (docs/wire.md). ``id`` is a nonce; the entry's place and time are the server's."""

    v: int = Field(ge=1, le=1)
    id: str = Field(min_length=1)
    parent_id: str | None
    kind: EntryKind
    run_id: str | None = None
    dialect: str
    body: dict[str, Any] = Field(default_factory=dict)
    sealed: SealedBox | None = None
    close: CloseInfo | None = None
    receipt: ReceiptSaid | None = None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sealed is not None and self.kind in ("message", "marker", "compaction"):
            if self.body:
                raise ValueError("an entry that is sealed has no body beside it")
            return self
        if self.sealed is not None or "body" not in self.model_fields_set:
            raise ValueError(f"a {self.kind} has a body")
        if self.kind in ("suspend", "resume"):
            ids = self.body.get("toolCallIds")
            if not isinstance(ids, list) or not all(type(each) is str for each in cast("list[object]", ids)):
                raise ValueError(f"a {self.kind} lists its toolCallIds")
        if self.kind == "compaction":
            kept = self.body.get("keepFrom")
            if not isinstance(self.body.get("message"), dict) or not (kept is None or type(kept) is str):
                raise ValueError("a compaction has a message, and the id of the first entry that it keeps, or null")
        return self


def read_entry(stream: str, key: str, seq: int, value: bytes) -> EntryRecord:
    """Read one entry of the session ``key`` (``<tenant>.<session>``). Raises `UnsupportedRecord`, `CorruptRecord`.

    An entry that names a receipt of another tenant is corrupt: who may write a log is not let into others' receipts.
    """
    try:
        record = EntryRecord.model_validate_json(value)
    except pydantic.ValidationError as error:
        version = _version(value)
        if type(version) is int and version > 1:
            raise UnsupportedRecord(stream, key, seq, version, of_session=True) from error
        raise CorruptRecord(stream, key, seq, _first_problem(error), of_session=True) from error
    if record.receipt is not None:
        try:
            tenant = split_kv_key(record.receipt.key)[0]
        except NatsReceiptsError as error:
            raise CorruptRecord(stream, key, seq, f"its receipt: {error}", of_session=True) from error
        if tenant != key.partition(".")[0]:
            raise CorruptRecord(stream, key, seq, "its receipt is one of another tenant", of_session=True)
    return record


def _version(value: bytes) -> object:
    try:
        record = from_json(value)
    except ValueError:
        return None
    return record.get("v") if isinstance(record, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _first_problem(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
