"""Sealed payloads on the command line, with the key file and without."""

from __future__ import annotations

import base64
import json

import pytest
from program import Cli
from support import toolkit_of

pytest.importorskip("cryptography")
from natsreceipts.cipher import Cipher, new_key

SECRET = "Xylophone-4711"


@pytest.fixture
def key():
    return new_key("k1")


@pytest.fixture
def key_file(tmp_path, key):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"acme": {key.id: base64.b64encode(key.secret).decode()}}))
    return path


@pytest.fixture
async def left(server, namespace, bucket, key):
    """A completed call and an ambiguous one, and a session. Returns their keys."""
    async with toolkit_of(server.url, namespace, cipher=Cipher({"acme": [key]})) as toolkit:
        run = toolkit.run("acme", "run-1", store_args=True)
        async with run.call("send", {"to": SECRET}) as call:
            call.result = [SECRET]
        with pytest.raises(TimeoutError):
            async with run.call("doubt", {}) as doubt:
                raise TimeoutError(SECRET)
        session = toolkit.sessions.open("acme", "chat-1", dialect="neutral")
        await session.append({"role": "user", "content": SECRET})
    return call.key.kv_key, doubt.key.kv_key


@pytest.fixture
def cli(server, namespace):
    return Cli("--server", server.url, "--namespace", namespace)


async def test_what_is_sealed_is_shown_as_that(cli, left):
    sent, doubt = left
    shown = await cli("receipts", "show", sent)
    assert shown.code == 7
    assert "completed" in shown.out
    assert "sealed with key 'k1'" in shown.out
    assert SECRET not in shown.out + shown.err
    (as_json,) = (await cli("receipts", "show", sent, "--json")).objects
    assert "sealed with key 'k1'" in as_json["result"]["problem"]
    shown = await cli("receipts", "show", doubt)
    assert "(sealed with key k1)" in shown.out
    listed = await cli("receipts", "ls", "--json")
    assert (listed.code, len(listed.lines)) == (0, 2)
    refused = await cli("sessions", "show", "acme.chat-1")
    assert refused.code == 7
    assert "'k1'" in refused.error
    assert (await cli("sessions", "ls")).code == 0


async def test_the_key_file_opens_it(cli, left, key_file, monkeypatch):
    sent, doubt = left
    with_key = Cli(*cli.flags, "--key-file", str(key_file))
    shown = await with_key("receipts", "show", sent)
    assert (shown.code, shown.out.count(SECRET)) == (0, 2)
    assert SECRET in (await with_key("sessions", "show", "acme.chat-1", "--json")).out
    monkeypatch.setenv("NATSRECEIPTS_KEY_FILE", str(key_file))
    (as_json,) = (await cli("receipts", "show", sent, "--json")).objects
    assert as_json["result"]["json"] == [SECRET]
    assert SECRET in (await cli("receipts", "show", doubt)).out


async def test_a_result_in_plain_is_refused_and_one_with_the_key_is_sealed(cli, left, key_file, nc, namespace):
    _, doubt = left
    resolve = ("receipts", "resolve", doubt, "--completed", f'"{SECRET}"', "--by", "ann", "--reason", "looked")
    (shown,) = (await cli("receipts", "show", doubt, "--json")).objects
    resolve = (*resolve, "--yes", "--revision", shown["revision"])
    refused = await cli(*resolve)
    assert refused.code == 7
    done = await cli(*resolve, "--key-file", key_file)
    assert done.code == 0, done.err
    kv = await nc.jetstream().key_value(f"{namespace}-receipts")
    assert "sealed" in json.loads((await kv.get(doubt)).value)["result"]


async def test_a_key_file_that_cannot_be_read(cli, left, tmp_path):
    assert (await cli("receipts", "ls", "--key-file", tmp_path / "none")).code == 2
    (tmp_path / "bad").write_text("{")
    assert (await cli("receipts", "ls", "--key-file", tmp_path / "bad")).code == 2


async def test_doctor_needs_no_keys(cli, left):
    found = await cli("doctor", "--json")
    assert not [each for each in found.objects if each.get("severity") == "error" and "read" in str(each)], found.out
