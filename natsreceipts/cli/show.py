"""``natsreceipts receipts show``: one receipt, what happened to it, what it means and what to do."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.output import STATUS_STYLES, duration, instant, plain
from natsreceipts.cli.receipts import app
from natsreceipts.cli.shapes import readable, rfc3339, wire_json
from natsreceipts.cli.story import EFFECTS, advice, events, status_of
from natsreceipts.cli.verb import AsJson, Session, verb
from natsreceipts.errors import NatsReceiptsError

if TYPE_CHECKING:
    from natsreceipts.cli.output import Out
    from natsreceipts.receipt import Receipt, Revision
    from natsreceipts.receipts import ReceiptStore
    from natsreceipts.server_time import ServerTime

__all__ = ["Found", "Key", "looked_up", "tell_history"]

Key = Annotated[str, typer.Argument(metavar="KEY", help="A receipt's KV key, as `ls` prints it.", show_default=False)]

_LONGEST = 40
"""Lines of a payload that are shown; --json has it all."""


class Found(NamedTuple):
    """A key, the bucket that holds it, its kept revisions, at least one, and the server's time."""

    key: str
    bucket: str
    revisions: list[Revision]
    time: ServerTime

    @property
    def newest(self) -> Revision:
        """The newest revision."""
        return self.revisions[-1]

    @property
    def newest_readable(self) -> Receipt | None:
        """The newest revision that is a receipt."""
        return next((r.receipt for r in reversed(self.revisions) if r.receipt is not None), None)

    @property
    def lease_left(self) -> float | None:
        """Seconds, of a running receipt."""
        return self.time.lease_left(self.newest.receipt) if self.newest.receipt is not None else None


async def looked_up(store: ReceiptStore, key: str) -> Found:
    """What stands under a key. Raises `Failure` where that is nothing."""
    time = await store.server_time()
    revisions = await store.revisions(key)
    if not revisions:
        run = ".".join(key.split(".")[:2]) + ".>"
        raise Failure(
            f"there is no receipt {key}: no attempt was ever made, or it has expired. Look for others of the run "
            f"with `natsreceipts receipts ls`, or `nats kv ls {store.bucket(key)} {_quoted(run)}`",
            Exit.NOT_FOUND,
        )
    return Found(key, store.bucket(key), revisions, time)


def _quoted(pattern: str) -> str:
    return f"-- '{pattern}'" if pattern.startswith("-") else f"'{pattern}'"


@verb(app, "show")
async def show(session: Session, key: Key, json: AsJson = False) -> Exit:
    """Tell a receipt's story: its fields and their meaning, its revisions, and what to do next.

    Works on erased and unreadable ones too.
    """
    async with session.toolkit() as toolkit:
        found = await looked_up(toolkit.receipts, key)
        last = found.newest_readable
        payloads = await _payloads(toolkit.receipts, last) if last is not None else {}
    if json:
        session.out.json(_as_json(session, found, payloads))
    else:
        _tell(session, found, payloads)
    missing = found.newest.receipt is not None and any("problem" in payload for payload in payloads.values())
    unreadable = found.newest.problem is not None or missing
    return Exit.UNREADABLE if unreadable else Exit.DONE


async def _payloads(store: ReceiptStore, receipt: Receipt) -> dict[tuple[str, ...], dict[str, Any]]:
    """The payloads of a receipt by their place in the record, as ``json``, ``text`` or a ``problem``."""
    record = receipt.record
    places = {("args",): record.args, ("result",): record.result}
    places |= {("steps", name): payload for name, payload in (record.steps or {}).items()}
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for place, payload in places.items():
        if payload is None:
            continue
        try:
            found[place] = readable(await store.payload(receipt, payload))
        except NatsReceiptsError as error:
            found[place] = {"problem": str(error), "errorType": type(error).__name__}
    return found


def _as_json(session: Session, found: Found, payloads: dict[tuple[str, ...], dict[str, Any]]) -> dict[str, Any]:
    newest, receipt = found.newest, found.newest.receipt
    shown: dict[str, Any]
    if receipt is not None:
        shown = wire_json(receipt)
        for place, value in payloads.items():
            inside: dict[str, Any] = shown
            for name in place:
                inside = inside[name]
            inside |= value
        left, kept = found.lease_left, found.time.kept_for(receipt)
        shown |= {
            "idempotencyKey": receipt.key.idempotency_key,
            "leaseLeftSeconds": None if left is None else round(left, 3),
            "keptForSeconds": None if kept is None else round(kept, 3),
        }
    else:
        shown = {"key": found.key, "revision": newest.revision, "updated": rfc3339(newest.time)}
        shown |= {"status": status_of(newest)}
    shown["bucket"] = found.bucket
    shown["next"] = _next(session, found, payloads)
    shown["history"] = [
        {
            "revision": event.revision.revision,
            "time": rfc3339(event.revision.time),
            "status": event.status,
            "event": event.text,
            **({"attempts": event.revision.receipt.attempts} if event.revision.receipt is not None else {}),
            **({"problem": str(event.revision.problem)} if event.revision.problem is not None else {}),
        }
        for event in events(found.revisions)
    ]
    return shown


def _tell(session: Session, found: Found, payloads: dict[tuple[str, ...], dict[str, Any]]) -> None:
    out, newest, receipt = session.out, found.newest, found.newest.receipt
    status = status_of(newest)
    age = duration((found.time.now - newest.time).total_seconds())
    out.line(found.key)
    out.line(
        (status, STATUS_STYLES[status]),
        f" since {instant(newest.time, fine=True)} ({age} ago), revision {newest.revision} in bucket {found.bucket}",
    )
    out.line()
    if receipt is not None:
        _tell_fields(out, found, receipt, payloads)
        out.line()
    tell_history(out, found)
    out.line()
    out.line(("What to do", "bold"))
    tell_advice(out, _next(session, found, payloads))


def tell_history(out: Out, found: Found) -> None:
    """What happened, by the server's clock."""
    out.line(("What happened, by the server's clock", "bold"))
    before = None
    for event in events(found.revisions):
        time = event.revision.time
        since = f" (+{duration((time - before).total_seconds())})" if before is not None else ""
        out.line(
            f"  {instant(time, fine=True)}{since}  ",
            (event.status, STATUS_STYLES[event.status]),
            f"  revision {event.revision.revision}",
        )
        out.paragraph(event.text, indent="    ")
        before = time


def tell_advice(out: Out, lines: list[str]) -> None:
    """Sentences, and commands that can be copied."""
    for line in lines:
        if line.startswith("$ "):
            out.line(f"  {line}")
        else:
            out.paragraph(line, indent="  ")


def _tell_fields(out: Out, found: Found, receipt: Receipt, payloads: dict[tuple[str, ...], dict[str, Any]]) -> None:
    record = receipt.record
    out.line(("What the record says", "bold"))

    def field(name: str, value: str, meaning: str = "") -> None:
        out.line(f"  {name:<15} {plain(value)}")
        if meaning:
            out.paragraph(meaning, indent=" " * 18, style="dim")

    field("tenant", receipt.key.tenant)
    field("run", receipt.key.run)
    field("tool", receipt.key.tool)
    field("arguments", f"hash {receipt.key.args_hash}", "" if record.args else "not stored: store_args=True keeps them")
    _tell_payload(out, payloads.get(("args",)))
    field("idempotency key", receipt.key.idempotency_key, "what every attempt hands to the provider")
    if receipt.effect is not None:
        field("effect", receipt.effect, EFFECTS[receipt.effect])
    open_note = "an attempt before this one may have taken effect too" if record.open else ""
    field("attempts", str(receipt.attempts), open_note)
    if receipt.worker is not None:
        field("worker", receipt.worker, "of the last attempt, as it called itself")
    if receipt.lease is not None:
        field("lease", duration(receipt.lease), _lease_note(found, receipt))
    for name in receipt.steps:
        field("step", name, "on record: not executed again")
        _tell_payload(out, payloads.get(("steps", name)))
    if record.result is not None:
        kept_at = record.result.object.name if record.result.object is not None else ""
        field("result", f"in the object store as {kept_at}" if kept_at else "")
        _tell_payload(out, payloads.get(("result",)))
    if receipt.error is not None:
        what = (
            "says that the call had no effect and will have none"
            if record.not_applied
            else "what the last attempt ended in"
        )
        field("error", f"{receipt.error.type}: {receipt.error.message}", what)
    if receipt.resolved is not None:
        field("settled", f"by {receipt.resolved.by}: {receipt.resolved.reason}")
    for session, position in (record.fences or {}).items():
        field("fence", f"{session} at {position}", "calls from that session's log up to there are refused")
    kept = found.time.kept_for(receipt)
    field(
        "kept",
        "for ever" if kept is None else f"for {duration(kept)} more",
        "" if kept is None else "after that the call can be executed again",
    )


def _lease_note(found: Found, receipt: Receipt) -> str:
    left = found.lease_left
    if left is None:
        return ""
    return (
        f"{duration(left)} left by the server's clock"
        if left > 0
        else f"over since {duration(-left)} by the server's clock"
    )


def _tell_payload(out: Out, payload: dict[str, Any] | None) -> None:
    if payload is None:
        return
    if "problem" in payload:
        out.paragraph(plain(payload["problem"]), indent=" " * 18, style="bold red")
        return
    text = payload["text"] if "text" in payload else jsonlib.dumps(payload["json"], indent=2, ensure_ascii=False)
    lines = text.splitlines() or [""]
    for line in lines[:_LONGEST]:
        shown = plain(line)
        out.line(
            " " * 18 + (shown if len(shown) <= 2000 else f"{shown[:2000]}… ({len(shown):,} characters, --json has all)")
        )
    if len(lines) > _LONGEST:
        out.line(" " * 18 + f"… ({len(lines):,} lines, --json has all)")


def _next(session: Session, found: Found, payloads: dict[tuple[str, ...], dict[str, Any]]) -> list[str]:
    """What to do about the key (`advice`), with commands that lead to where this run looked."""
    problem = payloads.get(("result",), {}).get("errorType", "")
    lost = problem if problem in ("PayloadMissing", "CorruptRecord") else ""
    return session.place.in_all(advice(found.key, found.revisions, found.lease_left, bucket=found.bucket, lost=lost))
