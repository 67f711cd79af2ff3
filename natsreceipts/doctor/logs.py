"""The notices and the sessions: what cannot be read, and receipts that sessions speak of and that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from natsreceipts._jetstream import partition_of
from natsreceipts.doctor.finding import Finding, error, ok, unverified, warning
from natsreceipts.doctor.records import SHOWN, bounded, key_parts, some, unreadable
from natsreceipts.errors import CorruptRecord, UnsupportedRecord
from natsreceipts.notice_record import read_spec, read_status
from natsreceipts.wire import EntryRecord, read_entry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from natsreceipts._jetstream import Entry
    from natsreceipts.doctor.site import Site

__all__ = ["notices", "sessions"]


class _Unreadable:
    def __init__(self) -> None:
        self.corrupt: list[str] = []
        self.unsupported: list[str] = []
        self.counts: dict[str, int] = {"corrupt": 0, "unsupported": 0}
        self.read = 0

    def note(self, problem: CorruptRecord | UnsupportedRecord, key: str) -> None:
        newer = isinstance(problem, UnsupportedRecord)
        self.counts["unsupported" if newer else "corrupt"] += 1
        kept = self.unsupported if newer else self.corrupt
        if len(kept) < SHOWN:
            kept.append(key)

    @property
    def none(self) -> bool:
        return not self.corrupt and not self.unsupported


async def notices(site: Site) -> AsyncIterator[Finding]:
    """Whether every notice reads, and each status has its spec."""
    bucket = site.bucket(site.notices)
    if bucket is None:
        yield unverified("notices", "they were not to be seen")
        return
    bad = _Unreadable()
    strange: list[str] = []
    pending = 0
    spec_of = ""
    async for keys in key_parts(site, site.notices):
        entries = await site.patiently(bucket, lambda timeout, keys=keys: bucket.newest_each(keys, timeout=timeout))
        for entry in entries:
            bad.read += 1
            stem, _, kind = entry.key.rpartition(".")
            if entry.key.count(".") != 5 or not entry.key.startswith("notice.") or kind not in ("spec", "status"):
                strange.append(entry.key)
                del strange[SHOWN:]
                continue
            try:
                _check_notice(site, entry, kind, has_spec=stem == spec_of)
            except (CorruptRecord, UnsupportedRecord) as problem:
                bad.note(problem, entry.key)
            pending += 1 if kind == "spec" else -1
            spec_of = stem if kind == "spec" else spec_of
    for finding in unreadable("notices", bad.corrupt, bad.unsupported, bad.counts, fix=_notice_fix(site, bad.corrupt)):
        yield finding
    if strange:
        yield warning(
            "notices, strange keys",
            f"the bucket holds keys that are no notice's: {some(strange, len(strange))}",
            fix="keep other data in another bucket",
            keys=tuple(strange),
        )
    if bad.none:
        yield ok("notices, readable", f"{bad.read:,} records read, {max(pending, 0):,} notices carried by no turn yet")
    for finding in bounded(site, site.notices, bad.read):
        yield finding


def _notice_fix(site: Site, corrupt: list[str]) -> str:
    key = corrupt[0] if corrupt else ""
    name = site.notices.name
    return (
        f"nats kv get {name} {key} --raw shows it: put there what belongs there, or give the notice up with "
        f"nats kv del {name} {key.rpartition('.')[0]}.spec"
    )


def _session_fix(site: Site, corrupt: list[str]) -> str:
    entry = corrupt[0].rpartition(" ")[2] if corrupt else ""
    return (
        f"nats stream get {site.sessions.stream} {entry} shows it: somebody else wrote it. Go on in a new session, "
        f"with the messages of this one that can be read"
    )


def _check_notice(site: Site, entry: Entry, kind: str, *, has_spec: bool) -> None:
    if entry.erased:
        return
    if kind == "spec":
        read_spec(site.notices.name, entry.key, entry.revision, entry.value)
        return
    read_status(site.notices.name, entry.key, entry.revision, entry.value)
    if not has_spec:  # keys come sorted, a spec right before its status
        raise CorruptRecord(site.notices.name, entry.key, entry.revision, "its spec is not there")


async def sessions(site: Site) -> AsyncIterator[Finding]:
    """Whether every entry reads, and whether the receipts are as new as what sessions say of them."""
    stream = site.bucket(site.sessions)
    if stream is None:
        yield unverified("sessions", "they were not to be seen")
        return
    bad = _Unreadable()
    newest: dict[int, tuple[int, str]] = {}
    revision, whole = 0, False
    while not whole and bad.read < site.most:
        entries, whole = await site.patiently(
            stream, lambda timeout, revision=revision: stream.since(">", revision, timeout=timeout)
        )
        for entry in entries[: site.most - bad.read]:
            revision = entry.revision
            bad.read += 1
            try:
                record = _entry(site, entry)
            except (CorruptRecord, UnsupportedRecord) as problem:
                bad.note(problem, f"{entry.key} at {entry.revision}")
                continue
            if record.receipt is not None:
                said = (record.receipt.revision, record.receipt.key)
                part = partition_of(record.receipt.key, len(site.receipts))
                newest[part] = max(newest.get(part, said), said)
    for finding in unreadable(
        "sessions", bad.corrupt, bad.unsupported, bad.counts, fix=_session_fix(site, bad.corrupt)
    ):
        yield finding
    if bad.none:
        yield ok("sessions, readable", f"{bad.read:,} entries read")
    yield await _against_receipts(site, newest)
    for finding in bounded(site, site.sessions, bad.read):
        yield finding


def _entry(site: Site, entry: Entry) -> EntryRecord:
    if entry.erased:
        raise CorruptRecord(site.sessions.name, entry.key, entry.revision, "a delete marker", of_session=True)
    return read_entry(site.sessions.name, entry.key, entry.revision, entry.value)


async def _against_receipts(site: Site, said: dict[int, tuple[int, str]]) -> Finding:
    check = "receipts against sessions"
    if any(store.problem is not None for store in site.receipts):
        return unverified(check, "the receipts were not to be seen")
    for part, (newest, of) in said.items():
        last = await site.last_seq(site.receipts[part])
        if newest > last:
            return _older(check, newest, of, last)
    return ok(check, "no entry speaks of a later receipt than there is")


def _older(check: str, newest: int, of: str, last: int) -> Finding:
    return error(
        check,
        f"a session speaks of revision {newest:,} of {of}, and the last one in the bucket is {last:,}: the receipts "
        f"were deleted or restored from before the sessions, and calls that were made look as if they never were",
        fix="restore both from the same moment, or begin new sessions and new runs: docs/operations.md, Backup, and "
        "restore",
        keys=(of,),
    )
