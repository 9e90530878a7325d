"""The command `rotary convert`: its plan, its result, its errors."""

import json

import numpy as np
import pytest
from checkpoints import LAYERS, LLAMA, SIDECARS, contents, llama, name_of, weights
from command import assert_refused, document, run
from safetensors.numpy import save_file

from rotary.checkpoint.convert import prepare
from rotary.checkpoint.files import MANIFEST

WAY = ("--from", "half", "--to", "interleaved")


@pytest.fixture
def source(tmp_path):
    return llama(tmp_path / "a")


def test_a_dry_run_shows_every_move_and_writes_nothing(main, source, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    before = contents(tmp_path)
    (source / "pytorch_model.bin").write_bytes(b"x")
    done = main("convert", str(source), str(tmp_path / "b"), "--dry-run", *WAY)
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert done.code == 0
    assert done.err.startswith("warning: transformers will load these weights")
    assert "once converted they are interleaved" in done.err  # nothing is converted yet
    assert lines[0].endswith(f"{source}: half to interleaved, 9 tensors move")
    assert "model.layers.1.self_attn.k_proj.weight key 2 0 to 7 and again every 8 16 of 16" in lines
    assert "model.layers.2.self_attn.q_proj.bias query 4 0 to 7 and again every 8 32 of 32" in lines
    assert lines[-1] == "pytorch_model.bin"
    (source / "pytorch_model.bin").unlink()
    assert contents(tmp_path) == before


def test_a_dry_run_shows_a_slice_and_what_stays_and_why(main, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    prefix = "model.layers.0.self_attn."
    shapes = {"q_a_proj": (6, 24), "q_b_proj": (32, 6), "kv_a_proj_with_mqa": (9, 24)}
    arrays = {f"{prefix}{name}.weight": np.ones(shapes[name], np.float32) for name in shapes}
    save_file(arrays, tmp_path / "model.safetensors")
    config = {"model_type": "deepseek_v3", "hidden_size": 24, "num_attention_heads": 4,
              "kv_lora_rank": 5, "q_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
              "v_head_dim": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = main("convert", str(tmp_path), "--dry-run", "--from", "interleaved", "--to", "half")
    shown = " ".join(done.out.split())
    assert f"{prefix}q_b_proj.weight latent query 4 4 to 7 and again every 8 16 of 32" in shown
    assert f"{prefix}kv_a_proj_with_mqa.weight latent key 1 5 to 8 4 of 9" in shown
    assert f"{prefix}q_a_proj.weight a latent has no channels of heads" in shown


def test_a_dry_run_is_one_document(main, source):
    found = document(main("convert", str(source), "--dry-run", "--json", *WAY))
    work = prepare(source, source, "half", "interleaved")
    expected = {**work.plan.to_dict(), "not_copied": [], "warning": work.warning}
    assert found == json.loads(json.dumps(expected))
    assert {move["heads"] for move in found["moves"] if move["kind"] == "key"} == {2}


def test_a_conversion_tells_what_was_moved_and_proved(main, source, tmp_path):
    done = main("convert", str(source), str(tmp_path / "b"), *WAY)
    shown = " ".join(done.out.split())
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "tensors moved 9" in shown
    assert "shards written 3 of 3" in shown
    assert "scores compared layers 0, 1, 2" in shown
    assert contents(tmp_path / "b").keys() == contents(source).keys() | {MANIFEST}


def test_a_conversion_warns_before_it_works_one_line_for_each_thing(main, tmp_path, monkeypatch):
    name = "model.layers.0.self_attn.first.weight"
    save_file({**weights(0), name: np.ones((32, 24), np.float32)}, tmp_path / "m.safetensors")
    (tmp_path / "given.json").write_text(json.dumps(LLAMA))
    arguments = ("convert", str(tmp_path / "m.safetensors"), str(tmp_path / "b"), *WAY,
                 "--config", str(tmp_path / "given.json"))  # fmt: skip

    def fails(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("rotary.checkpoint.convert.carry_out", fails)
        failed = main(*arguments)
    done = main(*arguments)
    assert (failed.code, done.code) == (1, 0)
    first, second = done.err.splitlines()
    assert first.startswith(f"warning: {name} stays as it is")
    assert second.startswith("warning: transformers will load these weights")
    assert failed.err.splitlines() == [first, second, "error: the disk is full"]
    assert main(*arguments[:2], "--dry-run", *arguments[3:]).err == done.err


def test_a_conversion_is_one_document_in_a_process_of_its_own(source, tmp_path):
    """Also: the code in the folder, which raises an error if it is imported, is not."""
    done = run("convert", str(source), str(tmp_path / "b"), "--json", "--verify", "full", *WAY,
               cwd=source)  # fmt: skip
    found = document(done)
    assert found["written"] == [name_of(layer) for layer in range(LAYERS)]
    assert found["proof"] == {"which": "full", "layers": [0, 1, 2], "tensors": 9, "error": 0.0}
    assert (tmp_path / "b" / "modeling_x.py").read_bytes() == SIDECARS["modeling_x.py"]


def test_a_config_from_elsewhere_and_a_trusted_source(main, tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    (tmp_path / "given.json").write_text(json.dumps(LLAMA))
    arguments = ("convert", str(tmp_path / "model.safetensors"), str(tmp_path / "b"),
                 "--from", "interleaved", "--to", "half")  # fmt: skip
    assert_refused(main(*arguments), "has no config.json; give the model's with --config")
    given = ("--config", str(tmp_path / "given.json"))
    assert_refused(main(*arguments, *given), "weights of 'llama' are half, not interleaved")
    assert not (tmp_path / "b").exists()
    assert main(*arguments, *given, "--trust-source").code == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == LLAMA


def test_a_model_that_is_not_known_is_converted_with_the_config_of_one_that_is(
    main, source, tmp_path
):
    own = {**LLAMA, "model_type": "lama4u"}
    (source / "config.json").write_text(json.dumps(own))
    arguments = ("convert", str(source), str(tmp_path / "b"), *WAY)
    assert_refused(main(*arguments), "give --config (config=) a copy of its config.json with that")
    (tmp_path / "copy.json").write_text(json.dumps(LLAMA))
    assert main(*arguments, "--config", str(tmp_path / "copy.json")).code == 0
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written == {**LLAMA, "rope_traditional": True}


REFUSED = {
    "the wrong layout": (("a", "b", "--from", "interleaved", "--to", "half"), "are half, not"),
    "one layout": (("a", "b", "--from", "half", "--to", "half"), "--from and --to are both 'half'"),
    "no source": (("nothing", "b", *WAY), "no such file"),
    "itself": (("a", "a", *WAY), "overlaps the source"),
    "inside": (("a", "a/b", *WAY), "overlaps the source"),
    "around": (("a", ".", *WAY), "overlaps the source"),
    "a folder of no disk": (("a", "/proc/b", *WAY), "error: /proc/b: cannot be written; give ano"),
    "a full folder": (("a", "full", *WAY), "is not empty, it has 'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line_and_nothing_is_written(
    main, source, tmp_path, case, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    before = contents(tmp_path)
    arguments, message = REFUSED[case]
    assert_refused(main("convert", *arguments), message)
    assert contents(tmp_path) == before


USAGE = {
    "an unknown layout": (("a", "b", "--from", "neox", "--to", "half"), "neox"),
    "an unknown proof": (("a", "b", *WAY, "--verify", "none"), "none"),
    "an unknown option": (("a", "b", *WAY, "--in-place"), "--in-place"),
}


@pytest.mark.parametrize("case", USAGE)
def test_a_wrong_use_is_status_2_and_nothing_is_written(main, source, tmp_path, case, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    arguments, message = USAGE[case]
    done = main("convert", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert contents(tmp_path) == before


def test_names_with_control_characters_are_escaped(main, tmp_path):
    name = "model.layers.0.self_attn.q_proj.\x1b[31mweight"
    save_file({name: np.ones((8, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert_refused(main("convert", str(tmp_path), "--dry-run", *WAY), "\\x1b[31mweight")
