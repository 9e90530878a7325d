"""A converted model is not misread in silence: its config, the warning, `patch` and `doctor`."""

import json

import numpy as np
import pytest
import torch
from checkpoints import OTHER
from families import FAMILIES, GPTJ, distance, tiny_model
from safetensors.torch import load_file, save_file
from test_checkpoint_end_to_end import loaded, logits, moved, saved
from transformers import AutoModel, AutoModelForCausalLM

import rotary
from rotary import from_hf_config
from rotary.audit import audit
from rotary.checkpoint import convert_checkpoint
from rotary.checkpoint.files import MANIFEST
from rotary.checkpoint.layout import with_layout

# --- what transformers computes, and what `patch` does ---


def test_a_model_saved_again_keeps_the_mark(tmp_path):
    before = logits(saved("llama", tmp_path / "a"))
    moved(tmp_path / "a", tmp_path / "b")
    loaded(tmp_path / "b").save_pretrained(tmp_path / "c")
    model = loaded(tmp_path / "c")
    rotary.patch(model)
    assert distance(logits(model), before) < 1e-5


def test_the_text_of_a_larger_model_is_patched_and_its_vision_is_left():
    config = {
        "text_config": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
                        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
        "vision_config": {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 64,
                          "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32,
                          "patch_size": 16},
    }  # fmt: skip
    model = tiny_model(AutoModel, "llava", **config)
    model.config.text_config.rope_traditional = True
    with rotary.patch(model) as patched:
        rows = dict(patched.patched)
    assert "interleaved" in rows["language_model.layers.0.self_attn"]
    assert not any("interleaved" in rows[name] for name in rows if name.startswith("vision"))


def test_what_patch_cannot_turn_in_the_layout_of_the_weights_is_refused():
    model = tiny_model(AutoModelForCausalLM, "llama")
    model.config.rope_traditional = True
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*weights are interleaved"):
        rotary.patch(model)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    del attention.forward
    rotary.patch(model)
    with pytest.raises(ValueError, match=r"apply_rotary_pos_emb.*interleaved"):
        model.double()(torch.zeros(1, 3, dtype=torch.long))  # a type that ours does not take


# --- what the command says ---


@pytest.mark.parametrize(
    ("family", "values", "code"), [("gptj", GPTJ, "interleaved"), ("llama", {}, "half")]
)
def test_convert_warns_of_what_transformers_computes(main, tmp_path, family, values, code, capsys):
    saved(family, tmp_path / "a", **values)
    capsys.readouterr()
    way = ("--from", code, "--to", OTHER[code])
    for arguments in (("--dry-run",), (str(tmp_path / "b"),)):
        done = main("convert", str(tmp_path / "a"), *arguments, *way)
        (line,) = done.err.splitlines()
        assert done.code == 0
        assert line.startswith("warning: ")
        for part in ("transformers", f"'{family}'", code, OTHER[code], "rotary.patch(model)"):
            assert part in line
    done = main("convert", str(tmp_path / "b"), str(tmp_path / "c"), *("--from", OTHER[code]),
                *("--to", code))  # fmt: skip
    assert (done.code, done.err) == (0, "")
    again = json.loads(main("convert", str(tmp_path / "a"), "--dry-run", "--json", *way).out)
    assert again["warning"] == line.removeprefix("warning: ")
    back = json.loads(main("convert", str(tmp_path / "b"), "--dry-run", "--json",
                           *("--from", OTHER[code], "--to", code)).out)  # fmt: skip
    assert back["warning"] == ""


def test_convert_says_nothing_where_transformers_reads_the_key(tmp_path):
    saved("deepseek_v3", tmp_path / "a", **FAMILIES["deepseek_v3"][0])
    done = convert_checkpoint(
        tmp_path / "a", tmp_path / "b", from_layout="interleaved", to_layout="half"
    )
    assert done.warning == ""
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModel": "x.Y"}}))
    done = convert_checkpoint(
        tmp_path / "a", tmp_path / "c", from_layout="interleaved", to_layout="half"
    )
    assert "auto_map" in done.warning
    assert "trust_remote_code" in done.warning


def test_convert_warns_of_files_of_another_code_base(tmp_path):
    names = {f"layers.0.attention.w{n}.weight": torch.ones(16, 16) for n in "qk"}
    save_file(names, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
    done = convert_checkpoint(tmp_path / "model.safetensors", tmp_path / "b", config=config,
                              from_layout="interleaved", to_layout="half")  # fmt: skip
    assert "Meta's or Mistral's own files" in done.warning
    assert "rotary.patch" not in done.warning


def adapter(folder, parts):
    """A file of LoRA, or of projections, for 2 heads of 8 channels."""
    folder.mkdir()
    names = {f"model.layers.0.self_attn.{n}_proj.{part}": torch.ones(16, 16)
             for n in "qk" for part in parts}  # fmt: skip
    save_file(names, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("stated", [{"base_model_name_or_path": "org/base"}, {}, None])
def test_convert_says_that_an_adapter_needs_a_converted_base(tmp_path, stated):
    """A program takes the base from adapter_config.json, and its config, which no mark reaches."""
    folder = adapter(tmp_path / "a", ["lora_A.weight", "lora_B.weight"])
    if stated is not None:
        (folder / "adapter_config.json").write_text(json.dumps(stated))
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
    done = convert_checkpoint(folder, tmp_path / "b", config=config, from_layout="half",
                              to_layout="interleaved")  # fmt: skip
    base = "'org/base'" if stated else "a base model"
    assert done.warning.startswith(f"these are changes to the weights of {base}, and fit only")
    assert "convert the base model to interleaved too" in done.warning
    assert "rotary.patch" not in done.warning


def test_a_model_with_lora_inside_is_no_adapter(tmp_path):
    folder = adapter(tmp_path / "a", ["weight", "lora_A.speech.weight", "lora_B.speech.weight"])
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
    done = convert_checkpoint(folder, tmp_path / "b", config=config, from_layout="half",
                              to_layout="interleaved")  # fmt: skip
    assert "rotary.patch(model)" in done.warning


# --- what `doctor` and `audit` say ---


def faults(subject):
    return [each for each in audit(subject) if each.is_fault]


def test_doctor_says_that_transformers_does_not_know_the_layout(main, tmp_path):
    saved("gptj", tmp_path / "a", **GPTJ)
    moved(tmp_path / "a", tmp_path / "b")
    assert main("doctor", str(tmp_path / "a")).code == 0
    for target in (tmp_path / "b", tmp_path / "b" / "config.json"):
        done = main("doctor", str(target), "--json")
        assert done.code == 1
        (row,) = [row for row in json.loads(done.out) if row["is_fault"]]
        assert "half" in row["found"]
        assert "interleaved" in row["found"]
        assert "rotary.patch(model)" in row["advice"]
    assert main("doctor", str(tmp_path / "b")).code == 1


def test_audit_of_a_loaded_model_says_it_until_it_is_patched(tmp_path):
    saved("llama", tmp_path / "a")
    moved(tmp_path / "a", tmp_path / "b")
    model = loaded(tmp_path / "b")
    (finding,) = faults(model)
    assert "rotary.patch(model)" in finding.advice
    with rotary.patch(model):
        assert faults(model) == []
    assert faults(loaded(tmp_path / "a")) == []


def test_a_folder_whose_config_lost_the_mark_is_known_by_its_manifest(main, tmp_path):
    saved("gptj", tmp_path / "a", **GPTJ)
    moved(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
    (finding,) = faults(tmp_path / "b")
    assert MANIFEST in finding.found
    assert "half" in finding.found
    assert "rope_traditional" in finding.advice
    assert main("doctor", str(tmp_path / "b")).code == 1


def test_an_unfinished_conversion_is_a_fault(tmp_path):
    saved("llama", tmp_path / "a")
    (tmp_path / "a" / "rotary-conversion.unfinished").write_text("{}\n")
    (finding,) = faults(tmp_path / "a")
    assert "unfinished conversion" in finding.advice


def trained_like(folder, family, layout, **values):
    """A saved model whose rows have norms like those of training: larger at high frequencies."""
    saved(family, folder, **values)
    spec = from_hf_config(folder)
    random, pairs = np.random.default_rng(0), spec.rotary_dim // 2
    falling = np.linspace(0.3, -0.3, pairs)
    falling = np.tile(falling, 2) if layout == "half" else np.repeat(falling, 2)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if not name.endswith(("q_proj.weight", "k_proj.weight")):
                continue
            rows = tensors[name].reshape(-1, spec.head_dim, tensors[name].shape[1])
            noise = random.normal(0, 0.1, (len(rows), spec.rotary_dim))
            rows[:, : spec.rotary_dim] *= torch.from_numpy(np.exp(falling + noise)).float()[
                ..., None
            ]
            tensors[name] = rows.reshape(tensors[name].shape)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


MEASURED = {"gptj": ({**GPTJ, "rotary_dim": 16}, "interleaved"), "llama": ({}, "half")}


@pytest.mark.parametrize("family", ["gptj", "llama"])
def test_weights_in_another_layout_than_the_config_means_are_seen(main, tmp_path, family):
    values, code = MEASURED[family]
    right = trained_like(tmp_path / "right", family, code, **values)
    assert faults(right) == faults(loaded(right)) == []
    wrong = trained_like(tmp_path / "wrong", family, OTHER[code], **values)
    for subject in (wrong, wrong / "config.json", loaded(wrong)):
        (finding,) = faults(subject)
        assert f"look {OTHER[code]}" in finding.found
        assert code in finding.found
        assert f'"rope_traditional": {json.dumps(code == "half")}' in finding.advice
    assert main("doctor", str(wrong)).code == 1
    with pytest.warns(UserWarning, match=f"look {OTHER[code]}"), rotary.patch(loaded(wrong)):
        pass
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(with_layout(config, OTHER[code])))
    (finding,) = faults(wrong)  # the mark is right now, and transformers still ignores it
    assert "look" not in finding.found


def test_weights_that_show_no_layout_are_no_fault(tmp_path):
    for family in ("gptj", "llama", "phi3", "glm4"):
        saved(family, tmp_path / family, **{"gptj": GPTJ, "glm4": {"head_dim": 16}}.get(family, {}))
        assert faults(tmp_path / family) == []
