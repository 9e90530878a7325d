"""What stands between the browser and Gradio: who is answered, the files to download, the policy.

A download is a link that holds the whole state, so nothing is written to disk and nothing is kept.
Requests that another site causes are refused before anything is read or computed for them.
"""

import asyncio
import ipaddress
import json
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import gradio

from ..configs import to_hf_config
from .figures import CONFIG
from .numbers import csv
from .side import look
from .state import from_query
from .views import VIEWS

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
HERE = Path(__file__).parent
ASSETS = Path(gradio.__file__).parent / "templates" / "frontend" / "assets"
# Scripts run only with the nonce of this answer or from this server; none is made from a string.
# Gradio and plotly write styles into elements, and draw from data: and blob: addresses.
POLICY = (
    "default-src 'self'; script-src 'self' 'nonce-{nonce}'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
MAX_HEAD = 2**16  # bytes of path, query and headers: two long configs in a link are 48,000
MAX_BODY = 5 * 2**20  # bytes: two pasted configs with every quote and line end escaped
BODY_SECONDS = 30.0  # that a body may take to arrive
AT_ONCE, WAITING = 4, 32  # downloads that are computed at once, and that wait for it
# What the page asks for. Gradio serves more, such as uploads, and files and hosts by their name
ASKED = re.compile(
    r"|(assets|static/js|static/fonts/\w+)/[\w.-]+|theme\.css|favicon\.ico|manifest\.json|config"
    r"|gradio_api/(queue/join|queue/data|heartbeat/\w+|cancel|reset)"
)
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
OUTSIDE = re.compile(r'<meta\b[^>]*"https?://[^>]*>')
# It says "here", and makes plotly name its clips and gradients by an address, which then changes
BASE = re.compile(r"<base\b[^>]*>")


class Refusal(NamedTuple):
    """A request that is not answered: its status, and one line that says why."""

    status: int
    why: str


class Guard:
    """An ASGI app around Gradio's: adds downloads and the policy, lets through what the page asks.

    host  where it is served; on this machine's own, no other name is answered to

    >>> Guard(None).app is None
    True
    """

    def __init__(self, app: App, host: str = "127.0.0.1") -> None:
        self.app = app
        self.host = host
        self.waiting = 0
        self.places = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer what is ours, pass on the rest."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page opens no websocket
            await send({"type": "websocket.close"})
            return
        if refusal := refused(scope, self.host):
            await _refuse(send, refusal)
            return
        name = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/")
        if not name or _is_near(scope):  # to rewrite a page, and to save the time on one machine
            plain = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
            scope = {**scope, "headers": plain}
        if name == "explore.js":
            script = (HERE / "explore.js").read_bytes()
            await _answer(send, 200, "text/javascript", script)
        elif name in DOWNLOADS:
            await self._download(name, scope["query_string"].decode("latin-1"), send)
        elif name.startswith("assets/") and _is_near(scope) and (path := _asset(name)):
            await _answer(send, 200, KINDS.get(path.suffix, "application/octet-stream"),
                          path.read_bytes(), keep=True)  # fmt: skip
        elif not ASKED.fullmatch(name):
            await _refuse(send, Refusal(404, "no such page"))
        elif scope["method"] != "POST":
            await self.app(scope, receive, _guarded(send))
        elif isinstance(body := await _whole(receive), Refusal):
            await _refuse(send, body)
        else:
            await self.app(scope, _again(body, receive), _guarded(send))

    async def _download(self, name: str, query: str, send: Send) -> None:
        """Compute a file beside the event loop, so that no other request waits for it."""
        kind, write = DOWNLOADS[name]
        if self.waiting >= WAITING:
            await _refuse(send, Refusal(503, "too many files are being computed; ask again later"))
            return
        self.waiting += 1
        try:
            async with self.places:
                body = await asyncio.to_thread(write, dict(parse_qsl(query)))
        except ValueError as error:
            await _refuse(send, Refusal(422, str(error)))
            return
        finally:
            self.waiting -= 1
        await _answer(send, 200, kind, body.encode(), name.rpartition("/")[2])


def refused(scope: Message, host: str) -> Refusal | None:
    """Why a request is not answered: it is for another name, from another site, or too large.

    Browsers say in `Sec-Fetch-Site` and `Origin` which site causes a request, and no script can
    change these. "none": a person typed the address. A program such as curl says neither.

    >>> refused({"method": "GET", "path": "/", "headers": [(b"host", b"evil.example")]}, "::1")
    Refusal(status=400, why="this page is not 'evil.example'")
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if size + len(scope["path"]) + len(scope.get("query_string", b"")) > MAX_HEAD:
        return Refusal(431, f"address and headers must be at most {MAX_HEAD:,} bytes")
    asked = headers.get(b"host", "")
    name = re.sub(r":\d*$", "", asked).strip("[]").lower()
    if is_loopback(host) and not is_loopback(name):
        return Refusal(400, f"this page is not {name[:80]!r}")
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    is_own = site in (None, "same-origin", "none")
    if not is_own or (origin is not None and urlsplit(origin).netloc != asked):
        return Refusal(
            403, "another site asked for this page: copy the address into a tab of its own"
        )
    if scope["method"] not in ("GET", "HEAD", "POST"):
        return Refusal(405, "GET, HEAD and POST are answered")
    return None


async def _whole(receive: Receive) -> bytes | Refusal:
    """The body of a request, which must be small and arrive in time."""

    async def read() -> bytes | Refusal:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return Refusal(400, "the request was cut off")
            body += message.get("body", b"")
            if len(body) > MAX_BODY:
                return Refusal(413, f"a request must be at most {MAX_BODY:,} bytes")
            if not message.get("more_body"):
                return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        return Refusal(408, f"a request must arrive within {BODY_SECONDS:g} seconds")


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` of a body that was read, and after it of what follows: that the browser left."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def _guarded(send: Send) -> Send:
    """`send`, with the policy on every answer; a page is held back until it is whole."""
    nonce = secrets.token_urlsafe(16)
    held: list[Message] = []

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], *_headers(nonce)]
            if b"text/html" in dict(headers).get(b"content-type", b""):
                held.append({**message, "headers": headers})
                held.append({"type": "http.response.body", "body": b""})
                return
            message = {**message, "headers": headers}
        elif held:
            held[1]["body"] += message.get("body", b"")
            if message.get("more_body"):
                return
            page = rewritten(held[1]["body"].decode(), nonce).encode()
            start, body = held
            length = (b"content-length", str(len(page)).encode())
            rest = [pair for pair in start["headers"] if pair[0] != length[0]]
            await send({**start, "headers": [*rest, length]})
            message = {**body, "body": page}
        await send(message)

    return guarded


def rewritten(page: str, nonce: str) -> str:
    """Gradio's page with our script, the nonce on every script, and no tag that names another host.

    >>> page = '<meta content="https://x.org/a.jpg" /><script>1</script></head>'
    >>> rewritten(page, "N").splitlines()[0]
    '<script nonce="N">1</script>'
    """
    ours = "".join(f"\n{tag}" for tag in (*_early(), '<script src="./explore.js" defer></script>'))
    page = BASE.sub("", OUTSIDE.sub("", page)).replace("</head>", f"{ours}</head>", 1)
    return re.sub(r"<script\b", f'<script nonce="{nonce}"', page)


@cache
def _early() -> list[str]:
    """Tags that make the browser load the part of Gradio that draws, 4 MB, beside all the rest."""
    names = sorted(path.name for path in ASSETS.glob("PlotlyPlot-*.js"))
    return [f'<link rel="modulepreload" crossorigin href="./assets/{name}">' for name in names]


def _headers(nonce: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-security-policy", POLICY.format(nonce=nonce).encode()),
        (b"x-frame-options", b"DENY"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    ]


def _is_near(scope: Message) -> bool:
    client = scope.get("client")
    return client is not None and is_loopback(client[0])


def is_loopback(host: str) -> bool:
    """Whether a host name is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _asset(name: str) -> Path | None:
    """A part of Gradio's page, which then need not pass through all of Gradio: sixty are asked."""
    path = ASSETS / name.removeprefix("assets/")
    return path if ASKED.fullmatch(name) and path.is_file() else None


async def _refuse(send: Send, refusal: Refusal) -> None:
    await _answer(send, refusal.status, "text/plain; charset=utf-8", f"{refusal.why}\n".encode())


async def _answer(
    send: Send, status: int, kind: str, body: bytes, file: str = "", keep: bool = False
) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    headers += _headers(secrets.token_urlsafe(16))
    if keep:  # its name has a hash of what is in it
        headers.append((b"cache-control", b"max-age=31536000, immutable"))
    if file:
        headers.append((b"content-disposition", f'attachment; filename="{file}"'.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _numbers(query: dict[str, str]) -> str:
    state = from_query(query)
    side = state.b if query.get("side") == "b" else state.a
    return csv(VIEWS[state.view].numbers(look(side, state.context)))


def _figure(query: dict[str, str]) -> str:
    state = from_query(query)
    seen = look(state.b if query.get("side") == "b" else state.a, state.context)
    view = VIEWS[state.view]
    figure = view.draw(seen, view.numbers(seen))
    written: str = figure.to_html(config=CONFIG, include_plotlyjs=True)
    return written


def _rope(query: dict[str, str]) -> str:
    state = from_query(query)
    seen = look(state.b if query.get("side") == "b" else state.a, state.context)
    return (
        json.dumps(to_hf_config(seen.spec, max_position_embeddings=state.context), indent=2) + "\n"
    )


DOWNLOADS: dict[str, tuple[str, Callable[[dict[str, str]], str]]] = {
    "download/numbers.csv": ("text/csv; charset=utf-8", _numbers),
    "download/figure.html": ("text/html; charset=utf-8", _figure),
    "download/config.json": ("application/json", _rope),
}
