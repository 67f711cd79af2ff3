"""The stores that the toolkit needs: made where they are missing, compared with what they should be, never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from natsreceipts._jetstream import (
    BucketSpec,
    checked_servers,
    config_of,
    findings,
    make,
    objects_config,
    objects_findings,
    opened,
    partitions_in,
    stream_config,
)
from natsreceipts.errors import InvalidName, InvalidSetting, NotProvisioned, PermissionDenied, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nats.aio.client import Client

    from natsreceipts._jetstream import Connection

__all__ = [
    "MOST_PARTITIONS",
    "Provisioned",
    "Stores",
    "Wanted",
    "agreed",
    "check_number",
    "check_usable",
    "partitioned",
    "provision",
    "wanted",
]


_Kind: TypeAlias = Literal["bucket", "object store", "stream"]
_State: TypeAlias = Literal["made", "there", "missing"]


@dataclass(frozen=True, slots=True)
class Provisioned:
    """One store: what became of it, and how its settings compare with what the promises rest on."""

    name: str
    """As the ``nats`` CLI knows it."""
    kind: _Kind
    stream: str
    state: _State
    replicas: int
    history: int | None
    """Revisions kept of a key (-1: all); None where there are none."""
    retention: float
    """Seconds; 0: for ever."""
    refused: tuple[str, ...]
    """What breaks a promise, so that `connect` refuses it."""
    weaker: tuple[str, ...]
    """What is weaker than it should be, so that `connect` warns of it."""


_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NANOSECONDS = 1_000_000_000

MOST_PARTITIONS = 64


def check_number(name: str, value: object, kind: type | tuple[type, ...], least: float, most: float) -> None:
    """Raise InvalidSetting for what is no such number."""
    number = isinstance(value, kind) and not isinstance(value, bool)
    if not number or not least <= cast("float", value) <= most:
        raise InvalidSetting(f"{name}={brief(value)}: use a number from {least:g} to {most:g}")


class Wanted(NamedTuple):
    """A store as it is made where it is missing."""

    name: str
    kind: _Kind
    config: dict[str, Any]


class Stores(NamedTuple):
    """All stores of a namespace."""

    receipts: tuple[Wanted, ...]
    """One bucket, or one for each partition."""
    notices: Wanted
    payloads: Wanted
    sessions: Wanted

    @property
    def all(self) -> list[Wanted]:
        """Each of them, the receipts first."""
        return [*self.receipts, self.notices, self.payloads, self.sessions]


def wanted(*, namespace: str, replicas: int, history: int, retention: float, partitions: int | None = None) -> Stores:
    """The stores of a namespace; ``partitions=None`` is one. Raises InvalidName and InvalidSetting."""
    if not isinstance(cast("object", namespace), str) or (namespace and not _NAMESPACE.fullmatch(namespace)):
        raise InvalidName("namespace", namespace, "use 1 to 64 of A-Z, a-z, 0-9, - and _")
    check_number("replicas", replicas, int, 1, 5)
    check_number("history", history, int, 1, 10**6)
    check_number("retention", retention, (int, float), 0, 10**9)
    if partitions is not None:
        check_number("partitions", partitions, int, 1, MOST_PARTITIONS)
    several = partitions is not None and partitions > 1
    prefix = f"{namespace}-" if namespace else ""
    receipts = BucketSpec(f"{prefix}receipts", replicas, history, retention, partitions=partitions or 1)
    notices = receipts._replace(name=f"{prefix}notices", partitions=1)
    payloads = notices._replace(name=f"{prefix}receipt-payloads")
    sessions = receipts._replace(name=f"{prefix}SESSIONS", of_sessions=True)
    parts = [receipts._replace(name=f"{receipts.name}-{n}") for n in range(partitions or 1)] if several else [receipts]
    return Stores(
        tuple(Wanted(part.name, "bucket", stream_config(part)) for part in parts),
        Wanted(notices.name, "bucket", stream_config(notices)),
        Wanted(payloads.name, "object store", objects_config(payloads)),
        Wanted(sessions.name, "stream", stream_config(sessions)),
    )


def check_usable(stores: Stores, *, lease: float) -> None:
    """Raise InvalidSetting for stores that could be made and not be used."""
    bucket = stores.receipts[0]
    for finding in findings(bucket.config, lease=lease):
        raise InvalidSetting(f"bucket {bucket.name!r}: {finding.text}")


async def agreed(
    link: Connection, stores_of: Callable[..., Stores], asked: int | None, *, making: bool, timeout: float
) -> Stores:
    """The stores with the number of partitions that the namespace has, or is to have where there are none yet.

    It is fixed by who makes the session stream, which is therefore made first (``making``), and kept in that stream's
    metadata: two processes that make the stores at the same time with different numbers end with one. Were it
    another one later, calls would not find their receipts and would be executed again. Raises NotProvisioned where
    another number was ``asked`` for, and as `make`.
    """
    stores = stores_of(partitions=asked)
    stream, name = stores.sessions.config["name"], stores.sessions.name
    config = await config_of(link, stream, name, timeout=timeout)
    if config is None:
        there = await _partitions_of_receipts(link, stores_of, timeout=timeout)
        if there is not None:
            stores = partitioned(stores_of, asked=asked, there=there)
        if making:
            await make(link, name, stores.sessions.config, timeout=timeout)
            config = await config_of(link, stream, name, timeout=timeout)
    return stores if config is None else partitioned(stores_of, asked=asked, there=partitions_in(config))


async def _partitions_of_receipts(link: Connection, stores_of: Callable[..., Stores], *, timeout: float) -> int | None:
    """By the buckets of receipts that are there, where the session stream is gone; None where there are none."""
    for store in (stores_of(partitions=n).receipts[0] for n in (1, 2)):
        try:
            config = await config_of(link, store.config["name"], store.name, timeout=timeout)
        except PermissionDenied:
            continue  # who may not look at the other kind works with one kind only
        if config is not None:
            return partitions_in(config)
    return None


def partitioned(stores_of: Callable[..., Stores], *, asked: int | None, there: int) -> Stores:
    """The stores of a namespace with the partitions that there are. Raises NotProvisioned where others were asked for.

    0 is of a stream whose metadata say no number.
    """
    if asked not in (None, there) or not 1 <= there <= MOST_PARTITIONS:
        raise NotProvisioned(
            stores_of().receipts[0].name,
            f"has {there} partitions, and partitions={asked} was asked for",
            advice="the number is fixed when the stores are made, since receipts would not be found under another one: "
            "leave partitions= out, or use another namespace",
        )
    return stores_of(partitions=there)


async def provision(
    servers_or_client: str | Sequence[str] | Client = "nats://127.0.0.1:4222",
    *,
    namespace: str = "",
    replicas: int = 1,
    history: int = 8,
    retention: float = 0.0,
    partitions: int | None = None,
    lease: float = 30.0,
    dry_run: bool = False,
    connect_timeout: float = 5.0,
    **connection: Any,
) -> list[Provisioned]:
    """Make the stores that are missing, as `connect` with ``provision=True`` does, and say what each is like.

    ``dry_run`` makes nothing. The settings are those of `connect`; a store that is there is never changed. Raises
    Unreachable, PermissionDenied, NotProvisioned (the server refuses to make one), InvalidName, InvalidSetting.
    """
    stores_of = partial(wanted, namespace=namespace, replicas=replicas, history=history, retention=retention)
    stores = stores_of(partitions=partitions)
    check_number("lease", lease, (int, float), 0.001, 10**9)
    check_usable(stores, lease=lease)
    check_number("connect_timeout", connect_timeout, (int, float), 0.001, 3600)
    servers = checked_servers(servers_or_client, connection)
    found: list[Provisioned] = []
    async with opened(servers, connect_timeout=connect_timeout, options=connection) as link:
        before = await config_of(link, stores.sessions.config["name"], stores.sessions.name, timeout=connect_timeout)
        stores = await agreed(link, stores_of, partitions, making=not dry_run, timeout=connect_timeout)
        for store in stores.all:
            name, stream = store.name, store.config["name"]
            config = await config_of(link, stream, name, timeout=connect_timeout)
            state: _State = "there" if config is not None else "missing"
            if config is None and not dry_run:
                await make(link, name, store.config, timeout=connect_timeout)
                config = await config_of(link, stream, name, timeout=connect_timeout)
                state = "made"
            if store is stores.sessions and before is None and not dry_run:
                state = "made"
            kept = found[0].retention if found else 0.0
            found.append(_compared(store, state, config or store.config, kept=kept, lease=lease))
    return found


def _compared(store: Wanted, state: _State, config: dict[str, Any], *, kept: float, lease: float) -> Provisioned:
    if store.kind == "object store":
        problems = objects_findings(config, retention=kept)
    else:
        problems = findings(config, lease=lease, of_sessions=store.kind == "stream")
    return Provisioned(
        name=store.name,
        kind=store.kind,
        stream=config["name"],
        state=state,
        replicas=int(config.get("num_replicas") or 1),
        history=config.get("max_msgs_per_subject", -1) if store.kind == "bucket" else None,
        retention=config.get("max_age", 0) / _NANOSECONDS,
        refused=tuple(problem.text for problem in problems if problem.refused),
        weaker=tuple(problem.text for problem in problems if not problem.refused),
    )
