"""What a loaded model says of itself: the layout of its weights, and whether `patch` is in it."""

from types import MethodType
from typing import Any

from ..checkpoint.labels import marked_layout
from ..checkpoint.names import LEFT, classify

PATCHED = "_rotary_original"  # on a function that `patch` has set: the one whose place it takes


def is_patched(model: Any) -> bool:
    """Whether `rotary.patch` has replaced rotations of a torch model."""
    return any(
        isinstance(value, MethodType) and hasattr(value.__func__, PATCHED)
        for module in model.modules()
        for value in vars(module).values()
    )


def marked_layouts(model: Any) -> dict[str, str | None]:
    """Path of each module of a torch model -> the layout that its config says its weights have.

    None without `rope_traditional` in the config of the module or of the nearest around it, and for
    what a conversion leaves, as the indexer of sparse attention.
    Raises ValueError for a value that is not true or false.
    """
    said: dict[int, str | None] = {}  # many modules share a config
    layouts: dict[str, str | None] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            if id(config) not in said:
                said[id(config)] = marked_layout(config)
            layouts[path] = said[id(config)]
        else:
            layouts[path] = layouts.get(path.rpartition(".")[0])
        name = classify(f"{path}.weight")
        if name is not None and name.kind == LEFT:
            layouts[path] = None
    return layouts
