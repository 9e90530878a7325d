"""Rotary Position Embedding: exact up to position 2^39, for almost every model.

For long prompts, in place or with out=, it is as fast as copying q and k in memory.

>>> import numpy as np
>>> spec = Rotary(head_dim=64, base=500_000.0)
>>> q, k = np.ones((1, 32, 16, 64)), np.ones((1, 8, 16, 64))  # (batch, heads, seq, head_dim)
>>> q_rotated, k_rotated = apply(spec, q, k)  # at positions 0 .. 15
>>> q_rotated.shape, k_rotated.shape
((1, 32, 16, 64), (1, 8, 16, 64))
"""

import importlib
from typing import TYPE_CHECKING

from . import layouts as layouts
from . import positions as positions
from . import schedules as schedules
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
    from . import analysis as analysis
    from . import attention as attention
    from . import audit as audit
    from . import checkpoint as checkpoint
    from . import configs as configs
    from . import identify as identify
    from . import nn as nn
    from . import plan as plan
    from . import plots as plots
    from . import ranks as ranks
    from . import reach as reach
    from . import testing as testing
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

_MODULES = ("analysis", "attention", "audit", "checkpoint", "configs", "identify", "nn", "plan",
            "plots", "ranks", "reach", "schedules", "testing")  # fmt: skip
_NEED_TORCH = {
    "from_model": "rotary.model",
    "patch": "rotary.integrations.transformers",
    "unpatch": "rotary.integrations.transformers",
}


def __getattr__(name: str) -> object:
    """Import a submodule, or a function that needs torch, when it is first used."""
    try:
        if name in _MODULES:
            return importlib.import_module(f"rotary.{name}")
        if name in _NEED_TORCH:
            return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        why = f"rotary.{name} needs torch: pip install torch"
        raise ModuleNotFoundError(why, name="torch") from error
    raise AttributeError(f"module 'rotary' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
