"""What strangers write: any JSON, records with something in them changed, and names that mean more than they say."""

from __future__ import annotations

import copy
import json
import os

from hypothesis import settings
from hypothesis import strategies as st

__all__ = ["HUGE", "NAMES", "fuzz", "json_values", "mutated", "raw"]

HUGE = (10**30, -(10**30), 2**63, 2**64, 10**400, -1, 0, 1e308, -0.0)

NAMES = (
    "*",
    ">",
    ".",
    "..",
    "../../etc/passwd",
    "a.b",
    "acme.>",
    "acme.*.*",
    "$KV.receipts.acme",
    "$JS.API.STREAM.DELETE.X",
    "a b",
    "a\tb",
    "a\r\nPUB x 1\r\n",
    "a\x00b",
    "\x7f",
    "é",
    "\u202e",
    "\U0001d4b3",
    "=H" + "0" * 64,
    "=2A",
    "=",
    "a=",
    "%2e%2e",
    "-",
    "x" * 10_000,
    "." * 300,
    "KV_receipts",
    "_INBOX.x",
    "\\..\\",
    "a/b",
    "notice.local.r",
    "a\u2028b",
    "{}",
    '"',
    "'",
)

_TIMES = 1 if os.environ.get("HYPOTHESIS_PROFILE", "steady") == "steady" else 50


def fuzz(examples: int):
    """So many examples, and fifty times as many with HYPOTHESIS_PROFILE=explore."""
    return settings(max_examples=examples * _TIMES, deadline=None)


_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(HUGE), st.floats(), st.text(max_size=5),
    st.sampled_from(NAMES[:-4]),
)  # fmt: skip
_words = st.sampled_from(
    ("v", "json", "msgpack", "object", "name", "digest", "size", "role", "content", "type", "id", "tool_calls")
) | st.sampled_from(
    ("function", "arguments", "tool_use_id", "toolCallId", "parts", "part_kind", "tool_call_id", "kind", "input")
)
json_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


def raw(value: object) -> bytes:
    """Its JSON, as strangers write it: with NaN, and surrogates as they come."""
    return json.dumps(value).encode()


@st.composite
def mutated(draw, records):
    """A real record of these with up to three of its parts changed, dropped or copied, at any depth; as bytes."""
    record = copy.deepcopy(draw(st.sampled_from(records)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(record))
        holder, name = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["set", "set", "drop", "add", "copy"]))
        if how == "drop" and isinstance(holder, dict):
            del holder[name]
        elif how == "add" and isinstance(holder, dict):
            holder[draw(_words)] = draw(json_values)
        elif how == "copy":
            other, its = draw(st.sampled_from(places))
            if (isinstance(other, dict) and its in other) or (isinstance(other, list) and its < len(other)):
                holder[name] = copy.deepcopy(other[its])
        else:
            holder[name] = draw(json_values)
        if not record:
            break
    data = raw(record)
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 2)) :]
    return data


def _places(value, depth=0):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield value, name
        if isinstance(inner, dict | list) and inner:
            yield from _places(inner, depth + 1)
