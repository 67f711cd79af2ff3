"""An event loop in a thread of its own, and the threads that wait for what is done on it."""

from __future__ import annotations

import asyncio
import os
import threading
from contextvars import Context, ContextVar, copy_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, cast

from natsreceipts.errors import InvalidSetting, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

__all__ = ["Errand", "Portal", "current_errand", "in_caller", "passable"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_ENDED: Final = object()


class Portal:
    """The loop of one toolkit. Any thread may run coroutines on it, except where an event loop runs already."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Re-entrant: a signal's handler, or a finalizer, may come and hand something over while its thread does.
        self._lock = threading.RLock()
        self._closed = False
        self._stop = asyncio.Event()
        # Made here and not in the thread, so that work can be handed to it before it runs.
        self._loop = asyncio.new_event_loop()
        # A daemon: a script that ends without closing is closed by `atexit`, which comes after other threads are
        # joined. What the loop itself waits for at its end is bounded.
        self._thread = threading.Thread(target=self._main, name="natsreceipts.sync", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stop.wait()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that the loop runs in."""
        return os.getpid() != self._pid

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the loop's own (as a finalizer may find itself in any thread)."""
        return threading.get_ident() == self._thread.ident

    def check(self) -> None:
        """Raise InvalidSetting where the calling thread cannot wait for this loop."""
        if self.forked:
            raise InvalidSetting(
                f"this toolkit was opened in process {self._pid}, and this is a fork of it ({os.getpid()}), which has "
                f"no part in its connection: connect again here"
            )
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise InvalidSetting(
            "an event loop runs in this thread, and a call of natsreceipts.sync would stop it: use "
            "natsreceipts.connect there, or call from another thread (asyncio.to_thread)"
        )

    def soon(self, fn: Callable[[], object]) -> bool:
        """Have ``fn`` called on the loop, in order. False: the loop has ended, and it never will be."""
        if self.forked:
            return False  # before the lock, which a thread may have held that the fork has not
        with self._lock:
            if self._closed:
                return False
            self._loop.call_soon_threadsafe(fn)
            return True

    def run(self, fn: Callable[_P, Coroutine[Any, Any, _T]], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a coroutine function on the loop, and wait for what it comes to. Raises InvalidSetting as `check`."""
        errand = Errand(self, lambda: fn(*args, **kwargs))
        try:
            errand.start()
            return errand.result()
        except BaseException:
            errand.abandon()  # a Ctrl-C outside of `result`'s waiting; else this changes nothing
            raise

    def iterate(self, found: AsyncIterator[_T]) -> Iterator[_T]:
        """The items of an async generator. Closed early, also by the garbage collector, it is closed too."""
        nothing: Any = object()

        async def following() -> Any:
            return await anext(found, nothing)

        try:
            while (item := self.run(following)) is not nothing:
                yield item
        finally:
            close: Callable[[], Coroutine[Any, Any, None]] = cast("Any", found).aclose
            errand = Errand(self, close)
            if self.soon(errand.begin) and not self.is_here:
                errand.result()

    def close(self) -> None:
        """End the loop, and whatever is still under way on it; the threads that wait for that are told Unreachable."""
        if self.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class Errand(Generic[_T]):
    """One coroutine on the loop, and the thread that waits for it and meanwhile does what the coroutine asks of it.

    It runs in a copy of the caller's context, and what it changes there is brought back to the caller: an ambient
    run, the calls around, the entry of a session.
    """

    def __init__(self, portal: Portal, make: Callable[[], Coroutine[Any, Any, _T]], *, owner: object = None) -> None:
        self.owner = owner
        """What it is run for."""
        self._portal = portal
        self._make = make
        self._before: Context = copy_context()
        self._context: Context = copy_context()
        self._context.run(_errand.set, self)
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._task: asyncio.Task[None] | None = None
        self._sent = False
        self._cancelled = False
        self._ended = False
        self._outcome: _T | None = None
        self._error: BaseException | None = None
        self._cut_off = False

    # ------------------------------------------------------------------ on the loop

    def begin(self) -> None:
        """Start the coroutine."""
        self._task = asyncio.get_running_loop().create_task(self._work(), context=self._context)
        self._task.add_done_callback(self._end)

    async def _work(self) -> None:
        try:
            self._outcome = await self._make()
        except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt of the caller's body must not end the loop
            self._error = error

    def _end(self, task: asyncio.Task[None]) -> None:
        self._cut_off = task.cancelled() or isinstance(self._error, asyncio.CancelledError)
        self._context.run(_errand.set, None)
        self._ended = True
        self._inbox.put(_ENDED)

    def skip(self) -> bool:
        """End it where it has not begun, and now never will; whether that is so."""
        if self._task is not None:
            return False
        self._ended = True
        self._inbox.put(_ENDED)
        return True

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The coroutine's task, once it has begun."""
        return self._task

    @property
    def ended(self) -> bool:
        """Whether the coroutine has ended."""
        return self._ended

    def say(self, something: object) -> None:
        """Let `heard` return it in the caller's thread."""
        self._inbox.put(something)

    async def ask(self, fn: Callable[[], _T]) -> _T:
        """Run ``fn`` in the thread that waits, in the context of the coroutine that asks."""
        asked = _Asked(fn, copy_context(), asyncio.get_running_loop().create_future(), self._portal)
        self._inbox.put(asked)
        return cast("_T", await asked.answer)

    # ------------------------------------------------------------------ in the caller's thread

    def start(self) -> None:
        """Start it. Raises InvalidSetting as `Portal.check`, and Unreachable where the toolkit is closed."""
        self._portal.check()
        self._sent = True  # before it is, since a Ctrl-C may come in between
        if not self._portal.soon(self.begin):
            self._sent = False
            raise Unreachable("this toolkit is closed: nothing was done")

    @property
    def sent(self) -> bool:
        """Whether it was started, or a Ctrl-C came just then: `skip` tells, on the loop."""
        return self._sent

    def heard(self) -> object:
        """What the coroutine says next; None once it has ended. (A Ctrl-C is the caller's to look after.)"""
        while not self._ended:
            item = self._inbox.get()
            if item is _ENDED:
                break
            if not isinstance(item, _Asked):
                return item
            item.give(wanted=True)
        return None

    def cancel(self) -> None:
        """Cancel the coroutine, soon."""
        self._cancelled = True
        self._portal.soon(lambda: self._task is None or self._task.cancel())

    def abandon(self) -> None:
        """Cancel the coroutine, soon, unless it has ended or was cancelled; the caller does not wait for it."""
        if self._sent and not self._ended and not self._cancelled:
            self.cancel()

    def result(self, *, elsewhere: bool = False) -> _T:
        """Wait for its end, and return or raise what it came to.

        A Ctrl-C (or another exception of a signal handler's) cancels it, and is raised when it has ended: a call that
        is cut off is written down first, for some seconds at most. A second one is raised at once, and the rest is
        done behind it. ``elsewhere``: not in the thread that it was begun for, so that nothing is brought back.
        """
        interrupted: BaseException | None = None
        while not self._ended:
            try:
                item = self._inbox.get()
                if isinstance(item, _Asked):
                    item.give(wanted=interrupted is None)
            except BaseException as error:
                if interrupted is not None:
                    raise
                interrupted = error
                self.cancel()
        if not elsewhere:
            self.bring_back()
        if interrupted is not None:
            raise interrupted
        return self.outcome()

    def wait(self) -> None:
        """Wait for its end, whatever it comes to. Raises a further Ctrl-C at once."""
        while not self._ended:
            item = self._inbox.get()
            if isinstance(item, _Asked):
                item.give(wanted=False)

    def outcome(self) -> _T:
        """What it came to, once it has ended."""
        if self._error is not None:
            error, self._error = self._error, None
            if self._cut_off:
                raise Unreachable("this toolkit was closed in the meantime: what came of this is not known") from error
            raise error
        if self._cut_off:
            raise Unreachable("this toolkit was closed before this could begin: nothing was done")
        return cast("_T", self._outcome)

    def bring_back(self) -> None:
        """Set what the coroutine has changed of its context, since it began or this was last done, in the caller's."""
        before, self._before = self._before, self._context.copy()
        for variable, value in self._before.items():
            if variable is not _errand and before.get(variable, _ENDED) is not value:
                variable.set(value)


class _Asked:
    """What a coroutine wants to have done in its caller's thread."""

    def __init__(self, fn: Callable[[], Any], context: Context, answer: asyncio.Future[Any], portal: Portal) -> None:
        self._fn = fn
        self._context = context
        self.answer = answer
        self._portal = portal

    def give(self, *, wanted: bool) -> None:
        """In the caller's thread: do it. Not ``wanted``: its coroutine is being cancelled, and it is not begun."""
        if not wanted:
            self._portal.soon(self.answer.cancel)
            return
        try:
            said = self._context.run(self._fn)
        except BaseException as error:
            self._portal.soon(lambda error=error: self._raise(passable(error)))
            if not isinstance(error, Exception):
                raise  # a Ctrl-C: the caller's thread gets it first-hand
        else:
            self._portal.soon(lambda: self.answer.done() or self.answer.set_result(said))

    def _raise(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _GeneratorClosed(BaseException):
    """Stands for a GeneratorExit, which a coroutine would take for its own."""


class _Cancelled(BaseException):
    """Stands for a CancelledError, which a task would take for its own: a body may run a loop of its own."""


# As they go on record.
_GeneratorClosed.__module__, _GeneratorClosed.__qualname__ = "builtins", "GeneratorExit"
_Cancelled.__module__, _Cancelled.__qualname__ = "asyncio.exceptions", "CancelledError"


def passable(error: BaseException) -> BaseException:
    """What a coroutine can be given to raise in the place of ``error``, which is the cause of what is not itself."""
    if isinstance(error, StopIteration):
        stand_in: BaseException = RuntimeError("StopIteration was raised")
    elif isinstance(error, GeneratorExit):
        stand_in = _GeneratorClosed(*error.args)
    elif isinstance(error, asyncio.CancelledError):
        stand_in = _Cancelled(*error.args)
    else:
        return error
    stand_in.__cause__ = error
    return stand_in


_errand: ContextVar[Errand[Any] | None] = ContextVar("natsreceipts_errand", default=None)


def current_errand() -> Errand[Any]:
    """The errand that the calling coroutine is run on."""
    errand = _errand.get()
    if errand is None:
        raise RuntimeError("this is not run on an errand")
    return errand


async def in_caller(fn: Callable[[], _T]) -> _T:
    """Run ``fn`` in the thread that waits for the calling coroutine."""
    return await current_errand().ask(fn)
