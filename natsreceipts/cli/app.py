"""The program: its groups of verbs, and the verbs that belong to none."""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version as installed
from typing import Annotated, Any

import typer
from rich.console import Console

from natsreceipts.cli.doctor import add_doctor
from natsreceipts.cli.exits import Exit
from natsreceipts.cli.up import add_up
from natsreceipts.cli.verb import CONTEXT_SETTINGS, show_help, with_flags
from natsreceipts.errors import ServerUnavailable

__all__ = ["app"]

_GROUPS = {"receipts": ("receipts", "show", "resolve"), "notices": ("notices",), "sessions": ("sessions",)}
"""Name → the modules that make its verbs; the first one makes the group."""

_EXITS = "Exit status: " + "; ".join(f"{code.value} {code.meaning}" for code in Exit) + "."

app = typer.Typer(context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"natsreceipts {installed('natsreceipts')}")
        raise typer.Exit


@with_flags
def _natsreceipts(
    ctx: typer.Context,
    flags: dict[str, Any],
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    ctx.obj = flags
    show_help(ctx)


_natsreceipts.__doc__ = "Tool-call receipts for AI agents on NATS JetStream."
app.callback(invoke_without_command=True, epilog=_EXITS)(_natsreceipts)

add_up(app)
add_doctor(app)

for _name, _modules in _GROUPS.items():
    _made = [importlib.import_module(f"natsreceipts.cli.{module}") for module in _modules]
    app.add_typer(_made[0].app, name=_name)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running at the end, until Ctrl-C.")] = False,
    without_receipts: Annotated[
        bool, typer.Option("--without-receipts", help="The same jobs and kills, with an unguarded worker.")
    ] = False,
) -> None:
    """Kill workers in the middle of sending mails, and count the mails that arrive.

    It starts what it needs (a nats-server, an inbox, workers) and stops it at the end.

    Exit status 0: with receipts no mail came twice, without them one did. 1: not so.
    """
    try:
        from natsreceipts.demo.show import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("natsreceipts"):
            raise
        typer.echo(
            f"natsreceipts: the demo needs {missing.name}, which is not installed. "
            f"Run: pip install 'natsreceipts[demo]'",
            err=True,
        )
        raise typer.Exit(Exit.FAILED) from None
    try:
        code = asyncio.run(run(Console(highlight=False), guarded=not without_receipts, keep=keep))
    except ServerUnavailable as unavailable:
        typer.echo(f"natsreceipts: {unavailable}", err=True)
        code = Exit.FAILED
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except asyncio.CancelledError:  # SIGTERM
        code = 143
    raise typer.Exit(code)
