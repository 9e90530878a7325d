"""What is known of a model stands in configs/models.json; the names of models elsewhere."""

import ast
from collections import Counter

from tools.architecture import FILES

from rotary.configs import MODELS
from rotary.programs import llama_cpp, mlx_lm, sglang, transformers, vllm

PROGRAM = "a rule of this program's own model files, as a table at the top"
LEFT = {  # file -> (how many names of models it has at most, why they are there)
    "integrations/torchtitan": (2, "its name of a scaling is llama"),
    "programs/keras_hub": (29, PROGRAM),
    "programs/llama_cpp": (39, PROGRAM),
    "programs/mlx_lm": (5, PROGRAM),
    "programs/sglang": (12, PROGRAM),
    "programs/transformers": (7, PROGRAM),
    "programs/vllm": (11, PROGRAM),
}


def names_of_models(source):
    nodes = ast.walk(ast.parse(source))
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [value for value in values if isinstance(value, str) and value in MODELS]


def test_what_is_known_of_a_model_stands_in_the_table():
    counts = Counter({file: len(names_of_models(path.read_text())) for file, path in FILES.items()})
    assert {file: count for file, count in counts.items() if count > LEFT.get(file, (0,))[0]} == {}
    assert [file for file in LEFT if not counts[file]] == []  # its line can go
    assert names_of_models('IS_LLAMA = kind in ("llama", "other")') == ["llama"]


def test_a_program_names_only_models_that_it_can_be_asked_for():
    """Nine names of whole files, whose parts have other names, stood in the tables of llama.cpp."""
    of_wholes = {"parts", "beside_parts", "own_text", "text_defaults"}
    texts = {name for name, model in MODELS.items() if set(model) - of_wholes}
    for program, tables in (
        (llama_cpp, ("NOT_CONVERTED", "INTERLEAVED_SECTIONS", "READS_MSCALE")),
        (sglang, ("NO_FILE", "OBEYS_ATTENTION_FACTOR")),
        (transformers, ("PHI3", "OWN_CODE", "QWEN_VL")),
        (vllm, ("NO_FILE", "RAMP_AS_TRAINED")),
    ):
        for table in tables:
            assert set(getattr(program, table)) <= texts, (program.__name__, table)
    short = {name.removesuffix("_text") for name in texts}
    assert set(mlx_lm.MODELS) <= short | set(MODELS)
