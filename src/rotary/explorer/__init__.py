"""A page to look at a RoPE: `rotary explore`, or `serve()`. Needs starlette and uvicorn.

Nothing leaves the machine: the page loads nothing from elsewhere, and nothing is counted.
"""

from .server import build as build
from .server import serve as serve
