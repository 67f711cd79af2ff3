"""The only package that knows nats-py: every trap of the server and of the client lives in here."""

from __future__ import annotations

from natsreceipts._jetstream.bucket import JetStreamBucket
from natsreceipts._jetstream.connection import Connection, opened
from natsreceipts._jetstream.findings import ANEW, MIN_HISTORY, Finding, edit_of, findings, objects_findings
from natsreceipts._jetstream.objects import JetStreamObjects, ObjectMeta
from natsreceipts._jetstream.partitions import PartitionedBucket, partition_of
from natsreceipts._jetstream.probes import subject_pages, try_publish, try_request, try_request_many
from natsreceipts._jetstream.seam import (
    Accepted,
    Bucket,
    Clock,
    Conflict,
    Entry,
    Hint,
    ObjectInfo,
    Objects,
    Outcome,
    Refused,
    RivalInFlight,
    Unknown,
)
from natsreceipts._jetstream.servers import checked_servers
from natsreceipts._jetstream.settings import (
    BucketSpec,
    bind,
    bind_objects,
    bucket_of,
    config_of,
    info_of,
    make,
    objects_config,
    partitions_in,
    stream_config,
)

__all__ = [
    "ANEW",
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
    "JetStreamObjects",
    "ObjectInfo",
    "ObjectMeta",
    "Objects",
    "Outcome",
    "PartitionedBucket",
    "Refused",
    "RivalInFlight",
    "Unknown",
    "bind",
    "bind_objects",
    "bucket_of",
    "checked_servers",
    "config_of",
    "edit_of",
    "findings",
    "info_of",
    "make",
    "objects_config",
    "objects_findings",
    "opened",
    "partition_of",
    "partitions_in",
    "stream_config",
    "subject_pages",
    "try_publish",
    "try_request",
    "try_request_many",
]
