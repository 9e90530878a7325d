"""The versions that pyproject.toml promises, and the table of those that were run.

`nox` writes the results of each session to build/matrix (noxfile.py), and then
`python -m tools.versions` prints the table of docs/results/versions.md.
"""

import importlib.metadata
import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

RESULTS = Path(__file__).parent.parent / "build" / "matrix"
LIBRARIES = ("numpy", "numba", "torch", "jax", "transformers")


def floor(requirement: str) -> str:
    """The oldest version that a requirement allows.

    >>> floor("numba>=0.60")
    'numba==0.60'
    """
    return requirement.replace(">=", "==")


def pythons(project: Mapping[str, Any]) -> list[str]:
    """The versions of Python that the classifiers of a project name, oldest first.

    >>> pythons({"classifiers": ["Programming Language :: Python :: 3.10", "Typing :: Typed"]})
    ['3.10']
    """
    prefix = "Programming Language :: Python :: 3."
    names = [name.rpartition(" ")[2] for name in project["classifiers"] if name.startswith(prefix)]
    return sorted(names, key=lambda name: int(name.partition(".")[2]))


def installed() -> dict[str, str]:
    """The versions in this environment; a library that is not there is left out."""
    known = {d.name: d.version for d in importlib.metadata.distributions()}
    versions = {name: known[name] for name in LIBRARIES if name in known}
    return {"date": str(date.today()), "python": platform.python_version(), **versions}


def counts(report: Path) -> dict[str, int]:
    """How many tests of a JUnit report passed, were skipped and failed."""
    totals = dict.fromkeys(("tests", "skipped", "failures", "errors"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.attrib[name])
    failed = totals["failures"] + totals["errors"]
    passed = totals["tests"] - totals["skipped"] - failed
    return {"passed": passed, "skipped": totals["skipped"], "failed": failed}


def table(folder: Path) -> str:
    """The sessions whose results are in a folder, as a Markdown table."""
    heads = ["session", "date", "Python", *LIBRARIES, "passed", "skipped", "failed"]
    lines: list[list[object]] = [heads, ["---"] * len(heads)]
    for path in sorted(folder.glob("*.json")):
        known = json.loads(path.read_text())
        versions = [known.get(name, "") for name in ("date", "python", *LIBRARIES)]
        totals = Counter(dict.fromkeys(("passed", "skipped", "failed"), 0))
        for report in folder.glob(f"{path.stem}.*xml"):
            totals.update(counts(report))
        lines.append([path.stem, *versions, *totals.values()])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main(arguments: list[str]) -> None:
    """Print the table; with the name of a session, keep the versions that it has."""
    if arguments:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{arguments[0]}.json").write_text(json.dumps(installed()))
        print(*(f"{name} {version}" for name, version in installed().items()), sep=", ")
    else:
        print(table(RESULTS))


if __name__ == "__main__":
    main(sys.argv[1:])
