"""Three ways in which the GPU kernel keeps loads under way, and which one a device takes.

A multiprocessor waits for memory as long as too few bytes are on their way to it. How many are
follows from the compiled code: the bytes of q and k that a thread has asked for when it first needs
one of them, times the threads that fit beside each other. A measurement goes before that model.
"""

from typing import NamedTuple


class Variant(NamedTuple):
    """How a tile is rotated where there is work enough for the whole device.

    warps     that share the tile
    prefetch  whether the next heads are loaded before those at hand are rotated
    """

    warps: int = 4
    prefetch: bool = False


VARIANTS = {
    "plain": Variant(),
    "eight warps": Variant(warps=8),
    "prefetch": Variant(prefetch=True),
}

# The fastest one by `python -m benchmarks.gpu --part ablation`, of (architecture, layout, exact),
# as in ("sm_90", "half", False). Empty: nothing was measured yet.
MEASURED: dict[tuple[str, str, bool], str] = {}

# KB on their way to one multiprocessor, of heads of 128 in 16 bits, for each of VARIANTS; 0 where
# registers are spilled. By the oldest architecture with these numbers, layout and exact;
# tests/test_gpu_code.py reads them from the code for sm_80, sm_90 and sm_100.
IN_FLIGHT = {
    (80, "half", False): (24, 40, 32),
    (80, "half", True): (28, 40, 32),
    (80, "interleaved", False): (24, 20, 32),
    (80, "interleaved", True): (36, 20, 32),
    (100, "half", False): (24, 40, 32),
    (100, "half", True): (24, 32, 0),
    (100, "interleaved", False): (24, 20, 32),
    (100, "interleaved", True): (36, 20, 32),
}


def variant_of(architecture: str, layout: str, is_exact: bool) -> Variant:
    """The measured variant of an architecture, else the one with the most bytes on their way.

    `layout` is the one that is read. Of an older NVIDIA GPU, and of AMD's, the plain one is taken.

    >>> variant_of("sm_90", "half", False)
    Variant(warps=8, prefetch=False)
    >>> variant_of("gfx942", "half", False)
    Variant(warps=4, prefetch=False)
    """
    if name := MEASURED.get((architecture, layout, is_exact)):
        return VARIANTS[name]
    in_flight = modelled(architecture, layout, is_exact)
    return [*VARIANTS.values()][in_flight.index(max(in_flight))]


def modelled(architecture: str, layout: str, is_exact: bool) -> tuple[int, int, int]:
    """KB on their way for each of VARIANTS, as on the newest known architecture before this one.

    >>> modelled("sm_90", "interleaved", False)
    (24, 20, 32)
    """
    family, _, number = architecture.partition("_")
    older = [old for old, *form in IN_FLIGHT if form == [layout, is_exact]]
    older = [old for old in older if family == "sm" and old <= int(number)]
    return IN_FLIGHT[max(older), layout, is_exact] if older else (1, 0, 0)
