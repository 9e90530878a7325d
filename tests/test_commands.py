"""Every command of a page or a docstring that starts a program of this repository exists."""

import re
from pathlib import Path

import pytest
from programs import ran

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", ".ci/run")),
    *(path for folder in ("benchmarks", "docs", "examples", "experiments", "src", "tests")
      for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".md", ".py")),
]  # fmt: skip
COMMAND = re.compile(
    r"(?:-m ((?:benchmarks|experiments)(?:\.\w+)+)(?![\w.{])|python (tools/make_\w+\.py))"
)


def commands(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(module or script, options and names that belong to it) of every command in a text.

    In a table whose row begins with a command the whole row is about it.
    """
    found = []
    for line in text.splitlines():
        for match in COMMAND.finditer(line):
            module, script = match.groups()
            rest = line[match.end() :]
            if not line.startswith("| `"):
                rest = re.split("[`#,:]", rest)[0]
            words = re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", rest)
            words += re.findall(r"(?<= )([a-z][\w-]*)", rest) if script else []
            found.append((module or script, tuple(words)))
    return found


ALL = {path: commands(path.read_text()) for path in TEXTS if path != Path(__file__).resolve()}
PROGRAMS = sorted({program for found in ALL.values() for program, _ in found})


def test_commands_are_found_with_their_options():
    text = """`python -m benchmarks.run --table` and
    $ torchrun --nproc-per-node 2 -m experiments.e6_shift.run --quick    # two --processes
    python -m experiments.{name}.run; `python tools/make_results.py counts`.
    "Run `python -m benchmarks.gpu [--part prefill]`, python tools/make_pictures.py [NAME ...]
| `python -m benchmarks.scaling` | costs; `--measure` checks them, in 2-- |
    """
    assert commands(text) == [
        ("benchmarks.run", ("--table",)),
        ("experiments.e6_shift.run", ("--quick",)),
        ("tools/make_results.py", ("counts",)),
        ("benchmarks.gpu", ("--part",)),
        ("tools/make_pictures.py", ()),
        ("benchmarks.scaling", ("--measure",)),
    ]


def test_the_commands_of_the_main_pages_and_of_make_are_among_them():
    assert ("benchmarks.run", ()) in ALL[ROOT / "Makefile"]
    found = [*ALL[ROOT / "README.md"], *ALL[ROOT / "docs" / "numbers.md"]]
    assert {program for program, _ in found} >= {
        *("benchmarks.run", "benchmarks.patch", "tools/make_pictures.py"),
        "experiments.e6_shift.run",
    }


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_starts_and_knows_its_options(program, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    file = Path(program if "/" in program else f"{program.replace('.', '/')}.py")
    assert file.is_file(), f"{program} is named in {places(program)}"
    ran(program, "--help")
    usage = capsys.readouterr().out
    for path, found in ALL.items():
        for name, words in found:
            if name == program:
                missing = [word for word in words if not re.search(rf"(?<![\w-]){word}\b", usage)]
                assert not missing, f"{path.relative_to(ROOT)}: {program} knows no {missing}"


def places(program: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path, found in ALL.items()
            if program in dict(found)]  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("make_*.py")), ids=lambda p: p.name)
def test_help_of_a_script_that_writes_pages_writes_none(path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: pytest.fail("--help wrote a file"))
    ran(str(path), "--help")
    assert capsys.readouterr().out.startswith(f"usage: {path.name}")
