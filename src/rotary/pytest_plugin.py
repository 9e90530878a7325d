"""The pytest plug-in: one fixture, `rotary_check`. pytest finds it where rotary is installed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from .configs import from_hf_config
from .spec import Rotary
from .strict_json import JSON


@pytest.fixture
def rotary_check(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return `rotary.testing.check(fn, spec)`, which takes a config in place of the spec as well.

    The call is rotary_check(fn, spec, *, layer_type=None, part=None, **options). spec is a Rotary,
    the content of a config.json, or the path of the file or its folder, relative to the folder of
    the test. layer_type and part as in `rotary.from_hf_config`, options as in
    `rotary.testing.check`.
    """
    return partial(_check, request.path.parent)


def _check(
    folder: Path,
    fn: Callable[..., object],
    spec: Rotary | Mapping[str, JSON] | str | Path,
    *,
    layer_type: str | None = None,
    part: str | None = None,
    **options: object,
) -> None:
    __tracebackhide__ = True
    from . import testing  # slow to import, and pytest loads this file in every run

    check: Callable[..., None] = testing.check
    if isinstance(spec, Rotary):
        if (layer_type, part) != (None, None):
            raise ValueError("layer_type and part choose from a config; a Rotary has neither")
        expected: Rotary | None = spec
    else:
        config = folder / spec if isinstance(spec, str | Path) else spec
        expected = from_hf_config(config, layer_type, part=part)
    if expected is None:
        where = "the config" if layer_type is None else f"layer type {layer_type!r} of the config"
        raise ValueError(f"{where} has no rotation to check")
    check(fn, expected, **options)
