"""The servers that the peers need, started for the benchmark and gone after it. Absent ones are skipped with a word."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Absent(Exception):
    """What would be measured is not installed here."""


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _answers(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise Absent(f"{process.args!r} did not come up")


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _answers(port, process)
        yield
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def redis(*, synced: bool) -> Iterator[str]:
    """The URL of a Redis with its append-only file on: fsync once a second, or (``synced``) before it answers."""
    found = shutil.which("redis-server")
    if found is None:
        raise Absent("no redis-server on the PATH")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": folder,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if synced else "everysec",
        }
        command = [found, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
        with _running(command, port):
            yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def postgres(*, synced: bool) -> Iterator[str]:
    """The URL of a PostgreSQL whose commits return before, or (``synced``) after they are on disk."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("pg_isready")
    home = binaries[0] if binaries else Path(found).parent if found else None
    if home is None or not (home / "initdb").exists():
        raise Absent("no PostgreSQL server installed")
    # It refuses to run as root.
    other_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if other_user:
            shutil.chown(folder, "postgres")
        data = f"{folder}/data"
        options = ["-D", data, "-U", "bench", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run([*other_user, f"{home}/initdb", *options], check=True, stdout=subprocess.DEVNULL, cwd=folder)
        settings = [
            f"port={port}",
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={folder}",
            "max_connections=200",
            f"synchronous_commit={'on' if synced else 'off'}",
        ]
        given = [part for setting in settings for part in ("-c", setting)]
        with _running([*other_user, f"{home}/postgres", "-D", data, *given], port):
            url = f"postgresql://bench@127.0.0.1:{port}/postgres"
            until = time.monotonic() + 20
            while subprocess.run([f"{home}/pg_isready", "-q", "-d", url], check=False).returncode:
                if time.monotonic() > until:
                    raise Absent("PostgreSQL did not come up")
                time.sleep(0.1)
            yield url
