"""One campaign: a cluster, workers on it, a nemesis against both, and a checker over all that was written down.

The choices follow the seed. What the machine makes of them does not: a run that failed is looked into by its history,
which is kept.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats
from checker import Violation, check
from cluster import Cluster
from crew import Crew
from history import History, Stored, deeds_of, operations_of
from nemesis import Fault, Nemesis
from outside import Outside

from natsreceipts import NatsReceiptsError, PayloadMissing, Unreachable, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Campaign", "Figures", "provisioned"]

LEASE = 2.0
"""Seconds: far under what `connect` warns of, so that dead attempts are judged while a fault lasts."""

HISTORY = 10_000
"""Revisions that are kept of a key: all."""


@dataclass
class Figures:
    """What a campaign came to."""

    seed: int
    folder: Path
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    effects: int = 0
    revisions: int = 0
    outages: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What went wrong beside the violations: a worker that fell over, a call that came to no end."""
    violations: list[Violation] = field(default_factory=list)

    def table(self) -> str:
        """For people."""
        lines = [f"CLUSTER_SEED={self.seed}: {self.seconds:.0f} s, {len(self.faults)} faults", ""]
        lines += [f"{'fault':36}{'times':>6}{'no call completed for, at the median and at most':>52}"]
        for kind in sorted(self.outages):
            gaps = self.outages[kind]
            longest = f"{statistics.median(gaps):.1f} s, {max(gaps):.1f} s"
            lines.append(f"{kind:36}{len(gaps):>6}{longest:>52}")
        lines += [f"{kind:36}  left out: {why}" for kind, why in self.left_out.items()]
        lines += ["", f"{sum(self.calls.values())} guarded calls"]
        lines += [f"  {outcome:34}{count:>6}" for outcome, count in self.calls.most_common()]
        lines += ["", "other operations"]
        lines += [f"  {outcome:34}{count:>6}" for outcome, count in sorted(self.others.items())]
        lines += ["", f"{self.effects} effects entered, {self.revisions} revisions stored"]
        lines += [f"{len(self.violations)} violations, {len(self.problems)} other problems"]
        lines += [f"  {each}" for each in [*self.violations[:30], *self.problems]]
        if self.violations or self.problems:
            lines.append(f"the history is kept in {self.folder}")
        return "\n".join(lines)


class Campaign:
    """Made for one run."""

    def __init__(self, seed: int, seconds: float, *, calls: int, faults: int) -> None:
        self._seconds = seconds
        self._calls = calls
        self._faults = faults
        self._dice = random.Random(seed)
        self._erased = 0
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.figures = Figures(seed, self.folder)

    async def run(self) -> Figures:
        """To its end. The history is kept in `folder`."""
        began = time.monotonic()
        async with Cluster(self.folder) as cluster:
            await provisioned(cluster, "")
            crew = Crew(
                self.folder / "crew",
                seed=str(self.figures.seed),
                urls=cluster.urls,
                namespace="",
                lease=LEASE,
                rate=12.0,
                pause=0.5,
                callers=4,
                all=True,
            )
            nemesis = Nemesis(
                cluster, crew, self._dice, more={"buckets deleted under load": lambda: self._erase(cluster)}
            )
            try:
                for _ in range(4):
                    crew.hire()
                await nemesis.haunt(
                    self._seconds, enough=lambda: self._enough(nemesis, crew), most=self._seconds * 2 + 300
                )
                await cluster.healthy()
                await crew.stop(timeout=240)
            finally:
                await crew.close()
            self.figures.problems += crew.problems
            self.figures.faults, self.figures.left_out = nemesis.faults, nemesis.left_out
            self.figures.seconds = time.monotonic() - began
            await self._swept(cluster, crew)
            history = await self._read(cluster, crew)
        self._count(history)
        self.figures.violations += check(history)
        return self.figures

    def _enough(self, nemesis: Nemesis, crew: Crew) -> bool:
        if len(nemesis.faults) < self._faults:
            return False
        made = sum(file.read_bytes().count(b'"do": "call"') for file in crew.folder.glob("operations-*"))
        return made >= self._calls

    # ------------------------------------------------------------------ buckets that are deleted

    async def _erase(self, cluster: Cluster) -> None:
        """Delete the buckets of a namespace under its own workers, make them again, and let the workers go on."""
        self._erased += 1
        namespace = f"erased{self._erased}"
        await provisioned(cluster, namespace)
        crew = Crew(
            self.folder / namespace,
            seed=f"{self.figures.seed} {namespace}",
            urls=cluster.urls,
            namespace=namespace,
            lease=LEASE,
            rate=6.0,
            pause=0.1,
            callers=4,
            all=False,
        )
        try:
            for _ in range(2):
                crew.hire()
            # A worker notices by the sequences that it knows of: by more than those that all that is under way will
            # use up in the new bucket.
            await _until(lambda: all(_knows(crew.folder, member.name) > 40 for member in crew.members), timeout=300)
            await self._deleted(cluster, namespace)
            # Each worker is told so, by an error that says what happened. (Without a bucket nothing is claimed.)
            told = [b'"BucketReplaced"', b'"NotProvisioned"']
            if self._dice.random() < 0.7:
                await provisioned(cluster, namespace)
            else:
                told.append(b'"NotClaimed"')
            with contextlib.suppress(TimeoutError):
                await _until(
                    lambda: all(
                        any(word in (crew.folder / f"operations-{member.name}").read_bytes() for word in told)
                        for member in crew.members
                    ),
                    timeout=120,
                )
            await crew.stop(timeout=240)
        finally:
            await crew.close()
        history = _written(crew.folder)
        history.replaced = True
        found = check(history)
        errors = Counter(op.error for op in history.operations)
        if not any(errors[word.decode().strip('"')] for word in told):
            self.figures.problems.append(f"{namespace} was deleted, and its workers were told {dict(errors)}")
        self.figures.problems += crew.problems
        self.figures.violations += found

    async def _deleted(self, cluster: Cluster, namespace: str) -> None:
        async with _client(cluster) as client:
            js = client.jetstream(timeout=5)
            for stream in (f"KV_{namespace}-receipts", f"KV_{namespace}-notices"):
                async with asyncio.timeout(180):
                    while True:
                        try:
                            await js.delete_stream(stream)
                            break
                        except nats.js.errors.NotFoundError:
                            break
                        except (nats.errors.Error, TimeoutError):
                            await asyncio.sleep(0.2)

    # ------------------------------------------------------------------ the end

    async def _swept(self, cluster: Cluster, crew: Crew) -> None:
        """Nothing is stuck for ever: with all workers gone every call that was begun comes to its end."""
        history = _written(crew.folder)
        asked = {op.key: op.asked["effect"] for op in history.operations if op.do == "call"}
        outside = Outside(crew.folder)
        limit = asyncio.Semaphore(32)
        try:
            async with connect(cluster.direct, worker="sweeper", connect_timeout=60.0) as toolkit:

                async def end(key: str) -> None:
                    async with limit:
                        receipt = await _receipt(toolkit, key)
                        if receipt is None or receipt.status == "completed":
                            return
                        await _ended(toolkit, receipt, outside)
                        again = await _receipt(toolkit, key)
                        if again is None or again.status in ("running", "ambiguous"):
                            self.figures.problems.append(f"{key} came to no end: {again and again.status}")

                async with asyncio.TaskGroup() as group:
                    for key, effect in asked.items():
                        if effect != "read":
                            group.create_task(end(key))
        finally:
            outside.close()

    async def _read(self, cluster: Cluster, crew: Crew) -> History:
        history = _written(crew.folder)
        async with _client(cluster) as client:
            history.receipts = await _stream(client, "KV_receipts", "$KV.receipts.")
            history.notices = await _stream(client, "KV_notices", "$KV.notices.")
            history.sessions = await _stream(client, "SESSIONS", "sessions.")
        await self._with_results(cluster, history)
        for name in ("receipts", "notices", "sessions"):
            with (crew.folder / name).open("w", encoding="utf-8") as file:
                file.writelines(f"{each}\n" for each in getattr(history, name))
        return history

    async def _with_results(self, cluster: Cluster, history: History) -> None:
        """Put the result itself where a record names an object, and of each result only what the effects know it by."""
        async with connect(cluster.direct, connect_timeout=60.0) as toolkit:
            for each in history.receipts:
                result = each.value.get("result")
                if result is None:
                    continue
                if "object" in result:
                    try:
                        receipt = await _receipt(toolkit, each.key)
                        result = {"json": receipt.result if receipt is not None else None}
                    except PayloadMissing as missing:
                        result = {"json": f"{missing}"}
                each.value["result"] = {"json": str(result.get("json")).partition(".")[0]}

    def _count(self, history: History) -> None:
        figures = self.figures
        for op in history.operations:
            where = figures.calls if op.do == "call" else figures.others
            what = op.error or ("completed" if op.outcome == "ok" else "killed under way")
            where[what if op.do == "call" else f"{op.do}: {what}"] += 1
        figures.effects = sum(deed.phase == "entered" for deed in history.deeds)
        figures.revisions = len(history.receipts) + len(history.notices) + len(history.sessions)
        done = sorted(op.ended for op in history.operations if op.do == "call" and op.outcome == "ok" and op.ended)
        for fault in figures.faults:
            figures.outages.setdefault(fault.kind, []).append(_outage(fault, done))


async def provisioned(cluster: Cluster, namespace: str) -> None:
    """Make the buckets and the stream of a namespace, on all three."""
    async with asyncio.timeout(180):
        while True:
            with contextlib.suppress(NatsReceiptsError):
                async with connect(cluster.direct, namespace=namespace, provision=True, replicas=3, history=HISTORY):
                    return
            await asyncio.sleep(0.2)


def _outage(fault: Fault, done: list[float]) -> float:
    """The longest time after a fault began, and until some seconds after it ended, in which no call completed."""
    until = fault.ended + 5.0
    times = [fault.began, *(at for at in done if fault.began < at < until)]
    after = next((at for at in done if at >= until), until)
    return max(later - earlier for earlier, later in zip(times, [*times[1:], after], strict=True))


def _written(folder: Path) -> History:
    effects = folder / "effects"
    return History(
        operations=operations_of(file.read_text(encoding="utf-8") for file in sorted(folder.glob("operations-*"))),
        deeds=deeds_of(effects.read_text(encoding="utf-8")) if effects.exists() else [],
    )


def _knows(folder: Path, worker: str) -> int:
    """The highest revision by which a worker has entered an effect."""
    effects = folder / "effects"
    lines = effects.read_bytes().splitlines() if effects.exists() else []
    return max((deed["revision"] for line in lines if (deed := json.loads(line))["worker"] == worker), default=0)


async def _receipt(toolkit: Any, key: str) -> Any:
    """The receipt of a key, as soon as it can be read."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(Unreachable):
                return await toolkit.receipts.get(key)


async def _until(there: Any, *, timeout: float) -> None:
    async with asyncio.timeout(timeout):
        while not there():
            await asyncio.sleep(0.1)


async def _ended(toolkit: Any, receipt: Any, outside: Outside) -> None:
    """Settle what is running or ambiguous, by what is to be seen outside."""
    for _ in range(20):
        if receipt is None or receipt.status not in ("running", "ambiguous"):
            return
        verdict = outside.verdict(receipt.kv_key, receipt.worker)
        result = getattr(verdict, "result", None)
        said: dict[str, Any] = {"completed": result} if result is not None else {"not_applied": True}
        with contextlib.suppress(NatsReceiptsError):
            await toolkit.receipts.resolve(
                receipt.kv_key,
                revision=receipt.revision,
                **said,
                by="sweeper",
                reason="all workers are gone",
                even_if_running=True,
            )
        receipt = await _receipt(toolkit, receipt.kv_key)


@contextlib.asynccontextmanager
async def _client(cluster: Cluster) -> AsyncIterator[Any]:
    client = await nats.connect(cluster.direct, max_reconnect_attempts=-1, reconnect_time_wait=0.2)
    try:
        yield client
    finally:
        await client.close()


async def _stream(client: Any, stream: str, prefix: str) -> list[Stored]:
    """Every message that a stream holds, from its leader."""

    async def ask(what: str, **question: Any) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(nats.errors.Error, TimeoutError):
                    answer = await client.request(
                        f"$JS.API.STREAM.{what}.{stream}", json.dumps(question).encode(), timeout=5
                    )
                    return json.loads(answer.data)
                await asyncio.sleep(0.2)

    state = (await ask("INFO"))["state"]
    limit = asyncio.Semaphore(64)

    async def message(seq: int) -> Stored | None:
        async with limit:
            found = await ask("MSG.GET", seq=seq)
        if "message" not in found:
            return None
        kept = found["message"]
        headers = base64.b64decode(kept.get("hdrs", "")).decode().splitlines()
        fields = dict(line.split(": ", 1) for line in headers if ": " in line)
        expected = fields.get("Nats-Expected-Last-Subject-Sequence")
        return Stored(
            key=kept["subject"].removeprefix(prefix),
            revision=kept["seq"],
            time=_seconds(kept["time"]),
            expected=int(expected) if expected is not None else None,
            value=json.loads(base64.b64decode(kept["data"])),
        )

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(message(seq)) for seq in range(1, state["last_seq"] + 1)]
    return [each for task in asked if (each := task.result()) is not None]


def _seconds(stamp: str) -> float:
    """A server's timestamp, up to nanoseconds."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return dt.datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
