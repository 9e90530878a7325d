"""Write the results of the experiments again, from their rows: tables in the READMEs, and figures.

`python -m tools.make_experiments [NAME ...]` trains nothing; without names all are written.
"""

import argparse
import contextlib
import importlib
import io
import re
from pathlib import Path

from experiments.lab import results

FOLDER = Path(results.__file__).parents[1]
NAMES = sorted(path.parent.name for path in FOLDER.glob("e*/results.jsonl"))


def write(name: str) -> None:
    """The table and the figure of one experiment."""
    module = importlib.import_module(f"experiments.{name}.run")
    readme = (module.FOLDER / "README.md").read_text()
    (picture,) = re.findall(r"!\[[^\]]*\]\((\w+\.png)\)", readme)
    with contextlib.redirect_stdout(io.StringIO()):
        results.report(module.FOLDER, module.table, module.figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    for name in parser.parse_args().names or NAMES:
        write(name)
        print(f"{name}: table and figure")
