"""Write docs/models.md: what RoPE the published configs in tests/configs have."""

import argparse
from pathlib import Path

from rotary import Rotary, from_hf_config, inv_freq
from rotary.configs import ArgumentNeededError, layer_types

ROOT = Path(__file__).parent.parent / "docs"
CONFIGS = ROOT.parent / "tests" / "configs"
HEAD = """\
# The RoPE of published models

`rotary.from_hf_config` reads these from the configs in [tests/configs](../tests/configs);
[SOURCES.md](../tests/configs/SOURCES.md) says where each is from. It reads {read} of {count}
configs and refuses {refused}, because their models run on code of their own that this library does
not know.

`tests/test_configs.py` compares the results with the classes of transformers 5.24. They are equal
bit for bit, except for the roundings in [DIFFERENCES.md](../tests/golden/DIFFERENCES.md).
internlm2, kimi_k2 and phi3_v are not compared, because their code is published with their weights
and not in transformers. For gptj, codegen and roformer `tests/test_parity.py` compares the
functions.

A model with several layer types has one line for each. "Channels" are the rotated channels of a
head; "schedule" shows the factor after x.
`python tools/make_model_table.py` writes this page.

| model | layers | channels | layout | base | schedule | attention factor |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page: every config is read."""
    paths = sorted(CONFIGS.glob("*.json"))
    rows = [line for path in paths for line in rows_of(path)]
    refused = sum("| refused: " in line for line in rows)
    head = HEAD.format(count=len(paths), read=len(paths) - refused, refused=refused)
    return head + "\n".join(rows) + "\n"


def rows_of(path: Path) -> list[str]:
    """The rows of one config, one for each layer type."""
    try:
        kinds = layer_types(path) or (None,)
        specs = [(kind, from_hf_config(path, kind)) for kind in kinds]
    except ArgumentNeededError as error:
        return [f"| {path.stem} | refused: {error.reason} | | | | | |"]
    return [f"| {path.stem} | {kind or ''} | {row(spec)} |" for kind, spec in specs]


def row(spec: Rotary | None) -> str:
    """The cells of one spec."""
    if spec is None:
        return "none: no rotation | | | |"
    width = f"{spec.rotary_dim} of {spec.head_dim}"
    width += f", from {spec.start}" if spec.start else ""
    layout = spec.layout
    layout += f", writes {spec.out_layout}" if spec.out_layout != spec.layout else ""
    layout += ", clockwise" if spec.sign < 0 else ""
    schedule = spec.schedule
    if "factor" in spec.params:
        schedule += f" x {spec.params['factor']:g}"
    if spec.num_axes > 1:
        schedule += f", {spec.num_axes} axes"
    return f"{width} | {layout} | {spec.base:,.0f} | {schedule} | {inv_freq(spec)[1]:.4g}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (ROOT / "models.md").write_text(page())
