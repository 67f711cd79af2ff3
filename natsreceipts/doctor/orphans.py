"""Payloads that no record names: a worker was killed between storing one and writing the record that names it."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import TYPE_CHECKING

from natsreceipts._jetstream import subject_pages
from natsreceipts._jetstream.seam import nanoseconds
from natsreceipts.doctor.finding import Finding, ok, unverified
from natsreceipts.doctor.records import SHOWN, objects_of, readable, some

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from natsreceipts._jetstream import Bucket, JetStreamObjects
    from natsreceipts.doctor.site import Site

__all__ = ["leftovers"]

_AT_ONCE = 64

_OLD = 3600.0
"""Seconds after which nobody is between storing a payload and naming it any more."""

_MOST_DATED = 100
"""Unfinished payloads whose age is looked at: each costs a chunk."""


async def leftovers(site: Site) -> AsyncIterator[Finding]:
    """Payloads that no kept revision of a record names, and parts of payloads that were never finished."""
    bucket, objects = site.all_receipts, site.objects
    if bucket is None or objects is None:
        yield unverified("payloads, orphans", "the receipts or the object store were not to be seen")
        return
    clock = await site.patiently(bucket, lambda timeout: bucket.clock(timeout=timeout))
    prefix = f"$O.{site.payloads.name}."
    finished: set[str] = set()
    found: list[str] = []
    count = read = 0
    async for page in subject_pages(site.link, site.payloads.stream, f"{prefix}M.>", timeout=site.timeout):
        for start in range(0, len(page), _AT_ONCE):
            names = [name for each in page[start : start + _AT_ONCE] if (name := _decoded(each)) is not None]
            metas = await asyncio.gather(*(objects.look(name, timeout=site.timeout) for name in names))
            stamps = {name: meta.stamp for name, meta in zip(names, metas, strict=True) if meta is not None}
            finished.update(meta.nuid for meta in metas if meta is not None)
            old = [name for name, stamp in stamps.items() if _is_old(stamp, clock.now)]
            for name in await _unnamed(site, bucket, old):
                count += 1
                if len(found) < SHOWN:
                    found.append(name)
            read += len(names)
        if read >= site.most:
            yield unverified("payloads, bounded", f"only the first {read:,} payloads were looked at", fix="--most N")
            break
    else:
        unfinished = [nuid async for nuid in _unfinished(site, objects, finished, clock.now)]
        if unfinished:
            at_least = "at least " if len(unfinished) >= _MOST_DATED else ""
            yield ok(
                "payloads, unfinished",
                f"{at_least}{len(unfinished):,} were never stored to their end, and nothing can name them",
                fix=f"nats stream purge {site.payloads.stream} --subject='{prefix}C.{unfinished[0]}', for each, if you "
                f"want the room",
                keys=tuple(unfinished[:SHOWN]),
            )
    if not count:
        yield ok("payloads, orphans", f"{read:,} payloads; each that is an hour old is named by a record")
        return
    yield ok(
        "payloads, orphans",
        f"{count:,} of {read:,} payloads are named by no record, left by workers that were killed: "
        f"{some(found, count)}. They do no harm",
        fix=f"nats object rm {site.payloads.name} {found[0]}, for each, if you want the room",
        keys=tuple(found),
    )


def _decoded(subject: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(subject.rpartition(".")[2]).decode()
    except (binascii.Error, ValueError):
        return None


def _is_old(stamp: str, now: int) -> bool:
    return bool(stamp) and (now - nanoseconds(stamp)) / 1e9 > _OLD


async def _unnamed(site: Site, bucket: Bucket, names: list[str]) -> list[str]:
    """Which of the objects no kept revision names. An object's name begins with the KV key of its record."""
    by_key: dict[str, set[str]] = {}
    for name in names:
        by_key.setdefault(".".join(name.split(".")[:4]), set()).add(name)
    keys = [key for key in by_key if key.count(".") == 3]
    entries = await site.patiently(bucket, lambda timeout: bucket.newest_each(keys, timeout=timeout)) if keys else []
    for entry in entries:
        record = readable(site, entry)
        if record is not None:
            by_key[entry.key].difference_update(objects_of(record))
    for key in keys:
        revision, whole = 0, not by_key[key]
        while not whole:
            older, whole = await site.patiently(
                bucket, lambda timeout, key=key, revision=revision: bucket.since(key, revision, timeout=timeout)
            )
            for entry in older:
                revision = entry.revision
                record = readable(site, entry)
                if record is not None:
                    by_key[key].difference_update(objects_of(record))
                elif not entry.erased:
                    by_key[key].clear()  # nobody knows what it names
    return [name for named in by_key.values() for name in sorted(named)]


async def _unfinished(site: Site, objects: JetStreamObjects, finished: set[str], now: int) -> AsyncIterator[str]:
    dated = 0
    chunks = f"$O.{site.payloads.name}.C.>"
    async for page in subject_pages(site.link, site.payloads.stream, chunks, timeout=site.timeout):
        for subject in page:
            nuid = subject.rpartition(".")[2]
            if nuid in finished:
                continue
            dated += 1
            if dated > _MOST_DATED:
                return
            stamp = await objects.chunk_time(nuid, timeout=site.timeout)
            if stamp is not None and _is_old(stamp, now):
                yield nuid
