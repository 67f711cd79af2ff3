"""`@tool`: a function as a guarded tool, which finds its run in the ambient scope."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, get_args, get_type_hints, overload

from natsreceipts.decision import Effect
from natsreceipts.errors import InvalidName, InvalidSetting, brief
from natsreceipts.guard import Call
from natsreceipts.options import CallOptions
from natsreceipts.run import current_run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


__all__ = ["Tool", "ToolFunction", "checked_options", "tool"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_KEY_PARAMETER = "idempotency_key"


class ToolFunction(Generic[_P]):
    """A function that is a guarded tool, and how its arguments identify a call. ``name`` and ``effect`` say what it is.

    ``call_type``: the annotation of the parameter that is given the call.
    """

    def __init__(
        self, fn: Callable[_P, Any], *, name: str | None, options: dict[str, Any], call_type: type = Call
    ) -> None:
        self.fn = fn
        self.name: str = name or getattr(fn, "__name__", "")
        if not self.name:
            raise InvalidSetting(f"{brief(fn)} has no name of its own: give it one with @tool(name=...)")
        self.options = options
        self.effect = CallOptions(**options).effect if "effect" in options else Effect.OPAQUE
        self._signature = inspect.signature(fn)
        self.is_async = inspect.iscoroutinefunction(inspect.unwrap(fn)) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004 - whether an object's call is async, not whether it has one
        )
        parameters = self._signature.parameters.values()
        kinds = {p.kind for p in parameters}
        if inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.POSITIONAL_ONLY in kinds:
            raise InvalidSetting(
                f"{self.name}: positional-only parameters and ** together let one name mean two arguments"
            )
        self._takes_key = _KEY_PARAMETER in self._signature.parameters
        self._call_parameter = _call_parameter(fn, self._signature, call_type)
        self._hashed = {p.name: p for p in parameters if p.name not in (self._call_parameter, _KEY_PARAMETER)}
        variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}
        # Parameters that are filled in must come last, or positions would not be what they seem.
        in_order = list(self._signature.parameters)[: len(self._hashed)] == list(self._hashed)
        self._plain = (
            [p.name for p in self._hashed.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            if in_order and not kinds & variadic
            else []
        )
        self._defaults = {p.name: p.default for p in self._hashed.values() if p.default is not inspect.Parameter.empty}
        functools.update_wrapper(cast("Any", self), fn)

    def __repr__(self) -> str:
        return f"<tool {self.name} ({self.effect})>"

    def arguments(self, *args: _P.args, **kwargs: _P.kwargs) -> dict[str, Any]:
        """What identifies a call with these arguments: each by its name, defaults filled in.

        The arguments of a parameter ``*rest`` are a list named ``*rest``, those of ``**more`` stand for themselves. A
        parameter named ``idempotency_key``, and one annotated as `Call`, are not part of it. Raises TypeError as the
        function would, and InvalidName for a keyword that has the name of another argument.
        """
        plain = self._plainly(args, kwargs)
        if plain is not None:
            return plain
        filled_in = [_KEY_PARAMETER] if self._takes_key else []
        if self._call_parameter is not None:
            filled_in.append(self._call_parameter)
        for name in filled_in:
            kwargs.setdefault(name, "")
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if name in filled_in:
                continue
            if kind is inspect.Parameter.VAR_POSITIONAL:
                named[f"*{name}"] = value
            elif kind is inspect.Parameter.VAR_KEYWORD:
                more = cast("dict[str, Any]", value)
                if taken := named.keys() & more.keys():
                    raise InvalidName("argument", min(taken), "it names two arguments of one call")
                named.update(more)
            else:
                named[name] = value
        return named

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """`arguments` of a function without ``*`` and ``**``, for a third of what binding its signature costs.

        None where the arguments do not plainly fit: binding then says what is wrong.
        """
        if not args and kwargs.keys() == self._hashed.keys() and self._plain:
            return kwargs
        if not self._plain or len(args) > len(self._plain):
            return None
        named = dict(zip(self._plain, args, strict=False))
        if kwargs.keys() & named.keys() or not kwargs.keys() <= self._hashed.keys():
            return None
        named = {**self._defaults, **named, **kwargs}
        return named if len(named) == len(self._hashed) else None

    @property
    def fills_in(self) -> bool:
        """Whether the function has a parameter that `bound` fills in."""
        return self._takes_key or self._call_parameter is not None

    def bound(self, call: object, idempotency_key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function with its arguments, and with what it wants to know of the call."""
        given = dict(kwargs)
        if self._takes_key:
            given[_KEY_PARAMETER] = idempotency_key
        if self._call_parameter is not None:
            given[self._call_parameter] = call
        return functools.partial(self.fn, *args, **given)


class Tool(ToolFunction[_P], Generic[_P, _T]):
    """A guarded tool: calling it claims, executes or replays. ``name`` and ``effect`` say what it is.

    Calling it raises NoActiveRun outside ``async with run:``, and what `Call` raises.
    """

    async def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Execute the function once for this call in the ambient run, or return the recorded result."""
        run = current_run()
        if self.is_async and not self.fills_in:
            arguments = self.arguments(*args, **kwargs)
            return await run.execute(self.name, arguments, lambda: self.fn(*args, **kwargs), **self.options)

        async def execute(call: Call) -> Any:
            fn = self.bound(call, call.idempotency_key, args, kwargs)
            if self.is_async:
                return await fn()
            made = await call.in_thread(fn, whole=True)
            return await made if inspect.isawaitable(made) else made

        return await run.execute(self.name, self.arguments(*args, **kwargs), execute, **self.options)


def _call_parameter(fn: Callable[..., Any], signature: inspect.Signature, call_type: type) -> str | None:
    """The parameter that is annotated as `Call`, also where annotations are text that cannot be evaluated here."""
    try:
        hints = get_type_hints(fn)
    except Exception:  # noqa: BLE001 - names that exist for the type checker alone
        hints = {}
    for name, parameter in signature.parameters.items():
        hint: object = hints.get(name, parameter.annotation)
        text = hint.replace(" ", "").removesuffix("|None").rpartition(".")[2] if isinstance(hint, str) else ""
        if hint is call_type or call_type in get_args(hint) or text == "Call":
            return name
    return None


def checked_options(options: dict[str, Any]) -> None:
    """Raise InvalidSetting for options of a tool that a call would refuse."""
    try:
        CallOptions(**options)
    except TypeError as error:
        raise InvalidSetting(f"@tool: {error}") from error


@overload
def tool(fn: Callable[_P, Awaitable[_T]], /) -> Tool[_P, _T]: ...
@overload
def tool(fn: Callable[_P, _T], /) -> Tool[_P, _T]: ...
@overload
def tool(*, name: str | None = None, **options: Any) -> _Decorator: ...
def tool(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Make a function, async or not (no method), a guarded tool.

    ``name`` is the tool's name in keys (by default the function's); options as in `CallOptions`, ``effect`` above
    all. Arguments are bound by the function's signature with defaults, so ``f(1)`` and ``f(a=1)`` are the same
    call; a parameter named ``idempotency_key``, and one annotated as `Call` (for its steps), are filled in and not
    hashed. A function that is not async runs in
    a thread (`Call.in_thread`). Raises InvalidSetting for options that a call would refuse.
    """
    checked_options(options)
    if fn is not None:
        return cast("Any", Tool(fn, name=name, options=options))
    return _Decorator(name, options)


class _Decorator:
    def __init__(self, name: str | None, options: dict[str, Any]) -> None:
        self._name = name
        self._options = options

    @overload
    def __call__(self, fn: Callable[_P, Awaitable[_T]]) -> Tool[_P, _T]: ...
    @overload
    def __call__(self, fn: Callable[_P, _T]) -> Tool[_P, _T]: ...
    def __call__(self, fn: Callable[..., Any]) -> Any:
        return cast("Any", Tool(fn, name=self._name, options=self._options))
