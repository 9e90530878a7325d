"""Published configs of real models: read, and compared with the class of transformers."""

import functools
import json
from pathlib import Path

import parity
import pytest
from test_parity import CLASSES, DIFFERENT, made_of

import rotary
from rotary.configs import layer_types

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
# files whose model runs on code of its own that nothing here describes: the model_type refused
UNKNOWN = {
    "ernie-4.5-vl-28b-a3b": "ernie4_5_moe_vl",
    "glm-4-9b-chat": "chatglm",
    "minicpm-v-4": "minicpmv",
}
# read, but transformers has no class that makes these tables: why, and who compares it instead
WITHOUT_A_CLASS = {
    "internlm2-7b": "code beside the weights, as Llama's; nothing compares it",
    "internlm2.5-7b-chat": "code beside the weights, as Llama's; nothing compares it",
    "kimi-k2": "code beside the weights, as DeepSeek-V3's; nothing compares it",
    "phi-3-vision-128k": "code beside the weights, as Phi-3's; nothing compares it",
    "roformer-chinese-base": "a method and a weight; test_parity.py compares both",
}
COMPARED = [name for name in NAMES if name not in UNKNOWN and name not in WITHOUT_A_CLASS]


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@functools.cache
def rotary_classes():
    """model_type -> the class that makes its tables."""
    found = {}
    for module, name in CLASSES:
        kind, config = made_of(module, name)
        if config is not None and name not in DIFFERENT:
            found.setdefault(config.model_type, kind)
    return found


def text_config(name):
    """transformers' config of the text, None where it has no such model_type."""
    data = read(name)
    kind = data.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        return None
    return transformers.AutoConfig.for_model(kind, **data).get_text_config()


def test_every_published_config_is_compared_but_those_that_are_named():
    configs = {name: text_config(name) for name in NAMES if name not in UNKNOWN}
    has_none = {
        name
        for name, config in configs.items()
        if config is None or config.model_type not in rotary_classes()
    }
    assert has_none == set(WITHOUT_A_CLASS)
    assert (len(NAMES), len(UNKNOWN), len(COMPARED)) == (100, 3, 92)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_config_of_an_unknown_model_is_refused(name):
    with pytest.raises(ValueError, match=f"model_type '{UNKNOWN[name]}' is not known"):
        rotary.from_hf_config(FOLDER / f"{name}.json")


@pytest.mark.parametrize("name", [*COMPARED, *WITHOUT_A_CLASS])
def test_a_published_config_is_read(name):
    path = FOLDER / f"{name}.json"
    kinds = layer_types(path) or (None,)
    specs = [rotary.from_hf_config(path, kind) for kind in kinds]
    assert any(spec is not None for spec in specs)


@pytest.mark.parametrize("name", COMPARED)
def test_a_published_config_computes_what_transformers_does(name):
    config, path = text_config(name), FOLDER / f"{name}.json"
    cases = list(parity.cases(rotary_classes()[config.model_type], config))
    kinds = [kind for kind in layer_types(path) or (None,) if rotary.from_hf_config(path, kind)]
    assert kinds
    assert [case.layer_type for case in cases] == kinds
    for case in cases:
        assert rotary.from_hf_config(path, case.layer_type) == rotary.from_hf_config(
            config, case.layer_type
        )
        # beyond the trained length phimoe has long_mscale with the short list: DIFFERENCES.md
        parity.compare(case, (0, 4000) if config.model_type == "phimoe" else (0, 5000))
