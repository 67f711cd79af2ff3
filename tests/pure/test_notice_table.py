"""The table of notices: one line each, and nothing that breaks out of its cell."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natsreceipts import InvalidName, InvalidSetting, Notice, NoticeSpec, NoticeStatus, RunNoticeFact, render_notices


def notice(*, detail=None, consumed=None, **said):
    given_ = {"run": "r", "step": "/n#0", "addressee": "local.planner-1", "at": 0} | said
    spec = NoticeSpec(fact=RunNoticeFact("build", "ok", detail), **given_)
    return Notice("i" * 43, spec, 1, consumed)


def carried_by(by, at=0):
    return NoticeStatus(consumed_at=at, by=by, observed_spec_revision=1)


def test_the_table():
    told = [
        notice(at=1_767_225_600_001, detail={"n": 1.0, "ok": True, "why": "it is late"}),
        notice(step="a step", consumed=carried_by("turn-7", 1_767_225_600_999)),
    ]
    assert render_notices(told).splitlines() == [
        "| at | step | to | decision | outcome | detail | consumed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        '| 2026-01-01T00:00:00.001Z | /n#0 | local.planner-1 | build | ok | n=1 ok=true why="it is late" | no |',
        (
            '| 1970-01-01T00:00:00.000Z | "a step" | local.planner-1 | build | ok |  | '
            "by turn-7 at 2026-01-01T00:00:00.999Z |"
        ),
    ]
    assert render_notices([]).count("\n") == 2
    assert render_notices(iter(told)) == render_notices(told)


def test_instants_beyond_the_calendar():
    assert "9007199254740991 ms" in render_notices([notice(at=2**53 - 1)])


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\x00", "\x7f", "\x85", "\u2028", "\u2029"], ids=ascii)
@pytest.mark.parametrize("where", ["step", "addressee", "by"])
def test_what_breaks_out_is_refused(text, where):
    bad = notice(consumed=carried_by(text)) if where == "by" else notice(**{where: text})
    with pytest.raises(InvalidName) as caught:
        render_notices([notice(), bad])
    assert caught.value.what == where


LIVE = [
    "[click](http://evil)",
    "![x](http://evil/?q=1)",
    "**bold**",
    "_it_",
    "__x",
    "~~gone~~",
    "&#8238;",
    "$x$",
    "http://evil.example",
    "WWW.evil.example",
    "see https://evil.example",
]


@pytest.mark.parametrize("text", LIVE)
def test_what_markdown_would_act_on_is_escaped(text):
    told = notice(step=text, addressee=text, detail={"a": text}, consumed=carried_by(text))
    (row,) = render_notices([told]).splitlines()[2:]
    assert not set("[]*~&$") & set(row)
    assert "://" not in row
    assert not re.search(r"(?i)www\.|\b_|_\b", row)
    cells = row[2:-2].split(" | ")
    assert json.loads(cells[1]) == json.loads(cells[2]) == json.loads(cells[5].removeprefix("a=")) == text


@pytest.mark.parametrize("text", ["/notify:told#0", "acme.run-1.send_email.00ff", "=2042", "a@b.c", "goal/7"])
def test_plain_words_stay_as_they_are(text):
    assert f"| {text} |" in render_notices([notice(step=text)])


@pytest.mark.parametrize("text", ["\u3164", "\u2800", "a\ufe0f", "a\U000e0101", "o" + "\u0301" * 500], ids=ascii)
def test_what_does_not_show_is_escaped(text):
    (row,) = render_notices([notice(step=text)]).splitlines()[2:]
    cell = row.split(" | ")[1]
    assert json.loads(cell) == text
    assert cell.count("\u0301") <= 3
    assert not set("\u3164\u2800\ufe0f\U000e0101") & set(cell)


@pytest.mark.parametrize(
    "bad", [None, 5, notice(), ["x"], [{}], [notice(), None], "x"], ids=lambda bad: ascii(bad)[:20]
)
def test_what_is_no_notice_is_refused(bad):
    with pytest.raises(InvalidSetting, match="notice"):
        render_notices(bad)


HOSTILE = '| forged | `x` <script> \\| " \u202e\U000e0041\ud800'


def test_hostile_texts_stay_in_their_cells():
    table = render_notices(
        [notice(step=HOSTILE, addressee=HOSTILE, detail={"a": HOSTILE}, consumed=carried_by(HOSTILE))]
    )
    (row,) = table.splitlines()[2:]
    assert row.count("|") == 8
    assert row.isprintable()
    assert not set("`<>") & set(row)
    row.encode()
    assert json.loads(row.split(" | ")[1]) == HOSTILE


TEXT = st.text(st.characters(exclude_categories=("Cc", "Zl", "Zp")), max_size=40)


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT, TEXT.map(lambda text: text or "x"), st.dictionaries(st.sampled_from("abc"), TEXT))
def test_any_text_is_one_cell(step, addressee, by, detail):
    table = render_notices([notice(step=step, addressee=addressee, detail=detail, consumed=carried_by(by))])
    assert table.count("\n") == 3
    (row,) = table.splitlines()[2:]
    cells = re.split(r" \| ", row[2:-2])
    assert len(cells) == 7
    for cell, text in ((cells[1], step), (cells[2], addressee)):
        assert (json.loads(cell) if cell.startswith('"') else cell) == text
