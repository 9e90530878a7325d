"""Where the rotated slices are among the output channels of a projection.

Heads lie side by side, or queries, keys and values are packed into one tensor, in one of several
orders, or a slice of each head comes from a latent. Counts are read from the config and must make
up the channels that are there.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..configs import Config
from ..configs.values import whole_number
from ..spec import Rotary
from .files import Tensor
from .names import Name, layer_of

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


class Run(NamedTuple):
    """Equal slices at equal distances: `heads` of them, `stride` apart, the first at `begin`."""

    begin: int
    heads: int
    stride: int


class _Sizes(NamedTuple):
    """Counts and widths of the heads of one layer; `rows` of the projection that is asked for."""

    rows: int
    heads: int
    head_dim: int
    found: Config

    def get(self, name: str) -> int:
        value = self.found.get(name)
        if not isinstance(value, int):
            raise ValueError(f"the config needs {name}, a whole number, got {value!r}")
        return value

    @property
    def kv_heads(self) -> int:
        """What the rows leave for k and v beside the queries."""
        return (self.rows // self.head_dim - self.heads) // 2


# repeat, then the parts of one repetition: (is it turned, how many, how wide)
_Parts = tuple[int, tuple[tuple[bool, int, int], ...]]
_PACKED: dict[str, Callable[[_Sizes], _Parts]] = {
    "query, with a gate": lambda s: (s.heads, ((True, 1, s.head_dim), (False, 1, s.head_dim))),
    "query and key": lambda s: (
        1,
        ((True, s.heads, s.head_dim), (True, s.kv_heads, s.head_dim),
         (False, s.kv_heads, s.head_dim)),
    ),
    "query and key, per head": lambda s: (
        s.heads, ((True, 2, s.head_dim), (False, 1, s.head_dim))
    ),
    "query and key, grouped": lambda s: (
        s.kv_heads,
        ((True, s.heads // max(s.kv_heads, 1) + 1, s.head_dim), (False, 1, s.head_dim)),
    ),
    "query and key, 4 blocks": lambda s: (
        4,
        ((True, s.heads // 4, s.head_dim), (False, s.heads // 4, s.head_dim),
         (True, s.heads // 4, s.head_dim)),
    ),
    "key and value": lambda s: (
        1, ((True, s.rows // s.head_dim // 2, s.head_dim),
            (False, s.rows // s.head_dim // 2, s.head_dim))
    ),
    "latent query": lambda s: (
        s.heads, ((False, 1, s.get("qk_nope_head_dim")), (True, 1, s.head_dim))
    ),
    "latent query, with a gate": lambda s: (
        s.heads,
        ((False, 1, s.get("qk_nope_head_dim")), (True, 1, s.head_dim),
         (False, 1, s.get("v_head_dim"))),
    ),
    "latent key": lambda s: (1, ((False, 1, s.get("kv_lora_rank")), (True, 1, s.head_dim))),
}  # fmt: skip
_QUERIES = re.compile(r"(?:.*_)?(?:num_(?:attention_)?heads|n_heads?|attention_heads)(?:_.*)?")
_KEYS = re.compile(
    r"(?:.*_)?(?:num_(?:\w+_)?key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|n_head_kv"
    r"|num_attention_groups|multi_query_group_num)(?:_.*)?"
)


def runs_of(
    name: Name, rows: int, spec: Rotary, found: Config, shape: tuple[int, ...] = ()
) -> tuple[Run, ...]:
    """Where the rotated slices of a tensor are among its `rows` output channels.

    shape  of the tensor, for the error and to see a transposed one
    Raises ValueError where the heads of the config do not make up these rows, with what the config
    says. The count of heads is the config's own; it is never made up from the rows, unless the
    config is silent about key heads.

    >>> from rotary.configs import choose
    >>> gain = Name("k_norm", "k_norm", 0, "weight", "key norm")
    >>> runs_of(gain, 8, Rotary(head_dim=8, rotary_dim=4), choose({}))
    (Run(begin=0, heads=1, stride=8),)
    """
    kind = name.kind
    if kind == "query and key, falcon":
        is_new, is_shared = (found.get(key) for key in ("new_decoder_architecture", "multi_query"))
        kind = "query and key, per head" if is_shared is False else "query and key"
        kind = "query and key, grouped" if is_new else kind
    if kind == "query" and found.data.get("kv_lora_rank") is not None:
        kind = "latent query"
    if kind not in _PACKED:
        return (_plain(name, rows, spec, found, shape),)
    heads = _query_heads(name, found)
    if not isinstance(heads, int):
        raise ValueError(f"the config needs num_attention_heads, got {heads!r}")
    sizes = _Sizes(rows, heads, spec.head_dim, found)
    repeat, parts = _PACKED[kind](sizes)
    stride = sum(count * width for _, count, width in parts)
    is_solved = kind in ("query and key", "query and key, grouped", "key and value")
    keys = rows // spec.head_dim // 2 if kind == "key and value" else sizes.kv_heads
    if is_solved and not _is_key_count(keys, name, heads, found):
        wrong = f"which has room for {keys} key heads"
        wrong += f" beside {heads} query heads" * (kind != "key and value")
        raise ValueError(_refusal(name, rows, shape, wrong, spec, found))
    if repeat < 1 or stride * repeat != rows:
        widths = " + ".join(f"{count} x {width}" for _, count, width in parts)
        wrong = f"and its heads need {stride * repeat} = {repeat} x ({widths})"
        raise ValueError(_refusal(name, rows, shape, wrong, spec, found))
    return tuple(_packed(repeat, parts, stride, spec.start))


def _refusal(
    name: Name, rows: int, shape: tuple[int, ...], wrong: str, spec: Rotary, found: Config
) -> str:
    """What a tensor has, what is wrong with it, and which keys of the config say so."""
    names = found.model.get("names", {})
    said = {
        names.get(key, key): found.get(key)
        for key in ("hidden_size", "num_attention_heads", "qk_nope_head_dim", "kv_lora_rank")
    }
    said |= dict(_named(found.data, _KEYS)) | {"head_dim": spec.head_dim}
    keys = ", ".join(f"{key} {value}" for key, value in said.items() if value is not None)
    of = f" of shape {shape}" if shape else ""
    turned = len(shape) == 2 and shape[0] == found.get("hidden_size") != shape[1]
    return (
        f"tensor {name.tensor!r}{of} ({name.kind}) has {rows} output channels, {wrong}; the config "
        f"says {keys}" + "; it looks transposed, for a weight is (outputs, inputs)" * turned
    )


_WIDTHS = re.compile(
    r"(?:.*_)?(?:hidden_size|hidden_dim|n_embd|d_model|embed_dim)|q_lora_rank|adapter_rank"
)


def check_inputs(name: Name, tensor: Tensor, found: Config) -> None:
    """Raise ValueError where a weight has another number of input channels than the config says.

    A matrix of whole numbers may be packed, and is not looked at.

    >>> from rotary.configs import choose
    >>> weight = Name("wq", "wq", 0, "weight", "query")
    >>> config = choose({"hidden_size": 32, "num_attention_heads": 4})
    >>> check_inputs(weight, Tensor("F32", (32, 64), 0, 8192), config)
    Traceback (most recent call last):
    ValueError: tensor 'wq' of shape (32, 64) has 64 input channels, and the config says \
hidden_size 32
    """
    hidden = found.get("hidden_size")
    said = [(found.model.get("names", {}).get("hidden_size", "hidden_size"), hidden)]
    said += [pair for pair in _named(found.data, _WIDTHS) if isinstance(pair[1], int)]
    is_matrix = name.parameter == "weight" and len(tensor.shape) > 1
    if hidden is not None:
        whole_number("hidden_size", hidden)
    if hidden is None or not is_matrix or tensor.dtype not in FLOATS or name.kind.endswith("norm"):
        return
    count = 2 if name.kind.endswith("with a gate") and "latent" in name.kind else 1  # two latents
    if tensor.shape[-1] not in {value * count for _, value in said}:
        keys = " or ".join(dict.fromkeys(f"{key} {value}" for key, value in said))
        raise ValueError(
            f"tensor {name.tensor!r} of shape {tensor.shape} has {tensor.shape[-1]} input "
            f"channels, and the config says {keys}"
        )


def check_orientation(
    name: Name, tensor: Tensor, found: Config, wide: Mapping[str, tuple[str, Tensor]]
) -> None:
    """Refuse a square weight beside transposed ones, for it shows nothing itself: ValueError.

    wide  layer -> the name and the tensor of a weight that makes more channels of a hidden state

    >>> from rotary.configs import choose
    >>> square = Tensor("F32", (32, 32), 0, 4096)
    >>> up = {"layers.0.": ("layers.0.mlp.up_proj.weight", Tensor("F32", (96, 32), 0, 12288))}
    >>> name = Name("layers.0.attn.wq.weight", "layers.0.attn.wq", 0, "weight", "query")
    >>> check_orientation(name, square, choose({"hidden_size": 32}), up)
    """
    hidden = found.get("hidden_size")
    other, beside = wide.get(layer_of(name.tensor), ("", tensor))
    is_square = name.parameter == "weight" and tensor.shape == (hidden, hidden)
    if is_square and len(beside.shape) == 2 and beside.shape[0] == hidden != beside.shape[1]:
        raise ValueError(
            f"tensor {name.tensor!r} of shape {tensor.shape} looks transposed, for {other!r} "
            f"beside it is {beside.shape}, and its inputs are hidden_size {hidden}; a weight is "
            "(outputs, inputs)"
        )


def _packed(
    repeat: int, parts: tuple[tuple[bool, int, int], ...], stride: int, start: int
) -> Iterator[Run]:
    begin = 0
    for is_turned, count, width in parts:
        if is_turned and repeat == 1:
            yield Run(begin + start, count, width)
        elif is_turned:
            yield from (Run(begin + i * width + start, repeat, stride) for i in range(count))
        begin += count * width


def _plain(name: Name, rows: int, spec: Rotary, found: Config, shape: tuple[int, ...]) -> Run:
    """Heads side by side; a gain may be of one head, for all of them."""
    if name.kind.endswith("norm") and rows == spec.head_dim:
        return Run(spec.start, 1, spec.head_dim)
    is_key = name.kind.startswith("key") or name.kind == "query of an expert"
    queries = _query_heads(name, found)
    heads, rest = divmod(rows, spec.head_dim)
    if is_key:
        counts = _key_heads(name, queries, found)
        is_right = _is_key_count(heads, name, queries, found)
    else:
        counts = _counts(name, found, _QUERIES) | {queries} - {None}
        is_right = heads in counts or not counts
    if rest or heads < 1 or not is_right:
        told = " or ".join(map(str, sorted(counts))) or f"a divisor of {queries}"
        wrong = f"and {told} heads of {spec.head_dim} are expected"
        raise ValueError(_refusal(name, rows, shape, wrong, spec, found))
    return Run(spec.start, heads, spec.head_dim)


def _query_heads(name: Name, found: Config) -> Any:
    """num_attention_heads, or of a list that of this layer."""
    heads = found.get("num_attention_heads")
    is_list = isinstance(heads, list | tuple) and name.layer < len(heads)
    return heads[name.layer] if is_list else heads


def _is_key_count(count: int, name: Name, heads: Any, found: Config) -> bool:
    """Whether a layer may have so many key heads, by the config; `heads` are of the queries.

    A config that is silent means as many as its class: some number that divides the query heads.
    """
    told = _key_heads(name, heads, found)
    if told:
        return count in told
    return count >= 1 and (heads is None or heads % count == 0)


def _key_heads(name: Name, heads: Any, found: Config) -> set[int]:
    """The counts of key heads that the config names for a layer; empty if it is silent."""
    if name.kind.endswith("falcon") and not found.get("new_decoder_architecture"):
        return {1} if found.get("multi_query") is not False else {heads}
    rule = found.model.get("weights", {}).get("key_heads")
    if rule == "queries":
        return {heads}
    told = _counts(name, found, _KEYS)
    if rule == "or twice":
        told |= {2 * count for count in told}
    return told


def _counts(name: Name, found: Config, pattern: re.Pattern[str]) -> set[int]:
    """The head counts that a config names, for layers may differ; of a list that of this layer.

    Keys of objects inside, but for per_layer_config, count only where the config itself has none.
    """
    own = [
        (key, value)
        for key, value in found.data.items()
        if pattern.fullmatch(str(key)) and value is not None
    ]
    layers = found.data.get("per_layer_config") or {}
    inner = _named(layers if own else found.data, pattern)
    own += [(key, value) for key, value in inner if value is not None]
    counts = set()
    for key, value in own:
        is_list = isinstance(value, list | tuple) and name.layer < len(value)
        count = value[name.layer] if is_list else value
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{key} must be a whole number >= 1, got {count!r:.80}; it is the number of heads "
                f"of {name.tensor!r}"
            )
        counts.add(count)
    return counts


def _named(data: Any, pattern: re.Pattern[str]) -> Iterator[tuple[str, Any]]:
    """Keys that match and their values, at any depth."""
    for key, value in data.items():
        if pattern.fullmatch(str(key)):
            yield str(key), value
        elif isinstance(value, Mapping):
            yield from _named(value, pattern)
