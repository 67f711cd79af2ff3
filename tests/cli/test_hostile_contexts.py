# ruff: noqa: PT017 - an error is one of two good ends here
"""Context files that nobody wrote by hand: settings, or a failure that names the context; never a traceback."""

from __future__ import annotations

import json

import pytest
from hostile import NAMES, fuzz, json_values, mutated, raw
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from natsreceipts.cli.contexts import load, secret
from natsreceipts.cli.exits import Failure

CONTEXT = {
    "description": "x",
    "url": "nats://127.0.0.1:4222",
    "user": "ann",
    "password": "env://NOPE",
    "creds": "",
    "nkey": "",
    "cert": "",
    "key": "",
    "ca": "~/ca.pem",
    "nsc": "",
    "jetstream_domain": "",
    "inbox_prefix": "",
    "tls_first": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        (home / "nats" / "context").mkdir(parents=True)
        patch.setenv("XDG_CONFIG_HOME", str(home))
        yield home / "nats" / "context"


def kept(examples):
    return settings(fuzz(examples), suppress_health_check=[HealthCheck.function_scoped_fixture])


@kept(60)
@given(mutated([CONTEXT]) | json_values.map(raw) | st.binary(max_size=30))
@example(b"[" * 100_000)
@example(b'{"url":' * 50_000)
@example(b"\xff\xfe")
def test_any_file(folder, value):
    (folder / "odd.json").write_bytes(value)
    try:
        found = load("odd")
    except Failure as failure:
        assert "'odd'" in str(failure)
        return
    assert isinstance(json.loads(value), dict)
    assert all(type(name) is str and type(setting) is str and setting for name, setting in found.items())


@kept(60)
@given(st.sampled_from(NAMES) | st.text(max_size=20) | st.sampled_from(NAMES).map(lambda name: f"{name}.json"))
@example("../../../etc/passwd")
@example("x" * 5000 + ".json")
@example("\ud800")
@example("a\x00.json")
def test_any_name(folder, name):
    (folder.parent / "elsewhere.json").write_text('{"url": "nats://elsewhere"}')
    try:
        found = load(name)
    except Failure as failure:
        assert str(failure)
        return
    assert found.get("url") != "nats://elsewhere"


@kept(60)
@given(
    st.sampled_from(
        ["file://", "env://", "data:", "data:;base64,", "op://", "nsc://", "~", "~nobody-of-this-name/", ""]
    ),
    st.sampled_from(NAMES) | st.text(max_size=20),
    st.booleans(),
)
@example("file://", "~nobody-of-this-name/x", False)
@example("data:", ";base64,/w==", True)
@example("env://", "a\x00b", True)
def test_any_reference_to_a_secret(folder, scheme, rest, literal):
    try:
        found = secret("the password", scheme + rest, literal=literal)
    except Failure as failure:
        assert "the password" in str(failure)
        return
    assert type(found) is str
