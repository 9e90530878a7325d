"""Rotary Position Embedding: exact at every position, for every model, as fast as a copy."""

from typing import TYPE_CHECKING, Any

from . import layouts as layouts
from . import positions as positions
from .angles import cos_sin as cos_sin
from .angles import inv_freq as inv_freq
from .angles import turns as turns
from .configs import from_hf_config as from_hf_config
from .configs import to_hf_config as to_hf_config
from .fused import KVCache as KVCache
from .fused import LatentCache as LatentCache
from .fused import Norm as Norm
from .fused import fused as fused
from .prepare import prepare as prepare
from .prepare import warm_up as warm_up
from .rerotate import rerotate as rerotate
from .rotate import apply as apply
from .rotate import rotate as rotate
from .spec import Rotary as Rotary

if TYPE_CHECKING:
    from .integrations.transformers import patch as patch
    from .integrations.transformers import unpatch as unpatch
    from .model import from_model as from_model

__version__ = "0.1.0"
__all__ = [
    "KVCache",
    "LatentCache",
    "Norm",
    "Rotary",
    "apply",
    "cos_sin",
    "from_hf_config",
    "from_model",
    "fused",
    "inv_freq",
    "layouts",
    "patch",
    "positions",
    "prepare",
    "rerotate",
    "rotate",
    "to_hf_config",
    "turns",
    "unpatch",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """The public names that need torch, imported when they are asked for."""
    if name in ("patch", "unpatch"):
        from .integrations import transformers

        return getattr(transformers, name)
    if name == "from_model":
        from .model import from_model

        return from_model
    raise AttributeError(f"module 'rotary' has no attribute {name!r}")
