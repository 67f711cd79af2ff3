"""What wake does for each thing that a receipt can say, and for each reason for which its absence says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import pytest
from session_support import DIALECTS, Desk, last_seqs
from support import LEASE, bucket_of, newest, put, revisions, toolkit_of, until

from natsreceipts import NotApplied, SessionBusy, tool

NEVER, UNKNOWN = "interrupted_never_started", "interrupted_outcome_unknown"
ARGS = {"to": "ada"}


def failed(message="no", *, not_applied=True, **more):
    return {"error": {"type": "E", "message": message, "notApplied": not_applied}, **more}


# name: (status and fields of the receipt (None: there is none), effect as the host says it now or None,
#        error kind of the close or None, words that the model reads, whether a fence is asked for, status afterwards)
ROWS = {
    "completed": (("completed", {"result": {"json": {"id": "m-1"}}}), None, None, '"m-1"', False, "completed"),
    "completed, a text": (("completed", {"result": {"json": "sent"}}), None, None, "sent", False, "completed"),
    "completed with null": (("completed", {"result": {"json": None}}), None, None, "null", False, "completed"),
    "completed, steps and effect": (
        ("completed", {"effect": "resumable", "steps": {"a": {"json": 1}}, "result": {"json": "r"}}),
        "opaque",
        None,
        "r",
        False,
        "completed",
    ),
    "absent": (None, None, NEVER, "never started", True, "withdrawn"),
    "absent, idempotent": (None, "idempotent", NEVER, "never started", True, "withdrawn"),
    "withdrawn for another session": (
        ("withdrawn", {"fences": {"elsewhere": 99}}),
        None,
        NEVER,
        "never started",
        True,
        "withdrawn",
    ),
    "withdrawn at a lower place": (
        ("withdrawn", {"fences": {"chat": 1}}),
        None,
        NEVER,
        "never started",
        True,
        "withdrawn",
    ),
    "withdrawn at a higher place": (
        ("withdrawn", {"fences": {"chat": 10_000}}),
        None,
        NEVER,
        "never started",
        False,
        "withdrawn",
    ),
    "failed, not applied": (("failed", failed("refused: no such user")), None, None, "no such user", True, "failed"),
    "failed, not applied, at a higher place": (
        ("failed", failed("refused", fences={"chat": 10_000})),
        None,
        None,
        "refused",
        False,
        "failed",
    ),
    "failed, with nothing to say": (("failed", failed("")), None, None, "the call was not carried out", True, "failed"),
    "failed by a resolver": (
        ("failed", failed("n", resolved={"by": "ada", "reason": "I looked in the outbox"})),
        None,
        None,
        "the call was not carried out: I looked in the outbox",
        True,
        "failed",
    ),
    "failed, resumable": (
        ("failed", failed("half way", not_applied=False, effect="resumable")),
        "resumable",
        None,
        "half way",
        True,
        "failed",
    ),
    "failed, idempotent, nobody says the effect now": (
        ("failed", failed("half way", not_applied=False, effect="idempotent")),
        None,
        None,
        "half way",
        True,
        "failed",
    ),
    "failed, idempotent, and opaque now": (
        ("failed", failed("half way", not_applied=False, effect="idempotent")),
        "opaque",
        UNKNOWN,
        "refused until",
        False,
        "failed",
    ),
    "failed, open": (
        ("failed", failed("half way", not_applied=False, effect="idempotent", open=True, attempts=2)),
        "idempotent",
        None,
        "half way",
        True,
        "failed",
    ),
    "ambiguous": (("ambiguous", {}), None, UNKNOWN, "refused until", False, "ambiguous"),
    "ambiguous, idempotent now": (("ambiguous", {}), "idempotent", UNKNOWN, "refused until", False, "ambiguous"),
    "expired": (("running", {"leaseMs": 1}), None, UNKNOWN, "refused until", False, "ambiguous"),
    "expired, idempotent now": (
        ("running", {"leaseMs": 1}),
        "idempotent",
        UNKNOWN,
        "refused until",
        False,
        "ambiguous",
    ),
    "expired, idempotent": (
        ("running", {"leaseMs": 1, "effect": "idempotent"}),
        "idempotent",
        UNKNOWN,
        "safe to issue again",
        False,
        "running",
    ),
    "expired, resumable, nobody says the effect now": (
        ("running", {"leaseMs": 1, "effect": "resumable"}),
        None,
        UNKNOWN,
        "safe to issue again",
        False,
        "running",
    ),
    "expired, idempotent, and opaque now": (
        ("running", {"leaseMs": 1, "effect": "idempotent"}),
        "opaque",
        UNKNOWN,
        "refused until",
        False,
        "running",
    ),
}


async def expect(desk, name, recovered, args, entry):
    """That the report and the receipt say what the row asks for."""
    stood, _, kind, words, fenced, after = ROWS[name]
    assert (recovered.error_kind, recovered.tool_name) == (kind, "send")
    assert words in recovered.text, (words, recovered.text)
    assert recovered.why
    assert recovered.kv_key == desk.key("send", args).kv_key
    record = await desk.receipt("send", args)
    assert record["status"] == after
    # What it said before wake wrote there that no claim from before is accepted.
    assert recovered.said == ("absent" if stood is None else after)
    fence = (record.get("fences") or {}).get("chat")
    if fenced:
        assert fence is not None
        assert fence >= entry.seq
    elif stood is None or stood[1].get("fences") is None:
        assert fence is None
    if stood is not None:
        for other, place in (stood[1].get("fences") or {}).items():
            assert record["fences"][other] >= place
        kept = {"effect", "attempts", "steps", "holder", "open", "result", "resolved"} & record.keys()
        assert {field: record[field] for field in kept if field in stood[1]} == {
            field: stood[1][field] for field in kept if field in stood[1]
        }
    revision = (await newest(desk.nc, desk.namespace, desk.key("send", args))).seq
    assert recovered.revision == revision


@pytest.mark.parametrize("name", ROWS)
async def test_a_row_of_the_table(desk, name):
    desk = desk("anthropic")
    stood, effect, kind, _, _, _ = ROWS[name]
    await desk.hears()
    entry = await desk.asks(("t1", "send", ARGS))
    if stood is not None:
        await desk.stands("send", ARGS, stood[0], **stood[1])
    report = await desk.wakes("send", effects={"send": effect} if effect else {})
    (recovered,) = report.recovered
    await expect(desk, name, recovered, ARGS, entry)
    assert await desk.context() == [("t1", recovered.text)]
    written = (await desk.entries())[-1]
    assert (written["id"], written["seq"]) == (recovered.entry_id, report.last_seq)
    assert written.get("close") == ({"toolCallId": "t1", "errorKind": kind} if kind else None)
    assert written["receipt"]["key"] == recovered.kv_key
    assert written["receipt"]["revision"] == recovered.revision
    async with desk.quiet():
        assert (await desk.wakes("send")).recovered == ()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_row_in_one_batch(desk, other, dialect):
    """One turn with a call for each row: in order, accepted by the vendor's rules, and read so by everybody."""
    desk = desk(dialect)
    calls = {f"t{n}": (name, {"n": n}) for n, name in enumerate(ROWS)}
    await desk.hears()
    entry = await desk.asks(*((call_id, "send", args) for call_id, (_, args) in calls.items()))
    for name, args in calls.values():
        if ROWS[name][0] is not None:
            await desk.stands("send", args, ROWS[name][0][0], **ROWS[name][0][1])
    report = await desk.wakes("send")
    assert [each.tool_call_id for each in report.recovered] == [*calls]
    for each in report.recovered:
        name, args = calls[each.tool_call_id]
        if ROWS[name][1] is None:
            if ROWS[name][2] is None:
                await expect(desk, name, each, args, entry)
            else:
                assert each.error_kind == ROWS[name][2]
    found = await desk.context()
    assert [call_id for call_id, _ in found] == [*calls]
    texts = {each.tool_call_id: each.text for each in report.recovered}
    for call_id, content in found:
        if isinstance(content, str):
            assert content == texts[call_id]
        else:
            assert content == json.loads(texts[call_id])  # a value stays a value there
    again = desk.at(other)
    async with desk.quiet():
        assert (await again.wakes("send")).recovered == ()
    assert await again.context() == found
    await desk.hears("go on")
    await desk.context()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_error_on_record_is_an_error_in_the_dialect(desk, dialect):
    desk = desk(dialect)
    await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "failed", **failed("refused by the provider"))
    await desk.wakes("send")
    message = json.dumps((await desk.log.context()).messages[-1])
    assert "refused by the provider" in message
    mark = {
        "anthropic": '"is_error": true',
        "pydantic-ai": '"outcome": "failed"',
        "langchain": '"status": "error"',
        "neutral": '"isError": true',
    }
    assert mark.get(dialect, "") in message


# ---------------------------------------------------------------- absence that proves nothing


@tool(effect="read")
async def lookup(to: str) -> str:
    return to


@tool
async def send(to: str) -> str:
    return to


def raising(_arguments):
    raise RuntimeError("the host's own trouble")


def unhashable(_arguments):
    return {"when": object()}


def no_pair(_arguments):
    return 1, "a", "b"


NOTHING = {
    # name: (options of wake, the error kind, words)
    "the tool is not guarded": ({}, UNKNOWN, "first look"),
    "the tool is not guarded, and reads": ({"effects": {"send": "read"}}, UNKNOWN, "only reads"),
    "the tool is not guarded, and idempotent": ({"effects": {"send": "idempotent"}}, UNKNOWN, "same state"),
    "the tool is not guarded, and resumable": ({"effects": {"send": "resumable"}}, UNKNOWN, "first look"),
    "the tool reads, as it says": ({"guarded": {"send": lookup}}, UNKNOWN, "only reads"),
    "the tool reads, as the host says": (
        {"guarded": {"send": lambda arguments: arguments}, "effects": {"send": "read"}},
        UNKNOWN,
        "only reads",
    ),
    "the key function raises": ({"guarded": {"send": raising}}, UNKNOWN, "first look"),
    "the key function gives what has no canonical form": ({"guarded": {"send": unhashable}}, UNKNOWN, "first look"),
    "the key function gives neither form": ({"guarded": {"send": no_pair}}, UNKNOWN, "first look"),
    "the arguments are not the tool's": ({"guarded": {"send": lambda a: send.arguments(**a, more=1)}}, UNKNOWN, ""),
    "the live caller saw it start": (
        {"guarded": {"send": send}, "started": {"t1"}},
        UNKNOWN,
        "first look",
    ),
    "unguarded, and seen to start": ({"started": {"t1"}}, UNKNOWN, "first look"),
    "unguarded, and never started": ({"started": {"t2"}}, NEVER, "never started"),
    "unguarded, and nothing started": ({"started": ()}, NEVER, "never started"),
    "a read that never started": ({"guarded": {"send": lookup}, "started": ()}, NEVER, "never started"),
}


@pytest.mark.parametrize("name", NOTHING)
async def test_absence_proves_nothing_where(desk, name):
    desk = desk()
    options, kind, words = NOTHING[name]
    await desk.asks(("t1", "send", ARGS))
    before = await last_seqs(desk.nc, desk.namespace)
    (recovered,) = (await desk.wakes(**options)).recovered
    assert recovered.error_kind == kind
    assert words in recovered.text
    # Nothing of what was not known is written: no fence, no judgement.
    assert (await last_seqs(desk.nc, desk.namespace))[0] == before[0]
    await desk.context()


async def test_a_tool_with_a_stricter_effect_than_the_host_says_leaves_receipts(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    (recovered,) = (await desk.wakes(guarded={"send": send}, effects={"send": "read"})).recovered
    assert recovered.error_kind == NEVER
    assert await desk.fence("send", ARGS) is not None


async def test_a_call_whose_entry_names_no_run(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS), run=None)
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.error_kind, recovered.kv_key, recovered.said) == (UNKNOWN, None, None)


async def test_another_run_of_the_same_arguments_proves_nothing_about_this_one(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS), run="run-2")
    await desk.stands("send", ARGS, "completed")  # in run-1
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.error_kind == NEVER
    assert ".run-2." in recovered.kv_key


@pytest.mark.parametrize("arguments", ['{"to": ', "[1]", '"text"', '{"n": NaN}', '{"n": 1e999}', "7"])
async def test_arguments_that_are_no_json_object(desk, arguments):
    desk = desk("openai-chat")
    call = {"id": "t1", "type": "function", "function": {"name": "send", "arguments": arguments}}
    await desk.log.append({"role": "assistant", "content": None, "tool_calls": [call]}, run="run-1")
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.error_kind == UNKNOWN
    assert "first look" in recovered.text
    await desk.context()


async def test_arguments_that_langchain_could_not_read(desk):
    desk = desk("langchain")
    bad = {"name": "send", "args": '{"to": "a', "id": "t1", "error": "x", "type": "invalid_tool_call"}
    data = {"content": "", "type": "ai", "tool_calls": [], "invalid_tool_calls": [bad]}
    await desk.log.append({"type": "ai", "data": data}, run="run-1")
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.error_kind == UNKNOWN
    await desk.context()


@pytest.mark.parametrize("kind", ["custom_tool_call", "function_call"])
async def test_calls_of_responses(desk, kind):
    desk = desk("openai-responses")
    said = {"input": '{"to": "ada"}'} if kind == "custom_tool_call" else {"arguments": '{"to": "ada"}'}
    await desk.log.append({"type": kind, "id": "x", "call_id": "t1", "name": "send", **said}, run="run-1")
    await desk.stands("send", ARGS, "completed")
    (recovered,) = (await desk.wakes("send")).recovered
    # Free text is no object, even where it reads as one: nothing is looked up under it.
    assert recovered.error_kind == (UNKNOWN if kind == "custom_tool_call" else None)
    await desk.context()


@pytest.mark.parametrize(
    ("value", "said"),
    [(b"{not json", "unreadable"), (b"", "unreadable"), (b'{"v":2,"write":"x"}', "unreadable")],
    ids=["damaged", "empty", "newer"],
)
async def test_a_receipt_that_cannot_be_read(desk, value, said):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    await put(desk.nc, desk.namespace, desk.key("send", ARGS), value)
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.error_kind, recovered.said) == (UNKNOWN, said)
    assert len(await _raw(desk, ARGS)) == 1


async def _raw(desk, args):
    """How many revisions a key has, whatever they say."""
    found, sequence = [], 1
    bucket = bucket_of(desk.namespace)
    while True:
        try:
            message = await desk.nc.jetstream().get_msg(
                f"KV_{bucket}", seq=sequence, subject=f"$KV.{bucket}.{desk.key('send', args).kv_key}", next=True
            )
        except Exception:
            return found
        found.append(message)
        sequence = message.seq + 1


async def test_a_receipt_with_another_names(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    record = {
        "v": 1, "write": "0" * 24, "status": "completed", "tenantId": "acme", "runId": "run-1", "toolName": "other",
        "argsHash": desk.key("send", ARGS).args_hash, "effect": "opaque", "attempts": 1, "result": {"json": 1},
    }  # fmt: skip
    await put(desk.nc, desk.namespace, desk.key("send", ARGS), record)
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.error_kind, recovered.said) == (UNKNOWN, "unreadable")


@pytest.mark.parametrize("marker", ["DEL", "PURGE"])
async def test_a_receipt_that_was_erased(desk, marker):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "completed")
    headers = {"KV-Operation": marker}
    await put(desk.nc, desk.namespace, desk.key("send", ARGS), b"", headers=headers)
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.error_kind, recovered.said) == (UNKNOWN, "erased")


async def test_a_completed_receipt_without_its_result(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "completed", result={"msgpack": "!!"})
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.error_kind, recovered.said) == (UNKNOWN, "unreadable")


async def test_a_call_that_is_older_than_the_bucket(server, namespace, nc, desk, bucket):
    """The receipts' bucket was lost and made again; the log of sessions is still there."""
    old = desk()
    await old.asks(("t1", "send", ARGS))
    await old.run.execute("send", ARGS, _done)
    await nc.jetstream().delete_stream(f"KV_{bucket_of(namespace)}")
    async with toolkit_of(server.url, namespace) as later:
        desk = old.at(later)
        (recovered,) = (await desk.wakes("send")).recovered
        assert (recovered.error_kind, recovered.said) == (UNKNOWN, "absent")
        assert await desk.receipt("send", ARGS) is None
        # A call from after that is told of as ever.
        await desk.asks(("t2", "send", {"to": "bob"}))
        (recovered,) = (await desk.wakes("send")).recovered
        assert recovered.error_kind == NEVER


async def _done(*_):
    return "done"


HORIZON = 2.0


@pytest.fixture
async def short(server, namespace, nc, bucket):
    """A toolkit whose receipts expire after two seconds, and whose sessions do not."""
    async with toolkit_of(server.url, namespace):
        pass
    await nc.jetstream().delete_stream(f"KV_{bucket_of(namespace)}")
    async with toolkit_of(server.url, namespace, retention=HORIZON, lease=0.2) as toolkit:
        yield toolkit


async def gone(nc, namespace, key):
    """Wait until a receipt has expired."""

    async def look():
        return not await revisions(nc, namespace, key)

    await until(look, timeout=20)


async def test_a_call_that_is_older_than_the_horizon(namespace, nc, short):
    """Its effect ran, and the receipt of that has expired: nothing can be said of it, by whoever wrote the log or read
    it. Nor of a call that is nearly as old: between two looks its receipt may have gone."""
    desk, young = (Desk(short, nc, namespace, "neutral", session) for session in ("chat", "young"))
    await desk.asks(("t1", "send", ARGS))
    await young.asks(("t1", "send", {"to": "bob"}))
    reader = desk.at(short)
    await reader.log.load()
    await desk.run.execute("send", ARGS, _done, lease=LEASE)
    await asyncio.sleep(HORIZON * 0.91)
    (recovered,) = (await young.wakes("send")).recovered
    assert recovered.error_kind == UNKNOWN
    await gone(nc, namespace, desk.key("send", ARGS))
    (dry,) = (await desk.wakes("send", dry_run=True)).recovered
    (recovered,) = (await reader.wakes("send")).recovered
    assert (dry.error_kind, recovered.error_kind, recovered.said) == (UNKNOWN, UNKNOWN, "absent")
    assert await desk.receipt("send", ARGS) is None


async def test_a_withdrawal_from_later_than_what_it_cannot_know(server, namespace, nc, bucket, desk):
    """The bucket was lost after the effect; then another session's wake withdrew an equal call. For the first session
    that proves nothing: the withdrawal is newer than what was lost."""
    old = desk(session="s")
    await old.asks(("t1", "send", ARGS))
    await old.run.execute("send", ARGS, _done)
    await nc.jetstream().delete_stream(f"KV_{bucket_of(namespace)}")
    async with toolkit_of(server.url, namespace) as later:
        second = desk(session="t").at(later)
        await second.asks(("u1", "send", ARGS))
        (recovered,) = (await second.wakes("send")).recovered
        assert recovered.error_kind == NEVER
        (recovered,) = (await old.at(later).wakes("send")).recovered
        assert recovered.error_kind == UNKNOWN


# ---------------------------------------------------------------- how keys are made


async def test_distinct_calls(desk):
    desk = desk()
    await desk.asks(("t1", "send", {"to": "ada", "n": 1}), ("t2", "send", {"to": "ada", "n": 2}))
    key = desk.key("send", {"to": "ada"}, distinct="2")
    await desk.run.execute("send", {"to": "ada"}, _done, distinct="2")

    def by(arguments):
        return {"to": arguments["to"]}, str(arguments["n"])

    first, second = (await desk.wakes(guarded={"send": by})).recovered
    assert (first.error_kind, second.error_kind) == (NEVER, None)
    assert second.kv_key == key.kv_key
    assert second.text == "done"


async def test_equal_calls_that_their_ids_set_apart(desk):
    desk = desk()
    await desk.run.execute("send", {"to": "ada"}, _done, distinct="b")
    await desk.asks(("a", "send", {"to": "ada"}), ("b", "send", {"to": "ada"}))
    report = await desk.wakes(guarded={"send": lambda arguments, call_id: (arguments, call_id)})
    assert [(call.tool_call_id, call.said, call.error_kind) for call in report.recovered] == [
        ("a", "absent", NEVER),
        ("b", "completed", None),
    ]


async def test_a_key_function_that_changes_what_it_is_given(desk):
    """The log's own messages are not the host's to change."""
    desk = desk()
    entry = await desk.asks(("t1", "send", {"to": "ada", "nested": {"trace": 7}}))
    before = json.dumps(entry.body)

    def by(arguments):
        arguments.pop("trace", None)
        del arguments["nested"]["trace"]
        return {"to": arguments.pop("to")}

    await desk.run.execute("send", {"to": "ada"}, _done)
    (recovered,) = (await desk.wakes(guarded={"send": by})).recovered
    assert recovered.text == "done"
    loaded = await desk.log.load()
    assert json.dumps(loaded.messages[0]) == before
    assert json.dumps((await desk.log.context()).messages[0]) == before


@tool(name="mail", effect="idempotent")
async def post(to: str, subject: str = "hi") -> str:
    return f"{to}: {subject}"


async def test_a_tool_is_keyed_as_the_worker_calls_it(desk, run):
    """Under its own name, not the one that the model uses; defaults filled in."""
    desk = desk()
    await desk.asks(("t1", "send_mail", {"to": "ada"}), ("t2", "send_mail", {"to": "bob", "subject": "ho"}))
    async with run:
        await post("ada")
    first, second = (await desk.wakes(guarded={"send_mail": post})).recovered
    assert (first.text, first.tool_name, first.error_kind) == ("ada: hi", "send_mail", None)
    assert second.error_kind == NEVER
    assert ".mail." in second.kv_key


async def test_a_digest_of_the_toolkits_own(server, namespace, nc, bucket, desk):
    from natsreceipts import hmac_digest

    async with toolkit_of(server.url, namespace, digest=hmac_digest(b"secret" * 6)) as toolkit:
        desk = desk(where=toolkit)
        await desk.asks(("t1", "send", ARGS))
        await desk.run.execute("send", ARGS, _done)
        (recovered,) = (await desk.wakes("send")).recovered
        assert recovered.text == "done"


# ---------------------------------------------------------------- equal calls, reused ids


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_equal_calls_in_one_batch_are_one_call(desk, dialect):
    desk = desk(dialect)
    await desk.asks(("t1", "send", ARGS), ("t2", "look", {}), ("t3", "send", ARGS))
    await desk.run.execute("send", ARGS, _done)
    first, middle, last = (await desk.wakes("send", "look")).recovered
    assert (first.text, last.text) == ("done", "done")
    assert first.revision == last.revision
    assert middle.error_kind == NEVER
    assert [call_id for call_id, _ in await desk.context()] == ["t1", "t2", "t3"]


async def test_equal_calls_that_never_started_are_fenced_once(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS), ("t2", "send", ARGS))
    before = await last_seqs(desk.nc, desk.namespace)
    recovered = (await desk.wakes("send")).recovered
    assert {each.error_kind for each in recovered} == {NEVER}
    assert (await last_seqs(desk.nc, desk.namespace))[0] == before[0] + 1


async def test_one_doubtful_call_of_two_equal_ones_makes_both_doubtful(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS), ("t2", "send", ARGS))
    recovered = (await desk.wakes("send", started={"t2"})).recovered
    assert {each.error_kind for each in recovered} == {UNKNOWN}
    assert await desk.receipt("send", ARGS) is None


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_id_that_is_used_again(desk, dialect):
    """``call_0`` in every turn: each turn is closed by its own receipt, and what was answered stays answered."""
    desk = desk(dialect)
    for n in range(3):
        await desk.hears(f"turn {n}")
        await desk.asks(("call_0", "send", {"n": n}))
        if n == 1:
            await desk.run.execute("send", {"n": n}, _done)
        elif n == 2:
            await desk.gets("call_0", "by the worker")
        (*recovered,) = (await desk.wakes("send")).recovered
        assert [each.error_kind for each in recovered] == [[NEVER], [None], []][n]
    texts = [text for _, text in await desk.context()]
    assert "never started" in texts[0]
    assert texts[1:] == ["done", "by the worker"]


async def test_a_call_in_the_middle_whose_id_came_again_is_closed_on_the_wire_only(desk):
    """Nothing that is appended can reach it."""
    desk = desk()
    await desk.asks(("call_0", "send", {"n": 0}))
    await desk.asks(("call_0", "send", {"n": 1}))
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.kv_key == desk.key("send", {"n": 1}).kv_key
    view = await desk.log.context()
    assert len(view.closed) == 1
    async with desk.quiet():
        assert (await desk.wakes("send")).recovered == ()


# ---------------------------------------------------------------- busy, dry, suspended


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_live_lease_means_that_nothing_is_written(desk, dry_run):
    desk = desk()
    await desk.asks(("t1", "send", {"n": 1}), ("t2", "send", {"n": 2}), ("t3", "send", {"n": 3}))
    await desk.stands("send", {"n": 2}, "running", leaseMs=60_000)
    await desk.stands("send", {"n": 3}, "running", leaseMs=1)
    async with desk.quiet():
        with pytest.raises(SessionBusy) as caught:
            await desk.wakes("send", dry_run=dry_run)
    assert 30 < caught.value.retry_after <= 66
    assert caught.value.calls == ("send",)


async def test_a_lease_that_this_process_has_watched_to_its_end_is_over(desk):
    """What the waker itself has seen unchanged for a lease and its margin has expired, whatever the clocks say."""
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    await desk.stands("send", ARGS, "running", leaseMs=400)
    report = None
    while report is None:
        try:
            report = await desk.wakes("send")
        except SessionBusy as busy:
            await asyncio.sleep(min(busy.retry_after, 0.5))
    (recovered,) = report.recovered
    assert recovered.said == "ambiguous"


async def test_a_dry_run_tells_everything_and_writes_nothing(desk):
    desk = desk()
    await desk.asks(*((f"t{n}", "send", {"n": n}) for n in range(len(ROWS))))
    for n, (stood, *_) in enumerate(ROWS.values()):
        if stood is not None:
            await desk.stands("send", {"n": n}, stood[0], **stood[1])
    async with desk.quiet():
        dry = await desk.wakes("send", dry_run=True)
    assert {each.entry_id for each in dry.recovered} == {""}
    wet = await desk.wakes("send")
    told = [(each.tool_call_id, each.text, each.error_kind) for each in wet.recovered]
    assert [(each.tool_call_id, each.text, each.error_kind) for each in dry.recovered] == told


async def test_a_suspended_batch_is_left_alone(desk, other):
    desk = desk("anthropic")
    await desk.asks(("t1", "send", {"n": 1}), ("t2", "send", {"n": 2}), ("t3", "look", {}))
    await desk.log.suspend(["t1", "t2"])
    await desk.stands("send", {"n": 1}, "running", leaseMs=60_000)  # not even looked at
    (recovered,) = (await desk.wakes("look", "send")).recovered
    assert recovered.tool_call_id == "t3"
    assert await desk.receipt("send", {"n": 2}) is None
    again = desk.at(other)
    async with desk.quiet():
        assert (await again.wakes("look", "send")).recovered == ()
    view = await again.log.context()
    assert [each.tool_call_id for each in view.suspended] == ["t1", "t2"]
    assert view.closed == ()
    await again.log.resume(["t2"])
    (recovered,) = (await again.wakes("look", "send")).recovered
    assert (recovered.tool_call_id, recovered.error_kind) == ("t2", NEVER)


async def test_a_session_that_needs_nothing(desk):
    desk = desk()
    async with desk.quiet():
        assert (await desk.wakes("send")).recovered == ()
        assert (await desk.wakes("send")).last_seq == 0
    await desk.hears()
    await desk.asks(("t1", "send", ARGS))
    last = await desk.gets("t1")
    async with desk.quiet():
        report = await desk.wakes("send")
    assert (report.recovered, report.last_seq) == ((), last.seq)


async def test_a_close_is_said_in_full_once(desk):
    desk = desk()
    await desk.asks(*((f"t{n}", "send", {"n": n}) for n in range(3)))
    first, *later = (await desk.wakes("send")).recovered
    assert all("above" in each.text and len(each.text) < len(first.text) for each in later)


# ---------------------------------------------------------------- large results


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_result_from_the_object_store(desk, dialect):
    desk = desk(dialect)
    await desk.asks(("t1", "send", ARGS))
    large = "ä" * 200_000

    async def body():
        return large

    await desk.run.execute("send", ARGS, body)
    assert "object" in (await desk.receipt("send", ARGS))["result"]
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.text == large
    assert await desk.context() == [("t1", large)]


@pytest.mark.parametrize("dialect", ["neutral", "openai-chat", "pydantic-ai"])
@pytest.mark.parametrize("value", ["text", "quotes", "object"])
async def test_a_result_that_is_larger_than_the_server_takes(desk, nc, dialect, value):
    """The model is told that it was carried out, and where the result is; the connection lives on."""
    desk = desk(dialect)
    size = nc.max_payload
    large = {"text": "x" * size, "quotes": '"' * (size // 2 + 10), "object": {"rows": ["y" * 100] * (size // 100)}}[
        value
    ]
    await desk.asks(("t1", "send", ARGS))

    async def body():
        return large

    await desk.run.execute("send", ARGS, body)
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.error_kind, recovered.said) == (None, "completed")
    ((_, told),) = await desk.context()
    assert recovered.kv_key in told
    assert "was carried out" in told
    assert len(told) < 1000
    await desk.hears("go on")


async def test_the_report_says_what_the_model_reads_of_a_large_result(desk, nc):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))

    async def body():
        return "x" * nc.max_payload

    await desk.run.execute("send", ARGS, body)
    (dry,) = (await desk.wakes("send", dry_run=True)).recovered
    (recovered,) = (await desk.wakes("send")).recovered
    ((_, told),) = await desk.context()
    assert recovered.text == dry.text == told


@pytest.mark.parametrize(
    "below",
    [0, 2000, 2600, 3000, 3500, 4500],
)
async def test_a_result_about_as_large_as_the_server_takes(desk, nc, below):
    """Whatever its size and the length of the names around it, the session can be woken."""
    desk = desk("openai-chat", session="s" * 170)
    desk.run = desk.toolkit.run("acme", "r" * 1500)
    call_id = "call_" + "i" * 600
    await desk.asks((call_id, "send", ARGS), run="r" * 1500)

    async def body():
        return "x" * (nc.max_payload - below)

    await desk.run.execute("send", ARGS, body)
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.said == "completed"
    ((_, told),) = await desk.context()
    assert "was carried out" in told or len(told) == nc.max_payload - below


async def test_a_result_whose_object_is_gone(desk, nc, namespace):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))

    async def body():
        return "x" * 400_000

    await desk.run.execute("send", ARGS, body)
    await nc.jetstream().delete_stream(f"OBJ_{namespace}-receipt-payloads")
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.error_kind, recovered.said) == (None, "completed")
    assert "was carried out" in recovered.text
    assert "Do not issue it again" in recovered.text
    await desk.context()


async def test_values_that_json_does_not_hold(desk):
    import datetime as dt

    desk = desk("pydantic-ai")
    await desk.asks(("t1", "send", ARGS))

    async def body():
        return {"at": dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "raw": b"\x00\xff", "n": float("inf"), 7: (1, 2)}

    await desk.run.execute("send", ARGS, body)
    (recovered,) = (await desk.wakes("send")).recovered
    ((_, told),) = await desk.context()
    assert told["at"].startswith("2026-01-02")
    assert json.loads(recovered.text) == told


# ---------------------------------------------------------------- a holder that comes back


async def test_a_close_gives_way_to_the_result_of_its_own_attempt(desk, nc, namespace, other):
    desk = desk("anthropic")
    await desk.asks(("t1", "send", ARGS), ("t2", "send", {"to": "bob"}))
    go, entered = asyncio.Event(), asyncio.Event()

    async def body():
        entered.set()
        await go.wait()
        return "it landed"

    holder = asyncio.create_task(desk.run.execute("send", ARGS, body))
    await entered.wait()
    # Its lease is over, as far as anybody else can see.
    record = await desk.receipt("send", ARGS)
    last = (await newest(nc, namespace, desk.key("send", ARGS))).seq
    await put(nc, namespace, desk.key("send", ARGS), record | {"leaseMs": 1}, last=last)
    waker = desk.at(other)
    first, second = (await waker.wakes("send")).recovered
    assert (first.error_kind, first.said) == (UNKNOWN, "ambiguous")
    assert second.error_kind == NEVER
    before = await waker.context()
    assert before[0] == ("t1", first.text)
    go.set()
    assert await holder == "it landed"
    async with desk.quiet():
        assert await waker.context() == [("t1", "it landed"), before[1]]
        assert await waker.context() == [("t1", "it landed"), before[1]]
        assert await desk.at(other).context() == [("t1", "it landed"), before[1]]
    # The log itself says what it said, until the next wake puts it in.
    assert "it landed" not in json.dumps(await desk.entries())
    (settled,) = (await waker.wakes("send")).recovered
    assert (settled.tool_call_id, settled.text, settled.error_kind, settled.said) == (
        "t1",
        "it landed",
        None,
        "completed",
    )
    assert (await desk.entries())[-1]["id"] == settled.entry_id
    async with desk.quiet():
        assert (await waker.wakes("send")).recovered == ()
        assert await waker.context() == [("t1", "it landed"), before[1]]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_close_gives_way_to_what_a_person_settles(desk, other, dialect):
    """That it landed is shown at once; that it did not, only once a wake has seen to it that it cannot any more."""
    desk = desk(dialect)
    await desk.hears()
    await desk.asks(("t1", "send", {"n": 1}), ("t2", "send", {"n": 2}), ("t3", "send", {"n": 3}))
    for n in (1, 2, 3):
        await desk.stands("send", {"n": n}, "ambiguous")
    closes = (await desk.wakes("send")).recovered
    assert {each.error_kind for each in closes} == {UNKNOWN}
    receipts = desk.toolkit.receipts
    by = {"by": "ada", "reason": "looked"}
    await receipts.resolve(desk.key("send", {"n": 1}), revision=closes[0].revision, completed="it is there", **by)
    await receipts.resolve(desk.key("send", {"n": 2}), revision=closes[1].revision, not_applied=True, **by)
    async with desk.quiet():
        assert await desk.context() == [("t1", "it is there"), *((each.tool_call_id, each.text) for each in closes[1:])]
        dry = await desk.wakes("send", dry_run=True)
    assert await desk.fence("send", {"n": 2}) is None
    reports = await asyncio.gather(desk.wakes("send"), desk.at(other).wakes("send"))
    told = sorted((each for report in reports for each in report.recovered), key=lambda each: each.tool_call_id)
    assert [(each.tool_call_id, each.text, each.error_kind, each.said) for each in told] == [
        ("t1", "it is there", None, "completed"),
        ("t2", "the call was not carried out: looked", None, "failed"),
    ]
    assert [(each.tool_call_id, each.text) for each in dry.recovered] == [
        (each.tool_call_id, each.text) for each in told
    ]
    assert await desk.fence("send", {"n": 2}) is not None
    for each in (desk, desk.at(other)):
        async with desk.quiet():
            assert (await each.wakes("send")).recovered == ()
            assert [text for _, text in await each.context()] == [
                "it is there",
                "the call was not carried out: looked",
                closes[2].text,
            ]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_is_settled_late_is_of_its_own_call(desk, dialect):
    """The id was used again since: what the first call came to answers no other."""
    for settled, second in itertools.product(["completed", "not applied"], ["open", "closed", "answered", "held"]):
        host = desk(dialect, session=f"{settled} {second}")
        args = {"settled": settled, "second": second}
        await host.asks(("call_0", "send", args))
        revision = await host.stands("send", args, "ambiguous")
        (first,) = (await host.wakes("send")).recovered
        await host.hears("more")
        await host.asks(("call_0", "send", args | {"to": "bob"}))
        if second == "closed":
            await host.wakes("send")
        elif second == "answered":
            await host.gets("call_0", "sent to bob")
        elif second == "held":
            await host.log.suspend(["call_0"])
        said = {"completed": "sent to ada"} if settled == "completed" else {"not_applied": True}
        await host.toolkit.receipts.resolve(
            host.key("send", args), revision=revision, by="ada", reason="looked", **said
        )
        report = await host.wakes("send")
        assert [each.error_kind for each in report.recovered] == ([NEVER] if second == "open" else []), args
        texts = [text for _, text in await host.context()]
        assert texts[0] == ("sent to ada" if settled == "completed" else first.text), args
        words = {"answered": "sent to bob", "held": "on hold"}.get(second, "never started")
        assert words in texts[1], args
        async with host.quiet():
            assert (await host.wakes("send")).recovered == (), args


@pytest.mark.parametrize("ends", ["completed", "not applied"])
async def test_a_later_attempt_does_not_settle_an_earlier_close(desk, ends):
    """A person said that it did not land, and another session made the call before this one was woken."""
    host, elsewhere = desk(session="here"), desk(session="there")
    await host.asks(("t1", "send", ARGS))
    revision = await host.stands("send", ARGS, "ambiguous")
    (first,) = (await host.wakes("send")).recovered
    await host.toolkit.receipts.resolve(
        host.key("send", ARGS), revision=revision, not_applied=True, by="ada", reason="looked"
    )
    await elsewhere.asks(("t1", "send", ARGS))

    async def body():
        if ends == "not applied":
            raise NotApplied("refused the second time")
        return "by the second attempt"

    with contextlib.suppress(NotApplied):
        await elsewhere.run.execute("send", ARGS, body)
    assert (await host.receipt("send", ARGS))["attempts"] == 2
    async with host.quiet():
        assert (await host.wakes("send")).recovered == ()
        assert await host.context() == [("t1", first.text)]


async def test_equal_calls_are_settled_together(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS), ("t2", "send", ARGS))
    revision = await desk.stands("send", ARGS, "ambiguous")
    await desk.wakes("send")
    await desk.toolkit.receipts.resolve(
        desk.key("send", ARGS), revision=revision, not_applied=True, by="ada", reason="looked"
    )
    told = (await desk.wakes("send")).recovered
    assert [(each.tool_call_id, each.text) for each in told] == [
        (call_id, "the call was not carried out: looked") for call_id in ("t1", "t2")
    ]
    assert dict(await desk.context()) == {each.tool_call_id: each.text for each in told}


async def test_what_was_summed_up_is_not_settled(desk):
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    revision = await desk.stands("send", ARGS, "ambiguous")
    await desk.wakes("send")
    await desk.log.compact({"role": "user", "content": "so far"})
    await desk.toolkit.receipts.resolve(
        desk.key("send", ARGS), revision=revision, completed="there", by="ada", reason="looked"
    )
    async with desk.quiet():
        assert (await desk.wakes("send")).recovered == ()
        assert await desk.context() == []


async def test_a_late_completion_after_the_model_was_told_that_it_did_not_land(desk):
    """A person was mistaken, the model has read it, and the holder comes back: the truth is shown, once."""
    desk = desk("anthropic")
    await desk.asks(("t1", "send", ARGS))
    go, entered = asyncio.Event(), asyncio.Event()

    async def body():
        entered.set()
        await go.wait()
        return "it landed after all"

    holder = asyncio.create_task(desk.run.execute("send", ARGS, body))
    await entered.wait()
    record = await desk.receipt("send", ARGS)
    last = (await newest(desk.nc, desk.namespace, desk.key("send", ARGS))).seq
    await put(desk.nc, desk.namespace, desk.key("send", ARGS), record | {"status": "ambiguous"}, last=last)
    (first,) = (await desk.wakes("send")).recovered
    assert first.error_kind == UNKNOWN
    await desk.toolkit.receipts.resolve(
        desk.key("send", ARGS), revision=first.revision, not_applied=True, by="ada", reason="I saw nothing"
    )
    (second,) = (await desk.wakes("send")).recovered
    assert second.text == "the call was not carried out: I saw nothing"
    go.set()
    assert await holder == "it landed after all"
    assert await desk.context() == [("t1", "it landed after all")]
    await desk.wakes("send")
    assert await desk.context() == [("t1", "it landed after all")]
    async with desk.quiet():
        assert (await desk.wakes("send")).recovered == ()
    assert await desk.context() == [("t1", "it landed after all")]


async def test_a_later_attempt_is_not_the_one_that_was_told_of(desk):
    """The model was told that it failed, and issued it again: that call's result stands there, and only there."""
    desk = desk()
    await desk.asks(("t1", "send", ARGS))

    async def refused():
        raise NotApplied("no such user")

    with pytest.raises(NotApplied):
        await desk.run.execute("send", ARGS, refused)
    (recovered,) = (await desk.wakes("send")).recovered
    assert (recovered.text, recovered.error_kind) == ("no such user", None)
    await desk.asks(("t2", "send", ARGS))
    assert await desk.run.execute("send", ARGS, _done) == "done"
    await desk.gets("t2", "done")
    assert await desk.context() == [("t1", "no such user"), ("t2", "done")]


async def test_a_resolvers_failed_gives_way_to_a_late_completion(desk):
    """A person said that it did not land, the model was told so, and the holder comes back: it did land."""
    desk = desk()
    await desk.asks(("t1", "send", ARGS))
    go, entered = asyncio.Event(), asyncio.Event()

    async def body():
        entered.set()
        await go.wait()
        return "it landed after all"

    holder = asyncio.create_task(desk.run.execute("send", ARGS, body))
    await entered.wait()
    receipt = await desk.toolkit.receipts.get(desk.key("send", ARGS))
    await desk.toolkit.receipts.resolve(
        receipt.key, revision=receipt.revision, not_applied=True, by="ada", reason="I saw nothing", even_if_running=True
    )
    (recovered,) = (await desk.wakes("send")).recovered
    assert recovered.text == "the call was not carried out: I saw nothing"
    fence = await desk.fence("send", ARGS)
    assert fence is not None
    go.set()
    assert await holder == "it landed after all"
    record = await desk.receipt("send", ARGS)
    assert (record["status"], record["fences"]) == ("completed", {"chat": fence})
    assert await desk.context() == [("t1", "it landed after all")]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_late_result_is_of_the_tool_that_was_called_there(desk, dialect):
    """The id was used again since, for another tool: the result names its own."""
    desk = desk(dialect)
    await desk.hears()
    await desk.asks(("call_0", "send", ARGS))
    revision = await desk.stands("send", ARGS, "ambiguous")
    await desk.wakes("send")
    await desk.hears("more")
    await desk.asks(("call_0", "look", {}))
    await desk.gets("call_0", "nothing there")
    before = (await desk.log.context()).messages
    await desk.toolkit.receipts.resolve(
        desk.key("send", ARGS), revision=revision, completed="it is there", by="ada", reason="looked"
    )
    assert [text for _, text in await desk.context()] == ["it is there", "nothing there"]
    after = (await desk.log.context()).messages
    assert _tools_named(after) == _tools_named(before)


def _tools_named(messages):
    """What results say of whose they are, in order."""
    found = []
    for message in messages:
        found += [part["tool_name"] for part in message.get("parts", []) if part["part_kind"] == "tool-return"]
        if message.get("role") == "toolResult":
            found.append(message["toolName"])
        if message.get("type") == "tool":
            found.append(message["data"].get("name"))
    return [name for name in found if name is not None]


async def test_a_real_result_that_the_worker_appends_after_the_close(desk, other):
    """The holder had its result all along and appends it: the close is void, and nothing is left to do."""
    desk = desk("openai-chat")
    await desk.asks(("t1", "send", ARGS))
    revision = await desk.stands("send", ARGS, "ambiguous")
    waker = desk.at(other)
    await waker.wakes("send")
    await desk.log.load()
    await desk.gets("t1", "from the worker")
    assert await waker.context() == [("t1", "from the worker")]
    await desk.toolkit.receipts.resolve(
        desk.key("send", ARGS), revision=revision, completed="on record", by="ada", reason="looked"
    )
    found = await waker.context()
    assert len(found) == 1
    async with desk.quiet():
        assert (await waker.wakes("send")).recovered == ()


async def test_a_result_that_is_deeply_nested(desk, other):
    """Whatever wake writes can be read again."""
    for depth in (120, 150, *range(184, 201)):
        host = desk("pydantic-ai", session=f"chat-{depth}")
        value = "x"
        for _ in range(depth):
            value = [value]
        await host.asks(("t1", "send", {"depth": depth}))
        await host.stands("send", {"depth": depth}, "completed", result={"json": value})
        await host.wakes("send")
        ((_, told),) = await host.at(other).context()
        assert told == value or isinstance(told, str)


VALUES = [
    *("\ud800", {"a": "\ud800"}, {"\ud800": 1}, "", " ", "\x00\u2028</tool>", "x" * 5000),
    *(float("nan"), float("-inf"), 2**70, -0.0, None, True, b"", b"\xff"),
    *([], {}, {"": None}, {1: 2, "1": 3}, {None: 1}, (1, (2,))),
    "[Request interrupted by user]",
]
LOOKALIKES = [[{"errorKind": NEVER}], {"natsreceipts": {"errorKind": NEVER}}, {"details": {"errorKind": UNKNOWN}}]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_whatever_a_tool_returns_can_stand_in_a_session(desk, other, dialect):
    desk = desk(dialect)
    # Where a value stays a value, the judge cannot tell a field of the tool's from one of ours.
    values = VALUES + (LOOKALIKES if dialect != "pydantic-ai" else [])
    await desk.hears()
    await desk.asks(*((f"t{n}", "send", {"n": n}) for n in range(len(values))))
    for n, value in enumerate(values):

        async def body(value=value):
            return value

        await desk.run.execute("send", {"n": n}, body)
    recovered = (await desk.wakes("send")).recovered
    assert {each.error_kind for each in recovered} == {None}
    assert {each.said for each in recovered} == {"completed"}
    again = desk.at(other)
    found = await again.context()
    assert [call_id for call_id, _ in found] == [f"t{n}" for n in range(len(values))]
    json.dumps((await again.log.context()).messages).encode()
    async with desk.quiet():
        assert (await again.wakes("send")).recovered == ()
    await again.hears("go on")
    assert await desk.context() == found
