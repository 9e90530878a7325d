"""Loops for the CPU, compiled by Numba: `kernel` calls them for NumPy arrays.

`jobs` prepares their arguments, and `loops` iterate over rows. Their vector code is in `rows`,
`vectors`, `llvm`, `instructions` and `short_floats`. `fused_*` has the loops of `rotary.fused`,
`move` those that re-rotate cached keys.
"""
