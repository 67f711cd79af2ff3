"""What all verbs share: their connection flags, one line for every error, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from natsreceipts.cli.connection import cipher_of, connection_flags, target_of
from natsreceipts.cli.exits import Exit, Failure, exit_of
from natsreceipts.cli.output import Out
from natsreceipts.cli.place import Place
from natsreceipts.cli.stdout import CannotWrite, PipeClosed
from natsreceipts.errors import NatsReceiptsError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from natsreceipts.toolkit import Toolkit

__all__ = ["CONTEXT_SETTINGS", "AsJson", "Session", "group", "show_help", "verb", "with_flags"]

_T = TypeVar("_T")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}

_FLAGS = inspect.signature(connection_flags, eval_str=True).parameters


class Session:
    """One run of a verb: where it prints, and how it connects."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.out = Out()
        self.namespace: str = flags["namespace"] or ""
        self.interrupted = "stopped by Ctrl-C"
        """What Ctrl-C is answered with."""
        self.written = ""
        """What this run has written to NATS: said where the output cannot say it."""
        self.place = Place(flags)
        self._flags = flags

    def remark(self, text: str) -> None:
        """A line on standard error. Commands in it lead to where this run connects."""
        self.out.remark(self.place.in_commands(text))

    @functools.cached_property
    def connection(self) -> tuple[list[str], dict[str, Any]]:
        """Servers, and keyword arguments for `connect`. Raises Failure."""
        target = target_of(self._flags)
        return target.servers, {"connect_timeout": target.timeout, "name": "natsreceipts", **target.settings}

    @contextlib.asynccontextmanager
    async def toolkit(self) -> AsyncGenerator[Toolkit, None]:
        """A toolkit on the buckets that the flags name."""
        from natsreceipts.toolkit import connect

        servers, settings = self.connection
        cipher = cipher_of(self._flags)
        async with connect(servers, namespace=self.namespace, cipher=cipher, **settings) as toolkit:
            yield toolkit

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a part of the verb in an event loop of its own."""
        return asyncio.run(work)


def group(help: str) -> typer.Typer:  # noqa: A002
    """A group of verbs, which alone prints its help."""
    app = typer.Typer(help=help, context_settings=CONTEXT_SETTINGS)

    @app.callback(invoke_without_command=True)
    def alone(ctx: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
        show_help(ctx)

    return app


def show_help(ctx: typer.Context) -> None:
    """Print the help of a group that is given no verb."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Let a command take the flags of a connection too. It is called with the context, them in a dict, and its own."""
    _, _, *own = inspect.signature(function, eval_str=True).parameters.values()

    def command(ctx: typer.Context, **arguments: Any) -> None:
        before: dict[str, Any] = ctx.obj or {}
        flags = {flag: arguments.pop(flag) or before.get(flag) for flag in _FLAGS}
        function(ctx, flags, **arguments)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    more = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *_FLAGS.values())]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature([context, *more])  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (context, *more)}
    return command


def verb(app: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a verb: it gets a `Session` first, and the flags of a connection are added to its own.

    It may be sync or async, and return an `Exit` other than DONE.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        def command(ctx: typer.Context, flags: dict[str, Any], **arguments: Any) -> None:
            raise typer.Exit(_ended(function, flags, arguments))

        command.__doc__ = function.__doc__
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("ctx", "flags")]
        signature = inspect.Signature([*first, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)])
        command.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        app.command(name)(with_flags(command))
        return function

    return register


def _ended(function: Callable[..., Any], flags: dict[str, Any], arguments: dict[str, Any]) -> Exit:
    session = Session(flags)
    with _quiet():
        try:
            ended = function(session, **arguments)
            code = session.run(ended) if inspect.iscoroutine(ended) else ended
            session.out.close()
            return code or Exit.DONE
        except PipeClosed:
            if session.written:
                session.remark(session.written)
            raise
        except CannotWrite as failure:
            if session.written:
                raise CannotWrite(f"{failure.why}; {session.written}") from failure
            raise
        except KeyboardInterrupt:
            session.remark(session.interrupted)
            return Exit.INTERRUPTED
        except Failure as failure:
            session.remark(str(failure))
            return failure.code
        except NatsReceiptsError as error:
            session.remark(str(error))
            return exit_of(error)


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the logs of the library and of asyncio (which has a word on each TLS connection that ends) out of what is
    printed: what matters of them is raised too.
    """
    if os.environ.get("NATSRECEIPTS_TRACEBACK"):
        yield
        return
    logs = [logging.getLogger(name) for name in ("natsreceipts", "asyncio")]
    handler = logging.NullHandler()
    before = [log.propagate for log in logs]
    for log in logs:
        log.addHandler(handler)
        log.propagate = False
    try:
        yield
    finally:
        for log, propagate in zip(logs, before, strict=True):
            log.removeHandler(handler)
            log.propagate = propagate
