"""Three nats-servers of our own as one cluster, with everything between them, and to them, going through proxies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from wires import Wire

from natsreceipts.embedded import _find_executable, free_port
from natsreceipts.testing import FaultProxy

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Cluster", "Node", "dies_with_us"]

HOST = "127.0.0.1"
_SMALL_DISK = 512 * 1024 * 1024


# Looked up here: between fork and exec another thread's lock on the loader would never be let go.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def dies_with_us() -> None:
    """In a child, before it is anything: it gets SIGKILL when we are gone."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, 9)


class Node:
    """One server."""

    def __init__(self, name: str, folder: Path, executable: str) -> None:
        self.name = name
        self.folder = folder
        self.port, self.route, self.monitor = free_port(), free_port(), free_port()
        self.routes: list[int] = []
        self.small_disk = False
        self._executable = executable
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Past the proxies."""
        return f"nats://{HOST}:{self.port}"

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Unless it runs."""
        if self.runs:
            return
        self.folder.mkdir(exist_ok=True)
        conf = self.folder.with_suffix(".conf")
        # No server tells another, or a client, of addresses that would lead around the proxies.
        routes = ", ".join(f'"nats://{HOST}:{port}"' for port in self.routes)
        conf.write_text(
            f'server_name: {self.name}\nlisten: "{HOST}:{self.port}"\nhttp: "{HOST}:{self.monitor}"\n'
            f'jetstream {{ store_dir: "{self.folder}", sync_interval: always, max_file_store: 20G }}\n'
            f'cluster {{ name: three, listen: "{HOST}:{self.route}", no_advertise: true, pool_size: 1, '
            f"routes: [{routes}] }}\n",
            encoding="utf-8",
        )
        with self.folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._executable, "-c", str(conf)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_us,
            )

    async def kill(self) -> None:
        """SIGKILL, also of one that is frozen."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def freeze(self) -> None:
        if self.runs and self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self.runs and self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    async def look(self, path: str) -> dict[str, Any]:
        """What its monitoring port says. Raises OSError where it says nothing."""

        def fetch() -> dict[str, Any]:
            with urllib.request.urlopen(f"http://{HOST}:{self.monitor}{path}", timeout=2) as answer:
                return json.load(answer)

        try:
            return await asyncio.to_thread(fetch)
        except ValueError as error:
            raise OSError(f"{self.name} said no JSON") from error


class Cluster:
    """Three nodes while its context is open. ``proxies`` stand before the nodes, ``wires`` between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.proxies: list[FaultProxy] = []
        self.wires: dict[tuple[str, str], Wire] = {}
        """By who calls whom."""
        self._stack = AsyncExitStack()

    @property
    def urls(self) -> list[str]:
        """Where clients connect: through the proxies."""
        return [proxy.url for proxy in self.proxies]

    def proxied(self, node: Node) -> str:
        """Where clients connect to one node."""
        return self.urls[self.nodes.index(node)]

    @property
    def direct(self) -> list[str]:
        """Past the proxies."""
        return [node.url for node in self.nodes]

    async def __aenter__(self) -> Self:
        executable = await _find_executable(None, 30.0)
        for again in (True, True, False):
            try:
                await self._start(executable)
            except TimeoutError:  # somebody took a port of theirs, or they do not find each other
                await self._stack.aclose()
                if not again:
                    raise
            except BaseException:
                await self._stack.aclose()
                raise
            else:
                break
        return self

    async def _start(self, executable: str) -> None:
        self.nodes = [Node(f"n{n}", self.folder / f"node-{n}", executable) for n in range(3)]
        self.proxies.clear()
        for one in self.nodes:
            self.proxies.append(await self._stack.enter_async_context(FaultProxy(HOST, one.port)))
            for other in self.nodes:
                if other is not one:
                    wire = await self._stack.enter_async_context(Wire(other.route))
                    self.wires[one.name, other.name] = wire
                    one.routes.append(wire.port)
        self._stack.push_async_callback(self._end)
        self._make_small_disk(self.nodes[2])
        for node in self.nodes:
            node.start()
        await self.healthy(timeout=60.0)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
        await asyncio.gather(*(node.kill() for node in self.nodes))
        for node in self.nodes:
            if node.small_disk:
                # The log of a run that failed is kept, what was stored there is in the history.
                subprocess.run(["umount", "-l", str(node.folder)], check=False, capture_output=True)
            else:
                shutil.rmtree(node.folder, ignore_errors=True)

    def _make_small_disk(self, node: Node) -> None:
        node.folder.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK}", "tmpfs", str(node.folder)]
        with contextlib.suppress(FileNotFoundError):
            node.small_disk = subprocess.run(mount, check=False, capture_output=True).returncode == 0

    async def healthy(self, *, timeout: float = 180.0) -> None:
        """Wait until all nodes run and each follows a leader in all that it holds."""
        async with asyncio.timeout(timeout):
            while True:
                with contextlib.suppress(OSError):
                    told = [await node.look("/healthz") for node in self.nodes]
                    metas = [(await node.look("/jsz")).get("meta_cluster") or {} for node in self.nodes]
                    if all(each.get("status") == "ok" for each in told) and all(meta.get("leader") for meta in metas):
                        return
                await asyncio.sleep(0.1)

    # ------------------------------------------------------------------ who leads

    async def meta_leader(self) -> Node | None:
        for node in self.nodes:
            with contextlib.suppress(OSError):
                if ((await node.look("/jsz")).get("meta_cluster") or {}).get("leader") == node.name:
                    return node
        return None

    async def stream_leader(self, stream: str) -> Node | None:
        for node in self.nodes:
            if await self.leads(node, stream):
                return node
        return None

    async def leads(self, node: Node, stream: str) -> bool:
        """Whether a node says of itself that it leads a stream; a partitioned one may, too."""
        with contextlib.suppress(OSError):
            for account in (await node.look("/jsz?accounts=true&streams=true")).get("account_details") or ():
                for each in account.get("stream_detail") or ():
                    if each["name"] == stream:
                        return (each.get("cluster") or {}).get("leader") == node.name
        return False

    # ------------------------------------------------------------------ what is between

    def around(self, node: Node) -> list[Wire]:
        """The routes of one node."""
        return [wire for ends, wire in self.wires.items() if node.name in ends]

    def fill(self, node: Node) -> bool:
        """Leave nothing free on its small disk; whether it has one."""
        if not node.small_disk:
            return False
        file = os.open(node.folder / "ballast", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            at, size = os.fstat(file).st_size, 1 << 24
            while size >= 4096:
                try:
                    os.posix_fallocate(file, at, size)
                    at += size
                except OSError:
                    size //= 2
        finally:
            os.close(file)
        return True

    def empty(self, node: Node) -> None:
        """Take away what `fill` put there."""
        (node.folder / "ballast").unlink(missing_ok=True)
