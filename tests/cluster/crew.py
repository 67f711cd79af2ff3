"""The worker processes: started, killed, frozen, and told to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import dies_with_us

__all__ = ["Crew", "Member"]

_MOST_PROBLEMS = 10
"""Workers that may fall over before no more are started in their stead."""

_WORKER = Path(__file__).with_name("worker.py")


@dataclass
class Member:
    """One process, under a name that no other one ever has."""

    name: str
    process: subprocess.Popen[bytes]
    frozen: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Crew:
    """Workers on one folder and one namespace. Who is dead stands in the file ``dead``, for those who settle."""

    def __init__(self, folder: Path, *, seed: str, **options: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._options = {"folder": str(folder), "start": time.monotonic(), **options}
        self._seed = seed
        self._count = 0
        self.members: list[Member] = []
        self.problems: list[str] = []
        """Workers that ended by themselves: none may."""

    def hire(self) -> Member:
        """Start one more."""
        self._count += 1
        name = f"w{self._count}"
        options = {
            **self._options,
            "name": name,
            "seed": f"{self._seed} {name}",
            "brisk": self._count % 3 != 0,  # the others learn only by a slow ping that a server says nothing
        }
        with (self.folder / f"log-{name}").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(_WORKER), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_us,
            )
        member = Member(name, process)
        self.members.append(member)
        return member

    async def kill(self, member: Member) -> None:
        """SIGKILL, and word of it once it is gone."""
        self.look()
        if member in self.members:
            self.members.remove(member)  # it is not to be taken for one that fell over
            member.process.kill()
            await self._buried(member)

    def freeze(self, member: Member) -> None:
        if member.alive:
            member.process.send_signal(signal.SIGSTOP)
            member.frozen = True

    def thaw(self, member: Member) -> None:
        member.frozen = False
        if member.alive:
            member.process.send_signal(signal.SIGCONT)

    def look(self) -> None:
        """Note who ended without having been told to."""
        for member in list(self.members):
            if not member.alive:
                self.problems.append(
                    f"{member.name} ended with status {member.process.returncode}: {self._said(member)}"
                )
                self._bury(member)
                if len(self.problems) < _MOST_PROBLEMS:
                    self.hire()

    async def stop(self, *, timeout: float) -> None:
        """Let all of them end what they have begun, and wait for that."""
        self.look()
        for member in self.members:
            self.thaw(member)
            member.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        for member in list(self.members):
            while member.alive and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            if member.alive:
                self.problems.append(f"{member.name} did not come to an end within {timeout:.0f} s")
                member.process.kill()
            elif member.process.returncode not in (0, -signal.SIGTERM):
                self.problems.append(
                    f"{member.name} ended with status {member.process.returncode}: {self._said(member)}"
                )
            await self._buried(member)

    async def _buried(self, member: Member) -> None:
        await asyncio.to_thread(member.process.wait)
        self._bury(member)

    def _bury(self, member: Member) -> None:
        if member in self.members:
            self.members.remove(member)
        with (self.folder / "dead").open("ab") as dead:
            dead.write(member.name.encode() + b"\n")

    async def close(self) -> None:
        """Kill whoever is left."""
        for member in list(self.members):
            member.process.kill()
            await self._buried(member)

    def _said(self, member: Member) -> str:
        lines = (self.folder / f"log-{member.name}").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-30:])
