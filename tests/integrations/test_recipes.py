"""What docs/ shows of Pydantic AI and LangChain, and the recipes for other frameworks, where these are installed."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import warnings
from pathlib import Path

import nats
import pytest
from frameworks import framework
from support import PATIENCE

import natsreceipts

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = re.compile(r"^```python(?: ([\w.]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

MAIL = {"to": "ann@example.com", "text": "It is on its way."}


class Provider:
    def __init__(self):
        self.sent = []

    async def send(self, to, text, key):
        assert key
        self.sent.append((to, text))
        return f"<m-{len(self.sent)}@example.com>"


async def run(page, names, *, of=None):
    """Run a page's examples: all those for every framework, and those of one."""
    for needed, code in PYTHON.findall((DOCS / page).read_text(encoding="utf-8")):
        if needed in ("", of):
            # A module's name, and no annotations of this file's: frameworks look annotations up there.
            names.setdefault("__name__", "recipe")
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            result = eval(compile(code, page, "exec", flags=flags, dont_inherit=True), names)
            if inspect.isawaitable(result):
                await result


@pytest.fixture
async def toolkit(server, namespace):
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True) as toolkit:
        yield toolkit


@pytest.fixture
def provider():
    return Provider()


async def test_pydantic_ai(toolkit, provider, capsys):
    framework("pydantic_ai")
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    def answer(messages, info):
        if not isinstance(messages[-1].parts[0], type(messages[0].parts[0])):
            return ModelResponse([TextPart(f"Told: {messages[-1].parts[0].content}")])
        return ModelResponse([ToolCallPart("send_email", MAIL)])

    names = {"toolkit": toolkit, "provider": provider, "model": FunctionModel(answer)}
    await run("pydantic-ai.md", names)
    assert capsys.readouterr().out == "Told: <m-1@example.com>\n"
    assert names["result"].output == "Told: <m-2@example.com>"
    assert provider.sent == [tuple(MAIL.values())] * 2  # one in each run


async def test_langchain(toolkit, provider, capsys):
    framework("langchain.agents")
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools, **settings):
            return self

    call = {"name": "send_email", "args": MAIL, "id": "a", "type": "tool_call"}
    model = Scripted(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("Told.")]))
    names = {"toolkit": toolkit, "provider": provider, "model": model}
    await run("langchain.md", names)
    assert capsys.readouterr().out == "Told.\n"
    assert provider.sent == [tuple(MAIL.values())]
    assert set(names["node"].tools_by_name) == {"send_email"}


async def test_faststream(provider, own_server):
    pytest.importorskip("faststream.nats")
    async with await nats.connect(own_server.url) as client, natsreceipts.connect(client, provision=True) as own:
        js = client.jetstream()
        await js.add_stream(name="JOBS", subjects=["jobs.*"])
        names = {"toolkit": own, "provider": provider, "URL": own_server.url}
        await run("recipes.md", names, of="faststream.nats")
        async with names["broker"] as broker:
            await broker.start()
            for _ in range(2):  # the job is sent twice, say
                await js.publish("jobs.acme", json.dumps({"run": "order-42", "mail": MAIL}).encode())
            async with asyncio.timeout(PATIENCE):
                while (await js.consumer_info("JOBS", "mailer")).ack_floor.stream_seq < 2:
                    await asyncio.sleep(0.02)
    assert provider.sent == [tuple(MAIL.values())]


async def test_fastapi(provider, own_server):
    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    names = {"provider": provider, "URL": own_server.url}
    await run("recipes.md", names, of="fastapi")
    app = names["app"]
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        answers = [await client.post("/orders/42/mail", json=MAIL) for _ in range(2)]
    assert [answer.json() for answer in answers] == ["<m-1@example.com>"] * 2
    assert provider.sent == [tuple(MAIL.values())]


async def test_temporal(toolkit, provider):
    testing = pytest.importorskip("temporalio.testing")
    names = {"toolkit": toolkit, "provider": provider}
    await run("recipes.md", names, of="temporalio")
    for _ in range(2):
        result = await testing.ActivityEnvironment().run(names["send_email_activity"], MAIL)
        assert result == "<m-1@example.com>"
    assert provider.sent == [tuple(MAIL.values())]


async def test_dbos(toolkit, provider, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dbos = pytest.importorskip("dbos")
    names = {"toolkit": toolkit, "provider": provider}
    await run("recipes.md", names, of="dbos")
    dbos.DBOS(config={"name": "recipes", "system_database_url": f"sqlite:///{tmp_path / 'dbos.sqlite'}"})
    dbos.DBOS.launch()
    try:
        for workflow in ("order-42", "order-42"):
            with dbos.SetWorkflowID(workflow):
                assert await names["tell"](MAIL) == "<m-1@example.com>"
        assert [receipt.key.run async for receipt in toolkit.receipts.list()] == ["order-42"]
    finally:
        dbos.DBOS.destroy()
    assert provider.sent == [tuple(MAIL.values())]
