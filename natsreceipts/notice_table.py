"""Run notices as a table for a person, or for a model's next turn. Pure."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Final

from natsreceipts.errors import InvalidName
from natsreceipts.identity import canonical_json
from natsreceipts.notice import has_control

if TYPE_CHECKING:
    from collections.abc import Iterable

    from natsreceipts.notice_record import Notice

__all__ = ["render_notices"]

_HEAD: Final = ("at", "step", "to", "decision", "outcome", "detail", "consumed")


def render_notices(notices: Iterable[Notice]) -> str:
    """The notices as a Markdown table, one line each, in the order given; for a person, or for a model's next turn.

    Nothing in it can break out of its cell: what is not a plain word is a JSON string, in which ``|``, back-ticks,
    angle brackets and characters that do not print are escapes. Raises InvalidName for a step, an addressee or a
    ``by`` with control characters or line separators, which are never filed here, but may stand in a bucket that
    others write to; nothing is rendered then.
    """
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, notices)]
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
    plain = text.isprintable() and " " not in text and not any(character in text for character in '"|`<>\\')
    return text if plain and text else _quoted(text)


def _quoted(text: str) -> str:
    return "".join(map(_shown, json.dumps(text, ensure_ascii=False)))


def _shown(character: str) -> str:
    if character.isprintable() and character not in "|`<>":
        return character
    return f"\\u{ord(character):04x}" if character.isascii() else json.dumps(character)[1:-1]


def _instant(at: int) -> str:
    try:
        moment = dt.datetime.fromtimestamp(at // 1000, tz=dt.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at} ms"  # beyond the year 9999
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{at % 1000:03d}Z"
