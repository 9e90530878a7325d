"""What every benchmark shares: its command line, its gate, its tables, and where results go."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the docstring of a benchmark as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parsed(
    parser: argparse.ArgumentParser,
    quick: Mapping[str, Any],
    results: Path | None = None,
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """The options of a benchmark, with `quick` and `out` among them.

    quick    the defaults of a run with --quick, which writes nothing unless --out says where
    results  the folder that a whole run writes to by default; None: it only prints

    >>> sizes = parser(None)
    >>> sizes.set_defaults(seq=4096)
    >>> given = parsed(sizes, {"seq": 64}, RESULTS, ["--quick"])
    quick run: the sizes are too small for its times to be a result
    >>> given.seq, given.quick, given.out
    (64, True, None)
    """
    where = "" if results is None else f"; default {results.relative_to(Path(__file__).parents[1])}"
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: seconds, to see that all of it runs"
    )
    parser.add_argument("--out", type=Path, help=f"folder for the results{where}")
    parser.set_defaults(out=results)
    if parser.parse_known_args(arguments)[0].quick:
        print("quick run: the sizes are too small for its times to be a result")
        parser.set_defaults(**{"out": None, **quick})
    return parser.parse_args(arguments)


def add_table(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option --table, which is the path of results, or the folder that has them."""
    parser.add_argument(
        "--table", type=Path, nargs="?", const=RESULTS, metavar="JSON",
        help=f"print {what}; default: of the newest results",
    )  # fmt: skip


def newest(path: Path, kind: str = "") -> Path:
    """The file itself, or the newest DATE.json, or DATE-KIND.json, of a folder."""
    return max(path.glob(f"????-??-??{kind and f'-{kind}'}.json")) if path.is_dir() else path


def gate(errors: Iterable[tuple[str, float, float]], against: str) -> None:
    """Print that all results are right; exit with status 1 if one is not, before a time is taken.

    errors   (what, its error, the largest one allowed)
    against  what the results were compared with

    >>> gate([("apply", 1e-7, 1e-6)], "complex numbers in float64")
    gate passed: 1 results against complex numbers in float64
    """
    errors = list(errors)
    wrong = [f"{name}: {error:.2e} > {limit:.2e}" for name, error, limit in errors
             if not error <= limit]  # fmt: skip
    if wrong or not errors:
        sys.exit("\n".join(["gate failed, nothing is measured:", *(wrong or ["no results"])]))
    print(f"gate passed: {len(errors)} results against {against}")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    text = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]])


def machine(report: Mapping[str, Any]) -> str:
    """Versions and threads of a report, in one line.

    >>> machine({"versions": {"numpy": "2.4", "cpu": "a Xeon"}, "threads": 2})
    'numpy 2.4, cpu a Xeon; 2 threads'
    """
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    return f"{versions}; {report['threads']} threads"


def publish(out: Path | None, name: str, page: str, report: object) -> None:
    """Print a page; write it as NAME.md, and what it was made of as NAME.json, into a folder."""
    print(page)
    write(out, {f"{name}.md": page, f"{name}.json": json.dumps(report, indent=1) + "\n"})


def write(out: Path | None, files: Mapping[str, str]) -> None:
    """Write files, by name, into a folder; nothing without one."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text)
