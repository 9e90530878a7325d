"""Tests whether a function of yours rotates as a spec says.

`check(fn, spec)` compares a function with the plain formula in float64, and names the fault where
they differ. `vectors(specs)` gives the right numbers, for programs that Python cannot call:
`rotary vectors` writes them into a file. pytest has the fixture `rotary_check`
(`rotary.pytest_plugin`).

Use `rotary.identify` if the right RoPE is not known: it measures which one a function computes. Use
`check` if it is known: then it also finds the base, factor or slice of another model, which
`identify` cannot know to be wrong.
"""

from .compare import CASES as CASES
from .compare import WrongRotationError as WrongRotationError
from .compare import check as check
from .golden import to_json as to_json
from .golden import vectors as vectors
