"""The receipts: what waits for a person, what cannot be read, and whether it fits the payloads and the sessions."""

from __future__ import annotations

import asyncio
import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from natsreceipts._jetstream import subject_pages
from natsreceipts.attempt import margin_of
from natsreceipts.doctor.finding import Finding, error, ok, unverified, warning
from natsreceipts.doctor.site import span
from natsreceipts.errors import CorruptRecord, UnsupportedRecord
from natsreceipts.wire import ReceiptRecord, read_receipt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from natsreceipts._jetstream import Bucket, Clock, Entry
    from natsreceipts.doctor.site import Site, Store

__all__ = ["SHOWN", "bounded", "key_parts", "objects_of", "readable", "receipts", "some", "unreadable"]

SHOWN = 20
"""Keys that a finding names."""

_AT_ONCE = 128
"""Records that are held in memory at a time."""

_DAY = 86_400.0

_LOOK_AGAIN = 1.0
"""Seconds after which what seemed to be missing is looked for again: a replica may have lagged."""

_MOST_MISSING = 1000


@dataclass(slots=True)
class _Tally:
    read: int = 0
    erased: list[str] = field(default_factory=list[str])
    corrupt: list[str] = field(default_factory=list[str])
    unsupported: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    ambiguous: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    stuck: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    missing: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Receipts and the objects that they name."""
    large: int = 0
    fenced: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Receipts with a fence that no session's entry had reached."""

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def note(self, kept: list[str], what: str, key: str) -> None:
        self.count(what)
        if len(kept) < SHOWN:
            kept.append(key)


def _oldest(kept: list[tuple[int, str]], time: int, key: str) -> None:
    bisect.insort(kept, (time, key))
    del kept[SHOWN:]


def objects_of(record: ReceiptRecord) -> Iterator[str]:
    """The names of the objects that a record names."""
    for payload in (record.args, record.result, *(record.steps or {}).values()):
        if payload is not None and payload.object is not None:
            yield payload.object.name


async def key_parts(site: Site, store: Store, *, at_once: int = _AT_ONCE) -> AsyncIterator[list[str]]:
    """The keys of a bucket, sorted, some at a time, up to as many as are to be read."""
    prefix = store.wanted.config["subjects"][0].removesuffix(">")
    left = site.most
    async for page in subject_pages(site.link, store.stream, prefix + ">", timeout=site.timeout):
        for start in range(0, len(page), at_once):
            part = [subject.removeprefix(prefix) for subject in page[start : start + min(at_once, left)]]
            if part:
                yield part
            left -= len(part)
            if left <= 0:
                return


def bounded(site: Site, store: Store, read: int) -> Iterator[Finding]:
    """A line where not all was read."""
    state: dict[str, Any] = store.info["state"] if store.info is not None else {}
    there = int(state.get("messages" if store.of_sessions else "num_subjects") or 0)
    if read >= site.most and there > read:
        yield unverified(
            f"{store.title}, bounded",
            f"only the first {read:,} of {there:,} were read",
            fix=f"--most {there}",
        )


async def receipts(site: Site) -> AsyncIterator[Finding]:
    """Everything about the receipts, in one pass over them."""
    bucket = site.all_receipts
    if bucket is None:
        yield unverified("receipts", "they were not to be seen")
        return
    tally = _Tally()
    bounds: list[Finding] = []
    for store, part in zip(site.receipts, bucket.parts(">"), strict=True):
        before = tally.read
        clock = await site.patiently(part, lambda timeout, part=part: part.clock(timeout=timeout))
        async for keys in key_parts(site, store):
            entries = await site.patiently(
                part, lambda timeout, part=part, keys=keys: part.newest_each(keys, timeout=timeout)
            )
            for entry in entries:
                _take(site, tally, entry, clock)
            await _look_for_payloads(site, tally, entries)
        bounds.extend(bounded(site, store, tally.read - before))
    clock = await site.patiently(bucket, lambda timeout: bucket.clock(timeout=timeout))
    for finding in _told(site, tally, clock):
        yield finding
    async for finding in _payloads(site, bucket, tally):
        yield finding
    yield await _fences(site, tally)
    for finding in bounds:
        yield finding


def readable(site: Site, entry: Entry) -> ReceiptRecord | None:
    """The record in an entry of the receipts; None where it is erased or cannot be read."""
    bucket = site.store_of(entry.key).name
    try:
        return None if entry.erased else read_receipt(bucket, entry.key, entry.revision, entry.value)
    except (CorruptRecord, UnsupportedRecord):
        return None


def _take(site: Site, tally: _Tally, entry: Entry, clock: Clock) -> None:
    tally.read += 1
    if entry.erased:
        tally.note(tally.erased, "erased", entry.key)
        return
    try:
        record = read_receipt(site.store_of(entry.key).name, entry.key, entry.revision, entry.value)
    except UnsupportedRecord:
        tally.note(tally.unsupported, "unsupported", entry.key)
        return
    except CorruptRecord:
        tally.note(tally.corrupt, "corrupt", entry.key)
        return
    if record.status == "ambiguous":
        tally.count("ambiguous")
        _oldest(tally.ambiguous, entry.time, entry.key)
    elif record.status == "running" and record.lease_ms is not None:
        lease = record.lease_ms / 1000
        if (clock.now - max(entry.time, clock.leader_since)) / 1e9 >= lease + margin_of(lease):
            tally.count("stuck")
            _oldest(tally.stuck, entry.time, entry.key)
    fence = max((record.fences or {"": 0}).values(), default=0)
    if fence > site.sessions.last_seq and len(tally.fenced) < _MOST_MISSING:
        tally.fenced.append((entry.key, fence))


async def _look_for_payloads(site: Site, tally: _Tally, entries: list[Entry]) -> None:
    objects = site.objects
    if objects is None:
        return
    for entry in entries:
        if b'"object"' not in entry.value:
            continue
        record = readable(site, entry)
        for name in objects_of(record) if record is not None else ():
            tally.large += 1
            if await objects.look(name, timeout=site.timeout) is None and len(tally.missing) < _MOST_MISSING:
                tally.missing.append((entry.key, name))


def some(keys: list[str], count: int) -> str:
    """The first of them, and how many more."""
    return keys[0] + (f" and {count - 1:,} more" if count > 1 else "")


def unreadable(
    what: str, corrupt: list[str], unsupported: list[str], counts: dict[str, int], *, fix: str
) -> Iterator[Finding]:
    """Lines about records that cannot be read; ``fix`` is for those that are corrupt."""
    if corrupt:
        count = counts["corrupt"]
        yield error(
            f"{what}, corrupt",
            f"{count:,} cannot be read: {some(corrupt, count)}",
            fix=fix,
            keys=tuple(corrupt),
        )
    if unsupported:
        count = counts["unsupported"]
        yield error(
            f"{what}, unsupported",
            f"{count:,} are written in a newer format: {some(unsupported, count)}",
            fix="upgrade natsreceipts here and in every worker: pip install -U natsreceipts",
            keys=tuple(unsupported),
        )


def _told(site: Site, tally: _Tally, clock: Clock) -> Iterator[Finding]:
    mend = "put back the last good revision: docs/operations.md, By hand"
    ours = [key for key in tally.corrupt if key.count(".") == 3]
    if ours:
        mend = f"{site.command('receipts show', ours[0])} says how to {mend}"
    yield from unreadable("receipts", tally.corrupt, tally.unsupported, tally.counts, fix=mend)
    if not tally.corrupt and not tally.unsupported:
        yield ok("receipts, readable", f"{tally.read:,} read")
    if tally.erased:
        count = tally.counts["erased"]
        yield warning(
            "receipts, erased",
            f"{count:,} were deleted by hand, and their calls are refused: {some(tally.erased, count)}",
            fix=site.command("receipts show", tally.erased[0]),
            keys=tuple(tally.erased),
        )
    yield _ambiguous(site, tally, clock)
    if not tally.stuck:
        yield ok("receipts, lease over", "none")
        return
    (time, key), count = tally.stuck[0], tally.counts["stuck"]
    yield warning(
        "receipts, lease over",
        f"{count:,} running and silent beyond their lease, {key} for {span((clock.now - time) / 1e9)}: the next "
        f"attempt takes over a repeatable call, and finds an opaque one ambiguous",
        fix=site.command("receipts ls --stuck"),
        keys=tuple(key for _, key in tally.stuck),
    )


def _ambiguous(site: Site, tally: _Tally, clock: Clock) -> Finding:
    if not tally.ambiguous:
        return ok("receipts, ambiguous", "none")
    (time, key), count = tally.ambiguous[0], tally.counts["ambiguous"]
    kept, age = site.kept, (clock.now - time) / 1e9
    text = f"{count:,} wait for a person, {key} since {span(age)}"
    fix = f"{site.command('receipts ls --ambiguous')}, and {site.command('receipts show', key)}"
    keys = tuple(key for _, key in tally.ambiguous)
    if not kept:
        return warning("receipts, ambiguous", f"{text}; they are kept for ever", fix=fix, keys=keys)
    left = kept - age
    text += f"; it expires in {span(left)}, and then its call can be executed again"
    soon = left < max(_DAY if kept > 2 * _DAY else 0.0, kept / 10)
    return (error if soon else warning)("receipts, ambiguous", text, fix=fix, keys=keys)


async def _payloads(site: Site, bucket: Bucket, tally: _Tally) -> AsyncIterator[Finding]:
    objects = site.objects
    if objects is None:
        yield unverified("receipts, payloads", "the object store was not to be seen")
        return
    gone: list[str] = []
    if tally.missing:
        await asyncio.sleep(_LOOK_AGAIN)
    for key, name in tally.missing:
        if await objects.look(name, timeout=site.timeout) is not None:
            continue
        entry = await site.patiently(bucket, lambda timeout, key=key: bucket.newest(key, timeout=timeout))
        record = readable(site, entry) if entry is not None else None
        if record is not None and name in objects_of(record):
            gone.append(key)
    gone = list(dict.fromkeys(gone))
    if not gone:
        yield ok("receipts, payloads", f"{tally.large:,} in the object store, none missing")
        return
    at_least = "at least " if len(tally.missing) >= _MOST_MISSING else ""
    yield error(
        "receipts, payloads",
        f"{at_least}{len(gone):,} name a payload that is gone (PayloadMissing): {some(gone, len(gone))}",
        fix=f"restore the stream {site.payloads.stream} from the backup that the receipts are from; what is not in it "
        f"is lost, and the calls are not executed again",
        keys=tuple(gone[:SHOWN]),
    )


async def _fences(site: Site, tally: _Tally) -> Finding:
    check = "sessions against receipts"
    if site.sessions.problem is not None:
        return unverified(check, "the session stream was not to be seen")
    last = await site.last_seq(site.sessions)
    above = [(key, fence) for key, fence in tally.fenced if fence > last]
    if not above:
        return ok(check, "no receipt has a fence above the last entry")
    key, fence = above[0]
    return error(
        check,
        f"{len(above):,} have a fence above the session stream's last sequence {last:,} ({key}: {fence:,}): the "
        f"sessions were deleted or restored apart from the receipts, and new calls are refused with CallWithdrawn",
        fix="restore both from the same moment, or begin new sessions and new runs: docs/operations.md, Backup, and "
        "restore",
        keys=tuple(key for key, _ in above[:SHOWN]),
    )
