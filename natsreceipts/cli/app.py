"""The commands."""

from __future__ import annotations

import asyncio
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from natsreceipts.errors import ServerUnavailable

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def natsreceipts() -> None:
    """Tool-call receipts for AI agents on NATS JetStream."""


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
        _give_up(f"the demo needs {missing.name}, which is not installed. Run: pip install 'natsreceipts[demo]'")
    try:
        code = asyncio.run(run(Console(highlight=False), guarded=not without_receipts, keep=keep))
    except ServerUnavailable as unavailable:
        _give_up(str(unavailable))
    except KeyboardInterrupt:
        code = 130
    except asyncio.CancelledError:  # SIGTERM
        code = 143
    raise typer.Exit(code)


def _give_up(why: str) -> NoReturn:
    typer.echo(f"natsreceipts: {why}", err=True)
    raise typer.Exit(1)
