"""Broken configs: transformers' numbers or one sentence; and each way it once was neither.

`python tests/against_transformers.py 100000 0` is the same at full length.
"""

import contextlib
import copy
import json
import random
import re
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
from libraries import of_transformers

import rotary
from rotary import cli, from_hf_config
from rotary.configs import MODELS, entries, replace_rope
from rotary.programs import diff

against = pytest.importorskip("against_transformers", reason="needs transformers")
mutations, make_models = against.mutations, against.make_models

# transformers 4 reads other keys, and lacks models: the comparison is with the pinned release
compared = pytest.mark.usefixtures("pinned_transformers")
LAYERED = ("full_attention", "sliding_attention")
LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
YARN_HERE = {**YARN, "rope_theta": 1e4}
OUTER = {"original_max_position_embeddings": 64}
LLAMA = {"model_type": "llama", "head_dim": 64}


@pytest.fixture
def pinned_transformers():
    of_transformers("transformers")


@compared
@pytest.mark.parametrize("seed", range(2))
def test_a_broken_config_gives_the_numbers_of_transformers_or_one_sentence(seed):
    counts, faults = against.run(seed, 1000)
    assert faults == []
    assert counts["both read, equal"] > 300
    assert counts["slower than 50 ms"] <= 2  # of a machine that does other things too


def test_a_config_that_takes_too_long_leaves_gradients_on():
    with contextlib.suppress(TimeoutError), against.seconds(1):
        torch.set_grad_enabled(False)  # as an alarm in the middle of `torch.no_grad` leaves it
        signal.raise_signal(signal.SIGALRM)
        pytest.fail("the alarm was not raised")
    assert torch.is_grad_enabled()


def read_as_transformers(data, kind=None, *, strict=True):
    """What both read, which must be the same; or our refusal."""
    spec = rotary.from_hf_config(data, kind, strict=strict)
    for length in (None, 10_000) if spec.depends_on_length else (None,):
        got, wanted = against.ours(spec, length), against.numbers(data, kind, length)
        np.testing.assert_allclose(got.inv_freq, wanted.inv_freq, rtol=against.CLOSE)
        assert got.attention_factor == pytest.approx(wanted.attention_factor)
    return spec


FILLED = ("gemma3_text", "gemma3n_text", "olmo3", "t5gemma2_text")


@compared
@pytest.mark.parametrize("name", FILLED)
def test_a_flat_rope_parameters_is_ignored_by_transformers_and_refused_here(name):
    """Where layer types differ: it was read as the older rope_scaling, for some of the layers."""
    flat = {"model_type": name, "rope_parameters": {**LINEAR, "rope_theta": 5e4}}
    silent = against.numbers({"model_type": name}, "full_attention", None)
    same = against.numbers({**flat, "rope_parameters": dict(flat["rope_parameters"])},
                           "full_attention", None)  # fmt: skip
    np.testing.assert_array_equal(same.inv_freq, silent.inv_freq)
    for kind in LAYERED:
        with pytest.raises(ValueError, match=r"must be nested by layer type: \{\"full_attention\""):
            rotary.from_hf_config(flat, kind)
    scaled = {"model_type": name, "rope_scaling": LINEAR}
    assert read_as_transformers(scaled, "full_attention").schedule == "linear"
    assert read_as_transformers(scaled, "sliding_attention").schedule == "default"


@compared
def test_a_rope_scaling_that_layered_models_of_transformers_do_not_read():
    old = {"model_type": "olmo3", "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="needs rope_type; transformers does not read its type"):
        rotary.from_hf_config(old, "full_attention")
    nested = {"model_type": "gemma3_text", "rope_scaling": dict.fromkeys(LAYERED, LINEAR)}
    with pytest.raises(ValueError, match="write them under rope_parameters"):
        rotary.from_hf_config(nested, "full_attention")
    with pytest.raises(ValueError, match="must be nested by layer type"):
        rotary.from_hf_config({"model_type": "gemma4_text", "rope_scaling": LINEAR}, LAYERED[0])
    v4 = {"model_type": "deepseek_v4", "rope_scaling": {**LINEAR, "rope_theta": 5e5}}
    with pytest.raises(ValueError, match="has rope_theta, which its code replaces"):
        rotary.from_hf_config(v4, "compress")
    assert read_as_transformers({**v4, "rope_scaling": dict(LINEAR)}, "compress").base == 160_000


@compared
@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
def test_truncate_of_a_layer_type_is_read_beside_the_entries(name):
    """transformers rounds the ramp of entries that say truncate false: 5 to 15 % in inv_freq."""
    entry = {**YARN_HERE, "original_max_position_embeddings": 4096, "truncate": False}
    other = {"rope_type": "default", "rope_theta": 1e4}
    nested = {
        "model_type": name,
        "rope_parameters": dict(zip(LAYERED, (entry, other), strict=True)),
    }
    flat = {"model_type": name, "rope_scaling": {k: entry[k] for k in entry if k != "rope_theta"}}
    for data in (nested, flat):
        with pytest.raises(ValueError, match="truncate False of 'full_attention' is not read"):
            rotary.from_hf_config(data, LAYERED[0])
        with pytest.warns(UserWarning, match="is not read"):
            assert read_as_transformers(data, LAYERED[0], strict=False).params.get("truncate", True)
        reading = diff(data, layer_type=LAYERED[0]).readings[0]
        wanted = against.numbers(data, LAYERED[0], None).inv_freq
        np.testing.assert_allclose(reading.inv_freq, wanted, rtol=against.CLOSE)
    both = {**nested, "rope_parameters": {**nested["rope_parameters"], "truncate": False}}
    assert read_as_transformers(both, LAYERED[0]).params["truncate"] is False


@pytest.mark.parametrize("name", ["gptj", "codegen", "roformer"])
def test_models_whose_base_is_in_their_code(name):
    """They make their tables of base 10 000 from nothing in the file."""
    assert rotary.from_hf_config({"model_type": name}).base == 10_000
    with pytest.raises(ValueError, match=f"not read for this model of model_type '{name}', whose"):
        rotary.from_hf_config({"model_type": name, "rope_theta": 5e5})
    with pytest.raises(ValueError, match="reads only rope_type default, got 'yarn'"):
        rotary.from_hf_config({"model_type": name, "rope_parameters": YARN_HERE})
    with pytest.raises(ValueError, match="reads only rope_type default, got 'linear'"):
        replace_rope(
            {"model_type": name}, rotary.from_hf_config(LLAMA | {"rope_scaling": LINEAR}), 99
        )


SHARED = "partial_rotary_factor"


@compared
@pytest.mark.parametrize("name", ["laguna", "mellum", "zaya", "diffusion_gemma_text"])
def test_a_share_beside_the_entries_of_models_that_do_not_read_it(name):
    """It went into the entries: 96 of 128 channels where transformers rotates all."""
    entries = {
        kind: {"rope_type": "default", "rope_theta": 2e4}
        for kind in ("hybrid" if name == "zaya" else "full_attention", "sliding_attention")
    }
    kind = next(iter(entries))
    data = {"model_type": name, "rope_parameters": entries}
    spec = read_as_transformers(data, kind)
    for wrong in (data, {"model_type": name}):
        with pytest.raises(ValueError, match=f"{SHARED} 0.75 is not read"):
            rotary.from_hf_config({**wrong, SHARED: 0.75}, kind)
    own = {each: entry | {SHARED: 0.5} for each, entry in entries.items()}  # as in Laguna's file
    read_as_transformers({**data, SHARED: 0.75, "rope_parameters": own}, kind)
    with pytest.warns(UserWarning, match="is not read"):
        assert read_as_transformers({**data, SHARED: 0.75}, kind, strict=False) == spec


@compared
@pytest.mark.parametrize(
    ("name", "kind", "pairs"),
    [("mimo_v2_flash", "sliding_attention", 32), ("neomme", "full_attention", 8)],
)
def test_an_entry_without_a_share_where_code_or_class_has_one(name, kind, pairs):
    """The whole head was read: 96 and 32 pairs."""
    entry = {"rope_type": "default", "rope_theta": 3e4}
    data = {"model_type": name, "rope_parameters": {each: dict(entry) for each in LAYERED}}
    assert against.numbers(data, kind, None).inv_freq.shape == (pairs,)
    with pytest.raises(ValueError, match=f"needs {SHARED}"):
        rotary.from_hf_config(data, kind)
    for each in data["rope_parameters"].values():
        each[SHARED] = 0.5
    read_as_transformers(data, kind)


@compared
def test_a_type_in_an_entry_of_neomme_is_not_read_beside_a_missing_rope_type():
    """The class adds rope_type default first: the entry was read as linear, and it is plain."""
    entry = {"rope_theta": 1e4, SHARED: 1.0}
    scaled = {"type": "linear", "factor": 4.0, **entry}
    entries = {"full_attention": scaled, "sliding_attention": {"rope_type": "default", **entry}}
    data = {"model_type": "neomme", "rope_parameters": entries}
    assert against.numbers(data, "full_attention", None).inv_freq[0] == 1
    with pytest.raises(ValueError, match="'full_attention' needs rope_type"):
        rotary.from_hf_config(data, "full_attention")
    scaled["rope_type"] = "linear"
    read_as_transformers(data, "full_attention")


LISTS = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
PHI3_YARN = {"model_type": "phi3", "rope_scaling": {"type": "yarn", **LISTS}}


@compared
@pytest.mark.parametrize(
    ("outer", "inner", "used"), [(64, None, 64), (64, 32, 64), (None, 32, 32), (None, None, 2048)]
)
def test_the_trained_length_beside_flat_rope_parameters_wins_in_transformers(outer, inner, used):
    name = "original_max_position_embeddings"
    rope = {**YARN, **({name: inner} if inner else {})}
    data = {**LLAMA, **({name: outer} if outer else {}), "rope_scaling": rope}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are given and differ
        spec = from_hf_config(data, strict=False)
    assert spec.params[name] == used
    theirs = against.numbers(data, None, None).inv_freq
    np.testing.assert_allclose(against.ours(spec, None).inv_freq, theirs, rtol=against.CLOSE)


@compared
def test_the_trained_length_beside_nested_rope_parameters_is_ignored_by_transformers():
    data = nested("gemma3_text", YARN_HERE, YARN_HERE)
    plain, beside = (
        against.numbers(each, LAYERED[0], None).inv_freq for each in (data, {**data, **OUTER})
    )
    np.testing.assert_array_equal(plain, beside)


def nested(name, full, sliding, **beside):
    rope = {"full_attention": full, "sliding_attention": sliding, **beside}
    return {"model_type": name, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (nested("gemma3_text", LINEAR, LINEAR, rope_theta=5e5), "'rope_theta' beside the entries"),
        (nested("gemma3_text", None, LINEAR), "is null, and transformers then uses"),
        (nested("gemma4_text", LINEAR, LINEAR), "needs rope_theta"),
        ({"model_type": "gemma4_text", "rope_parameters": {LAYERED[0]: LINEAR}}, "no entry for"),
        ({**LLAMA, "rope_parameters": {LAYERED[0]: LINEAR}}, "have one RoPE, and transformers"),
        ({"model_type": "gemma4_text", "rope_theta": 5e5}, "rope_theta 500000.0 is not read"),
        ({**LLAMA, "layer_rope_theta": [1e4, 5e5]}, "layer_rope_theta is not read by model_type"),
        ({**LLAMA, "rope_dim": 32}, "config key 'rope_dim' is not known"),
        ({"model_type": "esm", "rope_theta": 5e5}, "is not read for this model"),
        (
            {"model_type": "deepseek_v3", "head_dim": 48, "qk_rope_head_dim": 64},
            "head_dim 48 and qk_rope_head",
        ),
        ({"model_type": "llava", "hidden_size": 512}, "needs text_config: .* but hidden_size"),
        ({"model_type": "mistral3"}, "needs text_config: the config has none$"),
        ({**LLAMA, "num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size must be a whole number"),
        ({**LLAMA, "max_position_embeddings": 2**63}, "must be less than 2\\^63"),
        ({"model_type": 0, "head_dim": 64}, "model_type 0 is not known"),
        ({"model_type": "cwm", "rope_theta": 5e5, "rope_scaling": None}, "rope_theta .* not read"),
        ({"model_type": "gpt_neox", "rope_theta": 5e4}, "rope_theta .* write it under rope_param"),
        ({"model_type": "gpt_neox", "partial_rotary_factor": 0.5}, "as partial_rotary_factor$"),
        ({"model_type": "bamba", "partial_rotary_factor": 0.25}, "0.25 is not read for model_type"),
        ({"model_type": "nomic_bert", "rotary_emb_base": 3e4}, "rotary_emb_base .* not read"),
        ({"model_type": "cohere2_moe", "rope_scaling": LINEAR}, "rope_scaling is not read by"),
        ({"model_type": "gpt_oss", "rope_parameters": {}}, "rope_parameters is empty, and"),
        ({"model_type": "moonshine_streaming", "rope_scaling": LINEAR}, "needs partial_rotary_fa"),
        ({"model_type": "minimax_m2", "rotary_dim": 64, "partial_rotary_factor": 0.25}, "disagree"),
        ({"model_type": "minimax_m2", "rotary_dim": 64, "partial_rotary_factor": None}, "disagree"),
        ({"model_type": "deepseek_v3", "head_dim": None}, "head_dim None and qk_rope_head"),
        ({"model_type": "mistral4", "head_dim": 192}, "disagree: head_dim must be the sum"),
        ({"model_type": "mistral4", "rope_scaling": LINEAR}, "partial_rotary_factor None disagree"),
        (
            {"model_type": "mistral4", "rope_parameters": {"rope_type": "default"}},
            "this model reads only rope_type",
        ),
        ({"model_type": "deepseek_ocr2_text", "head_dim": 32}, "head_dim 32 is not read by"),
        (
            {**LLAMA, **OUTER, "rope_scaling": {**YARN, "original_max_position_embeddings": 32}},
            "embeddings 32 among the rope parameters is not read: transformers takes the 64",
        ),
        (
            {**nested("gemma3_text", YARN_HERE, YARN_HERE), **OUTER},
            "embeddings 64 beside rope parameters that differ by layer type is not read",
        ),
        ({**LLAMA, "rope_scaling": {**LINEAR, "factor": 1e-300}}, "in the range of float32"),
        ({**LLAMA, "rope_scaling": {**DYNAMIC, "factor": 2**63}}, "factor must be <= 2\\^53"),
    ],
)
def test_what_was_read_otherwise_than_transformers_does_is_refused(data, message):
    with pytest.raises(ValueError, match=message) as caught:
        rotary.from_hf_config(data, LAYERED[0] if "gemma" in str(data["model_type"]) else None)
    assert "\n" not in str(caught.value)


@compared
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"model_type": "olmo3", "rope_theta": 5e4}, "full_attention"),
        ({"model_type": "deepseek_v4", "qk_rope_head_dim": 32}, "main"),
        ({"model_type": "deepseek_v4", "qk_rope_head_dim": 32}, "compress"),
        ({"model_type": "deepseek_v4"}, "compress"),
        ({"model_type": "deepseek_v4", "head_dim": 64}, "compress"),  # a share: 64 of 512
        ({"model_type": "deepseek_v2", "head_dim": 48}, None),
        (nested("gemma3_text", LINEAR, LINEAR), "full_attention"),
        (nested("gemma3_text", LINEAR, LINEAR), "sliding_attention"),
        ({"model_type": "step3p5", "rope_theta": 5e4}, "full_attention"),
        ({"model_type": "neomme", "rope_theta": 5e4}, "full_attention"),
        ({"model_type": "phi", "partial_rotary_factor": None}, None),
        ({"model_type": "gpt_neox", "partial_rotary_factor": None}, None),
        ({"model_type": "gpt_oss", "rope_theta": 5e4}, None),
        ({"model_type": "mistral4", "head_dim": 128}, None),
        ({"model_type": "mistral4", "qk_rope_head_dim": 32}, None),
        ({"model_type": "dots3_note_text", "qk_rope_head_dim": 32}, "sliding_attention"),
        ({"model_type": "bamba", "partial_rotary_factor": 0.5}, None),
        ({**LLAMA, "rope_scaling": {**DYNAMIC, "max_position_embeddings": 99}}, None),
        ({**LLAMA, **OUTER, "rope_scaling": YARN}, None),
        ({**LLAMA, **OUTER, "rope_parameters": YARN_HERE}, None),
        (PHI3_YARN, None),
    ],
)
def test_what_was_read_otherwise_is_now_read_as_transformers_does(data, kind):
    read_as_transformers(data, kind)


@compared
@pytest.mark.parametrize("kind", LAYERED)
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 32}])
def test_without_strict_a_trained_length_beside_nested_parameters_is_ignored(kind, inside):
    entry = {**YARN_HERE, **inside}
    data = {**nested("gemma3_text", entry, entry), **OUTER, "max_position_embeddings": 4096}
    with pytest.warns(UserWarning, match="embeddings 64 beside rope parameters"):
        spec = read_as_transformers(data, kind, strict=False)
    assert spec.params["original_max_position_embeddings"] == (32 if inside else 4096)


def test_inspect_prints_a_broken_file_or_one_line_of_error(tmp_path, capsys, monkeypatch):
    chance, codes = random.Random(0), set()
    path = tmp_path / "config.json"
    monkeypatch.setattr(sys, "argv", ["rotary", "inspect", str(path)])
    for _ in range(150):
        path.write_text(json.dumps(mutations.mutated(chance)))
        with pytest.raises(SystemExit) as exit_of:
            cli.main()
        out, err = capsys.readouterr()
        codes.add(exit_of.value.code)
        if exit_of.value.code == 0:
            assert out
        else:
            assert exit_of.value.code == 1
            assert err.startswith("error: ")
            assert err.count("\n") == 1
    assert codes == {0, 1}


COMPOSITES = [
    name
    for name, model in MODELS.items()
    if not set(model) - {"parts", "beside_parts", "own_text", "text_defaults"}
    and set(model["parts"]) & set(entries.TEXT_PARTS)
]


@compared
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_key_beside_the_parts_is_read_as_transformers_does_or_refused(name):
    for key, value in make_models.BESIDE.items():
        both = against.outcome({"model_type": name, key: copy.deepcopy(value)}, random.Random(0))
        assert both.kind in against.EQUAL | against.TOLD, both


@compared
def test_a_proportional_ladder_takes_the_rotary_dim_that_the_model_reads():
    minimax = {"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64,
               "rope_parameters": {"rope_type": "proportional", "rope_theta": 5e6}}  # fmt: skip
    assert from_hf_config(minimax).params["partial_rotary_factor"] == 0.5
    both = against.outcome(minimax, random.Random(0))
    assert both.kind == "both read, equal", both


def test_a_size_is_refused_before_axes_of_that_size_are_made():
    tower = {"model_type": "exaone4_5_vision", "hidden_size": 2**63, "num_heads": 32}
    with against.memory(2**28), pytest.raises(ValueError, match="head_dim must be a whole number"):
        from_hf_config(tower)


def test_fuyu_files_that_transformers_reads_in_part():
    """Its class takes five keys from beside the parts, and no share of the head."""
    flat = {"model_type": "fuyu", "hidden_size": 512, "num_attention_heads": 8, "rope_theta": 7.0}
    spec = from_hf_config({**flat, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5})
    assert (spec.head_dim, spec.rotary_dim, spec.base) == (64, 32, 7.0)
    for key, value in (
        ("partial_rotary_factor", 0.25),
        ("head_dim", 32),
        ("rope_parameters", {"rope_theta": 5e5}),
    ):
        with pytest.raises(ValueError, match=f"needs text_config: the config has none but {key} "):
            from_hf_config({**flat, key: value})


@compared
@pytest.mark.parametrize("name", ["glmasr", "voxtral", "voxtral_realtime"])
@pytest.mark.parametrize("text", [
    {"vocab_size": 99}, {"rope_theta": 77_777.0}, {"head_dim": 64},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 77_777.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77_777.0}},
])  # fmt: skip
def test_what_a_class_adds_to_the_text_of_a_file_is_read(name, text):
    """Voxtral without rope_theta has base 1e8, and was read with that of Llama, 10,000."""
    read_as_transformers({"model_type": name, "text_config": text})


@compared
def test_the_models_that_have_a_text_of_their_own():
    own = set()
    for name in COMPOSITES:
        try:
            theirs = against.numbers({"model_type": name}, None, None)
            got = against.ours(rotary.from_hf_config({"model_type": name}), None)
        except against.NoAnswerError:
            continue
        except ValueError as error:
            if re.search("needs .*_config: the config has none", str(error)):
                own.add(name)
        else:
            np.testing.assert_allclose(got.inv_freq, theirs.inv_freq, rtol=against.CLOSE)
    assert own == {name for name in COMPOSITES if MODELS[name].get("own_text")}


def test_diff_refuses_a_base_that_is_no_number_wherever_a_model_has_one():
    """A program may read it though the entry that is compared has a base of its own."""
    data = nested("gemma3_text", {**LINEAR, "rope_theta": 1e6}, {**LINEAR, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rope_local_base_freq must be a number"):
        diff({**data, "rope_local_base_freq": {"a": 1}}, layer_type="sliding_attention")
