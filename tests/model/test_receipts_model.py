"""The receipts protocol, searched: no schedule of workers, people, wakers, crashes and lost messages breaks a promise.

The small worlds are searched to the end, the large ones by random walks (``MODEL_SEED`` and ``MODEL_SECONDS`` in the
environment choose which and for how long). That the search would find a mistake is shown by putting known ones in.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import pytest
from model_search import search, walk
from receipts_model import Model, Spec, World

SAME = ("idempotent",)
SEED = int(os.environ.get("MODEL_SEED") or secrets.randbelow(1_000_000))
SECONDS = float(os.environ.get("MODEL_SECONDS") or 1.5)


def worker(name: str = "W1", **kwargs: Any) -> Spec:
    return Spec(name, **kwargs)


def person(name: str = "P", **kwargs: Any) -> Spec:
    return Spec(name, kind="person", **kwargs)


def waker(name: str = "K", **kwargs: Any) -> Spec:
    return Spec(name, kind="waker", **{"entry": 2, **kwargs})


NO_SKIP = ("ok", "error")
SMALL: dict[str, Model] = {
    "two workers, one crashes": Model(worker(), worker("W2"), crashes=1, stale=True),
    "a worker that starts again, and another": Model(worker(times=2, renewals=0), worker("W2", renewals=0), crashes=1),
    "a worker that gives up and is cancelled": Model(
        worker(times=3, gives_up=True, cancels=True), crashes=1, drops=1, stale=True
    ),
    "a worker that gives up beside another": Model(
        worker(times=2, gives_up=True, renewals=0), worker("W2", sends=1, renewals=0), drops=1
    ),
    "a worker and a person": Model(worker(times=2), person(), crashes=1),
    "a worker and a person who does not wait": Model(worker(times=2, sends=1), person(even_if_running=True, times=2)),
    "two workers and a person": Model(
        worker(sends=1, endings=NO_SKIP, renewals=0), worker("W2", sends=1, endings=NO_SKIP), person()
    ),
    "a worker with a verifier": Model(worker(sends=1, renewals=0), worker("W2", verifies=True, renewals=0, claims=2)),
    "a thread that goes on, and a person": Model(
        worker(thread=True, beats=1, endings=NO_SKIP), person(times=2), stale=True
    ),
    "a thread that goes on, and a person who is mistaken": Model(
        worker(thread=True, beats=1), person(mistaken=True), drops=1
    ),
    "a mistaken person, and a wake": Model(
        worker(entry=1, thread=True, endings=NO_SKIP, sends=1), person(mistaken=True, sends=1), waker(sends=1)
    ),
    "two idempotent workers": Model(
        worker(effects=SAME, claims=2, sends=1), worker("W2", effects=SAME, claims=2, sends=1)
    ),
    "two idempotent workers, one starts again": Model(
        worker(effects=SAME, claims=2, sends=1, renewals=0, times=2),
        worker("W2", effects=SAME, sends=1, claims=1, renewals=0),
        crashes=1,
    ),
    "an effect that became opaque": Model(
        worker(effects=SAME, sends=1, claims=1, endings=NO_SKIP),
        worker("W2", effects=("idempotent", "opaque"), times=2, sends=1, gives_up=True, endings=NO_SKIP, claims=2),
    ),
    "a stalled worker, a wake, and the call made anew": Model(
        worker(entry=1), worker("W2", entry=3, after_wake=True), waker(), crashes=1, stale=True
    ),
    "two sessions and a wake": Model(
        worker(entry=1, sends=1, renewals=0), worker("W2", entry=1, session="t", sends=1, renewals=0), waker()
    ),
    "two wakes of a session": Model(
        worker(entry=1, sends=1, endings=("ok", "notApplied")), waker(), waker("L", entry=3), stale=True
    ),
    "idempotent workers and a wake": Model(
        worker(entry=1, sends=1, effects=SAME, renewals=0, claims=1),
        worker("W2", entry=1, effects=SAME, sends=1, renewals=0, claims=2),
        waker(effects=SAME, sends=1),
    ),
    "workers after an error was told, and a wake": Model(
        worker(entry=1, endings=("notApplied",), sends=1, renewals=0, cancels=True),
        worker("W2", entry=1, endings=("ok",), sends=1, renewals=0),
        worker("W3", entry=3, after_wake=True, endings=("ok",), sends=1, renewals=0),
        waker(sends=1),
    ),
    "an effect that became opaque for the waker": Model(
        worker(entry=1, effects=SAME, endings=("ok", "error"), renewals=0, claims=2, times=2), waker(), crashes=1
    ),
    "a worker that names no entry, and a wake": Model(worker(times=2), waker(), crashes=1, stale=True),
}

BIG: dict[str, Model] = {
    "opaque": Model(
        worker(times=3, gives_up=True, cancels=True, beats=1, renewals=2),
        worker("W2", times=2, reads_first=True, thread=True),
        worker("W3", times=2, verifies=True),
        person(times=2, even_if_running=True),
        crashes=2,
        drops=1,
        stale=True,
    ),
    "mixed effects": Model(
        worker(times=3, effects=("idempotent", "opaque", "idempotent"), gives_up=True, beats=1),
        worker("W2", times=2, effects=SAME, cancels=True, renewals=2),
        worker("W3", times=2, effects=("idempotent", "opaque")),
        person(times=2),
        crashes=2,
        drops=1,
        stale=True,
    ),
    "two sessions": Model(
        worker(entry=1, times=2, gives_up=True),
        worker("W2", entry=3, times=2, after_wake=True, cancels=True),
        worker("W3", entry=1, session="t", times=2),
        waker(),
        waker("L", session="t"),
        waker("M", entry=4),
        person(),
        crashes=2,
        drops=1,
        stale=True,
    ),
    "mistaken people": Model(
        worker(entry=1, times=2, thread=True, beats=1, gives_up=True),
        worker("W2", entry=3, times=2, verifies=True, mistaken=True),
        person(times=3, mistaken=True, even_if_running=True),
        waker(),
        crashes=2,
        drops=1,
        stale=True,
    ),
}

MUTANTS: dict[str, Model] = {
    "settle compares the token": Model(worker(endings=("ok",)), worker("W2")),
    "settle reads the newest": Model(worker(endings=("notApplied",)), worker("W2")),
    "any later revision": Model(worker(endings=("notApplied",)), worker("W2"), drops=1),
    "conflict means lost": Model(worker(endings=("error",))),
    "resolve on a fresh read": Model(worker(endings=("error",)), person()),
    "late entry": Model(worker(endings=("ok",)), person()),
    "one look": Model(worker(endings=("ok",)), person()),
    "claim drops open": Model(
        worker(effects=SAME, endings=("error",)), worker("W2", effects=SAME, endings=("notApplied",))
    ),
    "not applied while open": Model(
        worker(effects=SAME, endings=("error",)), worker("W2", effects=SAME, endings=("notApplied",))
    ),
    "claim drops fences": Model(worker(entry=1), worker("W2", session="t", entry=1), waker()),
    "rebase drops fences": Model(
        worker(entry=1, thread=True, endings=("error",), sends=1), person(mistaken=True, sends=1), waker(sends=1)
    ),
    "fence forgets other sessions": Model(worker(entry=1), waker(), waker("L", session="t")),
    "wake without a fence": Model(worker(entry=1), waker()),
    "a fence goes down": Model(worker(entry=1, endings=("ok",)), waker(entry=3), waker("L", entry=2)),
    "an error is told without a fence": Model(
        worker(entry=1, endings=("notApplied",)), worker("W2", entry=1, endings=("ok",)), waker()
    ),
    "claims that name no entry pass": Model(worker(endings=("ok",)), waker()),
    "a wake writes what it guesses": Model(worker(entry=1, effects=SAME, endings=("ok",)), waker()),
    "creates over tombstones": Model(worker(endings=("ok",)), worker("W2"), Spec("E", kind="eraser")),
    "judge without compare-and-set": Model(worker(endings=("ok",)), worker("W2", endings=("ok",))),
    "message ids": Model(worker(endings=("ok",)), worker("W2", endings=("ok",))),
    "enters a claim given up": Model(worker(endings=("ok",), times=3, gives_up=True)),
    "given up over open": Model(
        worker(effects=SAME, endings=("error",)),
        worker("W2", effects=("idempotent", "opaque"), times=2, gives_up=True),
    ),
    "takes back what became opaque": Model(
        worker(effects=("idempotent", "opaque"), endings=("error",), times=2, sends=1),
        worker("W2", effects=SAME, endings=("ok",), sends=1),
    ),
}


LONG = {
    "a worker and a person",
    "a worker that gives up beside another",
    "two workers and a person",
    "a thread that goes on, and a person",
    "a thread that goes on, and a person who is mistaken",
}
"""Worlds that take 3 to 10 seconds each to search to the end."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.faults) if name in LONG else name for name in SMALL]
)
def test_no_schedule_of_a_small_world_breaks_a_promise(name: str) -> None:
    found = search(SMALL[name])
    print(f"{name}: {found}")
    assert found.problem is None, str(found)
    assert "completed" in found.seen


@pytest.mark.parametrize("name", BIG)
def test_no_random_walk_of_a_big_world_breaks_a_promise(name: str) -> None:
    found = walk(BIG[name], seed=SEED, seconds=SECONDS)
    print(f"{name}, MODEL_SEED={SEED}: {found}")
    assert found.problem is None, f"MODEL_SEED={SEED}: {found}"
    assert "completed" in found.seen


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_mistake_is_found(name: str) -> None:
    model = MUTANTS[name]
    model.mutant = name
    found = search(model)
    print(f"{name}: {found}")
    assert found.problem is not None


@pytest.mark.parametrize("name", ["worker and person", "twins", "wake"])
def test_worlds_that_count_as_the_same_lead_to_the_same_worlds(name: str) -> None:
    model = {
        "worker and person": Model(worker(), person(), crashes=1),
        "twins": Model(worker(sends=1, renewals=0), worker("W2", sends=1, renewals=0), crashes=1),
        "wake": Model(worker(entry=1, sends=1, renewals=0), waker()),
    }[name]
    every = {model.start}
    new = [model.start]
    while new:
        new = [after for world in new for after in _next(model, world) if after not in every and not every.add(after)]
    assert len({model.key(world) for world in every}) == search(model).states


def _next(model: Model, world: World) -> list[World]:
    return [after for _, after, _ in model.steps(world)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "opaque",
            [
                "replays",
                "still its own, settles again",
                "settle in doubt, finds it",
                "gives the claim up",
                "finishes the settle that it kept",
                "says that it is ambiguous",
                "asks the verifier",
                "its thread ends",
                "stale, drops it",
                "is cancelled before it enters",
                "the history dropped",
            ],
        ),
        ("two sessions", ["withdrawn", "tells the model that it never started", "writes its fence"]),
        ("mixed effects", ["judges it on revision", "claims attempt"]),
    ],
)
def test_the_walks_come_by_what_matters(name: str, wanted: list[str]) -> None:
    kinds = walk(BIG[name], seed=7, walks=150).kinds
    assert [text for text in wanted if not any(text in kind for kind in kinds)] == []
