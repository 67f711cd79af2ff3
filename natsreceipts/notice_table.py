"""Run notices as a table for a person, or for a model's next turn. Pure."""

from __future__ import annotations

import datetime as dt
import json
import re
import unicodedata
from typing import TYPE_CHECKING, Final, cast

from natsreceipts.errors import InvalidName, InvalidSetting, brief
from natsreceipts.identity import canonical_json
from natsreceipts.notice import has_control
from natsreceipts.notice_record import Notice

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["render_notices"]

_HEAD: Final = ("at", "step", "to", "decision", "outcome", "detail", "consumed")

_PLAIN: Final = re.compile(r"[A-Za-z0-9/._:#=@+,-]+")

_LIVE: Final = re.compile(
    r"[|`<>\[\]*~&$]"  # cells, code, HTML, links and pictures, emphasis, entities, formulas
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis too, except within a word
    r"|:(?=//)|(?i:(?<=www))\."  # addresses that become links by themselves
)
"""What Markdown takes for more than a character."""

_UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""What counts as printable and shows nothing."""

_MARKS: Final = 3
"""Combining marks on one character that are shown; a pile of them covers the lines above and below."""


def render_notices(notices: Iterable[Notice]) -> str:
    """The notices as a Markdown table, one line each, in the order given; for a person, or for a model's next turn.

    Nothing in it can break out of its cell, or is live in it: what is not a plain ASCII word is a JSON string, in
    which whatever Markdown takes for more than a character (a link, a picture, emphasis, HTML) and what does not show
    are escapes. Nothing is cut. Raises InvalidName for a step, an addressee or a ``by`` with control characters or line
    separators, which are never filed here, but may stand in a bucket that others write to; InvalidSetting for what is
    no `Notice`. Nothing is rendered then.
    """
    try:
        told = [*cast("Iterable[object]", notices)]
    except TypeError as error:
        raise InvalidSetting(f"notices={brief(notices)}: use notices, as `list` gives them") from error
    for notice in told:
        if not isinstance(notice, Notice):
            raise InvalidSetting(f"{brief(notice)} is no notice: use those that `list` gives")
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, cast("list[Notice]", told))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(notice: Notice) -> tuple[str, ...]:
    spec, consumed = notice.spec, notice.consumed
    detail = " ".join(
        f"{key}={_quoted(value) if isinstance(value, str) else canonical_json(value)}"
        for key, value in (spec.fact.detail or {}).items()
    )
    carried = f"by {_word('by', consumed.by)} at {_instant(consumed.consumed_at)}" if consumed else "no"
    step, addressee = _word("step", spec.step), _word("addressee", spec.addressee)
    return (_instant(spec.at), step, addressee, spec.fact.decision, spec.fact.outcome, detail, carried)


def _word(what: str, text: str) -> str:
    if has_control(text):
        raise InvalidName(what, text, "control characters and line separators would break out of the table")
    quoted = _quoted(text)
    return text if _PLAIN.fullmatch(text) and quoted == f'"{text}"' else quoted


def _quoted(text: str) -> str:
    escaped = {match.start() for pattern in (_LIVE, _UNSEEN) for match in pattern.finditer(text)}
    written: list[str] = []
    marks = 0
    for at, character in enumerate(text):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if at in escaped or marks > _MARKS or not character.isprintable():
            written.append(f"\\u{ord(character):04x}" if character.isascii() else json.dumps(character)[1:-1])
        else:
            written.append(f"\\{character}" if character in '"\\' else character)
    return f'"{"".join(written)}"'


def _instant(at: int) -> str:
    try:
        moment = dt.datetime.fromtimestamp(at // 1000, tz=dt.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at} ms"  # beyond the year 9999
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{at % 1000:03d}Z"
