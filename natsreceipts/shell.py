"""Commands that are printed to be copied into a shell. Pure."""

from __future__ import annotations

__all__ = ["quoted_key", "with_key"]


def quoted_key(key: str) -> str:
    """A KV key as a word of a shell: zsh takes one that begins with ``=`` for the path of a command."""
    return f"'{key}'" if key.startswith("=") else key


def with_key(command: str, key: str, flags: str = "") -> str:
    """A command on a key: one that begins with ``-`` would be taken for a flag, unless ``--`` stands before it."""
    said = (command, flags, "--", key) if key.startswith("-") else (command, quoted_key(key), flags)
    return " ".join(filter(None, said))
