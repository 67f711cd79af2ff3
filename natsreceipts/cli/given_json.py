"""JSON that somebody gives: taken as it stands, or refused."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["given_json"]

_WIDEST = 1 << 64
"""Ids are that wide; longer digits are a mistake, or a text."""


def given_json(text: str) -> Any:
    """A value that says the same to every reader.

    Raises ValueError for what is no JSON (NaN and Infinity too), and for what readers take in different ways:
    numbers that no double holds, ints beyond 64 bits, lone surrogates, and objects that hold a name twice.
    """
    try:
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_float, parse_int=_int, object_pairs_hook=_object
        )
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is none")


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{_short(digits)} is too large a number")
    return value


def _int(digits: str) -> int:
    if len(digits) > 21 or not -_WIDEST < int(digits) < _WIDEST:
        raise ValueError(f"{_short(digits)} is too large a number for 64 bits: write it as a text")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands there twice")
    return found


def _short(digits: str) -> str:
    return digits if len(digits) <= 30 else f"{digits[:30]}..."
