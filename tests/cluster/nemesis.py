"""What goes wrong: one fault after another, some of them at the same time, each undone after a while."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from cluster import Cluster, Node
    from crew import Crew

__all__ = ["Fault", "Nemesis"]

_RECEIPTS = "KV_receipts"
_WRITES = "$KV.receipts.>"


@dataclass
class Fault:
    """One that was injected. Seconds of the monotonic clock."""

    kind: str
    began: float
    ended: float = 0.0
    on: str = ""


class Nemesis:
    """Faults on a cluster and its workers, chosen by dice, and written down."""

    def __init__(
        self, cluster: Cluster, crew: Crew, dice: random.Random, *, more: dict[str, Callable[[], Awaitable[None]]]
    ) -> None:
        self._cluster = cluster
        self._crew = crew
        self._dice = dice
        self._more = more
        self.faults: list[Fault] = []
        self.left_out: dict[str, str] = {}
        self._kinds: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "kill the leader": self._kill_leader,
            "freeze the leader": self._freeze_leader,
            "kill the meta leader": self._kill_meta_leader,
            "freeze the meta leader": self._freeze_meta_leader,
            "cut the leader's routes": self._cut_routes,
            "silence on a node's routes": self._silent_routes,
            "cut clients off a node": self._cut_clients,
            "silence towards clients": self._silent_clients,
            "lost answers": self._lost_answers,
            "answers lost with the connection": self._cut_after_store,
            "writes held back": self._held_writes,
            "late answers": self._late_answers,
            "kill a worker": self._kill_worker,
            "kill all workers": self._kill_workers,
            "freeze a worker": self._freeze_worker,
            "kill all three": self._kill_all,
            "disk full": self._disk_full,
            **{kind: self._elsewhere(act) for kind, act in more.items()},
        }

    async def haunt(self, seconds: float, *, enough: Callable[[], bool], most: float) -> None:
        """Until ``seconds`` are over, every kind was there, and it is ``enough``; ``most`` seconds at the longest."""
        start = time.monotonic()
        waiting: list[str] = []
        under_way: set[asyncio.Task[None]] = set()
        passes = 0
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    passed = time.monotonic() - start
                    if not waiting:
                        passes += 1
                        waiting = self._dice.sample(list(self._kinds), len(self._kinds))
                    if passed > most or (passed > seconds and passes > 1 and enough()):
                        break
                    if len(under_way) < 2:
                        kind = waiting.pop()
                        task = group.create_task(self._inject(kind))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                    await asyncio.sleep(self._dice.choice((0.2, 2.0, 4.0)))
                    self._crew.look()
        finally:
            await self.heal()

    async def _inject(self, kind: str) -> None:
        fault = Fault(kind, time.monotonic())
        try:
            await self._kinds[kind](fault)
        finally:
            fault.ended = time.monotonic()
        if kind not in self.left_out:
            self.faults.append(fault)

    async def heal(self) -> None:
        """Undo whatever may be left."""
        for node in self._cluster.nodes:
            self._cluster.empty(node)
            node.thaw()
            node.start()
        for wire in self._cluster.wires.values():
            wire.heal()
        for proxy in self._cluster.proxies:
            await proxy.resume()
            await proxy.accept()
        for member in self._crew.members:
            self._crew.thaw(member)

    async def _hold(self, least: float = 1.0, most: float = 8.0) -> None:
        await asyncio.sleep(self._dice.uniform(least, most))

    # ------------------------------------------------------------------ servers

    async def _leader_or_any(self) -> Node:
        return await self._cluster.stream_leader(_RECEIPTS) or self._dice.choice(self._cluster.nodes)

    async def _killed(self, fault: Fault, *nodes: Node) -> None:
        fault.on = " ".join(node.name for node in nodes)
        try:
            await asyncio.gather(*(node.kill() for node in nodes))
            await self._hold(0.5, 6.0)
        finally:
            for node in nodes:
                node.start()

    async def _frozen(self, fault: Fault, node: Node) -> None:
        fault.on = node.name
        try:
            node.freeze()
            await self._hold(2.0, 10.0)
        finally:
            node.thaw()

    async def _kill_leader(self, fault: Fault) -> None:
        await self._killed(fault, await self._leader_or_any())

    async def _freeze_leader(self, fault: Fault) -> None:
        await self._frozen(fault, await self._leader_or_any())

    async def _meta_leader_or_any(self) -> Node:
        return await self._cluster.meta_leader() or self._dice.choice(self._cluster.nodes)

    async def _kill_meta_leader(self, fault: Fault) -> None:
        await self._killed(fault, await self._meta_leader_or_any())

    async def _freeze_meta_leader(self, fault: Fault) -> None:
        await self._frozen(fault, await self._meta_leader_or_any())

    async def _kill_all(self, fault: Fault) -> None:
        await self._killed(fault, *self._cluster.nodes)

    async def _disk_full(self, fault: Fault) -> None:
        node = self._cluster.nodes[2]
        fault.on = node.name
        try:
            if not self._cluster.fill(node):
                self.left_out[fault.kind] = "no tmpfs can be mounted here"
                return
            await self._hold(2.0, 8.0)
        finally:
            self._cluster.empty(node)
        # A server that could not write has switched JetStream off until it is started again.
        await node.kill()
        node.start()

    # ------------------------------------------------------------------ the network

    async def _cut_routes(self, fault: Fault) -> None:
        node = await self._leader_or_any()
        fault.on = node.name
        wires = self._cluster.around(node)
        try:
            for wire in wires:
                await wire.cut()
            await self._hold(2.0, 10.0)
        finally:
            for wire in wires:
                wire.heal()

    async def _silent_routes(self, fault: Fault) -> None:
        node = await self._leader_or_any() if self._dice.random() < 0.7 else self._dice.choice(self._cluster.nodes)
        fault.on = node.name
        wires = self._cluster.around(node)
        if self._dice.random() < 0.3:  # in one direction only
            wires = [wire for ends, wire in self._cluster.wires.items() if ends[0] == node.name]
        try:
            for wire in wires:
                wire.stall()
            await self._hold(2.0, 10.0)
        finally:
            for wire in wires:
                wire.heal()

    async def _cut_clients(self, fault: Fault) -> None:
        chosen = self._dice.sample(range(3), self._dice.choice((1, 2)))
        fault.on = " ".join(f"n{n}" for n in chosen)
        try:
            for n in chosen:
                await self._cluster.proxies[n].refuse()
                await self._cluster.proxies[n].cut()
            await self._hold()
        finally:
            for n in chosen:
                await self._cluster.proxies[n].accept()

    async def _silent_clients(self, fault: Fault) -> None:
        chosen = self._dice.sample(range(3), self._dice.choice((1, 2, 3)))
        direction = self._dice.choice(("both", "to_server", "to_client"))
        fault.on = f"{' '.join(f'n{n}' for n in chosen)} {direction}"
        try:
            for n in chosen:
                await self._cluster.proxies[n].stall(direction)
            await self._hold(1.0, 6.0)
        finally:
            for n in chosen:
                await self._cluster.proxies[n].resume(direction)

    async def _late_answers(self, fault: Fault) -> None:
        """All answers come late, again and again."""
        end = time.monotonic() + self._dice.uniform(2.0, 6.0)
        while time.monotonic() < end:
            try:
                for proxy in self._cluster.proxies:
                    await proxy.stall("to_client")
                await asyncio.sleep(self._dice.uniform(0.1, 1.0))
            finally:
                for proxy in self._cluster.proxies:
                    await proxy.resume("to_client")
            await asyncio.sleep(0.1)

    @contextlib.contextmanager
    def _rules(self, kind: str) -> Any:
        share = self._dice.uniform(0.1, 0.5)
        meant = ("$KV.", "sessions.")

        def hit(message: Any) -> bool:
            return message.subject.startswith(meant) and self._dice.random() < share

        rules = [getattr(proxy, kind)(hit, count=None) for proxy in self._cluster.proxies]
        try:
            yield rules
        finally:
            for rule in rules:
                rule.cancel()
            for proxy in self._cluster.proxies:
                proxy.forget()

    async def _lost_answers(self, fault: Fault) -> None:
        with self._rules("drop_answer") as rules:
            await self._hold(2.0, 6.0)
        fault.on = f"{sum(len(rule.hits) for rule in rules)} writes"

    async def _cut_after_store(self, fault: Fault) -> None:
        with self._rules("cut_after_store") as rules:
            await self._hold(2.0, 6.0)
        fault.on = f"{sum(len(rule.hits) for rule in rules)} writes"

    async def _held_writes(self, fault: Fault) -> None:
        """Writes reach the server when their senders have long given them up, or are dead."""
        with self._rules("delay") as rules:
            await self._hold(1.0, 4.0)
        fault.on = f"{sum(rule.held for rule in rules)} writes"
        await self._hold(0.0, 4.0)
        held = [rule for rule in rules for _ in range(rule.held)]
        self._dice.shuffle(held)
        for rule in held:
            with contextlib.suppress(OSError):  # to a server that is down it is lost, as it may be
                await rule.release(timeout=2.0)

    # ------------------------------------------------------------------ workers

    async def _kill_worker(self, fault: Fault) -> None:
        await self._kill_some(fault, 1)

    async def _kill_workers(self, fault: Fault) -> None:
        await self._kill_some(fault, len(self._crew.members))

    async def _kill_some(self, fault: Fault, count: int) -> None:
        self._crew.look()
        chosen = self._dice.sample(self._crew.members, min(count, len(self._crew.members)))
        fault.on = " ".join(member.name for member in chosen)
        await asyncio.gather(*(self._crew.kill(member) for member in chosen))
        await self._hold(0.0, 2.0)
        for _ in chosen:
            self._crew.hire()

    async def _freeze_worker(self, fault: Fault) -> None:
        self._crew.look()
        if not self._crew.members:  # all of them were killed a moment ago
            self._crew.hire()
        member = self._dice.choice(self._crew.members)
        fault.on = member.name
        try:
            self._crew.freeze(member)
            await self._hold(1.0, 10.0)
        finally:
            self._crew.thaw(member)

    def _elsewhere(self, act: Callable[[], Awaitable[None]]) -> Callable[[Fault], Awaitable[None]]:
        async def inject(fault: Fault) -> None:
            await act()

        return inject
