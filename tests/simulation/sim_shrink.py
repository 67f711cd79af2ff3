"""Makes a failing schedule smaller, as long as it still fails: fewer actors, events, faults and oddities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_world import carry_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim_plan import Plan
    from sim_world import Report

__all__ = ["printed", "shrunk"]

_PLAIN = {
    "rate": 0.0,
    "body_rate": 0.0,
    "replicas": 1,
    "history": 8,
    "inline_limit": 256 * 1024,
    "silent_hints": False,
    "keys": 1,
    "retention": 0.0,
}


def shrunk(plan: Plan, *, most: int = 600) -> Plan:
    """A smaller plan that fails, too (perhaps in another way)."""
    report = carry_out(plan)
    tries = 0
    better = True
    while better and tries < most:
        better = False
        for smaller in _smaller(plan, report):
            tries += 1
            found = carry_out(smaller)
            if found.problem is not None:
                plan, report, better = smaller, found, True
                break
            if tries >= most:
                break
    return plan


def _smaller(plan: Plan, report: Report) -> Iterator[Plan]:
    for i in range(len(plan.actors) if len(plan.actors) > 1 else 0):
        yield plan.but(actors=plan.actors[:i] + plan.actors[i + 1 :])
    for i in range(len(plan.events)):
        yield plan.but(events=plan.events[:i] + plan.events[i + 1 :])
    for name, plain in _PLAIN.items():
        if getattr(plan, name) != plain:
            yield plan.but(**{name: plain})
    # Halves first: most faults have nothing to do with it.
    fired = list(dict.fromkeys(report.faults))
    size = len(fired)
    while size:
        for start in range(0, len(fired), size):
            yield plan.but(calm=plan.calm | set(fired[start : start + size]))
        size //= 2
    for i, actor in enumerate(plan.actors):
        for name in [name for name in actor.how if name in _OPTIONAL]:
            plainer = actor._replace(how={key: value for key, value in actor.how.items() if key != name})
            yield plan.but(actors=(*plan.actors[:i], plainer, *plan.actors[i + 1 :]))
        if actor.how.get("times", 1) > 1:
            once = actor._replace(how={**actor.how, "times": actor.how["times"] - 1})
            yield plan.but(actors=(*plan.actors[:i], once, *plan.actors[i + 1 :]))


_OPTIONAL = ("timeout", "verify", "on_lost", "twice", "entered", "branches", "compacts", "suspends", "stalls", "leaves")


def printed(plan: Plan) -> str:
    """The plan, what happened in it, numbered and with virtual times, and what is wrong."""
    report = carry_out(plan, tracing=True)
    lines = "\n".join(f"{number:4}. {event}" for number, event in enumerate(report.events, 1))
    return f"{plan}\n{lines}\n{report.problem}"
