"""What docs/ shows of a framework is run, where it is installed."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from frameworks import framework

import natsreceipts

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page):
    """The examples of a page that needs what is installed."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for module in re.match(r"<!-- needs: (.*) -->\n", text)[1].split():
        framework(module)
    return PYTHON.findall(text)


async def run(blocks, names):
    for code in blocks:
        result = eval(compile(code, "docs", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(result):
            await result


class Provider:
    def __init__(self):
        self.sent = []

    def send_now(self, to, text):
        self.sent.append((to, text))
        return f"<m-{len(self.sent)}@example.com>"

    async def send(self, to, text):
        return self.send_now(to, text)


async def test_openai_agents(server, namespace, capsys):
    blocks = examples("openai-agents.md")
    from agents import set_tracing_disabled
    from openai_script import Script, calls, outputs, says

    set_tracing_disabled(True)

    def answer(items):
        told = list(outputs(items).values())
        who = "bob" if "Tell Bob." in [item.get("content") for item in items] else "ann"
        return says(f"Told: {told[-1]}") if told else calls(("send_email", {"to": who, "text": "Hi."}))

    provider = Provider()
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True) as toolkit:
        await run(blocks, {"toolkit": toolkit, "provider": provider, "model": Script(answer)})
    assert provider.sent == [("ann", "Hi."), ("bob", "Hi.")]
    assert capsys.readouterr().out.splitlines() == ["Told: <m-1@example.com>"] * 2


async def test_mcp(server, namespace):
    blocks = examples("mcp.md")
    provider = Provider()
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True) as toolkit:
        await run(blocks, {"toolkit": toolkit, "provider": provider})
    assert provider.sent == [("ann@example.com", "Order 42 is on its way.")]


class Recipes:
    """The recipes of a page: what is for all of them, and each framework's own."""

    def __init__(self, page):
        text = (DOCS / page).read_text(encoding="utf-8")
        self.shared = PYTHON.findall(text)
        self.of = dict(re.findall(r"^```python ([\w.]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))

    async def run(self, module, names):
        pytest.importorskip(module)
        await run([*self.shared, self.of[module]], names)


RECIPES = Recipes("recipes-agents.md")


@pytest.fixture
async def kitchen(server, namespace):
    """What the recipes take for granted."""
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True) as toolkit:
        yield {"toolkit": toolkit, "provider": Provider()}


async def test_google_adk(kitchen, capsys):
    pytest.importorskip("google.adk")
    from google.adk.models import BaseLlm, LlmResponse
    from google.genai import types

    class Scripted(BaseLlm):
        async def generate_content_async(self, llm_request, stream=False):
            last = llm_request.contents[-1].parts[0]
            if last.function_response is not None:
                part = types.Part(text=str(last.function_response.response))
            else:
                part = types.Part.from_function_call(name="send_email", args={"to": "ann", "text": "Hi."})
            yield LlmResponse(content=types.Content(role="model", parts=[part]))

    await RECIPES.run("google.adk", kitchen | {"model": Scripted(model="script")})
    assert capsys.readouterr().out.splitlines() == ["{'id': '<m-1@example.com>'}"] * 2
    assert kitchen["provider"].sent == [("ann", "Hi.")]


async def test_claude_agent_sdk(kitchen):
    mcp = pytest.importorskip("mcp")
    names = dict(kitchen)
    await RECIPES.run("claude_agent_sdk", names)
    for _ in range(2):
        async with mcp.Client(names["server"]["instance"]) as client:
            result = await client.call_tool("send_email", {"to": "ann", "text": "Hi."})
            assert [block.text for block in result.content] == ["<m-1@example.com>"]
    assert kitchen["provider"].sent == [("ann", "Hi.")]


async def test_crewai(kitchen, capsys):
    await RECIPES.run("crewai", kitchen)
    assert capsys.readouterr().out.splitlines() == ["<m-1@example.com>"] * 2
    assert kitchen["provider"].sent == [("ann@example.com", "Hi.")]


def test_every_page_that_needs_something_is_run():
    """Here, or in the other file for that."""
    tests = "".join(
        (Path(__file__).parent / name).read_text() for name in ("test_docs_frameworks.py", "test_recipes.py")
    )
    for page in DOCS.glob("*.md"):
        if page.read_text(encoding="utf-8").startswith("<!-- needs:"):
            assert f'"{page.name}"' in tests, page.name
    assert all(f'"{module}"' in tests for module in RECIPES.of)
