"""Single schedules, written by hand: each once broke a promise."""

from __future__ import annotations

from sim_plan import ActorPlan, Event, Plan
from sim_shrink import printed
from sim_world import carry_out

_AGENT = {
    "session": "s1",
    "effects": ["opaque"],
    "turns": 1,
    "calls": [0],
    "reuses": False,
    "wakes": False,
    "wait": 5.0,
    "door": "execute",
    "pause": 0.1,
}
_WAKER = {"session": "s1", "effects": ["opaque"], "times": 1, "declared": True, "pause": 0.1}


def test_a_wake_that_is_frozen_while_a_receipt_expires():
    """It asked what time it is before it was frozen, and looks at the receipt, which has expired, after that."""
    for op in range(1, 8):
        for phase in ("sent", "after"):
            plan = Plan(
                seed=1,
                actors=(ActorPlan("a1", "agent", 0.0, _AGENT), ActorPlan("k1", "waker", 50.0, _WAKER)),
                events=(
                    Event("crash", "a1", op=7, phase="before"),
                    Event("pause", "k1", op=op, phase=phase, length=15.0),
                ),
                retention=60.0,
                lease=6.0,
            )
            report = carry_out(plan)
            assert report.entered >= 1
            assert report.problem is None, printed(plan)


def test_a_completion_that_was_purged_and_settled_anew_is_not_told_as_lost():
    """Its own answer was lost, and what would have told is gone: nobody can know whether it stood."""
    how = {"effects": ["opaque"], "key": 0, "times": 1, "door": "execute", "wait": 5.0}
    for seed in range(40):
        plan = Plan(
            seed=seed,
            actors=(
                ActorPlan("w1", "worker", 0.4, how),
                ActorPlan("p1", "resolver", 3.0, {"key": 0, "times": 2, "running": False}),
            ),
            events=(
                Event("cut", "w1", op=2, phase="sent", length=0.1),
                Event("pause", "w1", op=3, phase="sent", length=9.0),
                Event("purge", "key 0", at=2.0),
            ),
            lease=30.0,
        )
        report = carry_out(plan, tracing=True)
        assert report.problem is None, printed(plan)


def test_a_deposed_leader_that_refuses_a_settle_does_not_hold_it_up():
    """It answers 10071 to a write that expects what it has not heard of, until it hears of the new leader."""
    how = {"effects": ["opaque"], "key": 0, "times": 1, "door": "execute", "wait": 5.0, "entered": True}
    refused = 0  # (the prefetch is request 1, the claim 2; requests of odd numbers go to the deposed server)
    for seed in range(60):
        plan = Plan(
            seed=seed,
            actors=(ActorPlan("w1", "worker", 1.5, how),),
            events=(Event("elect", "receipts", at=0.5, length=0.5),),
            replicas=3,
        )
        report = carry_out(plan, tracing=True)
        assert report.problem is None, printed(plan)
        [told] = [line for line in report.events if "w1: gets" in line]
        assert "gets dict" in told, printed(plan)
        assert float(told.split()[0]) < 30, printed(plan)
        settles = [line.split("#")[1].split(":")[0] for line in report.events if "w1 #" in line and "completed" in line]
        refused += any(f"deposed server: w1 #{number} " in line for line in report.events for number in settles)
    assert refused
