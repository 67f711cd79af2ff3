"""What the settings of a stream that is there come to, against those that the promises rest on."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple

from natsreceipts._jetstream.bucket import subjects_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["ANEW", "MIN_HISTORY", "Finding", "edit_of", "findings", "objects_findings"]

MIN_HISTORY = 8
"""Revisions of a key that a bucket keeps. A settle whose answer was lost is recognised among them."""

ANEW = (
    "it cannot be changed on one that is there: make new ones with `natsreceipts up --namespace NEW`, and give the "
    'workers connect(namespace="NEW")'
)

_NANOSECONDS = 1_000_000_000
_DAY = 86_400.0
_FILLS = "a full bucket takes claims and then refuses their settles"


class Finding(NamedTuple):
    """One way in which a stream's settings differ from what the promises rest on."""

    refused: bool
    text: str
    setting: str
    """The stream's setting that it is about."""
    edit: str | None
    """What puts it right, as flags of ``nats stream edit``; None where the server does not let it be changed."""


def edit_of(stream: str, found: Iterable[Finding]) -> str:
    """What to do about what was found of a stream: the command that edits it, where one can."""
    edits = [finding.edit for finding in found]
    flags = [edit for edit in edits if edit is not None]
    return f"nats stream edit {stream} {' '.join(flags)}" if len(flags) == len(edits) else ANEW


def findings(config: Mapping[str, Any], *, lease: float, of_sessions: bool = False) -> list[Finding]:
    """What is weaker in a stream's configuration than it must be (refused) or should be. ``lease`` in seconds."""
    name = str(config["name"])
    prefix = subjects_of(name if of_sessions else name.removeprefix("KV_"), of_sessions=of_sessions)
    sample = f"{prefix}a.b" if of_sessions else f"{prefix}a.b.c.d.e.f"
    return [
        *_unusable(config, prefix, [f"{prefix}>"], [sample]),
        *_forgetting(config, lease=lease, of_sessions=of_sessions),
        *_weaker(config),
    ]


def objects_findings(config: Mapping[str, Any], *, retention: float) -> list[Finding]:
    """`findings` for the stream below an object store, for receipts that are kept for ``retention`` seconds."""
    prefix = f"$O.{str(config['name']).removeprefix('OBJ_')}."
    subjects = [f"{prefix}C.>", f"{prefix}M.>"]
    return [
        *_unusable(config, prefix, subjects, [f"{prefix}C.a", f"{prefix}M.a"]),
        *_unusable_for_objects(config),
        *_weaker_for_objects(config, retention),
    ]


def _unusable(config: Mapping[str, Any], prefix: str, subjects: list[str], samples: list[str]) -> Iterator[Finding]:
    """What keeps writes from being stored, from being acknowledged, or from where they are looked for."""
    wanted = " ".join(f"--subjects='{subject}'" for subject in subjects)
    covered: list[str] = config.get("subjects") or []
    if config.get("mirror"):
        text = "is a mirror of another stream, and takes no writes of its own"
        yield Finding(True, text, "mirror", f"--no-mirror {wanted}")
    elif not all(any(_covers(pattern, sample) for pattern in covered) for sample in samples):
        yield Finding(True, f"takes {', '.join(covered)}, and must take all of {prefix}>", "subjects", wanted)
    if config.get("sealed"):
        yield Finding(True, "is sealed, and takes no more writes", "sealed", None)
    if config.get("no_ack"):
        yield Finding(True, "acknowledges no write (no_ack)", "no_ack", "--ack")
    if config.get("allow_msg_counter"):
        yield Finding(True, "is a counter, and takes no records", "allow_msg_counter", None)
    if config.get("discard_new_per_subject"):
        text = "refuses a key's next revision instead of dropping its oldest (discard_new_per_subject)"
        yield Finding(True, text, "discard_new_per_subject", "--no-discard-per-subject")
    if config.get("subject_transform"):
        text = "has a subject_transform, so that its keys are not where they are looked for"
        yield Finding(True, text, "subject_transform", "--no-transform")
    kept = config.get("retention", "limits")
    if kept != "limits":
        text = f"has retention {kept!r}, and must keep what nobody consumed (limits)"
        yield Finding(True, text, "retention", "--retention=limits" if kept == "interest" else None)


def _covers(pattern: str, subject: str) -> bool:
    patterns, tokens = pattern.split("."), subject.split(".")
    if patterns[-1] == ">":
        return len(tokens) >= len(patterns) and _fits(patterns[:-1], tokens)
    return len(tokens) == len(patterns) and _fits(patterns, tokens)


def _fits(patterns: list[str], tokens: list[str]) -> bool:
    return all(pattern in ("*", token) for pattern, token in zip(patterns, tokens, strict=False))


def _forgetting(config: Mapping[str, Any], *, lease: float, of_sessions: bool) -> Iterator[Finding]:
    """What is dropped while it is needed."""
    history = config.get("max_msgs_per_subject", -1)
    setting = "max_msgs_per_subject"
    if of_sessions and history > 0:
        text = f"keeps {history} entries of a session, and must keep them all"
        yield Finding(True, text, setting, "--max-msgs-per-subject=-1")
    elif 0 < history < MIN_HISTORY:
        text = f"keeps {history} revisions of a key, and at least {MIN_HISTORY} are needed"
        yield Finding(True, text, setting, f"--max-msgs-per-subject={MIN_HISTORY}")
    age = config.get("max_age", 0) / _NANOSECONDS
    if age and age < 10 * lease:
        text = f"drops receipts after {age:g} s, which is less than 10 leases of {lease:g} s: calls could run again"
        yield Finding(True, text, "max_age", "--max-age=0")


def _weaker(config: Mapping[str, Any]) -> Iterator[Finding]:
    if config.get("storage") == "memory":
        yield Finding(False, "is held in memory: receipts are gone with the server", "storage", None)
    if config.get("max_bytes", -1) > 0:
        yield Finding(False, f"has max_bytes: {_FILLS}", "max_bytes", "--max-bytes=-1")
    if config.get("max_msgs", -1) > 0:
        yield Finding(False, f"has max_msgs: {_FILLS}", "max_msgs", "--max-msgs=-1")
    if config.get("discard") != "new":
        text = "discards old receipts when it is full (discard is not new): calls could run again"
        yield Finding(False, text, "discard", "--discard=new")
    if config.get("max_msg_size", -1) > 0:
        text = "has max_msg_size: it takes claims and then refuses larger settles"
        yield Finding(False, text, "max_msg_size", "--max-msg-size=-1")
    # Before deny_purge, which the server refuses while roll-ups are allowed.
    if config.get("allow_rollup_hdrs"):
        yield Finding(False, "allows roll-ups, which purge a key", "allow_rollup_hdrs", "--no-allow-rollup")
    if not config.get("deny_delete"):
        yield Finding(False, "lets messages be deleted (deny_delete is off)", "deny_delete", "--deny-delete")
    if not config.get("deny_purge"):
        yield Finding(False, "lets keys be purged (deny_purge is off)", "deny_purge", "--deny-purge")
    if config.get("allow_msg_ttl"):
        text = "allows a TTL per message, after which a call could run again"
        yield Finding(False, text, "allow_msg_ttl", None)
    if config.get("sources"):
        name = config["name"]
        without = f"--config=<(nats stream info {name} --json | jq '.config | del(.sources)')"
        text = "takes in what is written to other streams, past every fence (sources)"
        yield Finding(False, text, "sources", without)
    if not config.get("allow_direct"):
        text = "has direct gets off: replays cost about 1.3 times as much"
        yield Finding(False, text, "allow_direct", "--allow-direct")
    yield from _asynchronous(config)


def _unusable_for_objects(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What lets no payload through: a call that is executed could then not be recorded, or not be replayed."""
    if not config.get("allow_rollup_hdrs"):
        text = "has roll-ups off: it refuses every payload"
        yield Finding(True, text, "allow_rollup_hdrs", "--allow-rollup")
    if not config.get("allow_direct"):
        yield Finding(True, "has direct gets off: no payload can be read", "allow_direct", "--allow-direct")
    history = config.get("max_msgs_per_subject", -1)
    if history > 0:
        text = f"keeps {history} parts of a payload, and must keep them all"
        yield Finding(True, text, "max_msgs_per_subject", "--max-msgs-per-subject=-1")


def _weaker_for_objects(config: Mapping[str, Any], retention: float) -> Iterator[Finding]:
    full = "a full store refuses the payloads of settles"
    if config.get("storage") == "memory":
        yield Finding(False, "is held in memory: payloads are gone with the server", "storage", None)
    if config.get("max_bytes", -1) > 0:
        yield Finding(False, f"has max_bytes: {full}", "max_bytes", "--max-bytes=-1")
    if config.get("max_msgs", -1) > 0:
        yield Finding(False, f"has max_msgs: {full}", "max_msgs", "--max-msgs=-1")
    if config.get("max_msg_size", -1) > 0:
        yield Finding(False, "has max_msg_size: it may refuse payloads", "max_msg_size", "--max-msg-size=-1")
    if config.get("discard") != "new":
        text = "discards old payloads when it is full (discard is not new)"
        yield Finding(False, text, "discard", "--discard=new")
    age = config.get("max_age", 0) / _NANOSECONDS
    if 0 < age < (retention or inf):
        longer = f"{ceil((retention + _DAY) / 3600)}h" if retention else "0"
        text = f"drops payloads after {age:g} s, before the receipts that name them"
        yield Finding(False, text, "max_age", f"--max-age={longer}")
    yield from _asynchronous(config)


def _asynchronous(config: Mapping[str, Any]) -> Iterator[Finding]:
    if config.get("persist_mode") == "async":
        yield Finding(False, "acknowledges before it writes (persist_mode async)", "persist_mode", None)
