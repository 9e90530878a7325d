"""Write requirements.lock: every package of `make test` with the hash of its file.

`python tools/make_lock.py`, with the Python that CI uses, 3.11 on Linux x86_64, after a change of
constraints.txt or of the dependencies in pyproject.toml. `make locked` installs from the file by
`pip install --require-hashes`, so a file that was exchanged on the way is refused.

torch is left out. On a machine without a GPU its wheel comes from an index of its own (2.13.0+cpu),
elsewhere from PyPI, where the same version needs packages of CUDA that the first does not: one list
cannot hold both. It is pinned in constraints.txt, and what both need is in the file.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
BUILD = ("hatchling", "editables")  # what an editable install of rotary itself needs
HEAD = """\
# Written by `python tools/make_lock.py`, for Python 3.11 on Linux x86_64.
# torch is not here: tools/make_lock.py says why
"""


def resolved() -> list[dict[str, object]]:
    """What pip would install, each with the file that it takes and its hash."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==\S+$", constraints, re.MULTILINE)
    command = [
        sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install",
        "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", "-",
        "-c", "constraints.txt", torch, *BUILD, "-e", ".[dev]",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return list(json.loads(done.stdout)["install"])


def lock(installs: list[dict[str, object]]) -> str:
    """The file, of pip's report.

    >>> made = {"metadata": {"name": "Rich", "version": "1.0"}, "download_info": {"archive_info":
    ...     {"hashes": {"sha256": "ab"}}}}
    >>> print(lock([made, {"metadata": {"name": "torch", "version": "2+cpu"}}]).splitlines()[-1])
    rich==1.0 --hash=sha256:ab
    """
    lines = []
    for each in installs:
        metadata = each["metadata"]
        name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        if name not in ("torch", "rotary"):
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={metadata['version']} --hash=sha256:{digest}")
    return HEAD + "".join(f"{line}\n" for line in sorted(lines))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"the lock is for Python 3.11, this is {sys.version.split()[0]}")
    LOCK.write_text(lock(resolved()), encoding="utf-8")
