"""Models of transformers, saved, converted, loaded again, and run under the other rotation."""

import itertools
import json

import pytest
import torch
from checkpoints import OTHER
from families import FAMILIES, GPTJ, MLA, MOE, TINY, distance, tiny_model
from test_checkpoint_models import INDEXED
from transformers import AutoModel, AutoModelForCausalLM

import rotary
from rotary import from_hf_config
from rotary.checkpoint import convert_checkpoint
from rotary.checkpoint.files import MANIFEST

TOLERANCE = 1e-5
IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
MODELS = {
    "llama": {},
    "gptj": GPTJ,
    "gpt_neox": {},
    "glm4": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "cohere": {"use_qk_norm": True},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}

BAILING = {
    **MLA, **MOE, "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
COSMOS = {"text_config": {**TINY, "head_dim": 16, "rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1,
          "num_attention_heads": 2, "num_heads": 2, "out_hidden_size": 64,
          "deepstack_visual_indexes": [0]}  # fmt: skip
# whose tensors have other names in files than in memory: transformers renames and cuts them
RENAMED = {
    "exaone": {},
    "sarvam_moe": {**MOE, "head_dim": 16},
    "cosmos3_edge": {**COSMOS, "vision_config": VISION, "projector_hidden_size": 32},
    "cosmos3_omni": {**COSMOS, "vision_config": VISION},
    "axk2": INDEXED,
    "hrm_text": {"head_dim": 16},
    "bailing_hybrid": BAILING,
    "mistral_large4_text": {**INDEXED, "num_hidden_layers": 4},
}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def saved(family, folder, **values):
    """A model in shards, as transformers writes it, whose norms and biases are not all alike."""
    model = tiny_model(AutoModelForCausalLM, family, **values)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def moved(source, target):
    """The folder in the other layout, by the config in it; the two layouts."""
    before = from_hf_config(source).layout
    after = "half" if before == "interleaved" else "interleaved"
    done = convert_checkpoint(source, target, from_layout=before, to_layout=after, verify="full")
    assert done.proof.layers == (0, 1)
    assert from_hf_config(target).layout == after
    return before, after


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize(
    ("family", "exact"), list(zip(MODELS, itertools.cycle((False, True)), strict=False))
)
def test_a_converted_model_gives_the_same_logits_once_patched(tmp_path, family, exact):
    before = logits(saved(family, tmp_path / "a", **MODELS[family]))
    moved(tmp_path / "a", tmp_path / "b")
    model = loaded(tmp_path / "b")
    assert distance(logits(model), before) > 1e-3, "the old rotation must not fit any more"
    with rotary.patch(model, exact=exact):
        assert distance(logits(model), before) < TOLERANCE


@pytest.mark.parametrize("family", RENAMED)
def test_a_model_whose_files_have_names_of_their_own_is_converted(tmp_path, family):
    """Its names in memory were known, and those that people have on the disk were refused."""
    model = tiny_model(AutoModel, family, **RENAMED[family])
    model.save_pretrained(tmp_path / "a")
    ids = IDS[:, :6]
    with torch.no_grad():
        before = model(ids).last_hidden_state
        source = from_hf_config(tmp_path / "a").layout
        convert_checkpoint(
            tmp_path / "a", tmp_path / "b", from_layout=source, to_layout=OTHER[source]
        )
        model = AutoModel.from_pretrained(tmp_path / "b", dtype=torch.float32).eval()
        assert distance(model(ids).last_hidden_state, before) > 1e-3
        rotary.patch(model)
        assert distance(model(ids).last_hidden_state, before) < TOLERANCE


def test_deepseek_reads_the_other_layout_by_a_key_of_its_config(tmp_path):
    values = FAMILIES["deepseek_v3"][0]
    before = logits(saved("deepseek_v3", tmp_path / "a", **values))
    assert moved(tmp_path / "a", tmp_path / "b") == ("interleaved", "half")
    assert distance(logits(loaded(tmp_path / "b")), before) < TOLERANCE
    config = tmp_path / "b" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_interleave": True}))
    assert distance(logits(loaded(tmp_path / "b")), before) > 1e-3


@pytest.mark.parametrize("sibling", ["ernie4_5", "helium"])
def test_a_llama_runs_in_the_code_of_a_sibling_that_is_interleaved(tmp_path, sibling):
    """The same tensors and the same sums, but for the layout: two code bases as they are."""
    values = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "head_dim": 16}
    before = logits(saved("llama", tmp_path / "a", **values))
    moved(tmp_path / "a", tmp_path / "b")
    own = tiny_model(AutoModelForCausalLM, sibling, **values).config
    (tmp_path / "b" / "config.json").unlink()
    own.architectures = [AutoModelForCausalLM.from_config(own).__class__.__name__]
    own.save_pretrained(tmp_path / "b")
    assert from_hf_config(tmp_path / "b").layout == "interleaved"
    assert distance(logits(loaded(tmp_path / "b")), before) < TOLERANCE
    (tmp_path / "b" / MANIFEST).unlink()
    back = convert_checkpoint(
        tmp_path / "b", tmp_path / "c", from_layout="interleaved", to_layout="half"
    )
    for name in back.written:
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
