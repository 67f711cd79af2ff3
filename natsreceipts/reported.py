"""A result that is a failure: what a tool itself has told the model, as it stands in a receipt. Pure.

``{"natsreceipts": "failed", "text": …}``. A result of a tool's own that looks like that is put into
``{"natsreceipts": "value", "value": …}``, so that the two cannot be taken for each other.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

from natsreceipts.dialects.base import OWN_FIELD

__all__ = ["Reported", "failure", "reported", "success"]

_FAILED: Final = "failed"
_VALUE: Final = "value"


class Reported(NamedTuple):
    """What a recorded result says: the tool's value, or ``text`` where the tool has reported a failure."""

    value: Any
    text: str | None = None


def failure(text: str) -> dict[str, str]:
    """Return the result of a call of which the tool has told the model that it failed, in these words."""
    return {OWN_FIELD: _FAILED, "text": text}


def success(value: Any) -> Any:
    """Return the result of a call that came to ``value``: that value, unless it looks like what is ours."""
    return {OWN_FIELD: _VALUE, "value": value} if _marked(value) else value


def reported(result: Any) -> Reported:
    """Return what a result says that was recorded by `failure` or `success`."""
    if marked := _marked(result):
        kind, text = marked[OWN_FIELD], marked.get("text")
        if kind == _FAILED and isinstance(text, str):
            return Reported(None, text)
        if kind == _VALUE and "value" in marked:
            return Reported(marked["value"])
    return Reported(result)


def _marked(value: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) and OWN_FIELD in value else None
