"""The world outside: what effects were entered, what became of them, and what an honest person can say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from natsreceipts.decision import Landed, NotLanded, Unknown

if TYPE_CHECKING:
    from sim_process import Process
    from sim_world import World

    from natsreceipts.decision import Verdict

__all__ = ["Deed", "Outside"]


class Deed:
    """One effect that was entered. ``state``: under way, landed or gone."""

    __slots__ = ("claimed", "key", "number", "process", "result", "seq", "session", "state", "token")

    def __init__(
        self, number: int, key: str, process: Process, token: str, claimed: int, session: str, seq: int
    ) -> None:
        self.number = number
        self.key = key
        self.process = process
        self.token = token
        self.claimed = claimed
        """The revision of its claim."""
        self.session = session
        self.seq = seq
        """The entry from which it was claimed."""
        self.state = "under way"
        self.result: Any = None


class Outside:
    """All deeds, by KV key."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.deeds: dict[str, list[Deed]] = {}
        """Those that receipts vouch for: without what has expired."""
        self.every: dict[str, list[Deed]] = {}
        self.entered = 0

    def enter(self, key: str, process: Process, token: str, claimed: int, session: str, seq: int) -> Deed:
        """The effect begins."""
        self.entered += 1
        deed = Deed(self.entered, key, process, token, claimed, session, seq)
        deed.result = {"deed": deed.number, "by": process.name}
        if self._world.plan.inline_limit < 1000:
            deed.result["text"] = "x" * 200
        self.deeds.setdefault(key, []).append(deed)
        self.every.setdefault(key, []).append(deed)
        self._world.note(f"{process.name}: ENTERS the effect (deed {deed.number})")
        return deed

    def settle(self, deed: Deed, state: str) -> None:
        """It has landed, or it has not and never will."""
        if deed.state == "under way":
            deed.state = state
            self._world.note(f"   outside: deed {deed.number} is {state}")

    def verdict(self, key: str) -> Verdict:
        """What somebody who looks, and is honest, can say: that it did not land only if it can no longer."""
        deeds = self.deeds.get(key, [])
        chain = self._world.judge.chains.get(key)
        if self._world.replaced or not (chain or self._world.judge.was_erased(key)):
            return Unknown()
        newest = chain[-1][1] if chain else None
        landed = [deed for deed in deeds if deed.state == "landed"]
        if landed:
            return Landed(landed[-1].result)
        if any(deed.state == "under way" for deed in deeds):
            return Unknown()
        entered = {deed.token for deed in deeds}
        for token in self._world.judge.holders(key):
            owner = self._world.nonces.owner(token)
            if token in entered or owner is None or not owner.alive:
                continue
            if any(token in asked.tokens for asked in self._world.asked(key, owner)):
                return Unknown()  # it is past its last check, and may begin any moment
            erased = self._world.judge.was_erased(key) and not self._world.asked(key, owner)
            if newest and newest.status == "running" and newest.holder and newest.holder.token == token and not erased:
                return Unknown()  # its worker lives: it is to be stopped first
        return NotLanded()
