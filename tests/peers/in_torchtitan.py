"""torchtitan with and without our overrides: one training step, its modules alone, its tables."""

import dataclasses
import inspect
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import hosts
import measure

measure.leave_this_folder()

import mpmath  # noqa: E402
import torch  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides, override  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE  # noqa: E402
from torchtitan.models.deepseek_v3 import deepseekv3_configs  # noqa: E402
from torchtitan.models.gpt_oss import gptoss_configs  # noqa: E402
from torchtitan.models.llama3 import llama3_configs  # noqa: E402
from torchtitan.models.qwen3 import qwen3_configs  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

import rotary  # noqa: E402
import rotary.integrations.torchtitan as ours  # noqa: E402

ABOUT = (
    "Each small model of torchtitan runs forward and backward on its own code, and again after "
    "`apply_overrides` with `rotary.integrations.torchtitan`, from the same weights and tokens. "
    "Its attention on a CPU has no backward pass, so in both runs PyTorch's own causal attention "
    "stands for it, put there by the same override mechanism. With an exact table the numbers of "
    "the table change, by what float32 angles are off; DeepSeek-V3's gradients change by more, "
    "because its experts multiply in bfloat16, whose steps are 4e-3: no token goes to another "
    "expert, and without the experts' own weights it is 3e-4."
)
OURS = ours.__name__
OVERRIDES = {
    CosSinRoPE.Config: (ours.cos_sin_rope, "half"),
    ComplexRoPE.Config: (ours.complex_rope, "interleaved"),
}
SEQ, BATCH = 256, 2
FAMILIES = {
    "llama3": llama3_configs, "qwen3": qwen3_configs, "deepseek_v3": deepseekv3_configs,
    "gpt_oss": gptoss_configs,
}  # fmt: skip
LLAMA, QWEN = llama3_configs["debugmodel"], qwen3_configs["debugmodel"]
DEEPSEEK = partial(deepseekv3_configs["debugmodel"], moe_comm_backend="standard")
MODELS = {  # name -> (what makes its config, override, positions that restart in the middle)
    "llama3 debugmodel": (LLAMA, "complex_rope", False),
    "llama3 debugmodel, packed": (LLAMA, "complex_rope", True),
    "qwen3 debugmodel": (QWEN, "cos_sin_rope", False),
    "qwen3 debugmodel, packed": (QWEN, "cos_sin_rope", True),
    "deepseek_v3 debugmodel": (DEEPSEEK, "complex_rope", False),
}


class CausalAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config):
        super().__init__()

    def forward(self, q, k, v, *, attention_masks=None, scale=None, enable_gqa=False, **others):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return attended.transpose(1, 2)


@override(target=FlexAttention.Config)
def causal_attention(config):
    return CausalAttention.Config()


def ran(make, imports, is_packed):
    """(loss, gradients, the configs of its rotary modules) of one step from fixed weights."""
    config = make(attn_backend="flex")
    apply_overrides(OverrideConfig(imports=[f"{__name__}.causal_attention"]), config)
    apply_overrides(OverrideConfig(imports=imports), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    tokens = torch.randint(2048, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ).expand(BATCH, SEQ).clone()
    if is_packed:
        positions[:, SEQ // 2 :] -= SEQ // 2
    logits = model(tokens[:, :-1], positions=positions)
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, [node for _, node, _, _ in config.traverse(RoPE.Config)]


def apart(gradients, others):
    """The largest difference of a gradient, over the largest element of it."""
    if gradients.keys() != others.keys():
        raise ValueError("other parameters have gradients")
    return max(
        ((gradients[name] - others[name]).abs().max() / gradients[name].abs().max()).item()
        for name in gradients
    )


def steps():
    """One training step of each model, with and without us."""
    for name, (make, factory, is_packed) in MODELS.items():
        loss, gradients, _ = ran(make, [], is_packed)
        for options in ({}, {"exact": True}):
            calls.clear()
            our_loss, ours, nodes = ran(make, [(f"{OURS}.{factory}", options)], is_packed)
            yield {
                "model": name, "override": factory, "exact table": bool(options),
                "rotary modules": f"{sum(type(node).__module__ == OURS for node in nodes)} of "
                f"{len(nodes)}", "calls of rotary.rotate": len(calls),
                "loss": round(loss, 5), "loss apart": abs(our_loss - loss),
                "gradients apart, of the largest": apart(gradients, ours),
            }  # fmt: skip


def exact_tables():
    """The exact table of every model, against torchtitan's and against 50 digits."""
    seen = set()
    for family, makers in FAMILIES.items():
        for size, make in makers.items():
            asked = inspect.signature(make).parameters
            others = {"moe_comm_backend": "standard"} if "moe_comm_backend" in asked else {}
            config = make(attn_backend="flex", **others)
            for _, node, _, _ in config.traverse(RoPE.Config):
                key = (type(node), repr(node))
                if key in seen or type(node) not in OVERRIDES:
                    continue
                seen.add(key)
                yield table_row(f"{family} {size}", node)


def table_row(name, node):
    factory, layout = OVERRIDES[type(node)]
    node = dataclasses.replace(node, max_seq_len=min(node.max_seq_len, 131072))
    stock, exact = node.build().cache, factory(node, exact=True).build().cache
    last = node.max_seq_len - 1
    inv_freq, _ = rotary.inv_freq(ours.spec_of(node, layout))
    with mpmath.workdps(50):
        true = [mpmath.cos(mpmath.mpf(float(f)) * last) for f in inv_freq]
    row = exact[last].real if exact.is_complex() else exact[last, : len(true)]
    near = min(512, node.max_seq_len)
    return {
        "model": name, "scaling": node.scaling, "base": node.theta, "dim": node.dim,
        "apart before 512": (exact[:near] - stock[:near]).abs().max().item(),
        "last position": last, "apart there": (exact[last] - stock[last]).abs().max().item(),
        "error of the exact cos there": max(
            float(abs(t - float(c))) for t, c in zip(true, row, strict=True)
        ),
    }  # fmt: skip


def forms():
    """The modules alone: compiled, under tensor parallelism, in 16 bits."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        mesh = init_device_mesh("cpu", (1,))
        for config_class, (factory, _) in OVERRIDES.items():
            config = config_class(dim=64, max_seq_len=256)
            stock, mine = config.build(), factory(config).build()
            shared = {"module": factory.__name__}
            q, k = torch.randn(2, 128, 8, 64), torch.randn(2, 128, 2, 64)
            positions = torch.arange(128).expand(2, 128).contiguous()
            wanted = stock(q, k, positions)
            compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
            yield {**shared, "form": "torch.compile, one graph",
                   "apart": far(wanted, compiled(q, k, positions))}  # fmt: skip
            half = [x.bfloat16() for x in (q, k)]
            yield {**shared, "form": "bfloat16",
                   "apart": far(stock(*half, positions), mine(*half, positions))}  # fmt: skip
            mine.cache = distribute_tensor(mine.cache, mesh, [Replicate()])
            shards = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k)]
            turned = [x.full_tensor() for x in mine(*shards, positions)]
            yield {**shared, "form": "DTensor, heads sharded", "apart": far(wanted, turned)}
        torch.distributed.destroy_process_group()


def far(wanted, turned):
    return max((a.float() - b.float()).abs().max().item()
               for a, b in zip(wanted, turned, strict=True))  # fmt: skip


def counted(*arguments, **options):
    calls.append(1)
    return rotate(*arguments, **options)


if __name__ == "__main__":
    calls, rotate, ours.rotate = [], ours.rotate, counted
    tables = {
        "One training step": list(steps()),
        "The modules alone": list(forms()),
        "Exact tables": list(exact_tables()),
    }
    hosts.write(sys.argv[1], "torchtitan", version("torchtitan"), ABOUT, tables)
