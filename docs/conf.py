"""How the pages of this folder are built: `sphinx-build -W -n docs build/docs`.

Docstrings of the package are plain text: paragraphs, indented tables of arguments, examples.
`as_rst` turns one into reStructuredText, so that they stay readable in an editor.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

import rotary

project = "rotary"
author = "the authors of rotary"
version = release = rotary.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what is copied is what can be run
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"rotary {version}"
html_static_path = ["style.css"]
if mathjax := importlib.util.find_spec("sphinx-mathjax-offline"):  # one file, served with the pages
    path = Path(str(mathjax.origin)).parent / "static" / "mathjax" / "tex-svg.js"
    html_static_path.append(str(path))
    mathjax_path = path.name
html_css_files = ["style.css"]
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
# the page of the explorer is described, not started; MLX is not for every machine
autodoc_mock_imports = ["mlx", "starlette", "uvicorn"]

nitpicky = True
nitpick_ignore_regex = [
    # types of other libraries, and of the standard one: links to other sites are not checked here
    (
        r"py:.*",
        r"(_pytest|collections|concurrent|decimal|inspect|matplotlib|mlx|mx|np|numpy|os|pathlib|starlette|torch|transformers|typing)\..*",
    ),
    # stands for the type of array that comes in
    (r"py:class", r"rotary\.(kernels\.Array|rotate\.Other|fused\.[KV])"),
]

_ARRAY = re.compile(r"~numpy\.ndarray\[tuple\[~typing\.Any, \.\.\.\], ~numpy\.dtype\[~[\w.]+\]\]")
_FACTORY = re.compile(r" ?= ?<factory>")
_TERM = r"[\w.*=]+(?:, [\w.*]+)*"
_ROW = re.compile(rf"({_TERM}) {{2,}}(?=\S)")
_LAST_BLANK = re.compile(r"(```python\n(?:(?!```).)*?)\n\n```", re.DOTALL)  # doctest needs it
_NEW_PARAGRAPH = re.compile(r"(Returns|Raises|Source)\b")
_PAPERS = (
    (r"arXiv\s(\d{4}\.\d{5})", r"`arXiv \1 <https://arxiv.org/abs/\1>`__"),
    (r"kexue\.fm\s(\d{4,5})", r"`kexue.fm \1 <https://kexue.fm/archives/\1>`__"),
)


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText.

    >>> as_rst(["A *sum*.", "", "x   |x| of", "    `y`", "Raises nothing."])
    ['A *sum*.', '', '``x``', '    \\\\|x\\\\| of', '    :py:obj:`y`', '', 'Raises nothing.', '']
    """
    return [line for block in _blocks(lines) for line in (*block, "")]


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        if not line.strip():
            at += 1
        elif line.startswith(">>>"):
            at = _end(lines, at, lambda text: text.strip())
            yield lines[start:at]
        elif line.startswith(" "):
            at = _end(lines, at, lambda text: text.startswith(" ") or not text)
            yield [".. code-block:: text", "", *lines[start:at]]
        elif column := _second_column(lines, at):
            at = _end(lines, at, lambda text: _is_row(text, column))
            yield _definitions(lines[start:at], column)
        elif line.startswith("- "):
            at = _end(lines, at, lambda text: text.startswith(("- ", "  ")))
            yield _inline(lines[start:at])
        else:
            at = _end(lines, at, _goes_on)
            yield _inline(lines[start:at])


def _end(lines: list[str], at: int, belongs: Any) -> int:
    """The first line after `at` that does not belong to its block."""
    return next((i for i in range(at + 1, len(lines)) if not belongs(lines[i])), len(lines))


def _goes_on(line: str) -> bool:
    starts_anew = _NEW_PARAGRAPH.match(line) or _ROW.match(line) or line.startswith(("- ", " "))
    return bool(line.strip()) and not starts_anew


def _second_column(lines: list[str], at: int) -> int:
    """Where the second column of the table that starts here is; 0 if none starts."""
    if row := _ROW.match(lines[at]):
        return row.end()
    further = lines[at + 1] if at + 1 < len(lines) else ""
    column = len(further) - len(further.lstrip())
    return column if column and _is_row(lines[at], column) else 0


def _is_row(line: str, column: int) -> bool:
    """True for a row of a table whose second column is at `column`, and for its further lines."""
    if line.startswith(" ") or _ROW.match(line):
        return True
    is_separated = line[column - 1 : column + 1].strip() and line[column - 1 : column] == " "
    is_term = re.fullmatch(_TERM, line[: column - 1]) and line[0].islower()
    return bool(is_separated and is_term)


def _definitions(lines: list[str], column: int) -> list[str]:
    starts = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    items: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        row = _ROW.match(lines[start])
        width = row.end() if row else column
        text = [lines[start][width:], *(line.strip() for line in lines[start + 1 : end])]
        items += [f"``{lines[start][:width].strip()}``", *("    " + line for line in _inline(text))]
    return items


def _inline(lines: list[str]) -> list[str]:
    """Text between backticks as code, linked if it is one of our names; the rest as it stands."""
    parts = "\n".join(lines).split("`")
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"([\\*|_])", r"\\\1", part)
            parts[i] = re.sub(r"\\\*(\w+)\\\*", r"*\1*", parts[i])  # a word that is stressed
            for pattern, link in _PAPERS:
                parts[i] = re.sub(pattern, link, parts[i])
        elif re.fullmatch(r"[\w.]+", part):
            parts[i] = f":py:obj:`{part}`"
        else:
            parts[i] = f"``{part}``"
    return "".join(parts).split("\n")


def short_types(text: str) -> str:
    """A signature with short names: docstrings give the shape and the type of every array.

    >>> short_types("(x: ~numpy.ndarray[tuple[~typing.Any, ...], ~numpy.dtype[~numpy.uint64]])")
    '(x: ~numpy.ndarray)'
    """
    return _ARRAY.sub("~numpy.ndarray", text)


def _process_docstring(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    lines[:] = as_rst(lines)


def _process_signature(
    app: Any,
    what: str,
    name: str,
    obj: object,
    options: Any,
    given: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    from sphinx.util.typing import stringify_annotation

    like = stringify_annotation(npt.ArrayLike, "smart")  # a union of many private types
    given = given and short_types(given.replace(like, "~numpy.typing.ArrayLike"))
    return given and _FACTORY.sub(" = ...", given), returned and short_types(returned)


def _skip_member(
    app: Any, what: str, name: str, obj: object, skip: bool, options: Any
) -> bool | None:
    """Fields of a named tuple are in its signature; all that Python says of them is a number."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def _plain_code(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A word between backticks that is none of our names stays code."""
    return content if node["reftype"] == "obj" else None


def outside_links(text: str, folder: Path) -> str:
    """Links that leave the folder of a page: to the page of a file or a folder, where there is one.

    Another file can be downloaded from the page, another folder is only named.

    >>> outside_links("[the law](../src/rotary/spec.py), [examples](../examples)", Path("docs"))
    '{download}`the law <../src/rotary/spec.py>`, examples'
    >>> outside_links("[E4](../experiments/e4_base)", Path("docs"))
    '[E4](experiments/e4_base.md)'
    """
    docs = Path(__file__).resolve().parent

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        there = (folder / target).resolve()
        path = Path(os.path.relpath(there, docs.parent))
        for page in (there, docs / f"{path}.md", docs / path / "index.md"):
            if page.is_relative_to(docs) and page.is_file():
                return f"[{words}]({os.path.relpath(page, folder.resolve())}{anchor})"
        is_file = bool(there.suffix) or there.is_file()
        return f"{{download}}`{words} <{target}>`" if is_file else words

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]*)((?:#[^)]*)?)\)", link, text)


def included(text: str, folder: Path) -> str:
    """The text with each included page of another folder in place, whose links lead from there."""

    def page(match: re.Match[str]) -> str:
        path = folder / match[1]
        return re.sub(
            r"\]\((?!https?:|#|/)",
            f"]({Path(match[1]).parent.as_posix()}/",
            path.read_text(encoding="utf-8"),
        )

    return re.sub(r"^```\{include\} (\S+)\n```$", page, text, flags=re.MULTILINE)


def day_and_night(text: str, folder: Path) -> str:
    """Each picture that has a twin for dark pages with it; a style shows the one that fits.

    >>> day_and_night("![A walk](pictures/walk.png)", Path("docs"))
    '![A walk](pictures/walk.png){.only-light}![A walk](pictures/walk-dark.png){.only-dark}'
    """

    def pair(match: re.Match[str]) -> str:
        words, name = match.groups()
        if not (folder / f"{name}-dark.png").exists():
            return match[0]
        return f"![{words}]({name}.png){{.only-light}}![{words}]({name}-dark.png){{.only-dark}}"

    return re.sub(r"!\[([^\]]*)\]\(([^)\s]+)\.png\)", pair, text)


def _process_source(app: Any, name: str, content: list[str]) -> None:
    folder = (Path(app.srcdir) / name).parent
    content[0] = day_and_night(included(content[0], folder), folder)
    content[0] = outside_links(content[0], folder)
    content[0] = _LAST_BLANK.sub(r"\1\n```", content[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process_docstring)
    app.connect("autodoc-process-signature", _process_signature)
    app.connect("autodoc-skip-member", _skip_member)
    app.connect("missing-reference", _plain_code)
    app.connect("source-read", _process_source)
