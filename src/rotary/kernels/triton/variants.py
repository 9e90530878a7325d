"""Three ways in which the GPU kernel keeps loads in flight, and the choice for a device.

A multiprocessor waits for memory if too few bytes are in flight to it. Their number follows from
the compiled code: the bytes of q and k that a thread has requested when it first needs one of them,
times the number of resident threads. A measurement takes precedence over that model.
"""

from typing import NamedTuple


class Variant(NamedTuple):
    """How a tile is rotated if there is enough work for the whole device.

    warps     the number of warps that share the tile
    prefetch  whether the next heads are loaded before the current ones are rotated
    groups    how many groups of heads a program takes at most, one after another
    """

    warps: int = 4
    prefetch: bool = False
    groups: int = 5


VARIANTS = {
    "plain": Variant(),
    "eight warps": Variant(warps=8),
    "prefetch": Variant(prefetch=True),
}

# (architecture, layout, exact) -> a variant within 2 % of the fastest on an H100 and on an H200, by
# `python -m benchmarks.gpu --part ablation`
MEASURED: dict[tuple[str, str, bool], str] = {
    ("sm_90", "half", False): "eight warps",
    ("sm_90", "half", True): "eight warps",
    ("sm_90", "interleaved", False): "prefetch",
    ("sm_90", "interleaved", True): "plain",
}
# With tables in half layout a program has little to do for its tokens, and many short programs
# keep the memory busier: 2 groups instead of 5 took 3 % less on an H100 and 2 % on an H200. Where
# angles are computed, or channels exchanged between threads, it took up to 10 % more on an H200.
_GROUPS_OF_HALF_TABLES = 2

# (the oldest architecture with these numbers, layout, exact) -> KB in flight to one multiprocessor
# for each of VARIANTS, for heads of 128 channels in 16 bits.
# tests/test_gpu_code.py reads them from the code for sm_80, sm_90 and sm_100.
IN_FLIGHT = {
    (80, "half", False): (24, 40, 32),
    (80, "half", True): (28, 40, 32),
    (80, "interleaved", False): (24, 20, 32),
    (80, "interleaved", True): (36, 20, 32),
    (100, "half", False): (24, 40, 32),
    (100, "half", True): (24, 32, 32),
    (100, "interleaved", False): (24, 20, 32),
    (100, "interleaved", True): (36, 20, 32),
}


def variant_of(architecture: str, layout: str, is_exact: bool) -> Variant:
    """Return the measured variant for an architecture, else the one with most bytes in flight.

    `layout` is the one that is read. Older NVIDIA GPUs, and AMD GPUs, get the plain variant.

    >>> variant_of("sm_90", "interleaved", False)
    Variant(warps=4, prefetch=True, groups=5)
    >>> variant_of("gfx942", "half", True)
    Variant(warps=4, prefetch=False, groups=5)
    """
    name = MEASURED.get((architecture, layout, is_exact))
    if name is None:
        in_flight = modelled(architecture, layout, is_exact)
        name = [*VARIANTS][in_flight.index(max(in_flight))]
    variant = VARIANTS[name]
    is_short = layout == "half" and not is_exact
    return variant._replace(groups=_GROUPS_OF_HALF_TABLES) if is_short else variant


def modelled(architecture: str, layout: str, is_exact: bool) -> tuple[int, int, int]:
    """Return KB in flight for each of VARIANTS, from the newest known architecture up to this.

    >>> modelled("sm_90", "interleaved", False)
    (24, 20, 32)
    """
    family, _, number = architecture.partition("_")
    older = [old for old, *form in IN_FLIGHT if form == [layout, is_exact]]
    older = [old for old in older if family == "sm" and old <= int(number)]
    return IN_FLIGHT[max(older), layout, is_exact] if older else (1, 0, 0)
