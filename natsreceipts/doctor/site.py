"""What the checks look at: the connection, and the four stores as the server describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from natsreceipts._jetstream import JetStreamBucket, JetStreamObjects, bucket_of, info_of
from natsreceipts.errors import NatsReceiptsError
from natsreceipts.fence import Pace, patiently
from natsreceipts.provisioning import Wanted, wanted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeVar

    from natsreceipts._jetstream import Connection

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
    stores: list[Store]
    timeout: float
    lease: float
    most: int
    """Records of a store that are read."""
    namespace: str = ""

    def command(self, verb: str) -> str:
        """A command of ours that looks at these stores."""
        return f"natsreceipts {verb}" + (f" --namespace {self.namespace}" if self.namespace else "")

    @property
    def receipts(self) -> Store:
        """The bucket of the receipts."""
        return self.stores[0]

    @property
    def notices(self) -> Store:
        """The bucket of the notices."""
        return self.stores[1]

    @property
    def payloads(self) -> Store:
        """The object store of the large payloads."""
        return self.stores[2]

    @property
    def sessions(self) -> Store:
        """The stream of the sessions."""
        return self.stores[3]

    def bucket(self, store: Store) -> JetStreamBucket | None:
        """A store to read from; None where it is not there, or not to be seen."""
        if store.info is None:
            return None
        return bucket_of(self.link, store.name, store.info, of_sessions=store.of_sessions)

    @property
    def objects(self) -> JetStreamObjects | None:
        """The object store to read from; None where it is not there, or not to be seen."""
        return JetStreamObjects(self.link, self.payloads.name) if self.payloads.info is not None else None

    async def patiently(self, bucket: JetStreamBucket, ask: Callable[[float], Awaitable[T]]) -> T:
        """Ask again for a while where no server answers."""
        return await patiently(Pace(bucket, lease=30.0, patience=self.timeout), ask)

    async def last_seq(self, store: Store) -> int:
        """The last sequence of a store's stream, asked for now. Raises Unreachable, PermissionDenied."""
        info = await info_of(self.link, store.stream, store.name, timeout=self.timeout)
        return int(info["state"]["last_seq"]) if info is not None else 0


async def site_of(link: Connection, *, namespace: str, timeout: float, lease: float, most: int) -> Site:
    """Look at each store once. Raises InvalidName."""
    stores = [Store(each) for each in wanted(namespace=namespace, replicas=1, history=8, retention=0.0)]
    for store in stores:
        try:
            store.info = await info_of(link, store.stream, store.name, timeout=timeout)
        except NatsReceiptsError as problem:
            store.problem = problem
    return Site(link, stores, timeout, lease, most, namespace)


def seconds_kept(store: Store) -> float:
    """How long its messages are kept; 0: for ever."""
    return store.config.get("max_age", 0) / 1e9


def span(seconds: float) -> str:
    """A length of time for people, in its largest whole unit."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
