"""Logging in for real: TLS, NKeys and credentials files, and TLS that a server does not do."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess

import pytest
from program import Cli

from natsreceipts import InvalidSetting, connect, embedded, provision


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Files of an authority (ca), and of a server and a client (server, client) that it vouches for."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl on the PATH")
    folder = tmp_path_factory.mktemp("tls")

    def make(name, *more):
        request = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        subprocess.run([*request, *files, *more], check=True, capture_output=True)

    make("ca", "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign")
    by_ca = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    make("server", *by_ca, "-addext", "subjectAltName=IP:127.0.0.1")
    make("client", *by_ca)
    return folder


async def works(cli):
    made = await cli("up")
    assert made.code == 0, made.err
    assert (await cli("receipts", "ls")).code == 0


@pytest.mark.parametrize("first", [False, True])
async def test_tls(certificates, monkeypatch, first):
    names = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    files = ", ".join(f'{name}: "{certificates}/{file}"' for name, file in names.items())
    # The server waits that long for a TLS handshake before it greets as usual, which is what embedded() looks for.
    config = f"tls {{ {files}, verify: true, handshake_first: {'500ms' if first else 'false'} }}"
    async with embedded(config=config) as server:
        flags = {name: f"{certificates}/{file}" for name, file in (("cert", "client.pem"), ("key", "client.key"))}
        own = [word for name, file in flags.items() for word in (f"--tls{name}", file)]
        where = ("--server", server.url, "--timeout", "2s", *(["--tlsfirst"] if first else []))
        await works(Cli(*where, *own, "--tlsca", f"{certificates}/ca.pem"))
        unknown = await Cli(*where, *own)("receipts", "ls")
        assert (unknown.code, unknown.out) == (4, "")
        assert "certificate verify failed" in unknown.error.lower()
        assert (await Cli(*where, "--tlsca", f"{certificates}/ca.pem")("receipts", "ls")).code == 4
        monkeypatch.setenv("NATS_CERT", flags["cert"])
        monkeypatch.setenv("NATS_KEY", flags["key"])
        monkeypatch.setenv("NATS_CA", f"{certificates}/ca.pem")
        await works(Cli(*where))
        if not first:
            await works(Cli("--server", server.url.replace("nats://", "tls://")))


async def test_tls_that_the_server_does_not_do(server, certificates):
    """nats-py would go on in the clear, with the credentials."""
    plain = server.url.replace("nats://", "tls://")
    ended = await Cli("--server", plain, "--user", "ann", "--password", "secret")("receipts", "ls")
    assert (ended.code, ended.out) == (2, "")
    assert "does not require TLS" in ended.error
    assert (await Cli("--server", server.url, "--tlsca", f"{certificates}/ca.pem")("up")).code == 2
    with pytest.raises(InvalidSetting, match="does not require TLS"):
        async with connect(plain):
            pass
    with pytest.raises(InvalidSetting, match="does not require TLS"):
        await provision([server.url, plain])


async def test_tls_and_nobody_there():
    ended = await Cli("--server", "tls://127.0.0.1:1", "--timeout", "300ms")("receipts", "ls")
    assert ended.code == 4


# NKeys

ACCOUNT, OPERATOR, USER = 0, 14 << 3, 20 << 3


class Key:
    """An NKey pair of a kind, made at random."""

    def __init__(self, kind):
        nkeys = pytest.importorskip("nkeys")
        raw = bytes([(18 << 3) | (kind >> 5), (kind & 31) << 3]) + os.urandom(32)
        self.seed = base64.b32encode(raw + _crc16(raw).to_bytes(2, "little")).rstrip(b"=").decode()
        self.pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self.pair.public_key.decode()

    def jwt(self, subject, name, kind, **claims):
        """A JWT about ``subject`` that this key signs."""
        body = {"iss": self.public, "sub": subject, "name": name, "iat": 1, "jti": ""}
        body["nats"] = {"type": kind, "version": 2, **claims}
        body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).rstrip(b"=").decode()
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        text = f"{_base64(json.dumps(head).encode())}.{_base64(json.dumps(body).encode())}"
        return f"{text}.{_base64(self.pair.sign(text.encode()))}"


def _crc16(data):
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
        crc &= 0xFFFF
    return crc


def _base64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def test_an_nkey(tmp_path, monkeypatch):
    user, other = Key(USER), Key(USER)
    (tmp_path / "user.nk").write_text(user.seed + "\n")
    (tmp_path / "other.nk").write_text(other.seed)
    async with embedded(config=f"authorization {{ users: [ {{ nkey: {user.public} }} ] }}") as server:
        await works(Cli("--server", server.url, "--nkey", tmp_path / "user.nk"))
        ended = await Cli("--server", server.url, "--nkey", tmp_path / "other.nk", "--timeout", "2s")("receipts", "ls")
        assert (ended.code, ended.out) == (4, "")
        assert "authorization" in ended.error.lower()
        monkeypatch.setenv("NATS_NKEY", str(tmp_path / "user.nk"))
        await works(Cli("--server", server.url))


async def test_credentials(tmp_path, monkeypatch):
    operator, account, user = Key(OPERATOR), Key(ACCOUNT), Key(USER)
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    streams = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    account_jwt = operator.jwt(account.public, "A", "account", limits=limits | streams)
    user_jwt = account.jwt(user.public, "u", "user", subs=-1, data=-1, payload=-1)
    system = Key(ACCOUNT)
    system_jwt = operator.jwt(system.public, "SYS", "account", limits=limits)
    config = f"""
operator: {operator.jwt(operator.public, "O", "operator", system_account=system.public)}
resolver: MEMORY
resolver_preload: {{ {account.public}: {account_jwt}, {system.public}: {system_jwt} }}
system_account: {system.public}
"""
    (tmp_path / "u.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    async with embedded(config=config) as server:
        where = ("--server", server.url)
        await works(Cli(*where, "--creds", tmp_path / "u.creds"))
        await works(Cli(*where, "--jwt", user_jwt, "--seed", user.seed))
        contexts = tmp_path / "config" / "nats" / "context"
        contexts.mkdir(parents=True)
        (contexts / "prod.json").write_text(json.dumps({"url": server.url, "creds": str(tmp_path / "u.creds")}))
        await works(Cli("--context", "prod"))
        monkeypatch.setenv("NATS_CREDS", str(tmp_path / "u.creds"))
        await works(Cli(*where))
