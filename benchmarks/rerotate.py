"""Cached keys moved in place, against a copy of the same bytes: `python -m benchmarks.rerotate`.

A cache of 64 MB whose blocks, in random order, are each moved by a shift of their own: paged keys,
flat keys and rows of latents, of every type. Cases take turns. Two floors stand beside each: memory
is read and written once in place by a torch operator, and the same move is done over keys that stay
in the second cache, where only instructions take time. Then how far keys are from the exact ones
after many moves. Writes benchmarks/results/DATE-rerotate.md.
"""

import datetime
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rotary import Rotary, rerotate
from rotary import bench as timing
from rotary.angles import turns
from rotary.kernels import kernel_of
from rotary.kernels.geometry import Options

from . import command
from .reference import LIMITS as ROUNDED
from .reference import error, rotated

PLAIN = Rotary(head_dim=128, base=500_000.0)
LATENT = Rotary(head_dim=576, rotary_dim=64, start=512)
# name -> (shape but for the blocks, spec)
CACHES = {
    "paged (blocks, 16, 8, 128)": ((16, 8, 128), PLAIN),
    "flat (slots, 8, 128)": ((8, 128), PLAIN),
    "latents (blocks, 16, 576)": ((16, 576), LATENT),
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# type -> largest error, as a share of the largest key
LIMITS = {
    **{dtype: ROUNDED[str(dtype).removeprefix("torch.")] for dtype in FLOATS},
    torch.int8: 1 / 120,
    torch.float8_e4m3fn: 1 / 16,
    torch.float8_e5m2: 1 / 8,
}
SPEED_LIMIT = 0.8  # of a copy at least, for FLOATS; keys of 8 bits have no limit
CASES = "move", "copy", "memory", "instructions"
MOVES = (1, 10, 100, 1000)


CACHED = 640 << 10  # bytes of keys that stay in the second cache of one core,
REPEATS = 64  # and how often one call moves them


class Cache(NamedTuple):
    """Keys in blocks, the blocks in random order, and the shift of each."""

    keys: torch.Tensor
    blocks: torch.Tensor
    shift: torch.Tensor


def main() -> None:
    """Compare with float64, measure, print, write."""
    parser = command.parser(__doc__)
    parser.add_argument("--megabytes", type=int, help="size of a cache; default 64")
    parser.set_defaults(megabytes=64, rounds=31)
    given = command.parsed(parser, {"megabytes": 1, "rounds": 3}, command.RESULTS)
    torch.manual_seed(0)
    command.gate(errors(), "complex numbers in float64")
    rows, missed = [], []
    for name, dtype, found in times(given.megabytes << 20, given.rounds):
        speed, share = found["copy"] / found["move"], "-"
        if "memory" in found:
            share = f"{max(found['memory'], found['instructions']) / found['move']:.2f}"
        cells = (f"{found[case]:.2f}" if case in found else "-" for case in CASES)
        rows.append((name, name_of(dtype), *cells, f"{speed:.2f}", share))
        if dtype in FLOATS and speed < SPEED_LIMIT:
            missed.append(f"{name} {name_of(dtype)}: {speed:.2f}")
    versions = ", ".join(f"{key} {value}" for key, value in timing.versions().items())
    header = [
        "cache", "type", *(f"{case}, ms" for case in CASES),
        "speed, copy = 1", "larger floor / move",
    ]  # fmt: skip
    text = "\n".join([
        "# Cached keys moved in place\n",
        f"{given.megabytes} MB, {torch.get_num_threads()} threads; {versions}. Medians.\n",
        command.table(header, rows),
        f"\nLimit for keys of 16 and 32 bits: {SPEED_LIMIT} of the speed of a copy. Missed: "
        f"{', '.join(missed) or 'none'}. Keys of 8 bits have no limit.\n",
        "Root mean square error of keys moved again and again, as a share of theirs; 8-bit scales",
        "leave room for sqrt(2). Moves by 1 token, and by up to 1000 either way:\n",
        command.table(["type", *(f"{n} moves" for n in MOVES)], drift(given.quick)),
        "",
    ])  # fmt: skip
    print(text)
    command.write(given.out, {f"{datetime.date.today().isoformat()}-rerotate.md": text})


def name_of(dtype: torch.dtype) -> str:
    """The name of a type without its library."""
    return str(dtype).removeprefix("torch.")


def cache_of(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> Cache:
    """Random keys of so many bytes; 8-bit ones use a part of their range."""
    count = max(2, size // (dtype.itemsize * int(np.prod(shape))))
    keys = torch.randn(count, *shape)
    keys = keys.to(dtype) if dtype in FLOATS else (keys * 20).clamp(-80, 80).round().to(dtype)
    return Cache(keys, torch.randperm(count), torch.randint(-1000, 1000, (count,)))


def errors() -> Iterator[tuple[str, float, float]]:
    """(what, largest error over the largest key, limit) of a cache of every form and type."""
    for name, (shape, spec) in CACHES.items():
        for dtype, limit in LIMITS.items():
            keys, blocks, shift = cache_of(shape, dtype, 1 << 16)
            wanted = keys.double().numpy()
            start, stop = spec.start, spec.start + spec.rotary_dim
            for block, by in zip(blocks.tolist(), shift.tolist(), strict=True):
                part = wanted[block, ..., start:stop]
                turned = rotated(
                    part.reshape(-1, spec.rotary_dim), "half", spec.base, np.array([by])
                )
                wanted[block, ..., start:stop] = turned.reshape(part.shape)
            rerotate(keys, spec, blocks=blocks, shift=shift, out=keys)
            yield f"{name} {name_of(dtype)}", error([keys], [wanted]), limit


def times(size: int, rounds: int) -> Iterator[tuple[str, torch.dtype, dict[str, float]]]:
    """Of every form and type the median milliseconds of each of CASES.

    The floors are those of whole rows, so rows of latents have none.
    """
    for name, (shape, spec) in CACHES.items():
        for dtype in LIMITS:
            keys, blocks, shift = cache_of(shape, dtype, size)
            bits = keys.view(torch.uint8)
            cases = {
                "move": partial(rerotate, keys, spec, blocks=blocks, shift=shift, out=keys),
                "copy": partial(torch.empty_like(bits).copy_, bits),
            }
            small, few, by = cache_of(shape, dtype, CACHED)
            if spec.rotary_dim == spec.head_dim:
                cases["memory"] = partial(bits.view(torch.int64).bitwise_xor_, 0)
                # `rerotate` refuses one cache given many times, so ask the kernel itself
                cases["instructions"] = partial(
                    kernel_of(small).move_by, [small] * REPEATS, few, by % 16,  # few rows of tables
                    partial(turns, spec), False, Options(spec.layout, None, spec.rotary_dim, 0, 0),
                )  # fmt: skip
                if not cases["instructions"]():
                    raise RuntimeError(f"the kernel does not move {name} {name_of(dtype)} at once")
            measured = timing.measure(cases, rounds=rounds)
            found = {case: each.median * 1e3 for case, each in measured.items()}
            if "instructions" in found:
                share = bits.numel() / (REPEATS * small.numel() * small.itemsize)
                found["instructions"] *= share / torch.get_num_threads()
            yield name, dtype, found


def drift(is_quick: bool) -> Iterator[list[str]]:
    """A row for each type: the error after 1 to 1000 moves, by 1 token / by many."""
    exact = torch.randn(64, 1, 128, dtype=torch.float64)
    for dtype in LIMITS:
        cells = []
        for longest in (1, 1000):
            random = np.random.default_rng(0)
            scale = exact.abs().amax(-1, keepdim=True) * 2**0.5
            scale = {torch.int8: scale / 127, torch.float8_e4m3fn: scale / 448}.get(dtype, 1.0)
            start = exact / scale
            keys = (start.round() if dtype == torch.int8 else start).to(dtype)
            first, total, found = keys.double(), np.zeros(64, np.int64), []
            for move in range(1, (10 if is_quick else max(MOVES)) + 1):
                low = 1 if longest == 1 else -longest
                shift = random.integers(low, longest, 64, endpoint=True)
                total += shift
                rerotate(keys, PLAIN, blocks=range(64), shift=shift, out=keys)
                if move in MOVES:
                    wanted = rerotate(first, PLAIN, blocks=range(64), shift=total)
                    error = (keys.double() - wanted).square().mean() / wanted.square().mean()
                    found.append(f"{float(error.sqrt()):.1e}")
            cells.append(found)
        pairs = [" / ".join(pair) for pair in zip(*cells, strict=True)]
        yield [name_of(dtype), *pairs, *["-"] * (len(MOVES) - len(pairs))]


if __name__ == "__main__":
    main()
