"""Any interleaving of calls, results, closes and duplicates: the request is accepted, and reconciling comes to an end.

Which result answers which call is worked out once more here, call by call and without any state.
"""

from __future__ import annotations

import copy

import pytest
from dialect_shapes import (
    DIALECTS,
    calls,
    close,
    other_texts,
    reasoning,
    result,
    result_texts,
    says,
    shaped,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_rules import RULES

from natsreceipts.transcript import (
    closable_by_append,
    find_orphan_tool_calls,
    interrupted_result_message,
    interrupted_results,
    is_interrupted_close,
    request_view,
)

IDS = st.sampled_from(["a", "b", "c", "a_2"])
EVENTS = st.one_of(
    st.lists(IDS, min_size=1, max_size=3).map(lambda ids: calls(*ids)),
    IDS.map(result),
    IDS.map(result),
    IDS.map(close),
    st.sampled_from([user(), says(), reasoning()]),
)


def numbered(events):
    """The events, each text with its place: ``text-3`` for one of the host's, ``real-3`` for a result's."""
    for at, event in enumerate(events):
        if event["role"] == "toolResult" and not event.get("close"):
            yield {**event, "text": f"real-{at}"}
        elif event["role"] in ("user", "assistant") and not event.get("calls"):
            yield {**event, "text": f"text-{at}"}
        else:
            yield event


TRANSCRIPTS = st.lists(EVENTS, max_size=14).map(lambda events: list(numbered(events)))


def expected(events):
    """For each call, in order: its id, and the real result, the close, or None, that answers it."""
    sites = [
        (at, nth, call["id"]) for at, event in enumerate(events) for nth, call in enumerate(event.get("calls") or [])
    ]
    for site in sites:
        answers = []
        for at, event in enumerate(events):
            if event["role"] == "toolResult" and event["toolCallId"] == site[2] and at > site[0]:
                before = [other for other in sites if other[2] == site[2] and other[0] < at]
                if max(before) == site:
                    answers.append(event)
        real = [answer for answer in answers if not answer.get("close")]
        yield site[2], (real or answers or [None])[0]


def without_calls(events):
    called: set[str] = set()
    for event in events:
        called.update(call["id"] for call in event.get("calls") or [])
        if event["role"] == "toolResult" and event["toolCallId"] not in called:
            yield event["toolCallId"]


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=150, deadline=None)
@given(events=TRANSCRIPTS, grouped=st.booleans(), suspended=st.frozensets(IDS, max_size=1))
def test_any_transcript(dialect, events, grouped, suspended):
    messages = shaped(events, dialect, grouped=grouped)
    before = copy.deepcopy(messages)
    answers = list(expected(events))

    view = request_view(messages, dialect=dialect, suspended=suspended)
    RULES[dialect](view.messages)
    assert messages == before
    assert other_texts(view.messages) == other_texts(messages)
    texts = [text for _, text in result_texts(view.messages, dialect)]
    assert [text for text in texts if text.startswith("real-")] == [
        answer["text"] for _, answer in answers if answer and not answer.get("close")
    ]
    assert len(texts) == len(answers)
    assert len(view.closed) + len(view.suspended) == sum(answer is None for _, answer in answers)
    results = sum(event["role"] == "toolResult" for event in events)
    used = sum(answer is not None for _, answer in answers)
    assert sum(item.reason != "loose_reasoning" for item in view.left_out) == results - used

    orphans = find_orphan_tool_calls(messages, dialect=dialect)
    assert [o.tool_call_id for o in orphans if o.kind is None] == [id_ for id_, answer in answers if answer is None]
    assert [o.tool_call_id for o in orphans if o.kind] == list(without_calls(events))
    assert [o.message_index for o in orphans] == sorted(o.message_index for o in orphans)

    closable = closable_by_append(messages, suspended, dialect=dialect)
    assert not suspended & {orphan.tool_call_id for orphan in closable}
    closes = [interrupted_result_message(c, dialect=dialect) for c in interrupted_results(closable)]
    assert all(is_interrupted_close(message, dialect=dialect) for message in closes)
    reconciled = messages + closes
    assert closable_by_append(reconciled, suspended, dialect=dialect) == []
    RULES[dialect](request_view(reconciled, dialect=dialect).messages)
    left = find_orphan_tool_calls(reconciled, suspended, dialect=dialect)
    assert len(left) == len(find_orphan_tool_calls(messages, suspended, dialect=dialect)) - len(closes)


@settings(max_examples=60, deadline=None)
@given(events=TRANSCRIPTS)
def test_every_dialect_finds_the_same(events):
    def found(dialect):
        return [(o.kind, o.tool_call_id) for o in find_orphan_tool_calls(shaped(events, dialect), dialect=dialect)]

    assert all(found(dialect) == found("neutral") for dialect in DIALECTS)
