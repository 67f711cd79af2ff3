"""Look for a row by the call's idempotency key, through any driver."""

from __future__ import annotations

import asyncio
import inspect
import re
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from natsreceipts.decision import NotLanded, Verdict
from natsreceipts.errors import InvalidSetting
from natsreceipts.verifiers.looking import Subject, Undecided, Verifier, beside, check_seconds, settled, verdict_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

__all__ = ["dbapi", "sql_row"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


class _Cursor(Protocol):
    def execute(self, statement: str, parameters: Any, /) -> object: ...
    def fetchone(self) -> Any: ...


class _Connection(Protocol):
    def cursor(self) -> Any: ...
    def close(self) -> object: ...


def dbapi(connect: Callable[[], _Connection]) -> Callable[[str, str], Coroutine[Any, Any, Any]]:
    """For ``fetch=`` of `sql_row`: one row through a DB-API driver (sqlite3, psycopg, …), in a thread.

    ``connect`` opens a connection, which is closed after each look, so that each look sees what is committed by then.
    """

    def one(statement: str, key: str) -> Any:
        connection = connect()
        try:
            cursor = cast("_Cursor", connection.cursor())
            cursor.execute(statement, (key,))
            return cursor.fetchone()
        finally:
            connection.close()

    async def fetch(statement: str, key: str) -> Any:
        return await beside(lambda: one(statement, key))

    return fetch


def sql_row(
    fetch: Callable[[str, str], Any],
    *,
    table: str,
    key_column: str,
    columns: Sequence[str],
    placeholder: Literal["?", "%s", "$1", ":1"],
    settled_after: float | None,
    read: Callable[[dict[str, Any]], object] | None = None,
    timeout: float = 10.0,
) -> Verifier:
    """A verifier that looks for the row that the call commits, by its idempotency key.

    ``fetch``: an async function of a statement and the key that returns the first row, or None: ``pool.fetchrow`` of
    asyncpg, or `dbapi` of a function that connects. ``table`` (also ``schema.table``), ``key_column`` and ``columns``
    are plain names; they are not quoted, since a database may take a quoted name that it does not know for a text, and
    find no row. ``placeholder``: how the driver writes the parameter. ``timeout``: seconds of one look.

    A row is `Landed`, with what ``read`` makes of it (a dict of the columns, which is the result by default), which
    may also be a verdict: ``Unknown()`` for a row that is pending. No row is `NotLanded` once there was none for
    ``settled_after`` seconds (None: never), which has to be longer than a transaction of a dead attempt can stay
    open; ask the primary, not a replica. An error of the database raises `Undecided`. Raises InvalidSetting.
    """
    for what, name in (("table", table), ("key_column", key_column), *(("columns", name) for name in columns)):
        if not isinstance(cast("object", name), str):
            raise InvalidSetting(f"{what}: {name!r} is no name")
        parts = name.split(".") if what == "table" else [name]
        if not all(_NAME.fullmatch(part) for part in parts) or len(parts) > 3:
            raise InvalidSetting(f"{what}: {name!r} is no plain name of letters, digits and _")
    if isinstance(columns, str) or not columns:
        raise InvalidSetting(f"columns={columns!r}: use a list of at least one name")
    if placeholder not in ("?", "%s", "$1", ":1"):
        raise InvalidSetting(f"placeholder={placeholder!r}: use one of ?, %s, $1 and :1, as your driver does")
    if settled_after is not None:
        check_seconds("settled_after", settled_after)
    check_seconds("timeout", timeout, zero=False)
    # As the columns of a table: alone, a name like `user` or `null` may be a value, which equals no key.
    names = ", ".join(f"r.{name}" for name in columns)
    statement = f"SELECT {names} FROM {table} r WHERE r.{key_column} = {placeholder}"  # noqa: S608 - checked

    async def verify_by_row(call: Subject) -> Verdict:
        async def look() -> Verdict:
            try:
                async with asyncio.timeout(timeout):
                    row = fetch(statement, call.idempotency_key)
                    if inspect.isawaitable(row):
                        row = await row
            except Exception as error:
                raise Undecided(f"{table} could not be read: {type(error).__name__}: {error}") from error
            if row is None:
                return NotLanded()
            values = list(cast("Sequence[Any]", row.values() if isinstance(row, dict) else row))
            if len(values) != len(columns):
                raise Undecided(f"{table} gave {len(values)} columns, and {len(columns)} were asked for")
            found = dict(zip(columns, values, strict=True))
            return verdict_of(read(found) if read is not None else found)

        return await settled(look, settled_after, where=table)

    verify_by_row.__qualname__ = "sql_row"
    return verify_by_row
