"""The judge of receipts: every stored revision, every effect that is entered and every word to a caller is held
against the whole history and against what happened outside.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from sim_process import Crashed

from natsreceipts.attempt import margin_of
from natsreceipts.decision import Effect, stricter
from natsreceipts.errors import (
    AmbiguousCall,
    CallInFlight,
    CallTimedOut,
    CallWithdrawn,
    LeaseLost,
    NotClaimed,
    NotRecorded,
    ReceiptErased,
    Unreachable,
)
from natsreceipts.payload import unpack
from natsreceipts.wire import Payload, ReceiptRecord

if TYPE_CHECKING:
    from sim_outside import Deed
    from sim_process import Process
    from sim_world import World

    from natsreceipts._jetstream import Entry
    from natsreceipts.entries import SessionEntry

__all__ = ["Asked", "BodyFailed", "Judge"]


_SAME_ATTEMPT = {
    "running": ("running", "completed", "failed", "ambiguous"),
    "ambiguous": ("running", "completed", "failed", "ambiguous"),
    "failed": ("completed", "failed", "ambiguous"),
    "withdrawn": ("withdrawn",),
}


class BodyFailed(Exception):
    """What a body raises that is no word about its effect."""


class Asked:
    """A call that a process has made, while it is under way."""

    def __init__(self, process: Process, key: str, entry: SessionEntry | None) -> None:
        self.process = process
        self.key = key
        self.entry = entry
        self.high_water = process.high_water
        """The highest sequence of the receipts that its process knew of when it was made."""
        self.since = process.loop.time()
        self.first = process.world.nonces.count
        self.last = 2**62
        """Of the names that were drawn while it was under way."""
        self.deeds: list[Deed] = []
        self.tokens: set[str] = set()
        """Of the attempts whose body was begun, whether or not it came to the effect."""
        self.returned: list[Any] = []
        """What its body returned."""
        self.shared = False
        """Whether another call of this process may have been executed in its stead."""
        self.raised: BaseException | None = None
        """What its body raised, so that it may come out."""


class Judge:
    """Holds what it sees against the design. `World.fail` is told of what is wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.chains: dict[str, list[tuple[int, ReceiptRecord]]] = {}
        self._writes: set[str] = set()
        self._when: dict[int, float] = {}
        """When a revision was stored, on the loop's clock."""
        self._begun: set[tuple[Process, str]] = set()
        """Which processes have begun a body of a call."""
        self._kept: dict[tuple[Process, str], int | None] = {}
        """The attempts whose outcome a process keeps, to write it down in its next call unless another one began."""
        self._never: list[tuple[str, str, str, tuple[str, ...]]] = []
        """Key, token, why, and what may never be on record of this attempt by its own word."""
        self.unsettled: dict[str, str] = {}
        """Who was told that nothing of theirs was settled: ``by`` and why."""
        self._ended: set[str] = set()
        """The attempts whose call is over, and whose end is on record."""
        self._erased: dict[str, int] = {}
        """By key the revision of the newest marker that somebody put there."""
        self._lapsed: set[str] = set()
        """Keys of which everything expired at some time."""
        self._before: set[str] = set()
        """The attempts of a bucket that was replaced."""
        self.told_never: dict[tuple[str, str], int] = {}
        """By key and session the position up to which a model was told that no call was started."""

    def expired(self, key: str) -> None:
        """Nothing is kept of a receipt any more: its call may be executed again, and all that was said is over."""
        for mine in (self.chains, self._world.outside.deeds):
            mine.pop(key, None)
        self._never = [each for each in self._never if each[0] != key]
        self._kept = {who: result for who, result in self._kept.items() if who[1] != key}
        self.told_never = {who: position for who, position in self.told_never.items() if who[0] != key}
        self._lapsed.add(key)

    def forget(self) -> None:
        """The bucket was replaced. All that is promised then: who knows of a higher sequence enters nothing on it."""
        self._before = {token for key in self.chains for token in self.holders(key)}
        self.chains.clear()
        self._never.clear()
        self.unsettled.clear()
        self._world.outside.deeds.clear()

    # ------------------------------------------------------------------ what is stored

    def stored(self, entry: Entry, by: str) -> None:
        """A revision of a receipt was stored."""
        if entry.erased:
            self._erased[entry.key] = entry.revision
            return
        record = ReceiptRecord.model_validate_json(entry.value)
        chain = self.chains.setdefault(entry.key, [])
        last = chain[-1][1] if chain else None
        if self._erased.get(entry.key, 0) > (chain[-1][0] if chain else 0):
            anew = record.resolved is not None and record.attempts == 1 and record.holder is None
            problem = None if anew else "a receipt that was erased was written over, and by no resolver"
        else:
            problem = self._illegal(entry.key, last, record, by) or self._too_soon(entry.key, last, record, by)
        if record.write in self._writes:
            problem = problem or "a nonce of a write is used twice"
        self._writes.add(record.write)
        problem = problem or self._untrue(entry.key, entry.revision, record)
        chain.append((entry.revision, record))
        self._when[entry.revision] = self._world.loop.time()
        if problem and not self._world.replaced:
            self._world.fail(f"revision {entry.revision} by {by}: {problem}")

    def purged(self, key: str) -> None:
        """All that stood there is gone, and with it the fences: a person's word counts for more than a wake's then."""
        self.told_never = {who: position for who, position in self.told_never.items() if who[0] != key}

    def lapsed(self, key: str) -> bool:
        """Whether everything of a receipt expired at some time."""
        return key in self._lapsed

    def was_erased(self, key: str) -> bool:
        """Whether somebody ever put a marker there."""
        return key in self._erased

    def holders(self, key: str) -> list[str]:
        """The tokens of all attempts that ever held the call."""
        tokens = [record.holder.token for _, record in self.chains.get(key, ()) if record.holder is not None]
        return list(dict.fromkeys(tokens))

    def _illegal(self, key: str, last: ReceiptRecord | None, record: ReceiptRecord, by: str) -> str | None:
        if last is None:
            fresh = record.status == "running" and record.attempts == 1 and not record.open
            return None if fresh or record.status == "withdrawn" else f"the first record is {record.status}"
        if last.status == "completed":
            return f"a completed record became {record.status}"
        fences = record.fences or {}
        if any(fences.get(session, -1) < position for session, position in (last.fences or {}).items()):
            return f"a fence was lowered or dropped: {last.fences} became {fences}"
        if last.open and not record.open and record.resolved is None:
            return "that an earlier attempt is open was dropped"
        if last.effect is not None and stricter(last.effect, record.effect or Effect.READ) is not record.effect:
            return f"the effect became looser: {last.effect} became {record.effect}"
        if record.attempts == last.attempts + 1:
            return self._illegal_claim(key, last, record)
        token = last.holder.token if last.holder else None
        if record.attempts != last.attempts or (record.holder.token if record.holder else None) != token:
            return f"a write of attempt {record.attempts} was accepted after attempt {last.attempts} was granted"
        if record.status not in _SAME_ATTEMPT[last.status]:
            return f"{last.status} became {record.status}"
        if record.status == "running" and token in self._ended:
            return "an attempt took its call back after its end"
        if any(name not in (record.steps or {}) for name in last.steps or {}):
            return "a recorded step was dropped"
        if last.status == "failed":
            fenced = last.model_copy(update={"write": record.write, "fences": record.fences})
            if record.status == "failed" and record.resolved is None and record != fenced:
                return "a failed record was changed by more than a fence"
            if record.status == "completed" and last.resolved is None and record.resolved is None:
                return "a failed record became completed, and nobody had declared it failed"
        return None

    def _illegal_claim(self, key: str, last: ReceiptRecord, record: ReceiptRecord) -> str | None:
        token = record.holder.token if record.holder else ""
        if record.status != "running" or (last.holder and token == last.holder.token):
            return f"attempt {record.attempts} began as {record.status}"
        owner = self._world.nonces.owner(token)
        asked = self._world.asked_by(key, token)
        if last.fences and not any(self._beyond(last, each.entry) for each in asked):
            return "a claim from an entry at or before a fence, or from none, was accepted"
        given_up = last.holder is not None and owner is self._world.nonces.owner(last.holder.token)
        fit = last.status == "withdrawn" or last.not_applied or (given_up and not last.open)
        if record.effect is Effect.OPAQUE and not fit:
            return f"an opaque call was claimed over {last.status}"
        if not record.open and self._may_have_landed(key, 2**62):
            return "a claim is not open, although an earlier attempt landed or may yet land"
        return None

    def _too_soon(self, key: str, last: ReceiptRecord | None, record: ReceiptRecord, by: str) -> str | None:
        """Whether a live attempt was condemned or replaced before its time."""
        if last is None or last.status != "running" or last.holder is None:
            return None
        condemned = record.status == "ambiguous"
        if not condemned and record.attempts == last.attempts:
            return None
        owner = self._world.nonces.owner(last.holder.token)
        if owner is not None and owner.name == by:
            return None
        left = self.lease_left(key, len(self.chains[key]) - 1)
        if left > 0.001:
            return f"a live attempt was overruled {left:.2f} s before the end of its lease"
        # Whatever the clocks of several leaders say: an opaque attempt is looked at twice.
        lease = (last.lease_ms or 0) / 1000
        age = self._world.loop.time() - self._when[self.chains[key][-1][0]]
        if condemned and age < (lease + margin_of(lease)) / 3 - 0.001:
            return f"a record was made ambiguous {age:.2f} s after it was written, with a lease of {lease:g} s"
        return None

    def lease_left(self, key: str, index: int) -> float:
        """Seconds of lease that a revision, by its place in the chain, surely has left; 0 where clocks have jumped."""
        at, record = self.chains[key][index]
        lease = (record.lease_ms or 0) / 1000
        age = self._world.loop.time() - self._when[at]
        return 0.0 if self._world.receipts.elections else lease + margin_of(lease) - age

    @staticmethod
    def _beyond(last: ReceiptRecord, entry: SessionEntry | None) -> bool:
        return entry is not None and entry.seq > (last.fences or {}).get(entry.token, -1)

    def _may_have_landed(self, key: str, before: int) -> bool:
        deeds = self._world.outside.deeds.get(key, ())
        return any(deed.state != "gone" and not self.denied(deed, before) for deed in deeds)

    def denied(self, deed: Deed, before: int) -> bool:
        """Whether somebody said on record, before that revision, that the deed's call did not have its effect."""
        return any(deed.claimed < at < before and record.not_applied for at, record in self.chains[deed.key])

    def _untrue(self, key: str, revision: int, record: ReceiptRecord) -> str | None:
        if (record.status == "withdrawn" or record.not_applied) and self._may_have_landed(key, revision):
            return f"an effect landed or may yet land, and the receipt says {record.status}, not applied"
        if record.status == "completed":
            result = self.value(record.result)
            deeds = self._world.outside.deeds.get(key, ())
            if not any(deed.state == "landed" and deed.result == result for deed in deeds):
                return f"the receipt is completed with {result!r}, and no such effect landed"
        return None

    def value(self, payload: Payload | None) -> Any:
        """A payload's value."""
        if payload is None:
            return None
        if payload.object is not None:
            return unpack(self._world.objects[payload.object.name])
        return payload.value()

    # ------------------------------------------------------------------ what is entered

    def entering(self, asked: Asked, token: str) -> int:
        """An effect is about to be entered. The revision of its claim."""
        chain = self.chains.get(asked.key, [])
        mine = [(at, record) for at, record in chain if record.holder is not None and record.holder.token == token]
        if self._world.replaced:
            if mine and token not in self._before and mine[0][0] <= asked.high_water:
                why = f"revision {mine[0][0]} of a bucket that was replaced, knowing of {asked.high_water}"
                self._world.fail(f"{asked.process.name} enters an effect on {why}")
            return mine[0][0] if mine else 0
        if not mine:
            self._world.fail(f"{asked.process.name} enters an effect that it has no claim of on record")
            return 0
        claimed, held = mine[0]
        if any(at < claimed and record.status == "completed" for at, record in chain):
            self._world.fail(f"{asked.process.name} executes a completed call again")
        if any(record.not_applied for _, record in mine):
            self._world.fail(f"{asked.process.name} enters an effect that its receipt says did not happen")
        for deed in self._world.outside.deeds.get(asked.key, ()):
            if deed.token == token:
                self._world.fail(f"{asked.process.name} enters the effect twice on one claim")
            elif held.effect is Effect.OPAQUE and not self.denied(deed, claimed):
                self._world.fail(
                    f"{asked.process.name} enters an opaque effect again (deed {deed.number} is {deed.state}), and "
                    f"nobody had said that it did not land"
                )
        if asked.entry is not None:
            position = self.told_never.get((asked.key, asked.entry.token), -1)
            if asked.entry.seq <= position:
                self._world.fail(
                    f"{asked.process.name} enters an effect from entry {asked.entry.seq}, after the model was told up "
                    f"to {position} that it did not start"
                )
        return claimed

    def stepping(self, asked: Asked, claimed: int, name: str) -> None:
        """A step of a resumable effect is executed."""
        if self._world.replaced:
            return
        # What a person settled as not applied after it had been deleted by hand begins anew, without the steps.
        since = self._erased.get(asked.key, 0)
        earlier = [record for at, record in self.chains[asked.key] if since < at < claimed]
        if any(name in (record.steps or {}) for record in earlier):
            self._world.fail(f"{asked.process.name} executes step {name} again, which is on record")

    # ------------------------------------------------------------------ what is told

    def told(self, asked: Asked, outcome: Any) -> None:
        """What the caller of a call gets. Only of processes that live."""
        if self._world.replaced or asked.key in self._lapsed:
            return
        if asked.tokens:
            self._begun.add((asked.process, asked.key))
        chain = self.chains.get(asked.key, [])
        newest = chain[-1][1] if chain else None
        if newest is not None and newest.holder is not None and newest.status != "running" and not asked.shared:
            self._ended |= {newest.holder.token} & asked.tokens
        said: str | None = None
        if isinstance(outcome, (CallInFlight, AmbiguousCall, NotClaimed, CallWithdrawn)):
            if asked.deeds and not asked.shared:
                said = "the effect was entered all the same"
            elif isinstance(outcome, AmbiguousCall):
                found = dict(chain).get(outcome.revision)
                if found is not None and self._kept.get((asked.process, asked.key)) == found.attempts:
                    said = "this process said that it keeps the result, and its next call would finish the record"
                elif found is None or found.status != "ambiguous" or found.attempts != outcome.attempts:
                    said = f"revision {outcome.revision} is {found and found.status}"
                elif self._over(asked.key, outcome.revision) < asked.since and not self._world.receipts.elections:
                    said = f"revision {outcome.revision} was over before the call was made"
            elif isinstance(outcome, CallInFlight) and newest is None and not asked.shared:
                said = "there never was an attempt"
            elif isinstance(outcome, CallWithdrawn):
                entry = asked.entry
                if not any(record.fences and not self._beyond(record, entry) for _, record in chain):
                    said = "there is no such fence"
        elif isinstance(outcome, LeaseLost):
            for token in asked.tokens:
                statuses = ("completed", "failed") if "(the receipt is" in str(outcome) else ("completed",)
                self._never.append((asked.key, token, f"{asked.process.name} was told LeaseLost", statuses))
            if outcome.has_result and not any(result == outcome.result for result in asked.returned):
                said = f"its result {outcome.result!r} is none that this call had"
        elif isinstance(outcome, NotRecorded):
            deeds = [deed for deed in self._world.outside.deeds.get(asked.key, ()) if deed.process is asked.process]
            if outcome.kept and outcome.has_result and any(deed.result == outcome.result for deed in deeds):
                self._kept[asked.process, asked.key] = outcome.attempts
            if (asked.process, asked.key) not in self._begun:
                said = "this process never executed it"
            elif outcome.kept and outcome.has_result and type(outcome.result) is not dict:
                said = f"its result {outcome.result!r} is none that this process had"
        elif isinstance(outcome, CallTimedOut):
            tokens = asked.tokens
            if not any(
                record.status == outcome.status and record.holder is not None and record.holder.token in tokens
                for _, record in chain
            ):
                said = f"no record of this attempt says {outcome.status}"
        elif isinstance(outcome, (asyncio.CancelledError, Crashed)) or outcome is asked.raised is not None:
            pass
        elif isinstance(outcome, ReceiptErased):
            if asked.key not in self._erased:
                said = "nobody erased it"
            elif asked.deeds and not asked.shared:
                said = "the effect was entered all the same"
        elif isinstance(outcome, Unreachable) and asked.tokens:
            pass  # its body asked for a recorded step, or to renew
        elif isinstance(outcome, BaseException):
            said = "that is no error that a caller is to get"
        elif newest is None or newest.status != "completed" or self.value(newest.result) != outcome:
            said = f"the receipt is {newest and newest.status}"
        if said:
            self._world.fail(f"{asked.process.name} was told {_short(outcome)}, and {said}")

    def settled(self, by: str, key: str, outcome: Any) -> None:
        """What a resolver was told: a receipt, StaleRevision, or that nothing was settled."""
        if self._world.replaced or key in self._lapsed:
            return
        written = [at for at, record in self.chains.get(key, ()) if record.resolved and record.resolved.by == by]
        if isinstance(outcome, BaseException):
            if "whether it was settled is not known" not in str(outcome):
                self.unsettled[by] = _short(outcome)
        elif written[:1] != [outcome.revision]:  # (a fence on a failed record carries the words on)
            self._world.fail(f"{by} was told that revision {outcome.revision} settles it, and on record is {written}")

    def _over(self, key: str, revision: int) -> float:
        """When a revision was followed by another one, on the loop's clock."""
        later = [at for at, _ in self.chains[key] if at > revision]
        return self._when[later[0]] if later else math.inf

    def at_the_end(self) -> None:
        """What was said must still be so when every late write has landed."""
        for key, token, why, statuses in self._never:
            for at, record in self.chains.get(key, ()):
                own = record.holder is not None and record.holder.token == token and record.resolved is None
                if record.status in statuses and own:
                    self._world.fail(f"revision {at} is the attempt's own {record.status}, and {why}")
        for key, chain in self.chains.items():
            for at, record in chain:
                if record.resolved is not None and record.resolved.by in self.unsettled:
                    why = self.unsettled[record.resolved.by]
                    # A fence, or a later attempt's settle, carries the words on: the first one with them counts.
                    self._world.fail(f"revision {at} of {key} settles it, and {record.resolved.by} was told {why}")


def _short(outcome: Any) -> str:
    return f"{type(outcome).__name__}: {outcome}"[:300] if isinstance(outcome, BaseException) else f"{outcome!r}"[:200]
