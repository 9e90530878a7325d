"""Words of error messages: what was passed, in one line, and what may have been meant."""

import difflib
from collections.abc import Iterable

MOST = 80  # characters of a value in a message


def brief(value: object) -> str:
    """Return a value as one short line: an array by its type and shape, other values by repr.

    >>> import numpy as np
    >>> brief(np.zeros((2, 64))), brief("half"), brief(["a"] * 1000)[-9:]
    ('a numpy.ndarray of shape (2, 64)', "'half'", "'a', '...")
    """
    kind = type(value)
    if shape := getattr(value, "shape", None):
        return f"a {kind.__module__}.{kind.__name__} of shape {tuple(shape)}"
    items = value if isinstance(value, list | tuple) else ()
    if any(getattr(item, "shape", None) for item in items):  # their repr has all their numbers
        return f"a {kind.__name__} of {brief(items[0])}, ..." if len(items) > 1 else brief(items[0])
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."


def counted(count: int, thing: str) -> str:
    """Return a number and what it counts, with an s unless it is one.

    >>> counted(1, "token"), counted(4096, "token")
    ('1 token', '4,096 tokens')
    """
    return f"{count:,} {thing}" + "s" * (count != 1)


def nearest(value: object, choices: Iterable[str]) -> str:
    """Return a hint for an unknown name: the choice that is most like it; "" if none is.

    >>> nearest("lama", ["llama", "gemma"])
    "; did you mean 'llama'?"
    """
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value, list(choices), cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""
