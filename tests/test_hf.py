"""The reader of Hugging Face configs against transformers itself, and what it refuses."""

import copy
import importlib
import json
import os
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import published
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import scaled

import rotary
from rotary import Rotary, from_hf_config, to_hf_config
from rotary.configs.files import MAX_CONFIG_BYTES
from rotary.kernels.torch.angles import FLOAT32
from rotary.schedules import SCHEDULES

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

# models whose config says it all; every other one is in test_parity.py
PLAIN = (
    "apertus", "arcee", "bitnet", "cwm", "exaone4", "gemma", "gemma2", "granite", "llama",
    "mistral", "mixtral", "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
D, HEADS = 32, 4
CONTEXT, TRAINED = 64, 32
SIZES = {"hidden_size": D * HEADS, "num_attention_heads": HEADS, "max_position_embeddings": CONTEXT}
# float32 exponents are off by 2^-24, which base 1e7 magnifies by ln(1e7) = 16
FLOAT32_RTOL = 32 * 2.0**-24
BASE = 5e5
TRAINED_ONLY = {"original_max_position_embeddings": TRAINED}


def parameters_of(rope_type: str, pairs: int) -> dict[str, Any]:
    return published.parameters_of(rope_type, pairs, TRAINED)


def theirs(config: Any) -> Any:
    """The module of transformers that computes cos and sin for this config."""
    modeling = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    (name,) = [name for name in dir(modeling) if name.endswith("RotaryEmbedding")]
    return getattr(modeling, name)(config)


def config_of(data: dict[str, Any]) -> Any:
    data = copy.deepcopy(data)  # transformers writes into the dicts it is given
    return transformers.AutoConfig.for_model(data.pop("model_type"), **data)


def assert_computes(spec: Rotary, config: Any) -> None:
    """`spec` gives what the module of `config` computes, bit for bit, near and far."""
    module = theirs(config)
    ours, factor = SCHEDULES[spec.schedule](spec.rotary_dim, spec.base, FLOAT32, **spec.params)
    np.testing.assert_array_equal(ours, module.inv_freq.numpy())
    assert factor == module.attention_scaling
    exact, factor = rotary.inv_freq(spec)
    np.testing.assert_allclose(exact, module.inv_freq.numpy(), rtol=FLOAT32_RTOL, atol=0)
    assert factor == module.attention_scaling
    for first, count in ((0, TRAINED), (0, CONTEXT + 21), (131_000, 72)):
        ids = torch.arange(first, first + count)[None]
        tables = theirs(config)(torch.empty(0), ids)  # a new one: `dynamic` keeps what it has seen
        for wide, half in zip(tables, rotary.cos_sin(spec, ids, "float32"), strict=True):
            pairs = half.shape[-1]
            assert wide.shape[-1] == 2 * pairs
            assert torch.equal(half, wide[..., :pairs])
            assert torch.equal(half, wide[..., pairs:])


# --- models as transformers computes them; every other rope type is in test_parity.py ---


@pytest.mark.parametrize("model", PLAIN)
def test_a_model_with_default_config(model, tmp_path):
    config = config_of({"model_type": model, **SIZES})
    spec = from_hf_config(config)
    assert_computes(spec, config)
    config.save_pretrained(tmp_path)
    for source in (config.to_dict(), tmp_path / "config.json", str(tmp_path), tmp_path):
        assert from_hf_config(source) == spec


@pytest.mark.parametrize("model", PLAIN)
def test_a_model_whose_config_is_silent(model):
    silent = {"model_type": model, **SIZES}
    assert_computes(from_hf_config(silent), config_of(silent))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_proportional_against_the_function_of_transformers(share):
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share}
    spec = from_hf_config({**SIZES, "rope_parameters": dict(rope)})
    config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(rope))
    wanted, factor = ROPE_INIT_FUNCTIONS["proportional"](config)
    params = dict(spec.params)
    ours, amplitude = SCHEDULES["proportional"](spec.rotary_dim, spec.base, FLOAT32, **params)
    np.testing.assert_array_equal(ours, wanted.numpy())
    assert (amplitude, spec.rotary_dim) == (factor, D)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED_ONLY}
LISTS = {name: parameters_of("longrope", D // 2)[name] for name in ("short_factor", "long_factor")}
WRITTEN = {
    "v4 theta": {"model_type": "llama", "rope_theta": 1e6},
    "v4 type": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "v4 rope_type": {"model_type": "llama", "rope_theta": BASE,
                     "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "v4 both": {"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling":
                {"type": "yarn", "rope_type": "yarn", "factor": 4.0, **TRAINED_ONLY}},
    "v4 YaRN's own": {"model_type": "mistral", "rope_theta": 1e4, "rope_scaling":
                      {"type": "yarn", "factor": 2.0, "finetuned": True, **TRAINED_ONLY}},
    "v4 null": {"model_type": "mistral", "rope_theta": 1e6, "rope_scaling": None},
    "v4 dynamic": {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "v4 partial": {"model_type": "stablelm", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    "v4 SmolLM2": {"model_type": "llama", "rope_theta": 1e5, "rope_scaling": None,
                   "rope_interleaved": False, "is_llama_config": True},
    "v4 and v5 equal": {
        "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 3e4},
        "rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 3e4}},
    "v5 no theta": {"model_type": "llama", "rope_parameters": {"rope_type": "default"}},
    "v5 no theta, mixtral": {"model_type": "mixtral", "rope_parameters": {"rope_type": "default"}},
    "v5 no theta, apertus": {"model_type": "apertus", "rope_parameters": {"rope_type": "default"}},
    "v5 no theta, smollm3": {"model_type": "smollm3", "rope_parameters": {"rope_type": "default"}},
    "v5 trained is the context": {"model_type": "llama", "rope_parameters":
                                  {"rope_type": "yarn", "rope_theta": BASE, "factor": 4.0}},
    "v5 factor null": {"model_type": "llama", "rope_parameters":
                       {"rope_type": "yarn", "factor": None, **TRAINED_ONLY}},
    "v5 truncate null": {"model_type": "llama", "rope_parameters":
                         {"rope_type": "yarn", "factor": 4.0, "truncate": None, **TRAINED_ONLY}},
    "phi3 outer length": {"model_type": "phi3", **TRAINED_ONLY, "rope_theta": 1e4,
                          "rope_scaling": {"type": "longrope", **LISTS}},
    "phi3 outer length wins": {"model_type": "phi3", **TRAINED_ONLY, "rope_scaling":
                               {"type": "longrope", "original_max_position_embeddings": 48,
                                **LISTS}},
    "phi3 no length": {"model_type": "phi3", "max_position_embeddings": 4 * 4096,
                       "rope_scaling": {"type": "longrope", **LISTS}},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_config_written_by_hand(name, tmp_path):
    data = {**SIZES, **WRITTEN[name]}
    before = copy.deepcopy(data)
    spec = from_hf_config(data)
    assert data == before
    (tmp_path / "config.json").write_text(json.dumps(data), "utf-8-sig")  # a BOM is accepted
    assert from_hf_config(tmp_path) == spec
    assert_computes(spec, config_of(data))


def test_rope_parameters_nested_by_layer_type():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    nested = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}, "none": None}
    data = {**SIZES, "rope_parameters": nested}
    assert from_hf_config(data, "full_attention") == from_hf_config(
        {**SIZES, "rope_parameters": full}
    )
    assert from_hf_config(data, layer_type="sliding_attention") == Rotary(head_dim=D)
    assert from_hf_config(data, "none") is None
    with pytest.raises(ValueError, match=r"nested by layer type; .*full_attention.* got None"):
        from_hf_config(data)
    with pytest.raises(ValueError, match="'ful_attention'; did you mean 'full_attention'"):
        from_hf_config(data, "ful_attention")


# --- the way back ---

SPECS = [
    Rotary(head_dim=64, base=1e6),
    Rotary(head_dim=80, rotary_dim=32),
    Rotary(head_dim=64, schedule="linear", params={"factor": 2.5}),
    Rotary(head_dim=64, schedule="dynamic", params={"factor": 2.0, **TRAINED_ONLY}),
    Rotary(head_dim=64, schedule="yarn", params=parameters_of("yarn", 32) | {"truncate": False}),
    Rotary(head_dim=64, schedule="longrope", params=parameters_of("longrope", 32)),
    Rotary(head_dim=64, schedule="longrope", params=parameters_of("longrope", 32)
           | {"factor": None, "attention_factor": 1.25}),
    Rotary(head_dim=64, base=BASE, schedule="llama3", params=LLAMA3),
    Rotary(head_dim=64, schedule="proportional", params={"partial_rotary_factor": 0.25}),
]  # fmt: skip


@pytest.mark.parametrize("layers", [6, 12])  # of 12, transformers writes layer 2 as "02"
@pytest.mark.parametrize("kind", ["indexed_attention", "sliding_attention"])
def test_layers_of_latents_with_widths_of_their_own(kind, layers, tmp_path):
    from transformers.models.dots3_note import modeling_dots3_note as theirs

    widths = {"qk_rope_head_dim": 16, "swa_qk_rope_head_dim": 8, "swa_qk_nope_head_dim": 24}
    kinds = ["indexed_attention", "sliding_attention"] * (layers // 2)
    sizes = {**widths, "swa_head_dim": 32, "num_hidden_layers": layers, "layer_types": kinds}
    config = theirs.Dots3NoteTextConfig(**sizes)
    config.save_pretrained(tmp_path)
    spec = from_hf_config(tmp_path, kind)
    assert spec.head_dim == (16 if kind == "indexed_attention" else 8)
    x = torch.randn(1, 1, 5, spec.head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs.Dots3NoteTextRotaryEmbedding(config)(x, torch.arange(5)[None], kind)
    wanted = theirs.apply_rotary_pos_emb_interleave(x, x, cos, sin)[0]
    torch.testing.assert_close(rotary.apply(spec, x), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("context", [None, 4 * TRAINED])
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_written_config_gives_the_spec_back(spec, version, context):
    context = None if spec.schedule == "dynamic" else context
    written = to_hf_config(spec, version=version, max_position_embeddings=context)
    assert from_hf_config(json.loads(json.dumps(written))) == spec
    assert from_hf_config({**SIZES, **written}) == spec


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 4096), st.data(), st.floats(1.5, 1e12), st.sampled_from([4, 5]))
def test_every_slice_and_base_come_back(half, data, base, version):
    rotary_dim = 2 * half
    head_dim = data.draw(st.integers(rotary_dim, 8192))
    spec = Rotary(head_dim=head_dim, rotary_dim=rotary_dim, base=base)
    assert from_hf_config(to_hf_config(spec, version=version)) == spec


def test_every_slice_of_every_head_comes_back():
    for head_dim in (56, 64, 80, 96, 98, 112, 120, 128, 160, 192, 196, 256):
        for rotary_dim in range(2, head_dim + 1, 2):
            spec = Rotary(head_dim=head_dim, rotary_dim=rotary_dim)
            assert from_hf_config(to_hf_config(spec)) == spec


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if spec.schedule != "proportional"], ids=str
)
def test_transformers_reads_what_is_written(spec, version):
    context = None if spec.schedule == "dynamic" else 4 * TRAINED
    written = to_hf_config(spec, version=version, max_position_embeddings=context)
    whole = spec.rotary_dim == spec.head_dim
    reader = transformers.LlamaConfig if whole else transformers.PhiConfig
    assert_computes(spec, reader(**{**SIZES, **copy.deepcopy(written)}))


@pytest.mark.parametrize("version", [4, 5])
def test_transformers_reads_what_is_written_of_proportional(version):
    spec = Rotary(head_dim=64, schedule="proportional", params={"partial_rotary_factor": 0.25})
    assert spec in SPECS
    config = transformers.LlamaConfig(**{**SIZES, **to_hf_config(spec, version=version)})
    wanted, factor = ROPE_INIT_FUNCTIONS["proportional"](config)
    ours, amplitude = SCHEDULES["proportional"](64, spec.base, FLOAT32, **spec.params)
    np.testing.assert_array_equal(ours, wanted.numpy())
    assert amplitude == factor


UNWRITABLE = [
    (Rotary(head_dim=8, layout="interleaved"), "layout='interleaved'"),
    (Rotary(head_dim=8, out_layout="interleaved"), "out_layout='interleaved'"),
    (Rotary(head_dim=8, rotary_dim=4, start=4), "start=4"),
    (Rotary(head_dim=8, sign=-1), "sign=-1"),
    (Rotary(head_dim=8, axes=(0, 1, 0, 1)), r"axes=\(0, 1, 0, 1\)"),
    (Rotary(head_dim=8, schedule="ntk", params={"factor": 2}), "no rope_type 'ntk'"),
    (Rotary(head_dim=8, schedule="custom", params={"inv_freq": [1] * 4}), "no rope_type 'custom'"),
    (scaled("dynamic_linear", 8, 2, 64), "no rope_type 'dyn"),
    # one key cannot say both shares
    (Rotary(head_dim=8, rotary_dim=4, schedule="proportional",
            params={"partial_rotary_factor": 0.5}), "partial_rotary_factor|rotary_dim"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "message"), UNWRITABLE)
def test_what_a_config_cannot_say_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        to_hf_config(spec)


def test_arguments_of_the_writer():
    with pytest.raises(ValueError, match="version must be 4 or 5, got 6"):
        to_hf_config(Rotary(head_dim=8), version=6)
    spec = Rotary(head_dim=8, schedule="dynamic", params={"factor": 2, **TRAINED_ONLY})
    assert to_hf_config(spec)["max_position_embeddings"] == TRAINED
    with pytest.raises(ValueError, match="must be 32, got 64"):
        to_hf_config(spec, max_position_embeddings=64)


# --- faults: every message names the field and the value ---

PHI = {"model_type": "phi", **SIZES}
FAULTS = [
    ({"model_type": "lama"}, "model_type 'lama' is not known; did you mean 'llama'"),
    ({"rope_scaling": {"type": "liner", "factor": 2}}, "rope_type 'liner'.* did you mean 'linear'"),
    ({"rope_scaling": {"type": None}}, 'rope_type must be a name such as "default", got None'),
    ({"rope_parameters": {"rope_type": "", "rope_theta": 1e4}}, "must be a name .* got ''"),
    ({"rope_parameters": {"rope_type": "linear", "fator": 2}}, "key 'fator'.* mean 'factor'"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "'yarn' and type 'linear'"),
    ({"rope_scaling": {"type": "linear", "factor": 2},
      "rope_parameters": {"rope_type": "linear", "factor": 4}}, "rope_parameters and rope_scaling"),
    # transformers takes rope_scaling alone, and loses the base
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters":
      {"type": "linear", "factor": 2, "rope_theta": 3e4}}, "rope_parameters and rope_scaling"),
    ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
    ({"rope_parameters": "x"}, "rope_parameters must be an object, got 'x'"),
    ({"rope_scaling": {"type": "linear"}}, "'linear' needs parameter 'factor'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": False, **TRAINED_ONLY}},
     "'yarn' has no key 'finetuned'"),  # which their code scales by the length of each row
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs parameter 'low_freq_factor'"),
    ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size 100 .* num_attention_heads 3"),
    ({"hidden_size": None}, "needs head_dim, or hidden_size and num_attention_heads"),
    ({"num_attention_heads": True}, "num_attention_heads must be a whole number, got True"),
    ({"num_attention_heads": 0}, "needs head_dim, or hidden_size and num_attention_heads"),
    ({"head_dim": 31}, "^(?!.*rotary_dim=32).*31"),  # 32 channels would not fit
    ({"head_dim": "64"}, "head_dim .*'64'"),
    ({"rope_theta": 0}, "rope_theta must be finite and >= 1, got 0"),
    ({"rope_theta": "1e4"}, "rope_theta must be a number, got '1e4'"),
    ({"rope_theta": float("nan")}, "rope_theta must be finite and >= 1, got nan"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5.*llama"),
    ({**PHI, "partial_rotary_factor": 0}, r"partial_rotary_factor must be in \(0, 1\], got 0"),
    ({**PHI, "partial_rotary_factor": 1.5}, r"partial_rotary_factor must be in .* got 1.5"),
    ({**PHI, "partial_rotary_factor": float("nan")}, "partial_rotary_factor .* got nan"),
    ({**PHI, "partial_rotary_factor": "half"}, "partial_rotary_factor .* got 'half'"),
    ({**PHI, "head_dim": 36, "partial_rotary_factor": 0.25}, "is 9 channels.*rotary_dim=10"),
    ({"max_position_embeddings": None, "rope_scaling": {"type": "dynamic", "factor": 2}},
     "dynamic needs max_position_embeddings"),
    ({"max_position_embeddings": "long", "rope_scaling": {"type": "yarn", **TRAINED_ONLY}},
     "max_position_embeddings.*'long'"),
    ({"model_type": ["llama"]}, "model_type .*llama"),
    ({"rope_theta": 10**400}, "base"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_a_config_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config({**SIZES, **change})


def test_only_a_config_is_read():
    with pytest.raises(ValueError, match=r"path, a dict or a PretrainedConfig, got builtins\.int"):
        from_hf_config(7)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)
FULL = {**SIZES, "model_type": "llama", "head_dim": D, "partial_rotary_factor": 1.0, **TRAINED_ONLY,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": BASE, **LLAMA3}}  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from([*FULL, *FULL["rope_parameters"]]), st.sampled_from(TYPES), json_values)
def test_any_value_is_read_or_refused_as_a_value_error(key, rope_type, value):
    data = copy.deepcopy(FULL)
    rope = data["rope_parameters"]
    rope.clear()
    rope.update(rope_type=rope_type, rope_theta=BASE, **(
        {} if rope_type == "proportional" else parameters_of(rope_type, D // 2)))  # fmt: skip
    (data if key in FULL and key not in rope else rope)[key] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a factor below 1 is only pointed out
        try:
            spec = from_hf_config(data)
        except ValueError as error:
            assert str(error)  # noqa: PT017  # either outcome is right, another exception is not
        else:
            assert spec is None or isinstance(spec, Rotary)


# --- files: nothing but small JSON is read, and nothing is executed ---

PLAIN = json.dumps(SIZES)
FILES = [
    (b"", "is not JSON in UTF-8"),
    (b"hidden_size: 64", "is not JSON in UTF-8"),
    (PLAIN.encode("utf-16"), "is not JSON in UTF-8"),
    (PLAIN.encode("utf-16-le"), "is not JSON in UTF-8"),
    (b'{"a": 1, "rope_theta": 1, "rope_theta": 2}', "key 'rope_theta' appears twice"),
    (b'{"rope_parameters": {"factor": 1, "factor": 1}}', "key 'factor' appears twice"),
    (b'{"rope_theta": NaN}', "NaN is not JSON"),
    (b"[{}]", "must hold an object, got list"),
    (b"7", "must hold an object, got int"),
    (b"[" * 10_000 + b"]" * 10_000, "nested more than 64 deep"),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested more than 64 deep"),
    (b" " * MAX_CONFIG_BYTES + b" {}", "larger than 10,485,760 bytes"),
    (b"{" + b",".join(b'"%d": 0' % n for n in range(10_000)) + b', "9": 0}', "'9' appears twice"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=[message for _, message in FILES])
def test_a_file_that_is_no_config_is_refused_at_once(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        from_hf_config(path)
    assert time.perf_counter() - start < 1
    if "head_dim" not in str(caught.value):
        assert str(path) in str(caught.value)


def test_a_path_that_is_not_there(tmp_path):
    for path in (tmp_path / "config.json", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            from_hf_config(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_unread(tmp_path):
    path = tmp_path / "pipe"  # its size says 0, whatever comes out of it
    os.mkfifo(path)
    raised: list[Exception] = []

    def read() -> None:
        try:
            from_hf_config(path)
        except (ValueError, OSError) as error:
            raised.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(timeout=5)
    assert not reader.is_alive()
    assert str(raised[0]).startswith(f"{path}: not a regular file; save the config first")


def test_code_of_a_model_folder_is_never_executed(tmp_path, monkeypatch):
    code = "import pathlib; pathlib.Path(__file__).with_name('executed').touch()"
    (tmp_path / "configuration_x.py").write_text(code)
    maps = {"auto_map": {"AutoConfig": "configuration_x.XConfig"}, "trust_remote_code": True}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **maps}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert from_hf_config(tmp_path) == Rotary(head_dim=D)
    assert "configuration_x" not in sys.modules
    assert not (tmp_path / "executed").exists()
    importlib.import_module("configuration_x")  # the trap works
    assert (tmp_path / "executed").exists()
    del sys.modules["configuration_x"]


@pytest.mark.parametrize("present", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize(
    ("model_type", "beside"),
    [("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 5000.0}),
     ("gemma3n_text", {"rope_theta": 5e5}),
     ("t5gemma2_text", {"rope_theta": 5e5})],
)  # fmt: skip
def test_a_layer_type_without_an_entry_has_the_base_beside_the_entries(model_type, beside, present):
    entry = {present: {"rope_type": "default", "rope_theta": 12345.0}}
    config = {**beside, "rope_parameters": entry}
    theirs = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(config)).rope_parameters
    for kind in ("full_attention", "sliding_attention"):
        ours = from_hf_config({"model_type": model_type, **config}, kind)
        assert ours.base == theirs[kind]["rope_theta"]


@pytest.mark.parametrize("model_type", ["ministral3", "higgs_audio_v2", "apertus", "cwm"])
def test_a_base_that_is_not_read_is_refused_with_the_one_of_the_model(model_type):
    theirs = transformers.AutoConfig.for_model(model_type, rope_theta=12345.0).rope_parameters
    base = theirs["rope_theta"]
    assert base != 12345.0
    with pytest.raises(
        ValueError, match=rf"12345.0 is not read .* which has {base:g}".replace("+", r"\+")
    ):
        from_hf_config({"model_type": model_type, "rope_theta": 12345.0})
    assert from_hf_config({"model_type": model_type, "rope_theta": base}).base == base


@pytest.mark.parametrize("rope", [{}, {"rope_type": "default", "rope_theta": 5e5}])
def test_a_model_that_needs_an_entry_for_each_layer_type_is_not_read_without(rope):
    config = {"model_type": "cohere_compass_text", "rope_parameters": rope}
    with pytest.raises(ValueError, match="needs rope_parameters with an entry for each layer type"):
        from_hf_config(config)
