"""Every class of transformers that makes rotary tables equals ours; the run prints counts."""

import copy
import inspect
import math
import sys
from pathlib import Path

import numpy as np
import parity
import pytest
import torch

import rotary
from rotary import Rotary, from_hf_config
from rotary.configs import MODELS

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "golden"))
import make_models  # noqa: E402  # beside the golden values, not in the package

# class -> why it does not equal ours; each with its demonstration in golden/DIFFERENCES.md
DIFFERENT = {
    "EsmFold2RotaryEmbedding": "no model_type of its own",
    "Gemma4VisionRotaryEmbedding": "not one rotation",
    "HunYuanVLRotaryEmbedding": "not one rotation",
    "MusicFlamingoRotaryEmbedding": "not one rotation",
}
TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")
CLASSES = make_models.rotary_classes()
PLAIN = [
    (module, name)
    for module, name in CLASSES
    if "ROPE_INIT_FUNCTIONS" in inspect.getsource(getattr(module, name)) and name not in DIFFERENT
]


def label(value):
    return value if isinstance(value, str) else ""


def config_of(module, name):
    transformers.logging.set_verbosity_error()
    return make_models.config_for(module, getattr(module, name))


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=label)
def test_a_class_equals_ours(module, name, record_property):
    if name in DIFFERENT:
        record_property("parity", "different")
        config = config_of(module, name)
        if config is not None:
            with pytest.raises(ValueError, match=DIFFERENT[name]):
                from_hf_config(config)
        return
    cases = list(parity.cases(module, name, config_of(module, name)))
    assert cases
    for case in cases:
        parity.compare(case)
    record_property("parity", f"equal {len(cases)}")


def test_at_least_95_percent_are_equal():
    assert len(DIFFERENT) <= 0.05 * len(CLASSES)
    assert set(DIFFERENT) <= {name for _, name in CLASSES}
    text = (Path(__file__).parent / "golden" / "DIFFERENCES.md").read_text()
    assert all(name in text for name in DIFFERENT)


def scaled(rope_type: str, pairs: int, theta: float) -> dict:
    more = {
        "linear": {"factor": 3.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 6.0, "original_max_position_embeddings": 4096},
        "longrope": {
            "short_factor": np.linspace(1, 3, pairs).tolist(),
            "long_factor": np.geomspace(1, 40, pairs).tolist(),
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    }  # fmt: skip
    return {"rope_type": rope_type, "rope_theta": theta, **more[rope_type]}


def variant(config, rotary_class, rope_type, spec, layer_type):
    """The config with another rope type, or None where the config class refuses it."""
    data = copy.deepcopy(config.to_dict())
    rope = scaled(rope_type, spec.rotary_dim // 2, spec.base)
    old = data.pop("rope_parameters", None) or {}
    kept = ("mrope_section", "mrope_interleaved")
    is_share = "proportional" not in str(old.get(layer_type))  # or the share is of its pairs
    if is_share and MODELS.get(config.model_type, {}).get("partial_rotary_factor"):
        kept = (*kept, "partial_rotary_factor")
    for key in kept:
        value = (old.get(layer_type) or {}).get(key) if layer_type else old.get(key)
        if value is not None:
            rope[key] = value
    data["rope_parameters"] = {**old, layer_type: rope} if layer_type else rope
    for key in ("rope_scaling", "model_type", "transformers_version"):
        data.pop(key, None)
    if "head_dim" in data and data["head_dim"] is None:  # or ROPE_INIT_FUNCTIONS multiply by None
        data["head_dim"] = spec.head_dim
    try:
        made = type(config)(**data)
        rotary_class(made)
    except Exception as error:  # any: each class says no in its own way
        return type(error).__name__
    mine = made.rope_parameters or {}
    mine = mine.get(layer_type) if layer_type else mine
    return made if mine and mine.get("rope_type") == rope_type else "another type"


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize(("module", "name"), PLAIN, ids=label)
def test_a_class_with_another_rope_type(module, name, rope_type, record_property):
    config = config_of(module, name)
    counts = {"equal": 0, "refused": 0}
    for case in parity.cases(module, name, config):
        if case.layer_type and "rope_theta" in case.layer_type:
            continue
        spec = from_hf_config(case.config, case.layer_type)
        if rope_type not in MODELS.get(case.config.model_type, {}).get("only", TYPES):
            with pytest.raises(ValueError, match="alone is read"):
                from_hf_config({"model_type": case.config.model_type, "rope_parameters": scaled(
                    rope_type, spec.rotary_dim // 2, spec.base)})  # fmt: skip
            continue
        made = variant(config, case.rotary, rope_type, spec, case.layer_type)
        if isinstance(made, str):
            counts["refused"] += 1
            continue
        parity.compare(case._replace(config=made))
        counts["equal"] += 1
    record_property("variants", " ".join(f"{key} {value}" for key, value in counts.items()))


# --- models that have no such class ---


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_gptj_and_codegen(name):
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    spec = from_hf_config({"model_type": name})
    assert (spec.layout, spec.rotary_dim, spec.head_dim) == ("interleaved", 64, 256)
    table = module.create_sinusoidal_positions(300, spec.rotary_dim)
    sin, cos = table.chunk(2, dim=-1)
    ours = rotary.cos_sin(spec, torch.arange(300))
    for got, want in zip(ours, (cos, sin), strict=True):  # theirs are float32 angles
        torch.testing.assert_close(got, want, rtol=0, atol=300 * 2.0**-23)
    x = torch.randn(1, 300, 4, spec.rotary_dim)
    want = module.apply_rotary_pos_emb(x, sin[None], cos[None])
    got = rotary.rotate(x, cos, sin, layout="interleaved", seq_dim=-3)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_roformer():
    from transformers.models.roformer import modeling_roformer as module

    spec = from_hf_config({"model_type": "roformer"})
    table = module.RoFormerSinusoidalPositionalEmbedding(64, spec.head_dim)
    table.weight.data = table.create_weight()
    made = table([1, 64])[None, None]
    q, k = torch.randn(1, 4, 64, spec.head_dim), torch.randn(1, 4, 64, spec.head_dim)
    want = module.RoFormerSelfAttention.apply_rotary_position_embeddings(made, q, k)
    ours = rotary.apply(spec, q, k)
    for got, theirs in zip(ours, want, strict=True):
        torch.testing.assert_close(got, theirs, rtol=0, atol=2e-6)


# --- the table is what transformers says ---


def test_the_table_is_not_older_than_transformers(monkeypatch, tmp_path):
    monkeypatch.setattr(make_models, "TABLE", tmp_path / "models.json")
    make_models.main()
    made = (tmp_path / "models.json").read_text()
    assert made == (Path(rotary.__file__).parent / "models.json").read_text()


def test_every_entry_is_read_or_refused_with_a_reason():
    read = 0
    for name, model in MODELS.items():
        if not set(model) - {"parts"}:
            continue
        kinds = model.get("layers") or (None,)
        for kind in kinds:
            try:
                spec = from_hf_config({"model_type": name}, kind)
            except ValueError:
                continue
            assert spec is None or isinstance(spec, Rotary)
            read += 1
    assert read >= 0.95 * len([model for model in MODELS.values() if set(model) - {"parts"}])
    assert math.isfinite(read)
