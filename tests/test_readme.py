"""What README.md says is run, and runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from pathlib import Path

import nats
import pytest

import natsreceipts

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language, heading=""):
    text = README
    if heading:
        text = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [code for name, code in FENCE.findall(text) if name == language]


class Provider:
    """Stands for a mail provider."""

    def __init__(self):
        self.sent = []
        self.refuses = False

    async def send(self, to, text, idempotency_key):
        if self.refuses:
            raise ConnectionRefusedError
        self.sent.append((to, text, idempotency_key))
        return f"<m-{len(self.sent)}@example.com>"


class Script:
    """The Python blocks of the README, in one namespace, against a server of the test's own."""

    def __init__(self, url):
        self.url = url
        self.provider = Provider()
        self.names = {"natsreceipts": natsreceipts, "provider": self.provider, "URL": url, "__name__": "readme"}

    async def run(self, code):
        code = code.replace("nats://127.0.0.1:4222", self.url)
        compiled = compile(code, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, self.names)
        if inspect.isawaitable(result):
            await result


@pytest.fixture
def script(own_server):
    return Script(own_server.url)


def test_every_block_is_run_by_a_test_here():
    named = [name for name, _ in FENCE.findall(README)]
    assert named == ["sh", "text", "sh", "python", "python", "python", "sh", "sh", "python"]


def test_the_command_lines_are_one_line_each_and_come_first():
    for heading in ("Try it", "Test it"):
        first = FENCE.search(README.split(f"\n## {heading}\n")[1])
        assert first is not None
        assert first[1] == "sh"
        assert first[2].count("\n") == 1
        assert first[2].startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert blocks("sh", "Try it")[0].rstrip().endswith("&& .venv/bin/natsreceipts demo")


def test_the_tests_are_what_ci_runs():
    (line,) = blocks("sh", "Test it")
    assert line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines(keepends=True)


async def test_the_worker_sends_a_job_that_comes_twice_once(script, capsys):
    await script.run(blocks("python", "A worker")[0])
    async with await nats.connect(script.url) as nc:
        js = nc.jetstream()
        await js.add_stream(name="JOBS", subjects=["jobs.*"], retention="workqueue")
        job = {"run": "order-42", "mail": {"to": "ann@example.com", "text": "It is on its way."}}
        for _ in range(2):
            await js.publish("jobs.acme", json.dumps(job).encode())
        worker = asyncio.create_task(script.names["worker"]())
        async with asyncio.timeout(100):
            while (await js.stream_info("JOBS")).state.messages:
                assert not worker.done(), worker.result()
                await asyncio.sleep(0.02)
        worker.cancel()
        await asyncio.wait([worker])
    assert len(script.provider.sent) == 1
    assert capsys.readouterr().out == "<m-1@example.com>\n" * 2


async def test_execute_replays_and_a_refused_connection_is_tried_again(script, capsys):
    code = blocks("python", "A worker")[1]
    script.provider.refuses = True
    with pytest.raises(natsreceipts.NotApplied):
        await script.run(code)
    script.provider.refuses = False
    for _ in range(2):
        await script.run(code)
    assert len(script.provider.sent) == 1
    assert capsys.readouterr().out == "<m-1@example.com>\n" * 2


async def test_the_turn_goes_on_where_it_was_killed(script, monkeypatch):
    mails = [{"to": f"{name}@example.com", "text": "It is on its way."} for name in ("ann", "bob")]

    async def model(messages):
        script.names["read"] = messages
        answered = [each for each in messages if each["role"] == "toolResult" and "never started" not in str(each)]
        calls = [
            {"type": "toolCall", "id": f"call_{len(messages)}_{n}", "name": "send_email", "arguments": mail}
            for n, mail in enumerate(mails[len(answered) :])
        ]
        return {"role": "assistant", "content": calls or [{"type": "text", "text": "Done."}]}

    class Killed(BaseException):
        pass

    async def end_before_that(*_, **__):
        """The mail is sent and on record, and not in the log."""
        raise Killed

    script.names["model"] = model
    await script.run(blocks("python", "A worker")[0])
    await script.run(blocks("python", "Sessions")[0])
    async with natsreceipts.connect(script.url, provision=True) as toolkit:
        await toolkit.sessions.open("acme", "order-42").append({"role": "user", "content": "Tell Ann and Bob."})
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(natsreceipts.SessionLog, "append_result", end_before_that)
            await script.names["turn"](toolkit, "order-42")
        await script.names["turn"](toolkit, "order-42")
        messages = (await toolkit.sessions.open("acme", "order-42").load()).messages
    assert [to for to, _, _ in script.provider.sent] == ["ann@example.com", "bob@example.com"]
    texts = [each["content"][0]["text"] for each in messages if each["role"] == "toolResult"]
    assert texts[0] == "<m-1@example.com>"
    assert "never started" in texts[1]
    assert texts[2:] == ["<m-2@example.com>"]
    assert messages[-1]["content"] == [{"type": "text", "text": "Done."}]


def test_the_command_of_the_sessions_is_the_example():
    (line,) = blocks("sh", "Sessions")
    assert line.startswith(".venv/bin/python examples/")  # which tests/examples runs
    assert (ROOT / line.split()[1]).is_file()


async def broken():
    raise TimeoutError("no answer")


async def test_what_is_ambiguous_is_listed_and_resolved(script, capsys):
    async with natsreceipts.connect(script.url, provision=True) as toolkit:
        run = toolkit.run("acme", "order-42")
        with pytest.raises(TimeoutError):
            await run.execute("send_email", {}, broken)
        with pytest.raises(natsreceipts.AmbiguousCall):
            await run.execute("send_email", {}, broken)
        await script.run(blocks("python", "Looking at receipts")[0])
        assert run.key("send_email", {}).kv_key in capsys.readouterr().out
        assert await run.execute("send_email", {}, broken) == "<m-1@example.com>"


async def test_the_nats_cli_shows_receipts(own_server, nats_cli):
    async with natsreceipts.connect(own_server.url, provision=True) as toolkit:
        run = toolkit.run("acme", "order-42")
        with pytest.raises(TimeoutError):
            await run.execute("send_email", {}, broken)
        key = run.key("send_email", {}).kv_key
    for line in blocks("sh", "Looking at receipts")[0].splitlines():
        command = line.replace("KEY", key).split()
        assert command[0] == "nats"
        process = await asyncio.create_subprocess_exec(
            nats_cli,
            *command[1:],
            "--server",
            own_server.url,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said
        assert (key if "--raw" not in line else '"status":"ambiguous"') in said.decode()


def test_names_in_the_readme_exist():
    """Every error in the table is one of ours."""
    table = README.split("\n## Errors\n")[1].split("\n## ")[0]
    named = [
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert len(named) > 10
    for name in named:
        assert issubclass(getattr(natsreceipts, name), natsreceipts.NatsReceiptsError)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https:)([^)#]+)", README):
        assert (ROOT / target).is_file(), target
