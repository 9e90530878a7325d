"""Builds and tries what is released, and uploads nothing: `make release`.

The wheel and the sdist are built into dist/ and checked: their metadata by twine, their files
against the repository, and the wheel by `tools/smoke.py` in two empty environments, with and
without Numba. Beside them goes a bill of materials (SBOM, CycloneDX): the packages that come with
the wheel, with versions and licences. `python -m tools.release` needs the packages build, twine and
cyclonedx-bom; `make release` installs them into an environment below build/.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "install")
BEFORE = ("pip", "setuptools")  # what an empty environment has
CORE_WITHOUT_NUMBA = ("numpy", "rich", "typer")


def run(*command: object, cwd: Path = ROOT) -> str:
    """What a command prints; SystemExit with all it said if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def version() -> str:
    """The version, from the one place where it is written."""
    text = (ROOT / "src" / "rotary" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def tracked(*folders: str) -> set[str]:
    """The files of the repository, by their paths in it."""
    return {*run("git", "ls-files", "-z", *folders).split("\0")} - {""}


def difference(what: str, names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """A line for each file that is missing or too many."""
    names, wanted = {*names}, {*wanted}
    return [f"{what}: {name} is missing" for name in sorted(wanted - names)] + [
        f"{what}: {name} does not belong there" for name in sorted(names - wanted)
    ]


def wheel_files(files: Iterable[str], number: str) -> set[str]:
    """What a wheel must hold, of the tracked `files`: the package, and what describes it."""
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    package = {name.removeprefix("src/") for name in files if name.startswith("src/rotary/")}
    return package | {f"rotary-{number}.dist-info/{name}" for name in about}


def metadata_problems(text: str, number: str, changes: str) -> list[str]:
    """What the metadata of a wheel and the changelog lack for a release `number`."""
    fields = Parser().parsestr(text)
    problems = []
    if fields["Version"] != number:
        problems.append(f"METADATA: version {fields['Version']}, the package says {number}")
    heading = re.search(rf"^## {re.escape(number)}, (.+)$", changes, re.MULTILINE)
    if not heading:
        problems.append(f"CHANGELOG.md: no section '## {number}, DATE'")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        problems.append(f"CHANGELOG.md: '{heading[0]}' has no date YYYY-MM-DD")
    if not fields.get_all("Project-URL"):
        problems.append("pyproject.toml: no [project.urls], so links of the README lead nowhere")
    return problems


def build() -> tuple[Path, Path]:
    """The wheel, which is built from the sdist, and the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    print(
        run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, sdist), end=""
    )
    return wheel, sdist


def content_problems(wheel: Path, sdist: Path, number: str) -> list[str]:
    """Where the files of the two archives differ from those of the repository."""
    files = tracked()
    inside = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    return difference(wheel.name, inside, wheel_files(files, number)) + difference(
        sdist.name, names, files | {"PKG-INFO"}
    )


def try_wheel(wheel: Path, light: bool) -> None:
    """Install the wheel in an empty environment, use it there, and say how large it is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        shipped = {path.name for path in site.iterdir()}  # pip and its files
        run(python, *PIP, *(("--no-deps",) if light else ()), wheel)
        if light:
            run(python, *PIP, *CORE_WITHOUT_NUMBA)
        sizes = {path.name: _bytes(path) for path in site.iterdir() if path.name not in shipped}
        if not light:
            command = sys.executable, "-m", "cyclonedx_py", "environment", "--of", "JSON", python
            bill = DIST / f"rotary-{version()}.cdx.json"
            bill.write_text(bill_of_materials(run(*command)), encoding="utf-8")
        smoke = shutil.copy(ROOT / "tools" / "smoke.py", folder)
        print(run(python, "-I", smoke, *(("--light",) if light else ()), cwd=folder), end="")
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:6]
    parts = ", ".join(f"{name} {sizes[name] / 1e6:.0f}" for name in largest)
    print(f"  {'without' if light else 'with'} Numba {sum(sizes.values()) / 1e6:.0f} MB: {parts}")


def bill_of_materials(text: str) -> str:
    """What cyclonedx_py writes of an environment, without pip, which is not installed with us, and
    without paths of this machine."""
    bill = json.loads(text[text.index("{") :])
    bill["components"] = [each for each in bill["components"] if each["name"] not in BEFORE]
    kept = {each["bom-ref"] for each in bill["components"]}
    bill["dependencies"] = [each for each in bill["dependencies"] if each["ref"] in kept]
    for each in bill["components"]:
        links = each.pop("externalReferences", [])
        each["externalReferences"] = [link for link in links if "file:" not in link["url"]]
    return json.dumps(bill, indent=1) + "\n"


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--final", action="store_true", help="fail too for what an upload lacks")
    final = parser.parse_args().final
    number = version()
    wheel, sdist = build()
    if problems := content_problems(wheel, sdist, number):
        sys.exit("\n".join(problems))
    for path in (wheel, sdist):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    for light in (False, True):
        try_wheel(wheel, light)
    text = zipfile.ZipFile(wheel).read(f"rotary-{number}.dist-info/METADATA").decode()
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    missing = metadata_problems(text, number, changes)
    if run("git", "status", "--porcelain"):
        missing.append("git status: changes that are not committed")
    for problem in missing:
        print(f"before an upload: {problem}")
    if final and missing:
        sys.exit(1)


if __name__ == "__main__":
    main()
