"""How the command line connects, as the ``nats`` CLI does: by flags, else the environment, else a context.

Each setting is taken from the nearest of the three that has it; credentials are taken together, so that those of a
context are never mixed with those of a flag.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import ssl
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from natsreceipts.cli import contexts
from natsreceipts.cli.exits import Exit, Failure
from natsreceipts.errors import brief

if TYPE_CHECKING:
    from collections.abc import Mapping

    from natsreceipts.cipher import Cipher

__all__ = ["Target", "cipher_of", "connection_flags", "target_of"]


def connection_flags(  # pyright: ignore[reportUnusedParameter] - only its signature is used
    server: Annotated[
        str | None, typer.Option("--server", "-s", help="Server URLs, with commas between. [NATS_URL]", metavar="URL")
    ] = None,
    user: Annotated[str | None, typer.Option(help="User name, or a token. [NATS_USER]")] = None,
    password: Annotated[str | None, typer.Option(help="Password. [NATS_PASSWORD]")] = None,
    token: Annotated[str | None, typer.Option(help="Token. [NATS_TOKEN]")] = None,
    creds: Annotated[str | None, typer.Option(help="Credentials file. [NATS_CREDS]", metavar="FILE")] = None,
    nkey: Annotated[str | None, typer.Option(help="File of an NKey seed. [NATS_NKEY]", metavar="FILE")] = None,
    jwt: Annotated[str | None, typer.Option(help="User JWT, with --seed. [NATS_JWT]")] = None,
    seed: Annotated[str | None, typer.Option(help="Seed of the JWT's user. [NATS_SEED]")] = None,
    tlscert: Annotated[str | None, typer.Option(help="TLS certificate. [NATS_CERT]", metavar="FILE")] = None,
    tlskey: Annotated[str | None, typer.Option(help="Its private key. [NATS_KEY]", metavar="FILE")] = None,
    tlsca: Annotated[str | None, typer.Option(help="TLS authorities. [NATS_CA]", metavar="FILE")] = None,
    tlsfirst: Annotated[bool, typer.Option("--tlsfirst", help="TLS before the server's greeting.")] = False,
    inbox_prefix: Annotated[str | None, typer.Option(help="Prefix of reply inboxes.", metavar="PREFIX")] = None,
    timeout: Annotated[
        str | None, typer.Option(help="How long to wait for the server, 5s by default. [NATS_TIMEOUT]", metavar="TIME")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="A context of the nats CLI; else the selected one. [NATS_CONTEXT]",
            metavar="NAME",
            autocompletion=contexts.known,
        ),
    ] = None,
    no_context: Annotated[bool, typer.Option("--no-context", help="Do not use the selected context.")] = False,
    key_file: Annotated[
        str | None,
        typer.Option(
            help="Keys of sealed payloads: docs/cipher.md. [NATSRECEIPTS_KEY_FILE]", metavar="FILE", show_default=False
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Prefix of the buckets, as in connect(namespace=…).")] = "",
) -> None:
    """Every verb takes these."""


for _parameter in inspect.signature(connection_flags, eval_str=True).parameters.values():
    _parameter.annotation.__metadata__[0].rich_help_panel = "Connection, as for the nats CLI"

_NAMES = {
    "server": ("url", "NATS_URL"),
    "user": ("user", "NATS_USER"),
    "password": ("password", "NATS_PASSWORD"),
    "token": ("token", "NATS_TOKEN"),
    "creds": ("creds", "NATS_CREDS"),
    "nkey": ("nkey", "NATS_NKEY"),
    "jwt": ("user_jwt", "NATS_JWT"),
    "seed": ("user_seed", "NATS_SEED"),
    "tlscert": ("cert", "NATS_CERT"),
    "tlskey": ("key", "NATS_KEY"),
    "tlsca": ("ca", "NATS_CA"),
    "tlsfirst": ("tls_first", ""),
    "inbox_prefix": ("inbox_prefix", ""),
    "timeout": ("timeout", "NATS_TIMEOUT"),
}
"""Flag → its name in a context file, and in the environment."""

_KINDS = (("user", "password"), ("creds",), ("nkey",), ("user_jwt", "user_seed"), ("token",))
"""Kinds of credentials."""
_CERTIFICATE = ("cert", "key")
_GROUPED = {name for group in (*_KINDS, _CERTIFICATE) for name in group}

_Settings: TypeAlias = dict[str, str]
"""Under the names of a context file."""


class Target(NamedTuple):
    """Where to connect, how long to try, and nats-py's settings for it."""

    servers: list[str]
    timeout: float
    settings: dict[str, Any]


def target_of(flags: Mapping[str, Any]) -> Target:
    """Where the flags, the environment and the context say to connect. Raises `Failure`."""
    settings = _merged(*_layers(flags))
    servers = [url.strip() for url in settings.get("url", "nats://127.0.0.1:4222").split(",") if url.strip()]
    connection = {**_credentials(settings), **_tls(settings)}
    if prefix := settings.get("inbox_prefix"):
        connection["inbox_prefix"] = prefix
    return Target(servers, _seconds(settings.get("timeout", "5s")), connection)


def cipher_of(flags: Mapping[str, Any]) -> Cipher | None:
    """The keys that ``--key-file`` or the environment names; None where neither does. Raises `Failure`."""
    path = flags["key_file"] or os.environ.get("NATSRECEIPTS_KEY_FILE")
    if not path:
        return None
    if importlib.util.find_spec("cryptography") is None:
        raise Failure("a key file needs cryptography, which is missing. Run: pip install 'natsreceipts[cipher]'")
    from natsreceipts.cipher import key_file

    try:
        return key_file(path)
    except OSError as error:
        raise Failure(f"key file {path!r} cannot be read: {error.strerror}", Exit.USAGE) from error


def _layers(flags: Mapping[str, Any]) -> tuple[_Settings, _Settings, _Settings]:
    given = {
        setting: "true" if flags[flag] is True else flags[flag] for flag, (setting, _) in _NAMES.items() if flags[flag]
    }
    if os.environ.get("NATS_SOCKS_PROXY"):
        raise Failure("NATS_SOCKS_PROXY is set, and natsreceipts cannot use a SOCKS proxy: unset it", Exit.USAGE)
    around = {setting: os.environ[name] for setting, name in _NAMES.values() if name and os.environ.get(name)}
    if flags["no_context"]:
        return given, around, {}
    name = flags["context"] or os.environ.get("NATS_CONTEXT") or contexts.selected()
    return given, around, contexts.load(name) if name else {}


def _merged(given: _Settings, around: _Settings, context: _Settings) -> _Settings:
    """The nearest of each setting; of credentials the nearest kind, which flag and environment may share."""
    credentials: _Settings = {}
    for layer in (given, around):
        kinds = [kind for kind in _KINDS if not credentials or credentials.keys() & set(kind)]
        credentials = {name: layer[name] for kind in kinds for name in kind if name in layer} | credentials
    if "user" in credentials and "password" not in credentials:
        credentials = {"token": credentials["user"]}  # as the nats CLI takes it
    address = given.get("url") or around.get("url") or ""
    if not credentials and "@" not in address:
        credentials = {name: context[name] for kind in _KINDS for name in kind if name in context}
    nearest = next((layer for layer in (given, around) if layer.keys() & set(_CERTIFICATE)), context)
    certificate = {name: nearest[name] for name in _CERTIFICATE if name in nearest}
    plain = {name: value for name, value in {**context, **around, **given}.items() if name not in _GROUPED}
    return {**plain, **credentials, **certificate}


def _credentials(settings: _Settings) -> dict[str, Any]:
    """nats-py's settings. Of several kinds in one place the first of the ``nats`` CLI's order counts."""
    found: dict[str, Any] = {}
    if user := settings.get("user"):
        password = contexts.secret("the password", settings.get("password", ""), literal=True)
        found = {"user": user, "password": password}
    elif creds := settings.get("creds"):
        found = {"user_credentials": _raw(contexts.secret("the credentials", creds, literal=False))}
    elif nkey := settings.get("nkey"):
        found = {"nkeys_seed_str": _seed_in(contexts.secret("the nkey", nkey, literal=False))}
    elif jwt := settings.get("user_jwt"):
        if not settings.get("user_seed"):
            raise Failure("a user JWT needs its seed to sign with: give --seed or NATS_SEED too", Exit.USAGE)
        seed = contexts.secret("the seed", settings["user_seed"], literal=True).strip()
        found = {
            "user_credentials": _raw(_DECORATED.format(contexts.secret("the JWT", jwt, literal=True).strip(), seed))
        }
    if found and "user" not in found:
        _need_nkeys()
    if token := settings.get("token"):
        found["token"] = contexts.secret("the token", token, literal=True)
    return found


_DECORATED = """-----BEGIN NATS USER JWT-----
{}
------END NATS USER JWT------
-----BEGIN USER NKEY SEED-----
{}
------END USER NKEY SEED------
"""


def _raw(text: str) -> object:
    from nats.aio.client import RawCredentials

    if "BEGIN NATS USER JWT" not in text or not _SEED.search(text):
        raise Failure(
            "the credentials hold no user JWT and seed: use a file as `nsc generate creds` makes it", Exit.USAGE
        )
    return RawCredentials(text)


_SEED = re.compile(r"^\s*(S[A-Z2-7]{40,})\s*$", re.MULTILINE)


def _seed_in(text: str) -> str:
    if (match := _SEED.search(text)) is None:
        raise Failure("the nkey file holds no seed: use a file as `nk -gen user` makes it", Exit.USAGE)
    return match[1]


def _need_nkeys() -> None:
    if importlib.util.find_spec("nkeys") is None:
        raise Failure("these credentials need nkeys, which is missing. Run: pip install 'natsreceipts[cli]'")


def _tls(settings: _Settings) -> dict[str, Any]:
    cert, key, ca = (
        contexts.expanded(settings.get(name, "")) if settings.get(name) else "" for name in ("cert", "key", "ca")
    )
    found: dict[str, Any] = {}
    if bool(cert) != bool(key):
        raise Failure(
            "a TLS certificate needs its key and the key its certificate: give --tlscert and --tlskey", Exit.USAGE
        )
    if cert or ca:
        try:
            secured = ssl.create_default_context(cafile=ca or None)
            if cert:
                secured.load_cert_chain(cert, key)
        except (OSError, ValueError) as error:
            raise Failure(
                f"the TLS files cannot be used ({', '.join(filter(None, (cert, key, ca)))}): {error}", Exit.USAGE
            ) from error
        found["tls"] = secured
    if settings.get("tls_first") == "true":
        found["tls_handshake_first"] = True
    return found


_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+|\d+(?:\.\d+)?")
_LONGEST = 86_400.0
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def _seconds(text: str) -> float:
    seconds = _sum(text) if _DURATION.fullmatch(text) else 0.0
    if not 0 < seconds <= _LONGEST:
        raise Failure(f"timeout {brief(text)}: use a time like 5s, 500ms or 1m, up to 24h", Exit.USAGE)
    return seconds


def _sum(text: str) -> float:
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text))
