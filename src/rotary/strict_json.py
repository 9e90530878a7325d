"""Parses JSON from files and users: config.json, an index, a header, a manifest, a pasted text.

Python's own reader takes what JSON does not have (NaN), keeps the last of two equal keys, and
spends minutes on a number of a million digits. Here each of these is refused with one sentence;
infinity is taken in a config, where transformers 4 wrote it ("time_step_limit" of Falcon-H1).
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64  # objects and lists inside each other; a config.json has 4 to 6
MAX_NUMBER = 100  # characters of one number; a float64 written exactly enough has 24

JSON = Any  # a value of a JSON text; its type is checked where it is used


def parsed(text: str | bytes, where: str, infinity: bool = False) -> Mapping[str, JSON]:
    """Return the keys and values of a JSON object in a text; errors name `where` it is from.

    text      str, or bytes in UTF-8 with or without a byte order mark
    infinity  whether Infinity and -Infinity are numbers, as Python's json writes them
    Raises ValueError of one line for text that is not JSON or not an object, a number that JSON
    does not have or that is longer than 100 characters, a duplicate key, and more than 64 levels.

    >>> parsed('{"head_dim": 64}', "a test")
    {'head_dim': 64}
    >>> parsed('{"head_dim": 64, "head_dim": 32}', "a test")
    Traceback (most recent call last):
    ValueError: a test: key 'head_dim' appears twice
    """

    def number(constant: str) -> float:
        if infinity and constant != "NaN":
            return float(constant)
        raise ValueError(f"{where}: {constant} is not JSON")

    def checked(digits: str) -> str:
        if len(digits) > MAX_NUMBER:
            raise ValueError(f"{where}: a number of {len(digits):,} digits, {digits[:20]}...")
        return digits

    def unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
        data = dict(pairs)
        if len(data) < len(pairs):
            (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"{where}: key {key!r:.200} appears twice")
        return data

    try:
        data = json.loads(
            text.decode("utf-8-sig") if isinstance(text, bytes) else text,
            parse_constant=number,
            parse_int=lambda digits: int(checked(digits)),
            parse_float=lambda digits: float(checked(digits)),
            object_pairs_hook=unique,
        )
        level: list[JSON] = [[data]]
        for _ in range(MAX_DEPTH + 1):
            inner = (each.values() if isinstance(each, dict) else each for each in level)
            level = [each for items in inner for each in items if isinstance(each, dict | list)]
        if level:
            raise RecursionError
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not JSON in UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{where} is not JSON in UTF-8: {error.msg}, {at}") from error
    except RecursionError as error:
        raise ValueError(
            f"{where}: objects and lists are nested more than {MAX_DEPTH} deep"
        ) from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: must hold an object, got {type(data).__name__}")
    return data
