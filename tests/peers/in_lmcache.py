"""LMCache's moves of cached keys, by its own code and by ours, on the tables of vLLM."""

import dataclasses
import os
import sys
from importlib.metadata import version
from itertools import pairwise

import hosts
import measure

measure.leave_this_folder()
os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch  # noqa: E402

# torchvision from the registry is built for CUDA: once its two operators exist it imports
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lmcache import device_ops  # noqa: E402
from lmcache.v1.compute import positional_encoding as rope_of_lmcache  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import get_rope  # noqa: E402

import rotary  # noqa: E402
from rotary.integrations import lmcache as ours  # noqa: E402

ABOUT = (
    "LMCache's `get_fused_rope` makes what moves the keys of a model; it was asked for each rope "
    "type below, then its operator was run all the same, with the table that vLLM has for the "
    "type. Keys are rotated at one position by vLLM's rotary embedding, moved, and compared with "
    "what vLLM's gives at the other position: positions up to 32 768, the largest difference over "
    'the largest key. "By the table" is `rotary_embedding_k_fused` of '
    '`rotary.integrations.lmcache`, "by the spec" what `install(spec)` puts there. vLLM\'s table '
    "has float32 angles, so its own keys are off by 1e-3: a key that is moved by the spec keeps "
    "the error of where it was computed, and differs from them by as much. The last two columns "
    "move one key through 1 000 random positions and back."
)
HEAD, LONGEST, TOKENS = 128, 32768, 512
ROPES = {  # name -> (rope_parameters of vLLM beside the base, half layout)
    "default": ({}, True),
    "default, interleaved": ({}, False),
    "partial, 0.5": ({"partial_rotary_factor": 0.5}, True),
    "partial, 0.25, interleaved": ({"partial_rotary_factor": 0.25}, False),
    "linear x 4": ({"rope_type": "linear", "factor": 4.0}, True),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, True),
    "yarn x 4": ({"rope_type": "yarn", "factor": 4.0,
                  "original_max_position_embeddings": LONGEST // 4}, True),
    "yarn x 40": ({"rope_type": "yarn", "factor": 40.0,
                   "original_max_position_embeddings": 4096}, True),
}  # fmt: skip
BASE = 500_000.0


def spec_of(parameters, is_neox):
    own = {"rope_type": "default", **parameters, "rope_theta": BASE}
    share = own.pop("partial_rotary_factor", 1.0)
    config = {
        "model_type": "llama", "hidden_size": HEAD, "num_attention_heads": 1,
        "max_position_embeddings": LONGEST, "rope_parameters": own,
    }  # fmt: skip
    layout = "half" if is_neox else "interleaved"
    return dataclasses.replace(
        rotary.from_hf_config(config),
        rotary_dim=int(HEAD * share),
        layout=layout,
        out_layout=layout,
    )


def answer(parameters, is_neox):
    """What LMCache says when it is asked for such a rope."""
    own = dict(parameters)
    share = own.pop("partial_rotary_factor", 1.0)
    made = rope_of_lmcache.get_fused_rope(
        HEAD, int(HEAD * share), LONGEST, BASE, is_neox, own or None, torch.float32, share
    )
    return "refused" if made is None else "taken"


def row(name, parameters, is_neox, dtype):
    own = {"rope_type": "default", **parameters, "rope_theta": BASE}
    rope = get_rope(HEAD, LONGEST, is_neox, own, dtype)
    spec = spec_of(parameters, is_neox)
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randint(LONGEST, (TOKENS,), generator=generator) for _ in range(2))
    keys = torch.randn(TOKENS, HEAD, generator=generator).to(dtype)

    def at(positions):
        return rope.forward_native(positions, keys.clone(), keys.clone())[1]

    cached, wanted = at(old).view(TOKENS, 1, HEAD), at(new).view(TOKENS, 1, HEAD)
    largest = wanted.abs().max()
    table = rope.cos_sin_cache
    mover = ours.KeyMover(spec)
    result = {"rope type": name, "dtype": str(dtype).removeprefix("torch."),
              "LMCache's get_fused_rope": answer(parameters, is_neox)}  # fmt: skip
    movers = {"LMCache": device_ops.rotary_embedding_k_fused,
              "by the table": ours.rotary_embedding_k_fused,
              "by the spec": mover.rotary_embedding_k_fused}  # fmt: skip
    for title, move in movers.items():
        moved = cached.clone()
        move(old, new, moved, HEAD, table, is_neox)
        result[title] = ((moved - wanted).abs().max() / largest).item()
    walk = [0, *torch.randint(LONGEST, (999,), generator=generator).tolist(), 0]
    for title in ("LMCache", "by the spec"):
        key = keys[:1].view(1, 1, HEAD).clone()
        for a, b in pairwise(walk):
            movers[title](torch.tensor([a]), torch.tensor([b]), key, HEAD, table, is_neox)
        far = ((key.flatten() - keys[0]).abs().max() / keys[0].abs().max()).item()
        result[f"1 000 moves, {title}"] = far
    return result


def blended(name, parameters, is_neox):
    """After `install`, what LMCache makes for a model is ours, and its operators too."""
    spec = spec_of(parameters, is_neox)
    ours.install(spec)
    made = rope_of_lmcache.get_fused_rope(HEAD, HEAD, LONGEST, BASE, is_neox, None, torch.float32)
    is_ours = device_ops.rotary_embedding_k_fused == made.rotary_embedding_k_fused
    old, new = torch.arange(TOKENS), torch.arange(TOKENS) + 9000
    keys = torch.randn(TOKENS, 2, HEAD, generator=torch.Generator().manual_seed(0))
    cached, wanted = (rotary.apply(spec, keys, positions=where, seq_dim=-3) for where in (old, new))
    moved = made(old, new, cached.view(TOKENS, -1)).view(wanted.shape)
    ours.uninstall()
    return {"rope type": name, "get_fused_rope": type(made).__name__,
            "device_ops are ours": is_ours, "apart": (moved - wanted).abs().max().item(),
            "after uninstall": type(rope_of_lmcache.get_fused_rope(
                HEAD, HEAD, LONGEST, BASE, is_neox, None, torch.float32)).__name__}  # fmt: skip


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        tables = {
            "Keys moved": [row(name, *rope, dtype) for dtype in (torch.float32, torch.bfloat16)
                           for name, rope in ROPES.items()],
            "Installed": [blended(name, *rope) for name, rope in ROPES.items()],
        }  # fmt: skip
    hosts.write(sys.argv[1], "LMCache", f"{version('lmcache')} (vLLM {version('vllm')})", ABOUT,
                tables)  # fmt: skip
