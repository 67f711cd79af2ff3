"""A schedule as data: who acts, what befalls whom and when, how often requests go wrong. Printed, and shrunk.

Everything else that happens follows from the plan and its seed alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

__all__ = ["ActorPlan", "Event", "Plan", "plan_of"]


class ActorPlan(NamedTuple):
    """One actor: what it is, when it begins, and how it acts."""

    name: str
    kind: str
    start: float
    how: dict[str, Any]

    def __str__(self) -> str:
        how = " ".join(f"{name}={value}" for name, value in self.how.items())
        return f"{self.name}: {self.kind} from {self.start:.2f} s {how}"


class Event(NamedTuple):
    """Something that befalls an actor's process (at its request number ``op``), or (at ``at``) it or a stream."""

    what: str
    """crash, pause, cancel or cut of an actor; outage, elect, stuck or replace of a stream; erase or purge of a receipt
    (at an actor's request, too)."""
    whom: str
    at: float = 0.0
    op: int = 0
    phase: str = ""
    """before, sent or after, of that request."""
    length: float = 0.0
    offset: float = 0.0
    """Seconds that the new leader's clock is ahead."""

    def __str__(self) -> str:
        when = f"at request {self.op} ({self.phase})" if self.op else f"at {self.at:.2f} s"
        length = f" for {self.length:.2f} s" if self.length else ""
        return f"{self.what} of {self.whom} {when}{length}{f', clock {self.offset:+.1f} s' if self.offset else ''}"


@dataclass(frozen=True)
class Plan:
    """A schedule. ``calm`` lists requests and bodies (actor and number; bodies count down from -1) that go well."""

    seed: int
    actors: tuple[ActorPlan, ...]
    events: tuple[Event, ...] = ()
    rate: float = 0.0
    """How many of the requests go wrong in some way."""
    body_rate: float = 0.0
    """In how many of the bodies something is odd."""
    calm: frozenset[tuple[str, int]] = frozenset()
    replicas: int = 1
    history: int = 8
    retention: float = 0.0
    """Seconds that receipts are kept for; 0: for ever."""
    inline_limit: int = 256 * 1024
    silent_hints: bool = False
    keys: int = 1
    lease: float = 9.0
    dialect: str = "neutral"

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: replicas={self.replicas} history={self.history} lease={self.lease:g} keys={self.keys}",
            f"  rate={self.rate:.2f} body_rate={self.body_rate:.2f} inline_limit={self.inline_limit}",
            f"  silent_hints={self.silent_hints} retention={self.retention:g}, {len(self.calm)} calm",
            *(f"  {actor}" for actor in self.actors),
            *(f"  {event}" for event in self.events),
        ]
        return "\n".join(lines)

    def but(self, **changes: Any) -> Plan:
        """The plan with something else in it."""
        return replace(self, **changes)


_HORIZON = 60.0
"""Seconds that receipts are kept for where they expire: ten leases of 6 s, the least that is accepted."""

_KINDS = ("workers", "workers", "workers", "mixed", "mixed", "session", "session", "session", "notices", "replaced")


def plan_of(seed: int, *, kind: str = "") -> Plan:
    """The schedule of a seed; ``kind`` (workers, mixed, session, notices, replaced) narrows down what it is about.

    ``doubtful``: workers half of whose requests go wrong; ``shared``: two sessions that make the same calls in one run.
    """
    luck = random.Random(seed)
    drawn = luck.choice(_KINDS)
    kind = kind or drawn
    keys = 1 if luck.random() < 0.8 else 2
    lease = luck.choice((6.0, 9.0, 30.0))
    if kind == "notices":
        actors = _couriers(luck)
    elif kind in ("session", "shared"):
        actors = _session_actors(luck, keys, lease, shared=kind == "shared")
    else:
        actors = _workers(luck, keys, lease, mixed=kind in ("mixed", "doubtful"))
    names = [actor.name for actor in actors]
    replicas = luck.choice((1, 3, 3))
    retention = _HORIZON if kind == "session" and lease == 6.0 and luck.random() < 0.5 else 0.0
    events = _events(luck, names, lease, replicas, skew=_HORIZON / 50 if retention else 60.0)
    if kind in ("workers", "mixed", "doubtful", "session") and not retention and luck.random() < 0.15:
        events.append(_erasure(luck, names))
    if kind == "replaced":
        events.append(Event("replace", "receipts", at=round(12 * luck.random(), 3)))
    return Plan(
        seed=seed,
        actors=tuple(actors),
        events=tuple(events),
        rate=luck.choice((0.0, 0.05, 0.15, 0.3)) if kind != "doubtful" else 0.5,
        body_rate=luck.choice((0.0, 0.2, 0.5)),
        replicas=replicas,
        history=luck.choice((8, 8, 8, 8, 2, 1)),
        retention=retention,
        inline_limit=luck.choice((256 * 1024,) * 7 + (450,)),
        silent_hints=luck.random() < 0.3,
        dialect=luck.choice(("neutral", "anthropic", "openai-chat")),
        keys=keys,
        lease=lease,
    )


def _workers(luck: random.Random, keys: int, lease: float, *, mixed: bool) -> list[ActorPlan]:
    actors = []
    for number in range(luck.choice((1, 2, 2, 3))):
        effects = ["opaque"]
        if mixed:
            effects = [luck.choice(("opaque", "idempotent", "resumable", "resumable")) for _ in range(2)]
        how: dict[str, Any] = {
            "effects": effects,
            "key": luck.randrange(keys),
            "times": luck.choice((1, 2, 3)),
            "door": luck.choice(("execute", "execute", "call", "thread", "plain")),
            "wait": luck.choice((0.0, 5.0, 30.0)),
        }
        if luck.random() < 0.15:
            how["timeout"] = luck.choice((0.5, lease * 0.5, lease * 1.5))
        if luck.random() < 0.2:
            how["verify"] = True
        if luck.random() < 0.15:
            how["on_lost"] = "continue"
        if luck.random() < 0.15:
            how["twice"] = True
        if luck.random() < 0.2:
            how["entered"] = True
        actors.append(ActorPlan(f"w{number + 1}", "worker", _start(luck), how))
    if luck.random() < 0.45:
        how = {"key": luck.randrange(keys), "times": luck.choice((1, 2, 4)), "running": luck.random() < 0.4}
        actors.append(ActorPlan("p1", "resolver", _start(luck) + luck.choice((0.0, 5.0, 20.0)), how))
    return actors


def _session_actors(luck: random.Random, keys: int, lease: float, *, shared: bool) -> list[ActorPlan]:
    effects = [luck.choice(("opaque", "opaque", "opaque", "resumable", "idempotent"))]
    reuses = luck.random() < 0.5
    sessions = ["s1"] if luck.random() < 0.8 and not shared else ["s1", "s2"]
    actors = []
    for number in range(luck.choice((1, 1, 2))):
        how: dict[str, Any] = {
            "session": luck.choice(sessions),
            "effects": effects,
            "turns": luck.choice((1, 2, 3)),
            "calls": [luck.randrange(keys) for _ in range(luck.choice((1, 1, 2)))],
            "reuses": reuses,
            "wakes": luck.random() < 0.8,
            "wait": luck.choice((0.0, 5.0, 30.0)),
            "door": luck.choice(("execute", "execute", "call", "thread")),
            "pause": luck.choice((0.1, 3.0, lease * 1.5, lease * 8)),
        }
        optional = {"suspends": 0.1, "verify": 0.2, "unnamed": 0.1, "leaves": 0.3, "branches": 0.15, "compacts": 0.15}
        for option, often in optional.items():
            if luck.random() < often:
                how[option] = True
        if luck.random() < 0.4:
            how["stalls"] = round(luck.choice((0.1, 3.0, 20.0)) * luck.random(), 3)
        actors.append(ActorPlan(f"a{number + 1}", "agent", _start(luck), how))
    for number in range(luck.choice((1, 1, 2))):
        how = {
            "session": luck.choice(sessions),
            "effects": effects,
            "times": luck.choice((1, 2, 4)),
            "declared": luck.random() < 0.7,
            "pause": luck.choice((0.1, 2.0, 10.0)),
        }
        kind = "reconciler" if luck.random() < 0.15 else "waker"
        actors.append(ActorPlan(f"k{number + 1}", kind, _start(luck), how))
    if luck.random() < 0.2:
        actors.append(ActorPlan("r1", "reader", _start(luck), {"session": luck.choice(sessions)}))
    if luck.random() < 0.25:
        how = {"key": luck.randrange(keys), "times": 2, "running": luck.random() < 0.3}
        actors.append(ActorPlan("p1", "resolver", _start(luck) + luck.choice((0.0, 5.0, 20.0)), how))
    return actors


def _couriers(luck: random.Random) -> list[ActorPlan]:
    actors = []
    for number in range(luck.choice((0, 0, 1, 2))):
        actors.append(ActorPlan(f"v{number + 1}", "watcher", _start(luck), {"seconds": luck.choice((5.0, 20.0, 60.0))}))
    for number in range(luck.choice((1, 2, 2, 3))):
        how = {
            "times": luck.choice((1, 2, 4)),
            "files": [luck.randrange(2) for _ in range(luck.choice((0, 1, 2)))],
            "decision": luck.choice(("approved", "approved", "denied")),
            "pause": luck.choice((0.05, 1.0, 8.0)),
        }
        actors.append(ActorPlan(f"c{number + 1}", "courier", _start(luck), how))
    return actors


def _start(luck: random.Random) -> float:
    return round(luck.choice((0.0, 0.001, luck.random(), 10 * luck.random())), 3)


def _erasure(luck: random.Random, names: list[str]) -> Event:
    """Somebody deletes the first receipt by hand, often just when another is about to write it."""
    what = luck.choice(("erase", "erase", "purge"))
    if luck.random() < 0.3:
        return Event(what, "key 0", at=round(luck.choice((1, 10, 40)) * luck.random(), 3))
    op = int(luck.expovariate(0.3)) + 1
    return Event(what, luck.choice(names), op=op, phase=luck.choice(("before", "sent", "after")))


def _events(luck: random.Random, names: list[str], lease: float, replicas: int, *, skew: float) -> list[Event]:
    events = []
    for _ in range(luck.choice((0, 1, 1, 2, 3))):
        what = luck.choice(("crash", "crash", "pause", "pause", "pause", "cancel", "cut"))
        whom = luck.choice(names)
        length = {
            "crash": 0.0,
            "cancel": 0.0,
            "pause": round(luck.choice((0.3, 0.5, 1.5, 3.0)) * lease * (0.8 + 0.4 * luck.random()), 2),
            "cut": round(0.5 + 12 * luck.random(), 2),
        }[what]
        op = int(luck.expovariate(0.2)) + 1
        events.append(Event(what, whom, op=op, phase=luck.choice(("before", "sent", "after", "after")), length=length))
    for _ in range(luck.choice((0, 0, 1, 2))):
        stream = luck.choice(("receipts", "receipts", "sessions", "notices"))
        what = "elect" if replicas > 1 and luck.random() < 0.6 else luck.choice(("outage", "stuck"))
        offset = round(luck.uniform(-skew, skew), 1) if what == "elect" else 0.0
        length = round(luck.choice((luck.uniform(4, 10), luck.uniform(0.1, 2))), 2)
        events.append(
            Event(what, stream, at=round(luck.choice((1, 10, 40)) * luck.random(), 3), length=length, offset=offset)
        )
    return events
