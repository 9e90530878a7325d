"""Published configs of real models: read, and compared with the class of transformers."""

import functools
import json
from pathlib import Path

import parity
import pytest
from test_parity import CLASSES, DIFFERENT, config_of

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


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@functools.cache
def rotary_classes():
    """model_type -> the class that makes its tables."""
    found = {}
    for module, name in CLASSES:
        config = None if name in DIFFERENT else config_of(module, name)
        if config is not None:
            found.setdefault(config.model_type, (module, name))
    return found


def test_there_are_more_than_25():
    assert len(NAMES) - len(UNKNOWN) >= 90


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_is_read(name):
    path = FOLDER / f"{name}.json"
    if name in UNKNOWN:
        with pytest.raises(ValueError, match=f"model_type '{UNKNOWN[name]}' is not known"):
            rotary.from_hf_config(path)
        return
    kinds = layer_types(path) or (None,)
    specs = [rotary.from_hf_config(path, kind) for kind in kinds]
    assert any(spec is not None for spec in specs)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNKNOWN])
def test_a_published_config_computes_what_transformers_does(name, record_property):
    data = read(name)
    if data["model_type"] not in transformers.CONFIG_MAPPING:
        assert data["model_type"] in ("internlm2", "kimi_k2", "phi3_v"), "give it a class"
        return
    values = {key: value for key, value in data.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(data["model_type"], **values)
    text = config.get_text_config()
    found = rotary_classes().get(text.model_type)
    if found is None:  # gptj, codegen, roformer: functions and no class, in test_parity.py
        assert text.model_type in ("gptj", "codegen", "roformer", "llama", "mistral")
        return
    count = 0
    for kind in layer_types(FOLDER / f"{name}.json") or (None,):
        spec = rotary.from_hf_config(FOLDER / f"{name}.json", kind)
        case = parity.Case(found[0], getattr(found[0], found[1]), text, kind)
        if spec is None or (kind and "rope_theta" not in kind and kind not in labels(text)):
            continue
        assert spec == rotary.from_hf_config(text, kind)
        # beyond the trained length phimoe has long_mscale with the short list: DIFFERENCES.md
        parity.compare(case, (0, 4000) if text.model_type == "phimoe" else (0, 5000))
        count += 1
    assert count


def labels(config):
    return getattr(config, "_rope_type_labels", None) or config.layer_types
