"""What the user may do, found by harmless requests: each is one that a worker makes, for what cannot exist."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from natsreceipts._jetstream import try_publish, try_request, try_request_many
from natsreceipts.doctor.finding import Finding, error, ok, unverified, warning
from natsreceipts.errors import NatsReceiptsError, PermissionDenied
from natsreceipts.identity import key_token
from natsreceipts.notice import endpoint_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from natsreceipts.doctor.site import Site, Store

__all__ = ["NOBODY", "try_permissions"]

NOBODY = "natsreceipts-doctor"
"""The tenant whose keys are asked for, unless another is named."""

_How = Literal["ask", "ask many", "publish", "subscribe"]


class _Probe(NamedTuple):
    how: _How
    subject: str
    query: dict[str, Any] | None
    allow: str
    """The subject to be allowed."""
    lost: str
    """What does not work without it."""


async def try_permissions(site: Site, tenant: str | None) -> AsyncIterator[Finding]:
    """One line for each permission that lacks, or one for each store that lacks none."""
    for store in site.stores:
        check = f"{store.title}, permissions"
        if isinstance(store.problem, PermissionDenied):
            subject = f"$JS.API.STREAM.INFO.{store.stream}"
            yield _denied(store, _Probe("ask", subject, None, subject, "nothing works, not even to connect"))
            # What else lacks is told too: whoever edits permissions wants to do it once.
        elif store.info is None:
            yield unverified(check, "there is nothing to try them on")
            continue
        problems = 0
        for probe in _probes(store, tenant or NOBODY):
            try:
                await _tried(site, probe)
            except PermissionDenied:
                problems += 1
                yield _denied(store, probe, any_tenant=tenant is None)
            except NatsReceiptsError as problem:
                problems += 1
                yield unverified(check, f"{probe.how} {probe.subject}: {problem}")
        if not problems and store.problem is None:
            yield ok(check, "a worker's requests are let through")


async def _tried(site: Site, probe: _Probe) -> None:
    if probe.how == "publish":
        await try_publish(site.link, probe.subject, timeout=site.timeout)
    elif probe.how == "subscribe":
        await site.link.try_subscribe(probe.subject, timeout=site.timeout)
    elif probe.how == "ask many":
        await try_request_many(site.link, probe.subject, probe.query or {}, timeout=site.timeout)
    else:
        await try_request(site.link, probe.subject, probe.query, timeout=site.timeout)


def _denied(store: Store, probe: _Probe, *, any_tenant: bool = False) -> Finding:
    verb = "subscribe" if probe.how == "subscribe" else "publish"
    made = error if probe.how != "subscribe" else warning
    of_one = any_tenant and NOBODY in probe.subject and store.wanted.kind != "object store"
    hint = " (may it write the keys of one tenant alone? Then say which, with --tenant)" if of_one else ""
    return made(
        f"{store.title}, permissions",
        f"the user may not {verb} to {probe.subject}: {probe.lost}",
        fix=f'{verb}: {{ allow: "{probe.allow}" }} for this user, or no deny that covers it{hint}',
    )


def _probes(store: Store, tenant: str) -> Iterator[_Probe]:
    stream, prefix = store.stream, store.wanted.config["subjects"][0].removesuffix(">")
    direct = f"$JS.API.DIRECT.GET.{stream}"
    if store.wanted.kind == "object store":
        prefix = prefix.removesuffix("C.")
        name = base64.urlsafe_b64encode(NOBODY.encode()).decode()
        meta, chunk, everything = f"{prefix}M.{name}", f"{prefix}C.{NOBODY}", f"{prefix}>"
        if store.config.get("allow_direct", True):
            yield _Probe("ask", f"{direct}.{meta}", None, f"{direct}.>", "payloads cannot be found")
            batch = {"seq": 1, "next_by_subj": chunk, "batch": 1}
            yield _Probe("ask many", direct, batch, direct, "payloads cannot be read")
        lost = "payloads that are too large for a record cannot be stored, and their calls end as ambiguous"
        for subject in (chunk, meta):
            yield _Probe("publish", subject, None, everything, lost)
        return
    key = prefix + _key(store, tenant)
    get = f"$JS.API.STREAM.MSG.GET.{stream}"
    yield _Probe("ask", get, {"last_by_subj": key}, get, "nothing can be decided, since that is read from the leader")
    if store.config.get("allow_direct", True):
        yield _Probe("ask", f"{direct}.{key}", None, f"{direct}.>", "replays cannot be read")
        yield _Probe("ask many", direct, {"multi_last": [key]}, direct, "runs, lists and sessions cannot be read")
    yield _Probe("publish", key, None, f"{prefix}>", "nothing can be written")
    yield _Probe("subscribe", key, None, f"{prefix}>", "whoever waits for another attempt learns late of its end")


def _key(store: Store, tenant: str) -> str:
    if store.of_sessions:
        return f"{key_token(tenant)}.{NOBODY}"
    if store.name.endswith("notices"):
        return f"notice.{endpoint_of(tenant)}.{NOBODY}.nobody.nothing.spec"
    return f"{key_token(tenant)}.{NOBODY}.{NOBODY}.{'0' * 64}"
