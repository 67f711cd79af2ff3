"""``natsreceipts up``: make what is missing, and compare what is there with what it should be."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated

import typer

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.output import duration
from natsreceipts.cli.verb import AsJson, Session, verb
from natsreceipts.provisioning import provision

if TYPE_CHECKING:
    from natsreceipts.cli.output import Out
    from natsreceipts.provisioning import Provisioned

__all__ = ["add_up"]

_STATES = {"made": "green", "there": "", "missing": "yellow"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "": 1}


async def _up(
    session: Session,
    replicas: Annotated[int, typer.Option(help="Servers that hold each store.")] = 1,
    retention: Annotated[
        str, typer.Option(help="How long receipts are kept, as 90d or 3600; 0: for ever.", metavar="TIME")
    ] = "0",
    history: Annotated[int, typer.Option(help="Revisions kept of a receipt, 8 or more.")] = 8,
    partitions: Annotated[
        int | None,
        typer.Option(
            help="Buckets that the receipts are spread over, 1 to 64; fixed from then on. "
            "Unless given, as many as there are, or one.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Make nothing, only say what would be made.")] = False,
    json: AsJson = False,
) -> Exit:
    """Make the buckets and streams that are missing, and check those that are there.

    One that is there is never changed. Exit status 5: the settings of one break the promises.
    """
    servers, settings = session.connection
    stores = await provision(
        servers,
        namespace=session.namespace,
        replicas=replicas,
        history=history,
        retention=_seconds(retention),
        partitions=partitions,
        dry_run=dry_run,
        **settings,
    )
    if not dry_run and (made := [store.name for store in stores if store.state == "made"]):
        session.written = f"{', '.join(made)} were made"
    for store in stores:
        if json:
            session.out.json(dataclasses.asdict(store))
        else:
            _tell(session.out, store)
    return Exit.NOT_READY if any(store.refused for store in stores) else Exit.DONE


def _tell(out: Out, store: Provisioned) -> None:
    state = "would be made" if store.state == "missing" else store.state
    kept = f"kept {'for ' + duration(store.retention) if store.retention else 'for ever'}"
    history = f", {store.history} revisions of a key" if store.history is not None else ""
    stream = "" if store.kind == "stream" else f" (stream {store.stream})"
    out.line(
        f"{store.kind} {store.name}{stream}: ",
        (state, _STATES[store.state]),
        f"; {store.replicas} replica{'s' if store.replicas > 1 else ''}{history}, {kept}",
    )
    for text in store.refused:
        out.paragraph(f"cannot be used: {text}", indent="  ", style="bold red")
    for text in store.weaker:
        out.paragraph(f"weaker than it should be: {text}", indent="  ", style="yellow")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    if match is None:
        raise Failure(f"--retention {text}: use a number with s, m, h, d or w behind it, as 90d", Exit.USAGE)
    return float(match[1]) * _UNITS[match[2]]


def add_up(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "up")(_up)
