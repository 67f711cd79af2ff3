"""The named contexts of the ``nats`` CLI (ADR-21), read and never written.

``$XDG_CONFIG_HOME/nats/context/NAME.json`` (``~/.config`` without it), and in ``context.txt`` beside that folder the
name of the selected one. A name that ends in ``.json`` and is a file is taken as that file.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Any

from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.cli.given_json import given_json

__all__ = ["expanded", "known", "load", "secret", "selected"]

_REFUSED = {
    "nsc": "a lookup in nsc",
    "socks_proxy": "a SOCKS proxy",
    "jetstream_domain": "a JetStream domain",
    "jetstream_api_prefix": "a JetStream API prefix",
    "windows_cert_store": "the Windows certificate store",
}
"""What the toolkit's connection cannot do. Ignoring it would lead to another server or account."""


def _root() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "nats"


def known() -> list[str]:
    """The names of the contexts that are there."""
    return sorted(path.stem for path in (_root() / "context").glob("*.json"))


def selected() -> str:
    """The name of the selected context; empty where none is."""
    try:
        return (_root() / "context.txt").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def load(name: str) -> dict[str, str]:
    """A context's settings under their names in the file, without those that are empty. Raises `Failure`."""
    path = Path(name)
    if not (name.endswith(".json") and _is_file(path)):
        if ".." in name or "/" in name or "\\" in name:
            raise Failure(f"context {name!r}: use a name of `nats context ls`, or a .json file", Exit.USAGE)
        path = _root() / "context" / f"{name}.json"
    try:
        found: Any = given_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(known()) or "none"
        raise Failure(
            f"context {name!r} is unknown ({path} is not there; known: {there}): see `nats context ls`", Exit.USAGE
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Failure(f"context {name!r} cannot be read from {path}: {error}", Exit.USAGE) from error
    if not isinstance(found, dict):
        raise Failure(f"context {name!r} cannot be read from {path}: it is no JSON object", Exit.USAGE)
    settings: dict[str, Any] = found  # pyright: ignore[reportUnknownVariableType]
    for field, what in _REFUSED.items():
        if settings.get(field):
            raise Failure(
                f"context {name!r} asks for {what} ({field}), which natsreceipts cannot do: use another context, or "
                f"--no-context with --server and credentials",
                Exit.USAGE,
            )
    for field, value in settings.items():
        if isinstance(value, dict | list):
            raise Failure(f"context {name!r}: {field} in {path} is no text, number, true or false", Exit.USAGE)
    return {field: "true" if value is True else str(value) for field, value in settings.items() if value}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def expanded(path: str) -> str:
    """A path with ``$VAR`` and ``~`` filled in, without ``file://``."""
    return str(Path(os.path.expandvars(path.removeprefix("file://"))).expanduser())


def secret(what: str, reference: str, *, literal: bool) -> str:
    """What a setting holds or refers to: ``file://``, ``env://`` and ``data:`` are looked up, as the ``nats`` CLI does.

    Anything else is the secret itself (``literal``), or a file. Raises `Failure`.
    """
    scheme, _, rest = reference.partition(":")
    try:
        if scheme == "env" and rest.startswith("//"):
            return os.environ[rest[2:]]
        if scheme == "data":
            header, comma, text = rest.partition(",")
            if not comma or "base64" not in header.split(";"):
                raise ValueError("it is not data:;base64,…")
            return base64.b64decode(text, validate=True).decode()
        if scheme in ("op", "nsc") and rest.startswith("//"):
            raise Failure(f"{what}: {scheme}:// references are not supported: use a file, env:// or data:", Exit.USAGE)
        if literal and not reference.startswith("file://"):
            return reference
        return Path(expanded(reference)).read_text(encoding="utf-8")
    except KeyError as error:
        raise Failure(f"{what}: the environment has no variable {error.args[0]}", Exit.USAGE) from error
    except (OSError, ValueError, RuntimeError, binascii.Error) as error:  # RuntimeError: ~ of a user that is not there
        raise Failure(f"{what} cannot be read: {error}", Exit.USAGE) from error
