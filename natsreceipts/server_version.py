"""The oldest nats-server that answers all that the toolkit asks for."""

from __future__ import annotations

import re

__all__ = ["OLDEST_SERVER", "is_old", "version_in"]

OLDEST_SERVER = (2, 11)
"""Batched direct gets (``multi_last``, and batches by subject) came with 2.11; 2.10 refuses or ignores them."""


def version_in(text: str) -> tuple[int, int, int] | None:
    """The version that a text names, as ``v2.11.4`` or ``2.12.0-RC.1``; None where it names none."""
    match = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match is not None else None


def is_old(version: str) -> bool:
    """Whether a server of this version lacks what the toolkit asks for. What names no version is not."""
    numbers = version_in(version)
    return numbers is not None and numbers[:2] < OLDEST_SERVER
