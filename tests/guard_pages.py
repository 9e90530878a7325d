"""Every compiled loop of the CPU on memory that ends where a page begins that nobody may touch.

Each operand of a call, and each new output, has memory of its own between two such pages, and lies
against the first or the last byte of it: a loop that reads or writes one element too far ends the
process, and the last line of its errors is the number of the case. The bytes between the elements
of an output, and all inputs, must be what they were.

`python tests/guard_pages.py` first lets loops go one element too far, each in a process of its own,
which must end by a signal. Then it draws cases in which every two values of two factors meet: call,
dtype, layouts, strides, sizes, the end. Each is done as it is, and again on all threads, in parts,
and past the caches, as large calls are. Writes the counts as JSON.

`python tests/guard_pages.py --whole PART PARTS` runs a part of all sizes 0 to 257 instead: of
tokens and head_dim, heads and head_dim, tokens and heads, each with each, and of each of them with
every call and dtype; what is not said is drawn.
"""

import argparse
import faulthandler
import functools
import itertools
import json
import math
import os
import random
import sys
from collections import Counter
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch
from grids import pairwise
from guarded_memory import FILL, Guarded
from kernel_cases import DTYPES
from kernel_cases import to_torch as tensor

import rotary
from rotary.kernels.cpu import fused_jobs, jobs, move, threads
from rotary.kernels.cpu import kernel as cpu
from rotary.kernels.torch import fused_cpu as torch_fused_cpu
from rotary.kernels.torch import launch as torch_launch
from rotary.kernels.torch import ready

SIZE = 1 << 26  # bytes for one operand, of which only what is used exists
MOST = 257 * 257 * 2  # elements of x
BESIDE = 64  # bytes before and after an operand that are looked at
CODES = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]


class Case(NamedTuple):
    call: str
    dtype: str
    layouts: tuple[str, str]
    part: str  # of the head that is rotated
    x: str  # memory order of what is read
    out: str  # and of what is written
    at_end: bool
    tokens: int
    heads: int
    head_dim: int


def strides_of(order, shape, size):
    """Bytes from one index to the next of (heads, tokens, head_dim)."""
    heads, tokens, width = (max(1, each) for each in shape)
    gap, row = (3 if order == "gaps" else 0), width * size
    if order == "tokens first":
        return row, heads * row, size
    if order == "every second":
        return 2 * tokens * row, 2 * row, 2 * size
    row += gap * size
    step = tokens * row + gap * size
    if order == "lines":  # every row begins on a line of the cache, as stores past it need
        row = -(-row // 64) * 64
        step = tokens * row
    return {"backwards": (step, -row, size), "one head": (0, row, size)}.get(
        order, (step, row, size)
    )


class Memory:
    """Operands between guarded pages, for one case after another."""

    def __init__(self):
        self.regions = [Guarded(SIZE) for _ in range(16)]
        self.begin(False)

    def begin(self, at_end):
        self.at_end, self.used, self.read, self.written = at_end, 0, [], []

    def place(self, shape, dtype, strides=None, value=0.5, is_written=False, is_new=False):
        """An array in memory of its own; what is not written and not new must stay as it is."""
        dtype = np.dtype(dtype)
        if strides is None:
            sizes = [1, *[max(1, size) for size in shape[:0:-1]]]
            strides = (np.cumprod(sizes)[::-1] * dtype.itemsize).tolist()
        reach = [max(0, n - 1) * step for n, step in zip(shape, strides, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + dtype.itemsize
        if 0 in shape:
            low = high = 0
        region = self.regions[self.used]
        self.used += 1
        offset = SIZE - high if self.at_end else -low
        window = region.bytes[max(0, offset + low - BESIDE) : offset + high + BESIDE]
        window[:] = FILL
        array = np.ndarray(shape, dtype, region.bytes, offset, strides)
        array[...] = value
        if is_written:
            self.written.append((array, window))
        elif not is_new:
            self.read.append((window, window.copy()))
        return array

    def check(self):
        """AssertionError where anything but the elements of an output was written to."""
        for window, kept in self.read:
            assert np.array_equal(window, kept), "an input was written to"
        for array, window in self.written:
            bits = array.view(f"u{array.itemsize}")
            bits[...] = int.from_bytes([FILL] * array.itemsize, "little")
            assert (window == FILL).all(), "bytes beside the elements of an output were written to"


MEMORY = Memory()


class GuardedNumPy:
    """NumPy, whose new arrays lie between guarded pages where there is memory left."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype=float, value=0.5):
        shape, dtype = np.atleast_1d(shape).tolist(), np.dtype(dtype)
        is_small = int(np.prod(shape)) * dtype.itemsize <= SIZE
        if dtype.names or not is_small or MEMORY.used >= len(MEMORY.regions):
            return np.full(shape, value, dtype)
        return MEMORY.place(shape, dtype, value=value, is_new=True)

    def zeros(self, shape, dtype=float):
        return np.zeros(shape, dtype) if shape == () else self.empty(shape, dtype, 0)


def guarded_like(original):
    """`empty_like` of a tensor, between guarded pages."""

    def like(x):
        if MEMORY.used >= len(MEMORY.regions):
            return original(x)
        order = np.argsort([-step or -math.inf for step in x.stride()], kind="stable")
        shape = [x.shape[axis] for axis in order]
        made = tensor(MEMORY.place(shape, NAMES[x.dtype], value=0, is_new=True))
        return made.permute(*np.argsort(order).tolist())

    return like


NAMES = {torch.float32: "f4", torch.float64: "f8", torch.float16: "f2",
         torch.bfloat16: DTYPES["bfloat16"]}  # fmt: skip


# --- the calls ---


class Form:
    """Operands of a case in guarded memory."""

    def __init__(self, case):
        self.case, self.dtype = case, DTYPES[case.dtype]
        self.shape = case.heads, case.tokens, case.head_dim
        pairs = case.head_dim // 2
        if case.part != "whole":
            pairs = min(pairs, max(1, pairs // 2))
        rest = case.head_dim - 2 * pairs
        self.start = {"whole": 0, "first": 0, "last": rest, "middle": rest // 2}[case.part]
        self.pairs = pairs
        self.hand = {"layout": case.layouts[0], "out_layout": case.layouts[1], "seq_dim": -2,
                     "rotary_dim": 2 * pairs, "start": self.start}  # fmt: skip

    def x(self, heads=None):
        shape = self.shape if heads is None else (heads, *self.shape[1:])
        return MEMORY.place(shape, self.dtype, strides_of(self.case.x, shape, self.dtype.itemsize))

    def out(self, heads=None, order=None):
        order = order or self.case.out
        shape = self.shape if heads is None else (heads, *self.shape[1:])
        if order in ("one head", "every second"):
            order = "dense"
        strides = strides_of(order, shape, self.dtype.itemsize)
        return MEMORY.place(shape, self.dtype, strides, is_written=True)

    def tables(self, rows=None):
        shape = self.case.tokens if rows is None else rows, self.pairs
        return MEMORY.place(shape, "f4"), MEMORY.place(shape, "f4")

    def rows(self, count):
        numbers = np.arange(self.case.tokens)[::-1] % max(1, count)
        return MEMORY.place((self.case.tokens,), np.int64, value=numbers)

    def spec(self, **rest):
        layout, out_layout = self.case.layouts
        return spec_of(self.case.head_dim, 2 * self.pairs, self.start, layout, out_layout, **rest)


@functools.lru_cache(maxsize=4096)
def spec_of(head_dim, rotary_dim, start, layout, out_layout, **rest):
    return rotary.Rotary(
        head_dim, rotary_dim=rotary_dim, start=start, layout=layout, out_layout=out_layout, **rest
    )


def rotate_new(form):
    rotary.rotate((form.x(), form.x(1)), *form.tables(), **form.hand)


def rotate_out(form):
    xs, outs = (form.x(), form.x(1)), (form.out(), form.out(1))
    rotary.rotate(xs, *form.tables(), out=outs, **form.hand)


def rotate_in_place(form):
    xs = form.out(), form.out(1)
    rotary.rotate(xs, *form.tables(), out=xs, **form.hand)


def rotate_rows(form):
    count = 2 * form.case.tokens // 3 + 1
    rotary.rotate(
        form.x(), *form.tables(count), out=form.out(), positions=form.rows(count), **form.hand
    )


def rotate_back(form):
    rotary.rotate(form.x(), *form.tables(), conjugate=True, out=form.out(), **form.hand)


def apply_new(form):
    positions = MEMORY.place((form.case.tokens,), np.int64, value=2**38)
    rotary.apply(form.spec(), form.x(), form.x(1), positions=positions, seq_dim=-2)


def apply_in_place(form):
    positions = MEMORY.place((form.case.tokens,), np.int64, value=7)
    x = form.out()
    rotary.apply(form.spec(), x, positions=positions, seq_dim=-2, out=x)


def apply_axes(form):
    spec = form.spec(axes=tuple(pair % 3 for pair in range(form.pairs)))
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    positions = MEMORY.place((form.case.tokens, *axes), np.int64, value=3)
    rotary.apply(spec, form.x(), positions=positions, seq_dim=-2, out=form.out())


def tables(form):
    rotary.cos_sin(
        form.spec(), MEMORY.place((form.case.heads, form.case.tokens), np.int64, value=9)
    )


def move_keys(form):
    x = form.out()
    rotary.rerotate(x, form.spec(), shift=-5, seq_dim=-2, allow_negative=True, out=x)


def move_blocks(form, dtype=None):
    """Every second block of a cache, whose blocks are tokens, or heads and tokens."""
    dtype = form.dtype if dtype is None else dtype
    heads, tokens, width = form.shape
    shape = tokens, heads, width
    order = "dense" if form.case.out in ("backwards", "one head", "every second") else form.case.out
    strides = strides_of(order, shape, dtype.itemsize)
    cache = MEMORY.place(shape, dtype, strides, value=1, is_written=True)
    blocks = MEMORY.place(((tokens + 1) // 2,), np.int64, value=np.arange(0, tokens, 2))
    rotary.rerotate(cache, form.spec(), blocks=blocks, shift=3, out=cache)


def move_codes(form):
    move_blocks(form, CODES[list(DTYPES).index(form.case.dtype) % 3])


# on torch tensors, which have no negative strides


def torch_out(form):
    count = form.case.tokens
    rotary.rotate(
        tensor(form.x()), *map(tensor, form.tables()), out=tensor(form.out()), **form.hand
    )
    rotary.apply(form.spec(), tensor(form.x()), out=tensor(form.out()), seq_dim=-2,
                 positions=tensor(form.rows(count)))  # fmt: skip


def torch_gradient(form):
    x, grad = tensor(form.x()).requires_grad_(), tensor(form.x())
    y = rotary.rotate(x, *map(tensor, form.tables()), **form.hand)
    torch.autograd.grad(y, x, grad)


def norm_of(form, kind):
    heads, _, width = form.shape
    shapes = {"head": (width,), "heads": (heads, width), "token": (heads * width,)}
    return tensor(MEMORY.place(shapes[kind], form.dtype))


def fused_norm(form, kind="head"):
    cos, sin = map(tensor, form.tables())
    norm = rotary.Norm(norm_of(form, kind), None, eps=1e-6)
    q, out = tensor(form.x()), tensor(form.out())
    rotary.fused(q, None, None, form.spec(), tables=(cos, sin), norm=norm, seq_dim=-2, out=out)


def fused_gradient(form, kind="head"):
    cos, sin = map(tensor, form.tables())
    weight = norm_of(form, kind).requires_grad_()
    x, grad = tensor(form.x()).requires_grad_(), tensor(form.x())
    norm = rotary.Norm(weight, None, eps=1e-6)
    y, _, _ = rotary.fused(x, None, None, form.spec(), tables=(cos, sin), norm=norm, seq_dim=-2)
    torch.autograd.grad(y, (x, weight), grad)


def fused_cache(form, block=None):
    heads, tokens, width = form.shape
    slots = 2 * tokens + 1
    shape = (slots, heads, width) if block is None else (slots // block + 1, block, heads, width)
    caches = [tensor(MEMORY.place(shape, form.dtype, value=0, is_written=True)) for _ in range(2)]
    numbers = np.arange(tokens)[::-1] * 2 + slots % 2
    numbers[1::3] = -1
    numbers = tensor(MEMORY.place((tokens,), np.int64, value=numbers))
    q, k, v, out = (tensor(each) for each in (form.x(), form.x(), form.x(), form.out()))
    rotary.fused(
        q, k, v, form.spec(), tables=tuple(map(tensor, form.tables())), seq_dim=-2, out=out,
        cache=rotary.KVCache(*caches, numbers),
    )  # fmt: skip


CALLS = {
    "rotate, new": rotate_new,
    "rotate, out=": rotate_out,
    "rotate, in place": rotate_in_place,
    "rotate, positions=": rotate_rows,
    "rotate, conjugate": rotate_back,
    "apply, new": apply_new,
    "apply, in place": apply_in_place,
    "apply, axes": apply_axes,
    "cos_sin": tables,
    "moved keys": move_keys,
    "moved blocks": move_blocks,
    "moved blocks, 8 bits": move_codes,
    "torch, out=": torch_out,
    "torch, gradient": torch_gradient,
    "fused, norm": fused_norm,
    "fused, norm of many rows": functools.partial(fused_norm, kind="heads"),
    "fused, norm of tokens": functools.partial(fused_norm, kind="token"),
    "fused, gradient": fused_gradient,
    "fused, gradient of many rows": functools.partial(fused_gradient, kind="heads"),
    "fused, gradient of tokens": functools.partial(fused_gradient, kind="token"),
    "fused, cache": fused_cache,
    "fused, cache in blocks": functools.partial(fused_cache, block=4),
}
LAYOUTS = list(itertools.product(("half", "interleaved"), repeat=2))
PARTS = ("whole", "first", "last", "middle")
ORDERS = ("dense", "tokens first", "gaps", "lines", "backwards", "one head", "every second")
EDGES = (0, 1, 2, 3, 7, 8, 16, 17, 31, 33, 64, 65, 128, 129, 256, 257)
FACTORS = (tuple(CALLS), tuple(DTYPES), LAYOUTS, PARTS, ORDERS, ORDERS, (False, True), EDGES,
           EDGES, EDGES)  # fmt: skip


def mended(case):
    """The case without what its call cannot have: torch has no negative strides, the fused loops
    need a last axis without gaps, moved keys stay in their layout."""
    head, _, _ = case.call.partition(",")
    if head in ("torch", "fused"):
        not_had = {"backwards", "every second"} if head == "fused" else {"backwards"}
        case = case._replace(
            x="dense" if case.x in not_had else case.x,
            out="dense" if case.out in not_had else case.out,
        )
    if case.layouts[0] != case.layouts[1] and head.startswith("moved"):
        case = case._replace(layouts=(case.layouts[1],) * 2)
    return case


def drawn():
    """Cases in which every two values of two factors meet."""
    for values in pairwise(*FACTORS):
        case = Case(*values)
        sizes = {axis: getattr(case, axis) for axis in ("tokens", "heads", "head_dim")}
        if math.prod(sizes.values()) <= MOST:
            yield case
            continue
        for axis in sizes:  # two of three sizes meet at a time
            yield case._replace(**{axis: 2})


def whole(chance):
    """All sizes 0 to 257 of every two axes, and of each axis with every call and dtype."""

    def chosen(**given):
        return Case(*map(chance.choice, FACTORS))._replace(**given)

    axes = "tokens", "heads", "head_dim"
    for one, other in itertools.combinations(axes, 2):
        (third,) = {*axes} - {one, other}
        for a, b in itertools.product(range(258), repeat=2):
            yield chosen(**{one: a, other: b, third: chance.randrange(2, 4)})
    for axis in axes:
        for call, dtype, size in itertools.product(CALLS, DTYPES, range(258)):
            small = {each: chance.randrange(1, 9) for each in axes}
            yield chosen(call=call, dtype=dtype, **small | {axis: size})


# --- one case ---

COUNTS = Counter()  # how many jobs of the loops, and what became of the cases


def counted(function):
    """The function, which counts its calls: those that run a job of the loops."""

    def run(*arguments):
        COUNTS["jobs"] += 1
        return function(*arguments)

    return run


def watch():
    """Count the jobs, and give what the loops write to memory between guarded pages."""
    threads.run = counted(threads.run)
    small_job, large_job = jobs._small_job, jobs._large_job
    jobs._small_job = lambda *form: counted(small_job(*form))
    jobs._large_job = lambda *form: counted(large_job(*form))
    cpu.np = fused_jobs.np = GuardedNumPy()
    for module in (torch_launch, torch_fused_cpu):
        module.empty_like = guarded_like(module.empty_like)


def cut_small():
    """Let small calls go the way of large ones: on all threads, in parts, in tiles of few rows, and
    past the caches."""
    threads.SERIAL_BYTES = jobs.STREAM_BYTES = fused_jobs.STREAM_BYTES = 1
    jobs.TILE_BYTES = jobs.MOST_TILE_BYTES = fused_jobs.TILE_BYTES = 1 << 11
    forget()


def forget():
    """Drop what was worked out for calls like these."""
    for module in (jobs, fused_jobs, cpu, move):
        for each in vars(module).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()
    ready.recent.clear()


def check(case):
    """One case; AssertionError where memory was changed that must not be."""
    case = mended(case)
    before = COUNTS["jobs"]
    MEMORY.begin(case.at_end)
    try:
        CALLS[case.call](Form(case))
    except ValueError:
        assert case.head_dim < 2, "only a head without a pair is refused"
        COUNTS["refused"] += 1
        return
    MEMORY.check()
    is_empty = 0 in (case.tokens, case.heads)
    assert is_empty or COUNTS["jobs"] > before, "no loop has run"
    COUNTS["nothing to do" if is_empty else "by a loop"] += 1


# --- loops that go one element too far, to see that it is noticed ---


def plant(name):
    """Let the loops of a kind step over one end: "rotate after", "fused before", ..."""
    loop, _, end = name.partition(" ")

    def walked(original):
        def walk(x, *rest):
            offsets, steps = original(x, *rest)
            size = DTYPES[x.dtype].itemsize
            if end == "after":
                steps["tail"], steps["tail_size"] = x.shape[-1] * size, size
            else:
                steps["start"] -= size
            return offsets, steps

        return walk

    def formed(original):
        def form(*arguments):
            made = original(*arguments)
            made.record["tail" if end == "after" else "start"] += 1 if end == "after" else -1
            return made

        return form

    forget()
    if loop == "rotate":
        jobs.walk = walked(jobs.walk)
    elif loop == "moved":
        move.walk = walked(move.walk)
    else:
        fused_jobs._form = formed(fused_jobs._form)


PLANTED = {"rotate": "rotate, out=", "moved": "moved blocks", "fused": "fused, norm"}


def planted():
    """How each loop that goes too far ends its process: the number of the signal, or 0."""
    signals = {}
    for loop, call in PLANTED.items():
        sound = Case(call, "float32", ("half", "half"), "whole", "dense", "dense", True, 3, 2, 16)
        for end in ("after", "before"):
            case = sound._replace(at_end=end == "after")
            check(case)
            child = os.fork()
            if child == 0:
                plant(f"{loop} {end}")
                check(case)
                os._exit(0)
            signals[f"{loop} {end}"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return signals


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--whole", nargs=2, type=int, metavar=("PART", "PARTS"))
    parser.add_argument("--show", type=int, metavar="NUMBER", help="print a case alone")
    options = parser.parse_args()
    torch.set_num_threads(2)
    watch()
    if options.whole is None and options.show is None:
        COUNTS["planted"] = planted()
    faulthandler.enable()
    part, parts = options.whole or (0, 1)
    for is_cut in (False, True):
        if is_cut:
            cut_small()
        cases = whole(random.Random(0)) if options.whole else drawn()
        for number, case in enumerate(cases):
            if number == options.show:
                sys.exit(str(case))
            is_other_way = options.whole and number // parts % 2 != is_cut  # each size once
            if number % parts == part and not is_other_way and options.show is None:
                sys.stderr.write(f"{number}\n")
                check(case)
    sys.stdout.write(json.dumps(COUNTS))


if __name__ == "__main__":
    main()
