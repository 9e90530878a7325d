"""Which file of the package imports which, and the picture of it: `python -m tools.architecture`.

The table of floors is here; `tests/test_architecture.py` holds files to it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import rotary

ROOT = Path(rotary.__file__).parent

# Files and folders of the package, from the ground up. A file imports from floors below its own,
# and from its own folder, where no two files need each other. "kernels" is its __init__.py.
FLOORS = (
    {
        *("schedules", "layouts", "cache", "fanout", "strict_json", "whole_files", "words"),
        "kernels/private",
    },
    {"spec"},
    {"kernels/geometry", "kernels/memory"},
    {"kernels"},
    {"kernels/numpy", "kernels/stages", "kernels/phases", "kernels/place"},
    {"kernels/fused_steps"},
    {"kernels/numpy_fused", "kernels/triton", "kernels/mlx"},
    {"kernels/cpu"},
    {"kernels/torch", "kernels/jax"},
    {"angles", "positions"},
    {"rotate"},
    {"fused", "prepare", "rerotate", "attention", "configs", "nn"},
    {"analysis", "checkpoint", "programs"},
    {"blackbox", "integrations"},
    {"audit", "identify", "model", "ranks", "reach", "recommendation"},
    {"plan", "testing"},
    {"plots", "explorer", "bench", "doctor", "pytest_plugin"},
    {"demo"},
    {"cli"},
)
# What the files of a folder import beside numpy and the standard library; "" is everywhere else.
LIBRARIES = {
    "analysis": {"numba"},
    "bench": {"torch", "transformers"},
    "blackbox": {"torch"},
    "cli": {"distributed", "rich", "torch", "typer"},
    "configs": {"gguf"},
    "demo": {"torch", "transformers"},
    "doctor": {"numba", "torch"},
    "explorer": {"starlette", "uvicorn"},
    "integrations": {
        "lmcache",
        "mlx",
        "onnx",
        "sglang",
        "torch",
        "torchtitan",
        "transformers",
        "vllm",
    },
    "kernels": {"torch"},
    "kernels/geometry": {"torch"},
    "kernels/numpy_fused": {"ml_dtypes"},
    "kernels/cpu": {"llvmlite", "numba"},
    "kernels/jax": {"jax"},
    "kernels/mlx": {"mlx"},
    "kernels/torch": {"torch"},
    "kernels/triton": {"torch", "triton"},
    "model": {"torch"},
    "nn": {"torch"},
    "plots": {"matplotlib"},
    "pytest_plugin": {"pytest"},
    "ranks": {"torch"},
}
# Imports against the order: `kernels` loads the code for a library on first use, `rotary` loads
# its modules and the names that need torch when they are asked for ("?": by a name that is not
# written out); a conversion, an exported kernel and the command write down the version.
LOADED = (
    *("numpy", "cpu/kernel", "torch/route", "torch/dtensor", "jax/kernel", "mlx"),
    *("numpy_fused", "cpu/fused", "torch/fused", "jax/fused"),
)
UPWARD = {
    *(("kernels", f"kernels/{name}") for name in LOADED),
    *(("", "?"), ("checkpoint/writing", ""), ("integrations/hub_kernel", ""), ("cli/app", "")),
}
FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("__init__").rstrip("/"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(tree: ast.AST, name: str, is_package: bool) -> Iterator[tuple[str, bool]]:
    """(what is imported, whether at the top of the file), of the module `name` of ours."""
    at_top = set(_at_top(tree))
    package = name.split("/") if is_package else name.split("/")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [_ours(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + module
                targets = [_file([*base, alias.name]) for alias in node.names]
            elif module[0] == "rotary":
                targets = [_file([*module[1:], alias.name]) for alias in node.names]
            else:
                targets = [module[0]]
        elif isinstance(node, ast.Call) and _is_dynamic(node.func):
            targets = [
                _ours(argument.value.split(".")) if isinstance(argument, ast.Constant) else "?"
                for argument in node.args[:1]
            ]
        else:
            continue
        for target in targets:
            yield target, node in at_top


def _at_top(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the file is imported: not in a function, not for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _at_top(node)


def _is_dynamic(function: ast.expr) -> bool:
    return ast.unparse(function) in ("__import__", "importlib.import_module", "import_module")


def _ours(parts: list[str]) -> str:
    return _file(parts[1:]) if parts[0] == "rotary" else parts[0]


def _file(parts: list[str]) -> str:
    """The file of ours behind a dotted name: the longest part of it that is one."""
    for end in range(len(parts), 0, -1):
        if "/".join(parts[:end]) in FILES:
            return "/".join(parts[:end])
    return ""


def unit_of(name: str) -> str:
    """The file or folder of `FLOORS` that a file is, or is in; "" for the roof.

    >>> unit_of("kernels/cpu/jobs"), unit_of("configs/hf"), unit_of("__main__")
    ('kernels/cpu', 'configs', '')
    """
    parts = name.split("/")
    places = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((place for place in places if any(place in units for units in FLOORS)), "")


def floor(name: str) -> int:
    """How high the file or folder stands; __init__.py and __main__.py are the roof."""
    unit = unit_of(name)
    return next((n for n, units in enumerate(FLOORS) if unit in units), len(FLOORS))


def units_below() -> dict[str, set[str]]:
    """Each file or folder of the package, and those that it imports when it is loaded or used."""
    below: dict[str, set[str]] = {}
    for name, path in FILES.items():
        unit = unit_of(name)
        for target, _ in imports(ast.parse(path.read_text()), name, path.name == "__init__.py"):
            other = unit_of(target)
            if target in FILES and floor(other) < floor(unit) < len(FLOORS):
                below.setdefault(unit, set()).add(other)
    return below


def drawn_below() -> dict[str, set[str]]:
    """The same without what is reached through another unit: the lines of the picture."""
    below = units_below()

    def reached(unit: str) -> set[str]:
        return set().union(
            *(below.get(other, set()) | reached(other) for other in below.get(unit, ()))
        )

    return {unit: others - reached(unit) for unit, others in below.items()}


BOX, GAP, ROW, LEFT = (140, 34), 14, 66, 40  # pixels: of a box, between boxes and rows


def svg() -> str:
    """Floors as rows, the ground at the bottom; a line from each unit to those it stands on."""
    most = max(map(len, FLOORS))
    width = LEFT + most * (BOX[0] + GAP) + GAP
    height = len(FLOORS) * ROW + GAP
    at = {}
    for number, units in enumerate(FLOORS):
        margin = LEFT + (most - len(units)) * (BOX[0] + GAP) // 2
        for place, unit in enumerate(sorted(units)):
            at[unit] = margin + place * (BOX[0] + GAP), height - (number + 1) * ROW
    lines, boxes = [], []
    for unit, others in sorted(drawn_below().items()):
        for other in sorted(others):
            (x, y), (u, v) = at[unit], at[other]
            lines.append(f'<path d="M{x + BOX[0] / 2:g} {y + BOX[1]} L{u + BOX[0] / 2:g} {v}"/>')
    for unit, (x, y) in at.items():
        label = unit if (ROOT / f"{unit}.py").exists() else f"{unit}/"
        boxes.append(
            f'<rect x="{x}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="5"/>'
            f'<text x="{x + BOX[0] / 2:g}" y="{y + 22}">{label}</text>'
        )
    numbers = [
        f'<text class="floor" x="{LEFT / 2:g}" y="{height - (n + 1) * ROW + 22}">{n}</text>'
        for n in range(len(FLOORS))
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'role="img" aria-label="Files and folders of rotary by floor, and what imports what">',
        "<style>rect{fill:#fff;stroke:#0072b2;stroke-width:1.5}"
        "path{stroke:#888;stroke-width:1;fill:none}"
        "text{font:13px system-ui,sans-serif;text-anchor:middle;fill:#222}"
        ".floor{fill:#888}</style>",
        f'<rect x="0" y="0" width="{width}" height="{height}" style="stroke:none"/>',
        *lines, *boxes, *numbers, "</svg>", "",
    ])  # fmt: skip


PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "architecture.svg"

if __name__ == "__main__":
    PICTURE.write_text(svg())
