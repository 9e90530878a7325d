"""SGLang's rotary embeddings with and without our plug-in, loaded by SGLang itself."""

import importlib.util
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import hosts

HERE = Path(__file__).resolve().parent
ABOUT = (
    "SGLang's own `load_plugins` finds the entry point `rotary` in the group "
    "`sglang.srt.plugins` and applies its hooks; its `get_rope` then makes the rotary embedding of "
    'each rope type below, which is called as a model calls it. "By SGLang" is the method that '
    "the hook is around. Each is compared with the same rotation in float64 by SGLang's own table: "
    "the largest difference over the largest element. On a CPU SGLang runs `forward_native`; "
    "`forward_cuda` and `forward_triton`, which it runs on a GPU, were called through their hooks "
    "with tensors on a CPU. SGLang's kernels do not install here, so no server was started."
)
HEAD, TOKENS, LONGEST = 64, 128, 4096
SECTIONS = {"mrope_section": [8, 12, 12]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
ROPES = {  # name -> (rope_scaling, half layout, rotary_dim)
    "default": (None, True, HEAD),
    "interleaved": (None, False, HEAD),
    "partial": (None, True, 32),
    "linear": ({"rope_type": "linear", "factor": 4.0}, True, HEAD),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, True, HEAD),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}, True, HEAD),
    "yarn": ({"rope_type": "yarn", **YARN}, True, HEAD),
    "deepseek_yarn": ({"rope_type": "deepseek_yarn", **YARN, "mscale": 0.7}, False, HEAD),
    "deepseek_yarn, half": ({"rope_type": "deepseek_yarn", **YARN}, True, HEAD),
    "longrope": ({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32,
                  "original_max_position_embeddings": 1024}, True, HEAD),
    "proportional": ({"rope_type": "proportional"}, True, 16),
    "M-RoPE": ({"rope_type": "default", **SECTIONS}, True, HEAD),
    "M-RoPE, interleaved": ({"rope_type": "default", **SECTIONS, "mrope_interleaved": True}, True,
                            HEAD),
}  # fmt: skip


def with_entry_point(folder):
    """Make this checkout an installed package with our entry point, for this process."""
    info = Path(folder, "rotary-0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rotary\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nrotary = rotary.integrations.sglang:register\n"
    )
    sys.path.insert(0, folder)


def peer():
    """The runner sglang.py of this folder: it puts empty modules where kernels are missing."""
    spec = importlib.util.spec_from_file_location("peer_sglang", HERE / "sglang.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(module, table, rows, x):
    """x rotated in float64 by rows of SGLang's table, with the axis of each pair."""
    rotary_dim, pairs = module.rotary_dim, module.rotary_dim // 2
    if rows.ndim == 2:
        rows = rows[module.axis_map]
        taken = [table[rows, torch.arange(pairs)[:, None] + shift].T for shift in (0, pairs)]
    else:
        taken = table[rows].chunk(2, -1)
    turn = torch.complex(*(t.double() for t in taken))[:, None]
    x = x.double().view(len(x), -1, module.head_size)
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    split = head.unflatten(-1, (2, pairs) if is_half(module) else (pairs, 2))
    axis = -2 if is_half(module) else -1
    turned = torch.complex(*(part.contiguous() for part in split.unbind(axis))) * turn
    return torch.cat([torch.stack([turned.real, turned.imag], axis).flatten(-2), rest], -1)


def is_half(module):
    """The class of LongRoPE has the half layout alone, and does not say so."""
    return getattr(module, "is_neox_style", True)


def rows_of(name, scaling, is_neox, rotary_dim, dtype):
    factory._ROPE_DICT.clear()
    torch.set_default_dtype(dtype)  # as SGLang does when it loads a model
    module = factory.get_rope(HEAD, rotary_dim, LONGEST, 10000.0, is_neox, scaling, dtype)
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(TOKENS, 6 * HEAD, generator=generator).to(dtype)
    q, k, _ = qkv.split([4 * HEAD, HEAD, HEAD], -1)
    if "deepseek" in name:  # its models hold heads apart
        q, k = q.unflatten(-1, (-1, HEAD)), k.unflatten(-1, (-1, HEAD))
    shape = (3, TOKENS) if "M-RoPE" in name else (TOKENS,)
    positions = torch.randint(1024 if name == "longrope" else LONGEST, shape, generator=generator)
    methods = ["forward_native", "forward_cuda"] if hasattr(module, "forward_native") else [
        "forward"]  # fmt: skip
    if "M-RoPE" in name:
        methods[1] = "forward_triton"
    for method in methods:
        hooked = getattr(type(module), method)
        tables = (t for t in (getattr(module, n, None) for n in (
            "long_short_cos_sin_cache", "cos_sin_cache")) if t is not None)  # fmt: skip
        table = next(tables)
        wanted = [reference(module, table, positions, x) for x in (q, k)]
        calls.clear()
        given = [x.clone() for x in (q, k)]
        is_native = method in ("forward_native", "forward")
        run = module if is_native else getattr(module, method)
        turned = run(positions, *given)
        row = {"rope type": name, "class": type(module).__name__, "method": method,
               "dtype": str(dtype).removeprefix("torch."), "by rotary": bool(calls),
               "in place": turned[0].data_ptr() == given[0].data_ptr(),
               "rotary, error": far(wanted, turned)}  # fmt: skip
        if is_native:
            own = hooked.__wrapped__(module, positions, *(x.clone() for x in (q, k)))
            row["SGLang, error"] = far(wanted, own)
        else:
            row["SGLang, error"] = "needs a GPU"
        yield row


def compiled_rows():
    """As in a model that SGLang compiles: one graph, from the formula that it takes then."""
    for name in ("default", "partial", "M-RoPE"):
        scaling, is_neox, rotary_dim = ROPES[name]
        factory._ROPE_DICT.clear()
        module = factory.get_rope(HEAD, rotary_dim, LONGEST, 1e4, is_neox, scaling, torch.float32)
        positions = torch.randint(LONGEST, (3, TOKENS) if name == "M-RoPE" else (TOKENS,))
        q, k = torch.randn(TOKENS, 4 * HEAD), torch.randn(TOKENS, HEAD)
        wanted = module(positions, q, k)
        module.enter_torch_compile(TOKENS)
        calls.clear()
        ours.rotate = rotate  # counting is not for a graph
        turned = torch.compile(module, fullgraph=True, backend="aot_eager")(positions, q, k)
        ours.rotate = counted
        yield {"rope type": name, "apart": far([w.double() for w in wanted], turned)}


def far(wanted, turned):
    return max(
        ((w - t.double().reshape(w.shape)).abs().max() / w.abs().max()).item()
        for w, t in zip(wanted, turned, strict=True)
    )


def counted(*arguments, **options):
    calls.append(1)
    return rotate(*arguments, **options)


if __name__ == "__main__":
    out = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        with_entry_point(folder)
        runner = peer()
        torch, factory = runner.torch, runner.factory
        runner.run_on_a_cpu()
        from sglang.srt import plugins
        from sglang.srt.layers.rotary_embedding import base

        from rotary.integrations import sglang as ours

        os.environ.pop("SGLANG_PLUGINS", None)
        plugins.load_plugins()
        unnamed = hasattr(base.RotaryEmbedding.forward_native, "__wrapped__")
        os.environ["SGLANG_PLUGINS"] = "rotary"
        plugins._plugins_loaded = False
        plugins.load_plugins()
        named = hasattr(base.RotaryEmbedding.forward_native, "__wrapped__")
    calls, rotate, ours.rotate = [], ours.rotate, counted
    tables = {
        "Switched on": [
            {"SGLANG_PLUGINS": "unset", "hooked": unnamed},
            {"SGLANG_PLUGINS": "rotary", "hooked": named},
        ],
        "Rotary embeddings": [
            row
            for dtype in (torch.float32, torch.bfloat16)
            for name, rope in ROPES.items()
            for row in rows_of(name, *rope, dtype)
        ],
        "Compiled to one graph": list(compiled_rows()),
    }
    hosts.write(out, "SGLang", version("sglang"), ABOUT, tables)
