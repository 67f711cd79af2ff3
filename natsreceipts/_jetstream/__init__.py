"""The only package that knows nats-py: every trap of the server and of the client lives in here."""

from __future__ import annotations

from natsreceipts._jetstream.bucket import JetStreamBucket
from natsreceipts._jetstream.connection import Connection, opened
from natsreceipts._jetstream.seam import (
    Accepted,
    Bucket,
    Clock,
    Conflict,
    Entry,
    Hint,
    Outcome,
    Refused,
    RivalInFlight,
    Unknown,
)
from natsreceipts._jetstream.settings import MIN_HISTORY, BucketSpec, Finding, bind, findings, provision

__all__ = [
    "MIN_HISTORY",
    "Accepted",
    "Bucket",
    "BucketSpec",
    "Clock",
    "Conflict",
    "Connection",
    "Entry",
    "Finding",
    "Hint",
    "JetStreamBucket",
    "Outcome",
    "Refused",
    "RivalInFlight",
    "Unknown",
    "bind",
    "findings",
    "opened",
    "provision",
]
