"""Values (results, step outputs, arguments) as they stand in a record: JSON where it is faithful, else MessagePack.

Pure. What JSON cannot hold (bytes, times, keys that are not strings, NaN) goes through MessagePack with the
extension types below; what neither can hold is refused with `NotEncodable` before anything is written.

=========  ==========================================================================
extension  holds
=========  ==========================================================================
1          datetime, as ISO 8601 text (keeps its offset, or that it has none)
2          int beyond 64 bits, as hex digits with their sign
3          date, as ISO 8601 text
4          time, as ISO 8601 text
5          Decimal, as text
6          UUID, as 32 hex digits
7          set, as a packed array
8          frozenset, as a packed array
9          timedelta, as a packed array of days, seconds, microseconds
=========  ==========================================================================
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import pydantic

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NotEncodable", "normal_form", "pack", "unpack"]

_MAX_DEPTH = 400
"""Containers within containers; msgpack's C packer stops at 511 (its DEFAULT_RECURSE_LIMIT)."""

_JSON_DEPTH = 100
"""Above this a value goes to MessagePack: the JSON reader of pydantic refuses 200 levels (measured), and the
record around the value takes some of them."""

_JSON_BITS = 4000
"""Longer ints go to MessagePack: JSON readers refuse more than some thousand digits (pydantic and Python: 4,300)."""

_DEEPEST = 16
"""Sets within sets: msgpack unpacks each of them in a frame of its own on the stack of C, which is soon full."""

_WIDE = 1 << 63


_NO_KEYS = (tuple, list, dict, set, bytearray)


class NotEncodable(ValueError):
    """A value that a record cannot hold; the message says which part of it."""


def normal_form(value: object) -> tuple[Any, bool]:
    """The value as a replay would give it, and whether JSON holds it faithfully.

    Tuples become lists, subclasses of the basic types the basic types, enumeration members their values,
    pydantic models and dataclasses dicts: the same for the first caller and for every replay. Raises
    `NotEncodable` for anything else that is not bytes, datetime, date, time, timedelta, Decimal, UUID or a set.
    """
    json_holds = True

    def walk(item: object, depth: int) -> Any:
        nonlocal json_holds
        kind = type(item)
        if kind is str:
            text = cast("str", item)
            if not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    json_holds = False
            return text
        if item is None or kind is bool:
            return item
        if kind is int:
            if cast("int", item).bit_length() > _JSON_BITS:
                json_holds = False
            return item
        if kind is float:
            if not math.isfinite(cast("float", item)):
                json_holds = False
            return item
        if depth >= _MAX_DEPTH:
            raise NotEncodable(f"it is nested more than {_MAX_DEPTH} levels deep, or contains itself")
        if depth >= _JSON_DEPTH:
            json_holds = False
        if kind is dict:
            return {
                k if type(k) is str and k.isascii() else key(k, depth): v if v is None else walk(v, depth + 1)
                for k, v in cast("dict[object, object]", item).items()
            }
        if kind is list or kind is tuple:
            return [walk(v, depth + 1) for v in cast("list[object]", item)]
        if kind in _BY_EXTENSION or kind is bytes:
            json_holds = False
            if kind in (set, frozenset):
                items = {key(v, depth) for v in cast("set[object]", item)}
                return items if kind is set else frozenset(items)
            return item
        return walk(_plainer(item), depth)

    def key(item: object, depth: int) -> Any:
        nonlocal json_holds
        if type(item) is not str:
            json_holds = False
        if isinstance(item, _NO_KEYS):
            raise NotEncodable(f"a {type(cast('object', item)).__name__} cannot be a key or a member of a set")
        return walk(item, depth)

    try:
        return walk(value, 0), json_holds
    except RecursionError as error:
        raise NotEncodable("it is nested too deep") from error


def _plainer(item: object) -> object:
    """One step from a richer type towards the basic ones."""
    if isinstance(item, enum.Enum):
        return cast("object", item.value)
    if isinstance(item, pydantic.BaseModel):
        return item.model_dump()
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    if isinstance(item, str):
        return str.__str__(item)
    if isinstance(item, int):
        return int.__index__(item)
    if isinstance(item, float):
        return float.__float__(item)
    if isinstance(item, dict):
        return dict(cast("dict[object, object]", item))
    if isinstance(item, list | tuple):
        return list(cast("list[object]", item))
    if isinstance(item, bytes | bytearray):
        return bytes(item)
    raise NotEncodable(
        f"a {type(item).__module__}.{type(item).__qualname__} cannot be recorded; return plain data, "
        f"a pydantic model or a dataclass"
    )


(
    _EXT_DATETIME,
    _EXT_INT,
    _EXT_DATE,
    _EXT_TIME,
    _EXT_DECIMAL,
    _EXT_UUID,
    _EXT_SET,
    _EXT_FROZENSET,
    _EXT_DELTA,
) = range(1, 10)

_BY_EXTENSION: dict[type, int] = {
    dt.datetime: _EXT_DATETIME,
    dt.date: _EXT_DATE,
    dt.time: _EXT_TIME,
    dt.timedelta: _EXT_DELTA,
    decimal.Decimal: _EXT_DECIMAL,
    uuid.UUID: _EXT_UUID,
    set: _EXT_SET,
    frozenset: _EXT_FROZENSET,
}


_packb = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]
_unpackb = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def pack(value: object) -> bytes:
    """MessagePack of a value in normal form. Raises `NotEncodable` where MessagePack cannot hold it."""
    try:
        return _packb(_wide_ints(value), default=_extension, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise NotEncodable(str(error)) from error


def unpack(data: bytes) -> Any:
    """The value that `pack` was given. Raises ValueError where the bytes are not MessagePack of ours."""
    return _unpacked(data, _DEEPEST)


def _unpacked(data: bytes, deeper: int) -> Any:
    """``deeper``: how many extensions may stand in one another below. (Too many would overflow the stack of C.)"""
    hook = partial(_from_extension, deeper)
    try:
        return _unpackb(data, raw=False, strict_map_key=False, ext_hook=hook, unicode_errors="surrogatepass")
    except (ValueError, TypeError, ArithmeticError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"not a MessagePack value of a known kind: {error}") from error


def _wide_ints(value: object) -> object:
    """msgpack raises on ints beyond 64 bits without asking its hook, so they are wrapped beforehand."""
    if type(value) is int and not -_WIDE <= value < 2 * _WIDE:
        return msgpack.ExtType(_EXT_INT, b"%x" % value)
    if type(value) is dict:
        return {_wide_ints(k): _wide_ints(v) for k, v in cast("dict[object, object]", value).items()}
    if type(value) is list:
        return [_wide_ints(v) for v in cast("list[object]", value)]
    return value


def _extension(value: object) -> object:
    code = _BY_EXTENSION.get(type(value))
    if code is None:
        raise NotEncodable(f"a {type(value).__name__} cannot be recorded")
    if isinstance(value, set | frozenset):
        return msgpack.ExtType(code, pack(list(cast("set[object]", value))))
    if isinstance(value, dt.timedelta):
        return msgpack.ExtType(code, pack([value.days, value.seconds, value.microseconds]))
    if isinstance(value, uuid.UUID):
        return msgpack.ExtType(code, value.hex.encode())
    text = value.isoformat() if isinstance(value, dt.date | dt.time) else str(value)
    return msgpack.ExtType(code, text.encode())


def _from_extension(deeper: int, code: int, data: bytes) -> object:
    if not deeper:
        raise ValueError("it is nested too deeply")
    if code == _EXT_SET:
        return set(_unpacked(data, deeper - 1))
    if code == _EXT_FROZENSET:
        return frozenset(_unpacked(data, deeper - 1))
    if code == _EXT_DELTA:
        days, seconds, microseconds = _unpacked(data, deeper - 1)
        return dt.timedelta(days, seconds, microseconds)
    text = data.decode()
    if code == _EXT_INT:
        return int(text, 16)
    if code == _EXT_DATETIME:
        return dt.datetime.fromisoformat(text)
    if code == _EXT_DATE:
        return dt.date.fromisoformat(text)
    if code == _EXT_TIME:
        return dt.time.fromisoformat(text)
    if code == _EXT_DECIMAL:
        return decimal.Decimal(text)
    if code == _EXT_UUID:
        return uuid.UUID(hex=text)
    raise ValueError(f"extension type {code} is not known")
