"""The place that a run of the program works at, and commands to be copied that lead back to it."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Place"]

_BEGIN = (
    r"(?<![\w./-])(?:(?P<ours>natsreceipts )(?=(?:up|doctor|receipts|notices|sessions)\b)"
    r"|(?P<theirs>nats )(?=(?:kv|object|stream|consumer|account|backup|server) ))"
)
"""Where commands begin that connect to NATS: the program's name, and a verb behind it."""

_COMMANDS = re.compile(_BEGIN + r"(?P<rest>(?:(?!`|, and |; |, for each|(?<![\w./-])(?:natsreceipts|nats) )[^\n])*)")
"""Commands in a text, up to where they end in it."""

_ALONE = re.compile(_BEGIN + r"(?P<rest>.*)", re.DOTALL)

_PLAIN = ("tlscert", "tlskey", "tlsca", "inbox_prefix", "context")
_FILES = ("creds", "nkey")
_SECRETS = ("password", "token", "jwt", "seed")


class Place:
    """Where the flags of a run say to connect, as flags of a command: all of them, but no secret."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        said: list[tuple[str, str]] = []
        hidden: set[str] = {name for name in _SECRETS if flags.get(name)}
        user: str | None = flags.get("user")
        if server := flags.get("server"):
            urls, found = _without_credentials(server)
            said.append(("server", urls))
            user = user or found.get("user")
            hidden |= {name for name in ("password", "token") if name in found}
        if user and not flags.get("token") and (flags.get("password") or "password" in hidden):
            said.append(("user", user))
        elif user:
            hidden.add("token")  # a user alone is one
        for name in _FILES:
            if (value := flags.get(name)) and not value.startswith("data:"):
                said.append((name, value))
            elif value:
                hidden.add(name)
        said += [(name, flags[name]) for name in _PLAIN if flags.get(name)]
        words = [f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in said]
        words += [f"--{name.replace('_', '-')}" for name in ("tlsfirst", "no_context") if flags.get(name)]
        self._theirs = "".join(f"{word} " for word in words)
        namespace = flags.get("namespace")
        self._namespace = f"--namespace {shlex.quote(namespace)}" if namespace else ""
        self._ours = self._theirs + (f"{self._namespace} " if namespace else "")
        self.unsaid = tuple(f"NATS_{name.upper()}" for name in (*_SECRETS, *_FILES) if name in hidden)
        """Variables of the environment that hold what the commands need and do not show."""

    def in_commands(self, text: str) -> str:
        """A text whose commands lead to this place; it says what they need besides, where that is a secret."""
        placed = self._placed(text)
        return f"{placed} ({self._needs})" if self.unsaid and _COMMANDS.search(text) else placed

    def in_all(self, lines: Iterable[str]) -> list[str]:
        """Lines whose commands lead to this place, and one more where they need a secret besides."""
        before = list(lines)
        placed = [self._placed(line) for line in before]
        if self.unsaid and any(_COMMANDS.search(line) for line in before):
            placed.append(f"{self._needs[0].upper()}{self._needs[1:]}.")
        return placed

    @property
    def _needs(self) -> str:
        one = len(self.unsaid) == 1
        names = " and ".join(self.unsaid)
        return f"set {names} for that: {'it is' if one else 'they are'} not printed"

    def _placed(self, text: str) -> str:
        alone = text.startswith("$ ")  # whatever else stands in such a line is a word of its command
        return (_ALONE if alone else _COMMANDS).sub(self._at, text, count=1 if alone else 0)

    def _at(self, command: re.Match[str]) -> str:
        rest = command["rest"]
        if command["theirs"]:
            return command["theirs"] + self._theirs + rest
        if self._namespace and (said := f" {self._namespace}") in rest:
            rest = rest.replace(said, "", 1)  # it says so itself, behind its verb
        elif "--namespace " in rest:
            return command["ours"] + self._theirs + rest
        return command["ours"] + self._ours + rest


def _without_credentials(servers: str) -> tuple[str, dict[str, str]]:
    """URLs without what is before their ``@``, and that."""
    shown: list[str] = []
    found: dict[str, str] = {}
    for server in servers.split(","):
        url = server.strip()
        scheme, separator, rest = url.rpartition("://")
        credentials, at, host = rest.rpartition("@")
        shown.append(f"{scheme}{separator}{host}")
        if at:
            user, colon, password = credentials.partition(":")
            found |= {"user": unquote(user), "password": password} if colon else {"token": user}
    return ",".join(shown), found
