"""The peers, each called as its users call it: tables ready beforehand, q and k per layer."""

from typing import Any

import torch

try:
    import torchvision  # noqa: F401 -- transformers imports it wherever it is installed
except ImportError:
    pass
except RuntimeError:  # in vLLM's environment: built for CUDA, it asks for operators it lacks
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rotary import Rotary, cos_sin
from rotary.bench import Case


def cases(spec: Rotary, q: Any, k: Any, compiled: bool = True) -> dict[str, Case]:
    """The peers that rotate in the layout of the spec; `compiled` ones, which start slowly, too."""
    if spec.layout == "interleaved":
        return lucidrains_cases(spec, q, k)
    return transformers_cases(spec, q, k, compiled)


def full_width_tables(spec: Rotary, seq: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tables as transformers has them: (1, seq, head_dim), in the dtype of the model."""
    halves = cos_sin(spec, torch.arange(seq))
    cos, sin = (torch.cat((half, half), dim=-1)[None].to(dtype) for half in halves)
    return cos, sin


def transformers_cases(spec: Rotary, q: Any, k: Any, compiled: bool = True) -> dict[str, Case]:
    """Half layout: the function of modeling_llama, eager and under torch.compile."""
    cos, sin = full_width_tables(spec, q.shape[-2], q.dtype)
    found = {"transformers eager": lambda: apply_rotary_pos_emb(q, k, cos, sin)}
    if compiled:
        torch.compiler.reset()  # or the many shapes of a run use up its recompilations
        function = torch.compile(apply_rotary_pos_emb)
        found["transformers compiled"] = lambda: function(q, k, cos, sin)
    return found


def lucidrains_cases(spec: Rotary, q: Any, k: Any) -> dict[str, Case]:
    """Interleaved layout: rotary-embedding-torch, which keeps its tables after the first call."""
    from rotary_embedding_torch import RotaryEmbedding  # not in every environment of peers

    module = RotaryEmbedding(spec.head_dim, theta=spec.base)
    turn = module.rotate_queries_or_keys
    # it rounds positions to the dtype of its first input: a float32 call fills its tables rightly
    turn(torch.zeros(1, 1, *q.shape[-2:]))
    return {"rotary-embedding-torch": lambda: (turn(q), turn(k))}
