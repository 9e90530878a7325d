"""megatron-core: a GPTModel of one layer built from arguments and run on a CPU as far as its RoPE.

It reads no config.json, so the cases are sets of arguments, under the names of Megatron-LM's
scripts. The model's own attention, plain or multi-latent, calls `apply_rotary_pos_emb`; that call
is repeated on unit vectors, with the angles and the factor that the attention gave to it.

    python tests/peers/megatron.py tests/configs OUT.json
"""

import contextlib
import os
import sys
import warnings
from importlib.metadata import version

import measure

measure.leave_this_folder()
warnings.simplefilter("ignore")
os.environ.update(GLOO_SOCKET_IFNAME="lo")

import torch  # noqa: E402

torch.cuda.current_device = lambda: "cpu"  # its frequencies move to the GPU at first use

import megatron.core.transformer.attention as plain_attention  # noqa: E402
import megatron.core.transformer.multi_latent_attention as latent_attention  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402

TOKENS = 2048
GPT = {"kv_channels": 128, "rotary_base": 500_000}
MLA = {"multi_latent_attention": True, "qk_pos_emb_head_dim": 64}
YARN = {
    "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
    "yarn_mscale": None, "yarn_mscale_all_dim": None, "yarn_correction_range_round_to_int": True,
}  # fmt: skip
CASES = [
    GPT,
    {"hidden_size": 256, "num_attention_heads": 4},
    {**GPT, "rotary_percent": 0.5},
    {"kv_channels": 80, "rotary_percent": 0.33},
    {**GPT, "rotary_interleaved": True},
    {**GPT, "rotary_percent": 0.5, "rotary_interleaved": True},
    {**GPT, "rotary_seq_len_interpolation_factor": 4},
    {**GPT, "use_rope_scaling": True},
    {**GPT, "use_rope_scaling": True, "rope_scaling_factor": 32.0},
    {**GPT, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4},
    {**GPT, "use_rope_scaling": False, "rope_scaling_factor": 32.0},
    {**GPT, "position_embedding_type": "mrope", "mrope_section": [16, 24, 24]},
    {**GPT, "position_embedding_type": "mrope", "mrope_section": [16, 24, 24],
     "rotary_seq_len_interpolation_factor": 2},
    {**GPT, "position_embedding_type": "mrope", "mrope_section": [8, 12, 12],
     "rotary_percent": 0.5},
    {**GPT, "position_embedding_type": "mrope", "mrope_section": [16, 24, 24],
     "rotary_interleaved": True},
    {"kv_channels": 64, "rotary_base": 150_000, **YARN},
    {"kv_channels": 64, "rotary_base": 150_000, **YARN,
     "yarn_correction_range_round_to_int": False},
    {"kv_channels": 64, **YARN, "yarn_mscale": 0.707, "yarn_mscale_all_dim": 1.0,
     "yarn_beta_fast": 16.0},
    {"kv_channels": 64, **YARN, "rotary_percent": 0.5},
    {"kv_channels": 64, **YARN, "rotary_interleaved": True},
    {"kv_channels": 64, **YARN, "rotary_seq_len_interpolation_factor": 2},
    MLA,
    {**MLA, "rotary_scaling_factor": 1.0},
    {**MLA, "rotary_scaling_factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    {**MLA, "rotary_scaling_factor": 32.0, "beta_fast": 1.0, "mscale_all_dim": 1.0,
     "rotary_base": 50_000, "original_max_position_embeddings": 8192},
    {**MLA, "rotary_percent": 0.5},
    {**MLA, "rope_type": "rope"},
    {**MLA, "rope_type": "rope", "rotary_percent": 0.5, "rotary_base": 50_000},
    {**MLA, "rotary_interleaved": True},
]  # fmt: skip
OF_THE_MODEL = {  # argument of the scripts -> of GPTModel; every other one is the config's
    "position_embedding_type": "position_embedding_type", "rotary_percent": "rotary_percent",
    "rotary_base": "rotary_base", "use_rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}  # fmt: skip


class SeenError(Exception):
    """The call that was waited for, so that nothing after it is run."""


class Skip(torch.nn.Module):
    """Stands for a part of the model that needs a GPU and comes after the rotation."""

    def __init__(self, *args, **options):
        super().__init__()


def model_of(arguments):
    is_latent = arguments.get("multi_latent_attention", False)
    given = {
        "num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "use_cpu_initialization": True, "apply_rope_fusion": False,
    }  # fmt: skip
    if is_latent:
        given |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16, "v_head_dim": 16}
        given |= {key: arguments[key] for key in ("rotary_base", "rotary_percent")
                  if key in arguments}  # fmt: skip
    own = {OF_THE_MODEL[key]: value for key, value in arguments.items() if key in OF_THE_MODEL}
    given |= {key: value for key, value in arguments.items() if key not in OF_THE_MODEL}
    later = {key: given.pop(key) for key in list(given) if key.startswith("yarn_")}
    config = (MLATransformerConfig if is_latent else TransformerConfig)(**given)
    for key, value in later.items():  # no field of the class, but read by the model
        setattr(config, key, value)
    layer = get_gpt_layer_local_spec(multi_latent_attention=is_latent)
    layer.submodules.self_attention.submodules.core_attention = Skip
    own.setdefault("position_embedding_type", "rope")
    return GPTModel(config, layer, vocab_size=32, max_sequence_length=TOKENS, **own)


@contextlib.contextmanager
def rotation_of(arguments):
    """rotate(position, axis) -> what the model's attention makes of unit vectors there."""
    model = model_of(arguments)
    has_axes = arguments.get("position_embedding_type") == "mrope"
    real = plain_attention.apply_rotary_pos_emb
    calls = {}  # axis that moves -> the call on unit vectors

    def call_of(axis):
        positions = torch.arange(TOKENS)[None]
        if has_axes:
            still = torch.zeros_like(positions)
            moved = [positions if axis in (None, each) else still for each in range(3)]
            positions = torch.stack(moved)

        def watched(x, angles, *args, **options):
            unit = torch.eye(x.shape[-1])[None, None]
            calls[axis] = lambda at: real(unit, angles[at : at + 1], *args, **options)
            raise SeenError

        plain_attention.apply_rotary_pos_emb = latent_attention.apply_rotary_pos_emb = watched
        with contextlib.suppress(SeenError), torch.no_grad():
            model(torch.zeros(1, TOKENS, dtype=torch.long), positions, None)
        return calls[axis]

    try:
        yield lambda at, axis=None: (calls.get(axis) or call_of(axis))(at)[0, 0].numpy()
    finally:
        plain_attention.apply_rotary_pos_emb = latent_attention.apply_rotary_pos_emb = real


def row_of(arguments):
    try:
        with rotation_of(arguments) as rotate:
            row = measure.measured(rotate, rotate(0).shape[0], TOKENS // 2)
            if "mrope_section" in arguments:
                driven = [abs(rotate(1, axis) - rotate(0)).max(1) > 1e-9 for axis in range(3)]
                row["axes"] = [next(axis for axis in range(3) if driven[axis][pair])
                               for pair in range(len(row["inv_freq"]))]  # fmt: skip
    except Exception as error:
        return {"arguments": arguments, "refused": measure.reason(error)}
    row["inv_freq"] = [measure.nine(value) for value in row["inv_freq"]]
    return {"arguments": arguments, **row}


def main(_, out):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    latent_attention.HAVE_TE = False
    rows = [row_of(arguments) for arguments in CASES]
    measure.write(out, "megatron-core", version("megatron-core"), rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
