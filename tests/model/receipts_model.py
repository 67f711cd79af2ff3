"""The receipts protocol of one key as a transition system: no NATS, no clock, no event loop.

A `World` holds the server's revisions of the key, the writes in flight, the actors, and what happened outside.
`Model.steps` gives every step that anybody can take next, and what is wrong with it, if something is.

What is abstracted, and why that is safe:

- A write in flight may be stored now, much later, or never. All writes are compare-and-set, so one that was sent on
  a revision that is no longer the newest is refused for ever: only writes on the newest revision are kept. Copies of
  one write (the same bytes sent again) are one, since at most one of them can be stored.
- Answers are not messages of their own: a writer that waits gets the answer that the server's state allows, or none
  (a time-out), whenever it is its turn. Who is never scheduled again has crashed; a crash is a step of its own only
  where memory is lost and the process starts again.
- Time is one fact about each claim or renewal: whether less than a third of the lease has passed since it was first
  sent (its *window*). The window may close at any moment. Its sender may take the acknowledgement as the licence to
  enter only while it is open, and a lease counts as expired only once it is closed: that is what the two looks of a
  judge, a third of a lease and a margin apart, guarantee whatever the server's clock says.
- A worker between its last check and the first instruction of the effect cannot be stopped by anyone. Check and
  entry are two steps here, so that it can be caught in between.
- People, and the verifiers that ask the outside world, are honest unless `Spec.mistaken`: they say *completed* only
  when the effect has landed, and *not applied* only when nothing has landed, nothing is under way, no live worker is
  past its last check, and none can still pass it without another write (the window of the revision that they looked
  at is closed). A tool says `NotApplied` only of an effect of its own attempt that can no longer land.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from natsreceipts.decision import Absent, Effect, Execute, Failed, ReceiptState, Running, decide, stricter

if TYPE_CHECKING:
    from collections.abc import Iterator


# ---------------------------------------------------------------- values that are equal only if they are the same


def _identity(cls: type) -> type:
    """Make instances compare by identity, and let `cls.of` and `.but` give the one instance of each value."""
    pool: dict[tuple, Any] = {}

    def of(*args: Any, **kwargs: Any) -> Any:
        value = cls(*args, **kwargs)
        return pool.setdefault(tuple(value), value)

    def but(self: Any, **changes: Any) -> Any:
        value = self._replace(**changes)
        return pool.setdefault(tuple(value), value)

    cls.of, cls.but = of, but  # type: ignore[attr-defined]
    cls.__hash__, cls.__eq__ = object.__hash__, object.__eq__  # type: ignore[method-assign]
    return cls


class _Record(NamedTuple):
    """One revision. ``said``: what it says of the outcome: "", "result", "error" or "notApplied"."""

    write: int
    status: str
    token: int = 0
    attempts: int = 0
    effect: str = ""
    open: bool = False
    said: str = ""
    resolved: bool = False
    fences: tuple[tuple[str, int], ...] = ()


class _Op(NamedTuple):
    """A write that its sender is not done with. ``stored`` is the truth, which the sender does not see."""

    kind: str
    expected: int
    record: Any
    state: str = "wait"
    """wait (for the answer, or look), doubt (only look), past (refused: look at what overtook it)."""
    conflict: bool = False
    sends: int = 1
    stored: bool = False


class _Actor(NamedTuple):
    phase: str = "idle"
    op: Any = None
    held: Any = None
    rev: int = 0
    floor: int = 0
    """Reads must show a later revision than this one."""
    window: int = 0
    """The write whose window is open, or 0."""
    given: tuple[int, ...] = ()
    """Tokens of claims given up."""
    kept: Any = None
    """A settle that stayed unknown: (op, held, rev)."""
    nonces: int = 0
    made: int = 0
    claims: int = 0
    renewals: int = 0
    beats: int = 0
    look: Any = None
    """What a resolver looked at: (record, rev)."""


@_identity
class Record(_Record):
    """A revision of the receipt."""

    __slots__ = ()


@_identity
class Op(_Op):
    """A write under way."""

    __slots__ = ()


@_identity
class Actor(_Actor):
    """What an actor knows."""

    __slots__ = ()


class Deed(NamedTuple):
    """An effect that was entered. ``state``: under way, landed or gone; ``denied``: somebody said it did not land."""

    token: int
    state: str
    denied: bool
    session: str
    entry: int


class World(NamedTuple):
    """Everything. Revision n is ``chain[n - 1]``; the first ``dropped`` ones can no longer be read."""

    chain: tuple[Any, ...]
    dropped: int
    net: tuple[tuple[Any, bool], ...]
    """Writes that may yet be stored, and whether they carry no expectation."""
    actors: tuple[Any, ...]
    deeds: tuple[Deed, ...]
    told: tuple[tuple[str, int], ...]
    """Per session the log position up to which a model was told that the call did not and will not run."""
    crashes: int
    drops: int


class Spec(NamedTuple):
    """One actor. ``effects``: the declared effect of its calls (the last one repeats)."""

    name: str
    kind: str = "worker"
    """worker, person, waker or eraser."""
    effects: tuple[str, ...] = ("opaque",)
    times: int = 1
    """How many calls a worker makes, how often a person looks."""
    endings: tuple[str, ...] = ("ok", "notApplied", "error")
    sends: int = 2
    claims: int = 3
    """How many claims a caller sends in all."""
    renewals: int = 1
    beats: int = 0
    gives_up: bool = False
    """Whether a write may stay in doubt to its deadline."""
    cancels: bool = False
    """Whether the caller may be cancelled before the body is entered."""
    thread: bool = False
    """Whether an ambiguous ending may be followed by a late completion (a thread that could not be cancelled)."""
    verifies: bool = False
    reads_first: bool = False
    session: str = "s"
    entry: int = 0
    """Of a worker: where the tool call is logged (0: it names no entry). Of a waker: the last sequence it read."""
    after_wake: bool = False
    """Whether the call was logged after a wake's closes, and so starts after it."""
    even_if_running: bool = False
    mistaken: bool = False


Step = tuple[str, World, str | None]
_Settled = tuple["Actor", str | None]

_SAME_ATTEMPT = {
    "running": ("running", "completed", "failed", "ambiguous"),
    "ambiguous": ("running", "completed", "failed", "ambiguous"),
    "failed": ("completed", "failed", "ambiguous"),
    "withdrawn": ("withdrawn",),
}


@lru_cache(maxsize=4096)
def _decide(status: str, attempts: int, effect: str) -> int:
    """The number of the attempt to claim; 0: ambiguous."""
    state: ReceiptState = Running(attempts, lease_expired=True)
    if status == "absent":
        state = Absent()
    elif status == "failed":
        state = Failed(attempts)
    decision = decide(state, effect)
    return decision.attempt if isinstance(decision, Execute) else 0


@lru_cache(maxsize=64)
def _stricter(a: str, b: str) -> str:
    return stricter(Effect(a or "read"), Effect(b or "read")).value


def _fence(record: Record, session: str) -> int:
    return dict(record.fences).get(session, 0)


def _refused(record: Record, spec: Spec) -> bool:
    """Whether a claim is to be refused because of a wake's fence."""
    return bool(record.fences) and (not spec.entry or spec.entry <= _fence(record, spec.session))


class Model:
    """The protocol with its actors; ``mutant`` puts one known mistake into it."""

    def __init__(self, *specs: Spec, crashes: int = 0, drops: int = 0, stale: bool = False, mutant: str = "") -> None:
        self.specs = specs
        self.stale = stale
        self.mutant = mutant
        unnamed = [spec._replace(name="") for spec in specs]
        self._kinds = [unnamed.index(spec) for spec in unnamed]
        self._twins = len({*unnamed}) < len(unnamed)
        self.honest = not any(spec.mistaken for spec in specs)
        self.start = World((), 0, (), tuple(Actor.of() for _ in specs), (), (), crashes, drops)

    # ------------------------------------------------------------------ which worlds are the same

    def key(self, world: World) -> tuple[Any, ...]:
        """What the future of a world depends on: worlds of the same key can take the same steps, up to names.

        Nonces are named in the order in which they are met, revisions count from the first one that matters to
        anybody, what is written in the others is left out, and actors of the same kind are put into one order.
        """
        actors = world.actors
        last = len(world.chain) - 1
        readable = last - 1 if self.stale else last
        asked = set()
        first = max(readable, 0)
        for actor in actors:
            if actor.op is not None and not self._refused_for_ever(actor.op, last):
                asked.add(actor.op.expected)
            if actor.kept is not None:
                asked.add(actor.kept[0].expected)
            if actor.held is not None and actor.rev <= first:
                first = actor.rev - 1
            if actor.floor and actor.floor <= first:
                first = actor.floor - 1
            if actor.look is not None and actor.look[1] <= first:
                first = actor.look[1] - 1
        first = max(0, min(first, min(asked, default=first) - 1))
        order: Any = range(len(actors))
        if self._twins:
            order = sorted(order, key=lambda i: (self._kinds[i], self._shape(actors[i])))
        names: dict[int, int] = {0: 0}

        def name(nonce: int) -> int:
            return names.setdefault(nonce, len(names))

        def text(record: Record) -> tuple[Any, ...]:
            return name(record.write), name(record.token), *record[1:2], *record[3:]

        def sent_on(op: Op) -> int:
            if self._refused_for_ever(op, last):
                return -1 if op.expected == last else -2
            return op.expected - first

        chain = tuple(text(world.chain[at]) if at >= readable or at in asked else None for at in range(first, last + 1))
        minds = []
        for i in order:
            phase, op, held, rev, floor, window, given, kept, _, made, claims, renewals, beats, look = actors[i]
            minds.append(
                (
                    phase,
                    (*op[0:1], sent_on(op), text(op.record), *op[3:]) if op is not None else None,
                    (text(held), rev - first) if held is not None else None,
                    floor and floor - first,
                    name(window),
                    tuple(map(name, given)),
                    (kept[0].expected - first, text(kept[0].record), kept[0].stored, text(kept[1]))
                    if kept is not None
                    else None,
                    made,
                    claims,
                    renewals,
                    beats,
                    (text(look[0]), look[1] - first, look[2]) if look is not None else None,
                )
            )
        places = {i: place for place, i in enumerate(order)}
        net = tuple(
            (place, text(record), plain)
            for place, record, plain in sorted(
                ((places[self._author(record)], record, plain) for record, plain in world.net),
                key=lambda item: (item[0], item[1][1], item[1][3:], item[2]),
            )
        )
        deeds = tuple((name(deed.token), *deed[1:]) for deed in world.deeds)
        return chain, max(0, world.dropped - first), tuple(minds), net, deeds, world.told, world.crashes, world.drops

    @staticmethod
    def _refused_for_ever(op: Op, last: int) -> bool:
        """Whether all that matters of a write's expectation is that it was overtaken."""
        return op.kind not in ("settle", "resolve") and not op.stored and op.expected <= last

    @staticmethod
    def _shape(actor: Actor) -> tuple[Any, ...]:
        op = actor.op
        return (
            actor.phase,
            (op.kind, op.expected, *op[3:]) if op is not None else (),
            (
                actor.made,
                actor.claims,
                actor.renewals,
                actor.beats,
                actor.rev,
                actor.floor,
                actor.window > 0,
                len(actor.given),
            ),
        )

    # ------------------------------------------------------------------ the steps

    def steps(self, world: World) -> Iterator[Step]:
        """Every next step: what it is, where it leads, and what is wrong with it."""
        for record, plain in world.net:
            yield self._store(world, record, plain=plain)
        for i, deed in enumerate(world.deeds):
            if deed.state == "under way":
                for state in ("landed", "gone"):
                    deeds = (*world.deeds[:i], deed._replace(state=state), *world.deeds[i + 1 :])
                    yield f"outside: the effect of attempt {deed.token} is {state}", world._replace(deeds=deeds), None
        if world.drops and len(world.chain) - world.dropped > 1 and self._drop_matters(world):
            after = world._replace(dropped=len(world.chain) - 1, drops=world.drops - 1)
            yield "server: all but the newest revision drop out of the history", after, None
        for i, (actor, spec) in enumerate(zip(world.actors, self.specs, strict=True)):
            if actor.phase == "end":
                continue
            name = spec.name
            if actor.window:
                yield f"{name}: a third of the lease passes", self._with(world, i, actor.but(window=0)), None
            if world.crashes and self._crash_matters(i, actor):
                fresh = self._rest(i, Actor.of(nonces=actor.nonces, made=actor.made))
                after = self._with(world, i, fresh)._replace(crashes=world.crashes - 1)
                yield f"{name}: crashes", after, None
            steps = self._with_op(world, i) if actor.op is not None else ()
            for label, after, problem in steps:
                yield f"{name}: {label}", after, problem
            if actor.op is None or actor.phase == "body":
                for label, after, problem in getattr(self, f"_{spec.kind}")(world, i):
                    yield f"{name}: {label}", after, problem

    @staticmethod
    def _drop_matters(world: World) -> bool:
        """Whether anybody may still ask for a revision that would be dropped."""
        newest = len(world.chain)
        return any(
            (actor.op is not None and actor.op.kind in ("settle", "resolve") and actor.op.expected < newest)
            or (actor.kept is not None and actor.kept[0].expected < newest)
            or (actor.held is not None and actor.rev < newest)
            or (actor.look is not None and actor.look[1] < newest)
            for actor in world.actors
        )

    def _crash_matters(self, i: int, actor: Actor) -> bool:
        """Whether a crash differs from never being scheduled again."""
        if self.specs[i].kind != "worker":
            return False
        if actor.made >= self.specs[i].times:
            return actor.phase == "checked"
        return actor.phase != "idle" or bool(actor.given) or actor.kept is not None

    def _with(self, world: World, i: int, actor: Actor) -> World:
        return world._replace(actors=(*world.actors[:i], actor, *world.actors[i + 1 :]))

    def _rest(self, i: int, actor: Actor) -> Actor:
        """A process between two calls, or at its end."""
        if actor.made >= self.specs[i].times:
            return Actor.of(phase="end")
        return Actor.of(nonces=actor.nonces, made=actor.made, given=actor.given, kept=actor.kept)

    # ------------------------------------------------------------------ the server

    def _author(self, record: Record) -> int:
        return record.write // 1000 - 1

    def _store(self, world: World, record: Record, *, plain: bool) -> Step:
        chain = (*world.chain, record)
        author = self._author(record)
        problem = self._illegal(world, record)
        actors = list(world.actors)
        writer = actors[author]
        if writer.op is not None and writer.op.record is record:
            actors[author] = writer.but(op=writer.op.but(stored=True))
        elif writer.kept is not None and writer.kept[0].record is record:
            op, held, rev = writer.kept
            actors[author] = writer.but(kept=(op.but(stored=True), held, rev))
        deeds = world.deeds
        says_so = world.chain and world.chain[-1].status != "failed"  # else it is a fence on what was said before
        if record.status == "failed" and record.said == "notApplied" and says_so:
            deeds = tuple(
                deed._replace(denied=True) if record.resolved or deed.token == record.token else deed for deed in deeds
            )
        # Whatever else was sent on the revision before is refused from now on.
        net = tuple(item for item in world.net if item[1] and item[0] is not record)
        after = world._replace(chain=chain, net=net, actors=tuple(actors), deeds=deeds)
        how = "without an expectation " if plain else ""
        label = f"server: stores {self.specs[author].name}'s {self._text(record)} {how}as revision {len(chain)}"
        return label, after, problem or self.untrue(after)

    @staticmethod
    def _text(record: Record) -> str:
        notes = [record.said] if record.said else []
        notes += ["open"] if record.open else []
        notes += ["resolved"] if record.resolved else []
        notes += [f"{session}:{position}" for session, position in record.fences]
        extra = f" ({', '.join(notes)})" if notes else ""
        return f"{record.status}{extra}, attempt {record.attempts}, token {record.token}"

    def _illegal(self, world: World, record: Record) -> str | None:
        """What is wrong with storing ``record`` now."""
        last = world.chain[-1] if world.chain else None
        if record.status == "erased":
            return None
        if last is None:
            legal = (record.status, record.attempts) in (("running", 1), ("withdrawn", 0))
            return None if legal else f"the first record is {record.status}"
        if last.status == "erased":
            return "a deleted receipt was treated as absent"
        if last.status == "completed":
            return "a completed record was overwritten"
        for session, position in last.fences:
            if _fence(record, session) < position:
                return f"the fence {session}:{position} was dropped or lowered"
        if last.open and not record.open and not record.resolved:
            return "open was dropped, and no resolver had settled the call"
        if record.open and record.said == "notApplied" and not record.resolved:
            return "a failed record says notApplied while it is open whether an earlier attempt landed"
        if _stricter(last.effect, record.effect) != (record.effect or "read"):
            return "the effect became looser"
        waker = self.specs[self._author(record)].kind == "waker"
        if waker and record.effect != last.effect:
            return "a waker wrote an effect that it only guessed"
        if record.attempts == last.attempts + 1:
            return self._illegal_claim(world, last, record)
        if record.attempts != last.attempts or record.token != last.token:
            return f"a write of attempt {record.attempts} was accepted after attempt {last.attempts} was granted"
        if record.status not in _SAME_ATTEMPT[last.status]:
            return f"{last.status} became {record.status}"
        if last.status == "failed" and (
            (record.status == "completed" and not last.resolved)
            or (record.status == "ambiguous" and last.said == "notApplied")
            or (record.status == "failed" and record != last.but(write=record.write, fences=record.fences))
        ):
            return f"a failed record became {record.status}"
        return None

    def _illegal_claim(self, world: World, last: Record, record: Record) -> str | None:
        if record.status != "running" or record.token == last.token:
            return f"a new attempt began as {record.status}"
        if _refused(last, self.specs[self._author(record)]):
            return "a claim from an entry at or before the fence was accepted"
        if not record.open:
            if any(deed.state != "gone" and not deed.denied for deed in world.deeds):
                return "a claim is not open although an earlier attempt landed or may yet land"
            if self.honest and any(actor.phase == "checked" for actor in world.actors):
                return "a claim is not open although another worker is past its last check"
        return None

    def untrue(self, world: World) -> str | None:
        """What the newest record says that is not so."""
        last = world.chain[-1] if world.chain else None
        if last is not None and last.status == "erased":
            return None
        if any(deed.state != "gone" and not deed.denied for deed in world.deeds):
            if last is None or last.status == "withdrawn":
                return "an effect landed or may yet land, and the receipt says that nothing was ever claimed"
            if last.status == "failed" and last.said == "notApplied":
                return "an effect landed or may yet land, and the receipt says notApplied"
        if last is not None and last.status == "completed" and not any(d.state == "landed" for d in world.deeds):
            return "the receipt is completed, and nothing landed"
        return None

    # ------------------------------------------------------------------ reading

    def _views(self, world: World) -> Iterator[tuple[Record | None, int]]:
        """What a read of the newest revision may return."""
        newest = len(world.chain)
        yield (world.chain[-1], newest) if newest else (None, 0)
        if self.stale and newest > 1 and newest - 1 > world.dropped:
            yield world.chain[-2], newest - 1
        elif self.stale and newest == 1:
            yield None, 0

    def _expired(self, world: World, record: Record) -> bool:
        """Whether the lease of a running record may have expired, so that a judge that looked twice says so."""
        return self.mutant == "one look" or not any(actor.window == record.write for actor in world.actors)

    # ------------------------------------------------------------------ one write, whoever makes it

    def _send(self, world: World, i: int, actor: Actor, kind: str, expected: int, record: Record) -> World:
        """Send a new write."""
        window = record.write if kind in ("claim", "renewal", "heartbeat") else actor.window
        if kind == "heartbeat":
            window = actor.window
        op = Op.of(kind, expected, record)
        return self._sent(world, i, actor.but(op=op, window=window, nonces=actor.nonces + 1))

    def _again(self, world: World, i: int, actor: Actor) -> World:
        op = actor.op
        return self._sent(world, i, actor.but(op=op.but(state="wait", conflict=False, sends=op.sends + 1)))

    def _sent(self, world: World, i: int, actor: Actor) -> World:
        op = actor.op
        plain = op.kind == "judgement" and self.mutant == "judge without compare-and-set"
        net = world.net
        if plain or op.expected == len(world.chain):
            net = tuple(sorted({*net, (op.record, plain)}, key=lambda item: item[0].write))
        return self._with(world, i, actor)._replace(net=net)

    def _nonce(self, i: int, actor: Actor) -> int:
        return (i + 1) * 1000 + actor.nonces

    def _with_op(self, world: World, i: int) -> Iterator[Step]:
        """What may become of the write under way.

        An answer that can be had stays to be had, so taking it and acting on it are one step, and so are a time-out
        and the look that follows it.
        """
        actor = world.actors[i]
        op = actor.op
        if op.state == "past":
            yield from self._read_past(world, i)
            return
        if op.state == "wait":
            yield from self._answer(world, i)
        if op.kind in ("settle", "resolve"):
            yield from self._ask_successor(world, i)
        else:
            yield from self._ask_newest(world, i)
        if self.specs[i].gives_up:
            yield from self._labelled(f"{op.kind} stays in doubt: ", self._in_doubt(world, i))

    def _read_past(self, world: World, i: int) -> Iterator[Step]:
        """Read what overtook a write that was refused."""
        op = world.actors[i].op
        for record, rev in self._views(world):
            if record is not None and rev > op.expected:
                prefix = f"{op.kind} was overtaken, reads revision {rev}: "
                yield from self._labelled(prefix, self._overtaken(world, i, record, rev))

    @staticmethod
    def _labelled(prefix: str, steps: Iterator[Step]) -> Iterator[Step]:
        for label, world, problem in steps:
            yield prefix + label, world, problem

    def _answer(self, world: World, i: int) -> Iterator[Step]:
        actor = world.actors[i]
        op = actor.op
        kind = op.kind
        duplicate = (
            self.mutant == "message ids"
            and kind == "claim"
            and any(
                record.status == "running" and record.attempts == op.record.attempts
                for record in world.chain
                if record is not op.record
            )
        )
        if op.stored or duplicate:
            rev = world.chain.index(op.record) + 1 if op.stored else len(world.chain)
            yield from self._labelled(f"{kind} is acknowledged: ", self._landed(world, i, op.record, rev, told=True))
        if len(world.chain) > op.expected and (not op.stored or op.sends > 1):
            if op.sends == 1 or self.mutant == "conflict means lost":
                yield from self._read_past(world, i)
            else:
                after = actor.but(op=op.but(state="doubt", conflict=True))
                yield f"{kind} sent again is refused", self._with(world, i, after), None

    def _ask_newest(self, world: World, i: int) -> Iterator[Step]:
        """A claim, renewal, heartbeat, judgement or fence in doubt goes on from the newest record."""
        actor = world.actors[i]
        op = actor.op
        for record, rev in self._views(world):
            prefix = f"{op.kind} in doubt, reads revision {rev}: "
            if rev > op.expected:
                if op.kind in ("claim", "renewal", "heartbeat"):
                    mine = record.status in ("running", "ambiguous") and record.token == op.record.token
                    if op.kind != "heartbeat" and self._too_strict(op, record):
                        mine = False
                else:
                    mine = record.write == op.record.write
                settled = self._landed if mine else self._overtaken
                yield from self._labelled(prefix, settled(world, i, record, rev))
            elif rev == op.expected and not op.conflict and op.sends < self.specs[i].sends:
                yield prefix + "sends it again", self._again(world, i, actor), None

    def _ask_successor(self, world: World, i: int) -> Iterator[Step]:
        """A settle or a resolve in doubt asks what followed the revision that it was sent on."""
        actor = world.actors[i]
        op = actor.op
        at = max(op.expected, world.dropped)
        if self.mutant == "settle reads the newest":
            at = max(len(world.chain) - 1, op.expected)
        found = world.chain[at] if at < len(world.chain) else None
        prefix = f"{op.kind} in doubt, "
        if (found is None or self.stale) and not op.conflict and op.sends < self.specs[i].sends:
            yield prefix + "finds no successor: sends it again", self._again(world, i, actor), None
        if found is None:
            return
        mine = found.write == op.record.write
        if self.mutant == "settle compares the token":
            mine = found.token == op.record.token
        if mine:
            yield from self._labelled(prefix + "finds it: ", self._landed(world, i, found, at + 1))
        elif op.expected > world.dropped or self.mutant in ("settle reads the newest", "any later revision"):
            if op.kind == "resolve":
                yield from self._labelled(prefix + "finds another write: ", self._overtaken(world, i, found, at + 1))
            elif not world.drops:
                yield from self._labelled(prefix, self._read_past(world, i))
            else:  # the history may be dropped between the two reads
                after = self._with(world, i, actor.but(op=op.but(state="past")))
                yield prefix + "finds another write", after, None
        elif op.record.status == "completed" and op.kind == "settle":
            # Completed is final: the newest record tells.
            after = self._with(world, i, actor.but(op=op.but(state="past")))
            yield prefix + "finds the history dropped", after, None
        elif actor.phase == "finish":
            # The key moved on, so this write landed or never will: there is nothing left to finish.
            yield from self._labelled(
                prefix + "finds the history dropped: ",
                self._after_settle(world, i, actor.but(op=None), "forgets it", None),
            )
        else:
            yield from self._labelled(prefix + "finds the history dropped: ", self._in_doubt(world, i))

    # ------------------------------------------------------------------ what became of a write

    def _landed(self, world: World, i: int, record: Record, rev: int, *, told: bool = False) -> Iterator[Step]:
        """The sender takes the write as stored: ``told`` by its acknowledgement, or by what it read."""
        actor = world.actors[i]
        op = actor.op
        said_so = told or op.kind in ("settle", "resolve")
        problem = f"a {op.kind} was reported as stored that is not" if said_so and not op.stored else None
        done = actor.but(op=None)
        match op.kind:
            case "claim" | "renewal":
                granted = self._with(world, i, done.but(phase="granted", held=record, rev=rev))
                if told and op.stored:
                    yield from self._granted(granted, i)
                else:
                    yield "holds", granted, problem
            case "heartbeat":
                yield "holds", self._with(world, i, done.but(held=record, rev=rev)), problem
            case "judgement" if self.specs[i].kind == "person":
                yield from self._resolve(world, i, done, record, rev, actor.look[2])
            case "judgement":
                yield from self._found_ambiguous(world, i, done, record, rev)
            case "fence":
                yield from self._tell(world, i, done, record)
            case "settle":
                yield from self._settled(world, i, done, record, rev, problem)
            case _:
                yield "resolved", self._with(world, i, self._resolved(i, done, record, rev)), problem

    def _overtaken(self, world: World, i: int, record: Record, rev: int) -> Iterator[Step]:
        actor = world.actors[i]
        op = actor.op
        done = actor.but(op=None)
        own = record.token == op.record.token and record.attempts == op.record.attempts
        rebased = own and record.status in ("running", "ambiguous")
        if op.kind == "renewal" and self._too_strict(op, record):
            rebased = False
        match op.kind:
            case "claim":
                yield from self._decide(world, i, done.but(phase="decide"), record, rev)
            case "renewal" | "heartbeat" if rebased:
                yield "still its own", self._with(world, i, done.but(held=record, rev=rev)), None
            case "renewal":
                lost = done.but(phase="decide", held=None, rev=0, window=0)
                yield from self._decide(world, i, lost, record, rev)
            case "heartbeat":
                yield "lost, the body is cancelled", self._with(world, i, self._rest(i, done)), None
            case "judgement" if self.specs[i].kind == "worker":
                yield from self._decide(world, i, done.but(phase="decide"), record, rev)
            case "judgement" | "fence" if self.specs[i].kind == "waker":
                yield from self._wake(world, i, done, record, rev)
            case "settle":
                yield from self._settle_overtaken(world, i, done, record, rev, own=own)
            case _:
                reported = op.kind == "resolve" and op.stored
                problem = "a resolve that landed was reported as overtaken" if reported else None
                yield "stale, drops it", self._with(world, i, self._resolved(i, done, record, rev)), problem

    def _too_strict(self, op: Op, record: Record) -> bool:
        """Whether the record became opaque before the body was entered, with an earlier attempt open."""
        stricter_now = record.open and record.effect == "opaque" != op.record.effect
        return stricter_now and self.mutant != "takes back what became opaque"

    def _settle_overtaken(
        self, world: World, i: int, done: Actor, record: Record, rev: int, *, own: bool
    ) -> Iterator[Step]:
        op = world.actors[i].op
        problem = "a settle that landed was reported as overtaken" if op.stored else None
        if own and record.status == "completed":
            yield from self._settled(world, i, done, record, rev, None if record.resolved is False else problem)
            return
        late = op.record.status == "completed" and record.status == "failed" and record.resolved
        if own and (record.status in ("running", "ambiguous") or late):
            ending = op.record
            again = record.but(
                write=self._nonce(i, done), status=ending.status, said=ending.said, resolved=False, open=record.open
            )
            if self.mutant == "rebase drops fences":
                again = again.but(fences=())
            after = self._send(world, i, done.but(held=record, rev=rev), "settle", rev, again)
            yield f"still its own, settles again as {ending.status}", after, problem
            return
        yield from self._after_settle(world, i, done, "lost", problem)

    def _in_doubt(self, world: World, i: int) -> Iterator[Step]:
        actor = world.actors[i]
        op = actor.op
        done = actor.but(op=None)
        match op.kind:
            case "claim" | "renewal":
                given = tuple(sorted({*actor.given, op.record.token}))
                yield "gives the claim up", self._with(world, i, self._rest(i, done.but(given=given))), None
            case "heartbeat":
                yield "the body goes on", self._with(world, i, done), None
            case "settle":
                kept = done.but(kept=(op.but(state="doubt", conflict=False), actor.held, actor.rev))
                yield "not recorded, kept", self._with(world, i, self._rest(i, kept)), None
            case _:
                yield "unknown", self._with(world, i, self._rest(i, done)), None

    # ------------------------------------------------------------------ workers

    def _effect(self, i: int, actor: Actor) -> str:
        effects = self.specs[i].effects
        return effects[min(actor.made, len(effects)) - 1]

    def _worker(self, world: World, i: int) -> Iterator[Step]:
        actor = world.actors[i]
        match actor.phase:
            case "idle":
                yield from self._idle(world, i)
            case "decide":
                for record, rev in self._views(world):
                    if rev > actor.floor or (record is None and not actor.floor):
                        yield from self._labelled(f"reads revision {rev}: ", self._decide(world, i, actor, record, rev))
            case "granted":
                yield from self._granted(world, i)
            case "checked":
                yield self._enter(world, i)
            case "body":
                yield from self._body(world, i)
            case "thread":
                state = next(deed.state for deed in world.deeds if deed.token == actor.held.token)
                if state == "landed":
                    yield "its thread ends: settles as completed", self._settle(world, i, actor, "ok"), None
            case "looked":
                yield from self._looked(world, i)

    def _idle(self, world: World, i: int) -> Iterator[Step]:
        actor, spec = world.actors[i], self.specs[i]
        if self.mutant == "enters a claim given up":
            for rev, record in enumerate(world.chain, 1):
                if record.token in actor.given and record.token == record.write:
                    after = actor.but(phase="checked", held=record, rev=rev, given=())
                    yield "the late answer comes, and the claim given up is entered", self._with(world, i, after), None
        if spec.after_wake and not any(
            other.phase == "end" and spec_.kind == "waker"
            for other, spec_ in zip(world.actors, self.specs, strict=True)
        ):
            return
        actor = actor.but(made=actor.made + 1)
        if actor.kept is not None:
            op, held, rev = actor.kept
            after = actor.but(op=op, held=held, rev=rev, kept=None, phase="finish")
            yield "calls, and first finishes the settle that it kept", self._with(world, i, after), None
            return
        yield self._begin(world, i, actor)

    def _begin(self, world: World, i: int, actor: Actor) -> Step:
        if self.specs[i].reads_first:
            return "calls, and reads first", self._with(world, i, actor.but(phase="decide")), None
        return "calls, claims on revision 0", self._claim(world, i, actor, None, 0, 1), None

    def _claim(self, world: World, i: int, actor: Actor, seen: Record | None, rev: int, number: int) -> World:
        nonce = self._nonce(i, actor)
        effect = self._effect(i, actor)
        record = Record.of(nonce, "running", token=nonce, attempts=number, effect=effect)
        if seen is not None:
            leaves_open = seen.open or (
                seen.token not in actor.given
                if seen.status in ("running", "ambiguous")
                else seen.status == "failed" and seen.said != "notApplied"
            )
            record = record.but(
                effect=_stricter(effect, seen.effect),
                open=leaves_open and self.mutant != "claim drops open",
                fences=() if self.mutant == "claim drops fences" else seen.fences,
            )
        claiming = actor.but(phase="claiming", floor=0, held=None, rev=0, claims=actor.claims + 1)
        return self._send(world, i, claiming, "claim", rev, record)

    def _decide(self, world: World, i: int, actor: Actor, record: Record | None, rev: int) -> Iterator[Step]:
        """What a caller does about the record that it read. A live lease: nothing, until it reads again."""
        spec = self.specs[i]
        if record is None:
            if actor.claims < spec.claims:
                yield "claims on revision 0", self._claim(world, i, actor, None, 0, 1), None
            return
        if record.status == "erased":
            if self.mutant == "creates over tombstones":
                yield f"claims on revision {rev}", self._claim(world, i, actor, None, rev, 1), None
            else:
                yield "it was erased", self._with(world, i, self._rest(i, actor)), None
            return
        if record.status == "completed":
            yield "replays", self._with(world, i, self._rest(i, actor)), None
            return
        if _refused(record, spec) and not (self.mutant == "claims that name no entry pass" and not spec.entry):
            yield "withdrawn", self._with(world, i, self._rest(i, actor)), None
            return
        effect = _stricter(self._effect(i, actor), record.effect)
        given_up = record.status in ("running", "ambiguous") and record.token in actor.given
        if given_up and record.open and effect == "opaque" and self.mutant != "given up over open":
            given_up = False  # this claim was not entered, but an earlier attempt may have landed
        status = record.status
        if status == "withdrawn":
            status = "absent"
        elif given_up or (status == "failed" and (effect != "opaque" or record.said == "notApplied")):
            status = "failed"
        elif status == "running" and not self._expired(world, record):
            yield "a live lease, waits", self._with(world, i, actor.but(phase="decide", floor=0)), None
            return
        else:
            status = "expired"
        number = _decide(status, record.attempts, effect)
        if number and actor.claims >= spec.claims:
            return
        if number:
            after = self._claim(world, i, actor, record, rev, number)
            yield f"claims attempt {number} on revision {rev}", after, None
        elif record.status == "ambiguous":
            yield from self._found_ambiguous(world, i, actor, record, rev)
        else:
            yield f"judges it on revision {rev}", self._judge(world, i, actor, record, rev, effect), None

    def _judge(self, world: World, i: int, actor: Actor, record: Record, rev: int, effect: str) -> World:
        judged = record.but(write=self._nonce(i, actor), status="ambiguous", effect=effect, said="error")
        return self._send(world, i, actor.but(phase="judging", floor=0), "judgement", rev, judged)

    def _found_ambiguous(self, world: World, i: int, actor: Actor, record: Record, rev: int) -> Iterator[Step]:
        if self.specs[i].verifies:
            after = actor.but(phase="looked", look=(record, rev, ""))
            yield "ambiguous, asks the verifier", self._with(world, i, after), None
        else:
            yield "says that it is ambiguous", self._with(world, i, self._rest(i, actor)), None

    def _granted(self, world: World, i: int) -> Iterator[Step]:
        actor, spec = world.actors[i], self.specs[i]
        in_time = actor.held.status == "running" and (actor.window == actor.held.write or self.mutant == "late entry")
        if in_time:
            yield "checks: in time", self._with(world, i, actor.but(phase="checked", window=0)), self._too_late(world)
        elif actor.renewals < spec.renewals:
            yield "too late, renews", self._renew(world, i, actor, "renewal"), None
        if spec.gives_up:
            given = tuple(sorted({*actor.given, actor.held.token}))
            yield "gives up the claim it holds", self._with(world, i, self._rest(i, actor.but(given=given))), None
        if spec.cancels:
            after = self._settle(world, i, actor, "notApplied")
            yield "is cancelled before it enters, settles as not applied", after, None

    def _too_late(self, world: World) -> str | None:
        last = world.chain[-1]
        return "a completed call is executed again" if last.status == "completed" and not last.resolved else None

    def _renew(self, world: World, i: int, actor: Actor, kind: str) -> World:
        record = actor.held.but(
            write=self._nonce(i, actor), status="running", said="", resolved=False, open=actor.held.open
        )
        counted = actor.but(renewals=actor.renewals + 1) if kind == "renewal" else actor.but(beats=actor.beats + 1)
        return self._send(world, i, counted, kind, actor.rev, record)

    def _enter(self, world: World, i: int) -> Step:
        actor, spec = world.actors[i], self.specs[i]
        last = world.chain[-1]
        # What a resolver that was mistaken declared failed may still be entered: its word covers that entry too.
        denied = not self.honest and (last.token != actor.held.token or last.status == "failed")
        problem = None
        if actor.held.effect == "opaque" and not denied and any(not deed.denied for deed in world.deeds):
            problem = "an opaque effect is entered twice, and nobody said that it had not landed"
        for session, position in world.told:
            if self.honest and spec.session == session and spec.entry <= position:
                problem = "an effect is entered after the model was told that it never started"
        deed = Deed(actor.held.token, "under way", denied=denied, session=spec.session, entry=spec.entry)
        after = self._with(world, i, actor.but(phase="body"))._replace(deeds=(*world.deeds, deed))
        return f"enters the effect (attempt {actor.held.attempts})", after, problem or self.untrue(after)

    def _body(self, world: World, i: int) -> Iterator[Step]:
        actor, spec = world.actors[i], self.specs[i]
        if actor.op is not None:
            return
        if actor.beats < spec.beats:
            yield "heartbeat", self._renew(world, i, actor, "heartbeat"), None
        state = next(deed.state for deed in reversed(world.deeds) if deed.token == actor.held.token)
        for ending in spec.endings:
            if (ending == "ok" and state != "landed") or (ending == "notApplied" and state != "gone"):
                continue
            yield f"the body ends ({ending}), settles", self._settle(world, i, actor, ending), None

    def _settle(self, world: World, i: int, actor: Actor, ending: str) -> World:
        held = actor.held
        if ending == "ok":
            status, said = "completed", "result"
        elif ending == "notApplied" and not (held.open and self.mutant != "not applied while open"):
            status, said = "failed", "notApplied"
        else:
            status, said = ("ambiguous" if held.effect == "opaque" else "failed"), "error"
        record = held.but(write=self._nonce(i, actor), status=status, said=said, resolved=False)
        return self._send(world, i, actor.but(phase="settling", window=0), "settle", actor.rev, record)

    def _settled(
        self, world: World, i: int, done: Actor, record: Record, rev: int, problem: str | None
    ) -> Iterator[Step]:
        under_way = any(deed.token == record.token and deed.state != "gone" for deed in world.deeds)
        if self.specs[i].thread and record.status == "ambiguous" and done.phase == "settling" and under_way:
            after = done.but(phase="thread", held=record, rev=rev)
            yield "recorded; its thread goes on", self._with(world, i, after), problem
            return
        yield from self._after_settle(world, i, done, "recorded", problem)

    def _after_settle(self, world: World, i: int, done: Actor, what: str, problem: str | None) -> Iterator[Step]:
        if done.phase == "finish":
            label, after, _ = self._begin(world, i, done.but(held=None, rev=0))
            yield f"{what}; {label}", after, problem
        else:
            yield what, self._with(world, i, self._rest(i, done)), problem

    # ------------------------------------------------------------------ people and verifiers

    def _person(self, world: World, i: int) -> Iterator[Step]:
        actor, spec = world.actors[i], self.specs[i]
        if actor.phase == "looked":
            yield from self._looked(world, i)
            return
        for record, rev in self._views(world):
            if record is None or record.status not in ("ambiguous", "running"):
                continue
            after = actor.but(phase="looked", look=(record, rev, ""), made=actor.made + 1)
            if actor.made < spec.times:
                yield f"looks at revision {rev} ({record.status})", self._with(world, i, after), None

    def _looked(self, world: World, i: int) -> Iterator[Step]:
        """The verdict, and the write on the revision that was looked at."""
        actor, spec = world.actors[i], self.specs[i]
        record, rev, _ = actor.look
        verdicts = []
        if any(deed.state == "landed" for deed in world.deeds):
            verdicts.append("completed")
        elif spec.mistaken or (
            all(deed.state == "gone" for deed in world.deeds)
            and self._expired(world, record)
            and not any(other.phase == "checked" for other in world.actors)
        ):
            verdicts.append("failed")
        for verdict in verdicts:
            if record.status == "running" and not spec.even_if_running:
                if self._expired(world, record):
                    judged = actor.but(look=(record, rev, verdict))
                    after = self._judge(world, i, judged, record, rev, record.effect)
                    yield f"finds that it is {verdict}, judges revision {rev} first", after, None
                continue
            yield from self._resolve(world, i, actor, record, rev, verdict)

    def _resolve(self, world: World, i: int, actor: Actor, record: Record, rev: int, verdict: str) -> Iterator[Step]:
        if self.mutant == "resolve on a fresh read":
            record, rev = world.chain[-1], len(world.chain)
            if record.status == "completed":
                return
        said = "result" if verdict == "completed" else "notApplied"
        settled = record.but(write=self._nonce(i, actor), status=verdict, said=said, resolved=True, open=False)
        after = self._send(world, i, actor.but(phase="resolving", look=None), "resolve", rev, settled)
        yield f"resolves revision {rev} as {verdict}", after, None

    def _resolved(self, i: int, done: Actor, record: Record, rev: int) -> Actor:
        if self.specs[i].kind == "worker":
            return done.but(phase="decide", floor=max(rev - 1, 0), look=None)
        return self._rest(i, done)

    # ------------------------------------------------------------------ wakers

    def _waker(self, world: World, i: int) -> Iterator[Step]:
        for record, rev in self._views(world):
            yield from self._labelled(
                f"wakes, reads revision {rev}: ", self._wake(world, i, world.actors[i], record, rev)
            )

    def _wake(self, world: World, i: int, actor: Actor, record: Record | None, rev: int) -> Iterator[Step]:
        spec = self.specs[i]
        actor = actor.but(phase="waking")
        if record is None:
            yield from self._fenced(world, i, actor, Record.of(0, "withdrawn"), 0)
            return
        effect = _stricter(spec.effects[0], record.effect)
        doubtful = effect == "opaque" and record.said != "notApplied"
        closed = "closes without saying that it never ran", self._with(world, i, Actor.of(phase="end")), None
        match record.status:
            case "running" if not self._expired(world, record):
                return
            case "running" if record.effect == "opaque" or (
                doubtful and self.mutant == "a wake writes what it guesses"
            ):
                after = self._judge(world, i, actor, record, rev, effect)
                yield f"judges revision {rev}", after, None
            case "running" | "failed" if doubtful:
                yield closed  # by the tool's effect as the waker knows it, of which nothing is written
            case "failed" | "withdrawn":
                yield from self._fenced(world, i, actor, record, rev)
            case _:
                yield closed

    def _fenced(self, world: World, i: int, actor: Actor, record: Record, rev: int) -> Iterator[Step]:
        spec = self.specs[i]
        stands = _fence(record, spec.session) >= spec.entry and self.mutant != "a fence goes down"
        unfenced = self.mutant == "wake without a fence" or (
            self.mutant == "an error is told without a fence" and record.status == "failed"
        )
        if stands or unfenced:
            yield from self._tell(world, i, actor, record)
            return
        fences = {**dict(record.fences), spec.session: spec.entry}
        if self.mutant == "fence forgets other sessions":
            fences = {spec.session: spec.entry}
        fenced = record.but(write=self._nonce(i, actor), fences=tuple(sorted(fences.items())))
        yield f"writes its fence on revision {rev}", self._send(world, i, actor, "fence", rev, fenced), None

    def _tell(self, world: World, i: int, actor: Actor, record: Record) -> Iterator[Step]:
        spec = self.specs[i]
        after = self._with(world, i, Actor.of(phase="end"))
        if record.status == "failed" and record.said != "notApplied":
            yield "tells the model the error", after, None
            return
        problem = None
        if self.honest and any(
            deed.session == spec.session and deed.entry <= spec.entry and deed.state != "gone" for deed in world.deeds
        ):
            problem = "the model is told that a call never started that ran or may still run"
        after = after._replace(told=tuple(sorted({*world.told, (spec.session, spec.entry)})))
        yield f"tells the model that it never started up to {spec.session}:{spec.entry}", after, problem

    # ------------------------------------------------------------------ somebody who deletes the key

    def _eraser(self, world: World, i: int) -> Iterator[Step]:
        if world.chain:
            erased = Record.of(self._nonce(i, world.actors[i]), "erased")
            after = self._with(world, i, Actor.of(phase="end"))._replace(chain=(*world.chain, erased), net=())
            yield "deletes the key", after, None
