"""A web page that shows a RoPE: `rotary explore`, or `serve()`. Needs starlette and uvicorn.

Nothing leaves the machine: the page loads nothing from other servers, and no use is counted.
"""

from .server import build as build
from .server import serve as serve
