"""Which RoPE a callable computes: our own specs, the peers' modules, and clear errors."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import LLAMA_3_1, longrope, scaled
from rotary_embedding_torch import RotaryEmbedding
from transformers import GlmConfig, LlamaConfig
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm import modeling_glm as glm
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.nanochat import modeling_nanochat as nanochat

import rotary
from rotary import Rotary
from rotary.identify import identify
from rotary.positions import interleaved_sections, sections

LLAMA3 = dict(LLAMA_3_1.params)
STEP = LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}  # Llama 4 Scout


def applied(spec, **options):
    return lambda x, positions: rotary.apply(spec, x, positions=positions, **options)


def assert_same_rotation(found, spec):
    """The answer turns every channel as the spec does: the same matrix at a few positions."""
    assert found.spec is not None
    assert found.is_rotation
    x = np.eye(spec.head_dim, dtype=np.float64)[None, :, None].repeat(4, axis=2)
    positions = np.array([0, 1, 17, 4095])
    mine, wanted = (
        rotary.apply(each, x, positions=positions, seq_dim=-2) for each in (found.spec, spec)
    )
    np.testing.assert_allclose(mine, wanted, atol=2e-6)


@st.composite
def specs(draw):
    head_dim = 2 * draw(st.integers(2, 20))
    rotary_dim = 2 * draw(st.integers(1, head_dim // 2))
    layout = draw(st.sampled_from(["half", "interleaved"]))
    base = draw(st.sampled_from([1e4, 5e5, 1e6, 123.456]) | st.floats(100, 1e6))
    schedule, params = draw(st.sampled_from([
        ("default", {}), ("linear", {"factor": 4.0}), ("linear", {"factor": 2.53}),
        ("ntk", {"factor": 8.0}), ("llama3", LLAMA3),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}),
        ("custom", None),
    ]))  # fmt: skip
    if params is None:
        pairs = rotary_dim // 2
        rates = st.lists(st.floats(1e-4, 3.0), min_size=pairs, max_size=pairs)
        params = {"inv_freq": draw(rates)}
    return Rotary(
        head_dim=head_dim, rotary_dim=rotary_dim, base=base, layout=layout,
        start=draw(st.integers(0, head_dim - rotary_dim)),
        out_layout=draw(st.sampled_from([layout, "half"])),
        schedule=schedule, params=params, sign=draw(st.sampled_from([1, -1])),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_what_we_apply_is_identified_as_what_we_applied(spec):
    found = identify(applied(spec), spec.head_dim)
    assert_same_rotation(found, spec)
    same = found.spec
    assert (same.start, same.rotary_dim, same.sign) == (spec.start, spec.rotary_dim, spec.sign)
    if spec.rotary_dim > 2:  # one pair is half and interleaved at once
        assert (same.layout, same.out_layout) == (spec.layout, spec.out_layout)
    inv_freq, factor = rotary.inv_freq(spec)
    np.testing.assert_allclose(found.inv_freq, inv_freq, rtol=0, atol=1e-11)
    np.testing.assert_allclose(rotary.inv_freq(same)[0], inv_freq, rtol=0, atol=1e-11)
    assert found.amplitude == pytest.approx(factor, abs=1e-6)
    assert found.arithmetic == "exact"
    assert found.right_up_to == found.probed_up_to == 2**20


@pytest.mark.parametrize("head_dim", [3, 64])  # 3 tokens are asked at once, and 64
def test_as_many_heads_as_tokens_are_never_asked(head_dim):
    spec = scaled("dynamic", head_dim, 4.0, 2048, rotary_dim=head_dim // 2 * 2)
    found = identify(applied(spec), head_dim)  # which refuses to guess the axis of the tokens
    assert found.spec == (spec if head_dim > 3 else Rotary(head_dim, rotary_dim=2))


EXPLAINED = [
    Rotary(head_dim=128, base=5e5),
    LLAMA_3_1,
    Rotary(head_dim=128, base=5e5, schedule="llama3", params=STEP),
    Rotary(head_dim=64, schedule="linear", params={"factor": 2.5}),
    Rotary(head_dim=64, schedule="ntk", params={"factor": 8.0}),
    scaled("yarn", 128, 4.0, 32768, base=1e6),
    Rotary(head_dim=64, base=1.5e5, schedule="yarn", params={
        "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}),
    Rotary(head_dim=64, schedule="yarn", params={
        "factor": 40.0, "original_max_position_embeddings": 4096, "attention_factor": 1.0}),
    Rotary(head_dim=64, base=1e6, schedule="proportional", params={"partial_rotary_factor": 0.25}),
    Rotary(head_dim=64, schedule="proportional",
           params={"partial_rotary_factor": 0.5, "factor": 8.0}),
    Rotary(head_dim=192, rotary_dim=64, start=128, layout="interleaved", out_layout="half"),
    scaled("dynamic", 64, 4.0, 2048),
    Rotary(head_dim=64, axes=interleaved_sections(12, 10, 10), base=5e6),
    Rotary(head_dim=64, axes=sections(16, 16), schedule="axial", params={"num_axes": 2}),
]  # fmt: skip


@pytest.mark.parametrize("spec", EXPLAINED, ids=lambda s: f"{s.schedule}-{s.head_dim}-{s.num_axes}")
def test_the_schedule_is_named_with_its_parameters(spec):
    found = identify(applied(spec), spec.head_dim, num_axes=spec.num_axes)
    assert found.spec == spec
    assert set(found.codes) <= {"amplitude", "depends_on_length", "no_attention_factor"}
    assert ("depends_on_length" in found.codes) == spec.depends_on_length


def test_longrope_is_found_by_its_short_frequencies_and_its_dependence_on_length():
    long = (1.0 + np.arange(32) / 8).tolist()
    spec = longrope(4.0, 4096, [1.0 + i / 64 for i in range(32)], long)
    found = identify(applied(spec), 64)
    assert found.codes == ("depends_on_length", "amplitude")
    assert found.spec.schedule == "custom"
    np.testing.assert_allclose(found.inv_freq, rotary.inv_freq(spec)[0], atol=1e-9)
    assert "between 2050 and 4097" in found.findings[0].text
    assert found.probed_up_to == 2048


def test_a_pair_driven_by_two_axes_is_no_rotary():
    spec = Rotary(head_dim=16)
    found = identify(lambda x, p: applied(spec)(x, p.sum(-1)), 16, num_axes=2)
    assert found.codes == ("mixed_axes",)
    assert found.spec is None


@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_either_library_and_either_order_of_axes(library, seq_dim):
    spec = Rotary(head_dim=16)
    kinds = set()

    def seen(x, positions):
        kinds.add(type(x).__module__)
        return rotary.apply(spec, x, positions=positions, seq_dim=seq_dim)

    found = identify(seen, 16, library=library, seq_dim=seq_dim)
    assert (found.spec, found.findings) == (spec, ())
    assert kinds == {library}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_x_of_every_dtype(dtype):
    found = identify(applied(Rotary(head_dim=32)), 32, dtype=dtype)
    assert (found.spec, found.findings) == (Rotary(head_dim=32), ())


@pytest.mark.parametrize(("head_dim", "base", "factor"), [
    (32, 409441.0, 8.0), (32, 1825491.0, 1.0), (128, 563535.0, 1.0),
])  # fmt: skip
def test_exact_angles_of_bfloat16_x_are_exact_for_a_base_that_is_not_round(head_dim, base, factor):
    inv_freq = torch.tensor(base ** (-np.arange(0, head_dim, 2) / head_dim) / factor)

    def rotate(x, positions):
        angle = positions.double()[:, None] * inv_freq
        cos, sin = angle.cos().tile(2), angle.sin().tile(2)
        first, second = x.double().chunk(2, -1)
        return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    found = identify(rotate, head_dim, library="torch", dtype="bfloat16")
    assert (found.findings, found.arithmetic, found.right_up_to) == ((), "exact", 2**20)
    near = 1024 * np.abs(rotary.inv_freq(found.spec)[0] - inv_freq.numpy())
    assert near.max() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_angles_are_found_whatever_the_type_of_x(dtype):
    rotate = applied(Rotary(head_dim=64, base=5e5), precision="float32")
    found = identify(rotate, 64, library="torch", dtype=dtype)
    assert found.codes == ("float32_angles",)
    assert found.right_up_to < found.probed_up_to == 2**20


def test_float32_angles_that_are_right_as_far_as_asked_are_no_finding():
    near = identify(applied(Rotary(head_dim=64), precision="float32"), 64, max_position=4096)
    assert (near.findings, near.arithmetic) == ((), "float32 angles")
    assert near.right_up_to == near.probed_up_to == 4096


# rotary-embedding-torch: interleaved, offset by one number, positions in the dtype of q
def lucidrains(**options):
    module = RotaryEmbedding(64, **options)
    return lambda x, positions: module.rotate_queries_or_keys(x, offset=int(positions[0]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"theta": 500_000.0}, {"base": 500_000.0}),
        ({"theta_rescale_factor": 8.0}, {"schedule": "ntk", "params": {"factor": 8.0}}),
        ({"interpolate_factor": 4.0}, {"schedule": "linear", "params": {"factor": 4.0}}),
    ],
)
def test_rotary_embedding_torch(options, expected):
    found = identify(lucidrains(**options), 64)
    assert found.spec == Rotary(head_dim=64, layout="interleaved", **expected)
    assert found.codes == ("positions_consecutive", "float32_angles")


def test_rotary_embedding_torch_without_offset_counts_tokens():
    module = RotaryEmbedding(64)
    found = identify(lambda x, positions: module.rotate_queries_or_keys(x), 64)
    assert found.spec == Rotary(head_dim=64, layout="interleaved")
    assert found.codes == ("positions_ignored",)


def test_rotary_embedding_torch_in_bfloat16_has_bfloat16_positions():
    found = identify(lucidrains(), 64, dtype="bfloat16")
    assert found.spec == Rotary(head_dim=64, layout="interleaved")
    assert found.arithmetic == "bfloat16 positions"
    assert found.right_up_to == 128


def test_rotary_embedding_torch_with_xpos_scales_by_position():
    module = RotaryEmbedding(64, use_xpos=True)

    def rotate(x, positions):
        scale = module.get_scale(positions.float())
        freqs = module.forward(positions.float())
        return module.apply_rotary_emb(freqs, x, scale=scale)

    assert "position_scale" in identify(rotate, 64).codes


def llama_config(**rope):
    config = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    return LlamaConfig(**config, max_position_embeddings=4096, rope_parameters=rope)


def transformed(embedding, apply):
    def rotate(x, positions):
        cos, sin = embedding(x, positions)
        return apply(x, x, cos, sin)[0]

    return rotate


HF = {
    "default": ({"rope_theta": 10_000.0}, {}),
    "linear": ({"rope_theta": 10_000.0, "factor": 4.0}, {"params": {"factor": 4.0}}),
    "llama3": (
        dict(rope_theta=500_000.0, **LLAMA3 | {"original_max_position_embeddings": 2048}),
        {"base": 5e5, "params": LLAMA3 | {"original_max_position_embeddings": 2048}},
    ),
    "yarn": (
        {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
        {"params": {"factor": 4.0, "original_max_position_embeddings": 1024}},
    ),
    "dynamic": (
        {"rope_theta": 10_000.0, "factor": 2.0},
        {"params": {"factor": 2.0, "original_max_position_embeddings": 4096}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("schedule", HF)
def test_schedules_of_transformers(schedule):
    rope, expected = HF[schedule]
    embedding = llama.LlamaRotaryEmbedding(llama_config(rope_type=schedule, **rope))
    found = identify(transformed(embedding, llama.apply_rotary_pos_emb), 64)
    assert found.spec == Rotary(head_dim=64, schedule=schedule, **expected)
    assert found.arithmetic == "float32 angles"


def test_a_buffer_of_transformers_cast_to_bfloat16():
    config = llama_config(rope_type="default", rope_theta=10_000.0)
    embedding = llama.LlamaRotaryEmbedding(config).to(torch.bfloat16)
    found = identify(transformed(embedding, llama.apply_rotary_pos_emb), 64)
    assert found.spec == Rotary(head_dim=64)
    assert found.codes == ("bfloat16_frequencies",)
    assert found.right_up_to == 1
    buffer = embedding.inv_freq.double().numpy()
    np.testing.assert_allclose(found.inv_freq, buffer, rtol=1e-7)


def test_the_slice_of_glm():
    config = GlmConfig(
        hidden_size=512, num_attention_heads=8, head_dim=64, partial_rotary_factor=0.5
    )
    embedding = glm.GlmRotaryEmbedding(config)
    found = identify(transformed(embedding, glm.apply_rotary_pos_emb), 64)
    assert found.spec == Rotary(head_dim=64, rotary_dim=32, layout="interleaved")


def gptj_pair(q, k, cos, sin):
    def one(x):
        return gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)

    return one(q), one(k)


INTERLEAVED = {"layout": "interleaved"}
APPLIES = {
    "llama": (llama.apply_rotary_pos_emb, {}, "tile"),
    "cohere": (cohere.apply_rotary_pos_emb, INTERLEAVED, "repeat"),
    "glm": (glm.apply_rotary_pos_emb, INTERLEAVED, "tile"),
    "gptj": (gptj_pair, INTERLEAVED, "half"),
    "nanochat": (nanochat.apply_rotary_pos_emb, {"sign": -1}, "tile"),
    "deepseek_v3": (
        deepseek_v3.apply_rotary_pos_emb_interleave, INTERLEAVED | {"out_layout": "half"}, "tile"
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", APPLIES)
def test_functions_of_transformers_that_are_given_tables(family):
    apply, expected, tables = APPLIES[family]
    found = identify(apply, 64)
    assert found.spec == Rotary(head_dim=64, **expected)
    assert (found.tables, found.is_rotation, found.inv_freq) == (tables, True, None)
    assert found.codes == (("clockwise",) if family == "nanochat" else ())


def test_arguments_that_are_keyword_only():
    def rotate(x, *, positions):
        return rotary.apply(Rotary(head_dim=16), x, positions=positions)

    def apply(q, k, *, cos, sin, unsqueeze_dim=1):
        return llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    for fn, form in ((rotate, "positions"), (apply, "tables")):
        for found in (identify(fn, 16), identify(fn, 16, form=form)):
            assert (found.spec, found.findings) == (Rotary(head_dim=16), ())


def test_tables_narrower_than_the_head():
    found = identify(glm.apply_rotary_pos_emb, 64, rotary_dim=16)
    assert found.spec == Rotary(head_dim=64, rotary_dim=16, layout="interleaved")


def test_tables_with_heads_after_tokens():
    def apply(q, k, cos, sin):
        return llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

    assert identify(apply, 64, seq_dim=-3).spec == Rotary(head_dim=64)


def test_half_width_tables_without_a_batch_axis_are_those_of_rotate():
    def apply(q, k, cos, sin):
        return rotary.rotate((q, k), cos, sin, layout="half")

    found = identify(apply, 16)
    assert (found.spec, found.tables) == (Rotary(head_dim=16), "half")


def test_the_answer_is_readable_and_json():
    found = identify(applied(Rotary(head_dim=64), precision="float32"), 64)
    data = json.loads(json.dumps(found.to_dict()))
    assert Rotary.from_dict(data["spec"]) == found.spec
    assert data["findings"][0]["code"] == "float32_angles"
    assert data["inv_freq"] == found.inv_freq.tolist()
    assert str(found).splitlines()[0] == "Rotary(head_dim=64)"
    assert "right to 1e-3 rad up to position" in str(found)
    assert str(identify(llama.apply_rotary_pos_emb, 8)).startswith("Rotary(head_dim=8), tables")
    custom = identify(applied(Rotary(head_dim=32, schedule="custom", params={
        "inv_freq": np.linspace(1, 0.1, 16).tolist()})), 32)  # fmt: skip
    assert "16 values]" in str(custom)
