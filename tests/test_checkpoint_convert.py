"""A converted checkpoint: the same scores, every other byte as it was, and the way back."""

import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import (
    HEAD_DIM,
    HEADS,
    INDEX,
    KV_HEADS,
    LAYERS,
    LLAMA,
    SIDECARS,
    WIDTH,
    Inline,
    contents,
    converted,
    llama,
    name_of,
    there,
    weights,
)
from safetensors.numpy import load_file, save_file

import rotary
from rotary.checkpoint import shards
from rotary.checkpoint.channels import Run
from rotary.checkpoint.files import JOURNAL, MANIFEST
from rotary.checkpoint.layout import with_layout
from rotary.checkpoint.plan import Move

MOVING = ("q_proj.weight", "q_proj.bias", "k_proj.weight")


# --- what it is for ---


def scores(tensors, layer, interleaved):
    """Scores of one hidden state at positions 7 and 3, pair by pair, head by head."""
    random = np.random.default_rng(5)
    prefix = f"model.layers.{layer}.self_attn."
    x, y = random.standard_normal((2, WIDTH))
    q = tensors[prefix + "q_proj.weight"] @ x + tensors[prefix + "q_proj.bias"]
    k = tensors[prefix + "k_proj.weight"] @ y
    found = []
    for head in range(HEADS):
        mine = q[head * HEAD_DIM :][:HEAD_DIM]
        shared = k[head // (HEADS // KV_HEADS) * HEAD_DIM :][:HEAD_DIM]
        score = 0.0
        for pair in range(HEAD_DIM // 2):
            first, second = (
                (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + HEAD_DIM // 2)
            )
            turn = np.exp(1j * (7 - 3) * 10_000.0 ** (-2 * pair / HEAD_DIM))
            a, b = (complex(z[first], z[second]) for z in (mine, shared))
            score += (a * turn * b.conjugate()).real
        found.append(score)
    return np.array(found)


def test_scores_are_those_of_the_source_under_the_other_rotation_alone(tmp_path):
    source = llama(tmp_path / "a")
    target = there(source, tmp_path / "b")
    for layer in range(LAYERS):
        old, new = (load_file(folder / name_of(layer)) for folder in (source, target))
        expected = scores(old, layer, interleaved=False)
        np.testing.assert_allclose(scores(new, layer, interleaved=True), expected, rtol=1e-6)
        assert np.abs(scores(new, layer, interleaved=False) - expected).max() > 0.1


def test_only_queries_and_keys_move_and_all_other_bytes_stay(tmp_path):
    source = llama(tmp_path / "a")
    target = there(source, tmp_path / "b")
    before, after = contents(source), contents(target)
    assert after.keys() == before.keys() | {MANIFEST}
    for name in (*SIDECARS, INDEX):
        assert after[name] == before[name]
    for layer in range(LAYERS):
        old, new = before[name_of(layer)], after[name_of(layer)]
        length = 8 + int.from_bytes(old[:8], "little")
        assert new[:length] == old[:length]
        found, expected = load_file(target / name_of(layer)), weights(layer)
        different = {name for name in expected if not np.array_equal(found[name], expected[name])}
        assert different == {f"model.layers.{layer}.self_attn.{name}" for name in MOVING}
    assert json.loads(after["config.json"]) == {**LLAMA, "rope_traditional": True}


CONFIGS = {
    "as transformers writes it": json.dumps(LLAMA, indent=2, sort_keys=True) + "\n",
    "tabs, escapes and a mark": '\ufeff{\r\n\t"model_type":"llama","hidden_size":24,"head_dim":8,'
    '"num_attention_heads":4,\t"num_key_value_heads":2, "name": "\\u00fcü", "eps": 1.0E-5}',
    "with the key already": json.dumps({**LLAMA, "rope_traditional": False}),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_there_and_back_gives_the_bytes_of_every_file(tmp_path, config):
    source = llama(tmp_path / "a", CONFIGS[config])
    target = there(source, tmp_path / "b")
    back = there(target, tmp_path / "c", before="interleaved")
    after = contents(back)
    del after[MANIFEST]
    assert after == contents(source)
    again = contents(there(back, tmp_path / "d"))
    twice = contents(target)
    for found in (again, twice):
        del found[MANIFEST]
    assert again == twice


def test_a_config_that_was_edited_on_the_way_keeps_the_edit(tmp_path):
    target = there(llama(tmp_path / "a"), tmp_path / "b")
    data = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**data, "rope_theta": 5e5}))
    back = there(target, tmp_path / "c", before="interleaved")
    assert json.loads((back / "config.json").read_text()) == {**LLAMA, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("data", "layout", "expected"),
    [
        ({"model_type": "llama"}, "half", {}),
        ({"model_type": "gptj"}, "half", {"rope_traditional": False}),
        ({"model_type": "gptj", "rope_traditional": False}, "interleaved", {}),
        ({"model_type": "deepseek_v3"}, "half", {"rope_interleave": False}),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, "interleaved",
         {"rope_interleave": True}),
    ],
)  # fmt: skip
def test_the_config_says_the_layout_where_the_model_reads_it(data, layout, expected):
    changed = with_layout(data, layout)
    assert changed == {"model_type": data["model_type"], **expected}
    assert rotary.from_hf_config(changed).layout == layout


def test_the_text_part_of_a_larger_config_says_the_layout():
    data = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}
    changed = with_layout(data, "interleaved")
    assert changed == {**data, "text_config": {"model_type": "llama", "rope_traditional": True}}


def test_the_manifest_says_what_was_done_and_what_every_tensor_is(tmp_path):
    source = llama(tmp_path / "a")
    target = there(source, tmp_path / "b", verify="full")
    said = json.loads((target / MANIFEST).read_text())
    assert (said["from"], said["to"], said["rotary"]) == ("half", "interleaved", rotary.__version__)
    assert said["files"] == {name_of(i): (source / name_of(i)).stat().st_size for i in range(3)}
    assert said["config"] == (source / "config.json").read_text()
    assert said["proof"] == {"which": "full", "layers": [0, 1, 2], "tensors": 9, "error": 0.0}
    assert [move["heads"] for move in said["moves"] if "k_proj" in move["tensor"]] == [KV_HEADS] * 3
    found = {}
    for layer in range(LAYERS):
        for name, value in load_file(target / name_of(layer)).items():
            found[name] = hashlib.sha256(value.tobytes()).hexdigest()
    assert said["sha256"] == found


# --- one file, a config from elsewhere, what is not copied ---


def test_one_file_is_converted_beside_itself_with_its_config_alone(tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer.json").write_text("{}")
    target = there(tmp_path / "model.safetensors", tmp_path / "b")
    assert contents(target).keys() == {"model.safetensors", "config.json", MANIFEST}


def test_a_config_given_is_the_one_that_is_read_and_written(tmp_path):
    source = llama(tmp_path / "a", json.dumps({**LLAMA, "head_dim": 4, "hidden_size": 16}))
    target = there(source, tmp_path / "b", config=LLAMA)
    assert json.loads((target / "config.json").read_text()) == {**LLAMA, "rope_traditional": True}
    (tmp_path / "given.json").write_text(json.dumps(LLAMA, indent=7))
    back = there(target, tmp_path / "c", before="interleaved",
                 config=tmp_path / "given.json")  # fmt: skip
    assert (back / "config.json").read_text() == json.dumps(LLAMA, indent=7)


def test_weights_in_another_form_are_not_copied(tmp_path):
    source = llama(tmp_path / "a", sidecars=False)
    kept = {"pytorch_model.bin", "pytorch_model.bin.index.json", "sub/model.safetensors"}
    (source / "sub").mkdir()
    for name in kept:
        (source / name).write_bytes(b"old layout")
    target = there(source, tmp_path / "b")
    assert contents(source).keys() - contents(target).keys() == kept


def quantized(kind, rows):
    """One projection of `rows` channels and 16 inputs as a format stores it."""
    random = np.random.default_rng(rows)
    words = {"AWQ": (16, rows // 8), "GPTQ": (2, rows)}
    if kind == "int8":
        return {"weight": random.integers(-9, 9, (rows, 16)).astype(np.int8),
                "weight_scale": random.random((rows, 1), np.float32)}  # fmt: skip
    if kind == "float64":
        return {"weight": random.random((rows, WIDTH))}
    if kind == "LoRA":
        return {"lora_A.weight": random.random((3, 16), np.float32),
                "lora_B.weight": random.random((rows, 3), np.float32)}  # fmt: skip
    return {"qweight": random.integers(-(2**31), 2**31, words[kind]).astype(np.int32),
            "qzeros": random.integers(-(2**31), 2**31, (2, rows // 8)).astype(np.int32),
            "scales": random.random((2, rows)).astype(np.float16)}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "moves"), [("AWQ", 6), ("GPTQ", 6), ("int8", 4), ("float64", 2), ("LoRA", 2)]
)
def test_other_formats_are_proved_and_come_back(tmp_path, kind, moves):
    prefix = "model.layers.0.self_attn."
    arrays = {
        f"{prefix}{name}_proj.{part}": value
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM))
        for part, value in quantized(kind, rows).items()
    }
    save_file(arrays, tmp_path / "model.safetensors")
    target = tmp_path / "b"
    proof = converted(tmp_path / "model.safetensors", target, config=LLAMA, verify="full").proof
    assert (proof.tensors, proof.layers) == (moves, (0,))
    back = there(target, tmp_path / "c", before="interleaved")
    assert contents(back)["model.safetensors"] == contents(tmp_path)["model.safetensors"]
    assert contents(target)["model.safetensors"] != contents(tmp_path)["model.safetensors"]


# --- what is refused, before anything is written ---


def unfinished(folder):
    folder.mkdir()
    (folder / JOURNAL).write_text('{"from": "half"}\n')


def with_link(folder):
    folder.mkdir()
    os.link(folder.parent / "a" / name_of(0), folder / name_of(0))


REFUSED = {
    "finished": (lambda a, b: converted(a, b), "finished conversion"),
    "foreign": (lambda a, b: (b.mkdir(), (b / "x").write_text("x")), "is not empty, it has 'x'"),
    "of another source": (lambda a, b: unfinished(b), "of another source"),
    "a broken journal": (
        lambda a, b: (b.mkdir(), (b / JOURNAL).write_text("{\n")), "not readable; delete"),
    "hard links to the source": (lambda a, b: with_link(b), "is not empty"),
    "a file": (lambda a, b: b.write_text("x"), "not a folder"),
    "a link": (lambda a, b: b.symlink_to(a), "a link"),
    "below a file": (lambda a, b: b.parent.joinpath("b").mkdir(), "overlaps"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_that_is_not_new_is_refused_and_stays_as_it_was(tmp_path, case):
    prepare, message = REFUSED[case]
    source, target = llama(tmp_path / "a"), tmp_path / "b"
    prepare(source, target)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        converted(source, source / "inner" if case == "below a file" else target)
    assert contents(tmp_path) == before


def test_converting_twice_is_refused_with_and_without_the_manifest(tmp_path):
    target = there(llama(tmp_path / "a"), tmp_path / "b")
    with pytest.raises(ValueError, match="was converted to 'interleaved' already"):
        converted(target, tmp_path / "c")
    (target / MANIFEST).unlink()
    with pytest.raises(ValueError, match="weights of 'llama' are interleaved, not half"):
        converted(target, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_trusting_the_source_is_for_weights_that_another_program_has_moved(tmp_path):
    target = there(llama(tmp_path / "a"), tmp_path / "b")
    (target / MANIFEST).unlink()
    (target / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match="give --trust-source"):
        converted(target, tmp_path / "c", "interleaved")
    back = there(target, tmp_path / "c", before="interleaved", trust_source=True)
    assert contents(back)[name_of(1)] == contents(tmp_path / "a")[name_of(1)]


@pytest.mark.parametrize("name", [JOURNAL, MANIFEST])
def test_a_source_that_is_half_converted_or_says_nonsense_is_refused(tmp_path, name):
    source = llama(tmp_path / "a")
    (source / name).write_text("{")
    with pytest.raises(ValueError, match=r"unfinished conversion; finish it|not JSON"):
        converted(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_disk_that_is_too_small_is_refused_before_a_folder_is_made(tmp_path, monkeypatch):
    source = llama(tmp_path / "a")
    monkeypatch.setattr(
        "shutil.disk_usage", lambda folder: SimpleNamespace(total=2**40, free=2**20)
    )
    with pytest.raises(OSError, match=r"are needed and 0\.00 GB are free"):
        converted(source, tmp_path / "deep" / "b")
    assert not (tmp_path / "deep").exists()


def test_a_format_whose_channels_are_no_whole_bytes_is_refused_before_a_folder_is_made(tmp_path):
    name = "model.layers.0.self_attn.k_proj.weight"
    header = json.dumps({name: {"dtype": "F4", "shape": [16, 3], "data_offsets": [0, 24]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ValueError, match="not whole bytes"):
        converted(path, tmp_path / "b", config=LLAMA)
    assert not (tmp_path / "b").exists()


def test_what_is_unknown_in_attention_is_listed_and_warned_of(tmp_path):
    name = "model.layers.0.self_attn.first.weight"
    save_file({**weights(0), name: np.ones((32, WIDTH), np.float32)}, tmp_path / "m.safetensors")
    done = converted(tmp_path / "m.safetensors", tmp_path / "b", config=LLAMA)
    assert [left.tensor for left in done.plan.left] == [name]
    assert done.warning.startswith(
        f"{name} stays as it is: it is in attention, but its name is not known"
    )
    assert json.loads((tmp_path / "b" / MANIFEST).read_text())["left"][0]["tensor"] == name


def test_a_tensor_that_is_left_on_purpose_keeps_its_bytes(tmp_path):
    name = "model.layers.0.memory.keys.weight"
    save_file({**weights(0), name: np.eye(9, dtype=np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(
        ValueError, match=r"looks like a query or a key.*--leave \(leave=\[\.\.\.\]\)"
    ):
        converted(tmp_path / "m.safetensors", tmp_path / "b", config=LLAMA)
    done = converted(tmp_path / "m.safetensors", tmp_path / "b", config=LLAMA, leave=["*.memory.*"])
    assert [tuple(left) for left in done.plan.left] == [(name, "asked for")]
    np.testing.assert_array_equal(load_file(tmp_path / "b" / "m.safetensors")[name], np.eye(9))


# --- the proof ---


def test_the_proof_finds_a_key_moved_by_the_heads_of_the_query(tmp_path, monkeypatch):
    """Every row of a key in another place, as where heads are half as long: it comes back too."""
    real = Move.order.fget

    def wrong(move):
        if move.kind != "key":
            return real(move)
        return real(move._replace(runs=(Run(0, 2 * KV_HEADS, HEAD_DIM // 2),),
                                  rotary_dim=HEAD_DIM // 2))  # fmt: skip

    monkeypatch.setattr(Move, "order", property(wrong))
    with pytest.raises(ValueError, match=r"layer 0: scores .* differ .* the rows do not fit"):
        converted(llama(tmp_path / "a"), tmp_path / "b")
    assert not (tmp_path / "b" / MANIFEST).exists()
    assert not (tmp_path / "b" / INDEX).exists()


def test_the_proof_finds_channels_that_moved_outside_of_the_slices(tmp_path, monkeypatch):
    data = {**LLAMA, "model_type": "phi", "partial_rotary_factor": 0.5}
    monkeypatch.setattr(Move, "order", property(lambda move: np.arange(move.size)[::-1]))
    with pytest.raises(ValueError, match="channels outside the rotated slices have moved"):
        converted(llama(tmp_path / "a", json.dumps(data)), tmp_path / "b")


def test_the_proof_finds_a_move_that_does_not_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "moved", lambda raw, **how: np.roll(raw, 1))
    with pytest.raises(ValueError, match="does not come back when its move is undone"):
        converted(llama(tmp_path / "a"), tmp_path / "b")


@pytest.mark.parametrize("which", ["q_proj.weight", "up_proj.weight"])
def test_the_proof_finds_a_flipped_byte_and_the_next_call_mends_it(tmp_path, monkeypatch, which):
    source, folder = llama(tmp_path / "a"), tmp_path / "b"
    real = shards.read_again

    def flipped(job):
        if job.target.name == name_of(1):
            content = bytearray(job.target.read_bytes())
            tensor = next(tensor for name, tensor in job.shard.tensors.items() if which in name)
            content[tensor.end - 1] ^= 1
            job.target.write_bytes(content)
        return real(job)

    with monkeypatch.context() as patched:
        patched.setattr(shards, "read_again", flipped)
        with pytest.raises(ValueError, match=f"{which}' is not what was written.*run it again"):
            converted(source, folder, verify="full", executor=Inline())
    assert converted(source, folder).written == (name_of(1),)
    assert contents(folder) == contents(there(source, tmp_path / "c"))


def test_weights_that_are_no_numbers_are_moved_and_proved_as_well(tmp_path):
    values = weights(0)
    for value in values.values():
        value.reshape(-1)[::5] = [np.nan, np.inf, -np.inf, 0.0, 1.0][: value.size % 5 + 1][-1]
    save_file(values, tmp_path / "model.safetensors")
    done = converted(tmp_path / "model.safetensors", tmp_path / "b", config=LLAMA)
    assert done.proof == shards.Proof("sample", (0,), 3, 0.0)
