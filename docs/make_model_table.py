"""Write docs/models.md: what RoPE the published configs in tests/configs have."""

from pathlib import Path

from rotary import Rotary, from_hf_config, inv_freq
from rotary.configs import layer_types

ROOT = Path(__file__).parent
CONFIGS = ROOT.parent / "tests" / "configs"


def main() -> None:
    """Read every config, write one table."""
    lines = [
        "# The RoPE of published models",
        "",
        "Read by `rotary.from_hf_config` from the configs in [tests/configs](../tests/configs);",
        "[SOURCES.md](../tests/configs/SOURCES.md) says where they come from.",
        "`tests/test_configs.py` compares each one with transformers 5.23, bit for bit.",
        "Written by `python docs/make_model_table.py`.",
        "",
        "| model | layers | channels | layout | base | schedule | amplitude |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(CONFIGS.glob("*.json")):
        try:
            kinds = layer_types(path) or (None,)
            specs = [(kind, from_hf_config(path, kind)) for kind in kinds]
        except ValueError as error:
            lines.append(f"| {path.stem} | refused: {error} | | | | | |")
            continue
        lines += [f"| {path.stem} | {kind or ''} | {row(spec)} |" for kind, spec in specs]
    (ROOT / "models.md").write_text("\n".join(lines) + "\n")


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
    main()
