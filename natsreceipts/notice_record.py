"""The two records of a run notice as they stand in the bucket: the only place where their bytes are made or read. Pure.

Written are exactly the fields of the published layout, in the order in which its own writer has them and with each
value in canonical JSON. Read is whatever holds them within their bound; unknown fields of a known version are ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple, cast

from natsreceipts.errors import CorruptRecord, InvalidFact, InvalidName, UnsupportedRecord, brief
from natsreceipts.identity import canonical_json
from natsreceipts.notice import RunNoticeFact, is_safe, notice_addressee_id

__all__ = ["FiledNotice", "Notice", "NoticeSpec", "NoticeStatus", "corrupt", "read_spec", "read_status"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSpec:
    """What was filed, with exactly the fields that are written. ``at`` in milliseconds since the epoch.

    ``step`` is the step that decided it, in the host's own words; ``addressee`` the agent's name, of which the key
    has only the digest.
    """

    v: int = 1
    run: str
    step: str
    addressee: str
    fact: RunNoticeFact
    at: int

    def to_bytes(self) -> bytes:
        """The UTF-8 JSON of the record."""
        said = {"v": self.v, "run": self.run, "step": self.step, "addressee": self.addressee}
        return _json_of({**said, "fact": self.fact.fields(), "at": self.at})


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeStatus:
    """That a turn carried the notice, with exactly the fields that are written: which one, and when (milliseconds).

    ``observed_spec_revision`` is the revision of the spec that it had read.
    """

    v: int = 1
    consumed_at: int
    by: str
    observed_spec_revision: int

    def to_bytes(self) -> bytes:
        """The UTF-8 JSON of the record."""
        said = {"v": self.v, "consumedAt": self.consumed_at, "by": self.by}
        return _json_of({**said, "observedSpecRevision": self.observed_spec_revision})


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice as it stands in the bucket; ``consumed`` is None until a turn has carried it."""

    notice_id: str
    spec: NoticeSpec
    spec_revision: int
    consumed: NoticeStatus | None = None


class FiledNotice(NamedTuple):
    """What filing a notice came to: its key in the bucket, its id, and whether it was not there before."""

    key: str
    notice_id: str
    created: bool


def _json_of(fields: dict[str, object]) -> bytes:
    return _written(fields).encode()


def _written(value: object) -> str:
    if not isinstance(value, dict):
        return canonical_json(value)
    fields = cast("dict[str, object]", value)
    return f"{{{','.join(f'{canonical_json(name)}:{_written(inner)}' for name, inner in fields.items())}}}"


def corrupt(bucket: str, key: str, revision: int, reason: str) -> CorruptRecord:
    """The error for a record of a notice that does not read, or does not fit to its other half."""
    return CorruptRecord(bucket, key, revision, reason, of_notice=True)


def read_spec(bucket: str, key: str, revision: int, value: bytes) -> NoticeSpec:
    """Read the spec under ``key``. Raises UnsupportedRecord for a newer format, CorruptRecord for what does not read.

    What does not read is also a fact beyond its bound, and names that are not those of the key.
    """
    record = _record(bucket, key, revision, value)
    _, _, run, addressee_id, _, _ = key.split(".")
    try:
        fact = RunNoticeFact.of(record.get("fact"))
    except InvalidFact as error:
        raise corrupt(bucket, key, revision, f"its fact: {brief(error.field)}: {error.limit}") from error
    step, addressee, at = record.get("step"), record.get("addressee"), record.get("at")
    if not isinstance(step, str) or not isinstance(addressee, str) or not is_safe(at):
        raise corrupt(bucket, key, revision, "its step, addressee or at is none")
    try:
        meant = notice_addressee_id(addressee)
    except InvalidName as error:
        raise corrupt(bucket, key, revision, f"its addressee: {error.reason}") from error
    if record.get("run") != run or meant != addressee_id:
        raise corrupt(bucket, key, revision, "its run or addressee is not the one of its key")
    return NoticeSpec(run=run, step=step, addressee=addressee, fact=fact, at=cast("int", at))


def read_status(bucket: str, key: str, revision: int, value: bytes) -> NoticeStatus:
    """Read the status under ``key``. Raises as `read_spec`."""
    record = _record(bucket, key, revision, value)
    by, at, observed = record.get("by"), record.get("consumedAt"), record.get("observedSpecRevision")
    if not isinstance(by, str) or not by or not is_safe(at) or not is_safe(observed):
        raise corrupt(bucket, key, revision, "its by, consumedAt or observedSpecRevision is none")
    return NoticeStatus(consumed_at=cast("int", at), by=by, observed_spec_revision=cast("int", observed))


def _record(bucket: str, key: str, revision: int, value: bytes) -> dict[str, object]:
    try:
        record: object = json.loads(value.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise corrupt(bucket, key, revision, f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise corrupt(bucket, key, revision, "not a JSON object")
    found = cast("dict[str, object]", record)
    version = found.get("v")
    if type(version) is int and version > 1:
        raise UnsupportedRecord(bucket, key, revision, version)
    if type(version) is not int or version != 1:
        raise corrupt(bucket, key, revision, "it has no format version")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
