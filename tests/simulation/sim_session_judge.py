"""The judge of session logs: every stored entry, and every word to who appended or woke, against the whole log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from natsreceipts.dialects.base import ErrorKind
from natsreceipts.errors import InvalidSetting, SessionBusy, SessionConflict, Unreachable
from natsreceipts.transcript import tool_calls_of, tool_result_message
from natsreceipts.wire import EntryRecord, ReceiptSaid

if TYPE_CHECKING:
    from sim_process import Process
    from sim_world import World

    from natsreceipts._jetstream import Entry

__all__ = ["SessionJudge"]


class _Branch:
    """What the chain up to an entry comes to."""

    def __init__(self, before: _Branch | None) -> None:
        self.sites: dict[str, int] = dict(before.sites) if before else {}
        """Where the id of a call was called last."""
        self.closes: dict[tuple[str, int, bool], str] = dict(before.closes) if before else {}
        """Who wrote a result for a call by word of the log or a receipt: by id, site, and whether it is a real one."""
        self.suspended: set[str] = set(before.suspended) if before else set()


class _Log:
    """One session as it is on the server."""

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}
        """Sequences by entry id."""
        self.branches: dict[str, _Branch] = {}
        """By the id of the entry that they end in."""
        self.last = 0
        self.asked = 0
        """The sequence of the last entry that is no result of wake's or reconcile's."""


class SessionJudge:
    """Holds the logs against the design."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.logs: dict[str, _Log] = {}
        self._never: dict[str, str] = {}
        """Entries that may never be in a log, and why."""

    def stored(self, entry: Entry, by: str) -> None:
        """An entry was stored."""
        record = EntryRecord.model_validate_json(entry.value)
        log = self.logs.setdefault(entry.key, _Log())
        problem = None
        if record.id in log.entries:
            problem = "the entry is there twice"
        elif record.id in self._never:
            problem = self._never[record.id]
        elif record.parent_id is not None and record.parent_id not in log.entries:
            problem = "its parent is not there"
        elif record.parent_id is None and log.entries:
            problem = "it begins anew in the middle of a log"
        log.entries[record.id] = entry.revision
        branch = log.branches[record.id] = _Branch(log.branches.get(record.parent_id or ""))
        if record.close is not None or record.receipt is not None:
            problem = problem or self._closes(entry, record, log, branch, by)
        elif record.kind == "suspend":
            branch.suspended.update(record.body["toolCallIds"])
        elif record.kind == "resume":
            branch.suspended.difference_update(record.body["toolCallIds"])
        elif record.kind == "message":
            for call in tool_calls_of(record.body, dialect=record.dialect):
                branch.sites[call.id] = entry.revision
                branch.suspended.discard(call.id)
        log.last = entry.revision
        if record.close is None and record.receipt is None:
            log.asked = entry.revision
        if problem:
            self._world.fail(f"entry {entry.revision} of {entry.key} by {by}: {problem}")

    def _closes(self, entry: Entry, record: EntryRecord, log: _Log, branch: _Branch, by: str) -> str | None:
        call_id = record.close.tool_call_id if record.close is not None else record.receipt.tool_call_id  # type: ignore[union-attr]
        site = branch.sites.get(call_id)
        if site is None:
            return f"it closes the call {call_id}, which nobody made"
        if call_id in branch.suspended:
            return f"it closes the call {call_id}, which is suspended"
        # A close may be followed by what the call came to after all; a real result by nothing.
        real = record.close is None
        before = branch.closes.get((call_id, site, True)) or branch.closes.get((call_id, site, real))
        if before is not None:
            return f"it closes the call {call_id} of entry {site} again, as {before} did"
        branch.closes[call_id, site, real] = by
        said = record.receipt
        if said is None:
            return None
        chain = self._world.judge.chains.get(said.key, [])
        at = next((n for n, (revision, _) in enumerate(chain) if revision == said.revision), None)
        if said.status == "running" and at == len(chain) - 1 and self._world.judge.lease_left(said.key, at) > 0.1:
            return "it closes a call that another worker is at, under a live lease"
        never = record.close is not None and record.close.error_kind == ErrorKind.INTERRUPTED_NEVER_STARTED
        session = entry.key.partition(".")[2]
        if never or said.status in ("failed", "withdrawn"):
            return self._withdraws(said, session, log.asked, site, never=never)
        if said.status == "completed" and record.close is None:
            found = dict(chain).get(said.revision)
            value = self._world.judge.value(found.result) if found is not None else None
            real = tool_result_message(call_id, "send", value, dialect=record.dialect)
            if found is None or found.status != "completed" or real != record.body:
                return f"it tells a result that revision {said.revision} does not hold"
        return None

    def _withdraws(self, said: ReceiptSaid, session: str, position: int, site: int, *, never: bool) -> str | None:
        """The model is told that a call was not carried out: so it must not have been, and can no longer be."""
        judge = self._world.judge
        if not self._fenced(said.key, session, position):
            return f"it says that a call was not carried out, and no fence stands at {position} or above"
        # An equal call of long ago may have been forgotten: its receipt has expired. This one's may not.
        first = site if judge.lapsed(said.key) else 0
        for deed in self._world.outside.every.get(said.key, ()):
            if deed.session == session and first <= deed.seq <= position and never:
                return f"it says that a call never started, whose effect was entered (deed {deed.number})"
        told = judge.told_never
        told[said.key, session] = max(told.get((said.key, session), 0), position)
        return None

    def _fenced(self, key: str, session: str, position: int) -> bool:
        chain = self._world.judge.chains.get(key, [])
        return any((record.fences or {}).get(session, -1) >= position for _, record in chain)

    # ------------------------------------------------------------------ what is told

    def appended(self, key: str, ids: list[str], outcome: Any, process: Process, shown: int) -> None:
        """What came of an append; ``ids`` are those of all entries that it may have sent.

        ``shown``: the last sequence that its host was told of before.
        """
        log = self.logs.get(key, _Log())
        there = [each for each in ids if each in log.entries]
        why = f"{process.name} was told {type(outcome).__name__}: {outcome}"[:200]
        if isinstance(outcome, SessionConflict) or (
            isinstance(outcome, Unreachable) and "nothing was appended" in str(outcome)
        ):
            self._world.check(not there, f"{why}, and the entry is in the log")
            self._never.update(dict.fromkeys(ids, f"{why}, and the entry comes all the same"))
        elif isinstance(outcome, InvalidSetting) and "is on hold" in str(outcome):
            self._world.check(not there, f"{why}, and the entry is in the log")  # its id is one that waits for a person
        elif isinstance(outcome, Unreachable | asyncio.CancelledError):
            pass
        elif isinstance(outcome, BaseException):
            self._world.fail(why)
        else:
            self._world.check(there == [outcome.id], f"{process.name} appended {outcome.id}, and in the log is {there}")
            self._world.check(log.entries.get(outcome.id) == outcome.seq, f"{process.name} was told the wrong sequence")
            unseen = [seq for seq in log.entries.values() if shown < seq < outcome.seq]
            if unseen:
                self._world.fail(f"{process.name} appended {outcome.seq} behind what it was never shown: {unseen}")

    def woken(self, key: str, ids: list[str], outcome: Any, process: Process) -> None:
        """What came of a wake or a reconcile; ``ids`` are those of all entries that it may have sent."""
        log = self.logs.get(key, _Log())
        why = f"{process.name} was told {type(outcome).__name__}: {outcome}"[:200]
        if isinstance(outcome, SessionBusy):
            running = any(
                record.status == "running" for chain in self._world.judge.chains.values() for _, record in chain
            )
            self._world.check(running, f"{why}, and nothing ever ran")
        elif isinstance(outcome, Unreachable | asyncio.CancelledError):
            pass
        elif isinstance(outcome, BaseException):
            self._world.fail(why)
        else:
            missing = [each.entry_id for each in outcome.recovered if each.entry_id not in log.entries]
            self._world.check(not missing, f"{process.name} was told of closes that are not in the log: {missing}")
            told = {each.entry_id for each in outcome.recovered}
            untold = [each for each in ids if each in log.entries and each not in told]
            self._world.check(not untold, f"{process.name} was not told of closes that it wrote: {untold}")
