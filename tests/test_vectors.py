"""Golden vectors: the format, the numbers in it, and a program in C that reads them."""

import json
import resource
import shutil
import subprocess
from pathlib import Path

import mpmath
import numpy as np
import pytest
from command import document, in_process

import rotary
from rotary import Rotary
from rotary.testing import to_json, vectors

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")
C_PROGRAM = ROOT / "examples" / "check_vectors.c"
SKIPPED = "1 skipped (several position axes, or no rotation)\n"


@pytest.fixture
def main(monkeypatch, capsys):
    return in_process(monkeypatch, capsys)


def array(entry):
    """The numbers of an entry, from their bits."""
    digits = 16 if entry["type"] == "float64" else 8
    bits = np.array([int(word, 16) for word in entry["bits"].split()], f"u{digits // 2}")
    assert all(len(word) == digits for word in entry["bits"].split())
    return bits.view(entry["type"]).reshape(entry["shape"])


def positions_of(case):
    entry = case["positions"]
    return np.array(entry["values"], entry["type"]).reshape(entry["shape"])


def turned(x, case):
    """x (heads, seq, head_dim) rotated in float32 by what the file says, as a reader would."""
    cos, sin, y = array(case["cos"]), array(case["sin"]), x.copy()
    for pair, (read, written) in enumerate(zip(case["pairs"], case["written_pairs"], strict=True)):
        u, v = x[..., read[0]], x[..., read[1]]
        y[..., written[0]] = u * cos[:, pair] - v * sin[:, pair]
        y[..., written[1]] = v * cos[:, pair] + u * sin[:, pair]
    return y


# --- the file ---


def test_a_config_gives_a_file_with_one_case(main, tmp_path):
    target = tmp_path / "vectors.json"
    done = main("vectors", LLAMA, "-o", str(target))
    assert (done.code, done.out, done.err) == (0, "", "")
    found = json.loads(target.read_text())
    assert (found["format"], found["version"], len(found["cases"])) == ("rotary-vectors", 1, 1)
    (case,) = found["cases"]
    assert Rotary.from_dict(case["spec"]) == rotary.from_hf_config(LLAMA)
    assert (case["layer_type"], case["seq_len"], case["head_dim"]) == (None, None, 128)
    assert list(case) == [
        *("layer_type", "spec", "seq_len", "head_dim", "num_axes", "attention_factor"),
        *("tolerance", "pairs", "written_pairs", "inv_freq", "positions", "cos", "sin"),
        *("q", "k", "q_rotated", "k_rotated"),
    ]
    assert case["q"]["shape"] == [2, 13, 128]
    assert case["k_rotated"]["shape"] == [1, 13, 128]
    assert target.read_text() == main("vectors", LLAMA).out  # the same bits again


def test_a_case_for_each_layer_type(main):
    found = document(main("vectors", str(CONFIGS / "gemma-3-4b.json")))
    assert [case["layer_type"] for case in found["cases"]] == [
        "full_attention",
        "sliding_attention",
    ]
    only = document(main("vectors", str(CONFIGS / "gemma-3-4b.json"), "--layer-type",
                         "full_attention"))  # fmt: skip
    assert only["cases"] == found["cases"][:1]


def test_a_layer_type_that_rotates_nothing_is_said(main, program, tmp_path):
    path = tmp_path / "config.json"
    nested = {"full": {"rope_theta": 1e6}, "none": None}
    path.write_text(json.dumps({"head_dim": 64, "rope_parameters": nested}))
    done = main("vectors", str(path))
    first, second = document(done)["cases"]
    assert first["spec"]["base"] == 1e6
    assert second == {"layer_type": "none", "spec": None}
    path.write_text(done.out)
    assert told(program, path) == (0, f"ok: 1 case, {SKIPPED}")


def test_two_cases_where_frequencies_depend_on_the_length(main):
    found = document(main("vectors", str(CONFIGS / "phi-3.5-mini.json")))
    short, long = found["cases"]
    assert (short["seq_len"], long["seq_len"]) == (4096, 8192)
    assert max(short["positions"]["values"]) == 4095
    assert max(long["positions"]["values"]) == 8191
    assert (array(short["inv_freq"]) != array(long["inv_freq"])).any()


def test_a_full_disk_leaves_the_old_file(main, tmp_path):
    """It was cut to the bytes that the disk had room for."""
    target, link = tmp_path / "vectors.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # of any file; EFBIG beyond
    try:
        done = main("vectors", LLAMA, "-o", str(link))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (done.code, done.err) == (1, f"error: {link}: File too large\n")
    assert target.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [link, target]
    assert main("vectors", LLAMA, "-o", str(link)).code == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["format"] == "rotary-vectors"
    assert main("vectors", LLAMA, "-o", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


def test_a_file_that_cannot_be_written_is_one_line(main, tmp_path):
    done = main("vectors", LLAMA, "-o", str(tmp_path / "no" / "vectors.json"))
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert main("vectors", LLAMA, "-o", str(tmp_path)).code == 1


def test_what_is_no_spec_is_refused():
    with pytest.raises(ValueError, match="at least one spec"):
        vectors({})
    for wrong in (5, [Rotary(head_dim=4)], {"full_attention": {"head_dim": 4}}):
        with pytest.raises(TypeError, match=r"specs must be a Rotary, or .*; got ") as error:
            vectors(wrong)
        assert "\n" not in str(error.value)


# --- the numbers ---

SPECS = {
    "plain": Rotary(head_dim=8),
    "partial": Rotary(head_dim=16, rotary_dim=8, start=4, layout="interleaved"),
    "mixed": Rotary(head_dim=8, layout="interleaved", out_layout="half", sign=-1),
    "axes": Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 0)),
    "yarn": rotary.from_hf_config(CONFIGS / "gpt-oss-20b.json"),
    "longrope": rotary.from_hf_config(CONFIGS / "phi-3.5-mini.json"),
    "qwen3-vl": rotary.from_hf_config(CONFIGS / "qwen3-vl-8b.json"),
}
CASES = [(name, case) for name, spec in SPECS.items()
         for case in json.loads(to_json(vectors(spec)))["cases"]]  # fmt: skip


@pytest.mark.parametrize(("name", "case"), CASES)
def test_decimals_have_the_bits_beside_them(name, case):
    for entry in ("inv_freq", "cos", "sin", "q", "k", "q_rotated", "k_rotated"):
        bits = array(case[entry])
        decimals = np.array(case[entry]["values"]).astype(case[entry]["type"])
        np.testing.assert_array_equal(decimals.view("u4"), bits.ravel().view("u4"))
    for entry in ("q", "k"):
        assert set(case[entry]["values"]) <= {n / 8 for n in range(-8, 9)}
        assert len(set(case[entry]["values"])) == 17


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_rotation_that_the_file_describes_is_that_of_the_library(name, case):
    spec, positions = Rotary.from_dict(case["spec"]), positions_of(case)
    for which in ("q", "k"):
        x = array(case[which])
        given = array(case[f"{which}_rotated"])
        ours = rotary.apply(spec, x[None], positions=positions, seq_dim=-2,
                            seq_len=case["seq_len"])[0]  # fmt: skip
        for result in (ours, turned(x, case)):
            assert np.abs(result - given).max() <= case["tolerance"]["rotated"]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_tables_are_those_of_50_digits(name, case):
    """Correctly rounded, but for one in a million that lies in the middle of two floats."""
    spec, positions = Rotary.from_dict(case["spec"]), positions_of(case)
    frequencies, factor = rotary.inv_freq(spec, case["seq_len"])
    np.testing.assert_array_equal(array(case["inv_freq"]), frequencies)
    assert case["attention_factor"] == factor
    axes = spec.axes or [0] * len(frequencies)
    rows = positions.reshape(len(positions), -1)
    with mpmath.workdps(50):
        for pair in sorted({0, 1, len(frequencies) // 2, len(frequencies) - 1}):
            for row, position in enumerate(rows[:, axes[pair]].tolist()):
                angle = spec.sign * position * mpmath.mpf(float(frequencies[pair]))
                for table, function in (("cos", mpmath.cos), ("sin", mpmath.sin)):
                    exact = float(function(angle) * mpmath.mpf(factor))
                    given = array(case[table])[row, pair]
                    assert abs(given - exact) <= np.spacing(np.float32(abs(exact))) * 0.500001


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_tolerances_hold_for_float32_angles_and_not_for_bfloat16_positions(name, case):
    spec, positions, limits = Rotary.from_dict(case["spec"]), positions_of(case), case["tolerance"]
    cos, sin = rotary.cos_sin(spec, positions, "float32", case["seq_len"])
    farthest = positions.reshape(len(positions), -1).max(axis=1)[:, None]
    allowed = limits["cos_sin"] + limits["cos_sin_per_position"] * farthest
    for table, mine in (("cos", cos), ("sin", sin)):
        assert (np.abs(mine - array(case[table])) <= allowed).all()
    exact = rotary.cos_sin(spec, positions, seq_len=case["seq_len"])
    assert np.abs(exact[0] - array(case["cos"])).max() <= limits["cos_sin"]
    rounded = np.where(positions == 257, 256, positions)
    wrong = rotary.cos_sin(spec, rounded, seq_len=case["seq_len"])[0]
    assert (np.abs(wrong - array(case["cos"])) > allowed).any()


# --- a program in C ---


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("c") / "check_vectors"
    command = [compiler, "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    subprocess.run([*command, C_PROGRAM, "-o", target, "-lm"], check=True, timeout=120)
    return target


def told(program, path):
    done = subprocess.run([program, path], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["llama-3.1-8b", "glm-4-9b-0414", "gemma-3-4b", "phi-3.5-mini"])
def test_a_program_in_c_checks_its_own_rotation(program, main, tmp_path, name):
    path = tmp_path / "vectors.json"
    assert main("vectors", str(CONFIGS / f"{name}.json"), "-o", str(path)).code == 0
    code, out = told(program, path)
    assert (code, out.splitlines()[-1].startswith("ok: ")) == (0, True), out


def test_the_program_in_c_fails_if_it_checked_nothing(program, main, tmp_path):
    """It said "ok: 1 case" of M-RoPE, which it skips."""
    path = tmp_path / "vectors.json"
    assert main("vectors", str(CONFIGS / "qwen2-vl-7b.json"), "-o", str(path)).code == 0
    assert told(program, path) == (2, f"nothing was checked: 0 cases, {SKIPPED}")


def test_the_program_in_c_sees_a_wrong_number(program, tmp_path):
    good = vectors(Rotary(head_dim=8))
    words = good["cases"][0]["q_rotated"]["bits"].split()
    good["cases"][0]["q_rotated"]["bits"] = " ".join([*words[:20], "3f000000", *words[21:]])
    path = tmp_path / "vectors.json"
    path.write_text(to_json(good))
    code, out = told(program, path)
    assert code == 1
    assert "case 0: q_rotated: number 20 " in out


def test_the_program_in_c_refuses_a_file_that_was_cut_short(program, tmp_path):
    whole, path = to_json(vectors(Rotary(head_dim=8))), tmp_path / "vectors.json"
    for size in (len(whole) // 4, len(whole) // 2, len(whole.rstrip()) - 1):
        path.write_text(whole[:size])
        assert told(program, path) == (2, ""), size


def test_the_program_in_c_sees_another_layout(program, tmp_path):
    """The tables are right, the pairs are not those that rotated q."""
    good = vectors(Rotary(head_dim=8))
    good["cases"][0]["pairs"] = [[0, 1], [2, 3], [4, 5], [6, 7]]
    path = tmp_path / "vectors.json"
    path.write_text(to_json(good))
    code, out = told(program, path)
    assert code == 1
    assert "q_rotated" in out
    assert "cos:" not in out
