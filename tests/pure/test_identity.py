"""Digests, tokens and keys: golden vectors for other languages, and the laws that hold for all names."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natsreceipts.errors import InvalidName, InvalidSetting, NotCanonical
from natsreceipts.identity import (
    MAX_TOKEN,
    ReceiptKey,
    args_hash,
    canonical_json,
    hmac_digest,
    key_token,
    name_from_token,
    sha256_hex,
    split_kv_key,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text("utf-8"))
HASH = args_hash({})

quick = settings(max_examples=200, deadline=None)
names = st.text(st.sampled_from("aB9-_=.:H0 \0é日😀*>") | st.characters(codec="utf-8"), min_size=1, max_size=80)
hashes = st.sampled_from([HASH, "0" * 64, "f" * 64])
quads = st.tuples(names, names, names, hashes)
# Few letters, so that different names often run into one another.
close_quads = st.tuples(*[st.text(st.sampled_from("1:a."), min_size=1, max_size=3)] * 3, hashes)


class Plain(str):
    __slots__ = ()


class Tool(StrEnum):
    SEND = "send"


BAD_NAMES = [
    *VECTORS["notNames"],
    "\ud83d\ude00",
    None,
    1,
    True,
    b"a",
    ["a"],
    Plain("a"),
    Tool.SEND,
    10**5000,
]


# ---------------------------------------------------------------- golden vectors


@pytest.mark.parametrize("vector", VECTORS["tokens"], ids=lambda v: ascii(v["name"])[:40])
def test_token_vectors(vector):
    name, token = vector["name"], vector["token"]
    assert key_token(name) == token
    assert name_from_token(token) == (None if token.startswith("=H") else name)


@pytest.mark.parametrize("token", VECTORS["notTokens"], ids=lambda t: ascii(t)[:40])
def test_what_is_no_token(token):
    with pytest.raises(InvalidName):
        name_from_token(token)
    with pytest.raises(InvalidName):
        split_kv_key(f"a.{token}.b.{HASH}")


@pytest.mark.parametrize("vector", VECTORS["args"], ids=lambda v: f"{v['json'][:30]} {v['distinct']!a}")
def test_args_hash_vectors(vector):
    secret = vector["hmacSecret"]
    digest = sha256_hex if secret is None else hmac_digest(secret.encode())
    args = json.loads(vector["json"])
    assert args_hash(args, digest=digest, distinct=vector["distinct"]) == vector["hash"]


@pytest.mark.parametrize("vector", VECTORS["keys"], ids=lambda v: ascii(v["tool"])[:40])
def test_key_vectors(vector):
    key = ReceiptKey(vector["tenant"], vector["run"], vector["tool"], vector["argsHash"])
    assert key.string == vector["string"]
    assert key.idempotency_key == vector["idempotencyKey"]
    assert key.kv_key == vector["kvKey"]
    assert split_kv_key(key.kv_key) == tuple(vector["kvKey"].split("."))


# ---------------------------------------------------------------- tokens


@quick
@given(names)
def test_a_token_is_legal_and_reads_back(name):
    token = key_token(name)
    assert re.fullmatch(r"[-_=A-Za-z0-9]+", token)
    assert len(token) <= MAX_TOKEN == 180
    plain = "".join(c if re.fullmatch(r"[-_A-Za-z0-9]", c) else "".join(f"={b:02X}" for b in c.encode()) for c in name)
    if len(plain) <= 180:
        assert token == plain
        assert name_from_token(token) == name
    else:
        assert token == "=H" + sha256(name.encode()).hexdigest()
        assert name_from_token(token) is None


def test_a_long_name_is_hashed_whatever_it_is_made_of():
    assert key_token("a" * 180) == "a" * 180
    assert key_token("a" * 181) == "=H" + sha256(b"a" * 181).hexdigest()
    assert key_token("." * 60) == "=2E" * 60
    assert key_token("." * 61) == "=H" + sha256(b"." * 61).hexdigest()


@quick
@given(st.text(st.sampled_from("aH-_=0123456789ABCDEFabcdef"), max_size=12))
def test_every_token_belongs_to_one_name(token):
    try:
        name = name_from_token(token)
    except InvalidName:
        return
    assert name is not None
    assert key_token(name) == token


@pytest.mark.parametrize(
    "name", BAD_NAMES, ids=lambda n: f"{type(n).__name__}-{ascii(n)[:20]}" if n != 10**5000 else "huge"
)
def test_names_that_are_refused(name):
    for attempt in (
        lambda: key_token(name),
        lambda: name_from_token(name),
        lambda: split_kv_key(name),
        lambda: ReceiptKey(name, "r", "t", HASH),
        lambda: ReceiptKey("t", name, "t", HASH),
        lambda: ReceiptKey("t", "r", name, HASH),
        lambda: ReceiptKey("t", "r", "t", name),
    ):
        with pytest.raises(InvalidName) as caught:
            attempt()
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_error_names_the_part():
    for number, what in enumerate(("tenant", "run", "tool", "args_hash")):
        parts = ["a", "b", "c", HASH]
        parts[number] = ""
        with pytest.raises(InvalidName, match=f"^{what} '' cannot be used: it is empty") as caught:
            ReceiptKey(*parts)
        assert caught.value.what == what


def test_a_name_seen_before_does_not_open_the_door_to_its_look_alikes():
    class Spoof:
        def __hash__(self):
            return hash("seen-before")

        def __eq__(self, other):
            return True

    key_token("seen-before")
    with pytest.raises(InvalidName):
        key_token(Spoof())
    with pytest.raises(InvalidName):
        key_token(Plain("seen-before"))


@pytest.mark.parametrize(
    "kv_key",
    [
        "",
        "a",
        "a.b.c",
        f"a.b.c.{HASH}.d",
        f"a..c.{HASH}",
        f".b.c.{HASH}",
        f"a.b.{HASH}",
        "a.b.c.d",
        f"a.b.c.{HASH[:-1]}",
        f"a.b.c.{HASH}\n",
        f"a.b.c.{HASH.upper()}",
        f"a b.b.c.{HASH}",
        f"a.=61.c.{HASH}",
        f"a.b.*.{HASH}",
        f"a.b.>.{HASH}",
    ],
)
def test_what_is_no_kv_key(kv_key):
    with pytest.raises(InvalidName):
        split_kv_key(kv_key)


# ---------------------------------------------------------------- keys


@quick
@given(quads | close_quads, quads | close_quads)
def test_different_calls_have_different_keys(one, other):
    a, b = ReceiptKey(*one), ReceiptKey(*other)
    assert (a == b) is (one == other)
    assert (a.string == b.string) is (one == other)
    assert (a.kv_key == b.kv_key) is (one == other)
    assert (a.idempotency_key == b.idempotency_key) is (one == other)


@settings(max_examples=500, deadline=None)
@given(close_quads, close_quads)
def test_no_name_impersonates_a_boundary(one, other):
    assert (ReceiptKey(*one).string == ReceiptKey(*other).string) is (one == other)
    assert (ReceiptKey(*one).kv_key == ReceiptKey(*other).kv_key) is (one == other)


@quick
@given(quads)
def test_a_key_can_be_read_back(parts):
    key = ReceiptKey(*parts)
    assert re.fullmatch(r"[-_=A-Za-z0-9]+(\.[-_=A-Za-z0-9]+){3}", key.kv_key)
    *tokens, hashed = split_kv_key(key.kv_key)
    assert hashed == parts[3]
    for name, token in zip(parts[:3], tokens, strict=True):
        assert name_from_token(token) in (name, None)
    rest, read = key.string.encode(), []
    while rest:
        length, _, rest = rest.partition(b":")
        read.append(rest[: int(length)].decode())
        rest = rest[int(length) :]
    assert tuple(read) == parts
    assert key.idempotency_key == sha256(key.string.encode()).hexdigest()


def test_a_key_is_a_value():
    key = ReceiptKey("acme", "order 42", "send", HASH)
    assert {key: 1}[ReceiptKey("acme", "order 42", "send", HASH)] == 1
    assert key != ReceiptKey("acme", "order 42", "send", "0" * 64)
    for twin in (
        pickle.loads(pickle.dumps(key)),
        copy.copy(key),
        copy.deepcopy(key),
        dataclasses.replace(key),
    ):
        assert twin == key
        assert hash(twin) == hash(key)
        assert twin.kv_key == key.kv_key
    assert dataclasses.replace(key, run="other").kv_key.startswith("acme.other.send.")
    assert not hasattr(key, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.run = "other"
    assert repr(key) == f"ReceiptKey(tenant='acme', run='order 42', tool='send', args_hash='{HASH}')"


@pytest.mark.parametrize("wrong", [HASH.upper(), HASH[:-1], HASH + "0", HASH + "\n", "g" * 64, "\u0660" * 64, " " * 64])
def test_an_args_hash_is_64_lower_case_hex_digits(wrong):
    with pytest.raises(InvalidName, match="args_hash"):
        ReceiptKey("a", "b", "c", wrong)


def test_of_hashes_the_arguments():
    digest = hmac_digest(b"k")
    key = ReceiptKey.of("a", "b", "c", {"x": {1}}, digest=digest, distinct="2", default=sorted)
    assert key == ReceiptKey("a", "b", "c", args_hash({"x": [1]}, digest=digest, distinct="2"))
    assert ReceiptKey.of("a", "b", "c", {}).args_hash == HASH
    with pytest.raises(NotCanonical):
        ReceiptKey.of("a", "b", "c", {"x": {1}})


# ---------------------------------------------------------------- digests


def test_the_hash_is_over_the_utf_8_of_canonical_json():
    value = {"b": "zoë", "a": ["\ud800", "\ud83d\ude00"]}
    assert args_hash(value) == sha256(canonical_json(value).encode()).hexdigest()
    seen = []
    args_hash(value, digest=lambda data: seen.append(data) or sha256_hex(data), distinct="é")
    assert seen == [canonical_json(value).encode() + b"\0" + "é".encode()]


def test_distinct_tells_equal_calls_apart():
    assert len({args_hash({}, distinct=d) for d in (None, "1", "2", "\0", "1\0", "{}")}) == 6
    # What is after the NUL of one can not be the arguments of another.
    assert args_hash("a", distinct='b"') != args_hash('a"\0b')


@pytest.mark.parametrize("distinct", ["", 1, b"a", "\ud800", "\ud83d\ude00", Plain("a"), True])
def test_distinct_is_a_name(distinct):
    with pytest.raises(InvalidName, match="distinct"):
        args_hash({}, distinct=distinct)


@pytest.mark.parametrize(
    "given_back",
    ["", HASH[:-1], HASH + "0", HASH.upper(), HASH + "\n", "g" * 64, HASH.encode(), None, Plain(HASH)],
)
def test_a_digest_of_another_shape_is_refused(given_back):
    with pytest.raises(InvalidSetting, match="64"):
        args_hash({}, digest=lambda _: given_back)


@pytest.mark.parametrize("secret", [b"", "secret", None, bytearray(b"a"), 1])
def test_a_secret_is_bytes(secret):
    with pytest.raises(InvalidSetting, match="secret"):
        hmac_digest(secret)


def test_a_digest_depends_on_its_secret():
    assert len({args_hash({}, digest=d) for d in (sha256_hex, hmac_digest(b"a"), hmac_digest(b"b"))}) == 3
    # RFC 4231, test case 2
    assert hmac_digest(b"Jefe")(b"what do ya want for nothing?") == (
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    )
