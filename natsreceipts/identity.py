"""What identifies a call: canonical JSON, its digest, and the key made of both. Pure.

A call is ``(tenant, run, tool, arguments)``. Everything here is stable for ever: a hash or a key that
came out differently tomorrow would orphan every receipt written today. ``tests/vectors`` pins it down
for implementations in other languages.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, pairwise, repeat
from json.encoder import encode_basestring
from operator import length_hint
from typing import Any, Final, TypeAlias, cast

from natsreceipts.errors import InvalidName, InvalidSetting, NotCanonical

__all__ = [
    "MAX_DEPTH",
    "MAX_TOKEN",
    "Digest",
    "ReceiptKey",
    "args_hash",
    "canonical_json",
    "hmac_digest",
    "key_token",
    "name_from_token",
    "sha256_hex",
    "split_kv_key",
]

MAX_DEPTH: Final = 128
"""Containers inside one another that canonical JSON accepts, the outermost included."""

MAX_TOKEN: Final = 180
"""Characters of the longest readable token; the token of a name that needs more is a hash."""

Default: TypeAlias = Callable[[object], object]
Digest: TypeAlias = Callable[[bytes], str]
"""Bytes in, exactly 64 lower-case hex digits out; the same for ever."""


# ---------------------------------------------------------------- canonical JSON


def canonical_json(value: object, *, default: Default | None = None) -> str:
    """Return the one JSON text that stands for ``value``, the text that ECMAScript would write.

    Object keys are sorted by UTF-16 code unit, there is no white space, floats look as JavaScript
    prints them (ECMA-262, Number::toString), strings as JSON.stringify escapes them, with lone
    surrogates as ``\\udxxx``, so that the text always encodes as UTF-8. Two halves of a surrogate
    pair are the one character that they are in JavaScript. Ints keep their exact digits.

    Accepted are dict with str keys, list, tuple, str, int, float, bool and None, of exactly these
    types. Any other value goes to ``default``, whose result is looked at in its turn.

    Raises NotCanonical, with the path of the offender, for everything else: another type of value or
    key, NaN and infinities, ints of more digits than Python converts, keys that are equal once they
    are UTF-16, cycles, more than 128 containers inside one another, and a ``default`` that raises
    TypeError or ValueError or does not come to an end. Other errors of ``default`` pass unchanged.
    """
    text = _write(value, default)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return _well_formed(text)
    return text


def _write_float(number: float) -> str:
    text = float.__repr__(number)
    if text.endswith(".0"):
        return text[:-2] if text != "-0.0" else "0"
    if "n" in text:
        raise ValueError("NaN and the infinities are not JSON")
    if "e" not in text:
        return text
    # The shortest digits that read back as the same float are the same in both languages; where the
    # point goes differs. `point` is what ECMA-262 calls n: the value is 0.DIGITS times ten to it.
    mantissa, _, exponent = text.partition("e")
    sign, mantissa = ("-", mantissa[1:]) if mantissa[0] == "-" else ("", mantissa)
    digits = mantissa.replace(".", "")
    point = int(exponent) + 1
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    return f"{sign}{mantissa}e{point - 1:+d}"


# Looked up by exact type: a subclass may carry state or override the very methods used here.
_SCALARS: Final[dict[type, Callable[[Any], str]]] = {
    str: encode_basestring,
    int: int.__repr__,
    float: _write_float,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}
_CONTAINERS: Final = frozenset({dict, list, tuple})
_ONLY_STR: Final = frozenset({str})

# A container that is being written: what is still to come, as (text before it, value); the text after
# it; the container; the keys in order (None for an array); and the iterator that tells the position.
_Frame: TypeAlias = tuple[Iterator[tuple[str, object]], str, object, list[str] | None, Iterator[object]]


def _write(value: object, default: Default | None) -> str:
    # One loop with a stack of its own: recursion would leave the depth that is accepted to whatever
    # the caller has left of Python's stack. Surrogates come out raw here.
    parts: list[str] = []
    append = parts.append
    scalar = _SCALARS.get
    stack: list[_Frame] = []
    on_path: set[int] = set()
    source: Iterator[object] = iter((value,))
    frame: _Frame = (zip(("",), source, strict=False), "", None, None, source)
    while True:
        for before, item in frame[0]:
            kind = type(item)
            write = scalar(kind)
            if write is None and kind not in _CONTAINERS:
                item = _converted(item, default, stack, frame)  # noqa: PLW2901
                kind = type(item)
                write = scalar(kind)
            if write is not None:
                try:
                    append(before + write(item))
                except ValueError as error:
                    raise NotCanonical(_path(stack, frame), str(error)) from error
                continue
            if id(item) in on_path:
                raise NotCanonical(_path(stack, frame), "it contains itself")
            if len(stack) == MAX_DEPTH:
                reason = f"more than {MAX_DEPTH} containers inside one another"
                raise NotCanonical(_path(stack, frame), reason)
            if not item:
                append(before + ("{}" if kind is dict else "[]"))
            elif kind is not dict and _ONLY_STR.issuperset(map(type, cast("list[str]", item))):
                # Lists of addresses, ids and tags are common, and this way they cost a third.
                append(f"{before}[{','.join(map(encode_basestring, cast('list[str]', item)))}]")
            else:
                append(before)
                on_path.add(id(item))
                stack.append(frame)
                frame = _open_object(item, stack) if kind is dict else _open_array(item)
                break
        else:
            if not stack:
                return "".join(parts)
            append(frame[1])
            on_path.remove(id(frame[2]))
            frame = stack.pop()


def _open_array(item: object) -> _Frame:
    source = iter(cast("list[object]", item))
    return zip(chain("[", repeat(",")), source, strict=False), "]", item, None, source


def _open_object(item: object, stack: list[_Frame]) -> _Frame:
    mapping = cast("dict[str, object]", item)
    for key in mapping:
        if type(key) is not str:
            kind = type(key).__name__
            raise NotCanonical(_path(stack), f"one of its keys is of type {kind}, and keys are str")
    keys = sorted(mapping)
    if not "".join(keys).isascii():
        keys.sort(key=_utf16)
        for one, next_one in pairwise(keys):
            if _utf16(one) == _utf16(next_one):
                shown = _well_formed(encode_basestring(one))
                raise NotCanonical(_path(stack), f"two of its keys are the same in UTF-16: {shown}")
    before = [f",{encode_basestring(key)}:" for key in keys]
    before[0] = "{" + before[0][1:]
    source = iter([mapping[key] for key in keys])
    return zip(before, source, strict=True), "}", mapping, keys, source


def _converted(item: object, default: Default | None, stack: list[_Frame], frame: _Frame) -> object:
    kind = type(item).__name__
    if default is None:
        raise NotCanonical(_path(stack, frame), f"{kind} has no canonical JSON form")
    for _ in range(MAX_DEPTH):
        try:
            result = default(item)
        except (TypeError, ValueError) as error:
            raise NotCanonical(_path(stack, frame), f"default= has no form for {kind}: {error}") from error
        if type(result) in _SCALARS or type(result) in _CONTAINERS:
            return result
        item = result
    raise NotCanonical(_path(stack, frame), f"default= does not turn {kind} into JSON")


_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _path(stack: list[_Frame], frame: _Frame | None = None) -> str:
    # Only errors need positions, so they are not kept: an iterator knows how much is left in it.
    # The first frame is the one around the whole value and adds nothing.
    steps = ["$"]
    for _, _, container, keys, source in (*stack, frame)[1:] if frame else stack[1:]:
        index = len(cast("list[object]", container)) - length_hint(source) - 1
        if keys is None:
            steps.append(f"[{index}]")
        elif _PLAIN_KEY.fullmatch(keys[index]):
            steps.append(f".{keys[index]}")
        else:
            steps.append(f"[{encode_basestring(keys[index])}]")
    return _well_formed("".join(steps))


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _well_formed(text: str) -> str:
    # Works on a whole JSON text: halves can only meet inside one string, as quotes stand between two.
    joined = _utf16(text).decode("utf-16-be", "surrogatepass")
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", joined)


# ---------------------------------------------------------------- digests


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def hmac_digest(secret: bytes) -> Digest:
    """Return a digest that only holders of ``secret`` can compute: HMAC-SHA-256, RFC 2104.

    For arguments that can be guessed: whoever reads the bucket can test a guess against a plain hash.
    Raises InvalidSetting for an empty secret or one that is not bytes.
    """
    if not isinstance(cast("object", secret), bytes) or not secret:
        raise InvalidSetting("the secret of hmac_digest must be bytes, and at least one of them")
    key = bytes(secret)

    def digest(data: bytes) -> str:
        return hmac.digest(key, data, "sha256").hex()

    return digest


_HEX64: Final = re.compile(r"[0-9a-f]{64}")


def args_hash(
    args: object,
    *,
    digest: Digest = sha256_hex,
    distinct: str | None = None,
    default: Default | None = None,
) -> str:
    """Return ``digest`` over the UTF-8 of the canonical JSON of ``args``: 64 lower-case hex digits.

    With ``distinct``, the bytes are the canonical JSON, a NUL and ``distinct``: the host's way to say
    that two equal calls of one run are two. Canonical JSON holds no NUL, so nothing collides.

    Raises NotCanonical as :func:`canonical_json` does, InvalidName for a ``distinct`` that is not a
    str, is empty or holds a surrogate, and InvalidSetting for a digest of another shape.
    """
    text = _write(args, default)
    if distinct is not None:
        _check_name("distinct", distinct)
        # No pair of halves can meet across the NUL, so this is as good as checking the parts.
        text = f"{text}\0{distinct}"
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = _well_formed(text).encode()
    hashed = digest(data)
    if digest is not sha256_hex and (type(hashed) is not str or not _HEX64.fullmatch(hashed)):
        raise InvalidSetting("a digest must give exactly 64 lower-case hex digits, as sha256_hex does")
    return hashed


# ---------------------------------------------------------------- names and tokens


def _check_name(what: str, name: str) -> None:
    if type(name) is not str:
        # Neither the value nor its repr: both are code of the caller's, and errors have to pickle.
        kind = type(name).__name__
        raise InvalidName(what, f"<{kind}>", f"it has to be exactly a str, not {kind}")
    if not name:
        raise InvalidName(what, name, "it is empty")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidName(what, name, "it holds surrogates, which have no UTF-8 form") from None


_PLAIN_NAME: Final = re.compile(r"[-_A-Za-z0-9]+")
_ESCAPED: Final = re.compile(rb"[^-_A-Za-z0-9]")
_TOKEN: Final = re.compile(r"(?:[-_A-Za-z0-9]|=[0-9A-F]{2})+")
_HASHED_TOKEN: Final = re.compile(r"=H[0-9a-f]{64}")


def key_token(name: str) -> str:
    """Return ``name`` as one token of a KV key or subject: only ``-_=A-Za-z0-9``, at most 180 long.

    ASCII letters, digits, ``-`` and ``_`` stand for themselves, every other byte of the name's UTF-8
    becomes ``=XX`` in upper-case hex. Where that has more than 180 characters the token is ``=H`` and
    the hex SHA-256 of the name's UTF-8 (lower case); no escape begins like that.

    Raises InvalidName if ``name`` is not a str, is empty or holds a surrogate.
    """
    return _token_of("name", name)


def _token_of(what: str, name: str) -> str:
    _check_name(what, name)
    # A longer name is hashed whatever it is made of, and may be too big to keep.
    return _cached_token(name) if len(name) <= MAX_TOKEN else _hashed_token(name)


@lru_cache(maxsize=2048)
def _cached_token(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return name
    token = _ESCAPED.sub(lambda match: b"=%02X" % match[0][0], name.encode()).decode("ascii")
    return token if len(token) <= MAX_TOKEN else _hashed_token(name)


def _hashed_token(name: str) -> str:
    return f"=H{sha256_hex(name.encode())}"


def name_from_token(token: str) -> str | None:
    """Return the name that :func:`key_token` made ``token`` from; None for a hashed one.

    Raises InvalidName for anything that :func:`key_token` does not make.
    """
    _check_name("token", token)
    if _HASHED_TOKEN.fullmatch(token):
        return None
    if not _TOKEN.fullmatch(token):
        raise InvalidName("token", token, "it is not made of -_A-Za-z0-9 and =XX")
    try:
        name = re.sub(rb"=(..)", lambda match: bytes.fromhex(match[1].decode()), token.encode()).decode()
    except UnicodeDecodeError:
        raise InvalidName("token", token, "its escapes are not UTF-8") from None
    if key_token(name) != token:
        raise InvalidName("token", token, "this is not how its name is written")
    return name


def split_kv_key(kv_key: str) -> tuple[str, str, str, str]:
    """Return the tokens of tenant, run and tool and the arguments hash of a receipt's KV key.

    Raises InvalidName if it is not four tokens with dots between them, the last one a hash.
    """
    _check_name("KV key", kv_key)
    tokens = kv_key.split(".")
    if len(tokens) != 4 or not _HEX64.fullmatch(tokens[3]):
        raise InvalidName("KV key", kv_key, "it is not <tenant>.<run>.<tool>.<64 hex digits>")
    for token in tokens[:3]:
        name_from_token(token)
    tenant, run, tool, hashed = tokens
    return tenant, run, tool, hashed


@dataclass(frozen=True, slots=True)
class ReceiptKey:
    """What identifies a call: the names of tenant, run and tool, and the hash of its arguments.

    Raises InvalidName if a name is not a str, is empty or holds a surrogate, or if ``args_hash`` is
    not 64 lower-case hex digits.
    """

    tenant: str
    run: str
    tool: str
    args_hash: str
    kv_key: str = field(init=False, repr=False, compare=False)
    """``<tenant>.<run>.<tool>.<args_hash>`` in tokens: the key in the bucket."""

    def __post_init__(self) -> None:
        hashed = self.args_hash
        if type(hashed) is not str or not _HEX64.fullmatch(hashed):
            _check_name("args_hash", hashed)
            raise InvalidName("args_hash", hashed, "it is not 64 lower-case hex digits")
        tenant = _token_of("tenant", self.tenant)
        run = _token_of("run", self.run)
        tool = _token_of("tool", self.tool)
        object.__setattr__(self, "kv_key", f"{tenant}.{run}.{tool}.{hashed}")

    def __reduce__(self) -> tuple[type[ReceiptKey], tuple[str, str, str, str]]:
        return ReceiptKey, (self.tenant, self.run, self.tool, self.args_hash)

    @classmethod
    def of(
        cls,
        tenant: str,
        run: str,
        tool: str,
        args: object,
        *,
        digest: Digest = sha256_hex,
        distinct: str | None = None,
        default: Default | None = None,
    ) -> ReceiptKey:
        """Return the key of a call with these arguments; raises what :func:`args_hash` raises too."""
        return cls(tenant, run, tool, args_hash(args, digest=digest, distinct=distinct, default=default))

    @property
    def string(self) -> str:
        """The key as one string: ``<len>:<part>`` four times, ``len`` in bytes of UTF-8, nothing between.

        A part says how long it is, so no name can impersonate a boundary.
        """
        parts = (self.tenant, self.run, self.tool, self.args_hash)
        return "".join(f"{len(part.encode())}:{part}" for part in parts)

    @property
    def idempotency_key(self) -> str:
        """What a tool hands to a provider that takes one: the hex SHA-256 of :attr:`string`'s UTF-8."""
        return sha256_hex(self.string.encode())
