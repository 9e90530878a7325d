"""`SinkCache` in transformers: its first layer is that of a fresh run, deeper ones are not."""

import copy
import importlib.util
import re

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import rotary
from rotary import Rotary
from rotary.integrations import sinks
from rotary.integrations.sinks import SinkCache, SinkLayer

SINKS, WINDOW = 4, 12
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "initializer_range": 0.3,
}
WIDE = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}
# half layout; a slice of the head; interleaved pairs, of a slice; norms of q and k; a factor
MODELS = {
    "llama": ("LlamaConfig", WIDE),
    "gpt_neox": ("GPTNeoXConfig", SIZES | {"intermediate_size": 128}),
    "gptj": ("GPTJConfig", {"n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8,
                            "vocab_size": 100, "initializer_range": 0.3}),
    "glm": ("GlmConfig", WIDE | {"head_dim": 16, "pad_token_id": 0}),
    "qwen3": ("Qwen3Config", WIDE | {"head_dim": 16}),
    "yarn": ("LlamaConfig", WIDE | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 64}}),
}  # fmt: skip
TOKENS = torch.arange(60)[None] * 7 % 100


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def model_of(name="llama", layers=1, **changes):
    kind, sizes = MODELS[name]
    depth = "n_layer" if name == "gptj" else "num_hidden_layers"
    config = getattr(transformers, kind)(**sizes | {depth: layers} | changes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gap(ours, other):
    return float((ours - other).abs().max() / other.abs().max())


def streamed(model, cache, chunk=1):
    """The logits of every call, of so many tokens each."""
    parts = TOKENS.split(chunk, dim=1)
    return [model(part, cache=cache).logits for part in parts]


def kept_before(step):
    """Which tokens a call sees that begins with token `step`, one at a time."""
    if step <= SINKS + WINDOW:
        return list(range(step))
    return [*range(SINKS), *range(step - WINDOW, step)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_one_layer_answers_as_a_fresh_run_of_the_kept_tokens(name, attention):
    if (name, attention) == ("gptj", "sdpa"):
        return  # transformers has no such GPT-J
    model = model_of(name, attn_implementation=attention)
    logits = streamed(model, SinkCache(model.config, sinks=SINKS, window=WINDOW))
    for step in (3, 16, 17, 18, 40, 59):
        fresh = model(TOKENS[:, [*kept_before(step), step]]).logits[:, -1]
        assert gap(logits[step][:, -1], fresh) < 2e-5
    everything = model(TOKENS).logits[:, -1]
    assert gap(logits[-1][:, -1], everything) > 1e-3


def test_keys_that_stay_where_they_were_give_other_answers():
    """The sinks have to be moved: without it they are too far away."""
    model = model_of()
    cache = SinkCache(model.config, sinks=SINKS, window=WINDOW)
    for layer in cache.layers:
        layer.spec = Rotary(16, schedule="custom", params={"inv_freq": np.full(8, 1e-15)})
    fresh = model(TOKENS[:, [*kept_before(59), 59]]).logits[:, -1]
    assert gap(streamed(model, cache)[-1][:, -1], fresh) > 1e-3


@pytest.mark.parametrize("chunk", [5, 20, 60])
def test_chunks_attend_to_what_was_kept_and_to_themselves(chunk):
    model = model_of()
    logits = streamed(model, SinkCache(model.config, sinks=SINKS, window=WINDOW), chunk)
    start = 60 - chunk
    seen = [*kept_before(start), *range(start, 60)]
    fresh = model(TOKENS[:, seen]).logits[:, -chunk:]
    assert gap(logits[-1], fresh) < 2e-5


def test_keys_of_the_first_layer_are_those_of_a_fresh_run_and_of_no_other():
    model = model_of(layers=3)
    cache = SinkCache(model.config, sinks=SINKS, window=WINDOW)
    streamed(model, cache)
    fresh, spec = DynamicCache(), rotary.from_hf_config(model.config)
    model(TOKENS[:, kept_before(60)], cache=fresh)
    gaps = []
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        attended, values = layer.update(layer.keys[:, :, :0], layer.values[:, :, :0])
        at = torch.arange(16) + 44  # 60 tokens, of which 16 are kept
        keys = rotary.rerotate(attended, spec, at, at - 44)
        gaps.append((gap(keys, other.keys), gap(values, other.values)))
    assert max(gaps[0]) < 1e-5
    assert all(min(pair) > 0.01 for pair in gaps[1:])


def test_a_short_text_is_that_of_a_dynamic_cache():
    model = model_of(layers=2)
    ours = streamed(model, SinkCache(model.config, sinks=4, window=56))
    wanted = streamed(model, DynamicCache())
    for one, other in zip(ours, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2}], ids=str)
def test_generate_takes_it(options):
    model = model_of(layers=2)
    prompt = TOKENS[:, :10].repeat(2, 1)
    options |= {"do_sample": "num_return_sequences" in options, "max_new_tokens": 30}
    cache = SinkCache(model.config, sinks=2, window=6)
    torch.manual_seed(0)
    text = model.generate(prompt, cache=cache, eos_token_id=None, **options)
    assert text.shape[1] == 40
    assert cache.get_seq_length() == 39
    assert cache.layers[0].keys.shape[-2] == 8


def test_generate_continues_as_single_calls_do():
    model = model_of(layers=2)
    cache = SinkCache(model.config, sinks=2, window=6)
    text = model.generate(
        TOKENS[:, :10], cache=cache, max_new_tokens=30, do_sample=False, eos_token_id=None
    )
    by_hand, own = TOKENS[:, :10], SinkCache(model.config, sinks=2, window=6)
    new = by_hand
    for _ in range(30):
        new = model(new, cache=own).logits[:, -1:].argmax(-1)
        by_hand = torch.cat((by_hand, new), dim=1)
    assert torch.equal(text, by_hand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_rounded_once_however_many_tokens_are_dropped(dtype):
    spec = Rotary(64)
    layer = SinkLayer(spec, sinks=SINKS, window=WINDOW)
    torch.manual_seed(0)
    first = torch.randn(2, 3, SINKS, 64)
    keys = rotary.apply(spec, first).to(dtype)
    layer.update(keys, keys)
    many = torch.zeros(2, 3, 2700 - SINKS, 64, dtype=dtype)
    layer.update(many, many)
    for at in range(2700, 3000):
        one = torch.zeros(2, 3, 1, 64, dtype=dtype)
        attended, _ = layer.update(one, one)
        dropped = max(0, at - SINKS - WINDOW)
    wanted = rotary.rerotate(keys.double(), spec, shift=dropped, seq_dim=-2)
    limit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}[dtype]
    assert ((attended[:, :, :SINKS] - wanted).abs() <= limit * keys.abs().max()).all()


def test_no_sinks_is_a_window():
    model = model_of()
    logits = streamed(model, SinkCache(model.config, sinks=0, window=WINDOW))
    fresh = model(TOKENS[:, 59 - WINDOW :]).logits[:, -1]
    assert gap(logits[-1][:, -1], fresh) < 2e-5


def test_a_cache_can_be_used_again_and_copied():
    model = model_of()
    cache = SinkCache(model.config, sinks=SINKS, window=WINDOW)
    first = streamed(model, cache)
    twin = copy.deepcopy(cache)
    one, other = (model(TOKENS[:, :1], cache=each).logits for each in (cache, twin))
    assert torch.equal(one, other)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = streamed(model, cache)
    assert all(map(torch.equal, first, again))


def test_exact_tables_and_the_patch_work_with_it():
    model = model_of(layers=2)
    with rotary.patch(model, exact=True):
        logits = streamed(model, SinkCache(model.config, sinks=SINKS, window=WINDOW))
    plain = streamed(model, SinkCache(model.config, sinks=SINKS, window=WINDOW))
    assert gap(logits[-1], plain[-1]) < 1e-4


# --- older transformers ---


def imported_again():
    """Our file as a module of its own, read with what transformers has now."""
    name = "rotary.integrations.sinks_again"
    spec = importlib.util.spec_from_file_location(name, sinks.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_names_and_calls_of_transformers_4_57_do(monkeypatch):
    monkeypatch.delattr(transformers.configuration_utils, "PreTrainedConfig")
    monkeypatch.setattr(DynamicLayer, "lazy_initialization", lambda self, key_states: None)
    monkeypatch.setattr(DynamicLayer, "get_mask_sizes", lambda self, cache_position: None)
    layer = imported_again().SinkLayer(Rotary(4), sinks=1, window=2)
    keys = torch.ones(1, 1, 5, 4)
    assert layer.get_mask_sizes(torch.arange(5)) == layer.get_mask_sizes(5) == (5, 0)
    layer.update(keys, keys, {"cache_position": torch.arange(5)})
    assert layer.get_mask_sizes(torch.arange(5, 6)) == layer.get_mask_sizes(1) == (4, 2)


@pytest.mark.parametrize("missing", ["DynamicLayer", "DynamicLayer.lazy_initialization"])
def test_caches_without_layers_are_refused_with_the_version_that_has_them(missing, monkeypatch):
    if missing == "DynamicLayer":  # before 4.54
        monkeypatch.delattr(transformers.cache_utils, missing)
    else:
        monkeypatch.delattr(CacheLayerMixin, "lazy_initialization")
        monkeypatch.delattr(DynamicLayer, "lazy_initialization")
    with pytest.raises(ImportError) as caught:
        imported_again()
    own = transformers.__version__
    assert str(caught.value) == f"SinkCache needs transformers 4.57 or newer, got {own}"


# --- what is refused ---

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
WRONG = {
    "dynamic": ("LlamaConfig", WIDE | {"rope_parameters": DYNAMIC}, "with the length (dynamic)"),
    "layers without rotation": ("SmolLM3Config", WIDE, "has layers that do not rotate"),
    "windows of its own": (
        "Cohere2Config", WIDE | {"num_hidden_layers": 4}, "has layers of sliding_attention"),
    "axes": ("Qwen2VLTextConfig", WIDE | {"head_dim": 128}, "has positions of 3 axes"),
    "several RoPEs": ("Gemma3TextConfig", WIDE, "has layers of sliding_attention"),
    "full attention without rotation": (
        "Cohere2Config", WIDE | {"layer_types": ["full_attention"]}, "layers that do not rotate"),
    "a norm after the rotation": ("HunYuanDenseV1Config", WIDE, "norms keys after their rotation"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_models_whose_keys_cannot_be_moved_are_refused(name):
    kind, sizes, message = WRONG[name]
    changes = {"no_rope_layers": [1, 0]} if name == "layers without rotation" else {}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        SinkCache(getattr(transformers, kind)(**sizes | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["MistralConfig", "Phi3Config", "Starcoder2Config"])
def test_what_the_window_of_a_model_hides_is_not_kept(kind):
    config = getattr(transformers, kind)(**WIDE, sliding_window=16, pad_token_id=0)
    with pytest.raises(ValueError, match=r"must be less than 16, the sliding_window of .* got 16"):
        SinkCache(config, sinks=4, window=12)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    logits = streamed(model, SinkCache(config, sinks=4, window=11))
    model.config.sliding_window = None
    fresh = model(TOKENS[:, [*range(4), *range(48, 60)]]).logits[:, -1]
    assert gap(logits[-1][:, -1], fresh) < 2e-5


def test_sizes_may_be_whole_numbers_of_numpy():
    layer = SinkCache(model_of().config, sinks=np.uint8(2), window=np.int64(6)).layers[0]
    assert (layer.sinks, layer.window) == (2, 6)
    assert type(layer.sinks) is type(layer.window) is int


def test_sizes_that_make_no_sense_are_refused():
    config = model_of().config
    for sizes, message in (
        ({"sinks": -1}, "sinks must be a whole number >= 0, got -1"),
        ({"window": 0}, "window must be a whole number >= 1, got 0"),
        ({"window": 2.5}, "window must be a whole number >= 1, got 2.5"),
    ):
        with pytest.raises(ValueError, match=message):
            SinkCache(config, **sizes)
    with pytest.raises(TypeError, match=r"must be the config of a model, model\.config, got Llama"):
        SinkCache(model_of())
    with pytest.raises(NotImplementedError, match="a SinkCache cannot be cropped"):
        SinkCache(config).crop(-1)
    keys = torch.zeros(1, 2, 3, 24)
    with pytest.raises(ValueError, match="caches keys of 24 channels, but its RoPE has 16"):
        SinkCache(config).update(keys, keys, 0)
