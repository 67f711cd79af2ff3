"""http_lookup against an HTTP server: what landed, what did not, and what says nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from natsreceipts import AmbiguousCall, InvalidSetting, NotLanded, Unknown, sync

httpx = pytest.importorskip("httpx")
from natsreceipts.verifiers import Undecided, http_lookup  # noqa: E402


class Bank(ThreadingHTTPServer):
    """Books a charge for every PUT /charges/KEY, and answers GETs of it, or says what it is told to."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.charges = {}
        self.says = []
        self.asked = []
        self.hangs = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.charges[self.path] = json.loads(body)
        self.answer(201, {})

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        if self.server.says:
            self.answer(*self.server.says.pop(0))
        elif self.path in self.server.charges:
            self.answer(200, self.server.charges[self.path])
        else:
            self.answer(404, {"code": "no_such_charge"})

    def answer(self, status, body, **headers):
        if status == "hang":
            self.server.hangs.wait(60)
            status = 200
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def bank():
    bank = Bank()
    thread = threading.Thread(target=bank.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield bank
    bank.hangs.set()
    bank.shutdown()
    thread.join()
    bank.server_close()


@pytest.fixture
def charging(bank):
    """The effect: the bank books a charge under the call's key."""

    async def charge(call):
        async with httpx.AsyncClient() as client:
            await client.put(f"{bank.url}/charges/{call.idempotency_key}", json={"id": "ch-1"})

    return charge


def lookup(bank, **settings):
    return http_lookup(bank.url + "/charges/{idempotency_key}", **{"settled_after": 0.05} | settings)


async def again():
    return "charged again"


async def never():
    raise AssertionError("this must not be executed")


async def test_what_landed_is_replayed(run, bank, charging, left_behind):
    await left_behind("charge", {}, charging)
    assert await run.execute("charge", {}, never, verify=lookup(bank)) == {"id": "ch-1"}
    assert await run.execute("charge", {}, never) == {"id": "ch-1"}
    assert len(bank.charges) == 1


async def test_what_did_not_land_is_executed(run, bank, left_behind):
    await left_behind("charge", {})
    assert await run.execute("charge", {}, again, verify=lookup(bank)) == "charged again"


@pytest.mark.parametrize("status", [202, 301, 302, 307, 400, 401, 403, 405, 409, 410, 429, 500, 502, 503])
async def test_what_says_nothing_leaves_it_ambiguous(run, bank, left_behind, status):
    await left_behind("charge", {})
    bank.says = [(status, {"id": "?"})]
    with pytest.raises(AmbiguousCall, match=f"answered {status}"):
        await run.execute("charge", {}, never, verify=lookup(bank))
    assert len(bank.asked) == 1


async def test_a_redirect_is_not_followed_whatever_the_client_does(run, bank, left_behind):
    await left_behind("charge", {})
    bank.says = [(302, {}), (200, {"page": "log in"})]
    async with httpx.AsyncClient(follow_redirects=True) as client:
        with pytest.raises(AmbiguousCall, match="answered 302"):
            await run.execute("charge", {}, never, verify=lookup(bank, client=client))
    assert len(bank.says) == 1


async def test_no_answer_leaves_it_ambiguous(run, bank, left_behind):
    await left_behind("charge", {})
    bank.says = [("hang", {})]
    with pytest.raises(AmbiguousCall, match="could not be asked"):
        await run.execute("charge", {}, never, verify=lookup(bank, timeout=0.3))
    with pytest.raises(AmbiguousCall, match="could not be asked"):
        nobody = http_lookup("http://127.0.0.1:1/{idempotency_key}", settled_after=0)
        await run.execute("charge", {}, never, verify=nobody)


async def test_absence_counts_only_once_it_has_lasted(run, bank, charging, left_behind):
    """The request of the dead attempt was still on its way when the first look was made."""
    await left_behind("charge", {})
    verify = lookup(bank, settled_after=10)
    waiting = asyncio.ensure_future(run.execute("charge", {}, never, verify=verify))
    while not bank.asked:
        await asyncio.sleep(0.01)
    assert not waiting.done()

    class Late:
        idempotency_key = run.key("charge", {}).idempotency_key

    await charging(Late)
    assert await waiting == {"id": "ch-1"}
    assert len(bank.asked) > 1


async def test_absence_proves_nothing_where_it_is_said_so(run, bank, left_behind):
    await left_behind("charge", {})
    with pytest.raises(AmbiguousCall, match="proves nothing"):
        await run.execute("charge", {}, never, verify=lookup(bank, settled_after=None))


async def test_a_doubt_after_absence_stays_a_doubt(run, bank, left_behind):
    await left_behind("charge", {})
    bank.says = [(404, {}), (404, {}), (500, {})]
    with pytest.raises(AmbiguousCall, match="answered 500"):
        await run.execute("charge", {}, never, verify=lookup(bank))


async def test_a_404_of_somebody_else_is_no_word_on_the_call(run, bank, left_behind):
    await left_behind("charge", {})

    def ours(response):
        return (
            response.headers["content-type"] == "application/json" and response.json().get("code") == "no_such_charge"
        )

    bank.says = [(404, {"error": "no route"})]
    with pytest.raises(AmbiguousCall, match="its own word"):
        await run.execute("charge", {}, never, verify=lookup(bank, absent=ours))
    assert await run.execute("charge", {}, again, verify=lookup(bank, absent=ours)) == "charged again"


async def test_read_gives_the_result_or_a_verdict(run, bank, charging, left_behind):
    def of_a_search(response):
        found = response.json()["data"]
        if not found:
            return NotLanded()
        return Unknown() if found[0]["state"] == "pending" else found[0]["id"]

    for n, (data, outcome) in enumerate(
        [([{"id": "ch-7", "state": "done"}], "ch-7"), ([], "charged again"), ([{"id": "x", "state": "pending"}], None)]
    ):
        await left_behind("charge", {"n": n})
        bank.says = [(200, {"data": data})] * 6
        verify = lookup(bank, read=of_a_search)
        if outcome is None:
            with pytest.raises(AmbiguousCall):
                await run.execute("charge", {"n": n}, never, verify=verify)
        else:
            assert await run.execute("charge", {"n": n}, again, verify=verify) == outcome


async def test_a_result_that_cannot_be_read_is_no_absence(run, bank, left_behind):
    await left_behind("charge", {})
    bank.says = [(200, b"{not json")]
    with pytest.raises(AmbiguousCall, match="verify= failed"):
        await run.execute("charge", {}, never, verify=lookup(bank))
    bank.says = [(204, b"")]
    assert await run.execute("charge", {}, never, verify=lookup(bank)) is None


async def test_credentials_go_along_and_other_text_is_text(run, bank, charging, left_behind):
    await left_behind("charge", {})
    bank.says = [
        (
            200,
            b"\xc3\xa4",
        )
    ]
    verify = http_lookup(
        lambda call: f"{bank.url}/charges/{call.key.run}",
        settled_after=0,
        auth=("ann", "secret"),
        headers={"X-Version": "2"},
        read=lambda response: response.text,
    )
    assert await run.execute("charge", {}, never, verify=verify) == "ä"
    path, headers = bank.asked[0]
    assert (path, headers["X-Version"]) == ("/charges/run-1", "2")
    assert headers["Authorization"].startswith("Basic ")


async def test_on_record_is_who_looked(run, bank, charging, left_behind, toolkit):
    await left_behind("charge", {}, charging)
    await run.execute("charge", {}, never, verify=lookup(bank))
    assert (await toolkit.receipts.get(run.key("charge", {}))).resolved.by == "verifier http_lookup"


async def test_it_can_be_asked_by_itself(run, bank, charging):
    call = run.call("charge", {})
    with pytest.raises(Undecided):
        await lookup(bank, settled_after=None)(call)
    assert await lookup(bank, settled_after=0)(call) == NotLanded()


def test_bad_settings_are_refused():
    for bad in (
        {"url": "http://bank/charges"},
        {"settled_after": -1},
        {"settled_after": float("nan")},
        {"settled_after": True},
        {"timeout": 0},
        {"client": httpx.AsyncClient(), "auth": ("a", "b")},
    ):
        with pytest.raises(InvalidSetting):
            http_lookup(**{"url": "http://bank/{idempotency_key}", "settled_after": 1} | bad)


def test_it_serves_code_without_an_event_loop(server, namespace, bank):
    with sync.connect(server.url, namespace=namespace, provision=True) as toolkit:
        run = toolkit.run("acme", "run-1", verify=lookup(bank))
        with pytest.raises(TimeoutError), run.call("charge", {}) as call:
            bank.charges[f"/charges/{call.idempotency_key}"] = {"id": "ch-1"}
            raise TimeoutError
        assert run.execute("charge", {}, lambda: 1 / 0) == {"id": "ch-1"}
