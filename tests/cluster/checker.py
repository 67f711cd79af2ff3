"""Whether a history keeps the promises. Pure: it knows the wire format, and none of the product's code.

Everything is held against two things that cannot lie: the streams with all their revisions, and the log of the effects
outside. What a worker was told must fit to both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from history import Deed, History, Operation, Stored

__all__ = ["RULES", "Violation", "check"]

RULES = {
    "chain": "each revision of a key was written on the one before it",
    "transition": "a record became what it may not become",
    "two holders": "a live attempt was overruled, or a second one granted beside it",
    "opaque twice": "an opaque effect was entered again, and nobody had said that it did not land",
    "executed again": "a completed call, or a recorded step, was executed again",
    "untrue": "a record says what did not happen",
    "lost": "what was acknowledged is not there",
    "told": "somebody was told what is not so",
    "never started": "a model was told that a call never started, and its effect ran",
    "error": "an error that a caller is not to get",
    "notice": "a notice was lost, or consumed by two turns",
    "session": "a session's entry was lost, doubled, or stored all the same",
}
"""What is checked, by the name that a violation carries."""

_ENTERED_NOTHING = frozenset({"CallInFlight", "AmbiguousCall", "NotClaimed", "CallWithdrawn"})
"""Nothing was executed for a caller who gets one of these."""

_OF_CALLS = _ENTERED_NOTHING | {"LeaseLost", "NotRecorded", "NotApplied", "Broke", "TimeoutError", "Unreachable"}
_REPLACED = frozenset({"BucketReplaced", "NotProvisioned", "Unreachable"})
_ERRORS = {
    "call": _OF_CALLS,
    "resolve": frozenset({"StaleRevision", "NotResolvable", "CallInFlight", "Unreachable"}),
    "read": frozenset({"Unreachable"}),
    "append": frozenset({"SessionConflict", "Unreachable"}),
    "wake": frozenset({"SessionBusy", "SessionConflict", "Unreachable", "NotClaimed"}),
    "file": frozenset({"Unreachable"}),
    "consume": frozenset({"AlreadyConsumed", "Unreachable"}),
}
_SAME_ATTEMPT = {
    "running": ("running", "completed", "failed", "ambiguous"),
    "ambiguous": ("running", "completed", "failed", "ambiguous"),
    "failed": ("completed", "failed", "ambiguous"),
    "withdrawn": ("withdrawn",),
}
_STRICTNESS = ("read", "idempotent", "resumable", "opaque")

_SLACK = 0.1
"""Seconds by which timestamps of one machine may disagree with themselves."""

_DEPOSED = 20.0
"""Seconds for which a leader that was deposed may go on telling what was so before."""


class Violation(NamedTuple):
    """A promise that was not kept. ``rule`` is one of `RULES`."""

    rule: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.key}: {self.what}"


def check(history: History) -> list[Violation]:
    """Every violation in a history. Of a bucket that was replaced only what is promised even then."""
    judge = _Judge(history)
    if history.replaced:
        return [*judge.entered_once_on_this_side(), *judge.errors(), *judge.refusals()]
    found: list[Violation] = []
    for part in (
        judge.chains,
        judge.entries,
        judge.records,
        judge.answers,
        judge.errors,
        judge.refusals,
        judge.notices,
        judge.sessions,
    ):
        found.extend(part())
    return found


def _token(record: dict[str, Any]) -> str:
    return (record.get("holder") or {}).get("token", "")


def _worker(record: dict[str, Any]) -> str:
    return (record.get("holder") or {}).get("worker", "")


def _not_applied(record: dict[str, Any]) -> bool:
    return record["status"] == "failed" and bool((record.get("error") or {}).get("notApplied"))


def _judged(record: dict[str, Any]) -> bool:
    return record["status"] == "ambiguous" and (record.get("error") or {}).get("type") == "LeaseExpired"


class _Judge:
    def __init__(self, history: History) -> None:
        self._history = history
        self._chains = _by_key(history.receipts)
        self._deeds: dict[str, list[Deed]] = defaultdict(list)
        self._by_op: dict[str, list[Deed]] = defaultdict(list)
        for deed in sorted(history.deeds, key=lambda deed: deed.at):
            self._deeds[deed.key].append(deed)
            self._by_op[deed.op].append(deed)

    # ------------------------------------------------------------------ receipts: what is stored

    def chains(self) -> Iterator[Violation]:
        """The revisions of each key."""
        for stored in (self._chains, _by_key(self._history.notices), _by_key(self._history.sessions)):
            for key, chain in stored.items():
                before = 0
                for each in chain:
                    if each.expected != before:
                        what = f"revision {each.revision} was written on {each.expected}, and {before} was the newest"
                        yield Violation("chain", key, what)
                    before = each.revision
        seen: dict[str, int] = {}
        for key, chain in self._chains.items():
            last: Stored | None = None
            for each in chain:
                nonce = each.value["write"]
                if nonce in seen:
                    yield Violation("chain", key, f"revisions {seen[nonce]} and {each.revision} are one write")
                seen[nonce] = each.revision
                problem = _illegal(last.value if last else None, each.value)
                if problem:
                    yield Violation("transition", key, f"revision {each.revision}: {problem}")
                elif last is not None and (problem := self._too_soon(key, last, each)):
                    yield Violation("two holders", key, f"revision {each.revision}: {problem}")
                last = each

    def _too_soon(self, key: str, last: Stored, now: Stored) -> str | None:
        """Whether a live attempt was condemned, or replaced, before the end of its lease."""
        record, new = last.value, now.value
        if record["status"] != "running" or "resolved" in new:
            return None
        replaced = new["attempts"] == record["attempts"] + 1
        if not replaced and not (_judged(new) and new["write"] != record["write"]):
            return None
        if replaced and _worker(new) == _worker(record) and not self._began(key, last):
            return None  # a claim that this very process had given up, and that it never entered
        age, lease = now.time - last.time, record["leaseMs"] / 1000
        if age < lease - _SLACK:
            what = "replaced" if replaced else "judged dead"
            return f"attempt {record['attempts']} was {what} {age:.2f} s after its last write, its lease is {lease:g} s"
        return None

    def _began(self, key: str, held: Stored) -> bool:
        return any(deed.phase == "entered" and self._claim(deed) == _token(held.value) for deed in self._deeds[key])

    def _claim(self, deed: Deed) -> str | None:
        """The token of the attempt that an effect was entered by."""
        for each in self._chains.get(deed.key, ()):
            if each.revision == deed.revision:
                return _token(each.value)
        return None

    # ------------------------------------------------------------------ receipts: what was entered

    def entries(self) -> Iterator[Violation]:
        """Every effect that was entered, and every step."""
        for key, deeds in self._deeds.items():
            chain = self._chains.get(key, [])
            before: list[tuple[Deed, str, int]] = []
            for deed in deeds:
                if deed.effect == "read" or deed.phase not in ("entered", "step"):
                    continue
                token = self._claim(deed)
                if token is None:
                    what = f"{deed.op} entered an effect on revision {deed.revision}, which is not on record"
                    yield Violation("lost", key, what)
                    continue
                claimed = next(each.revision for each in chain if _token(each.value) == token)
                earlier = [each for each in chain if each.revision < claimed]
                if deed.phase == "step":
                    if any(deed.step in (each.value.get("steps") or {}) for each in earlier):
                        yield Violation("executed again", key, f"{deed.op} executed the recorded step {deed.step}")
                    continue
                if any(each.value["status"] == "completed" for each in earlier):
                    yield Violation("executed again", key, f"{deed.op} entered it on revision {deed.revision}")
                for other, its_token, at in before:
                    if its_token == token:
                        yield Violation("opaque twice", key, f"{deed.op} and {other.op} entered one attempt")
                    elif deed.effect == "opaque" and not self._denied(chain, at, claimed):
                        what = f"{deed.op} (revision {deed.revision}) after {other.op} (revision {other.revision})"
                        yield Violation("opaque twice", key, what)
                before.append((deed, token, claimed))

    @staticmethod
    def _denied(chain: list[Stored], after: int, before: int) -> bool:
        return any(after < each.revision < before and _not_applied(each.value) for each in chain)

    def entered_once_on_this_side(self) -> Iterator[Violation]:
        """Of workers that knew the bucket before it was replaced none may enter an opaque effect again.

        Unless the one before had ended without landing, so that somebody may have said so: what was on record is gone.
        """
        for key, deeds in self._deeds.items():
            entered: Deed | None = None
            landed = False
            for deed in deeds:
                if deed.effect != "opaque":
                    continue
                if deed.phase == "entered":
                    if entered is not None:
                        yield Violation("opaque twice", key, f"{deed.op} after {entered.op}")
                    entered = deed
                elif deed.phase == "landed":
                    landed = True
                elif not landed and entered is not None and entered.op == deed.op:
                    entered = None

    def records(self) -> Iterator[Violation]:
        """Whether the records say what happened."""
        for key, chain in self._chains.items():
            deeds = self._deeds.get(key, [])
            landed = {deed.token for deed in deeds if deed.phase == "landed"}
            for each in chain:
                record = each.value
                if record["status"] == "completed":
                    result = (record.get("result") or {}).get("json")
                    if result not in landed:
                        yield Violation("untrue", key, f"revision {each.revision} is completed with {result!r}")
                elif _not_applied(record) or record["status"] == "withdrawn":
                    before = {_token(other.value): other.revision for other in chain if other.revision < each.revision}
                    for deed in deeds:
                        token = self._claim(deed)
                        if deed.phase == "landed" and token in before:
                            what = f"revision {each.revision} says {record['status']}, and {deed.op} landed"
                            yield Violation("never started", key, what)

    # ------------------------------------------------------------------ receipts: what was told

    def answers(self) -> Iterator[Violation]:
        """What callers, resolvers and readers were told."""
        completed: dict[str, float] = {}
        calls = [op for op in self._history.operations if op.do == "call" and op.asked["effect"] != "read"]
        for op in calls:
            if op.outcome == "ok" and op.ended is not None:
                completed[op.key] = min(completed.get(op.key, op.ended), op.ended)
        for op in calls:
            yield from self._answer(op)
            done = completed.get(op.key)
            if done is not None and op.began > done:
                if any(deed.phase == "entered" for deed in self._by_op[op.id]):
                    yield Violation("executed again", op.key, f"{op.id} was made after it was told as completed")
                if op.error == "AmbiguousCall" and op.began > done + _DEPOSED:
                    yield Violation("lost", op.key, f"{op.id} was told AmbiguousCall of a completed call")
        for op in self._history.operations:
            if op.do in ("resolve", "read") and op.outcome == "ok":
                yield from self._shown(op)
            elif op.do == "resolve" and op.outcome == "failed":
                mine = [each for each in self._chains.get(op.key, ()) if _resolver(each.value) == op.id]
                if mine:
                    what = f"{op.id} was told {op.error}, and revision {mine[0].revision} is its own"
                    yield Violation("told", op.key, what)

    def _answer(self, op: Operation) -> Iterator[Violation]:
        chain = self._chains.get(op.key, [])
        newest = chain[-1].value if chain else None
        if op.outcome == "ok":
            result = op.said["result"]
            if newest is None or newest["status"] != "completed":
                what = f"{op.id} was told the result {result!r}, and the receipt is {newest and newest['status']}"
                yield Violation("lost", op.key, what)
            elif (newest.get("result") or {}).get("json") != result:
                yield Violation("told", op.key, f"{op.id} was told the result {result!r}, which is not on record")
            revision = op.said.get("revision")
            if revision and not any(
                each.revision == revision and each.value["status"] == "completed" for each in chain
            ):
                yield Violation("lost", op.key, f"{op.id} was told that revision {revision} completes it")
        elif op.error == "AmbiguousCall":
            revision = op.said.get("revision")
            if not any(each.revision == revision and each.value["status"] == "ambiguous" for each in chain):
                yield Violation("told", op.key, f"{op.id} was told that revision {revision} is ambiguous")

    def _shown(self, op: Operation) -> Iterator[Violation]:
        if op.do == "read" and not op.said.get("revision"):
            return  # absent, or from a server that was behind: proves nothing
        revision, status = op.said["revision"], op.said["status"]
        found = next((each for each in self._chains.get(op.key, ()) if each.revision == revision), None)
        if found is None or found.value["status"] != status:
            stands = found and found.value["status"]
            what = f"{op.id} was shown revision {revision} as {status}, and on record it is {stands}"
            yield Violation("lost", op.key, what)
        elif op.do == "resolve" and _resolver(found.value) != op.id:
            yield Violation("told", op.key, f"{op.id} was told that revision {revision} is its own")

    def refusals(self) -> Iterator[Violation]:
        """Who was told that nothing was executed, and it was."""
        for op in self._history.operations:
            if op.do == "call" and op.error in _ENTERED_NOTHING and self._by_op[op.id]:
                yield Violation("told", op.key, f"{op.id} was told {op.error}, and the effect was entered")

    def errors(self) -> Iterator[Violation]:
        """Errors that nobody is to get."""
        for op in self._history.operations:
            allowed = _ERRORS[op.do] | (_REPLACED if self._history.replaced else frozenset())
            if op.error and op.error not in allowed:
                yield Violation("error", op.key, f"{op.id} got {op.error}: {op.said.get('text', '')}")

    # ------------------------------------------------------------------ notices

    def notices(self) -> Iterator[Violation]:
        """Each notice is there once it was said to be, and at most one turn carried it."""
        stored = _by_key(self._history.notices)
        for key, chain in stored.items():
            if len(chain) > 1:
                yield Violation("notice", key, f"it was written {len(chain)} times")
        carried: dict[str, set[str]] = defaultdict(set)
        for op in self._history.operations:
            if op.do not in ("file", "consume"):
                continue
            spec, status = stored.get(f"{op.key}.spec"), stored.get(f"{op.key}.status")
            by = status[0].value["by"] if status else None
            if op.do == "file":
                if op.outcome == "ok" and (spec is None or spec[0].value["step"] != op.asked["step"]):
                    yield Violation("notice", op.key, f"{op.id} filed it, and it is not there")
            elif op.outcome == "ok":
                carried[op.key].add(op.asked["by"])
                if by != op.asked["by"]:
                    yield Violation("notice", op.key, f"{op.id} was told that it carries it, and on record is {by}")
            elif op.error == "AlreadyConsumed" and (by != op.said["by"] or by == op.asked["by"]):
                yield Violation("notice", op.key, f"{op.id} was told of {op.said['by']}, and on record is {by}")
        for key, turns in carried.items():
            if len(turns) > 1:
                yield Violation("notice", key, f"it was consumed by {len(turns)} turns: {sorted(turns)}")

    # ------------------------------------------------------------------ sessions

    def sessions(self) -> Iterator[Violation]:
        """Each entry is in the log or not, as its writer was told; and what a wake told the model is true."""
        stored = _by_key(self._history.sessions)
        places: dict[str, list[int]] = defaultdict(list)
        for key, chain in stored.items():
            ids: set[str] = set()
            for each in chain:
                if each.value["id"] in ids:
                    yield Violation("session", key, f"entry {each.value['id']} is there twice")
                if each.value.get("parentId") is not None and each.value["parentId"] not in ids:
                    yield Violation("session", key, f"entry {each.revision} follows one that is not there")
                ids.add(each.value["id"])
                if (mark := _mark(each.value)) is not None:
                    places[mark].append(each.revision)
                yield from self._closed(key, each)
            yield from _answered_once(key, chain)
        for op in self._history.operations:
            if op.do == "append":
                at = places[op.id]
                if op.outcome == "ok" and at != [op.said["seq"]]:
                    yield Violation("session", op.key, f"{op.id} was appended at {op.said['seq']}, and is at {at}")
                elif (op.outcome == "failed" and at) or len(at) > 1:
                    yield Violation("session", op.key, f"{op.id} was told {op.error or 'nothing'}, and is at {at}")
            elif op.do == "wake" and op.outcome == "ok":
                there = {each.value["id"] for each in stored.get(op.key, ())}
                missing = [entry for entry in op.said["entries"] if entry not in there]
                if missing:
                    yield Violation("session", op.key, f"{op.id} was told of closes that are not there: {missing}")

    def _closed(self, key: str, entry: Stored) -> Iterator[Violation]:
        """A close that says that a call never started: nothing of it from before the fence may ever run."""
        said, close = entry.value.get("receipt"), entry.value.get("close")
        if said is None or close is None or "never_started" not in close["errorKind"]:
            return
        session = key.partition(".")[2]
        chain = self._chains.get(said["key"], [])
        fences = [(each.value.get("fences") or {}).get(session, -1) for each in chain]
        fence = next((at for each, at in zip(chain, fences, strict=True) if each.revision == said["revision"]), -1)
        if fence < 0:
            yield Violation("never started", said["key"], f"entry {entry.revision} rests on no fence")
        for deed in self._deeds.get(said["key"], ()):
            if deed.phase == "entered" and deed.session == session and deed.entry <= fence:
                what = f"entry {entry.revision} says so up to {fence}, and {deed.op} entered it from {deed.entry}"
                yield Violation("never started", said["key"], what)


def _by_key(stored: list[Stored]) -> dict[str, list[Stored]]:
    chains: dict[str, list[Stored]] = defaultdict(list)
    for each in sorted(stored, key=lambda each: each.revision):
        chains[each.key].append(each)
    return dict(chains)


def _resolver(record: dict[str, Any]) -> str:
    return (record.get("resolved") or {}).get("by", "")


def _mark(entry: dict[str, Any]) -> str | None:
    """The operation that an entry was appended by: it stands in the message, whatever its shape."""
    _, found, rest = json.dumps(entry["body"]).partition("by-op ")
    return rest.split(" ", 1)[0].split('"', 1)[0] if found else None


def _answered_once(key: str, chain: list[Stored]) -> Iterator[Violation]:
    """A call site gets at most one close and one real result by a wake's word."""
    sites: dict[str, int] = {}
    answers: set[tuple[str, int, bool]] = set()
    for each in chain:
        body = each.value["body"]
        content = body.get("content")
        if body.get("role") == "assistant" and isinstance(content, list):
            for part in content:
                if part.get("type") == "toolCall":
                    sites[part["id"]] = each.revision
        said, close = each.value.get("receipt"), each.value.get("close")
        call = close["toolCallId"] if close else said["toolCallId"] if said else None
        if call is None:
            continue
        answer = (call, sites.get(call, 0), close is None)
        if answer in answers:
            yield Violation("session", key, f"entry {each.revision} closes the call {call} again")
        answers.add(answer)


def _illegal(last: dict[str, Any] | None, record: dict[str, Any]) -> str | None:
    if last is None:
        fresh = record["status"] == "running" and record["attempts"] == 1 and not record.get("open")
        return None if fresh or record["status"] == "withdrawn" else f"the first record is {record['status']}"
    if last["status"] == "completed":
        return f"a completed record became {record['status']}"
    fences = record.get("fences") or {}
    if any(fences.get(session, -1) < at for session, at in (last.get("fences") or {}).items()):
        return "a fence was lowered or dropped"
    if last.get("open") and not record.get("open") and "resolved" not in record:
        return "that an earlier attempt is open was dropped"
    was, now = last.get("effect") or "read", record.get("effect") or "read"
    if _STRICTNESS.index(now) < _STRICTNESS.index(was):
        return f"the effect became looser: {was} became {now}"
    if record["attempts"] == last["attempts"] + 1:
        return _illegal_claim(last, record)
    if record["attempts"] != last["attempts"] or _token(record) != _token(last):
        return f"a write of attempt {record['attempts']} was accepted after attempt {last['attempts']} was granted"
    if record["status"] not in _SAME_ATTEMPT[last["status"]]:
        return f"{last['status']} became {record['status']}"
    if any(name not in (record.get("steps") or {}) for name in last.get("steps") or {}):
        return "a recorded step was dropped"
    declared = "resolved" in last or "resolved" in record
    if last["status"] == "failed" and record["status"] == "completed" and not declared:
        return "a failed record became completed, and nobody had declared it failed"
    return None


def _illegal_claim(last: dict[str, Any], record: dict[str, Any]) -> str | None:
    if record["status"] != "running" or not _token(record) or _token(record) == _token(last):
        return f"attempt {record['attempts']} began as {record['status']}"
    if any(name not in (record.get("steps") or {}) for name in last.get("steps") or {}):
        return "a claim dropped a recorded step"
    given_up = last["status"] in ("running", "ambiguous") and _worker(last) == _worker(record) and not last.get("open")
    fit = last["status"] == "withdrawn" or _not_applied(last) or given_up
    if record.get("effect") == "opaque" and not fit:
        return f"an opaque call was claimed over {last['status']}"
    return None
