"""The outside world of the workers: a file of effects, and who is dead. Both only grow."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from natsreceipts import Landed, NotLanded, Unknown

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lines", "Outside"]


class Lines:
    """A file that lines are added to, each in one write, by many processes."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._sync = sync

    def add(self, line: dict[str, Any]) -> None:
        """On disk before it returns, where the file is ``sync``."""
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._file, data) != len(data):
            raise OSError("a line was written in part")
        if self._sync:
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class _Tail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> list[bytes]:
        """The whole lines that were added since."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.splitlines()


class Outside:
    """What can be seen of the effects, by whoever looks: resolvers and verifiers."""

    def __init__(self, folder: Path) -> None:
        self._effects = Lines(folder / "effects", sync=True)
        self._seen = _Tail(folder / "effects")
        self._dead = _Tail(folder / "dead")
        self._buried: set[str] = set()
        self._deeds: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def note(self, **deed: Any) -> None:
        """An effect takes place: one line, on disk before this returns."""
        self._effects.add({"at": time.monotonic(), **deed})

    def close(self) -> None:
        self._effects.close()

    def verdict(self, key: str, holder: str) -> Landed | NotLanded | Unknown:
        """What became of a call whose last attempt is of the worker ``holder``: the truth, or that nobody knows.

        That an effect can no longer happen is known of a worker that is dead, and of an attempt that has ended. Who is
        dead is looked at first: what the dead have done is all there by then.
        """
        self._buried.update(line.decode() for line in self._dead.new())
        for line in self._seen.new():
            deed = json.loads(line)
            self._deeds[deed["key"]].append(deed)
        deeds = self._deeds[key]
        landed = [deed["token"] for deed in deeds if deed["phase"] == "landed"]
        if landed:
            return Landed(landed[-1])
        over = {deed["op"] for deed in deeds if deed["phase"] in ("refused", "broke")}
        entered = [deed for deed in deeds if deed["phase"] == "entered"]
        if any(deed["op"] not in over and deed["worker"] not in self._buried for deed in entered):
            return Unknown()
        ended = any(deed["worker"] == holder and deed["op"] in over for deed in entered)
        return NotLanded() if holder in self._buried or ended else Unknown()
