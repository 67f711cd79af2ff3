"""The shared vectors, in every dialect; and that closing what can be closed leaves nothing to close."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from dialect_shapes import DIALECTS, shaped_with_origins
from vendor_rules import RULES

from natsreceipts.transcript import (
    closable_by_append,
    find_orphan_tool_calls,
    interrupted_result_message,
    interrupted_results,
    request_view,
)

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "orphans.json").read_text())["cases"]


def reconciled(messages, dialect, suspended=frozenset()):
    closes = interrupted_results(closable_by_append(messages, suspended, dialect=dialect))
    return closes, messages + [interrupted_result_message(close, dialect=dialect) for close in closes]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_vector(dialect, case):
    both = shaped_with_origins(case["messages"], dialect)
    messages = [message for message, _ in both]
    before = copy.deepcopy(messages)
    found = find_orphan_tool_calls(messages, dialect=dialect)
    assert [
        {"toolCallId": o.tool_call_id, "atMessage": both[o.message_index][1]} | ({"kind": o.kind} if o.kind else {})
        for o in found
    ] == case["orphans"]
    assert all(o.tool_name == "t" for o in found if o.kind is None)
    closes, after = reconciled(messages, dialect)
    assert [close.tool_call_id for close in closes] == case["reconcileCloses"]
    assert [close.tool_call_id for close in reconciled(after, dialect)[0]] == case["secondReconcileCloses"]
    RULES[dialect](request_view(messages, dialect=dialect).messages)
    RULES[dialect](request_view(after, dialect=dialect).messages)
    assert messages == before


def test_the_vectors_are_all_there():
    assert len(CASES) == 12
