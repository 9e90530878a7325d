"""Every class of transformers that makes rotary tables equals ours; the run prints counts."""

import copy
import functools
import importlib
from pathlib import Path

import numpy as np
import parity
import pytest
import torch
from published import parameters_of

import rotary
from rotary import Rotary, from_hf_config
from rotary.configs import MODELS

transformers = pytest.importorskip("transformers", minversion="5.24")  # it has all models
from tools import make_models  # noqa: E402

# class -> why it does not equal ours; told in golden/DIFFERENCES.md, shown by the tests below
DIFFERENT = {
    "EsmFold2RotaryEmbedding": "no model_type of its own",
    "Gemma4VisionRotaryEmbedding": "not one rotation",
    "HunYuanVLRotaryEmbedding": "not one rotation",
    "MusicFlamingoRotaryEmbedding": "not one rotation",
}
TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")
# class -> rope type -> the error with which transformers refuses it
STRICT, AMBIGUOUS = "StrictDataclassClassValidationError", "AmbiguousGlobalPerLayerAttributeError"
LONGROPE_ALONE = {"linear": STRICT, "dynamic": STRICT, "yarn": "KeyError", "llama3": STRICT}
REFUSED = {
    "Cosmos3EdgeTextRotaryEmbedding": dict.fromkeys(TYPES, STRICT),  # takes default alone
    "DiffusionGemmaTextRotaryEmbedding": {"longrope": AMBIGUOUS},  # head_dim differs by layer
    "Dots3NoteTextRotaryEmbedding": {"longrope": AMBIGUOUS},
    "EfficientLoFTRRotaryEmbedding": dict.fromkeys(TYPES[1:], "AttributeError"),  # has no length
    "EmbeddingGemma2RotaryEmbedding": {"longrope": AMBIGUOUS},
    "Gemma4TextRotaryEmbedding": {"longrope": AMBIGUOUS},
    "Gemma4UnifiedTextRotaryEmbedding": {"longrope": AMBIGUOUS},
    "Phi3RotaryEmbedding": LONGROPE_ALONE,  # and yarn is what it calls longrope
    "Phi4MultimodalRotaryEmbedding": LONGROPE_ALONE,
    # wants two mscales, which belong to longrope
    "PhimoeRotaryEmbedding": dict.fromkeys(("linear", "dynamic", "yarn", "llama3"), STRICT),
}
# (class, rope type) that transformers takes and we refuse, with what we say
OURS = {("EfficientLoFTRRotaryEmbedding", "linear"): "reads only rope_type default"}
CLASSES = make_models.rotary_classes()
OWNERS = {
    name: owner
    for name, owner in make_models.owners_of_code().items()
    if "hidden_size" in MODELS.get(owner, {})  # it rotates itself, and not one of its parts
}
PLAIN = [
    (module, name)
    for (module, name), source in CLASSES.items()
    if "ROPE_INIT_FUNCTIONS" in source and name not in DIFFERENT
]


@pytest.fixture(autouse=True, scope="module")
def short_names_of_configs():
    """Checks of fields write whole configs into errors that nobody reads: half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedConfig, "__repr__", object.__repr__)
        yield


@functools.cache
def made_of(module, name):
    """The class, which is imported here, and a config that it can be built from."""
    transformers.logging.set_verbosity_error()
    kind = make_models.rotary_class(module, name)
    return kind, make_models.config_for(kind)


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_a_class_equals_ours(module, name, record_property):
    kind, config = made_of(module, name)
    if name in DIFFERENT:
        record_property("parity", "different 1")
        if config is not None:
            with pytest.raises(ValueError, match=DIFFERENT[name]):
                from_hf_config(config)
        return
    cases = list(parity.cases(kind, config))
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
    more = parameters_of(rope_type, pairs, 512 if rope_type == "llama3" else 2048)
    return {"rope_type": rope_type, "rope_theta": theta, **more}


def variant(case, rope_type, spec):
    """The config with another rope type, or the name of the error that refuses it."""
    config, layer = case.config, case.layer_type
    if layer and "rope_theta" in layer:  # bases by layer, all of one type
        layer = None
    data = copy.deepcopy(config.to_dict())
    rope = scaled(rope_type, spec.rotary_dim // 2, spec.base)
    old = data.pop("rope_parameters", None) or {}
    model = MODELS.get(config.model_type, {})
    kept = ("mrope_section", "mrope_interleaved")
    is_share = "proportional" not in str(old.get(layer))  # or the share is of its pairs
    if is_share and model.get("partial_rotary_factor"):
        kept = (*kept, "partial_rotary_factor")
    for key in kept:
        value = (old.get(layer) or {}).get(key) if layer else old.get(key)
        if value is not None:
            rope[key] = value
    if rope_type == "longrope" and model.get("mscales"):
        rope.update(short_mscale=1.25, long_mscale=1.5)
    data["rope_parameters"] = {**old, layer: rope} if layer else rope
    for key in ("rope_scaling", "model_type", "transformers_version"):
        data.pop(key, None)
    if "head_dim" in data and data["head_dim"] is None:  # or ROPE_INIT_FUNCTIONS multiply by None
        data["head_dim"] = spec.head_dim
    try:
        made = type(config)(**data)
        case.rotary(made)
    except Exception as error:  # each class says no in its own way: REFUSED has the names
        return type(error).__name__
    found = made.rope_parameters[layer] if layer else made.rope_parameters
    assert found["rope_type"] == rope_type
    return made


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize(("module", "name"), PLAIN)
def test_a_class_with_another_rope_type(module, name, rope_type, record_property):
    """The tables alone: how a class rotates by them does not depend on the type."""
    cases = list(parity.cases(*made_of(module, name)))
    specs = [from_hf_config(case.config, case.layer_type) for case in cases]
    made = [variant(case, rope_type, spec) for case, spec in zip(cases, specs, strict=True)]
    assert made
    refusal = REFUSED.get(name, {}).get(rope_type)
    kind = "equal"
    if refusal:
        kind = "refused"
        assert made == [refusal] * len(made)
    elif (name, rope_type) in OURS:
        kind = "ours"
        with pytest.raises(ValueError, match=OURS[name, rope_type]):
            from_hf_config(*made)
    else:
        assert [each for each in made if isinstance(each, str)] == []
        for case, config in zip(cases, made, strict=True):
            firsts = (0, 5000) if rope_type in ("dynamic", "longrope") else (5000,)
            # phimoe joins the long factor and the short list beyond the length: DIFFERENCES.md
            firsts = (0,) if config.model_type == "phimoe" else firsts
            parity.compare(case._replace(config=config), firsts, rotates=False)
    record_property("variants", f"{kind} {len(made)}")


def test_the_refused_variants_are_of_classes_that_are_compared():
    pairs = {(name, kind) for name, kinds in REFUSED.items() for kind in kinds}
    assert not pairs & set(OURS)
    assert {name for name, _ in pairs | set(OURS)} <= {name for _, name in PLAIN}


def test_a_model_that_reads_the_default_alone_has_other_types_refused():
    alone = {name for name, model in MODELS.items() if model.get("only") == ["default"]}
    assert alone == {
        "clvp_encoder", "codegen", "cosmos3_edge_text", "efficientloftr", "ernie4_5_vl_moe_text",
        "esm", "gptj", "recurrent_gemma", "roformer", "seamless_m4t", "wav2vec2-bert",
        "wav2vec2-conformer",
    }  # fmt: skip
    for name in alone:
        for rope_type in TYPES:
            rope = scaled(rope_type, 64, 1e4)
            config = {"model_type": name, "rope_parameters": rope, **MODELS[name].get("switch", {})}
            with pytest.raises(ValueError, match="this model reads only rope_type default"):
                from_hf_config(config)


def test_a_vision_tower_has_its_own_frequencies_and_no_scaling_of_a_text():
    """Most classes refuse another type; those of DINOv3, Sapiens 2 and Llama 4 ignore it."""
    towers = {name for name, model in MODELS.items() if "num_axes" in model}
    towers -= {"efficientloftr", "gemma4_vision", "neomme"}
    assert len(towers) > 30
    for name in towers:
        for rope_type in TYPES:
            config = {"model_type": name, "rope_parameters": scaled(rope_type, 64, 1e4)}
            with pytest.raises(ValueError, match="this model reads only rope_type default, axial"):
                from_hf_config(config)
        axial = {"model_type": name, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
        default = {**axial, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        assert from_hf_config(axial) == from_hf_config(default)


def test_dots3_note_does_not_read_proportional():
    """Its table has 128 pairs, and the slice that it is to turn has 32."""
    rope = {"rope_type": "proportional", "rope_theta": 1e4}
    kinds = ("indexed_attention", "sliding_attention")
    config = {"model_type": "dots3_note_text", "rope_parameters": dict.fromkeys(kinds, rope)}
    for kind in kinds:
        with pytest.raises(ValueError, match="reads only rope_type default, linear"):
            from_hf_config(config, kind)


def test_a_text_does_not_read_the_type_of_a_vision_tower():
    config = {"model_type": "llama", "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="rotates by one position, and rope_type 'axial'"):
        from_hf_config(config)


# --- the classes that differ: what golden/DIFFERENCES.md says of them ---


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def modeling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def test_hunyuan_vl_changes_norms_and_scores_where_its_axes_differ():
    module = modeling("hunyuan_vl")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16] * 4}
    config = module.HunYuanVLTextConfig(head_dim=128, rope_parameters=rope)
    made = module.HunYuanVLRotaryEmbedding(config)
    units, q, k = torch.eye(128, dtype=torch.float64)[None], *random(2, 1, 1, 128)

    def turned(x, *ids):
        cos, sin = made(x, torch.tensor(ids)[:, None, None])
        return module.apply_rotary_pos_emb(x[None], x[None], cos, sin)[0][0]

    def score(step, *ids):
        return float((turned(q, *(each + step for each in ids)) * turned(k, *[step] * 4)).sum())

    image = turned(units, 40, 7, 20, 3)
    wanted = torch.tensor([40, 20], dtype=torch.float64)  # channel 0 by one axis, 64 by another
    wanted = torch.stack((wanted[0].cos(), wanted[1].sin()))
    torch.testing.assert_close(image[0, 0, [0, 64]], wanted, rtol=0, atol=1e-6)
    norms = image.norm(dim=-1)
    assert float(norms.min()) < 0.1
    assert float(norms.max()) > 1.4
    assert abs(score(100, 40, 7, 20, 3) - score(0, 40, 7, 20, 3)) > 5
    # with all axes equal, as in text, it is an ordinary RoPE
    torch.testing.assert_close(turned(units, *[40] * 4).norm(dim=-1), torch.ones(1, 128).double())
    assert score(100, *[40] * 4) == pytest.approx(score(0, *[40] * 4), abs=1e-3)
    ours = rotary.apply(Rotary(head_dim=128), q, positions=[40], precision="float32")
    torch.testing.assert_close(turned(q, *[40] * 4), ours, rtol=0, atol=1e-6)


def test_gemma4_vision_is_two_rotations_one_behind_the_other():
    module = modeling("gemma4")
    _, config = made_of(module.__name__, "Gemma4VisionRotaryEmbedding")
    ids = torch.randint(0, 60, (1, 19, 2), generator=torch.Generator().manual_seed(1))
    x = random(1, 19, 4, config.head_dim).float()
    tables = module.Gemma4VisionRotaryEmbedding(config)(x, ids)
    want = module.apply_multidimensional_rope(x, *tables, ids)
    got = x
    for axis, start in enumerate((0, 32)):
        spec = Rotary(head_dim=64, rotary_dim=32, start=start, base=100.0)
        at = ids[..., axis]
        got = rotary.apply(spec, got, positions=at, seq_dim=-3, precision="float32")
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    unit = torch.eye(64)[:1].expand(1, 19, 1, 64)  # channel 0 has channel 16 as its partner
    moved = module.apply_multidimensional_rope(unit, *tables, ids)
    assert moved.abs().sum((0, 1, 2)).nonzero().flatten().tolist() == [0, 16]


def test_esmfold2_is_a_custom_schedule_of_four_axes():
    module = modeling("esmfold2")
    config = module.EsmFold2AtomEncoderConfig()
    axis, group, width = 2, 10, config.head_dim
    assert (config.num_spatial_rope_pairs_per_axis, config.num_uid_rope_pairs) == (axis, group)
    spatial, uid = (
        1 / base ** (torch.arange(count) / count) for base, count in ((20.0, axis), (1e4, group))
    )
    still = width // 2 - 3 * axis - group
    spec = Rotary(
        head_dim=width,
        schedule="custom",
        params={"inv_freq": torch.cat((spatial.repeat(3), uid, torch.zeros(still)))},
        axes=(0,) * axis + (1,) * axis + (2,) * axis + (3,) * (group + still),
    )
    places = random(1, 50, 3).float() * 30
    groups = torch.arange(50)[None] // 7
    made = module.EsmFold2RotaryEmbedding(config)
    theirs = made(places, groups, torch.float32)
    positions = torch.cat((places.double(), groups[..., None].double()), -1)
    ours = rotary.cos_sin(spec, positions, "float32", allow_negative=True)
    for wide, half in zip(theirs, ours, strict=True):
        torch.testing.assert_close(parity.half_width(wide, half), half, rtol=0, atol=0)
    q, k = random(2, 1, 4, 50, width).float()
    mine = rotary.rotate((q, k), *ours, spec)
    torch.testing.assert_close(mine, module.apply_rotary_pos_emb(q, k, *theirs), rtol=0, atol=0)


def test_musicflamingo_turns_by_seconds_times_a_number():
    module = modeling("musicflamingo")
    _, config = made_of(module.__name__, "MusicFlamingoRotaryEmbedding")
    made = module.MusicFlamingoRotaryEmbedding(config)
    frames = torch.arange(50, dtype=torch.float64)
    seconds = 30 + 0.04 * frames  # the window of 2 s with number 15
    theirs = [table[0] for table in made(seconds[None].float(), 50)]
    turn = torch.complex(theirs[0][:, 256], theirs[1][:, 256])
    steps = turn[1:] * turn[:-1].conj()  # all alike where an angle is proportional to the frame
    assert float((steps - steps[0]).abs().max()) > 0.1
    pair = 1200.0 ** -(np.arange(128) / 128)
    spec = Rotary(
        head_dim=1280,
        rotary_dim=512,
        layout="interleaved",
        schedule="custom",
        params={"inv_freq": np.tile(pair, 2)},
        axes=(0,) * 128 + (1,) * 128,
        sign=-1,
    )
    numbers = torch.stack((torch.full_like(frames, 15), 2 * torch.pi * frames), -1) / 1200
    ours = rotary.cos_sin(spec, 2 * torch.pi * seconds[:, None] * numbers)
    for wide, half in zip(theirs, ours, strict=True):  # up to 52 rad in float32
        torch.testing.assert_close(parity.half_width(wide, half), half, rtol=0, atol=2e-5)
    x = random(1, 50, 1280)
    want = module.apply_rotary_time_emb(x, *(table[None] for table in theirs))
    got = rotary.rotate(x[:, None], *ours, spec)[:, 0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_vjepa2_turns_the_two_channels_of_a_pair_by_different_angles():
    rotate = modeling("vjepa2").rotate_queries_or_keys
    width, position = 20, 3.0  # of 64 channels, 20 for each axis
    units = torch.eye(width, dtype=torch.float64)[None, None]
    images = rotate(units, torch.full((width,), position))[0, 0]
    angle = position * 1e4 ** -(torch.arange(10, dtype=torch.float64) / 10)
    tiled = torch.cat((angle, angle))  # channels 2i and 2i + 1 are to have angle[i], both
    for even in range(0, width, 2):
        first, second = tiled[even], tiled[even + 1]
        wanted = torch.stack((first.cos(), second.sin(), -first.sin(), second.cos()))
        got = images[even : even + 2, even : even + 2].flatten()
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
        assert abs(first - second) > 1e-3
    assert float(images.norm(dim=-1).min()) < 0.9


# --- models that have no such class ---


@pytest.mark.parametrize("name", OWNERS)
def test_a_model_type_that_uses_the_code_of_another(name):
    ((module, kind),) = [each for each in CLASSES if f".models.{OWNERS[name]}." in each[0]]
    (case,) = parity.cases(made_of(module, kind)[0], transformers.AutoConfig.for_model(name))
    parity.compare(case)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_gptj_and_codegen(name):
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    spec = from_hf_config({"model_type": name})
    assert (spec.layout, spec.rotary_dim, spec.head_dim) == ("interleaved", 64, 256)
    table = module.create_sinusoidal_positions(300, spec.rotary_dim)
    sin, cos = table.chunk(2, dim=-1)
    ours = rotary.cos_sin(spec, torch.arange(300))
    torch.testing.assert_close(
        ours, (cos, sin), rtol=0, atol=300 * 2.0**-23
    )  # theirs are float32 angles
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
    torch.testing.assert_close(ours, want, rtol=0, atol=2e-6)


# --- the table is what transformers says ---


def test_the_table_is_not_older_than_transformers(monkeypatch, tmp_path):
    shipped = (make_models.TABLE, make_models.WITHOUT_ROPE)
    monkeypatch.setattr(make_models, "TABLE", tmp_path / "models.json")
    monkeypatch.setattr(make_models, "WITHOUT_ROPE", tmp_path / "without_rope.json")
    make_models.main()
    for path in shipped:
        assert (tmp_path / path.name).read_text() == path.read_text()


# (model, layer type) whose config must say more than its model_type, and what we ask for
SIZES, SECTIONS = "is not a multiple of num_attention_heads", "must sum to the"
SILENT = {
    ("cohere_compass_text", None): "an entry for each layer type",
    ("gemma4_vision", None): "not one rotation",
    ("glm4_moe", None): SIZES,
    ("glm4v_moe_text", None): SIZES,
    ("glm4v_text", None): SECTIONS,
    ("glm_image_text", None): SECTIONS,
    ("hunyuan_vl_text", None): "not one rotation",
    ("musicflamingo", None): "not one rotation",
    ("qwen3_omni_moe_text", None): SIZES,
    ("qwen4_exp_text", None): SECTIONS,
}


def test_every_entry_is_read_or_refused_with_a_reason():
    entries = [
        (name, kind)
        for name, model in MODELS.items()
        if set(model) - {"parts", "beside_parts", "own_text", "text_defaults"}
        for kind in model.get("layers") or (None,)
    ]
    refused = {}
    for name, kind in entries:
        try:
            spec = from_hf_config({"model_type": name}, kind)
        except ValueError as error:
            refused[name, kind] = str(error)
        else:
            assert spec is None or isinstance(spec, Rotary)
    assert refused.keys() == SILENT.keys()
    for entry, message in SILENT.items():
        assert message in refused[entry], entry
