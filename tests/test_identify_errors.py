"""What cannot be identified or loaded is an error of one line."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from rotary import Rotary, blackbox
from rotary.blackbox.faults import AMPLITUDES, EXPONENTS
from rotary.blackbox.lengths import ENDS
from rotary.blackbox.probe import ROWS
from rotary.identify import identify, load


def raises(x, positions):
    raise KeyError("no such thing")


def wrong(result):
    return lambda x, positions: result(x)


ERRORS = [
    (raises, {}, "KeyError: 'no such thing'"),
    (wrong(lambda x: x * np.nan), {}, "not finite"),
    (wrong(lambda x: x[..., :3]), {}, r"shape \(1, 2, 5, 3\) for x of shape \(1, 2, 5, 8\)"),
    (wrong(lambda x: None), {}, r"returned shape \(\)"),
    (wrong(lambda x: "words"), {}, "could not convert string"),
    (wrong(lambda x: (x, x)), {}, r"shape \(2, 1, 2, 5, 8\)"),
    (lambda q, k: q, {}, r"takes \(q, k\), which is neither form; say form="),
    (lambda x, offset, scale: x, {}, "neither form"),
    (lambda *args: args, {}, "neither form"),
    (lambda q, k, sin, cos: (q, k), {}, "neither form"),
    (lambda q, k, cos, sin: q, {}, r"must return \(q, k\), got ndarray"),
    (wrong(abs), {"form": "table"}, "form must be one of"),
    (wrong(abs), {"dtype": "int8"}, "dtype must be one of"),
    (wrong(abs), {"library": "jax"}, "library must be one of"),
    (wrong(abs), {"seq_dim": 1}, "seq_dim must be one of"),
    (wrong(abs), {"num_axes": 0}, "num_axes must be a whole number >= 1"),
    (wrong(abs), {"max_position": 2.0}, "max_position must be a whole number"),
    (wrong(abs), {"rotary_dim": 4}, "it is measured"),
    (wrong(abs), {"rotary_dim": 5}, "rotary_dim must be even"),
    (lambda q, k, cos, sin: (q, k), {"num_axes": 2}, "tables have no axes"),
    ((wrong(abs),) * 3, {}, "a callable, or two"),
    (3, {}, "a callable, or two"),
    ((wrong(abs), lambda q, k, cos, sin: q), {}, "two callables must both be"),
    ((lambda q, k, cos, sin: (q, k),) * 2, {}, "two callables must both be"),
    (wrong(abs), {"dtype": "bfloat16", "library": "numpy"}, "no way to call it works"),
]


@pytest.mark.parametrize(("fn", "options", "said"), ERRORS, ids=range(len(ERRORS)))
def test_what_cannot_be_asked_is_an_error_of_one_line(fn, options, said):
    with pytest.raises(ValueError, match=said) as caught:
        identify(fn, 8, **options)
    assert "\n" not in str(caught.value)


def test_load_finds_functions_in_modules_and_files(tmp_path, monkeypatch):
    assert load("math:sqrt") is math.sqrt
    assert load("rotary:Rotary.from_dict")({"head_dim": 4}) == Rotary(head_dim=4)
    (tmp_path / "neighbour.py").write_text("scale = 2")
    (tmp_path / "mine.py").write_text("import neighbour\ndef f(x): return neighbour.scale * x\n")
    assert load(f"{tmp_path / 'mine.py'}:f")(3) == 6
    monkeypatch.chdir(tmp_path)
    assert load("mine:f")(4) == 8


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "must be module:function"),
        (":f", "must be module:function"),
        ("m:", "must be module:function"),
        ("no_such_module_here:f", "No module named"),
        ("math:no_such_function", "no attribute 'no_such_function'"),
        ("math:pi", "not callable: float"),
        ("nowhere.py:f", "FileNotFoundError: no file nowhere.py"),
        ("broken.py:f", "ZeroDivisionError: division by zero"),
        ("bad.py:f", "SyntaxError"),
    ],
)
def test_load_says_in_one_line_what_is_wrong(target, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=said) as caught:
        load(target)
    assert "\n" not in str(caught.value)


EXITS = "import sys\ndef doctor(): sys.exit(0)\ndef identify(x, positions): sys.exit(0)\n"


@pytest.mark.parametrize("text", ["raise SystemExit(0)\n", EXITS], ids=["file", "function"])
@pytest.mark.parametrize(
    "command", [("identify", "--head-dim", "8", "--check"), ("doctor",)], ids=["identify", "doctor"]
)
def test_a_file_that_ends_the_process_is_an_error(command, text, tmp_path, main):
    """A script without a guard, or argparse in it: the check ended with 0, and tested nothing."""
    (tmp_path / "script.py").write_text(text)
    name, *options = command
    done = main(name, f"{tmp_path / 'script.py'}:{name}", *options)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert "SystemExit: 0" in done.err
    assert done.err.count("\n") == 1


def test_the_page_lists_every_code_of_a_finding_and_no_other():
    folder = Path(blackbox.__file__).parent
    sources = [*folder.glob("*.py"), folder.parent / "identify.py"]
    text = "".join(path.read_text() for path in sources)
    codes = set(re.findall(r'(?:Finding\(\s*|add_if\([^"]*)"(\w+)"', text))
    codes |= {entry[0] for entry in (*ENDS, *AMPLITUDES, *EXPONENTS)}
    codes |= set(ROWS)
    assert {"mixes_heads", "refuses_batch", "offset", "q_k_differ"} <= codes
    page = (Path(__file__).parents[1] / "docs" / "identify.md").read_text()
    table = page[page.index("| finding |") : page.index("## What can")]
    listed = set(re.findall(r"`(\w+)`", table))
    kinds = ("positions", "frequencies", "angles", "tables")
    codes |= {f"{name}_{kind}" for name in ("bfloat16", "float16") for kind in kinds}
    codes |= {"float32_angles", "float32_running_product"}
    assert codes <= listed
    assert {name for name in listed - codes if "_" in name} == set()
    assert "docs/identify.md" in identify.__doc__
