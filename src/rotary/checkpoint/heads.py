"""Where the rotated slices are among the output channels of a projection.

Heads lie side by side, or queries, keys and values are packed into one tensor, in one of several
orders, or a slice of each head comes from a latent. Counts are read from the config and must make
up the channels that are there.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..configs import Config
from ..spec import Rotary
from .names import Name


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


def runs_of(name: Name, rows: int, spec: Rotary, found: Config) -> tuple[Run, ...]:
    """Where the rotated slices of a tensor are among its `rows` output channels.

    Raises ValueError where the heads of the config do not make up these rows, with both numbers.

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
        return (_plain(name, rows, spec, found),)
    heads = found.get("num_attention_heads")
    if not isinstance(heads, int):
        raise ValueError(f"the config needs num_attention_heads, got {heads!r}")
    sizes = _Sizes(rows, heads, spec.head_dim, found)
    repeat, parts = _PACKED[kind](sizes)
    stride = sum(count * width for _, count, width in parts)
    if repeat < 1 or stride * repeat != rows:
        widths = " + ".join(f"{count} x {width}" for _, count, width in parts)
        raise ValueError(
            f"tensor {name.tensor!r} ({kind}) has {rows} output channels, and the config's heads "
            f"need {stride * repeat} = {repeat} x ({widths})"
        )
    told = _counts(found.data, _KEYS)
    is_solved = name.kind in ("query and key", "query and key, grouped")
    if is_solved and told and sizes.kv_heads not in told | {heads}:
        raise ValueError(
            f"tensor {name.tensor!r} ({kind}) has room for {sizes.kv_heads} key heads beside "
            f"{heads} query heads, and the config says {' or '.join(map(str, sorted(told)))}"
        )
    return tuple(_packed(repeat, parts, stride, spec.start))


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


def _plain(name: Name, rows: int, spec: Rotary, found: Config) -> Run:
    """Heads side by side; a gain may be of one head, for all of them."""
    if name.kind.endswith("norm") and rows == spec.head_dim:
        return Run(spec.start, 1, spec.head_dim)
    is_key = name.kind.startswith("key") or name.kind == "query of an expert"
    queries = _counts(found.data, _QUERIES) | {found.get("num_attention_heads")} - {None}
    counts = _counts(found.data, _KEYS) if is_key else queries
    if found.data.get("model_type") == "mimo_v2_flash":  # twice as many where a window slides
        counts |= {2 * count for count in counts}
    heads, rest = divmod(rows, spec.head_dim)
    if rest or (counts and heads not in counts | queries):
        told = " or ".join(map(str, sorted(counts | queries))) or "a number of"
        raise ValueError(
            f"tensor {name.tensor!r} has {rows} output channels, and the config says {told} heads "
            f"of {spec.head_dim}"
        )
    return Run(spec.start, heads, spec.head_dim)


def _counts(data: Any, pattern: re.Pattern[str]) -> set[int]:
    """Every head count that a config names, for layers may differ."""
    found: set[int] = set()
    if isinstance(data, Mapping):
        for key, value in data.items():
            if pattern.fullmatch(str(key)):
                found |= {each for each in _flat(value) if isinstance(each, int)}
            elif isinstance(value, Mapping):
                found |= _counts(value, pattern)
    return found


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    elif value is not None:
        yield value
