"""Computes what other programs make of the same config, to compare it with transformers.

One file for each program; a new release of one touches that file. `case` is what a program is asked
and answers, `rules` the formulas that several share, `diff` the comparison.
"""

from .diff import PROGRAMS as PROGRAMS
from .diff import diff as diff
from .diff import readings as readings
