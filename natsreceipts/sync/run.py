"""A run, and guarded tools in it, for code without an event loop."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast, overload

from natsreceipts.errors import InvalidSetting, NoActiveRun
from natsreceipts.options import takes_argument
from natsreceipts.sync.calls import Call, call_options, check_sync, made
from natsreceipts.sync.notices import NoticeBoard
from natsreceipts.tools import ToolFunction, checked_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from natsreceipts import run as runs
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.options import CallOptions
    from natsreceipts.sync.calls import OpenCalls
    from natsreceipts.sync.portal import Portal

__all__ = ["Run", "Tool", "tool"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Scope(NamedTuple):
    run: Run
    outer: _Scope | None


_scope: ContextVar[_Scope | None] = ContextVar("natsreceipts_sync_run", default=None)


class Run:
    """One run of an agent for one tenant, as `natsreceipts.Run`; what it executes runs in the calling thread.

    As a context manager it becomes the ambient run of the calling thread. (Another thread enters it for itself.)
    """

    def __init__(self, portal: Portal, open_calls: OpenCalls, inner: runs.Run) -> None:
        self._portal = portal
        self._open_calls = open_calls
        self._inner = inner

    def __repr__(self) -> str:
        return f"Run({self.tenant!r}, {self.run!r})"

    @property
    def tenant(self) -> str:
        """Whose run it is."""
        return self._inner.tenant

    @property
    def run(self) -> str:
        """Its name."""
        return self._inner.run

    @property
    def inner(self) -> runs.Run:
        """The run on the toolkit's loop, for the sessions' log."""
        return self._inner

    @property
    def options(self) -> CallOptions:
        """The options of its calls that do not say others."""
        return self._inner.options

    @property
    def notices(self) -> NoticeBoard:
        """The notices of this run, at the endpoint of its tenant. Raises InvalidName for a run that has no room there.

        (1 to 64 of A-Z, a-z, 0-9, _ and - have.)
        """
        return NoticeBoard(self._portal, self._inner.notices)

    def __enter__(self) -> Self:
        self._portal.run(self._inner.__aenter__)
        _scope.set(_Scope(self, _scope.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scope = _scope.get()
        _scope.set(scope.outer if scope is not None else None)
        if self._portal.forked or self._portal.is_here:
            return
        self._portal.run(self._inner.__aexit__, None, None, None)

    def key(self, tool: str, args: object, *, distinct: str | None = None) -> ReceiptKey:
        """The key of a call. Raises NotCanonical (the arguments have no canonical JSON) and InvalidName."""
        return self._inner.key(tool, args, distinct=distinct)

    def call(self, tool: str, args: object, *, distinct: str | None = None, **options: Any) -> Call:
        """Guard one call of ``tool`` with these arguments (plain JSON data), as `natsreceipts.Run.call`.

        Options as in `CallOptions`; ``verify`` may be async or not, and ``on_lost`` is "continue".
        """
        inner = self._inner.call(tool, args, distinct=distinct, **call_options(options))
        return Call(self._portal, self._open_calls, inner)

    @overload
    def execute(
        self, tool: str, args: object, fn: Callable[[], _T], *, distinct: str | None = None, **options: Any
    ) -> _T: ...

    @overload
    def execute(
        self, tool: str, args: object, fn: Callable[[Call], _T], *, distinct: str | None = None, **options: Any
    ) -> _T: ...

    def execute(
        self, tool: str, args: object, fn: Callable[..., Any], *, distinct: str | None = None, **options: Any
    ) -> Any:
        """Execute ``fn`` in this thread, once for this call, or return the recorded result of the attempt that did.

        ``fn`` takes no argument, or one: the `Call`. An equal call in another thread is another attempt, as in another
        process: it waits for this one, and gets the recorded result. Raises what `Call` raises, and what ``fn`` raises.
        """
        wants_call = takes_argument(fn)
        check_sync(fn)
        with self.call(tool, args, distinct=distinct, **options) as call:
            if not call.replayed:
                call.result = made(fn(call) if wants_call else fn())
        return call.result


class Tool(ToolFunction[_P], Generic[_P, _T]):
    """A guarded tool that is not async: calling it claims, executes in the calling thread, or replays.

    Calling it raises NoActiveRun outside ``with run:``, and what `Call` raises.
    """

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Execute the function once for this call in the ambient run, or return the recorded result."""
        scope = _scope.get()
        if scope is None:
            raise NoActiveRun

        def execute(call: Call) -> Any:
            return self.bound(call, call.idempotency_key, args, kwargs)()

        return scope.run.execute(self.name, self.arguments(*args, **kwargs), execute, **self.options)


class _Decorator:
    def __init__(self, name: str | None, options: dict[str, Any]) -> None:
        self._name = name
        self._options = options

    def __call__(self, fn: Callable[_P, _T]) -> Tool[_P, _T]:
        found = Tool[_P, _T](fn, name=self._name, options=self._options, call_type=Call)
        if found.is_async or inspect.isasyncgenfunction(fn):
            raise InvalidSetting(f"{found.name} is async: natsreceipts.tool is for those")
        return found


@overload
def tool(fn: Callable[_P, _T], /) -> Tool[_P, _T]: ...
@overload
def tool(*, name: str | None = None, **options: Any) -> _Decorator: ...
def tool(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Make a function (no method, and not async) a guarded tool, as `natsreceipts.tool`.

    A parameter annotated as `Call` is given the `natsreceipts.sync.Call`. Raises InvalidSetting.
    """
    options = call_options(options)
    checked_options(options)
    decorate = _Decorator(name, options)
    return decorate(fn) if fn is not None else cast("Any", decorate)
