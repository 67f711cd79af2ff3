"""How the command line finds its server: flags, then the environment, then a context, as the nats CLI does."""

from __future__ import annotations

import base64
import json

import pytest

from natsreceipts.cli.connection import connection_flags, target_of
from natsreceipts.cli.exits import Exit, Failure

SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
CREDS = f"""-----BEGIN NATS USER JWT-----
eyJ0eXAi.e30.sig
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{SEED}
------END USER NKEY SEED------
"""


def target(**flags):
    defaults = {name: None for name in connection_flags.__annotations__ if name != "return"}
    return target_of({**defaults, **flags})


@pytest.fixture
def contexts(tmp_path):
    """Write contexts where the nats CLI keeps them; the first one is selected."""

    def write(**named):
        folder = tmp_path / "config" / "nats"
        (folder / "context").mkdir(parents=True)
        (folder / "context.txt").write_text(next(iter(named)))
        for name, settings in named.items():
            (folder / "context" / f"{name}.json").write_text(json.dumps(settings))

    return write


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    monkeypatch.delenv("NATS_URL", raising=False)


def test_without_any_it_is_this_machine():
    assert target() == (["nats://127.0.0.1:4222"], 5.0, {})


def test_flags_before_environment_before_context(contexts, monkeypatch):
    contexts(prod={"url": "nats://ctx:1", "inbox_prefix": "_CTX"}, other={"url": "nats://other:1"})
    assert target().servers == ["nats://ctx:1"]
    assert target(context="other").servers == ["nats://other:1"]
    assert target(no_context=True).servers == ["nats://127.0.0.1:4222"]
    monkeypatch.setenv("NATS_CONTEXT", "other")
    assert target().servers == ["nats://other:1"]
    assert target(context="prod").servers == ["nats://ctx:1"]
    assert target(no_context=True).servers == ["nats://127.0.0.1:4222"]
    monkeypatch.setenv("NATS_URL", "nats://env:1, nats://env:2")
    assert target().servers == ["nats://env:1", "nats://env:2"]
    assert target(server="nats://flag:1").servers == ["nats://flag:1"]
    assert target(context="prod").settings == {"inbox_prefix": "_CTX"}
    assert target(context="prod", inbox_prefix="_FLAG").settings == {"inbox_prefix": "_FLAG"}


def test_credentials_are_never_mixed(contexts, monkeypatch):
    contexts(prod={"url": "nats://ctx:1", "user": "ctx", "password": "c"})
    assert target().settings == {"user": "ctx", "password": "c"}
    assert target(server="nats://me:pw@flag:1").settings == {}
    assert target(token="t").settings == {"token": "t"}
    assert target(user="ann", password="a").settings == {"user": "ann", "password": "a"}
    assert target(user="t").settings == {"token": "t"}  # a user name alone is a token
    monkeypatch.setenv("NATS_PASSWORD", "e")
    assert target(user="ann").settings == {"user": "ann", "password": "e"}
    monkeypatch.setenv("NATS_USER", "env")
    assert target().settings == {"user": "env", "password": "e"}
    assert target(token="t").settings == {"token": "t"}


def test_a_user_without_a_password_in_a_context(contexts):
    contexts(prod={"user": "ctx"})
    assert target().settings == {"user": "ctx", "password": ""}


def test_credentials_files_and_references(contexts, monkeypatch, tmp_path):
    pytest.importorskip("nkeys")
    (tmp_path / "me.creds").write_text(CREDS)
    (tmp_path / "me.nk").write_text(SEED + "\n")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    inline = "data:;base64," + base64.b64encode(CREDS.encode()).decode()
    for creds in (str(tmp_path / "me.creds"), f"file://{tmp_path}/me.creds", "$HERE/me.creds", "~/me.creds", inline):
        assert str(target(creds=creds).settings["user_credentials"]) == CREDS
    monkeypatch.setenv("NATS_CREDS", str(tmp_path / "me.creds"))
    assert str(target().settings["user_credentials"]) == CREDS
    assert target(nkey=str(tmp_path / "me.nk")).settings == {"nkeys_seed_str": SEED}
    made = str(target(jwt="eyJ0eXAi.e30.sig", seed=SEED).settings["user_credentials"])
    assert made.splitlines()[1] == "eyJ0eXAi.e30.sig"
    assert SEED in made.splitlines()
    monkeypatch.delenv("NATS_CREDS")
    monkeypatch.setenv("SECRET", "hidden")
    contexts(prod={"token": "env://SECRET"}, creds={"creds": "~/me.creds"}, nkey={"nkey": "$HERE/me.nk"})
    assert target().settings == {"token": "hidden"}
    assert str(target(context="creds").settings["user_credentials"]) == CREDS
    assert target(context="nkey").settings == {"nkeys_seed_str": SEED}


def test_a_context_by_its_file(tmp_path):
    file = tmp_path / "elsewhere.json"
    file.write_text(json.dumps({"url": "nats://file:1", "tls_first": True, "color_scheme": "dark"}))
    assert target(context=str(file)) == (["nats://file:1"], 5.0, {"tls_handshake_first": True})


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("500ms", 0.5), ("1m30s", 90.0), ("2", 2.0), ("1.5s", 1.5), ("1h", 3600.0)]
)
def test_times(text, seconds, monkeypatch):
    assert target(timeout=text).timeout == seconds
    monkeypatch.setenv("NATS_TIMEOUT", text)
    assert target().timeout == seconds


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"nsc": "nsc://o/a/u"}, "nsc"),
        ({"creds": "nsc://o/a/u"}, "nsc:// references are not supported"),
        ({"token": "op://vault/item"}, "op:// references are not supported"),
        ({"socks_proxy": "socks5://p:1"}, "a SOCKS proxy"),
        ({"jetstream_domain": "hub"}, "a JetStream domain"),
        ({"jetstream_api_prefix": "x"}, "a JetStream API prefix"),
        ({"windows_cert_store": "user"}, "Windows certificate store"),
        ({"creds": "/no/such/file"}, "No such file"),
        ({"token": "env://NOT_SET_ANYWHERE"}, "no variable NOT_SET_ANYWHERE"),
        ({"cert": "/no/cert"}, "needs its key"),
        ({"ca": "/no/ca"}, "the TLS files cannot be used (/no/ca)"),
        ({"user_jwt": "x"}, "needs its seed"),
    ],
)
def test_what_cannot_be_honoured_is_refused(contexts, settings, hint):
    contexts(prod=settings)
    with pytest.raises(Failure, match=hint.replace("(", r"\(").replace(")", r"\)")) as refused:
        target()
    assert refused.value.code is Exit.USAGE
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"context": "nowhere"}, "context 'nowhere' is unknown"),
        ({"context": "../prod"}, "use a name of `nats context ls`"),
        ({"timeout": "soon"}, "use a time like 5s"),
        ({"creds": __file__}, "hold no user JWT and seed"),
        ({"nkey": __file__ + "x"}, "cannot be read"),
    ],
)
def test_what_is_no_use(contexts, flags, hint):
    contexts(prod={})
    with pytest.raises(Failure, match=hint.replace("`", "`")):
        target(**flags)


def test_an_unreadable_context(contexts, tmp_path):
    contexts(prod={})
    (tmp_path / "config" / "nats" / "context" / "prod.json").write_text("{")
    with pytest.raises(Failure, match="cannot be read"):
        target()


def test_a_socks_proxy_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("NATS_SOCKS_PROXY", "socks5://p:1")
    with pytest.raises(Failure, match="SOCKS"):
        target()


def test_a_selected_context_that_is_gone_is_told(contexts, tmp_path):
    contexts(prod={})
    (tmp_path / "config" / "nats" / "context" / "prod.json").unlink()
    with pytest.raises(Failure, match="is unknown"):
        target()
