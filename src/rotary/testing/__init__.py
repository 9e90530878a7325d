"""Tests whether a function of yours rotates as a spec says.

`check(fn, spec)` compares a function with the plain formula in float64, and names the mistake where
they differ. `vectors(specs)` gives the numbers themselves, for programs that Python cannot call:
`rotary vectors` writes them into a file. pytest has the fixture `rotary_check`
(`rotary.pytest_plugin`).

Use `rotary.identify` where the right RoPE is not known: it measures which one a function computes.
Use `check` where it is known: then a base, a factor or a slice of another model is a mistake as
well, which `identify` cannot know.
"""

from .compare import CASES as CASES
from .compare import WrongRotationError as WrongRotationError
from .compare import check as check
from .golden import to_json as to_json
from .golden import vectors as vectors
