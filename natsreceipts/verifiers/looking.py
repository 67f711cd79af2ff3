"""What all verifiers share: what they look for, when "not there" counts, and that they may not know."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from natsreceipts.decision import Landed, NotLanded, Unknown, Verdict
from natsreceipts.errors import InvalidSetting, NatsReceiptsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from natsreceipts.identity import ReceiptKey

__all__ = ["Subject", "Undecided", "Verifier", "beside", "check_seconds", "settled", "verdict_of"]

_T = TypeVar("_T")

_LOOKS = 5
"""How often is looked within ``settled_after`` seconds after the first look, so that what arrives is seen soon."""


class Subject(Protocol):
    """What a verifier needs to know of a call: a `natsreceipts.Call`, or one of `natsreceipts.sync`."""

    @property
    def key(self) -> ReceiptKey:
        """The call's names and the hash of its arguments."""
        ...

    @property
    def idempotency_key(self) -> str:
        """64 hex digits that are the same for every attempt."""
        ...


Verifier: TypeAlias = "Callable[[Subject], Coroutine[Any, Any, Verdict]]"
"""For ``verify=`` of a call."""


class Undecided(NatsReceiptsError):
    """Raised by a verifier that cannot tell, and says why. The call stays ambiguous, and AmbiguousCall says it, too."""


async def settled(look: Callable[[], Awaitable[Verdict]], settled_after: float | None, *, where: str) -> Verdict:
    """What ``look`` finds; "not landed" only where every look says so, until ``settled_after`` seconds are over.

    The seconds begin with the first look, which is made after the attempt was judged dead. Raises Undecided where
    nothing is there and absence proves nothing (None).
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    verdict = await look()
    if isinstance(verdict, NotLanded) and settled_after is None:
        raise Undecided(f"{where} has nothing of it, and that proves nothing (settled_after=None)")
    for number in range(1, _LOOKS + 1):
        if not isinstance(verdict, NotLanded) or not settled_after:
            break
        await asyncio.sleep(max(began + settled_after * number / _LOOKS - loop.time(), 0.0))
        verdict = await look()
    return verdict


async def beside(fn: Callable[[], _T]) -> _T:
    """What a blocking function returns, in a thread that nobody waits for: one that hangs holds up no program's end.

    (The threads of `asyncio.to_thread` are joined there.) Raises what it raises.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_T] = loop.create_future()
    context = copy_context()

    def tell(found: list[_T], error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found[0])

    def look() -> None:
        found: list[_T] = []
        error: BaseException | None = None
        try:
            found.append(context.run(fn))
        except StopIteration as stopped:  # a future takes none
            error = RuntimeError(f"StopIteration: {stopped}")
        except BaseException as problem:  # noqa: BLE001 - it is raised where the answer is waited for
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, found, error)

    threading.Thread(target=look, name="natsreceipts.verifiers", daemon=True).start()
    return await answer


def verdict_of(found: object) -> Verdict:
    """What a host's ``read`` made of something that is there: a verdict of its own, or the call's result."""
    return found if isinstance(found, Landed | NotLanded | Unknown) else Landed(found)


def check_seconds(name: str, value: object, *, zero: bool = True) -> None:
    """Raise InvalidSetting for anything but a finite number of seconds of 0 or more (more than 0)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidSetting(f"{name}={value!r}: use a finite number of seconds")
    if value < 0 or (not zero and value == 0):
        raise InvalidSetting(f"{name}={value!r}: use {'at least' if zero else 'more than'} 0 seconds")
