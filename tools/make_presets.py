"""Write src/rotary/explorer/presets.json: the configs in tests/configs, cut to what bears on RoPE.

A key is left out if the config without it gives the same `Rotary` and the same trained length.
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from rotary.configs import MODELS, layer_types
from rotary.explorer.models import cut, read

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "configs"
PRESETS = ROOT / "src" / "rotary" / "explorer" / "presets.json"


def main() -> None:
    """Cut every config that gives one rotation of a text; one entry for each layer type."""
    found = {}
    for path in sorted(CONFIGS.glob("*.json")):
        config = json.loads(path.read_text())
        for kind in rotating(config):
            name = f"{path.stem}, {kind}" if kind else path.stem
            found[name] = {"layer_type": kind, "config": cut(config, kind)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found)
    PRESETS.write_text(f"{{\n{lines}\n}}\n")


def rotating(config: dict[str, Any]) -> list[str | None]:
    """The layer types with one rotation; [None] where all layers are alike."""
    kept = []
    for kind in layer_types(config) or (None,) if config["model_type"] in MODELS else ():
        with contextlib.suppress(ValueError):  # several rotations, or layers without one
            read(config, kind)
            kept.append(kind)
    return kept


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
