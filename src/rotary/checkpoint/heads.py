"""Where the rotated slices are among the output channels of a projection.

Heads lie side by side, or queries, keys and values are packed into one tensor, in one of several
orders, or a slice of each head comes from a latent. Counts are read from the config and must make
up the channels that are there.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..configs import Config
from ..spec import Rotary
from .headers import Tensor
from .names import Name

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_QUERIES = re.compile(r"(?:.*_)?(?:num_(?:attention_)?heads|n_heads?|attention_heads)(?:_.*)?")
_KEYS = re.compile(
    r"(?:.*_)?(?:num_(?:\w+_)?key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|n_head_kv"
    r"|num_attention_groups|multi_query_group_num)(?:_.*)?"
)
_WIDTHS = re.compile(
    r"(?:.*_)?(?:hidden_size|hidden_dim|n_embd|d_model|embed_dim)|q_lora_rank|adapter_rank"
)


class Run(NamedTuple):
    """Equal slices at equal distances: `heads` of them, `stride` apart, the first at `begin`."""

    begin: int
    heads: int
    stride: int


class _Part(NamedTuple):
    """`slices` of `width` channels side by side in a packed tensor, all rotated or none."""

    is_rotated: bool
    slices: int
    width: int


def runs_of(
    name: Name, rows: int, spec: Rotary, config: Config, shape: tuple[int, ...] = ()
) -> tuple[Run, ...]:
    """Where the rotated slices of a tensor are among its `rows` output channels.

    shape  of the tensor, for the error and to see a transposed one
    Raises ValueError where the heads of the config do not make up these rows, with what the config
    says. The count of heads is the config's own; it is never guessed from the rows, unless the
    config is silent about key heads.

    >>> from rotary.configs import choose
    >>> gain = Name("k_norm", "k_norm", 0, "weight", "key norm")
    >>> runs_of(gain, 8, Rotary(head_dim=8, rotary_dim=4), choose({}))
    (Run(begin=0, heads=1, stride=8),)
    """
    kind, width = name.kind, spec.head_dim
    if kind == "query and key, falcon":
        is_shared = config.get("multi_query") is not False
        kind = "query and key" if is_shared else "query and key, per head"
        kind = "query and key, grouped" if config.get("new_decoder_architecture") else kind
    if kind == "query" and config.data.get("kv_lora_rank") is not None:
        kind = "latent query"
    heads = config.get("num_attention_heads")
    if isinstance(heads, list | tuple) and name.layer < len(heads):
        heads = heads[name.layer]

    def refusal(reason: str) -> ValueError:
        return ValueError(_refusal(name, rows, shape, reason, spec, config))

    if kind.endswith("norm") and rows == width:  # a gain of one head, for all of them
        return (Run(spec.start, 1, width),)
    if kind in ("query", "key", "query norm", "key norm", "query of an expert"):
        count, rest = divmod(rows, width)
        if kind.startswith("key") or kind == "query of an expert":
            counts = _key_heads(name, heads, config)
            is_right = _is_key_count(count, counts, heads)
        else:
            counts = _counts(name, config, _QUERIES) | {heads} - {None}
            is_right = count in counts or not counts
        if rest or count < 1 or not is_right:
            expected = " or ".join(map(str, sorted(counts))) or f"a divisor of {heads}"
            raise refusal(f"and {expected} heads of {width} are expected")
        return (Run(spec.start, count, width),)
    if not isinstance(heads, int):
        raise ValueError(f"the config needs num_attention_heads, got {heads!r}")
    keys = rows // width // 2 if kind == "key and value" else (rows // width - heads) // 2
    is_solved = kind in ("query and key", "query and key, grouped", "key and value")
    if is_solved and not _is_key_count(keys, _key_heads(name, heads, config), heads):
        beside = "" if kind == "key and value" else f" beside {heads} query heads"
        raise refusal(f"which has room for {keys} key heads{beside}")
    repeat, parts = _parts(kind, heads, keys, width, config)
    stride = sum(part.slices * part.width for part in parts)
    if repeat < 1 or stride * repeat != rows:
        widths = " + ".join(f"{part.slices} x {part.width}" for part in parts)
        raise refusal(f"and its heads need {stride * repeat} = {repeat} x ({widths})")
    runs, begin = [], spec.start
    for part in parts:
        if part.is_rotated and repeat == 1:
            runs.append(Run(begin, part.slices, part.width))
        elif part.is_rotated:
            runs += [Run(begin + i * part.width, repeat, stride) for i in range(part.slices)]
        begin += part.slices * part.width
    return tuple(runs)


def _parts(
    kind: str, heads: int, keys: int, width: int, config: Config
) -> tuple[int, tuple[_Part, ...]]:
    """How often a packed tensor repeats its parts, and these parts in their order."""

    def channels(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int):
            raise ValueError(f"the config needs {key}, a whole number, got {value!r}")
        return value

    def rotated(count: int) -> _Part:
        return _Part(True, count, width)

    def still(count: int, of: int = width) -> _Part:
        return _Part(False, count, of)

    match kind:
        case "query and key":
            return 1, (rotated(heads), rotated(keys), still(keys))
        case "query and key, per head":
            return heads, (rotated(2), still(1))
        case "query and key, grouped":
            return keys, (rotated(heads // max(keys, 1) + 1), still(1))
        case "query and key, 4 blocks":
            return 4, (rotated(heads // 4), still(heads // 4), rotated(heads // 4))
        case "key and value":
            return 1, (rotated(keys), still(keys))
        case "query, with a gate":
            return heads, (rotated(1), still(1))
        case "latent query":
            return heads, (still(1, channels("qk_nope_head_dim")), rotated(1))
        case "latent query, with a gate":
            before, behind = channels("qk_nope_head_dim"), channels("v_head_dim")
            return heads, (still(1, before), rotated(1), still(1, behind))
        case "latent key":
            return 1, (still(1, channels("kv_lora_rank")), rotated(1))
    raise KeyError(f"models.json names a kind {kind!r}, and it is none of these")


def _refusal(
    name: Name, rows: int, shape: tuple[int, ...], reason: str, spec: Rotary, config: Config
) -> str:
    """What a tensor has, what is wrong with it, and which keys of the config say so."""
    names = config.model.get("names", {})
    values = {
        names.get(key, key): config.get(key)
        for key in ("hidden_size", "num_attention_heads", "qk_nope_head_dim", "kv_lora_rank")
    }
    values |= dict(_matching(config.data, _KEYS)) | {"head_dim": spec.head_dim}
    keys = ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
    of = f" of shape {shape}" if shape else ""
    is_transposed = len(shape) == 2 and shape[0] == config.get("hidden_size") != shape[1]
    return (
        f"tensor {name.tensor!r}{of} ({name.kind}) has {rows} output channels, {reason}; the "
        f"config says {keys}"
        + "; it looks transposed, for a weight is (outputs, inputs)"
        * is_transposed
    )


def check_inputs(
    name: Name, tensor: Tensor, config: Config, wide: tuple[str, Tensor] | None = None
) -> None:
    """Raise ValueError where a weight has another number of input channels than the config says.

    wide  name and tensor of a weight of the same layer that makes more channels of a hidden state:
          where it is transposed, so is a square weight, which shows nothing itself
    A matrix of whole numbers may be packed, and is not looked at.

    >>> from rotary.configs import choose
    >>> weight = Name("wq", "wq", 0, "weight", "query")
    >>> config = choose({"hidden_size": 32, "num_attention_heads": 4})
    >>> check_inputs(weight, Tensor("F32", (32, 64), 0, 8192), config)
    Traceback (most recent call last):
    ValueError: tensor 'wq' of shape (32, 64) has 64 input channels, and the config says \
hidden_size 32
    """
    hidden, shape = config.get("hidden_size"), tensor.shape
    if name.parameter != "weight" or hidden is None:
        return
    if wide and shape == (hidden, hidden) and wide[1].shape[:1] == (hidden,) != wide[1].shape[1:]:
        raise ValueError(
            f"tensor {name.tensor!r} of shape {shape} looks transposed, for {wide[0]!r} "
            f"beside it is {wide[1].shape}, and its inputs are hidden_size {hidden}; a weight is "
            "(outputs, inputs)"
        )
    if len(shape) < 2 or tensor.dtype not in FLOATS or name.kind.endswith("norm"):
        return
    widths = [(config.model.get("names", {}).get("hidden_size", "hidden_size"), hidden)]
    widths += [pair for pair in _matching(config.data, _WIDTHS) if isinstance(pair[1], int)]
    count = 2 if name.kind == "latent query, with a gate" else 1  # two latents
    if shape[-1] not in [value * count for _, value in widths]:
        keys = " or ".join(dict.fromkeys(f"{key} {value}" for key, value in widths))
        raise ValueError(
            f"tensor {name.tensor!r} of shape {shape} has {shape[-1]} input channels, and the "
            f"config says {keys}"
        )


def _is_key_count(count: int, counts: set[int], heads: Any) -> bool:
    """Whether a layer may have so many key heads; `heads` are of the queries.

    A config that names no count means as many as its class: some number that divides `heads`.
    """
    return count in counts if counts else count >= 1 and (heads is None or heads % count == 0)


def _key_heads(name: Name, heads: Any, config: Config) -> set[int]:
    """The counts of key heads that the config names for a layer; empty if it is silent."""
    if name.kind.endswith("falcon") and not config.get("new_decoder_architecture"):
        return {1} if config.get("multi_query") is not False else {heads}
    rule = config.model.get("weights", {}).get("key_heads")
    if rule == "queries":
        return {heads}
    counts = _counts(name, config, _KEYS)
    return counts | {2 * count for count in counts} if rule == "or twice" else counts


def _counts(name: Name, config: Config, pattern: re.Pattern[str]) -> set[int]:
    """The head counts that a config names, for layers may differ; of a list that of this layer.

    Keys of objects inside, but for per_layer_config, count only where the config itself has none.
    """
    top = {key: value for key, value in config.data.items() if not isinstance(value, Mapping)}
    pairs = list(_matching(top, pattern))
    layers = config.data.get("per_layer_config") or {}
    pairs += _matching(layers if pairs else config.data, pattern)
    counts = set()
    for key, value in pairs:
        is_list = isinstance(value, list | tuple) and name.layer < len(value)
        count = value[name.layer] if is_list else value
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{key} must be a whole number >= 1, got {count!r:.80}; it is the number of heads "
                f"of {name.tensor!r}"
            )
        counts.add(count)
    return counts


def _matching(data: Any, pattern: re.Pattern[str]) -> Iterator[tuple[str, Any]]:
    """Keys that match and their values, at any depth, but for null."""
    for key, value in data.items():
        if pattern.fullmatch(str(key)) and value is not None:
            yield str(key), value
        elif isinstance(value, Mapping):
            yield from _matching(value, pattern)
