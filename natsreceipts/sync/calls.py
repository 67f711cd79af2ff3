"""Guarded calls whose body runs in the caller's thread.

The guard is the one of `natsreceipts.guard`, on the toolkit's loop, where a coroutine holds each call open and waits
for its body, as it does for the thread of a sync `natsreceipts.tool`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from natsreceipts.errors import InvalidSetting, NotApplied, NotRecorded, ResultNotSet
from natsreceipts.options import takes_argument
from natsreceipts.sync.portal import Errand, current_errand, in_caller, passable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from natsreceipts import guard
    from natsreceipts.decision import Verdict
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.sync.portal import Portal

__all__ = ["Call", "OpenCalls", "call_options", "check_sync", "made"]

_T = TypeVar("_T")

_ENTERED: Final = object()
_UNSET: Final[Any] = object()


class OpenCalls:
    """The calls whose bodies run, in any thread: a toolkit that is closed over them says so in their receipts."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()

    def add(self, call: Call) -> None:
        """A call was entered."""
        self._calls.add(call)

    def drop(self, call: Call) -> None:
        """A call was left."""
        self._calls.discard(call)

    async def end(self) -> None:
        """Write down that nobody will know what the bodies come to, and wait for that."""
        tasks = {task for call in set(self._calls) if (task := call.given_up()) is not None}
        if tasks:
            await asyncio.wait(tasks)


class Call:
    """One guarded call, as a context manager around its body, which runs in the thread that enters it.

    As `natsreceipts.Call`, with one difference: nothing can stop a thread. Where the call is lost while its body
    runs, ``lost`` becomes true, `renew` and `step` raise LeaseLost, and so does leaving the body, with its result;
    after ``timeout`` seconds the receipt is settled as that of a body that hangs, and leaving it raises CallTimedOut.
    """

    __slots__ = ("_body", "_closed", "_entered", "_errand", "_inner", "_open", "_portal", "_thread", "_told", "_value")

    def __init__(self, portal: Portal, open_calls: OpenCalls, inner: guard.Call) -> None:
        self._portal = portal
        self._open = open_calls
        self._inner = inner
        self._errand: Errand[None] | None = None
        self._body: asyncio.Future[Any] | None = None
        self._entered = False
        self._closed = False
        self._thread = 0
        self._told: BaseException | None = None
        self._value: Any = _UNSET

    # ------------------------------------------------------------------ what a body sees

    @property
    def key(self) -> ReceiptKey:
        """The ReceiptKey of the call."""
        return self._inner.key

    @property
    def idempotency_key(self) -> str:
        """64 hex digits that are the same for every attempt of this call, for a provider that takes such a key."""
        return self._inner.idempotency_key

    @property
    def attempt(self) -> int:
        """The number of this attempt (1, 2, …), or of the one whose result is replayed."""
        return self._inner.attempt

    @property
    def revision(self) -> int:
        """The revision of the receipt as this call last wrote or read it; 0 for a ``read``."""
        return self._inner.revision

    @property
    def replayed(self) -> bool:
        """Whether the result is a recorded one and nothing is to be executed."""
        return self._inner.replayed

    @property
    def lost(self) -> bool:
        """Whether this attempt has lost the call while its body runs: whatever it does now comes too late."""
        return self._inner.lost

    @property
    def result(self) -> Any:
        """The call's result: set it in the body. After the body it is the value as a replay would give it."""
        return self._inner.result

    @result.setter
    def result(self, value: object) -> None:
        self._inner.result = value
        self._value = value

    def renew(self) -> None:
        """Renew the lease now, to be sure just before the point of no return. Raises LeaseLost: do not go on."""
        self._portal.run(self._inner.renew)

    def step(self, name: str, fn: Callable[[], _T]) -> _T:
        """Execute one step of a resumable effect in this thread, or return its recorded output.

        Raises as `natsreceipts.Call.step`, and InvalidSetting for a function that is async.
        """
        check_sync(fn)
        return self._portal.run(self._inner.step, name, lambda: in_caller(lambda: made(fn())))

    # ------------------------------------------------------------------ entering and leaving

    def __enter__(self) -> Self:
        if self._errand is not None:
            raise InvalidSetting("a call is entered once: make a new one with run.call(...)")
        errand = Errand(self._portal, self._held_open, owner=self)
        try:
            self._errand, self._thread = errand, threading.get_ident()
            errand.start()
            if errand.heard() is None:
                errand.result()
            errand.bring_back()
        except BaseException:
            if not errand.sent:
                self._errand = None
                raise
            # A Ctrl-C, also one while it was started, or what entering raised (then this changes nothing).
            if not self._portal.soon(self._never_begin) or self._portal.is_here:
                raise
            errand.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        errand = self._errand
        if errand is None:
            raise InvalidSetting("this call was not entered")
        if self._portal.forked:
            if error is None:
                self._portal.check()
            return False  # the call is the other process's, which is in its body, too
        self._told = passable(error) if error is not None else None
        try:
            on_its_way = self._portal.soon(lambda: self._left(self._told))
        except BaseException:
            # A Ctrl-C just now: the body has ended all the same, and what it came to is written down first.
            if self._portal.soon(lambda: self._left(self._told)) and not self._portal.is_here:
                errand.cancel()
                errand.wait()
            raise
        if self._portal.is_here:
            return False  # a generator that the garbage collector closed: nothing may wait here
        if not on_its_way or self._closed:
            errand.wait()
            return self._closed_over(error)
        try:
            errand.result(elsewhere=self._thread != threading.get_ident())
        except BaseException as problem:
            if error is not None and problem in (error, self._told):
                error.__traceback__ = traceback
                return False
            if self._closed:
                return self._closed_over(error)
            raise
        return error is not None and self.replayed

    def _closed_over(self, error: BaseException | None) -> bool:
        """The toolkit was closed while the body ran, so nothing was recorded of how it ended."""
        if error is not None or self.replayed:
            return False
        raise NotRecorded(
            self.key,
            "the toolkit was closed while the body ran",
            result=None if self._value is _UNSET else self._value,
            has_result=self._value is not _UNSET,
        )

    # ------------------------------------------------------------------ on the loop

    async def _held_open(self) -> None:
        """Hold the call open for as long as its body runs, and settle it with what that came to."""
        self._body = asyncio.get_running_loop().create_future()
        self._body.add_done_callback(_looked_at)
        async with self._inner as call:
            self._entered = True
            self._open.add(self)
            current_errand().say(_ENTERED)
            if call.replayed:
                await self._body
            else:
                await call.beside(self._body, whole=True)

    def _left(self, error: BaseException | None) -> None:
        """The body has ended."""
        self._open.drop(self)
        body = self._body
        if body is None or body.done():
            return
        if error is None and self._value is _UNSET and self._errand is not None and self._errand.ended:
            body.set_exception(ResultNotSet(self.key, status="ambiguous"))
        elif error is None:
            body.set_result(self._value)
        else:
            body.set_exception(error)

    def _never_begin(self) -> None:
        """The caller does not go on: its body was not entered, and never will be."""
        if self._entered:
            self._left(NotApplied("interrupted before the body was entered"))
        elif self._errand is not None and not self._errand.skip() and self._errand.task is not None:
            self._errand.task.cancel()

    def given_up(self) -> asyncio.Task[None] | None:
        """The toolkit is being closed while the body runs; returns what is to be waited for."""
        self._closed = True
        self._left(asyncio.CancelledError("the toolkit was closed while the body ran"))
        return self._errand.task if self._errand is not None else None


def _looked_at(body: asyncio.Future[Any]) -> None:
    if not body.cancelled():
        body.exception()


def check_sync(fn: Callable[..., object]) -> None:
    """Raise InvalidSetting for an async function."""
    if inspect.iscoroutinefunction(fn):
        raise InvalidSetting(f"{fn!r} is async: pass a function that is not, or use natsreceipts.connect")


def made(value: _T) -> _T:
    """What a function returned, which is not to be awaited. Raises NotApplied for a coroutine: it has not begun."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
            raise NotApplied("the function returned a coroutine, which nobody here can await; it was not begun")
        raise InvalidSetting("the function returned something to be awaited, which nobody here can")
    return value


class _Verifier:
    """A verifier, async or not; what is not runs in the thread that waits to enter the call."""

    def __init__(self, verify: Callable[..., Any]) -> None:
        self._verify = verify
        self._wants_call = takes_argument(verify)
        # Who settled the call is on record by this name.
        self.__qualname__ = getattr(verify, "__qualname__", type(verify).__name__)

    async def __call__(self, call: guard.Call) -> Verdict:
        owner = current_errand().owner
        answer = await in_caller(lambda: self._verify(owner) if self._wants_call else self._verify())
        return await answer if inspect.isawaitable(answer) else answer


def call_options(given: dict[str, Any]) -> dict[str, Any]:
    """Options of calls as the guard takes them. Raises InvalidSetting."""
    if given.get("on_lost", "continue") != "continue":
        raise InvalidSetting(
            f"on_lost={given['on_lost']!r}: a thread cannot be cancelled; look at call.lost in its body, or renew it"
        )
    if (verify := given.get("verify")) is None:
        return given
    return {**given, "verify": _Verifier(cast("Callable[..., Any]", verify))}
