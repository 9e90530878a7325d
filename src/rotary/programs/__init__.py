"""Compute what other programs make of the same config, and compare it with transformers.

There is one file for each program; a new release of a program changes only that file. `case` has
the records of a config and of a program's result, `rules` the formulas that several programs share,
and `diff` the comparison.
"""

from .diff import PROGRAMS as PROGRAMS
from .diff import diff as diff
from .diff import readings as readings
