"""What the checks look at: the connection, and the stores as the server describes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from natsreceipts._jetstream import (
    JetStreamBucket,
    JetStreamObjects,
    PartitionedBucket,
    bucket_of,
    info_of,
    partition_of,
    partitions_in,
)
from natsreceipts.errors import NatsReceiptsError
from natsreceipts.fence import Pace, patiently
from natsreceipts.provisioning import MOST_PARTITIONS, Wanted, wanted
from natsreceipts.shell import with_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeVar

    from natsreceipts._jetstream import Bucket, Connection

    T = TypeVar("T")

__all__ = ["Site", "Store", "seconds_kept", "site_of", "span"]


@dataclass(slots=True)
class Store:
    """A store, and the STREAM.INFO of its stream: None where it is missing, or the ``problem`` where it is not told."""

    wanted: Wanted
    info: dict[str, Any] | None = None
    problem: NatsReceiptsError | None = None

    @property
    def name(self) -> str:
        """As the ``nats`` CLI knows it."""
        return self.wanted.name

    @property
    def stream(self) -> str:
        """The stream below it."""
        return self.wanted.config["name"]

    @property
    def title(self) -> str:
        """As people call it."""
        return f"{self.wanted.kind} {self.name}"

    @property
    def of_sessions(self) -> bool:
        """Whether it is the session stream."""
        return self.wanted.kind == "stream"

    @property
    def config(self) -> dict[str, Any]:
        """Its settings; empty where they are not known."""
        return self.info["config"] if self.info is not None else {}

    @property
    def last_seq(self) -> int:
        """The last sequence of its stream."""
        return int(self.info["state"]["last_seq"]) if self.info is not None else 0


@dataclass(slots=True)
class Site:
    """Where to look, and how far. Seconds."""

    link: Connection
    receipts: tuple[Store, ...]
    """The bucket of the receipts, or its partitions."""
    notices: Store
    """The bucket of the notices."""
    payloads: Store
    """The object store of the large payloads."""
    sessions: Store
    """The stream of the sessions."""
    timeout: float
    lease: float
    most: int
    """Records of a store that are read."""
    namespace: str = ""

    def command(self, verb: str, key: str = "") -> str:
        """A command of ours that looks at these stores, or at a key in them."""
        command, where = f"natsreceipts {verb}", f"--namespace {self.namespace}" if self.namespace else ""
        return with_key(command, key, where) if key else " ".join(filter(None, (command, where)))

    @property
    def stores(self) -> list[Store]:
        """All of them."""
        return [*self.receipts, self.notices, self.payloads, self.sessions]

    @property
    def kept(self) -> float:
        """Seconds that receipts are kept for; 0: for ever."""
        return min((kept for store in self.receipts if (kept := seconds_kept(store))), default=0.0)

    @property
    def all_receipts(self) -> Bucket | None:
        """The receipts to read from, wherever they are; None where a part is not there, or not to be seen."""
        parts = [bucket for store in self.receipts if (bucket := self.bucket(store)) is not None]
        if len(parts) < len(self.receipts):
            return None
        return parts[0] if len(parts) == 1 else PartitionedBucket("receipts", parts)

    def store_of(self, key: str) -> Store:
        """The store that holds a receipt."""
        return self.receipts[partition_of(key, len(self.receipts))]

    def bucket(self, store: Store) -> JetStreamBucket | None:
        """A store to read from; None where it is not there, or not to be seen."""
        if store.info is None:
            return None
        return bucket_of(self.link, store.name, store.info, of_sessions=store.of_sessions)

    @property
    def objects(self) -> JetStreamObjects | None:
        """The object store to read from; None where it is not there, or not to be seen."""
        return JetStreamObjects(self.link, self.payloads.name) if self.payloads.info is not None else None

    async def patiently(self, bucket: Bucket, ask: Callable[[float], Awaitable[T]]) -> T:
        """Ask again for a while where no server answers."""
        return await patiently(Pace(bucket, lease=30.0, patience=self.timeout), ask)

    async def last_seq(self, store: Store) -> int:
        """The last sequence of a store's stream, asked for now. Raises Unreachable, PermissionDenied."""
        info = await info_of(self.link, store.stream, store.name, timeout=self.timeout)
        return int(info["state"]["last_seq"]) if info is not None else 0


async def site_of(link: Connection, *, namespace: str, timeout: float, lease: float, most: int) -> Site:
    """Look at each store once. Raises InvalidName."""
    stores_of = partial(wanted, namespace=namespace, replicas=1, history=8, retention=0.0)

    async def look(each: Wanted) -> Store:
        store = Store(each)
        try:
            store.info = await info_of(link, store.stream, store.name, timeout=timeout)
        except NatsReceiptsError as problem:
            store.problem = problem
        return store

    sessions = await look(stores_of().sessions)
    said = sessions if sessions.info is not None else await look(stores_of(partitions=2).receipts[0])
    partitions = partitions_in(said.config)
    stores = stores_of(partitions=partitions if 1 <= partitions <= MOST_PARTITIONS else None)
    return Site(
        link,
        tuple([await look(each) for each in stores.receipts]),
        await look(stores.notices),
        await look(stores.payloads),
        sessions,
        timeout,
        lease,
        most,
        namespace,
    )


def seconds_kept(store: Store) -> float:
    """How long its messages are kept; 0: for ever."""
    return store.config.get("max_age", 0) / 1e9


def span(seconds: float) -> str:
    """A length of time for people, in its largest whole unit."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
