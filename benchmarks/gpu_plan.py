"""What `benchmarks/gpu.py` measures: parts, lines, shapes, bytes, and ablations of a launch.

Numbers alone: no torch, so that all of it is tested without a GPU.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from rotary.kernels.triton.plan import Plan, grid_of, inverse_of

KINDS = ("ablation", "prefill", "decode", "host", "fused")
# Seconds after which no line of a part is begun; compiled beforehand, all parts end before
SECONDS = {"ablation": 60, "prefill": 75, "decode": 45, "host": 60, "fused": 45, "peers": 100,
           "tuned": 160}  # fmt: skip
PARTS = tuple(SECONDS)
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
L2_BYTES = 60 * 10**6  # an H200's, where the device does not say
OURS, COPY, EMPTY = "rotary out=", "copy", "empty launch"


class Work(NamedTuple):
    """One rotation of q and k: sizes, how they lie in memory, and where the tokens are.

    memory     "bshd", "hf view" (its transposed view), "bhsd", "packed qkv" (slices of one tensor),
               "thd" (tokens of all sequences laid end to end; batch 1)
    positions  "from 0", "own rows" (a position for each row), "ragged" (64 sequences in one row),
               "three axes" (M-RoPE)
    """

    seq: int = 8192
    batch: int = 1
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    rotary_dim: int = 128
    layout: str = "half"
    memory: str = "bshd"
    dtype: str = "bfloat16"
    positions: str = "from 0"

    @property
    def name(self) -> str:
        """The line of the table this is, which also tells it from every other."""
        sliced = "" if self.rotary_dim == self.head_dim else f" rotated {self.rotary_dim}"
        placed = "" if self.positions == "from 0" else f" {self.positions}"
        return (
            f"{self.dtype} {self.layout} {self.memory} B={self.batch} S={self.seq} "
            f"{self.q_heads}/{self.k_heads}x{self.head_dim}{sliced}{placed}"
        )

    @property
    def bytes(self) -> int:
        """Bytes of q and k together."""
        heads = self.q_heads + self.k_heads
        return self.batch * self.seq * heads * self.head_dim * ITEMSIZE[self.dtype]

    def moved(self, way: str) -> int:
        """Bytes that must be read and written: tables and positions are left out.

        >>> Work(batch=2).moved("out=")
        335544320
        """
        if way == "in place":
            return 2 * self.bytes * self.rotary_dim // self.head_dim
        return (4 if way == "backward" else 2) * self.bytes


class Line(NamedTuple):
    """A line of the table: one work, and the ways we do it.

    peers  "later" if peers do it too, in a part of their own; "plain" or "tuned" in that part,
           where `ways` says whether they go the way back as well
    """

    kind: str
    work: Work
    ways: tuple[str, ...]
    peers: str = ""

    @property
    def name(self) -> str:
        """The name of the work; host times, ablations and fused calls of it are other lines."""
        is_plain = self.kind in ("prefill", "decode")
        return self.work.name if is_plain else f"{self.kind} {self.work.name}"


def lines(part: str) -> Iterator[Line]:
    """Every line of a part. `ways`: see `gpu_cases.ours`.

    >>> next(lines("prefill")).name
    'bfloat16 half bshd B=2 S=8192 32/8x128'
    >>> next(lines("peers")).peers
    'plain'
    """
    if part == "prefill":
        for batch in (2, 4, 1):
            for layout in ("half", "interleaved"):
                work = Work(batch=batch, layout=layout)
                yield Line(part, work, ("out=", "in place", "new", "apply", "backward"), "later")
        two = Work(batch=2)
        for work in (*memory_forms(two), two._replace(positions="three axes")):
            peers = "" if work.memory == "thd" else "later"
            yield Line(part, work, ("out=", "in place", "backward"), peers)
        for rotated in (32, 64):
            yield Line(part, two._replace(rotary_dim=rotated), ("out=", "in place"), "later")
        for dim in (64, 80, 96, 256):
            yield Line(part, two._replace(head_dim=dim, rotary_dim=dim), ("out=",))
        for q_heads, k_heads in ((28, 4), (64, 8), (16, 2)):
            yield Line(part, two._replace(q_heads=q_heads, k_heads=k_heads), ("out=",), "later")
        for dtype in ("float32", "float16"):
            yield Line(part, two._replace(dtype=dtype), ("out=", "in place"), "later")
        for seq in (131_072, 1_048_576):
            yield Line(part, Work(seq=seq), ("out=", "in place"))
    elif part == "decode":
        for seq in (1, 16, 128, 1024):
            for batch in (1, 8, 64, 256):
                rows = "own rows" if seq == 1 else "from 0"
                more = ("rows", "apply") if seq == 1 else ("new",)
                ways = ("out=", "in place", *more)
                yield Line(part, Work(seq, batch, positions=rows), ways, "later")
    elif part == "host":
        for layout in ("half", "interleaved"):
            ways = ("out=", "in place", "rows", "new", "apply", "backward")
            yield Line(part, ONE_TOKEN._replace(layout=layout), ways, "later")
    elif part == "fused":
        for work in (Work(batch=2), Work(2048), ONE_TOKEN, ONE_TOKEN._replace(batch=256)):
            yield Line(part, work, ())
        yield Line(part, Work(batch=2, layout="interleaved"), ())
    elif part == "ablation":
        two = Work(batch=2)
        more = two._replace(layout="interleaved"), two._replace(memory="bhsd")
        for work in (two, *more, ONE_TOKEN._replace(batch=256)):
            yield Line(part, work, ())
    else:
        for line in (line for kind in KINDS for line in lines(kind) if line.peers):
            ways = tuple(way for way in line.ways if way == "backward")
            yield line._replace(ways=ways, peers="tuned" if part == "tuned" else "plain")


ONE_TOKEN = Work(1, positions="own rows")
COUNTED = Work(64, 2)  # launches and allocations are counted here: the size does not matter


def memory_forms(work: Work) -> list[Work]:
    """The same tokens as models and servers hold them."""
    packed = Work(work.seq * work.batch, memory="thd", positions="ragged")
    return [*(work._replace(memory=form) for form in ("hf view", "bhsd", "packed qkv")), packed]


def small(line: Line) -> Line:
    """A line of the same kind that takes a moment: 64 tokens at most."""
    return line._replace(work=line.work._replace(seq=min(line.work.seq, 64)))


def sets_of(work: Work, l2_bytes: int = L2_BYTES) -> int:
    """How many inputs and outputs to rotate among, so that no call finds its data in the cache.

    Together 4 times the cache, at least 4, at most 64; one where it alone is 16 times the cache.
    """
    footprint = 2 * work.bytes
    if footprint >= 16 * l2_bytes:
        return 1
    return min(max(math.ceil(4 * l2_bytes / footprint), 4), 64)


def is_in_cache(work: Work, sets: int, l2_bytes: int = L2_BYTES) -> bool:
    """Whether all sets together stay in the cache, as a single token does."""
    return sets * 2 * work.bytes <= l2_bytes


def launches_of(work: Work, sets: int) -> int:
    """Calls in one captured graph: 20, or 200 of small ones, rounded up to whole turns."""
    return sets * math.ceil((200 if work.bytes < 4 * 10**6 else 20) / sets)


def replanned(
    plan: Plan, tokens: int | None = None, heads: int | None = None, warps: int | None = None
) -> Plan:
    """The same launch cut otherwise: tokens and heads of a tile, and warps that share it.

    What is not given stays as planned.
    """
    *before, count, q_heads, k_heads, step, advance = plan.numbers[:-6]
    inner, _, _, outer, _, _ = plan.numbers[-6:]
    batches = plan.programs // (inner * outer)
    tokens, heads = tokens or plan.constants["TOKENS"], heads or plan.constants["HEADS"]
    blocks, groups = -(-count // tokens), -(-q_heads // heads) - (-k_heads // heads)
    inner, outer = (blocks, groups) if plan.constants["TOKENS_FIRST"] else (groups, blocks)
    walk = inner, *inverse_of(inner), outer, *inverse_of(outer)
    grid = grid_of(inner, outer, batches)
    return plan._replace(
        grid=grid,
        numbers=(*before, count, q_heads, k_heads, step, advance, *walk),
        constants={
            **plan.constants,
            "TOKENS": tokens,
            "HEADS": heads,
            "GRID_3D": grid == (inner, outer, batches),
        },
        warps=warps or plan.warps,
    )


def variants() -> dict[str, dict[str, int]]:
    """The ablations of a launch: arguments of `replanned` by name."""
    tiles = (
        (1, 8, 1),
        (1, 8, 4),
        (2, 8, 2),
        (2, 8, 4),
        (4, 8, 8),
        (1, 32, 8),
        (8, 1, 2),
        (16, 1, 4),
    )
    return {f"{t} tokens x {h} heads, {w} warps": {"tokens": t, "heads": h, "warps": w}
            for t, h, w in tiles}  # fmt: skip
