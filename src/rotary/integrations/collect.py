"""Copy definitions of this library, and everything they need, into one file.

Code is copied as text, with its comments; nothing is imported.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent
Definition = tuple[str, str]  # a file of this library below PACKAGE, and a top-level name in it
Import = tuple[str, str]  # "from typing import" and "Any", or "import numpy as np" and ""


class Source(NamedTuple):
    """One file of this library: what its top level defines and imports, by name."""

    document: str
    lines: list[str]
    definitions: dict[str, ast.stmt]
    ours: dict[str, Definition]  # imported from another file of this library
    others: dict[str, Import]  # imported from another library


@lru_cache
def read(path: str) -> Source:
    """Parse a file of this library.

    >>> read("layouts.py").others["npt"]
    ('import numpy.typing as npt', '')
    """
    text = (PACKAGE / path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    source = Source(ast.get_docstring(tree, clean=False) or "", text.splitlines(), {}, {}, {})
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            source.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            source.definitions.update((name, node) for each in targets for name in _names(each))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _read_import(node, path, source)
    return source


def _read_import(node: ast.Import | ast.ImportFrom, path: str, source: Source) -> None:
    for alias in node.names:
        name = alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.Import):
            source.others[name] = f"import {ast.unparse(alias)}", ""
        elif not node.level:
            source.others[name] = f"from {node.module} import", ast.unparse(alias)
        elif node.module:
            folder = Path(path).parents[node.level - 1]
            file = folder.joinpath(*node.module.split(".")).with_suffix(".py")
            source.ours[name] = file.as_posix(), alias.name


def needed(path: str, names: Sequence[str]) -> Iterator[Definition]:
    """Yield these definitions of one file, and every definition that they need.

    >>> sorted(needed("layouts.py", ["pair_slices"]))[:3]
    [('layouts.py', 'LAYOUTS'), ('layouts.py', 'Layout'), ('layouts.py', '_OTHER_NAMES')]
    """
    done: set[Definition] = set()
    todo = [(path, name) for name in names]
    while todo:
        file, name = todo.pop()
        source = read(file)
        if name in source.ours:
            todo.append(source.ours[name])
        elif name in source.definitions and (file, name) not in done:
            done.add((file, name))
            yield file, name
            todo += [(file, each) for each in _names(source.definitions[name])]


def collected(definitions: set[Definition], elsewhere: dict[Definition, str]) -> str:
    """Return the code of definitions, below the imports that they need.

    elsewhere  definition -> the module of the same package that has it; these are imported

    Definitions of one file keep their order. Raises ValueError if two have the same name.
    """
    own = definitions - elsewhere.keys()
    files = _ordered({file for file, _ in own})
    names = [name for _, name in own]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))}: defined in more than one of {files}")
    imports = {(f"from .{elsewhere[each]} import", each[1]) for each in definitions - own}
    parts = []
    for file in files:
        source = read(file)
        chosen = {name: source.definitions[name] for f, name in own if f == file}
        for node in chosen.values():
            imports |= {source.others[name] for name in _names(node) & source.others.keys()}
        pieces = sorted({_span(node, source.lines) for node in chosen.values()})
        parts.append(f"# --- {file} ---\n\n\n" + _joined(pieces, source.lines))
    return "\n\n\n".join([_sorted(imports), *parts]) + "\n"


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _ordered(files: set[str]) -> list[str]:
    """Sort files so that each comes after those that it imports."""
    order = TopologicalSorter[str]()
    for file in sorted(files):
        order.add(file, *sorted({other for other, _ in read(file).ours.values()} & files))
    return list(order.static_order())


def _span(node: ast.stmt, lines: list[str]) -> tuple[int, int]:
    """Return the lines of a definition, with its decorators and the comment right above it."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    while first and lines[first - 1].startswith("#"):
        first -= 1
    return first, node.end_lineno or node.lineno


def _joined(spans: list[tuple[int, int]], lines: list[str]) -> str:
    text, end = "", None
    for first, last in spans:
        gap = "" if end is None else "\n" if end == first else "\n\n\n"
        text += gap + "\n".join(lines[first:last])
        end = last
    return text


def _sorted(imports: set[Import]) -> str:
    """Return import lines: standard library, other libraries, other modules of the package."""
    lines: dict[str, str] = {}
    for first, name in sorted(imports):
        lines[first] = f"{lines[first]}, {name}" if first in lines else f"{first} {name}".rstrip()

    def group(line: str) -> int:
        module = line.split()[1].partition(".")[0]
        return 2 if not module else 0 if module in sys.stdlib_module_names else 1

    ordered = sorted(lines.values(), key=lambda line: not line.startswith("import"))
    groups = [[line for line in ordered if group(line) == number] for number in range(3)]
    return "\n\n".join("\n".join(each) for each in groups if each)
