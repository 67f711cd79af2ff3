"""Canonical JSON: the same bytes as ECMAScript would write, or an error that says where."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from natsreceipts.errors import NotCanonical
from natsreceipts.identity import MAX_DEPTH, canonical_json

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "canonical.json").read_text("utf-8"))["canonical"]

quick = settings(max_examples=150, deadline=None)

# Everything that has a rule of its own in JSON, UTF-8 or UTF-16.
CHARS = 'aZ_0 "\\/\b\f\n\r\t\0\x1f\x7f\x80\u2028\u2029é\ud7ff\ue000\uffff\ud800\udbff\udc00\udfff😀\U0010ffff'
texts = st.text(st.sampled_from(CHARS) | st.characters(), max_size=6)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def joined(text):
    """Return ``text`` as JavaScript sees it: two halves that meet are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def meaning(value):
    """Return what JavaScript can tell apart, and nothing else."""
    if isinstance(value, dict):
        return {joined(key): meaning(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [meaning(item) for item in value]
    if isinstance(value, str):
        return joined(value)
    if value is None or isinstance(value, bool):
        return repr(value), "constant"
    return float(value)


def collides(value):
    """Say whether two keys of one dict are one key in JavaScript."""
    if isinstance(value, dict):
        return len({joined(key) for key in value}) < len(value) or any(map(collides, value.values()))
    return isinstance(value, list) and any(map(collides, value))


def refused(value, **options):
    with pytest.raises(NotCanonical) as caught:
        canonical_json(value, **options)
    return caught.value


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("vector", VECTORS, ids=[v["json"] for v in VECTORS])
def test_golden_vectors(vector):
    assert canonical_json(json.loads(vector["json"])) == vector["out"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1, "1"),
        (1.0, "1"),
        (None, "null"),
        ("", '""'),
        ([], "[]"),
        ((), "[]"),
        ({}, "{}"),
        ((1, ("a", "b")), '[1,["a","b"]]'),
        ([[], {}, [[]], [""]], '[[],{},[[]],[""]]'),
        ({"a": {}, "b": []}, '{"a":{},"b":[]}'),
        ({"b": 1, "a": 2, "": 3}, '{"":3,"a":2,"b":1}'),
        ({"10": 1, "9": 2, "a": 3, "A": 4}, '{"10":1,"9":2,"A":4,"a":3}'),
        ("\b\t\n\f\r\x0b\x00\x1f\"\\/'", r'"\b\t\n\f\r\u000b\u0000\u001f\"\\/' + "'\""),
        ("\x7f\x80\u2028\u2029é", '"\x7f\x80\u2028\u2029é"'),
        (["\ud800", "\udfff"], r'["\ud800","\udfff"]'),
        (2**53 + 1, "9007199254740993"),
        (-(10**30), "-1" + "0" * 30),
    ],
)
def test_forms(value, text):
    assert canonical_json(value) == text


def test_keys_are_in_the_order_of_utf_16():
    # By code point it would be the other way round.
    assert canonical_json({"\uffff": 1, "😀": 2, "\ud7ff": 3}) == '{"\ud7ff":3,"😀":2,"\uffff":1}'
    assert canonical_json({"\uffff": 1, "\ud83d\ude00": 2}) == '{"😀":2,"\uffff":1}'
    assert canonical_json({"\ue000": 1, "\udfff": 2, "é": 3}) == '{"é":3,"\\udfff":2,"\ue000":1}'


def test_two_halves_are_one_character_and_others_are_escaped():
    assert canonical_json("\ud83d\ude00") == canonical_json("😀") == '"😀"'
    assert canonical_json("\ud83d\ud83d\ude00\ude00") == '"\\ud83d😀\\ude00"'
    assert canonical_json("\ude00\ud83d") == '"\\ude00\\ud83d"'
    # Not across the border of two strings, and not to be taken for the text of an escape.
    assert canonical_json(["\ud83d", "\ude00"]) == '["\\ud83d","\\ude00"]'
    assert canonical_json("\\ud83d") == '"\\\\ud83d"'


def test_keys_that_are_equal_in_utf_16_are_refused():
    error = refused({"x": [{"a": 1, "\ud83d\ude00": 1, "b": 2, "😀": 2}]})
    assert error.path == "$.x[0]"
    assert "same" in error.reason


def reference_number(number):
    """Number::toString of ECMA-262, step by step (radix 10)."""
    if number == 0:
        return "0"
    if number < 0:
        return "-" + reference_number(-number)
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    s = "".join(map(str, digits))
    n = len(s) + exponent
    s = s.rstrip("0")
    k = len(s)
    if k <= n <= 21:
        return s + "0" * (n - k)
    if 0 < n <= 21:
        return s[:n] + "." + s[n:]
    if -6 < n <= 0:
        return "0." + "0" * -n + s
    e = f"{'+' if n - 1 > 0 else '-'}{abs(n - 1)}"
    return f"{s}e{e}" if k == 1 else f"{s[0]}.{s[1:]}e{e}"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (-0.0, "0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e21, "1e+21"),
        (-1e21, "-1e+21"),
        (999999999999999900000.0, "999999999999999900000"),
        (123456789012345680000.0, "123456789012345680000"),
        (1.2345678901234567e16, "12345678901234568"),
        (5e-324, "5e-324"),
        (1e-6, "0.000001"),
        (-1.5e-6, "-0.0000015"),
        (1e-7, "1e-7"),
        (-1.5e-7, "-1.5e-7"),
        (1.5e300, "1.5e+300"),
        (1e100, "1e+100"),
        (2.0**53, "9007199254740992"),
        (sys.float_info.max, "1.7976931348623157e+308"),
        (sys.float_info.min, "2.2250738585072014e-308"),
    ],
)
def test_floats(number, text):
    assert canonical_json(number) == text
    assert reference_number(number) == text


@settings(max_examples=500, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.floats(1e-8, 1e-4) | st.floats(1e14, 1e23))
def test_floats_are_written_by_the_ecmascript_algorithm(number):
    text = canonical_json(number)
    assert text == reference_number(number)
    assert float(text) == number


def test_floats_of_every_magnitude():
    rng = random.Random(1)
    for _ in range(5_000):
        (number,) = struct.unpack("<d", rng.randbytes(8))
        if math.isfinite(number):
            assert canonical_json(number) == reference_number(number)


@quick
@given(st.integers())
def test_ints_keep_their_digits(number):
    assert canonical_json(number) == str(number)


@quick
@given(values.filter(lambda value: not collides(value)))
@example({"\ud83d\ude00": ["\ud83d", "\ude00"]})
def test_it_reads_back_as_the_same_value(value):
    text = canonical_json(value)
    assert meaning(json.loads(text)) == meaning(value)
    assert canonical_json(json.loads(text)) == text
    assert json.loads(text.encode("utf-8")) == json.loads(text)


@quick
@given(values.filter(lambda value: not collides(value)), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(value, rng):
    def shuffled(value):
        if isinstance(value, dict):
            items = [(key, shuffled(item)) for key, item in value.items()]
            rng.shuffle(items)
            return dict(items)
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    assert canonical_json(shuffled(value)) == canonical_json(value)


small = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.5, "", "1", "null", "[]", "a,b", '"']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["", "a", '"']), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(small, small)
def test_different_values_have_different_texts(one, other):
    assert (canonical_json(one) == canonical_json(other)) is (meaning(one) == meaning(other))


@quick
@given(values)
def test_keys_that_are_one_key_in_javascript_are_always_refused(value):
    if collides(value):
        refused(value)
    else:
        canonical_json(value)


# ---------------------------------------------------------------- what is refused


class Text(str):
    __slots__ = ()


class Number(int):
    def __repr__(self):
        return "7"


class Real(float):
    pass


class Mapping(dict):
    def items(self):
        return [("hidden", 1)]

    def __iter__(self):
        return iter(["hidden"])


class Array(list):
    def __iter__(self):
        return iter([1])


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    LOW = 1


class Mode(StrEnum):
    FAST = "fast"


Point = namedtuple("Point", "x y")  # noqa: PYI024


@dataclass
class Mail:
    to: str


class Liar:
    @property
    def __class__(self):
        return str


STRANGERS = [
    Text("a"),
    Number(1),
    Real(1.0),
    Mapping(a=1),
    Mapping(),
    Array([1]),
    Array(),
    Colour.RED,
    Level.LOW,
    Mode.FAST,
    Point(1, 2),
    Mail("a"),
    Mail,
    Liar(),
    OrderedDict(a=1),
    defaultdict(int),
    UserDict(),
    b"a",
    bytearray(b"a"),
    {1},
    frozenset(),
    Decimal(1),
    datetime(2024, 1, 1, tzinfo=UTC),
    1j,
    range(3),
    iter([]),
    (n for n in ()),
    {}.keys(),
    object(),
    ...,
    NotImplemented,
]


@pytest.mark.parametrize("value", STRANGERS, ids=[f"{n}-{type(v).__name__}" for n, v in enumerate(STRANGERS)])
def test_only_exact_types(value):
    assert refused(value).path == "$"
    assert refused(["a", value]).path == "$[1]"
    assert refused([value, 1, []]).path == "$[0]"
    assert refused({"b": 1, "a": {"c": value}}).path == "$.a.c"
    assert type(value).__name__ in refused(value).reason


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have(number):
    error = refused({"a": [0, number]}, default=lambda _: 0)
    assert error.path == "$.a[1]"
    assert "not JSON" in error.reason


@pytest.mark.parametrize("key", [1, 1.5, None, True, b"a", (), Text("a"), Mode.FAST, Number(1)])
def test_only_str_keys(key):
    for mapping in ({key: 1}, {"z": 1, key: 2}, {"é": 1, key: 2}):
        error = refused([0, {"m": mapping}], default=lambda _: "x")
        assert error.path == "$[1].m"
        assert type(key).__name__ in error.reason


def test_ints_of_more_digits_than_python_converts():
    limit = sys.get_int_max_str_digits()
    assert canonical_json(10 ** (limit - 1)) == "1" + "0" * (limit - 1)
    assert refused([1, 10**limit]).path == "$[1]"
    assert refused({"n": -(10**limit)}).path == "$.n"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (b"", "$"),
        ({"to": [1, 2, 3, b""]}, "$.to[3]"),
        ({"to": ("x", "y", ["z", b""])}, "$.to[2][1]"),
        ({"a b": {"": b""}}, '$["a b"][""]'),
        ({'q"\n': b""}, r'$["q\"\n"]'),
        ({"_a9": [{"9a": b""}]}, '$._a9[0]["9a"]'),
        ({"é": b""}, '$["é"]'),
        ({"\ud800": b""}, r'$["\ud800"]'),
        ({"b": b"", "a": [], "c": ()}, "$.b"),
        ([[], {}, [[1], [2, b""]]], "$[2][1][1]"),
    ],
)
def test_the_path_of_the_offender(value, path):
    error = refused(value)
    assert error.path == path
    assert str(error).startswith(f"{path} cannot be part of a call's identity")
    str(error).encode()


def test_the_first_offender_is_named():
    assert refused({"z": b"", "a": [1, b"", b""]}).path == "$.a[1]"


# ---------------------------------------------------------------- depth and cycles


def nested(levels, make=lambda inner: [inner], core=()):
    value = core
    for _ in range(levels):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: [0, {"k": v}][1:]])
@pytest.mark.parametrize("core", [[], {}, ["a"], [1], {"a": 1}])
def test_depth(make, core):
    per_level = 2 if isinstance(make(0), list) and isinstance(make(0)[0], dict) else 1
    fits = (MAX_DEPTH - 1) // per_level
    assert canonical_json(nested(fits, make, core))
    too_deep = refused(nested(MAX_DEPTH, make, core))
    assert "128" in too_deep.reason


def test_128_containers_pass_and_129_do_not():
    assert MAX_DEPTH == 128
    assert canonical_json(nested(127, core=[])) == "[" * 128 + "]" * 128
    assert canonical_json(nested(128, core=1)) == "[" * 128 + "1" + "]" * 128
    assert refused(nested(128, core=[])).path == "$" + "[0]" * 128
    assert refused(nested(129, core=1)).path == "$" + "[0]" * 128


def test_great_depth_is_an_error_like_any_other():
    refused(nested(200_000))


def test_cycles_are_named_where_they_close():
    a = []
    a += [1, {"x": a}]
    assert refused(a).path == "$[1].x"
    assert "itself" in refused(a).reason
    d = {"y": 1}
    d["d"] = d
    assert refused({"top": [d]}).path == "$.top[0].d"
    one, two = [], []
    one.append(two)
    two.append(one)
    assert refused(one).path == "$[0][0]"


def test_a_shared_reference_is_no_cycle():
    shared = {"k": [1]}
    assert canonical_json([shared, shared, {"a": shared}]) == '[{"k":[1]},{"k":[1]},{"a":{"k":[1]}}]'
    empty = []
    assert canonical_json([empty, [empty, [empty]]]) == "[[],[[],[[]]]]"


def probe(levels):
    return probe(levels - 1) if levels else None


def at_depth(levels, action):
    return at_depth(levels - 1, action) if levels else action()


def deepest(room):
    """Return how deep a caller can be and still have ``room`` frames left."""
    low, high = 0, sys.getrecursionlimit()
    while low < high:
        middle = (low + high + 1) // 2
        try:
            at_depth(middle, lambda: probe(room))
        except RecursionError:
            high = middle - 1
        else:
            low = middle
    return low


def test_a_caller_that_is_deep_in_the_stack_gets_the_same_answer():
    levels = deepest(room=10)
    value = nested(60, lambda inner: [1.5e300, {"é\ud800": inner, "b": [True, None, ["x"]]}], core={"a": 2**60})
    assert at_depth(levels, lambda: canonical_json(value)) == canonical_json(value)
    for wrong in (nested(500), nested(127, core=b""), {"\ud800": [math.nan]}, {"a": {1: 1}}):
        expected = refused(wrong)

        def attempt(wrong=wrong):
            try:
                canonical_json(wrong)
            except NotCanonical as error:
                return error
            return None

        assert str(at_depth(levels, attempt)) == str(expected)


# ---------------------------------------------------------------- the hook


def test_default_turns_strangers_into_json():
    def default(value):
        if isinstance(value, datetime):
            return value.isoformat()
        if isinstance(value, Mail):
            return {"to": value.to, "tags": frozenset({"x"})}
        return sorted(value)

    value = [Mail("a"), datetime(2024, 1, 1, tzinfo=UTC)]
    assert canonical_json(value, default=default) == '[{"tags":["x"],"to":"a"},"2024-01-01T00:00:00+00:00"]'


def test_default_is_asked_again_about_what_it_gave():
    steps = {b"1": bytearray(b"2"), "2": 0}
    assert canonical_json(b"1", default=lambda v: steps[bytes(v)] if type(v) is bytes else (v.decode(), 3)) == (
        '["2",3]'
    )


def test_default_is_not_asked_about_json():
    value = {"a": [1, 1.5, "x", None, True, (), {}]}
    assert canonical_json(value, default=lambda v: pytest.fail(f"asked about {v!r}")) == canonical_json(value)


@pytest.mark.parametrize("value", [Mapping(a=1), Text("a"), Level.LOW, Point(1, 2)], ids=repr)
def test_default_sees_subclasses(value):
    assert canonical_json([value], default=lambda v: type(v).__name__) == f'["{type(value).__name__}"]'


@pytest.mark.parametrize(
    "default",
    [
        lambda v: v,
        lambda v: object(),
        lambda v: Text("again"),
        lambda v: [v],
        lambda v: {"k": (v,)},
        lambda v: b"a" if v == b"b" else b"b",
    ],
)
def test_a_default_that_does_not_end(default):
    assert refused({"a": [1, b"a"]}, default=default).path.startswith("$.a[1]")


def test_a_cycle_through_default_is_found():
    mail = Mail("a")
    state = {"to": "a", "self": mail}
    assert refused(mail, default=lambda _: state).path == "$.self"


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no"), UnicodeDecodeError("utf-8", b"", 0, 1, "no")])
def test_a_default_that_has_no_form_either(error):
    def default(_):
        raise error

    caught = refused({"a": b""}, default=default)
    assert caught.path == "$.a"
    assert caught.__cause__ is error


def test_other_errors_of_default_pass():
    def default(_):
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        canonical_json(b"", default=default)


def test_default_may_change_what_is_being_written():
    mapping = {"a": b"", "b": 1}

    def default(_):
        mapping.clear()
        return 0

    assert canonical_json(mapping, default=default) == '{"a":0,"b":1}'
