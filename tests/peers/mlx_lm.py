"""mlx-lm: the model file of each config, built whole and run for one token, as far as its RoPE.

MLX computes nothing before it is asked to, so the whole model costs no memory. Every call of
`mx.fast.rope` in its layers is noted; the kernel then turns unit vectors with the same arguments.
What the configs of this repository leave out (sizes of the MLP, experts, norms) is made up, RoPE's
own keys never are.

    python tests/peers/mlx_lm.py tests/configs tests/golden/peers/mlx_lm.json
    python tests/peers/mlx_lm.py tests/configs tests/golden/peers/mlx_lm_silent.json --silent
"""

import dataclasses
import sys
import types
from importlib.metadata import version

import measure

measure.leave_this_folder()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.base import BaseModelArgs  # noqa: E402
from mlx_lm.models.bitlinear_layers import BitLinear  # noqa: E402
from mlx_lm.utils import _get_classes  # noqa: E402

MADE_UP = {"hidden_act": "relu2", "topk_method": "noaux_tc", "scoring_func": "sigmoid",
           "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "mlp_only_layers": [],
           "index_n_heads": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
           "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
BY_TYPE = {"int": 8, "float": 1.0, "bool": False}
NEVER_MADE_UP = ("rope", "rotary", "theta", "position", "head", "layer_types", "sliding",
                 "hidden_size", "num_hidden_layers", "d_model", "n_layers")  # fmt: skip

rope_kernel = mx.fast.rope
read_args = BaseModelArgs.from_dict.__func__


def rows_of(name, config):
    try:
        model_class, args_class = _get_classes(config)
    except ValueError:
        return [measure.row(name, skipped="no model file for its model type")]
    try:
        model = model_class(args_class.from_dict(config))
        calls = calls_of(model)
    except Exception as error:
        return [measure.row(name, refused=measure.reason(error))]
    by_label = {}
    for layer, call in calls:
        by_label.setdefault(label(model, config, layer), []).append(call)
    found = {name: distinct(calls) for name, calls in by_label.items()}
    if len({tuple(map(str, calls)) for calls in found.values()}) == 1:
        found = {None: next(iter(found.values()))}
    text = {**config, **config.get("text_config", {})}
    return [row for layer_type, calls in found.items()
            for call in calls for row in measured(name, text, layer_type, call)]  # fmt: skip


@dataclasses.dataclass
class Call:
    """What one layer hands to the kernel, and the module that does."""

    module: object
    width: int
    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: object

    def key(self):
        freqs = None if self.freqs is None else tuple(np.array(self.freqs).tolist())
        return (self.width, self.dims, self.traditional, self.base, self.scale, freqs)

    def __str__(self):
        return str(self.key())

    def rotated(self, position):
        """All unit vectors, one a head, at this position."""
        x = mx.eye(self.width).reshape(1, self.width, 1, self.width)
        y = rope_kernel(x, self.dims, traditional=self.traditional, base=self.base,
                        scale=self.scale, offset=position, freqs=self.freqs)  # fmt: skip
        return np.array(y).reshape(self.width, self.width)


def calls_of(model):
    """(layer, Call) for one token through the whole model."""
    layers, calls = list(model.layers), []
    mx.fast.rope = note_into(calls, layers)
    try:
        model(mx.zeros((1, 1), mx.int32))
    finally:
        mx.fast.rope = rope_kernel
    return calls


def note_into(calls, layers):
    def noted(x, dims, *, traditional, base=None, scale=1.0, offset, freqs=None, stream=None):
        frame, owners = sys._getframe(1), []
        while frame is not None:
            owners.append(frame.f_locals.get("self"))
            frame = frame.f_back
        layer = next(
            (i for owner in owners for i, each in enumerate(layers) if each is owner), None
        )
        if not any(type(owner).__name__ == "Indexer" for owner in owners):
            call = Call(owners[0], x.shape[-1], dims, traditional, base, scale, freqs)
            calls.append((layer, call))
        return x

    return noted


def distinct(calls):
    return list({call.key(): call for call in calls}.values())


def label(model, config, layer):
    """The layer's type: as the config lists it, or as the built layer says."""
    types = {**config, **config.get("text_config", {})}.get("layer_types")
    if types:
        return types[layer]
    owner = model.layers[layer]
    for each in (getattr(owner, "self_attn", None), owner):
        for name in ("is_sliding", "use_sliding"):
            if isinstance(getattr(each, name, None), bool):
                return "sliding_attention" if getattr(each, name) else "full_attention"
    return None


def measured(name, config, layer_type, call):
    """One row; two where the kernel is called otherwise at the longest row of the config."""
    trained = config.get("max_position_embeddings")
    longest = longest_row(config, trained)
    far = again(call, longest) if longest else call
    if far.key() == call.key():
        return [measure.row(name, layer_type, None, **facts(call))]
    return [measure.row(name, layer_type, length, **facts(again(call, length)))
            for length in (trained, longest)]  # fmt: skip


def longest_row(config, trained):
    factor = (config.get("rope_scaling") or {}).get("factor") or 1
    return trained and round(trained * factor)


def again(call, seq_len):
    """The call as the same module makes it for the last of `seq_len` tokens."""
    if call.module is None:
        return call
    calls = []
    mx.fast.rope = note_into(calls, [])
    try:
        call.module(mx.zeros((1, 1, 1, call.width)), offset=seq_len - 1)
    finally:
        mx.fast.rope = rope_kernel
    return calls[0][1]


def facts(call):
    found = measure.measured(call.rotated, call.width)
    if call.module is not None:
        ones = np.array(call.module(mx.ones((1, 1, 1, call.width)), offset=0))
        found["attention_factor"] = float(ones[0, 0, 0, 0])
    return found


def with_made_up_sizes(cls, params):
    """`from_dict`, after giving every required field that no RoPE depends on some value."""
    required = [field for field in dataclasses.fields(cls)
                if field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
                and field.name not in params
                and (field.name in MADE_UP
                     or not any(word in field.name for word in NEVER_MADE_UP))]  # fmt: skip
    given = {}
    for field in required:
        kind = field.type if isinstance(field.type, str) else str(field.type)
        of_type = [value for name, value in BY_TYPE.items()
                   if name in kind and "List" not in kind and "Dict" not in kind]  # fmt: skip
        if field.name in MADE_UP or of_type:
            given[field.name] = MADE_UP[field.name] if field.name in MADE_UP else of_type[0]
    return read_args(cls, {**params, **given})


def without_metal(layer, x):
    """BitNet's linear layer has a kernel for Metal alone; the shape of its output is enough."""
    return mx.zeros((*x.shape[:-1], layer.out_features))


BitLinear.__call__ = without_metal
sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))  # asked for by olmo.py, not used
BaseModelArgs.from_dict = classmethod(with_made_up_sizes)


def ends(row):
    """A row with its second and its last frequency alone, which a base determines."""
    if "inv_freq" not in row:
        return row
    return {**row, "inv_freq": [row["inv_freq"][1], row["inv_freq"][-1]]}


if __name__ == "__main__":
    configs = dict(measure.configs(sys.argv[1]))
    if sys.argv[3:] == ["--silent"]:  # mlx_lm_silent.json: what a model file takes by itself
        rows = [ends(row) for name in configs
                for row in rows_of(name, measure.without_bases(configs[name]))
                if "skipped" not in row]  # fmt: skip
    else:
        rows = [row for name in configs for row in rows_of(name, configs[name])]
    measure.write(sys.argv[2], "mlx-lm", version("mlx-lm"), rows)
