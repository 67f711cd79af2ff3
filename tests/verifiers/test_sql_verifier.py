"""sql_row on sqlite, and on a PostgreSQL of the test's own where there is one."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from natsreceipts import AmbiguousCall, InvalidSetting, NotLanded, Unknown
from natsreceipts.verifiers import dbapi, sql_row


async def never():
    raise AssertionError("this must not be executed")


async def again():
    return "again"


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "payments.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE payments (idempotency_key TEXT PRIMARY KEY, id TEXT, state TEXT)")
    connection.close()
    return path


def paying(path, *, commit=True, state="done"):
    """The effect: a row."""

    async def pay(call):
        connection = sqlite3.connect(path)
        connection.execute("INSERT INTO payments VALUES (?, ?, ?)", (call.idempotency_key, "p-1", state))
        if commit:
            connection.commit()
        connection.close()

    return pay


def looking(path, **settings):
    return sql_row(
        dbapi(lambda: sqlite3.connect(path)),
        **{
            "table": "payments",
            "key_column": "idempotency_key",
            "columns": ["id", "state"],
            "placeholder": "?",
            "settled_after": 0.05,
        }
        | settings,
    )


async def test_a_row_has_landed(run, database, left_behind):
    await left_behind("pay", {}, paying(database))
    assert await run.execute("pay", {}, never, verify=looking(database)) == {"id": "p-1", "state": "done"}


async def test_no_row_has_not_landed(run, database, left_behind):
    await left_behind("pay", {}, paying(database, commit=False))
    assert await run.execute("pay", {}, again, verify=looking(database)) == "again"


async def test_an_error_says_nothing(run, database, left_behind):
    await left_behind("pay", {})
    for bad in ({"table": "paiments"}, {"key_column": "idempotency_kee"}, {"columns": ["id", "sate"]}):
        with pytest.raises(AmbiguousCall, match="could not be read"):
            await run.execute("pay", {}, never, verify=looking(database, **bad))
    with pytest.raises(AmbiguousCall, match="could not be read"):
        await run.execute("pay", {}, never, verify=looking("/nowhere/at/all"))
    with pytest.raises(AmbiguousCall, match="proves nothing"):
        await run.execute("pay", {}, never, verify=looking(database, settled_after=None))


async def test_a_transaction_that_is_still_open_is_waited_for(run, database, left_behind):
    await left_behind("pay", {})
    looks = []

    async def fetch(statement, key):
        looks.append(key)
        if len(looks) == 2:  # the dead attempt's transaction is committed after the first look
            await paying(database)(run.call("pay", {}))
        return await dbapi(lambda: sqlite3.connect(database))(statement, key)

    verify = sql_row(
        fetch, table="payments", key_column="idempotency_key", columns=["id"], placeholder="?", settled_after=2
    )
    assert await run.execute("pay", {}, never, verify=verify) == {"id": "p-1"}
    assert looks == [run.key("pay", {}).idempotency_key] * 2


async def test_a_database_that_does_not_answer_says_nothing(run, left_behind):
    await left_behind("pay", {})

    async def fetch(statement, key):
        await asyncio.Event().wait()

    verify = sql_row(fetch, table="t", key_column="k", columns=["id"], placeholder="?", settled_after=0, timeout=0.05)
    with pytest.raises(AmbiguousCall, match="TimeoutError"):
        await run.execute("pay", {}, never, verify=verify)


async def test_read_gives_the_result_or_a_verdict(run, database, left_behind):
    def read(row):
        return Unknown() if row["state"] == "pending" else row["id"]

    await left_behind("pay", {}, paying(database))
    assert await run.execute("pay", {}, never, verify=looking(database, read=read)) == "p-1"
    await left_behind("pay", {"n": 2}, paying(database, state="pending"))
    with pytest.raises(AmbiguousCall):
        await run.execute("pay", {"n": 2}, never, verify=looking(database, read=read))


BAD_NAMES = ["", "a b", "a;b", 'a"b', "a'", "x--", "1a", "ä", "a.b", "a\n", "(select 1)", "*", "a" * 64]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_cannot_be_an_injection(database, name):
    for where in ({"key_column": name}, {"columns": [name]}, {"columns": ["id", name]}):
        with pytest.raises(InvalidSetting):
            looking(database, **where)
    if name != "a.b":
        with pytest.raises(InvalidSetting):
            looking(database, table=name)
        with pytest.raises(InvalidSetting):
            looking(database, table=f"public.{name}")


@pytest.mark.parametrize("name", ["null", "true", "current_timestamp", "current_user"])
async def test_a_name_that_stands_for_a_value_proves_no_absence(run, database, left_behind, name):
    """`WHERE null = ?` finds no row in any table, and so nothing out."""
    await left_behind("pay", {})
    with pytest.raises(AmbiguousCall):
        await run.execute("pay", {}, never, verify=looking(database, key_column=name))


def test_bad_settings_are_refused(database):
    with pytest.raises(InvalidSetting):
        looking(database, columns=[1])
    for bad in ({"columns": []}, {"columns": "id"}, {"placeholder": "1=1"}, {"timeout": 0}, {"settled_after": -1}):
        with pytest.raises(InvalidSetting):
            looking(database, **bad)


def test_rows_come_in_any_shape(database):
    class Call:
        idempotency_key = "k"

    for row in (("p-1",), ["p-1"], {"id": "p-1"}):
        verify = sql_row(
            lambda *_, row=row: row, table="t", key_column="k", columns=["id"], placeholder="?", settled_after=0
        )
        assert asyncio.run(verify(Call())).result == {"id": "p-1"}


# ---------------------------------------------------------------- PostgreSQL


def binary(name):
    found = shutil.which(name)
    if found is None:
        for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
            if (folder / name).exists():
                return str(folder / name)
    return found


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    """The URL of a PostgreSQL server that is made for these tests."""
    initdb, server = binary("initdb"), binary("postgres")
    if initdb is None or server is None or sys.platform == "win32":
        pytest.skip("needs PostgreSQL's own programs (initdb and postgres)")
    folder = Path(tmp_path_factory.mktemp("pg"))
    user = None
    if os.getuid() == 0:  # it refuses to run as root
        user = "nobody"
        for each in (folder, *folder.parents[:3]):
            each.chmod(0o755)
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    data = folder / "data"
    made = subprocess.run(
        [initdb, "-D", str(data), "-U", "tests", "-A", "trust", "--no-sync"],
        user=user,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert made.returncode == 0, made.stderr
    process = subprocess.Popen(
        [server, "-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"],
        user=user,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )
    try:
        end = time.monotonic() + 30
        while not list(folder.glob(".s.PGSQL.*[0-9]")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        yield f"postgresql://tests@/postgres?host={folder}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.faults
async def test_on_postgresql_with_asyncpg_and_psycopg(run, left_behind, postgres):
    asyncpg = pytest.importorskip("asyncpg")
    psycopg = pytest.importorskip("psycopg")
    pool = await asyncpg.create_pool(postgres, min_size=1, max_size=3)
    try:
        await pool.execute("CREATE SCHEMA shop")
        await pool.execute("CREATE TABLE shop.payments (idempotency_key text PRIMARY KEY, id int)")

        async def pay(call):
            await pool.execute("INSERT INTO shop.payments VALUES ($1, 7)", call.idempotency_key)

        said = {"table": "shop.payments", "key_column": "idempotency_key", "columns": ["id"]}
        verifiers = {
            "asyncpg": sql_row(pool.fetchrow, **said, placeholder="$1", settled_after=0.1),
            "psycopg": sql_row(dbapi(lambda: psycopg.connect(postgres)), **said, placeholder="%s", settled_after=0.1),
        }
        for name, verify in verifiers.items():
            await left_behind("pay", {"with": name}, pay)
            assert await run.execute("pay", {"with": name}, never, verify=verify) == {"id": 7}
            await left_behind("pay", {"without": name})
            assert await run.execute("pay", {"without": name}, again, verify=verify) == "again"
        # A transaction of the dead attempt that is still open, and committed while it is looked for.
        for name in verifiers:
            await left_behind("pay", {"late": name})
            late = await pool.acquire()
            transaction = late.transaction()
            await transaction.start()
            key = run.key("pay", {"late": name}).idempotency_key
            await late.execute("INSERT INTO shop.payments VALUES ($1, 8)", key)
            looked = asyncio.Event()

            async def fetch(statement, key, looked=looked):
                looked.set()
                return await pool.fetchrow(statement, key)

            verify = sql_row(fetch, **said, placeholder="$1", settled_after=10)
            waiting = asyncio.ensure_future(run.execute("pay", {"late": name}, never, verify=verify))
            await looked.wait()
            await transaction.commit()
            await pool.release(late)
            assert await waiting == {"id": 8}
        broken = sql_row(pool.fetchrow, **{**said, "table": "shop.paiments"}, placeholder="$1", settled_after=0)
        await left_behind("pay", {"n": 3})
        with pytest.raises(AmbiguousCall, match="UndefinedTable"):
            await run.execute("pay", {"n": 3}, never, verify=broken)
        assert await sql_row(pool.fetchrow, **said, placeholder="$1", settled_after=0)(run.call("x", {})) == NotLanded()
    finally:
        await pool.close()
