"""Ask an HTTP API for what a call leaves there (extra ``verifiers``: httpx)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

from natsreceipts.decision import NotLanded, Verdict
from natsreceipts.errors import InvalidSetting
from natsreceipts.verifiers.looking import Subject, Undecided, Verifier, check_seconds, settled, verdict_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    import httpx

__all__ = ["http_lookup"]

_KEY = "{idempotency_key}"


def http_lookup(
    url: str | Callable[[Subject], str],
    *,
    settled_after: float | None,
    read: Callable[[httpx.Response], object] | None = None,
    absent: Callable[[httpx.Response], bool] | None = None,
    client: httpx.AsyncClient | None = None,
    auth: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 10.0,
) -> Verifier:
    """A verifier that GETs the thing that the call makes.

    ``url``: with ``{idempotency_key}`` in it, or a function of the call. A 2xx other than 202 is `Landed`, with what
    ``read`` makes of the response as the result, which may also be a verdict of its own: ``NotLanded()`` for a search
    that found nothing, ``Unknown()`` for what is still pending; by default its JSON, or its text. A 404 is
    `NotLanded` once there was nothing but that for ``settled_after`` seconds (None: never); ``absent`` says which 404s
    are the API's own word, and not that of a proxy or of a wrong URL. Everything else raises `Undecided`: 202, other
    4xx (410: it was there), 5xx, time-outs, no connection, and redirects, which are never followed, since a log-in
    page answers 200.

    ``client``: an httpx.AsyncClient of your own, which is not closed (one for each event loop); by default one for
    each time that it is asked, with ``auth`` and ``headers`` as httpx takes them. ``timeout``: seconds of one
    request, in all. Raises InvalidSetting, and ImportError without httpx.
    """
    import httpx

    if isinstance(url, str) and _KEY not in url:
        raise InvalidSetting(f"url={url!r}: it has to hold {_KEY}, or to be a function of the call")
    if settled_after is not None:
        check_seconds("settled_after", settled_after)
    check_seconds("timeout", timeout, zero=False)
    if client is not None and (auth is not None or headers is not None):
        raise InvalidSetting("auth= and headers= are the client's: give them to it, or leave client= out")

    @contextlib.asynccontextmanager
    async def opened() -> AsyncGenerator[httpx.AsyncClient, None]:
        if client is not None:
            yield client
            return
        async with httpx.AsyncClient(auth=auth, headers=headers) as own:
            yield own

    async def verify_over_http(call: Subject) -> Verdict:
        target = url.replace(_KEY, call.idempotency_key) if isinstance(url, str) else url(call)
        host = httpx.URL(target).host

        async def look(http: httpx.AsyncClient) -> Verdict:
            try:
                async with asyncio.timeout(timeout):
                    response = await http.get(target, follow_redirects=False, timeout=timeout)
            except (httpx.HTTPError, TimeoutError) as error:
                raise Undecided(f"{host} could not be asked: {type(error).__name__}: {error}") from error
            if response.status_code == 404:
                if absent is None or absent(response):
                    return NotLanded()
                raise Undecided(f"{host} answered 404, and absent= does not take that for its own word")
            if response.status_code == 202 or not response.is_success:
                raise Undecided(f"{host} answered {response.status_code}, which says nothing of the call")
            return verdict_of(read(response) if read is not None else _content(response))

        async with opened() as http:
            return await settled(lambda: look(http), settled_after, where=host or "the server")

    verify_over_http.__qualname__ = "http_lookup"
    return verify_over_http


def _content(response: httpx.Response) -> object:
    if not response.content:
        return None
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return cast("object", response.json())
    return response.text
