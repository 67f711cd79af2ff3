"""Errors cross process boundaries with their fields, and say what happened to which call."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import natsreceipts
from natsreceipts import NatsReceiptsError, ReceiptError, ReceiptKey, SessionEntry
from natsreceipts.errors import with_key

KEY = ReceiptKey("acme", "run-1", "send", "ab" * 32)

SAMPLES = {
    "key": KEY,
    "result": {"id": [1, b"x"]},
    "has_result": True,
    "revision": 7,
    "attempts": 2,
    "retry_after": 1.5,
    "timeout": 2.5,
    "version": 2,
    "entry": SessionEntry("acme", "s1", "e1", None, "message", "run-1", "neutral", {}, None, None, 7, None, "S"),
    "value": "\ud800",
}

ERRORS = sorted(
    (cls for cls in vars(natsreceipts).values() if isinstance(cls, type) and issubclass(cls, NatsReceiptsError)),
    key=lambda cls: cls.__name__,
)


def made(cls, **given):
    """An error with a telling value for every parameter."""
    arguments, named = [], {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        value = given.get(name, SAMPLES.get(name, f"some {name}"))
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = value
        else:
            arguments.append(value)
    return cls(*arguments, **named)


def same(one, other):
    return (type(one), str(one), one.args, one.__dict__) == (type(other), str(other), other.args, other.__dict__)


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_pickles(cls):
    error = made(cls)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert same(pickle.loads(pickle.dumps(error, protocol)), error)
    assert same(copy.copy(error), error)
    assert same(copy.deepcopy(error), error)
    again = pickle.loads(pickle.dumps(error))
    for name in inspect.signature(cls.__init__).parameters:
        if hasattr(error, name):
            assert getattr(again, name) == getattr(error, name)
    if issubclass(cls, ReceiptError):
        assert again.key == KEY
        assert KEY.kv_key in str(again)
        by_kv_key = made(cls, key=KEY.kv_key)
        assert by_kv_key.key == KEY.kv_key
        assert same(pickle.loads(pickle.dumps(by_kv_key)), by_kv_key)


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_says_something(cls):
    assert str(made(cls)).strip()
    assert cls.__doc__
    assert issubclass(cls, Exception)
    assert isinstance(made(cls).because(ValueError("x")).__cause__, ValueError)


@pytest.mark.parametrize(
    "cls", [c for c in ERRORS if "key" in vars(c).get("__annotations__", {}) and not issubclass(c, ReceiptError)]
)
def test_a_key_that_is_filled_in_later(cls):
    error = made(cls)
    assert error.key is None
    assert with_key(error, KEY) is error
    assert error.key == KEY
    assert KEY.kv_key in str(error)
    assert with_key(error, "another") is error
    assert error.key == KEY
    assert same(pickle.loads(pickle.dumps(error)), error)


def test_an_error_of_a_hosts_own_class():
    error = Refused("card", code=5)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code) == (Refused, "card", 5)


class Refused(natsreceipts.NotApplied):
    def __init__(self, message, *, code):
        super().__init__(message)
        self.code = code


def test_the_text_for_a_model_makes_no_promise():
    error = made(natsreceipts.AmbiguousCall)
    assert "send" in error.model_text
    assert "unknown" in error.model_text
    assert isinstance(made(natsreceipts.CallTimedOut), TimeoutError)
