"""How a call is guarded: its options, checked when they are given."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, cast

import pydantic

from natsreceipts.decision import Effect, Verdict
from natsreceipts.entries import SessionEntry
from natsreceipts.errors import InvalidSetting, brief

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["CallOptions", "adapter_of", "takes_argument"]

_LONGEST = 10**9
"""Seconds, some thirty years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How a call is guarded.

    ``effect``: what kind of side effect the tool has (an `Effect` or its value). ``lease``: seconds after the last
    accepted write until others may judge the attempt dead, at least 0.1. ``wait``: seconds to wait for another
    attempt before `CallInFlight` is raised. ``timeout``: seconds after which a body that hangs is cancelled (None:
    never). ``on_lost``: whether a body that lost its call is cancelled. ``not_applied``: exception classes by which
    the body says that the effect did not and can no longer happen. ``verify``: an async function, of no argument or
    of the `Call`, that is asked instead of raising AmbiguousCall; it looks at the outside world and returns
    `Landed`, `NotLanded` or `Unknown`. ``result_type``: what results are read as (anything that a pydantic
    TypeAdapter takes), for the first caller and for every replay. ``store_args``: keep the arguments in the receipt.
    ``entry``: the session's entry in which the call was asked for (by default the ambient one): once a wake has told
    the model that a call never started, a claim from before that is refused (CallWithdrawn).
    Raises InvalidSetting.
    """

    effect: Effect = Effect.OPAQUE
    lease: float = 30.0
    wait: float = 30.0
    timeout: float | None = None
    on_lost: Literal["cancel", "continue"] = "cancel"
    not_applied: tuple[type[BaseException], ...] = ()
    verify: Callable[..., Awaitable[Verdict]] | None = None
    result_type: Any = None
    store_args: bool = False
    entry: SessionEntry | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "effect", Effect(self.effect))
        except ValueError as error:
            raise InvalidSetting(f"effect={brief(self.effect)}: use one of {', '.join(Effect)}") from error
        for name, least in (("lease", 0.1), ("wait", 0.0), ("timeout", 0.0)):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not -inf < value < inf:
                raise InvalidSetting(f"{name}={brief(value)}: use a finite number of seconds")
            if value < least or (name == "timeout" and value == 0):
                at_least = "more than 0" if name == "timeout" else f"at least {least:g}"
                raise InvalidSetting(f"{name}={brief(value)}: use {at_least} seconds")
            if value > _LONGEST:
                raise InvalidSetting(f"{name}={brief(value)}: use at most {_LONGEST:,} seconds")
        if self.on_lost not in ("cancel", "continue"):
            raise InvalidSetting(f"on_lost={brief(self.on_lost)}: use 'cancel' or 'continue'")
        classes = cast("object", self.not_applied)
        if isinstance(classes, type):
            classes = (classes,)
        if not isinstance(classes, tuple | list) or not all(
            isinstance(c, type) and issubclass(c, BaseException) for c in cast("tuple[object, ...]", classes)
        ):
            raise InvalidSetting(f"not_applied={brief(self.not_applied)}: use a tuple of exception classes")
        if self.store_args is not True and self.store_args is not False:
            raise InvalidSetting(f"store_args={brief(self.store_args)}: use True or False")
        if self.entry is not None and not isinstance(cast("object", self.entry), SessionEntry):
            raise InvalidSetting(f"entry={brief(self.entry)}: use what append, resume or entry_of returned")
        if self.verify is not None:
            takes_argument(self.verify)
        if self.result_type is not None:
            try:
                adapter_of(self.result_type)
            except Exception as error:
                raise InvalidSetting(f"result_type={brief(self.result_type)} is no type that pydantic takes") from error
        object.__setattr__(self, "not_applied", tuple(cast("tuple[type[BaseException], ...]", classes)))


@lru_cache(maxsize=1024)
def adapter_of(result_type: Any) -> pydantic.TypeAdapter[Any]:
    """The pydantic adapter of a ``result_type``. Raises what pydantic raises for something that is no type."""
    adapter = pydantic.TypeAdapter[Any](result_type)
    if not adapter.pydantic_complete:  # it names a type that is not there (yet): better known before the effect
        adapter.rebuild(raise_errors=True)
    return adapter


def takes_argument(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` has a required positional parameter (which is then given the call).

    Raises InvalidSetting where it cannot be called with no argument, nor with one.
    """
    if not callable(cast("object", fn)):
        raise InvalidSetting(f"{brief(fn)} cannot be called: pass a function of no argument, or of the call")
    if type(fn) is FunctionType and not fn.__dict__ and not fn.__code__.co_kwonlyargcount:
        # Nothing is wrapped: the usual case, at a hundredth of what a signature costs.
        required = fn.__code__.co_argcount - len(fn.__defaults__ or ())
    else:
        try:
            parameters = inspect.signature(fn).parameters.values()
        except ValueError:
            return False  # written in C, and does not tell
        empty = [p for p in parameters if p.default is inspect.Parameter.empty]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = sum(p.kind in positional for p in empty)
        if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in empty):
            required = 2
    if required > 1:
        raise InvalidSetting(f"{brief(fn)} wants more than the call: pass a function of no argument, or of the call")
    return required == 1
