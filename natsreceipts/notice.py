"""What identifies a run notice, and the bound of what it may say. Pure.

Ids and bound are those of the published run-notice layout, so workers of both systems can share a bucket
(docs/wire.md). Everything is checked before it is written: a record that a reader refuses would stand in every later
list, and nothing is ever overwritten.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias, cast

from natsreceipts.errors import InvalidFact, InvalidName, InvalidSetting, brief
from natsreceipts.identity import canonical_json, sha256_hex

__all__ = [
    "RunNoticeFact",
    "check_endpoint",
    "check_instant",
    "check_notice_id",
    "check_run",
    "check_text",
    "endpoint_of",
    "fits_detail",
    "has_control",
    "is_safe",
    "notice_addressee_id",
    "run_notice_id",
]

Scalar: TypeAlias = str | int | float | bool

MAX_INSTANT: Final = 2**53 - 1
"""Milliseconds: the largest integer that every JSON reader tells apart from its neighbours."""

MAX_TEXT: Final = 1024
"""UTF-16 units of a step, an addressee, a request id, and of who consumed a notice."""

_MAX_DETAIL = 8
_MAX_STRING = 128

_TOKEN: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?")
_DETAIL_KEY: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_INDEX: Final = 2**32 - 1
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_RUN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LABEL: Final = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_ENDPOINT: Final = re.compile(f"(?=.{{1,64}}$){_LABEL}(?:_{_LABEL})*")
_HASHED_TENANT: Final = re.compile(r"x-[0-9a-f]{40}")
_NOTICE_ID: Final = re.compile(r"[A-Za-z0-9_-]{43}")


# ---------------------------------------------------------------- ids


def notice_addressee_id(agent: str) -> str:
    """The token that stands for an agent in a key: 43 characters of base64url, from its name.

    Raises InvalidName for a name that is not a str, is empty or holds a lone surrogate.
    """
    if not _well_formed("addressee", agent):
        raise InvalidName("addressee", agent, "it is empty, and names nobody")
    return _addressee_id(agent)


@lru_cache(maxsize=1024)
def _addressee_id(agent: str) -> str:
    return _digest({"agent": agent})


def run_notice_id(request_id: str, addressee: str) -> str:
    """The id that a notice is filed under: 43 characters of base64url, from the step's request id and the addressee.

    So a step that is carried out again files the same notices, and one call to several agents files one each. Raises
    InvalidName for what is not a str or holds a lone surrogate.
    """
    _well_formed("request_id", request_id)
    _well_formed("addressee", addressee)
    return _digest({"addressee": addressee, "requestId": request_id})


def _digest(what: dict[str, str]) -> str:
    hashed = hashlib.sha256(canonical_json(what).encode()).digest()
    return base64.urlsafe_b64encode(hashed).rstrip(b"=").decode()


def endpoint_of(tenant: str) -> str:
    """The endpoint that keeps a tenant's notices apart from those of all others.

    Its name, where that is an endpoint as it stands and not ``local``; else ``x-`` and the first 40 hex digits of the
    SHA-256 of its UTF-8. So is a name that looks like one of those, since it could be made to meet another tenant's.
    """
    if _ENDPOINT.fullmatch(tenant) and tenant != "local" and not _HASHED_TENANT.fullmatch(tenant):
        return tenant
    return f"x-{sha256_hex(tenant.encode())[:40]}"


# ---------------------------------------------------------------- what may be written


def check_endpoint(endpoint: str) -> None:
    """Raise InvalidName for what is no endpoint as it stands in a key."""
    if type(endpoint) is not str or not _ENDPOINT.fullmatch(endpoint):
        raise _bad(
            "endpoint", endpoint, "use a lower-case name like those of DNS, '.' written '_', at most 64 characters"
        )


def check_run(run: str) -> None:
    """Raise InvalidName for a run that the layout has no room for."""
    if type(run) is not str or not _RUN.fullmatch(run):
        raise _bad("run", run, "notices are kept for runs named by 1 to 64 of A-Z, a-z, 0-9, _ and -")


def check_notice_id(notice_id: str) -> None:
    """Raise InvalidName for what `run_notice_id` does not make."""
    if type(notice_id) is not str or not _NOTICE_ID.fullmatch(notice_id):
        raise _bad("notice_id", notice_id, "use the 43 characters that filing returned")


def check_text(what: str, text: str) -> None:
    """Raise InvalidName for a name that a record or a table cannot hold: empty, too long, control characters."""
    if not _well_formed(what, text):
        raise InvalidName(what, text, "it is empty")
    if _units(text) > MAX_TEXT:
        raise InvalidName(what, text, f"use at most {MAX_TEXT:,} UTF-16 units")
    if has_control(text):
        raise InvalidName(what, text, "it holds control characters or line separators")


def check_instant(what: str, at: int) -> None:
    """Raise InvalidSetting for what is no instant: milliseconds since the epoch, a safe non-negative int."""
    if not is_safe(at):
        raise InvalidSetting(f"{what}={brief(at)}: use milliseconds since the epoch, an int from 0 to 2^53 - 1")


def is_safe(number: object) -> bool:
    """Whether it is an int from 0 to 2^53 - 1."""
    return type(number) is int and 0 <= number <= MAX_INSTANT


def has_control(text: str) -> bool:
    """Whether there are control characters (C0, DEL, C1) or line separators in it."""
    return _CONTROL.search(text) is not None


def _bad(what: str, value: object, reason: str) -> InvalidName:
    return InvalidName(what, value if type(value) is str else f"<{type(value).__name__}>", reason)


def _well_formed(what: str, text: object) -> bool:
    """Whether there is any of it. Raises InvalidName for what has no UTF-8 form."""
    if type(text) is not str:
        raise _bad(what, text, f"it has to be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidName(what, text, "it holds surrogates, which have no UTF-8 form") from None
    return bool(text)


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


# ---------------------------------------------------------------- the fact


@dataclass(frozen=True, slots=True, eq=False)
class RunNoticeFact:
    """What was decided, within the bound: nothing here can be a message of its own.

    ``decision`` and ``outcome`` match ``[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?``. ``detail`` is None or has at most 8
    keys that match ``[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?``, whose values are a finite number, a bool, or a string of at
    most 128 UTF-16 units without control characters (C0, DEL, C1) and U+2028/9. Ints may be as large as a double can
    be; beyond 2^53 a reader in JavaScript rounds them.

    Two facts are equal where their canonical JSON is (so True is not 1, and 1.0 is). Raises InvalidFact, which names
    the field and the limit; nothing is ever cut to fit.
    """

    decision: str
    outcome: str
    detail: Mapping[str, Scalar] | None = None

    def __post_init__(self) -> None:
        for name in ("decision", "outcome"):
            text: object = getattr(self, name)
            if type(text) is not str or not _TOKEN.fullmatch(text):
                raise InvalidFact(name, "use 1 to 64 of a-z, 0-9 and -, with no - at either end")
        if self.detail is not None:
            object.__setattr__(self, "detail", _checked_detail(self.detail))

    @classmethod
    def of(cls, value: object) -> RunNoticeFact:
        """A fact from a mapping of its fields (one that is a fact already is returned). Raises InvalidFact."""
        if isinstance(value, RunNoticeFact):
            return value
        if not isinstance(value, Mapping):
            raise InvalidFact("fact", "use a mapping with decision, outcome and, if there is any, detail")
        given = dict(cast("Mapping[object, object]", value))
        for name in given:
            if name not in ("decision", "outcome", "detail"):
                named = name if isinstance(name, str) else type(name).__name__
                raise InvalidFact(named[:80], "there is no such field: use decision, outcome and detail")
        if given.get("detail", {}) is None:
            raise InvalidFact("detail", "leave it out, or use a mapping")
        return cls(**cast("dict[str, Any]", given | {name: given.get(name) for name in ("decision", "outcome")}))

    def fields(self) -> dict[str, object]:
        """The fields as they are written, in that order: details as given, but for keys that count.

        (A JavaScript object has those first and ascending, however it was made.)
        """
        said: dict[str, object] = {"decision": self.decision, "outcome": self.outcome}
        if self.detail is None:
            return said
        counting = sorted((key for key in self.detail if _INDEX.fullmatch(key) and int(key) < _MAX_INDEX), key=int)
        return {**said, "detail": {key: self.detail[key] for key in dict.fromkeys([*counting, *self.detail])}}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RunNoticeFact):
            return NotImplemented
        return canonical_json(self.fields()) == canonical_json(other.fields())

    def __hash__(self) -> int:
        return hash(canonical_json(self.fields()))


def _checked_detail(detail: object) -> dict[str, Scalar]:
    if not isinstance(detail, Mapping):
        raise InvalidFact("detail", "leave it out, or use a mapping")
    found = dict(cast("Mapping[object, object]", detail))
    if len(found) > _MAX_DETAIL:
        raise InvalidFact("detail", f"use at most {_MAX_DETAIL} keys, not {len(found)}")
    for key, value in found.items():
        if type(key) is not str or not _DETAIL_KEY.fullmatch(key):
            named = key if isinstance(key, str) else type(key).__name__
            raise InvalidFact(f"detail.{named[:40]}", "a key is 1 to 32 of a-z, 0-9 and -, with no - at either end")
        problem = _detail_problem(value)
        if problem:
            raise InvalidFact(f"detail.{key}", problem)
    return cast("dict[str, Scalar]", found)


def _detail_problem(value: object) -> str:
    if type(value) is str:
        if _units(value) > _MAX_STRING:
            return f"use at most {_MAX_STRING} UTF-16 units, not {_units(value)}"
        return "control characters and line separators are not allowed" if has_control(value) else ""
    if type(value) is bool:
        return ""
    if type(value) is int or type(value) is float:
        try:
            return "" if math.isfinite(value) else "use a finite number"
        except OverflowError:
            return "use a number that a double can hold"
    return f"use a finite number, a bool or a string, not {type(value).__name__}"


def fits_detail(value: object) -> bool:
    """Whether a value may stand in a fact's detail."""
    return not _detail_problem(value)
