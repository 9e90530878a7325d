"""The server of the page, with limits on who may ask and on how much is read and computed.

The link of a download holds the whole state, so the server writes no files and keeps no state.
Requests that another site causes are refused before anything is read or computed for them.
"""

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import re
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..strict_json import parsed
from . import page
from .state import State, from_fields

T = TypeVar("T")
PORTS = range(7860, 7960)
MAX_HEAD = 2**16  # bytes of path, query and headers: two long configs in a link are 48,000
MAX_BODY = 5 * 2**20  # bytes: two pasted configs with every quote and line end escaped
BODY_SECONDS = 30.0  # in which the body of a request must arrive
LAST_SECONDS = 1  # for answers that are not sent completely when the server is interrupted
HEADERS = {  # of every answer; scripts and styles come from this server and are never inline
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
STATIC = {
    **dict.fromkeys((*page.SCRIPTS, "tables.js", "explore.js"), "text/javascript"),
    "explore.css": "text/css",
    "favicon.svg": "image/svg+xml",
}
DOWNLOADS: dict[str, tuple[str, Callable[[State, str], str]]] = {  # media type, function of text
    "numbers.csv": ("text/csv", page.numbers_csv),
    "figure.html": ("text/html", page.figure_html),
    "config.json": ("application/json", page.config_json),
}


class Guard:
    """Middleware that refuses requests by `refused` and sets `HEADERS` on every answer.

    host  the address that is served; if it is a loopback address, requests must name one
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = refused(scope, self.host) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, with_headers)


def refused(scope: Scope, host: str) -> "Response | None":
    """Return a refusal of a request for another host, from another site, or too large; else None.

    Browsers say in `Sec-Fetch-Site` and `Origin` which site causes a request, and no script can
    change these. "none": a person typed the address. A program such as curl says neither.
    """
    headers = Headers(scope=scope)
    size = sum(len(name) + len(value) for name, value in headers.raw)
    if size + len(scope["path"]) + len(scope.get("query_string", b"")) > MAX_HEAD:
        return _line(431, f"address and headers must be at most {MAX_HEAD:,} bytes")
    asked = headers.get("host", "")
    name = re.sub(r":\d*$", "", asked).strip("[]").lower()
    if is_loopback(host) and not is_loopback(name):
        return _line(400, f"this page is not {name[:80]!r}")
    origin = headers.get("origin")
    is_own = headers.get("sec-fetch-site") in (None, "same-origin", "none")
    if not is_own or (origin is not None and origin.partition("://")[2] != asked):
        return _line(
            403, "another site asked for this page: copy the address into a tab of its own"
        )
    return None


def _line(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)


def is_loopback(host: str) -> bool:
    """Whether a host name is localhost or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Workers:
    """Runs calls in threads: `at_once` at a time, `waiting` more wait, others are refused."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self.places = asyncio.Semaphore(at_once)
        self.room = at_once + waiting
        self.calls = 0

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Return the result of the function; status 503 if too many calls wait."""
        if self.calls >= self.room:
            raise HTTPException(503, "too many requests are being computed; ask again later")
        self.calls += 1
        try:
            async with self.places:
                return await _in_thread(function, *arguments)
        finally:
            self.calls -= 1


async def _in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a call in a thread of its own, for which no process waits to end.

    An interrupted process waits for the threads of `asyncio.to_thread`, and a search takes long.
    """
    call: Future[T] = Future()
    call.set_running_or_notify_cancel()

    def work() -> None:
        try:
            call.set_result(function(*arguments))
        except Exception as error:
            call.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(call)


class _Server(uvicorn.Server):
    """A server that is silent about the answers that it cuts off when it is interrupted."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # a new Config resets it
        await super().shutdown(sockets)


def build(host: str = "127.0.0.1", ready: Callable[[], object] = lambda: None) -> Starlette:
    """Return the page as an ASGI app; `serve` serves it, by default to this machine only.

    host   the address to serve; if it is a loopback address, requests must name one
    ready  called once, when it starts

    >>> [route.path for route in build().routes][:2]
    ['/', '/draw']
    """
    pictures, searches, files = Workers(4, 64), Workers(1, 16), Workers(4, 32)

    async def index(request: Request) -> Response:
        return Response(page.page(), media_type="text/html")

    async def draw(request: Request) -> Response:
        asked = await _posted(request)
        changed = str(asked.get("changed", ""))
        return _json(await pictures.run(page.drawn, _fields(asked), changed))

    async def base(request: Request) -> Response:
        return _json(await searches.run(page.certified, _fields(await _posted(request))))

    async def static(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        return Response(page.file(name), media_type=STATIC[name])

    async def download(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in DOWNLOADS:
            raise HTTPException(404, "no such page")
        query = dict(request.query_params)
        kind, write = DOWNLOADS[name]
        side = "b" if query.get("side") == "b" else "a"
        try:
            text = await files.run(lambda: write(from_fields(query), side))
        except ValueError as error:
            raise HTTPException(422, str(error)[:400]) from error
        return Response(
            text, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'}
        )

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _line(error.status_code, error.detail)

    @contextlib.asynccontextmanager
    async def started(_: Starlette) -> AsyncIterator[None]:
        ready()
        yield

    return Starlette(
        routes=[
            Route("/", index),
            Route("/draw", draw, methods=["POST"]),
            Route("/base", base, methods=["POST"]),
            Route("/download/{name}", download),
            *(Route(f"/{name}", static) for name in STATIC),
        ],
        middleware=[Middleware(Guard, host=host)],
        exception_handlers={HTTPException: failed},
        lifespan=started,
    )


def serve(
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve the page until interrupted. `ready` is called with its address when it can be opened.

    port  None: the first free one from 7860 on
    Raises ValueError for a port outside of 1 .. 65535 and a host that is no name, OSError if the
    port is taken or the host is not an address of this machine.

    >>> serve(port=70000)
    Traceback (most recent call last):
    ValueError: port must be in 1 .. 65535, got 70000
    """
    with _listening(host, port) as listener:
        bound, port = listener.getsockname()[:2]
        if is_loopback(bound) and host != "localhost":  # "127.1" and "LOCALHOST" are this machine
            host = bound
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}/"

        def up() -> None:
            if open_browser:
                webbrowser.open(address)
            if ready:
                ready(address)

        config = uvicorn.Config(  # h11 limits how much it reads before the guard sees a request
            build(host, up), http="h11", ws="none", log_level="warning", server_header=False,
            timeout_graceful_shutdown=LAST_SECONDS,
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            _Server(config).run(sockets=[listener])


async def _posted(request: Request) -> dict[str, object]:
    """Return the JSON object of a request, which must be small and arrive in time."""

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"a request must be at most {MAX_BODY:,} bytes")
        return bytes(body)

    try:
        body = await asyncio.wait_for(read(), BODY_SECONDS)
        return dict(parsed(body, "the request"))
    except asyncio.TimeoutError as error:
        why = f"a request must arrive within {BODY_SECONDS:g} seconds"
        raise HTTPException(408, why) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the request was cut off") from error
    except ValueError as error:
        raise HTTPException(400, str(error)[:400]) from error


def _fields(asked: dict[str, object]) -> dict[str, object]:
    fields = asked.get("fields")
    return fields if isinstance(fields, dict) else {}


def _json(answer: object) -> Response:
    return Response(json.dumps(answer, allow_nan=False), media_type="application/json")


def _listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on the port, or on the first free one."""
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"port must be in 1 .. 65535, got {port}")
    try:
        is_name = host.encode("idna") != b""  # an empty one is every address of every network
    except UnicodeError:
        is_name = False
    if not is_name:
        raise ValueError(
            f"--host must be an address of this machine, such as 127.0.0.1, got {host!r:.80}; for "
            "every network that it is in, say 0.0.0.0"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried = PORTS if port is None else (port,)
    for each in tried:
        try:
            return socket.create_server((host, each), family=family)
        except OSError as error:
            refused = error
    is_of_host = refused.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME)
    advice = "--host must be an address of this machine" if is_of_host else "choose another port"
    ports = port or f"{PORTS[0]} to {PORTS[-1]}"
    raise OSError(f"cannot listen on {host}, port {ports}: {refused.strerror}; {advice}")
