"""``natsreceipts doctor``: what the promises rest on, a line per check, with what to do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from natsreceipts.cli.exits import Exit
from natsreceipts.cli.output import plain
from natsreceipts.cli.verb import AsJson, Session, verb
from natsreceipts.doctor import examine

if TYPE_CHECKING:
    from natsreceipts.cli.output import Out
    from natsreceipts.doctor import Finding

__all__ = ["add_doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "unverified": "cyan"}


async def _doctor(
    session: Session,
    monitor: Annotated[
        list[str] | None,
        typer.Option(help="Monitoring address of a server, as http://HOST:8222; may be repeated.", metavar="URL"),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Whose keys to try permissions on, for users that may write only theirs.")
    ] = None,
    records: Annotated[bool, typer.Option(help="Read the records too, not only settings and permissions.")] = True,
    most: Annotated[int, typer.Option(help="Records of a bucket that are read.", min=1)] = 1_000_000,
    json: AsJson = False,
) -> Exit:
    """Look at the server, the buckets, the permissions and the records, and say what to do. Writes nothing.

    Use the workers' credentials, to see what they may do. Exit status 8: there is an error; warnings and what could
    not be verified leave it at 0.
    """
    servers, settings = session.connection
    counts: Counter[str] = Counter()
    found = examine(
        servers,
        namespace=session.namespace,
        tenant=tenant,
        monitor=monitor or [],
        records=records,
        most=most,
        **settings,
    )
    async with contextlib.aclosing(found) as findings:
        async for found_one in findings:
            finding = _placed(session, found_one)
            counts[finding.level] += 1
            if json:
                session.out.json({name: value for name, value in dataclasses.asdict(finding).items() if value})
            else:
                _tell(session.out, finding)
    if not json:
        session.out.line(", ".join(f"{counts[level]} {level}" for level in _STYLES if counts[level]))
    return Exit.UNSOUND if counts["error"] else Exit.DONE


def _placed(session: Session, finding: Finding) -> Finding:
    placed = session.place.in_commands
    fix = placed(finding.fix) if finding.fix is not None else None
    return dataclasses.replace(finding, text=placed(finding.text), fix=fix)


def _tell(out: Out, finding: Finding) -> None:
    out.line((f"{finding.level:<10}", _STYLES[finding.level]), f"  {finding.check}: {plain(finding.text)}")
    if finding.fix is not None:
        out.line(f"{'':10}  fix: {plain(finding.fix)}")


def add_doctor(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "doctor")(_doctor)
