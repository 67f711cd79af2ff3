"""Guarded MCP servers: the official SDK's and FastMCP's, with their own clients in the same process."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("mcp.server.extension")

import mcp
from mcp.server.extension import compose_tool_call_handler
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError as SdkToolError
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    ListToolsResult,
    TextContent,
    Tool,
    ToolAnnotations,
)

import natsreceipts
from natsreceipts import AmbiguousCall, InvalidSetting, NotApplied
from natsreceipts.integrations import current_call
from natsreceipts.integrations.mcp import IDEMPOTENCY_KEYS, REPLAYED, NotAppliedError, ReceiptsExtension
from natsreceipts.integrations.mcp_calls import effect_hinted

try:
    import fastmcp
    from fastmcp.exceptions import ToolError as FastToolError
    from fastmcp.exceptions import ValidationError as FastValidationError

    from natsreceipts.integrations.fastmcp import ReceiptsMiddleware
except ImportError:
    fastmcp = None

KEY = IDEMPOTENCY_KEYS[0]


@pytest.fixture
async def toolkit(server, namespace):
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True, lease=10) as connected:
        yield connected


@pytest.fixture(
    params=["mcp", pytest.param("fastmcp", marks=pytest.mark.skipif(fastmcp is None, reason="needs fastmcp"))]
)
def desk(request, toolkit):
    return Desk(toolkit, request.param)


class Desk:
    """A server with one tool, ``send``, whose effects are counted, and what a client gets of it."""

    def __init__(self, toolkit, framework):
        self.toolkit = toolkit
        self.framework = framework
        self.run = toolkit.run("acme", "run-1")
        self.mails = []
        self.tool_error = SdkToolError if framework == "mcp" else FastToolError

    def server(self, tool=None, *, annotations=None, **options):
        async def send(to: str, text: str = "Hi.") -> str:
            self.mails.append(to)
            return f"m-{len(self.mails)}"

        async def run_of(context):
            return self.run

        run_of = options.pop("run_of", run_of)
        tool = tool or send
        if self.framework == "mcp":
            tools = options.pop("tools", True)
            options["tools"] = (lambda: made.list_tools()) if tools else None
            made = MCPServer("mail", extensions=[ReceiptsExtension(run_of, **options)])
            made.tool(name="send", annotations=annotations)(tool)
        else:
            options.pop("tools", None)
            made = fastmcp.FastMCP("mail", middleware=[ReceiptsMiddleware(run_of, **options)])
            made.tool(name="send", annotations=annotations)(tool)
        return made

    def client(self, server):
        return mcp.Client(server) if self.framework == "mcp" else fastmcp.Client(server)

    async def call(self, server, arguments=None, *, key=None, name="send", meta=None):
        """Call the tool as a client of its own: ``(text, whether it is an error, whether it was replayed)``."""
        meta = {KEY: key} if key is not None else meta
        async with self.client(server) as client:
            tool = client.call_tool if self.framework == "mcp" else client.call_tool_mcp
            result = (await asyncio.gather(tool(name, arguments or {"to": "ann"}, meta=meta), return_exceptions=True))[
                0
            ]
        if isinstance(result, Exception):  # from within, the client would put it into a group
            raise result
        text = "\n".join(block.text for block in result.content)
        return text, bool(result.is_error), bool((result.meta or {}).get(REPLAYED))

    async def receipts(self):
        return [receipt async for receipt in self.toolkit.receipts.list()]

    async def receipt(self):
        [receipt] = await self.receipts()
        return receipt


async def test_a_retry_is_one_effect(desk):
    server = desk.server()
    assert await desk.call(server) == ("m-1", False, False)
    assert await desk.call(desk.server()) == ("m-1", False, True)
    assert desk.mails == ["ann"]
    receipt = await desk.receipt()
    assert receipt.key == desk.run.key("send", {"to": "ann"})
    assert (receipt.status, receipt.effect) == ("completed", "opaque")


async def test_two_at_once_are_one_effect(desk):
    server = desk.server()
    answers = await asyncio.gather(*(desk.call(server) for _ in range(3)))
    assert {text for text, *_ in answers} == {"m-1"}
    assert desk.mails == ["ann"]


@pytest.mark.parametrize("name", IDEMPOTENCY_KEYS)
async def test_the_clients_key_sets_calls_apart(desk, name):
    server = desk.server()
    answers = [(await desk.call(server, meta={name: key} if key else None))[0] for key in ("k1", "k2", "k1", "", "k2")]
    assert answers == ["m-1", "m-2", "m-1", "m-3", "m-2"]
    assert await desk.call(server, {"to": "bob"}, meta={name: "k1"}) == ("m-4", False, False)


async def test_a_key_of_another_name(desk):
    server = desk.server(meta_keys=["example.com/key"])
    answers = [(await desk.call(server, meta=meta))[0] for meta in ({"example.com/key": "a"}, {KEY: "x"}, {KEY: "y"})]
    assert answers == ["m-1", "m-2", "m-2"]


@pytest.mark.parametrize("key", [3, "", ["a"], "k" * 1025])
async def test_a_key_that_is_none_is_refused(desk, key):
    with pytest.raises(MCPError, match="idempotency"):
        await desk.call(desk.server(), meta={KEY: key})
    assert desk.mails == []


async def test_a_key_that_is_required(desk):
    server = desk.server(require_key=True)
    text, is_error, _ = await desk.call(server)
    assert is_error
    assert KEY in text
    assert await desk.call(server, key="k") == ("m-1", False, False)
    reading = desk.server(require_key=True, effects={"send": "read"})
    assert await desk.call(reading) == ("m-2", False, False)


async def test_the_run_is_the_hosts(desk):
    runs = []

    def run_of(context):
        runs.append(context)
        return desk.toolkit.run(f"tenant-{len(runs)}", "r")

    server = desk.server(run_of=run_of)
    assert [(await desk.call(server))[0] for _ in range(2)] == ["m-1", "m-2"]
    assert {receipt.key.tenant for receipt in await desk.receipts()} == {"tenant-1", "tenant-2"}


HINTS = {
    "nothing": ({}, "opaque"),
    "read": ({"read_only_hint": True}, None),
    "read, and says twice so": ({"read_only_hint": True, "destructive_hint": False}, None),
    "a contradiction": ({"read_only_hint": True, "destructive_hint": True}, "opaque"),
    "idempotent": ({"idempotent_hint": True}, "idempotent"),
    "idempotent and destructive": ({"idempotent_hint": True, "destructive_hint": True}, "idempotent"),
    "additive": ({"destructive_hint": False}, "opaque"),
}


@pytest.mark.parametrize("name", HINTS)
async def test_annotations_are_hints(desk, name):
    hints, effect = HINTS[name]
    await desk.call(desk.server(annotations=ToolAnnotations(**hints)))
    assert [receipt.effect for receipt in await desk.receipts()] == ([] if effect is None else [effect])


@pytest.mark.parametrize("hints", [{"read_only_hint": True}, {"idempotent_hint": True}])
async def test_a_hint_does_not_weaken_what_the_host_says(desk, hints):
    await desk.call(desk.server(annotations=ToolAnnotations(**hints), effects={"send": "opaque"}))
    assert (await desk.receipt()).effect == "opaque"


async def test_hints_that_are_not_asked(desk):
    off = {"tools": False} if desk.framework == "mcp" else {"hints": False}
    await desk.call(desk.server(annotations=ToolAnnotations(read_only_hint=True), **off))
    assert (await desk.receipt()).effect == "opaque"


def test_no_annotations():
    assert effect_hinted(None) is None


async def test_a_failure_that_the_tool_foresaw_is_what_the_call_came_to(desk):
    tries = []

    async def send(to: str) -> str:
        tries.append(to)
        raise desk.tool_error("no such address")

    server = desk.server(send)
    first, again = await desk.call(server), await desk.call(server)
    assert first[0].endswith("no such address")
    assert first[1:] == (True, False)
    assert again == (first[0], True, True)
    assert tries == ["ann"]
    assert (await desk.receipt()).status == "completed"


async def test_such_a_failure_of_a_tool_that_may_be_repeated(desk):
    tries = []

    async def send(to: str) -> str:
        tries.append(to)
        raise desk.tool_error("busy")

    server = desk.server(send, effects={"send": "idempotent"})
    for _ in range(2):
        text, *how = await desk.call(server)
        assert text.endswith("busy")
        assert how == [True, False]
    receipt = await desk.receipt()
    assert (receipt.status, receipt.attempts, len(tries)) == ("failed", 2, 2)


async def test_an_exception_leaves_the_call_ambiguous(desk):
    tries = []

    async def send(to: str) -> str:
        tries.append(to)
        raise ConnectionResetError("cut off")

    server = desk.server(send)
    text, is_error, _ = await desk.call(server)
    assert is_error
    assert text.startswith("Error ")
    assert "outcome of this call of send is unknown" in text
    receipt = await desk.receipt()
    assert receipt.status == "ambiguous"
    if desk.framework == "fastmcp":
        assert receipt.error.type.endswith("ConnectionResetError")
    text, is_error, _ = await desk.call(server)
    assert (is_error, tries) == (True, ["ann"])
    assert "outcome of this call of send is unknown" in text


@pytest.mark.skipif(fastmcp is None, reason="needs fastmcp")
async def test_an_error_by_which_fastmcp_refuses_arguments_is_a_failure_where_the_tool_raises_it(toolkit):
    desk = Desk(toolkit, "fastmcp")

    async def send(to: str) -> str:
        desk.mails.append(to)
        raise FastValidationError("the answer makes no sense")

    server = desk.server(send)
    assert await desk.call(server) == ("the answer makes no sense", True, False)
    assert await desk.call(server) == ("the answer makes no sense", True, True)
    assert desk.mails == ["ann"]


async def test_on_unknown_raise(desk):
    async def send(to: str) -> str:
        raise ConnectionResetError("cut off")

    server = desk.server(send, on_unknown="raise")
    for _ in range(2):
        with pytest.raises(MCPError):
            await desk.call(server)


async def test_what_did_not_happen_may_be_tried_again(desk):
    tries = []

    async def send(to: str) -> str:
        tries.append(to)
        if len(tries) == 1:
            raise NotAppliedError("the provider could not be reached")
        return "sent"

    server = desk.server(send)
    text, is_error, _ = await desk.call(server)
    assert is_error
    assert "the provider could not be reached" in text
    assert await desk.call(server) == ("sent", False, False)
    assert (await desk.receipt()).attempts == 2


async def test_the_plain_error_for_that(desk):
    async def send(to: str) -> str:
        raise NotApplied("the provider could not be reached")

    await desk.call(desk.server(send))
    # An MCPServer does not let it through: nobody knows, then.
    assert (await desk.receipt()).status == ("ambiguous" if desk.framework == "mcp" else "failed")


@pytest.mark.parametrize("arguments", [{"too": "ann"}, {"to": ["ann"]}])
async def test_arguments_that_do_not_fit(desk, arguments):
    server = desk.server()
    for _ in range(2):
        text, is_error, _ = await desk.call(server, arguments)
        assert is_error
        assert "alid" in text
    assert desk.mails == []
    assert [receipt.status for receipt in await desk.receipts()] in (["completed"], ["failed"])


async def test_a_tool_that_is_not_there(desk):
    server = desk.server()
    try:
        text, is_error, _ = await desk.call(server, name="fax")
    except MCPError as error:
        text, is_error = str(error), True
    assert is_error
    assert "fax" in text
    assert [receipt.status for receipt in await desk.receipts()] in ([], ["failed"])


async def test_structured_results(desk):
    async def send(to: str) -> dict[str, int]:
        return {"sent": 1}

    server = desk.server(send)
    seen = []
    for _ in range(2):
        async with desk.client(server) as client:
            call = client.call_tool if desk.framework == "mcp" else client.call_tool_mcp
            result = await call("send", {"to": "ann"})
            seen.append((result.structured_content, [block.text for block in result.content], bool(result.is_error)))
    assert seen[0] == seen[1]
    assert seen[0][0] == {"sent": 1}


async def test_the_tool_sees_its_call(desk):
    keys = []

    async def send(to: str) -> str:
        keys.append(current_call().idempotency_key)
        return "sent"

    await desk.call(desk.server(send), key="k")
    assert keys == [desk.run.key("send", {"to": "ann"}, distinct="k").idempotency_key]


async def test_bad_settings(desk):
    for bad in ({"on_unknown": "guess"}, {"effects": {"send": "pure"}}, {"meta_keys": "k"}):
        with pytest.raises(InvalidSetting):
            desk.server(**bad)
    with pytest.raises(InvalidSetting):
        desk.server(require_key=True, meta_keys=[])


# ---------------------------------------------------------------- the official SDK alone


def low_level(extension, handler):
    async def list_tools(ctx, params):
        return ListToolsResult(tools=[Tool(name="send", input_schema={"type": "object"})])

    server = Server("mail", on_list_tools=list_tools)
    server.add_request_handler("tools/call", CallToolRequestParams, compose_tool_call_handler([extension], handler))
    return server


async def test_a_tool_that_asks_has_not_been_carried_out(toolkit):
    """A leg that asks the client for input is no result; the leg that has it is executed, once."""
    run, sent = toolkit.run("acme", "run-1"), []
    extension = ReceiptsExtension(lambda _: run)

    async def handler(ctx, params):
        if not params.input_responses:
            form = ElicitRequestFormParams(message="Sure?", requested_schema={"type": "object", "properties": {}})
            return InputRequiredResult(input_requests={"sure": ElicitRequest(params=form)}, request_state="s")
        sent.append(params.arguments["to"])
        return CallToolResult(content=[TextContent(type="text", text=f"m-{len(sent)}")])

    server = low_level(extension, handler)

    async def says_yes(context, params):
        return ElicitResult(action="accept", content={})

    for _ in range(2):
        async with mcp.Client(server, elicitation_callback=says_yes) as client:
            result = await client.call_tool("send", {"to": "ann"})
            assert [block.text for block in result.content] == ["m-1"]
    assert sent == ["ann"]
    receipt = await toolkit.receipts.get(run.key("send", {"to": "ann"}))
    assert (receipt.status, receipt.attempts) == ("completed", 2)


async def test_a_low_level_handler_that_raises(toolkit):
    run = toolkit.run("acme", "run-1")

    async def handler(ctx, params):
        raise ConnectionResetError("cut off")

    async with mcp.Client(low_level(ReceiptsExtension(lambda _: run), handler)) as client:
        with pytest.raises(MCPError):
            await client.call_tool("send", {"to": "ann"})
    receipt = await toolkit.receipts.get(run.key("send", {"to": "ann"}))
    assert (receipt.status, receipt.error.message) == ("ambiguous", "cut off")
    with pytest.raises(AmbiguousCall):
        await run.execute("send", {"to": "ann"}, asyncio.Event().wait)


async def test_clients_are_told(toolkit):
    run = toolkit.run("acme", "run-1")
    server = MCPServer("mail", extensions=[ReceiptsExtension(lambda _: run, require_key=True)])
    async with mcp.Client(server) as client:
        told = client.server_capabilities.extensions["natsreceipts/idempotency"]
    assert told == {"metaKeys": list(IDEMPOTENCY_KEYS), "required": True}


# ---------------------------------------------------------------- FastMCP alone


@pytest.mark.skipif(fastmcp is None, reason="needs fastmcp")
async def test_a_tool_of_fastmcp_that_asks_has_not_been_carried_out(toolkit):
    run, sent = toolkit.run("acme", "run-1"), []
    server = fastmcp.FastMCP("mail", middleware=[ReceiptsMiddleware(lambda _: run)])

    @server.tool
    async def send(to: str, ctx: fastmcp.Context) -> str | InputRequiredResult:
        if not ctx.input_responses:
            form = ElicitRequestFormParams(message="Sure?", requested_schema={"type": "object", "properties": {}})
            return InputRequiredResult(input_requests={"sure": ElicitRequest(params=form)}, request_state="s")
        sent.append(to)
        return f"m-{len(sent)}"

    async def says_yes(*_):
        return ElicitResult(action="accept", content={})

    for _ in range(2):
        async with fastmcp.Client(server, elicitation_handler=says_yes) as client:
            result = await client.call_tool_mcp("send", {"to": "ann"})
            assert [block.text for block in result.content] == ["m-1"]
    assert sent == ["ann"]
    receipt = await toolkit.receipts.get(run.key("send", {"to": "ann"}))
    assert (receipt.status, receipt.attempts) == ("completed", 2)
