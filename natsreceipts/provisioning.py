"""The stores that the toolkit needs: made where they are missing, compared with what they should be, never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
    stream_config,
)
from natsreceipts.errors import InvalidName, InvalidSetting, brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.client import Client

__all__ = ["Provisioned", "Wanted", "check_number", "check_usable", "provision", "wanted"]


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


def wanted(*, namespace: str, replicas: int, history: int, retention: float) -> list[Wanted]:
    """All stores of a namespace, the receipts' bucket first. Raises InvalidName and InvalidSetting."""
    if not isinstance(cast("object", namespace), str) or (namespace and not _NAMESPACE.fullmatch(namespace)):
        raise InvalidName("namespace", namespace, "use 1 to 64 of A-Z, a-z, 0-9, - and _")
    check_number("replicas", replicas, int, 1, 5)
    check_number("history", history, int, 1, 10**6)
    check_number("retention", retention, (int, float), 0, 10**9)
    prefix = f"{namespace}-" if namespace else ""
    receipts = BucketSpec(f"{prefix}receipts", replicas, history, retention)
    notices = receipts._replace(name=f"{prefix}notices")
    payloads = receipts._replace(name=f"{prefix}receipt-payloads")
    sessions = receipts._replace(name=f"{prefix}SESSIONS", of_sessions=True)
    return [
        Wanted(receipts.name, "bucket", stream_config(receipts)),
        Wanted(notices.name, "bucket", stream_config(notices)),
        Wanted(payloads.name, "object store", objects_config(payloads)),
        Wanted(sessions.name, "stream", stream_config(sessions)),
    ]


def check_usable(stores: list[Wanted], *, lease: float) -> None:
    """Raise InvalidSetting for stores that could be made and not be used."""
    for finding in findings(stores[0].config, lease=lease):
        raise InvalidSetting(f"bucket {stores[0].name!r}: {finding.text}")


async def provision(
    servers_or_client: str | Sequence[str] | Client = "nats://127.0.0.1:4222",
    *,
    namespace: str = "",
    replicas: int = 1,
    history: int = 8,
    retention: float = 0.0,
    lease: float = 30.0,
    dry_run: bool = False,
    connect_timeout: float = 5.0,
    **connection: Any,
) -> list[Provisioned]:
    """Make the stores that are missing, as `connect` with ``provision=True`` does, and say what each is like.

    ``dry_run`` makes nothing. The settings are those of `connect`; a store that is there is never changed. Raises
    Unreachable, PermissionDenied, NotProvisioned (the server refuses to make one), InvalidName, InvalidSetting.
    """
    stores = wanted(namespace=namespace, replicas=replicas, history=history, retention=retention)
    check_number("lease", lease, (int, float), 0.001, 10**9)
    check_usable(stores, lease=lease)
    check_number("connect_timeout", connect_timeout, (int, float), 0.001, 3600)
    servers = checked_servers(servers_or_client, connection)
    found: list[Provisioned] = []
    async with opened(servers, connect_timeout=connect_timeout, options=connection) as link:
        for store in stores:
            name, stream = store.name, store.config["name"]
            config = await config_of(link, stream, name, timeout=connect_timeout)
            state: _State = "there" if config is not None else "missing"
            if config is None and not dry_run:
                await make(link, name, store.config, timeout=connect_timeout)
                config = await config_of(link, stream, name, timeout=connect_timeout)
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
