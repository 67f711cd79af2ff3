"""Keys for sealed payloads: AES-256-GCM, one key per tenant (extra ``cipher``: cryptography). See docs/cipher.md.

cipher = Cipher({"acme": [Key("2027-01", secret)]})
async with natsreceipts.connect(url, cipher=cipher, digest=hmac_digest(pepper)) as toolkit: ...
"""

from __future__ import annotations

import base64
import binascii
import importlib
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pydantic_core import from_json

from natsreceipts.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["Cipher", "Key", "Keys", "key_file", "new_key"]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECRET = 32
_NONCE = 12


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a tenant's: its id, which stands beside what it seals, and 32 random bytes.

    Each seal has a random nonce of 96 bits, so one key is good for 2^32 seals: change it long before that. Raises
    InvalidSetting.
    """

    id: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.id), str) or not _ID.fullmatch(self.id):
            raise InvalidSetting(f"key id {self.id!r}: use 1 to 64 letters, digits, '.', '_' and '-'")
        if not isinstance(cast("object", self.secret), bytes) or len(self.secret) != _SECRET:
            raise InvalidSetting(f"key {self.id}: its secret must be {_SECRET} bytes: new_key makes one")

    def seal(self, data: bytes, bound_to: bytes) -> bytes:
        """Nonce, ciphertext and tag."""
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher().encrypt(nonce, data, bound_to)

    def open(self, sealed: bytes, bound_to: bytes) -> bytes:
        """What was sealed. Raises ValueError where it does not open."""
        from cryptography.exceptions import InvalidTag

        if len(sealed) < _NONCE:
            raise ValueError("it is too short")
        try:
            return self._cipher().decrypt(sealed[:_NONCE], sealed[_NONCE:], bound_to)
        except InvalidTag as error:
            raise ValueError("it does not open with this key, here") from error

    def _cipher(self) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self.secret)


Keys: TypeAlias = "Mapping[str, Sequence[Key]] | Callable[[str, str | None], Key | Awaitable[Key | None] | None]"
"""The keys of each tenant, the first of them the one that is sealed with; or a function, async or not, of a tenant
and a key's id (None: the one to seal with now)."""


def new_key(key_id: str) -> Key:
    """A key of 32 random bytes. Raises InvalidSetting for an id that cannot be used."""
    return Key(key_id, os.urandom(_SECRET))


class Cipher:
    """Seals what a tenant's calls and sessions leave in NATS, with keys that are never there.

    ``keys``: see `Keys`. They are asked for whenever something is sealed or opened, and not kept: a key that is taken
    out is gone at once, and all that it has sealed with it. A function that asks a service does well to remember
    answers for a while. Raises InvalidSetting, and ImportError without cryptography.
    """

    def __init__(self, keys: Keys) -> None:
        importlib.import_module("cryptography")  # missing, it is missed now and not in a call
        self._find: Callable[[str, str | None], Any]
        if isinstance(keys, Mapping):
            tenants = cast("Mapping[str, Sequence[Key]]", keys)
            self._find = lambda tenant, key_id: _chosen(tenants.get(tenant, ()), key_id)
        elif callable(keys):
            self._find = keys
        else:
            raise InvalidSetting(f"keys={type(keys).__name__}: use a mapping of tenants to lists of Key, or a function")

    async def current(self, tenant: str) -> Key | None:
        """The key that is sealed with now."""
        return await self._asked(tenant, None)

    async def named(self, tenant: str, key_id: str) -> Key | None:
        """The key of that id."""
        found = await self._asked(tenant, key_id)
        return found if found is not None and found.id == key_id else None

    async def _asked(self, tenant: str, key_id: str | None) -> Key | None:
        found = self._find(tenant, key_id)
        if inspect.isawaitable(found):
            found = await found
        if found is not None and not isinstance(found, Key):
            raise InvalidSetting(f"keys= gave {type(found).__name__} for tenant {tenant!r}: use a Key, or None")
        return found


def _chosen(keys: Sequence[Key], key_id: str | None) -> Key | None:
    if not isinstance(keys, list | tuple):
        raise InvalidSetting("keys=: use a list of Key for each tenant, the one to seal with first")
    return next((key for key in keys if key_id in (None, key.id)), None)


def key_file(path: str | os.PathLike[str]) -> Cipher:
    """The keys in a JSON file: ``{"<tenant>": {"<key id>": "<32 bytes in base64>", …}, …}``.

    The first one of a tenant's is sealed with. It is read once. Raises InvalidSetting for what is not such a file, and
    OSError.
    """
    try:
        tenants = cast("object", from_json(Path(path).read_bytes()))
        if not isinstance(tenants, dict):
            raise TypeError("it holds no object")
        found: dict[str, list[Key]] = {}
        for tenant, keys in cast("dict[str, dict[str, str]]", tenants).items():
            found[tenant] = [Key(name, base64.b64decode(text, validate=True)) for name, text in keys.items()]
    except (ValueError, TypeError, AttributeError, binascii.Error) as error:
        # Not the error itself: it may show what it could not read.
        raise InvalidSetting(f"key file {os.fspath(path)!r} cannot be read ({type(error).__name__})") from None
    return Cipher(found)
