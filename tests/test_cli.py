"""The command, run as a user runs it, and in-process where that says the same."""

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import START, Done, assert_refused, document, environment, kept, run

import rotary
from rotary import bench, demo, doctor, from_hf_config
from rotary.cli.terminal import print_table
from rotary.demo import Check

LLAMA = str(files("rotary") / "configs" / "llama-3.1-8b.json")
COMMANDS = (
    *("demo", "inspect", "freqs", "bench", "doctor", "identify", "diff"),
    *("decay", "reach", "plan", "explore", "vectors", "export-kernel"),
)
ANSI = "\x1b"


# --- usage ---


def test_the_console_script_without_arguments_prints_help(main):
    script = Path(sys.executable).parent / "rotary"
    done = subprocess.run([script], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S", done.stdout, re.MULTILINE)
    assert main("--help").out == main().out


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["inspct"], "inspect"),
        (["frqs", LLAMA], "freqs"),
        (["freqs", LLAMA, "--jsn"], "--json"),
        (["inspect", LLAMA, "--layer-typ", "x"], "--layer-type"),
    ],
)
def test_a_slip_of_the_finger_is_status_2_and_a_suggestion(main, arguments, suggestion):
    done = main(*arguments)
    assert (done.code, done.out) == (2, "")
    assert re.search(rf"(?i)(did you mean|Possible options).*{suggestion}", done.err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    {
        "inspect": "Missing argument 'CONFIG'",
        "convert x y": "Missing option '--from'. Choose from: half, interleaved",
        "plan --context 128k": "Invalid value for '--context': .* valid integer",
        "plan --context 8 --base x": "Invalid value for '--base': .* valid (number|float)",
        "freqs x --seq-len -1": "Invalid value for '--seq-len': .* 1",
        "bench --rounds 0": "Invalid value for '--rounds': .* 1",
        f"bench --seq {2**62}": "Invalid value for '--seq': .*",
        "plan": "Missing option '--context'",
        "reach": "Missing argument 'CONFIG'",
        "bench --layout neox": "Invalid value for '--layout': 'neox' is not one of 'half', "
        "'interleaved'",
        "bench --lay half": r"No such option: --lay \(Possible options: --layout\)",
        "freqs x more": r"Got unexpected extra argument(\(s\))? \(more\)",
        "convert x --from half --to half": "Invalid value: TARGET is needed, a new folder, "
        "unless --dry-run is given",
    }.items(),
    ids=str,
)
def test_wrong_usage_is_one_line_and_status_2(main, arguments, said):
    command = arguments.split()
    done = main(*command)
    assert (done.code, done.out) == (2, "")
    see = rf"\(see [^\n]*rotary {command[0]} --help\)\n"
    assert re.fullmatch(f"error: {said} {see}", done.err), done.err


END = "--- end ---\n"
# each argument is a command, whose words stand on lines of their own or, if there are none, apart
EACH = f"""
import sys
for sys.argv[1:] in [each.splitlines() if "\\n" in each else each.split() for each in sys.argv[1:]]:
    try:
        from rotary.cli import main
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    print(end={END!r})
"""
HEAVY = ("torch", "numba", "transformers")
PROBE = (
    EACH
    + """
print([name for name in ("torch", "numba", "transformers", "rich.table", "numpy")
       if name in sys.modules], file=sys.stderr)
"""
)


def test_help_imports_nothing_heavy():
    """Of the command and of each of its commands, one after the other in one process."""
    done = run("--help", *(f"{command} --help" for command in COMMANDS), code=PROBE)
    assert len(re.findall("^Usage: ", done.out, re.MULTILINE)) == 1 + len(COMMANDS)
    loaded = done.err.splitlines()[-1]
    for name in HEAVY:
        assert name not in loaded


# --- inspect and freqs ---


def test_inspect_says_what_the_config_has(main):
    done = main("inspect", LLAMA)
    assert (done.code, done.err) == (0, "")
    assert ANSI not in done.out
    for row in (r"head_dim\s+128", r"rotary_dim\s+128", r"base\s+500000", r"layout\s+half",
                r"schedule\s+llama3", r"factor\s+8\.0", r"original_max_position_embeddings\s+8192",
                r"attention factor\s+1, on cos"):  # fmt: skip
        assert re.search(row, done.out), row
    report = document(main("inspect", LLAMA, "--json"))
    assert rotary.Rotary.from_dict(report["spec"]) == from_hf_config(LLAMA)
    assert report["shortest_wavelength"] == pytest.approx(2 * np.pi, rel=1e-15)
    slowest = 500_000 ** (-126 / 128) / 8
    assert report["longest_wavelength"] == pytest.approx(2 * np.pi / slowest, rel=1e-14)
    assert (report["attention_factor"], report["pairs_that_stand_still"]) == (1.0, 0)
    assert report["depends_on_length"] is False


def test_a_config_of_diffusers_is_read(main, tmp_path):
    config = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = document(main("inspect", str(tmp_path), "--json"))
    assert report["spec"]["params"] == {"widths": [44, 42, 42]}
    pairs = document(main("freqs", str(tmp_path), "--json"))["pairs"]
    assert [pair["axis"] for pair in pairs] == [0] * 22 + [1] * 21 + [2] * 21
    assert pairs[23]["inv_freq"] == pytest.approx(1e4 ** (-2 / 42), rel=1e-14)
    for refused in (("freqs", "--part", "vision_config"), ("freqs", "--layer-type", "full"),
                    ("diff",), ("reach",)):  # fmt: skip
        done = main(refused[0], str(tmp_path), *refused[1:])
        assert_refused(done, "a config of diffusers, of 'WanTransformer3DModel'")


def test_freqs_prints_every_pair(main):
    spec = from_hf_config(LLAMA)
    wanted = rotary.inv_freq(spec)[0]
    report = document(main("freqs", LLAMA, "--json"))
    assert report["attention_factor"] == 1.0
    assert [pair["pair"] for pair in report["pairs"]] == list(range(64))
    assert [pair["inv_freq"] for pair in report["pairs"]] == wanted.tolist()
    np.testing.assert_allclose([p["wavelength"] for p in report["pairs"]], 2 * np.pi / wanted)
    done = main("freqs", LLAMA)
    assert (done.code, done.err) == (0, "")
    rows = re.findall(r"^ *(\d+) +(\S+) +(\S+) *$", done.out, re.MULTILINE)
    assert [int(pair) for pair, *_ in rows] == list(range(64))
    np.testing.assert_allclose([float(value) for _, value, _ in rows], wanted, rtol=1e-11)


def test_pairs_that_stand_still_and_rows_that_grow(main, tmp_path):
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 16, "rope_parameters": rope}))
    assert document(main("inspect", str(tmp_path), "--json"))["pairs_that_stand_still"] == 6
    assert re.search(r"stand still\s+6 pairs", main("inspect", str(tmp_path)).out)
    pairs = document(main("freqs", str(tmp_path), "--json"))["pairs"]
    assert [pair["wavelength"] is None for pair in pairs] == [False] * 2 + [True] * 6
    assert main("freqs", str(tmp_path)).out.count("stands still") == 6
    path = tmp_path / "dynamic.json"
    rope = {"rope_type": "dynamic", "factor": 4.0}
    data = {"head_dim": 16, "max_position_embeddings": 64, "rope_scaling": rope}
    path.write_text(json.dumps(data))
    assert re.search(r"depends on\s+the length", main("inspect", str(path)).out)
    assert "pass --seq-len" in main("freqs", str(path)).err
    assert main("freqs", str(path), "--seq-len", "640").err == ""
    for length in (64, 640):
        pairs = document(main("freqs", str(path), "--seq-len", str(length), "--json"))["pairs"]
        wanted = rotary.inv_freq(from_hf_config(path), length)[0]
        assert [pair["inv_freq"] for pair in pairs] == wanted.tolist()


def test_the_layer_type_is_passed_on(main, tmp_path):
    path = tmp_path / "config.json"
    nested = {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}, "none": None}
    path.write_text(json.dumps({"head_dim": 64, "rope_parameters": nested}))
    assert document(main("inspect", str(path), "--layer-type", "full", "--json"))["spec"][
        "base"] == 1e6  # fmt: skip
    assert_refused(main("inspect", str(path), "--layer-type", "none"), "'none' has no rotation")
    assert_refused(main("freqs", str(path)), "pass --layer-type, one of full, sliding, none")


BAD = {
    "no.json": (None, "no.json"),
    "text.json": ("head_dim: 64", "is not JSON in UTF-8"),
    "model.json": ('{"model_type": "lama"}', "did you mean 'llama'"),
    "type.json": ('{"head_dim": 64, "rope_scaling": {"type": "yarm"}}', "did you mean 'yarn'"),
    "head.json": ('{"head_dim": 63}', "63"),
    "list.json": ('{"model_type": ["llama"]}', "model_type"),
    "words.json": ('{"head_dim": "64"}', "head_dim"),
}


@pytest.mark.parametrize("command", ["inspect", "freqs"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_is_one_line_and_status_1(main, command, name, tmp_path):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    assert_refused(main(command, str(tmp_path / name)), message)
    assert_refused(main(command, str(tmp_path / name), "--json"), message)


def test_a_bad_config_in_a_process_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text('{"head_dim": 64, "rope_theta": 0}')
    assert_refused(run("inspect", str(tmp_path)), "rope_theta must be finite and >= 1, got 0")


# --- the terminal ---


@pytest.mark.parametrize("command", ["inspect", "freqs", "diff"])
def test_a_warning_of_a_config_is_one_line(command, tmp_path):
    """It was a path and a line of our code, with the warning between them."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "head_dim": 8, "rope_theta": 1}))
    done = run(command, str(path), PYTHONWARNINGS="")
    assert done.code == 0
    assert done.err == "warning: base 1 gives every pair the same frequency, 1 rad per token\n"


def test_markup_in_a_path_is_printed_as_it_is(main, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = "[red]x[/red].json"
    (tmp_path / name).mkdir(parents=True)
    data = '{"head_dim": 64, "model_type": "[bold]m[/bold]"}'
    (tmp_path / name / "config.json").write_text('{"head_dim": 64}')
    (tmp_path / "bad.json").write_text(data)
    for command in ("inspect", "freqs"):
        assert name in main(command, name).out
    assert_refused(main("inspect", "bad.json"), "'[bold]m[/bold]'")
    assert_refused(main("inspect", "[/nothing].json"), "[/nothing].json")


def test_markup_in_what_is_found_is_printed_as_it_is(main, monkeypatch):
    findings = [doctor.Finding("[b]cache[/b]", "/home/[red]x", "see [/nothing]")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    shown = main("doctor")
    for part in findings[0]:
        assert part in shown.out


@pytest.mark.skipif(sys.platform == "win32", reason="names are bytes on Unix alone")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_file_name_works(tmp_path, encoding):
    names = [b"\xff.json", "köpfe 64.json".encode(), b"a\x1b[31mb.json"]
    for name in names:
        with open(os.fsencode(tmp_path) + b"/" + name, "w") as file:
            file.write('{"head_dim": 64}')
    commands = [command for shown in map(os.fsdecode, names)
                for command in (f"inspect\n{shown}", f"freqs\n{shown}\n--json")]  # fmt: skip
    done = run(*commands, code=EACH, cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert (done.code, done.err) == (0, "")
    *printed, _ = done.out.split(END)
    for text, report in zip(printed[::2], printed[1::2], strict=True):
        assert ANSI not in text
        assert ".json" in text
        assert document(Done(0, report, ""))
    assert len(printed) == 2 * len(names)


def test_a_narrow_terminal_loses_nothing(main, monkeypatch, tmp_path):
    def of_width(columns, command):
        monkeypatch.setenv("COLUMNS", columns)
        return main(command, "config.json").out

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(Path(LLAMA).read_text())
    for command in ("inspect", "freqs"):
        wide, narrow = of_width("200", command), of_width("20", command)
        assert max(map(len, narrow.splitlines())) <= 20
        joined = "".join(narrow.split())  # each row is a list, and names its columns
        assert [word for word in wide.split() if word not in joined] == []


@pytest.mark.parametrize("command", [("diff",), ("plan", "--context", "1024", "--from"),
                                     ("reach",), ("inspect",), ("freqs",)])  # fmt: skip
def test_no_word_is_broken(main, monkeypatch, tmp_path, command):
    short = json.loads(Path(LLAMA).read_text())  # a plan of 16,384 tokens takes 10 s
    short["rope_scaling"]["original_max_position_embeddings"] = 512
    (tmp_path / "config.json").write_text(json.dumps(short))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    kept(monkeypatch, "rotary.plan", "plan_model")
    words = set(main(*command, "config.json").out.split())
    assert len(words) > 20
    for columns in (80, 45):
        monkeypatch.setenv("COLUMNS", str(columns))
        narrow = main(*command, "config.json").out
        assert max(map(len, narrow.splitlines())) <= columns
        own = {word for word in words if len(word) <= columns}
        assert own - set(narrow.replace(":", " ").split()) - {w for w in own if ":" in w} == set()


@pytest.mark.parametrize("columns", [12, 23, 24, 60])
def test_a_table_is_a_list_if_its_words_do_not_fit(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("short", "1,234,567"), ("a name", "some words, then 0.0039810717055")]
    print_table("title", rows)
    words = {word for row in rows for cell in row for word in cell.split()}
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert {word for word in words - set(printed.split()) if len(word) <= columns} == set()
    is_list = [line.strip() for line in printed.splitlines()[1:3]] == ["short", "1,234,567"]
    assert is_list == (columns < len("short") + len("0.0039810717055") + 4)


def test_version(main):
    assert main("--version").out.split() == ["rotary", rotary.__version__]


def test_help_of_every_command_fits_its_line(main, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = main("--help").out
    assert "identify" in shown
    assert [line for line in shown.splitlines()[1:] if line.endswith("...")] == []


def test_completion_of_a_shell():
    shown = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.code == 0
    assert "complete" in shown.out


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [({"TERM": "dumb"}, False), ({"TERM": "xterm-256color"}, True),
     ({"TERM": "xterm-256color", "NO_COLOR": "1"}, None)],
    ids=str,
)  # fmt: skip
def test_colours_only_where_they_are_wanted(changes, wanted):
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-c", START, "inspect", LLAMA]
    done = subprocess.run(command, stdout=follower, env=environment(**changes), timeout=60)
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 2**16):
            shown += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(leader)
    assert done.returncode == 0
    text = shown.decode()
    assert "llama3" in text
    if wanted is not None:
        assert (ANSI in text) == wanted
    else:
        assert not re.search(r"\x1b\[[\d;]*(3|4|9|10)\d", text)  # bold is no colour


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break in another way")
@pytest.mark.parametrize("arguments", [
    ["freqs", LLAMA], ["freqs", LLAMA, "--json"], ["doctor", LLAMA], ["--help"],
])  # fmt: skip
def test_a_reader_that_leaves_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", START, *arguments]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment(), timeout=60
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141  # not 1, which says that a fault was found


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("arguments", [["freqs", LLAMA], ["inspect", LLAMA, "--json"]])
def test_a_full_disk_is_said(arguments):
    command = [sys.executable, "-c", START, *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60
        )
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*No space left.*\n", done.stderr), done.stderr


# --- bench, doctor, demo ---

WITHOUT_TORCH = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in ("torch", "transformers")
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch is not hidden")
import rotary.demo
rotary.demo.SEQ = 16
"""


def test_bench_times_every_library(main):
    arguments = ["bench", "--seq", "16", "--rounds", "1", "--layout", "interleaved"]
    report = document(main(*arguments, "--json"))
    assert report["seq"] == 16
    assert "numpy" in report["versions"]
    assert list(report["seconds"]) == [
        "NumPy float32", "PyTorch float32", "PyTorch bfloat16", "PyTorch float16"]  # fmt: skip
    for cases in report["seconds"].values():
        assert list(cases) == ["copy", "formula", "rotary", "rotary out=", "rotary in place"]
        for timing in cases.values():
            assert 0 < timing["best"] <= timing["median"] < 60
    shown = main(*arguments)
    assert (shown.code, shown.err) == (0, "")
    assert "q 32 x 16 x 128, k 8 x 16 x 128, interleaved" in shown.out
    assert shown.out.count("rotary in place") == 4


def test_bench_without_the_memory_is_one_line(main, monkeypatch):
    def refuse(*_: Any) -> None:
        raise MemoryError("Unable to allocate 1.49 TiB")

    monkeypatch.setattr(bench, "numpy_cases", refuse)
    assert_refused(main("bench", "--seq", "100000000"), "Unable to allocate 1.49 TiB")


def test_bench_and_demo_and_doctor_without_torch():
    """One after the other in one process."""
    commands = "bench --seq 16 --rounds 1 --json", "demo --json", "doctor --json"
    done = run(*commands, code=f"{WITHOUT_TORCH}\nrotary.demo.SEQ = 64\n{EACH}")
    assert (done.code, done.err) == (0, "")
    timed, shown, found = (json.loads(each) for each in done.out.split(END)[:-1])
    assert list(timed["seconds"]) == list(shown["times_ms"]) == ["NumPy float32"]
    findings = {each["what"]: each for each in found}
    assert findings["torch"]["found"] == "not installed"


def test_doctor_reports_every_finding(main):
    findings = document(main("doctor", "--json"))
    assert all(set(finding) == {"what", "found", "advice"} for finding in findings)
    by_name = {finding["what"]: finding for finding in findings}
    assert by_name["kernel"]["found"] == "compiled loops, equal to the reference implementation"
    assert by_name["numpy"]["found"] == np.__version__
    shown = main("doctor")
    assert (shown.code, shown.err) == (0, "")
    for finding in findings:
        assert finding["what"] in shown.out


def assert_checks_pass(report: dict[str, Any]) -> None:
    assert report["model"] == "Llama 3.1 8B"
    assert rotary.Rotary.from_dict(report["spec"]) == from_hf_config(LLAMA)
    assert len(report["checks"]) == 3
    for check in report["checks"]:
        assert 0 <= check["error"] <= check["limit"] <= 1e-6
    assert report["exact_error"] <= 1e-6
    assert report["float32_error"] > 100 * report["exact_error"]  # what exact angles are for
    for cases in report["times_ms"].values():
        assert all(milliseconds > 0 for milliseconds in cases.values())


def test_demo_on_a_short_row(main, monkeypatch):
    monkeypatch.setattr(demo, "SEQ", 64)
    report = document(main("demo", "--json"))
    assert_checks_pass(report)
    assert (report["q"], report["k"]) == ([1, 32, 64, 128], [1, 8, 64, 128])
    shown = main("demo")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.count(" ok") == 3
    for part in ("Llama 3.1 8B", "1 x 32 x 64 x 128", "PyTorch bfloat16", "rotary out="):
        assert part in shown.out


@pytest.mark.slow
def test_the_checks_pass_at_the_size_of_the_demo(main, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: {"copy": bench.Timing(1.0, 1.0)})
    report = document(main("demo", "--json"))
    assert_checks_pass(report)
    assert report["q"] == [1, 32, 8192, 128]


@pytest.mark.parametrize("error", [2e-6, float("inf"), float("nan")])
def test_demo_fails_when_a_check_fails(main, monkeypatch, error):
    monkeypatch.setattr(demo, "SEQ", 16)
    monkeypatch.setattr(bench, "measure", lambda *_, **__: {"copy": bench.Timing(1.0, 1.0)})
    checks = [Check("the norm is kept", error, 1e-6), Check("another", 0.0, 1e-6)]
    monkeypatch.setattr(demo, "check_rotation", lambda *_: checks)
    shown = main("demo")
    assert shown.code == 1
    assert re.fullmatch(r"error: wrong on this machine: the norm is kept; .*\n", shown.err)
    assert re.search(r"the norm is kept +\S+ +WRONG", shown.out)
    assert re.search(r"another +\S+ +ok", shown.out)
    told = main("demo", "--json")
    assert (told.code, told.err) == (1, shown.err)
    report = document(Done(0, told.out, ""))
    assert [check["name"] for check in report["checks"]] == ["the norm is kept", "another"]


@pytest.mark.parametrize("change", ["rotation", "tables"])
def test_the_checks_of_the_demo_see_a_wrong_rotation(monkeypatch, change):
    monkeypatch.setattr(demo, "SEQ", 16)
    spec = rotary.Rotary(head_dim=16)
    assert all(check.error <= check.limit for check in demo.check_rotation(spec, (2, 1)))
    if change == "rotation":
        wrong = lambda spec, q, k: (q * np.float32(1.00001), k)  # noqa: E731
        monkeypatch.setattr(demo, "apply", wrong)
        broken = ["position 0 changes nothing", "the norm stays the same (relative)"]
    else:
        single = lambda spec, positions, _: rotary.cos_sin(spec, positions, "float32")  # noqa: E731
        monkeypatch.setattr(demo, "cos_sin", single)
        broken = ["a score depends only on distance, to 1,000,000"]
    checks = demo.check_rotation(spec, (2, 1))
    assert [check.name for check in checks if not check.error <= check.limit] == broken


# --- several layer types, and the commands that compare ---

CONFIGS = Path(__file__).parent / "configs"


def test_inspect_shows_every_layer_type(main):
    text = main("inspect", str(CONFIGS / "gemma-3-4b.json")).out
    assert "sliding_attention" in text
    assert "full_attention" in text
    reports = json.loads(main("inspect", str(CONFIGS / "gemma-3-4b.json"), "--json").out)
    assert set(reports) == {"sliding_attention", "full_attention"}
    assert reports["full_attention"]["spec"]["schedule"] == "linear"


def test_inspect_counts_the_layers_without_rotation(main):
    for config, found in (
        ("exaone-4.0-32b", "16 of 64 layers take no rotation: type full_attention"),
        ("command-r7b", "8 of 32 layers take no rotation: type full_attention"),
        ("smollm3-3b", "9 of 36 layers take no rotation: no_rope_layer_interval"),
    ):
        path = str(CONFIGS / f"{config}.json")
        for command in ("inspect", "doctor"):
            assert found in " ".join(main(command, path).out.split())  # the terminal cuts lines
    assert "no rotation" not in main("inspect", LLAMA).out


def test_inspect_names_the_other_parts_of_a_model(main):
    shown = main("inspect", str(CONFIGS / "qwen3-vl-8b.json"))
    assert "24 by axis 0" in shown.out
    assert "vision_config" in shown.err
    vision = main("inspect", str(CONFIGS / "qwen3-vl-8b.json"), "--part", "vision_config", "--json")
    assert json.loads(vision.out)["spec"]["schedule"] == "axial"


def test_diff_gives_a_verdict(main, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0}
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 2048}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **sizes, "rope_scaling": rope}))
    out = main("diff", str(path)).out
    assert "does not scale" in out
    assert "12 at" in out  # and the length of the largest difference
    found = json.loads(main("diff", str(path), "--json").out)
    assert len(found["readings"]) == 6


def test_doctor_looks_at_a_config(main, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "rope_thata": 1e4}))
    assert "rope_thata" in main("doctor", str(path)).out
    found = json.loads(main("doctor", str(path), "--json").out)
    assert found[0]["advice"]


def test_doctor_says_that_a_function_needs_arguments(main, tmp_path):
    path = tmp_path / "rope.py"
    path.write_text("def apply_rope(x, positions):\n    return x\n")
    message = "apply_rope: calling it without arguments failed: TypeError: apply_rope() missing 2"
    done = main("doctor", f"{path}:apply_rope")
    assert_refused(done, message)
    assert "to examine a rotation use rotary identify" in done.err


def test_diff_asks_for_a_layer_type_by_its_option(main, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3_text"}))
    assert_refused(main("diff", str(path)), "layers differ; pass --layer-type, one of full_att")


def test_identify_reads_a_function_from_a_file(main, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\nimport rotary\n\n"
        "def turn(x, positions):\n"
        "    return rotary.apply(rotary.Rotary(head_dim=16, base=500.0), x, positions=positions)\n"
    )
    text = main("identify", f"{path}:turn", "--head-dim", "16").out
    assert "500" in text
    found = json.loads(main("identify", f"{path}:turn", "--head-dim", "16", "--json").out)
    assert found["spec"]["base"] == pytest.approx(500.0)
    checked = main("identify", f"{path}:turn", "--head-dim", "16", "--check")
    assert checked.code == bool(found["findings"])
    assert_refused(main("identify", f"{path}:nothing", "--head-dim", "16"), "nothing")


PRINTS = """
import torch
import rotary

print("at import")


def turn(x, positions):
    print("at a call")
    return rotary.apply(rotary.Rotary(head_dim=16), x, positions=positions)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        print("made")

    def forward(self, x, positions):
        return turn(x, positions)


class Sized(Plain):
    def __init__(self, size):
        super().__init__()


module = Plain()
"""


@pytest.mark.parametrize("command", ["identify {}:turn --head-dim 16", "doctor {}:Plain"])
def test_what_a_module_prints_is_not_in_the_document(main, tmp_path, command):
    path = tmp_path / "loud.py"
    path.write_text(PRINTS)
    done = main(*command.format(path).split(), "--json")
    assert done.code == 0
    assert json.loads(done.out) is not None
    assert "at import" in done.err
    assert ("at a call" if "turn" in command else "made") in done.err
    assert "at import" not in main(*command.format(path).split()).out


def test_a_class_and_a_module_are_told_what_to_pass(main, tmp_path):
    path = tmp_path / "loud.py"
    path.write_text(PRINTS)

    def said(*arguments):
        done = main(*arguments)
        assert done.code == 1
        return done.err.splitlines()[-1]

    asked = "--head-dim", "16"
    assert "give its method, such as name.forward" in said("identify", f"{path}:module", *asked)
    assert "head_dim=16" in main("identify", f"{path}:module.forward", *asked).out
    assert "Plain is a class; give a function" in said("identify", f"{path}:Plain", *asked)
    assert "give a model, or a function without" in said("doctor", f"{path}:Sized")


SIZES = '"hidden_size": 64, "num_attention_heads": 4'
DESIGN = "design --length 64 --at-least 0.5 --until"


@pytest.mark.parametrize(
    ("arguments", "said"),
    {
        "inspect parts.json --part vision": "pass --part, one of vision_config, text_config; got",
        "reach plain.json": "no max_position_embeddings; give --length, in tokens",
        "reach plain.json --length 0": "--length must be in 1 .. 16,777,216, got 0",
        f"{DESIGN} 99": "--until must be in 1 .. 64, got 99",
        f"{DESIGN} 5 --at-most 2": "--at-most is a share of B_0, in 0 .. 1; got 2.0",
        f"{DESIGN} 5 --at-most 1 --power 2": "give one of --power, --scale and --at-most",
        f"{DESIGN} 5 --longest-wavelength 1": "--longest-wavelength 1 must be longer than",
        "plan --context 8 --head-dim 2": "no base passes at every distance up to 8: bases up",
        "reach model.GGUF": "model.GGUF: a GGUF file; give the config.json of the model",
        "inspect model.GGUF": "model.GGUF: not a GGUF file, or cut short",
        "inspect folder.gguf": "folder.gguf/config.json: no such file",
    }.items(),
    ids=str,
)
def test_errors_name_options_of_the_command(main, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("plain.json").write_text(f"{{{SIZES}}}")
    Path("parts.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    Path("model.GGUF").write_bytes(b"GGUF\x03\0\0\0\x80\xff")
    Path("folder.gguf").mkdir()
    assert_refused(main(*arguments.split()), f"error: {said}" if said[0] in "-m" else said)


def test_one_pair_and_one_token_are_told_in_the_singular(main, tmp_path):
    path = tmp_path / "config.json"
    factors = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    path.write_text(json.dumps({"head_dim": 8, "rope_parameters": factors}))
    assert re.search(r"stand still +1 pair *\n", main("inspect", str(path)).out)
    assert "llama-3.1-8b.json, 1 token\n" in main("decay", LLAMA, "--length", "1").out


def test_errors_have_the_names_of_options(main, tmp_path):
    gemma = str(Path(__file__).parent / "configs" / "gemma-3-1b.json")
    assert_refused(main("inspect", gemma, "--layer-type", "full"), "pass --layer-type, one of full")
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "tomorrow", "head_dim": 64}')
    assert_refused(main("inspect", str(path)), "rotary.from_hf_config(config, as_type='llama')")


def test_identify_is_told_the_form_that_a_signature_does_not_say(main, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import rotary\n\n"
        "def turn(*given):\n"
        "    return rotary.apply(rotary.Rotary(head_dim=16), given[0], positions=given[1])\n"
    )
    asked = "identify", f"{path}:turn", "--head-dim", "16"
    assert_refused(main(*asked), "neither form; say --form positions for f(x, positions)")
    assert "head_dim=16" in main(*asked, "--form", "positions").out
    assert_refused(main(*asked, "--form", "position"), "form must be")


@pytest.mark.parametrize("option", [("vectors", LLAMA, "-o"), ("design", "--curve")])
def test_a_file_in_no_folder_is_named_without_a_number(main, tmp_path, option):
    path = tmp_path / "nowhere" / "file"
    length = ("--head-dim", "64", "--length", "512") if option[0] == "design" else ()
    assert_refused(main(*option, str(path), *length), f"error: {path}: No such file")


def test_long_lists_are_cut_short(main):
    text = " ".join(main("inspect", str(CONFIGS / "phi-4-mini.json")).out.split())
    assert re.search(r"long_factor 1, 1\.1\d+, .*\.\.\. \(48 values\)", text)


DESIGN = ("design", "--length", "64", "--head-dim", "8", "--starts", "1", "--json", "--curve")


def test_the_first_line_of_a_curve_counts_if_it_holds_numbers(main, tmp_path):
    """Excel writes a byte order mark; the first line behind it was taken for words."""
    path, found = tmp_path / "curve.csv", []
    for start in ("", "\ufeff", "distance,score\n", "\ufeffdistance,score\n"):
        path.write_text(start + "1,0.9\n2,0.8\n", encoding="utf-8")
        found.append(document(main(*DESIGN, str(path)))["error"])
    path.write_text("2,0.8\n")
    without = document(main(*DESIGN, str(path)))["error"]
    assert len(set(found)) == 1
    assert without != found[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"1.0,0.9\n2,0.8\n", "line 1: must be a whole distance"),
        (b"a" * 200_000, "field larger than field limit"),
        (b"\xff\xfe1,0.9", "can't decode byte 0xff"),
        (b"9" * 5000 + b",1\n", "line 1: must be a whole distance"),
    ],
    ids=["a fraction", "a long line", "no text", "digits"],
)
def test_a_curve_that_cannot_be_read_is_one_line_with_its_name(main, tmp_path, content, said):
    path = tmp_path / "curve.csv"
    path.write_bytes(content)
    done = main(*DESIGN, str(path))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {path}")
    assert said in done.err
    assert len(done.err) < 250 + len(str(path))
