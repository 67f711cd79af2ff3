"""Long transcripts cost in proportion to their length. The bounds are wide; `benchmarks/transcript.py` has numbers."""

from __future__ import annotations

import gc
from time import process_time

import pytest
from dialect_shapes import DIALECTS, calls, result, shaped, user

from natsreceipts.transcript import find_orphan_tool_calls, request_view


def transcript(turns, dialect):
    """Ids begin anew in each turn; every tenth has an orphan and every seventh a duplicate."""
    events = []
    for turn in range(turns):
        events += [user(), calls("call_0", "call_1"), result("call_1")]
        events += [result("call_0")] if turn % 10 else []
        events += [result("call_1")] if turn % 7 == 0 else []
    return shaped(events, dialect)


def seconds(work, *args, rounds=3, **kwargs):
    """The best of some rounds, without the garbage collector: what it costs depends on all that the process holds."""
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            start = process_time()
            work(*args, **kwargs)
            best = min(best, process_time() - start)
    finally:
        gc.enable()
    return best


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_hundred_thousand_messages_are_searched_in_no_time(dialect):
    messages = transcript(2_000, dialect)
    messages = (messages * (1 + 100_000 // len(messages)))[:100_000]
    # The process's own time, so that other work on the machine does not count.
    assert seconds(find_orphan_tool_calls, messages, rounds=1, dialect=dialect) < 5


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("work", [find_orphan_tool_calls, request_view])
def test_the_time_grows_with_the_length_and_not_faster(dialect, work):
    short, long = transcript(500, dialect), transcript(4_000, dialect)
    # Eight times the length: quadratic work would take sixty-four times as long, whatever else the machine does.
    assert any(seconds(work, long, dialect=dialect) < 24 * seconds(work, short, dialect=dialect) for _ in range(5))


def test_many_results_in_one_message_are_no_worse():
    ids = [f"call_{n}" for n in range(20_000)]
    messages = shaped([calls(*ids), *map(result, reversed(ids))], "anthropic", grouped=True)
    assert len(messages) == 2
    assert seconds(request_view, messages, rounds=1, dialect="anthropic") < 5
