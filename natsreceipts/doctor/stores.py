"""The stores' settings against the design, their replicas, and how long they keep things."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from natsreceipts._jetstream import ANEW, edit_of, findings, objects_findings, partitions_in
from natsreceipts.doctor.finding import Finding, error, ok, unverified, warning
from natsreceipts.doctor.site import seconds_kept, span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from natsreceipts._jetstream import Finding as Weakness
    from natsreceipts.doctor.site import Site, Store

__all__ = ["persist_mode", "replicas", "retention", "settings"]

_DAY = 86_400.0


def settings(site: Site) -> Iterator[Finding]:
    """Each store's settings, by the same comparison that `connect` makes."""
    for store in site.stores:
        check = f"{store.title}, settings"
        if store.problem is not None:
            yield unverified(check, str(store.problem))
        elif store.info is None:
            yield error(check, "it does not exist", fix=f"make it with `{site.command('up')}`")
        else:
            yield from _compared(site, store, check)
    for store in site.receipts:
        there = partitions_in(store.config)
        if store.info is not None and there != len(site.receipts):
            yield error(
                f"{store.title}, partitions",
                f"it is one of {there}, and {site.sessions.title} says that there are {len(site.receipts)}",
                fix="put back the buckets and the stream that belong together, from one backup",
            )


def _compared(site: Site, store: Store, check: str) -> Iterator[Finding]:
    found = _found(site, store)
    for each in found:
        if each.setting == "persist_mode":  # has a line of its own
            continue
        name = f"{store.title}, {each.setting}"
        level = error if each.refused or _breaks(store, each.setting) else warning
        yield level(name, f"it {each.text}", fix=edit_of(store.stream, [each]))
    if not found:
        yield ok(check, "as they should be")


def _found(site: Site, store: Store) -> list[Weakness]:
    if store.wanted.kind == "object store":
        return objects_findings(store.config, retention=site.kept)
    return findings(store.config, lease=site.lease, of_sessions=store.of_sessions)


def _breaks(store: Store, setting: str) -> bool:
    """What `connect` lets pass, and what loses results all the same."""
    return store.wanted.kind == "object store" and setting == "max_age"


def replicas(site: Site) -> Iterator[Finding]:
    """How many servers hold each store, and whether they all keep up."""
    there = [store for store in site.stores if store.info is not None]
    if not there:
        yield unverified("replicas", "no store was to be seen")
        return
    counts = {store.name: int(store.config.get("num_replicas") or 1) for store in there}
    edit = "; ".join(f"nats stream edit {store.stream} --replicas=3" for store in there if counts[store.name] < 3)
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        yield warning(
            "replicas", f"they differ ({said}): what fails first takes the others with it", fix=edit or _same(there)
        )
    elif set(counts.values()) == {1}:
        yield warning(
            "replicas",
            "one server holds each store: if it is down no call is made, and if its disk is lost, so are the receipts",
            fix=f"in a cluster of three or more: {edit}",
        )
    elif set(counts.values()) == {2}:
        yield warning("replicas", "two servers hold each store: no call is made while either of them is down", fix=edit)
    else:
        yield ok("replicas", f"{max(counts.values())} servers hold each store")
    behind = [f"{store.name} on {name}" for store in there for name in _behind(store)]
    if behind:
        yield warning(
            "replicas, up to date",
            f"some are behind or not there: {', '.join(behind)}",
            fix="bring those servers back; `nats stream report` shows how far they are",
        )


def _same(stores: list[Store]) -> str:
    return "; ".join(f"nats stream edit {store.stream} --replicas=N, the same N for all" for store in stores)


def _behind(store: Store) -> Iterator[str]:
    cluster: dict[str, Any] = (store.info or {}).get("cluster") or {}
    others: list[dict[str, Any]] = cluster.get("replicas") or []
    for replica in others:
        if replica.get("offline") or not replica.get("current"):
            yield str(replica.get("name"))


def retention(site: Site) -> Iterator[Finding]:
    """How long receipts are kept, and whether what belongs to them is kept for as long."""
    if any(store.info is None for store in site.receipts):
        yield unverified("retention", "how long receipts are kept was not to be seen")
        return
    kept = site.kept
    if kept:
        yield ok("retention", f"receipts are kept for {span(kept)}; after that their calls can be executed again")
    else:
        yield ok("retention", "receipts are kept for ever")
    for store, least in ((site.payloads, kept + _DAY), (site.notices, kept), (site.sessions, kept)):
        age = seconds_kept(store)
        check = f"{store.title}, retention"
        if store.info is None or not age:
            continue
        if store is site.payloads and age < (kept or math.inf):
            continue  # said among its settings
        if any(each.setting == "max_age" for each in _found(site, store)):
            continue  # so is this, with another fix for it
        if not kept or age < least:
            hours = f"{math.ceil(least / 3600)}h" if kept else "0"
            yield warning(
                check,
                f"it keeps things for {span(age)}, and receipts are kept {'for ' + span(kept) if kept else 'for ever'}",
                fix=f"nats stream edit {store.stream} --max-age={hours}",
            )


def persist_mode(site: Site) -> Iterator[Finding]:
    """Whether a write is in the server's file before it is acknowledged."""
    there = [store for store in site.stores if store.info is not None]
    weak = [store for store in there if store.config.get("persist_mode") == "async"]
    for store in weak:
        yield warning(
            f"{store.title}, persist_mode",
            "async: it acknowledges before it writes, so that a crash of the server loses receipts, also with "
            "sync_interval: always",
            fix=ANEW,
        )
    if not weak:
        yield ok("persist_mode", "default") if there else unverified("persist_mode", "no store was to be seen")
