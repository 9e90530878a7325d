"""Loops for the CPU, compiled by Numba: `kernel` is what NumPy arrays get, `jobs` their arguments.

`loops` go over rows; `rows`, `vectors`, `llvm`, `instructions` and `short_floats` are their vector
code. `fused_*` and `move` are the same for `rotary.fused` and for cached keys.
"""
