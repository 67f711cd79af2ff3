"""What one check came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Finding", "Level", "error", "ok", "unverified", "warning"]

Level: TypeAlias = Literal["ok", "warning", "error", "unverified"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check came to. ``error``: a promise does not hold, or something cannot work. ``warning``: it holds
    less well than it could, or somebody has to do something. ``unverified``: it could not be found out.
    """

    level: Level
    check: str
    """What was looked at, as ``server version`` or ``receipts, deny_purge``."""
    text: str
    """What was found, in one sentence."""
    fix: str | None = None
    """What to do, where there is something to do."""
    keys: tuple[str, ...] = ()
    """The KV keys (or names) that it is about, at most 20 of them."""


def ok(check: str, text: str, *, fix: str | None = None, keys: tuple[str, ...] = ()) -> Finding:
    """All is well."""
    return Finding("ok", check, text, fix, keys)


def warning(check: str, text: str, *, fix: str, keys: tuple[str, ...] = ()) -> Finding:
    """Weaker than it could be, or a person's turn."""
    return Finding("warning", check, text, fix, keys)


def error(check: str, text: str, *, fix: str, keys: tuple[str, ...] = ()) -> Finding:
    """A promise does not hold, or something cannot work."""
    return Finding("error", check, text, fix, keys)


def unverified(check: str, text: str, *, fix: str | None = None) -> Finding:
    """It could not be found out."""
    return Finding("unverified", check, text, fix)
