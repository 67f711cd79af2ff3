"""Which of several equal calls in one turn of a model a call is: number 1, 2, … Pure.

Two equal calls that a model makes in one turn are meant to be two, and a turn that is started again makes the same
two. Tool-call ids cannot tell them apart, since a retried turn mints new ones. So they are numbered, by what the turn
shows: a call takes the lowest number of its kind (the same tool, equal arguments) that no equal call of the same
message has, and that no earlier call of the turn has brought to a result. A call that failed, or of which the model was
told that nobody knows, has given its number back: an equal call after it is that call again, and not another one.

A number that is too low replays, or is refused; one that is too high does things twice. So what is not certain to be a
tool's own result does not count as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from natsreceipts.errors import NotCanonical
from natsreceipts.identity import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from natsreceipts.dialects.base import Dialect, Message

__all__ = ["Came", "Made", "NumberedCalls", "Step", "call_number", "distinct_of", "turn_of"]


class Made(NamedTuple):
    """A call that a message makes: its id in the transcript, its tool, and the arguments that identify it."""

    call_id: str | None
    tool: str
    args: object


class Came(NamedTuple):
    """A result of the tool's own came for the latest call of this id."""

    call_id: str


Step: TypeAlias = "Sequence[Made] | Came"
"""A step of a turn: the calls of one message, or a result."""


def call_number(turn: Iterable[Step], tool: str, args: object, call_id: str | None = None) -> int:
    """Return the number of the call ``call_id`` of ``tool`` among its equals in a turn.

    ``turn``: what followed the user's last message, in order, up to the message that makes this call or beyond. Where
    that does not show the call (or it has no id), it is counted as one that comes next. Raises NotCanonical for its
    arguments.
    """
    wanted = canonical_json(args)
    came: set[int] = set()
    numbers: dict[str, int] = {}
    for step in turn:
        if isinstance(step, Came):
            if step.call_id in numbers:
                came.add(numbers[step.call_id])
            continue
        taken = set(came)
        for call in step:
            if call.call_id is not None:
                numbers.pop(call.call_id, None)  # an id that is used again is another call
            if call.tool == tool and _same(call.args, wanted):
                number = _lowest(taken)
                taken.add(number)
                if call.call_id is not None:
                    numbers[call.call_id] = number
    found = numbers.get(call_id) if call_id is not None else None
    return _lowest(came) if found is None else found


def turn_of(messages: Sequence[Message], index: int, dialect: Dialect) -> list[Step]:
    """Return the steps of the turn that the message at ``index`` belongs to, up to the calls made with it.

    A result that is marked as failed does not count as one, nor does any in a dialect that has no such mark. Raises
    what the dialect raises for a message that is not its own.
    """
    first = index
    while first > 0 and not dialect.begins_turn(messages[first - 1], messages[first - 2] if first > 1 else None):
        first -= 1
    steps: list[Step] = []
    calls: list[Made] = []
    for at in range(first, len(messages)):
        view = dialect.view(messages[at])
        if at > index and not view.calls:
            break
        if view.calls:  # where each call is a message of its own, those that stand together are one message's
            if not calls:
                steps.append(calls)
            calls += [Made(call.id, call.name, call.arguments) for call in view.calls]
            continue
        calls = []
        if dialect.marks_errors:
            steps += [Came(each.id) for each in view.results if each.error_kind is None and not each.is_error]
    return steps


class NumberedCalls:
    """How a tool's calls are keyed where equal ones in a turn are numbered: for ``guarded=`` of a wake.

    ``args_of`` gives the arguments that identify a call, from those of the model: by default they are the same.
    """

    def __init__(self, args_of: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self._args_of = args_of

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Return the arguments that identify a call."""
        return arguments if self._args_of is None else self._args_of(arguments)


def distinct_of(number: int) -> str | None:
    """Return what sets the call of this number apart, as ``distinct=`` of a call: nothing for the first."""
    return None if number == 1 else f"call {number}"


def _lowest(taken: set[int]) -> int:
    number = 1
    while number in taken:
        number += 1
    return number


def _same(args: object, wanted: str) -> bool:
    try:
        return canonical_json(args) == wanted
    except NotCanonical:
        return False
