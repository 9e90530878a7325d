"""The compiled loops of moved keys: over some blocks of a cache, in place.

One call is one job over the rows of all blocks, as in `loops.py`. 8-bit keys are rotated in float32
and rounded once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# mypy: disable-error-code="arg-type"
# compiled by Numba, from types mypy does not know

import functools
import math
from array import array
from collections.abc import Callable

import numpy as np

from . import Numbers as Array
from . import threads
from .compiled import compiled
from .geometry import Options, geometry_of
from .jobs import walk
from .llvm import load_int, record, take
from .loops import FORM, STEPS, TAGS, Loop, as_loop
from .memory import SIZES, Block
from .numpy import address
from .rows import MODES, rotate_rows

# the tags of 8-bit keys, as `vectors.py` says
_CODES = {"int8": np.int8(0), "float8_e4m3fn": np.uint8(0), "float8_e5m2": np.bool_(False)}
# `step` is the distance of two blocks, `table_step` that of their tables; `blocks` are `count`
# numbers in rising order, as memory is read fastest, and `rows` say which table is that of each
_MOVE = np.dtype([
    (name, np.int64)
    for name in ("threads", "parts", "number", "form", "mode", "x", "step", "cos", "sin",
                 "table_step", "blocks", "rows", "count", "taken")
])  # fmt: skip
_job, _form, _steps = map(record, (_MOVE, FORM, STEPS))
_TAKEN = _MOVE.itemsize - 8


@compiled()
def _run(job, steps, at):
    """Where a run of rows begins, its row of the table, and how many rows there are."""
    places = steps.size_0 * steps.size_1
    runs = places * ((steps.size_2 + steps.tile - 1) // steps.tile)
    block = at if runs == 1 else at // runs
    source = job.x + load_int(job.blocks + 8 * block) * job.step
    row = load_int(job.rows + 8 * block) * job.table_step
    if runs == 1:
        return source, row, steps.size_2
    run = at - block * runs
    i, j, k = run % places // steps.size_1, run % steps.size_1, run // places * steps.tile
    source += i * steps.x_0 + j * steps.x_1 + k * steps.x_2
    row += i * steps.table_0 + j * steps.table_1 + k * steps.table_2
    return source, row, min(steps.tile, steps.size_2 - k)


@compiled()
def _share(job, steps, part):
    """The first run of a part, and the one after its last."""
    tiles = (steps.size_2 + steps.tile - 1) // steps.tile
    total, parts = job.count * steps.size_0 * steps.size_1 * tiles, job.threads * job.parts
    return total * part // parts, total * (part + 1) // parts


def _move(tag: np.generic) -> Callable[[int], None]:
    def move(address):
        job = _job(address)
        form, steps = _form(job.form), _steps(job.form)
        part = take(address + _TAKEN)
        while part < job.threads * job.parts:
            first, last = _share(job, steps, part)
            following = _run(job, steps, first) if first < last else (0, 0, 0)
            for at in range(first, last):
                x, row, count = following
                following = _run(job, steps, min(at + 1, last - 1))
                tables, ahead = (job.cos, job.sin, 0, row), following[0] - x
                rotate_rows(tag, job.mode, form, steps, x, x, tables, count, ahead)
            part = take(address + _TAKEN)

    return move


@functools.cache
def _loop(dtype: str) -> Loop:
    return as_loop(_move((TAGS | _CODES)[dtype]))


def run(
    x: Block, place: int, table: Block, cos: int, sin: int, blocks: Array | None, options: Options
) -> bool:
    """Turn blocks of a cache in place, as `numpy.move` does; False where it has to.

    `x` and `table` are the forms of the cache and of both tables, which lie at these addresses.
    """
    is_dense = all(
        block.shape[-1] == 1 or block.strides[-1] == SIZES.get(block.dtype) for block in (x, table)
    )
    if not (is_dense and (x.dtype in TAGS or x.dtype in _CODES) and table.dtype == "float32"):
        return False
    if blocks is None:  # all of x is one block
        geometry = geometry_of((x.shape,), table.shape, None, options)
        one, along, chosen, order = x, table, np.zeros(1, np.int64), np.zeros(1, np.int64)
    else:
        geometry = geometry_of(((len(blocks), *x.shape[1:]),), table.shape, None, options)
        geometry = geometry._replace(dims=tuple(range(len(x.shape) - 2)))
        one, along = (Block(b.shape[1:], b.strides[1:], b.dtype) for b in (x, table))
        is_rising = (blocks[1:] > blocks[:-1]).all()
        order = np.arange(len(blocks)) if is_rising else np.argsort(blocks)
        chosen = blocks[order]
    offsets, steps = walk(one, one, True, along, 0, geometry)
    form = np.zeros((), FORM)
    form["q"], form["pairs"], form["sign"] = steps, geometry.pairs, 1
    size = len(chosen) * math.prod(one.shape) * SIZES[x.dtype]
    mode = MODES.index((geometry.layout, geometry.out_layout, False))
    for source, _, row in offsets:
        job = array("q", (
            1, 1, 0, address(form), mode, place + source, x.strides[0],
            cos + row, sin + row, table.strides[0], address(chosen), address(order), len(chosen), 0,
        ))  # fmt: skip
        threads.run(_loop(x.dtype), size // len(offsets), job)
    return True
