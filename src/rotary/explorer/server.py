"""The server of the page: on this machine alone unless another host is asked for."""

import contextlib
import socket
import webbrowser
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware

from .guard import Guard
from .page import build

PORTS = range(7860, 7960)
STYLE = Path(__file__).with_name("explore.css")


def serve(
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Show the page until interrupted. `ready` is called with its address when it can be opened.

    port  None: the first free one from 7860 on
    Raises ValueError for a port that is none, OSError if it is taken or the host is not ours.

    >>> serve(port=70000)
    Traceback (most recent call last):
    ValueError: port must be in 1 .. 65535, got 70000
    """
    with _listening(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/"

        def up() -> None:
            if open_browser:
                webbrowser.open(address)
            if ready:
                ready(address)

        config = uvicorn.Config(  # h11 bounds what it reads before the guard sees a request
            application(host, up), http="h11", ws="none", log_level="warning", server_header=False
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def application(host: str = "127.0.0.1", up: Callable[[], None] = lambda: None) -> FastAPI:
    """The page as an ASGI app: no uploads, no fonts from elsewhere, the guard around all of it.

    host  where it will be served; on this machine's own, no other name is answered to
    up    called once, when it starts

    >>> application.__defaults__[0]
    '127.0.0.1'
    """

    @contextlib.asynccontextmanager
    async def started(_: FastAPI) -> AsyncIterator[None]:
        up()
        yield

    no_docs: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(middleware=[Middleware(Guard, host=host)], lifespan=started, **no_docs)
    theme = gr.themes.Default(
        primary_hue=gr.themes.colors.blue,
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    ).set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300")
    return gr.mount_gradio_app(
        app, build(), "/", server_name=host, footer_links=[], theme=theme, css=STYLE.read_text(),
        show_error=False, max_file_size=1, ssr_mode=False, pwa=False, mcp_server=False,
        enable_monitoring=False, app_kwargs=no_docs,
    )  # fmt: skip


def _listening(host: str, port: int | None) -> socket.socket:
    """A socket that listens on the port, or on the first free one."""
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"port must be in 1 .. 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried = PORTS if port is None else (port,)
    for each in tried:
        try:
            return socket.create_server((host, each), family=family)
        except OSError as error:
            refused = error
    raise OSError(
        f"cannot listen on {host}, port {port or f'{PORTS[0]} to {PORTS[-1]}'}: "
        f"{refused.strerror}; choose another port"
    )
