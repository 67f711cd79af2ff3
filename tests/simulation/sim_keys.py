"""The names of the calls that are made here."""

from __future__ import annotations

from typing import Any

from natsreceipts.identity import args_hash, key_token

__all__ = ["RUN", "TENANT", "TOOL", "arguments", "kv_key"]

TENANT, RUN, TOOL = "acme", "order", "send"


def arguments(number: int) -> dict[str, Any]:
    """The arguments of the call that a plan names by a number."""
    return {"to": number}


_KEYS: dict[int, str] = {}


def kv_key(number: int) -> str:
    """The KV key of that call."""
    if number not in _KEYS:
        parts = (key_token(TENANT), key_token(RUN), key_token(TOOL), args_hash(arguments(number)))
        _KEYS[number] = ".".join(parts)
    return _KEYS[number]
