"""Run programs with rotary switched on in them, and write down how far apart they are without it.

    python tests/peers/hosts.py [torchtitan lmcache sglang]    # all of them where none is named

Each in_NAME.py runs in an environment of its own, made from requirements/hosts/NAME.txt, with this
checkout on its path. It gives tables of rows; they go to docs/results/in_NAME.md, with the date.
"""

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROGRAMS = ("torchtitan", "lmcache", "sglang")


def write(out, program, version, about, tables):
    """What an in_NAME.py gives: {title: rows}, each row {column: value}."""
    result = {"program": program, "version": version, "about": about, "tables": tables}
    Path(out).write_text(json.dumps(result, indent=1))


def page(name, result):
    """The page of a result, as lines of Markdown."""
    yield f"# rotary in {result['program']}"
    yield ""
    yield result["about"]
    yield ""
    yield (f"Run on {date.today()} with {result['program']} {result['version']} on a CPU: "
           f"`python tests/peers/hosts.py {name}` does it again.")  # fmt: skip
    for title, rows in result["tables"].items():
        yield from ("", f"## {title}", "")
        yield f"| {' | '.join(rows[0])} |"
        yield f"|{' --- |' * len(rows[0])}"
        for row in rows:
            yield f"| {' | '.join(map(cell, row.values()))} |"


def cell(value):
    """A number with three digits, a truth as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(names):
    from run import OUT, environment

    OUT.mkdir(parents=True, exist_ok=True)
    for name in names or PROGRAMS:
        if name not in PROGRAMS:
            sys.exit(f"no program {name!r}; there are {', '.join(PROGRAMS)}")
        out = OUT / f"in_{name}.json"
        python = os.environ.get("HOST_PYTHON") or environment(f"hosts/{name}")
        paths = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
        subprocess.run(
            [python, "-W", "ignore", HERE / f"in_{name}.py", out],
            env=paths,
            check=True,
            timeout=3600,
        )
        lines = "\n".join(page(name, json.loads(out.read_text())))
        (ROOT / f"docs/results/in_{name}.md").write_text(f"{lines}\n")
        sys.stdout.write(f"{lines}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
