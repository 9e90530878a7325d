"""A page to look at a RoPE: `rotary explore`, or `serve()`. Needs gradio and plotly.

Nothing leaves the machine: the page loads nothing from elsewhere, and nothing is counted.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read by gradio when it is imported
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

from .page import build as build
from .server import serve as serve
