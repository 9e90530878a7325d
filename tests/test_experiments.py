"""The experiments: text and batches that repeat, models that keep their laws, runs that survive."""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.e1_convergence import run as convergence
from experiments.e2_linear import run as linear
from experiments.e3_length import run as length
from experiments.e4_base import run as base
from experiments.e5_partial import run as partial
from experiments.e6_shift import run as shift
from experiments.e7_digits import run as digits
from experiments.e8_tuning import run as tuning
from experiments.e9_design import run as designed
from experiments.lab import command, data, results
from experiments.lab.model import Config, build, softmax_attention
from experiments.lab.sweep import LADDER, Run, end_bits
from experiments.lab.train import Recipe, processes, train
from PIL import Image
from programs import assert_printed

import rotary
from rotary import attention, plots

ROOT = Path(__file__).parent.parent
EXPERIMENTS = sorted(path.parent for path in (ROOT / "experiments").glob("e*/run.py"))
SWEEPS = [convergence, linear, base, partial, digits, designed]
ALL = [*SWEEPS, length, shift, tuning]
STEPS = 12

IMPORTED = """
import json, os, signal, socket, sys, tempfile
from pathlib import Path
import torch
import torch._dynamo  # each child would import it for its optimizer
from torch import nn
from experiments.lab import data
from experiments.lab.data import Batch
from experiments.lab.model import Config, build
from experiments.lab.train import Recipe, processes, train
"""

# Trains a model with dropout, so that the random state counts, in a forked process for each
# [name, when] of argument 2; `when` is when the process kills itself. Writes status and result.
CHILD = f"""
folder = Path(sys.argv[1])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def run(name, when):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))

    def batches(step):
        if when == str(step):
            die()
        chance = torch.Generator().manual_seed(step)
        tokens = torch.randint(8, (4, 6), generator=chance)
        return Batch(tokens, (tokens + 1) % 8)

    writes, fsync = [], os.fsync
    def fsync_or_die(file):
        writes.append(file)
        if when == f"write {{len(writes)}}":
            if len(writes) % 2:  # the even ones are its folder
                os.ftruncate(file, 100)  # the checkpoint is half there
            die()
        fsync(file)
    os.fsync = fsync_or_die

    recipe = Recipe(
        steps={STEPS}, rows=4, learning_rate=0.1, seed=3, warmup=2, save_every=3, look_every=5
    )
    look = lambda model: {{"w": model[2].weight.sum().item()}}
    with processes() as these:
        found = train(model, batches, recipe, folder / name / "run.pt", look, these)
    return str(([loss.hex() for loss in found.losses], found.looks))

ended = []
for name, when in json.loads(sys.argv[2]):
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if child == 0:
            out.write(run(name, when))
            out.flush()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        ended.append([name, when, status, out.read()])
(folder / "ended.json").write_text(json.dumps(ended))
"""

# Trains the same small model in float32 in one process and in two, as torchrun starts them.
SHARED = """
folder = Path(sys.argv[1])
recipe = Recipe(steps=20, rows=8, learning_rate=1e-2, seed=0, warmup=2)
content = torch.arange(5000) % 4

def batches(step):
    return data.masked(data.windows(content, 24, 8, 0, step), data.TRAINING, 0, step)

def run(rank, count):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    with processes() as these:
        model = build(Config(layers=2, width=32, causal=False), seed=0)
        found = train(model, batches, recipe, folder / f"{count}.pt", lambda model: {}, these)
        if these.rank == 0:
            (folder / f"{count}.json").write_text(json.dumps([these.size, found.losses]))

with socket.create_server(("localhost", 0)) as free:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
for count in (1, 2):
    torch.multiprocessing.start_processes(run, (count,), count, start_method="fork")
"""


@pytest.fixture
def forked(once):
    """The folder in which CHILD and SHARED trained: torch is imported once for all processes."""

    def make(folder):
        kills = [str(random.randrange(4, STEPS)), "write 3", "write 4"]
        jobs = [("undisturbed", "never")]
        jobs += [(kill, when) for kill in kills for when in (kill, "never", "0")]
        for name, _ in jobs:
            (folder / name).mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", IMPORTED + CHILD + SHARED, folder, json.dumps(jobs)],
            cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    return once("forked", make)


def test_a_batch_follows_from_seed_and_step_alone():
    content = torch.arange(1000)
    first = data.windows(content, 16, 8, seed=1, step=7)
    for step in range(7):
        data.windows(content, 16, 8, seed=1, step=step)
    torch.rand(3), np.random.default_rng().random()
    assert torch.equal(data.windows(content, 16, 8, seed=1, step=7), first)
    assert not torch.equal(data.windows(content, 16, 8, seed=1, step=8), first)
    assert not torch.equal(data.windows(content, 16, 8, seed=2, step=7), first)


def test_pieces_are_runs_of_the_text_from_its_first_byte_to_its_last():
    content = torch.arange(20)
    pieces = torch.cat([data.windows(content, 4, 64, seed=0, step=step) for step in range(4)])
    assert (pieces.diff(dim=1) == 1).all()
    assert pieces.min() == 0
    assert pieces.max() == 19
    with pytest.raises(ValueError, match="a piece of 21 bytes does not fit in a text of 20"):
        data.windows(content, 21, 1, seed=0, step=0)


def test_a_text_is_learned_chosen_by_and_reported_on_in_three_parts():
    text = data.text("python")
    whole = data.SOURCES["python"]()
    parts = (text.training, text.validation, text.held_out)
    assert b"".join(bytes(part.numpy()) for part in parts) == whole
    shares = [len(part) / len(whole) for part in parts]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=1e-5)
    assert data.SPLIT == "training 0.90, validation 0.05, held out 0.05"
    assert b"def " in whole
    assert len(whole) > 2_000_000


def test_the_bible_is_taken_from_debian_without_its_labels(tmp_path, monkeypatch):
    program = tmp_path / "bible"
    program.write_text('#!/bin/sh\necho "Ge1:1 In the beginning"\necho "Ge1:2 And"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert data.SOURCES["kjv"]() == b"In the beginning\nAnd\n"


def test_without_the_bible_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="apt-get install bible-kjv bible-kjv-text"):
        data.SOURCES["kjv"]()


def test_only_hidden_bytes_are_asked_for_and_the_others_stay():
    pieces = torch.randint(0, 256, (100, 100), generator=torch.Generator().manual_seed(0))
    batch = data.masked(pieces, data.TRAINING, seed=0, step=0)
    hidden = batch.tokens == data.MASK
    assert torch.equal(batch.tokens[~hidden], pieces[~hidden])
    assert torch.equal(batch.targets[hidden], pieces[hidden])
    assert (batch.targets[~hidden] == data.IGNORED).all()
    assert 0.14 < hidden.double().mean() < 0.16
    other = data.masked(pieces, data.LOOKING, seed=0, step=0)
    assert not torch.equal(other.tokens, batch.tokens)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("encoding", ["rope", "sinusoidal", "learned", "none"])
def test_a_causal_model_does_not_see_what_comes(encoding, kind):
    tokens = torch.arange(12)[None] % 5
    changed = tokens.clone()
    changed[0, 8] = 100
    for causal in (True, False):
        model = build(Config(encoding, causal, kind, layers=2, width=32), seed=0)
        with torch.no_grad():
            same = (model(tokens) == model(changed))[0].all(-1)
        assert bool(same[:8].all()) is causal
        assert not same[8:].any()


def test_only_without_positions_is_an_order_not_seen():
    tokens = torch.arange(10)[None]
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    for encoding in ("none", "learned", "sinusoidal", "rope"):
        model = build(Config(encoding, causal=False, layers=2, width=32), seed=0).double()
        if encoding == "rope":
            model.float()  # the rotation is computed in float32
        with torch.no_grad():
            apart = (model(tokens)[:, order] - model(tokens[:, order])).abs().max()
        assert (apart < 1e-9) == (encoding == "none"), f"{encoding}: {apart}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rope", [True, False])
def test_softmax_attention_is_that_of_the_library(rope, causal):
    q, k, v = torch.randn(3, 2, 2, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()
    spec = rotary.Rotary(head_dim=8, base=100.0)
    cos, sin = rotary.cos_sin(spec, torch.arange(9))
    turn = (
        (lambda q, k: rotary.rotate((q, k), cos, sin, layout="half"))
        if rope
        else (lambda q, k: (q, k))
    )
    wanted = attention.softmax_attention(
        q.numpy(), k.numpy(), v.numpy(), spec if rope else None, causal=causal
    )
    torch.testing.assert_close(
        softmax_attention(q, k, v, turn, causal), torch.from_numpy(wanted), atol=1e-6, rtol=1e-5
    )


def test_what_two_models_share_starts_equal():
    models = {
        encoding: dict(build(Config(encoding, layers=2, width=32), seed=5).named_parameters())
        for encoding in ("rope", "sinusoidal", "learned", "none")
    }
    for encoding, weights in models.items():
        assert set(weights) - set(models["none"]) == (
            {"places.weight"} if encoding == "learned" else set()
        )
        for name, weight in models["none"].items():
            assert torch.equal(weights[name], weight), f"{encoding} {name}"
    first, second = (models["none"][f"blocks.{index}.qkv.weight"] for index in range(2))
    assert not torch.equal(first, second)
    other = build(Config("none", layers=2, width=32), seed=6)
    assert not torch.equal(other.head.weight, models["none"]["head.weight"])


def test_training_is_adamw_on_the_mean_over_what_is_asked(tmp_path, one_thread):
    recipe = Recipe(steps=4, rows=4, learning_rate=0.01, seed=0, warmup=2, clip=0.5)
    content = torch.arange(500) * 7 % 251

    def batches(step):
        return data.masked(data.windows(content, 12, 4, 0, step), data.TRAINING, 0, step)

    config = Config(layers=1, width=16, causal=False)
    ours, plain = build(config, seed=0), build(config, seed=0)
    with processes() as these:
        found = train(ours, batches, recipe, tmp_path / "run.pt", lambda model: {}, these)

    moments = {name: (0.0, 0.0) for name, _ in plain.named_parameters()}
    for step, rate in enumerate((0.005, 0.01, 0.01, 0.005)):
        tokens, targets = batches(step)
        asked = targets != data.IGNORED
        loss = -plain(tokens).log_softmax(-1)[asked].gather(1, targets[asked][:, None]).mean()
        assert abs(loss.item() - found.losses[step]) < 1e-5
        plain.zero_grad()
        loss.backward()
        norm = sum(w.grad.square().sum() for w in plain.parameters()) ** 0.5
        with torch.no_grad():
            for name, w in plain.named_parameters():
                g = w.grad * min(1.0, 0.5 / float(norm))
                m, s = moments[name]
                m, s = 0.9 * m + 0.1 * g, 0.98 * s + 0.02 * g * g
                moments[name] = m, s
                if w.dim() == 2:
                    w -= rate * 0.01 * w
                w -= (
                    rate
                    * (m / (1 - 0.9 ** (step + 1)))
                    / ((s / (1 - 0.98 ** (step + 1))).sqrt() + 1e-8)
                )
    for (name, w), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine, w, atol=2e-4, rtol=1e-3, msg=lambda text, n=name: n + text)


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_bits(forked):
    """Killed at a step behind the first checkpoint, which is at 3, or while it writes one."""
    (*_, status, whole), *others = json.loads((forked / "ended.json").read_text())
    assert (status, bool(whole)) == (0, True)
    for name, when, *found in others:
        if when == name:
            assert found == [-signal.SIGKILL, ""]
        else:  # it goes on; asked once more, it trains no further
            assert found == [0, whole], f"killed at {name}, then at {when}"


def test_a_run_that_diverged_is_resumed_where_it_was(tmp_path, one_thread):
    recipe = Recipe(steps=6, rows=2, learning_rate=1e-3, seed=0, save_every=1)
    seen = []

    def batches(step):
        seen.append(step)
        if seen == [0, 1, 2, 3]:
            raise KeyboardInterrupt
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        nothing = torch.full_like(tokens, data.IGNORED)  # a mean over nothing is no number
        return data.Batch(tokens, nothing if step == 1 else tokens)

    with processes() as these:
        for expected in (pytest.raises(KeyboardInterrupt), contextlib.nullcontext()):
            model = build(Config(layers=1, width=16), seed=0)
            with expected:
                train(model, batches, recipe, tmp_path / "run.pt", lambda model: {}, these)
    assert seen == [0, 1, 2, 3, 3, 4, 5]


@pytest.mark.slow
def test_two_processes_train_as_one_does(forked):
    """Apart by the order of sums alone: one float32 rounding of the loss after 20 steps."""
    losses = {}
    for count in (1, 2):
        started, losses[count] = json.loads((forked / f"{count}.json").read_text())
        assert started == count
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-6, atol=0)
    assert losses[1][-1] < losses[1][0] - 1, "what is compared must have learned"


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    recipe = Recipe(steps=2, rows=2, learning_rate=0.01, seed=0)
    content = torch.arange(100)
    with processes() as these:
        for width in (16, 32):
            model = build(Config(layers=1, width=width), seed=0)
            arguments = (
                model, lambda step: data.causal(data.windows(content, 9, 2, 0, step)), recipe,
                tmp_path / "run.pt", lambda model: {}, these,
            )  # fmt: skip
            if width == 16:
                train(*arguments)
            else:
                with pytest.raises(ValueError, match="is the checkpoint of another run"):
                    train(*arguments)
        with pytest.raises(ValueError, match="2 rows cannot be shared by 3 processes"):
            train(*arguments[:-1], these._replace(size=3))


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "results.jsonl"
    results.append(path, {"run": {"seed": 0}, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"run": {"seed": 1}, "lo')
    assert [row["run"]["seed"] for row in results.rows(path)] == [0]
    results.append(path, {"run": {"seed": 2}, "loss": 2.0})
    found = results.rows(path)
    assert [row["run"]["seed"] for row in found] == [0, 2]
    assert found[0]["versions"]["torch"] == torch.__version__
    assert results.is_done(found, {"seed": 2})
    assert not results.is_done(found, {"seed": 1})


def test_a_result_is_put_between_its_marks(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    results.put(readme, "| new |")
    assert readme.read_text() == f"before\n{results.BEGIN}\n| new |\n{results.END}\nafter\n"
    assert results.shown(readme) == "| new |"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="needs the marks"):
        results.put(readme, "| new |")


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_every_experiment_says_what_it_asks_and_how_to_run_it(folder):
    readme = (folder / "README.md").read_text()
    parts = re.findall(r"^## (.*)$", readme, re.MULTILINE)
    assert parts[:5] == [
        "Question", "What was run", "Result", "What it shows", "What it does not show",
    ]  # fmt: skip
    assert f"python -m experiments.{folder.name}.run" in readme


def quick(module, folder, monkeypatch, seeds):
    options = ["--quick", "--seeds", str(seeds), "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["run", *options])
    module.main()
    return results.rows(folder / "results.jsonl")


def test_moving_a_trained_model_shows_in_float32_angles_alone(tmp_path, monkeypatch, capsys):
    rows = quick(shift, tmp_path, monkeypatch, seeds=2)
    assert_printed(capsys.readouterr().out)
    assert [row["run"]["recipe"]["seed"] for row in rows] == [0, 1]
    for row in rows:
        largest = {name: scheme["largest"] for name, scheme in row["schemes"].items()}
        assert row["offsets"] == [2**12, 2**18, 2**24, 2**39]
        assert max(largest["exact angles"]) < 1e-5
        assert largest["float32 angles"][2] > 100 * max(largest["exact angles"])
        assert min(largest["bfloat16 positions"]) > 100 * max(largest["exact angles"])
    for name in ("shift.png", "shift-dark.png"):
        assert (tmp_path / name).stat().st_size > 10_000
        of = Image.open(tmp_path / name).text["Rows"]
        assert of == results.digest(tmp_path / "results.jsonl")
    before = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr(results, "report", lambda *_: None)  # it would draw the same again
    quick(shift, tmp_path, monkeypatch, seeds=2)
    assert (tmp_path / "results.jsonl").read_bytes() == before, "what is done is not done again"


@pytest.mark.slow
@pytest.mark.usefixtures("light_alone")
@pytest.mark.parametrize("module", SWEEPS, ids=lambda module: module.FOLDER.name)
def test_every_method_gets_the_same_sweep_and_seeds(module, tmp_path, monkeypatch, capsys):
    seeds = 1
    seen, rows = {}, quick(module, tmp_path, monkeypatch, seeds)
    assert_printed(capsys.readouterr().out)
    for row in rows:
        recipe = row["run"]["recipe"]
        entry = seen.setdefault(row["run"]["method"], {})
        entry[recipe["seed"], recipe["learning_rate"]] = end_bits(row, "validation")
    assert tuple(seen) == tuple(module.SWEEP.methods)
    for entry in seen.values():
        rates = sorted({rate for _, rate in entry})
        assert set(rates) >= set(module.QUICK.rates)
        assert sorted(entry) == [(seed, rate) for seed in range(seeds) for rate in rates]
        best = min(rates, key=lambda rate: sum(entry[seed, rate] for seed in range(seeds)))
        assert rates[0] < best < rates[-1] or best in (LADDER[0], LADDER[-1])
    assert (tmp_path / module.SWEEP.picture).stat().st_size > 10_000
    assert not list(tmp_path.glob("checkpoints/*")), "what is done needs no checkpoint"


def test_a_method_of_convergence_is_a_task_and_an_encoding():
    for method in convergence.METHODS:
        run = Run(method, 1e-3, 0)
        model = convergence.settings_of(convergence.QUICK, data.text("python"), run)["model"]
        assert method == f"{'causal' if model['causal'] else 'masked'} {model['encoding']}"


def test_steps_to_a_level_are_read_between_looks():
    curve = np.array([[10, 4.0], [20, 3.0], [30, 3.5], [40, 2.0]])
    assert convergence.steps_to(curve, 3.25) == 17.5
    assert convergence.steps_to(curve, 2.75) == 35.0
    assert convergence.steps_to(curve, 5.0) == 10.0
    assert convergence.steps_to(curve, 1.9) == np.inf


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.FOLDER.name)
def test_the_table_of_a_readme_is_that_of_its_results(module):
    rows = results.rows(module.FOLDER / "results.jsonl")
    assert results.shown(module.FOLDER / "README.md") == module.table(rows)


def test_a_quick_run_takes_the_text_that_is_always_there_and_leaves_no_file():
    before = torch.get_num_threads()
    with command.options(None, Path("elsewhere"), ["--quick", "--threads", "1"]) as found:
        assert (found.text, found.device, found.seeds) == ("python", "cpu", (0,))
        assert found.out.is_dir()
        assert torch.get_num_threads() == 1
    assert not found.out.exists()
    assert torch.get_num_threads() == before
    with command.options(None, Path("here"), []) as found:
        assert (found.text, found.out, found.seeds) == ("kjv", Path("here"), (0, 1, 2, 3, 4))
    with command.options(None, Path("here"), ["--quick", "--seeds", "2"]) as found:
        assert found.seeds == (0, 1)


@pytest.mark.parametrize("fault", ["forward", "gradient"])
def test_nothing_is_trained_on_a_wrong_rotation(fault, monkeypatch):
    rotate = rotary.rotate

    def wrong(x, cos, sin, **options):
        y = rotate(x, cos, sin, **options)
        return y * 1.00001 if fault == "forward" else y + (x - x.detach()) * 1e-5

    monkeypatch.setattr(rotary, "rotate", wrong)
    with (
        pytest.raises(SystemExit, match=r"gate failed, nothing is trained: .* at 0 is off by "),
        command.options(None, Path("here"), ["--quick"]),
    ):
        pass


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.FOLDER.name)
def test_the_picture_of_a_readme_is_drawn_from_its_results_by_todays_code(module):
    (name,) = re.findall(r"!\[[^\]]*\]\((\w+\.png)\)", (module.FOLDER / "README.md").read_text())
    figure = module.figure(results.rows(module.FOLDER / "results.jsonl"))
    drawn = plots.rendered(figure, ".png")
    before, now = (Image.open(file) for file in (module.FOLDER / name, io.BytesIO(drawn)))
    assert before.size == now.size
    apart = np.abs(np.asarray(before, np.float64) - np.asarray(now, np.float64))
    assert apart.mean() < 0.5, "of 255: draw it anew"
    plots.dark(figure)  # it knows what is in the figure
