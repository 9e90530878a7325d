"""What docs/security.md promises: whose code runs, what is never run, what is read and written."""

import ast
import functools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import alone
from safetensors.numpy import save_file

import rotary
from rotary.audit import audit
from rotary.checkpoint import convert_checkpoint
from rotary.identify import identify

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "rotary"
FILES = sorted(SOURCE.rglob("*.py"))
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 8,
          "intermediate_size": 8, "rope_theta": 1e4, "max_position_embeddings": 64,
          "auto_map": {"AutoConfig": "evil.Config"}, "trust_remote_code": True}  # fmt: skip


@functools.cache
def calls(path):
    """The name of every call in a file, such as "pickle.loads"."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]


def users_of(pattern):
    """The files, relative to the package, that call something of this name."""
    found = {path.relative_to(SOURCE).as_posix() for path in FILES for name in calls(path)
             if re.fullmatch(pattern, name)}  # fmt: skip
    return sorted(found)


def test_a_planted_call_is_seen(tmp_path):
    path = tmp_path / "planted.py"
    path.write_text("import pickle\ndef f(x):\n    return pickle.loads(eval(x))\n")
    assert calls(path) == ["pickle.loads", "eval"]


# What runs code


def test_one_function_imports_what_a_user_names_and_two_commands_call_it():
    names = r"(importlib\.)?import_module|__import__|(pkgutil\.)?resolve_name|.*\.exec_module"
    # the plug-ins import modules of their own program, `rotary` its own, by names in their code;
    # that for vLLM looks through the package of its rotary embeddings
    own = {"__init__.py", *(f"integrations/{name}.py" for name in ("lmcache", "sglang", "vllm"))}
    assert set(users_of(names)) - own == {"identify.py"}
    for path in own - {"__init__.py"}:
        for node in ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
                assert all(isinstance(argument, ast.Constant) for argument in node.args)
    with pytest.raises(AttributeError):
        rotary.__getattr__("os")
    text = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
    imported = [
        name for name, each in text.items() if re.search(r"identify import .*\bload\b", each)
    ]
    assert sorted(imported) == ["cli/configs.py", "cli/ranks.py"]  # identify and doctor


def test_nothing_is_evaluated_and_no_program_is_started():
    assert users_of(r"eval|exec|runpy\..*") == []
    # `patch` makes a method of a loaded model anew from the source that it was loaded from
    assert users_of(r"compile") == ["integrations/methods.py", "integrations/norms.py"]
    assert users_of(r"subprocess\..*|os\.(system|popen|exec\w*|spawn\w*)|pty\..*") == []


def test_nothing_is_unpickled_but_what_numba_kept():
    loads = r"(pickle|dill|cloudpickle|joblib|marshal|shelve)\.\w*loads?|pickle\.Unpickler"
    assert set(users_of(loads)) <= {"kernels/cpu/compiled.py"}
    assert users_of(r"torch\.load|.*\.from_pretrained|(np|numpy)\.load|torch\.hub\..*") == []


def test_what_numba_kept_is_loaded_by_pickle():
    assert users_of(r"pickle\.loads") == ["kernels/cpu/compiled.py"]


def test_ranks_exchange_python_objects():
    assert users_of(r"dist\.\w+_object(_list)?") == ["ranks.py"]  # torch pickles them


def test_an_object_that_is_passed_is_called():
    class Config:
        def to_dict(self):
            called.append("to_dict")
            return CONFIG

    def function(x, positions):
        called.append("function")
        return rotary.apply(rotary.Rotary(8), x, positions=positions)

    called = []
    rotary.from_hf_config(Config())
    identify(function, 8, max_position=64)
    assert called[:2] == ["to_dict", "function"]


def test_no_variable_of_the_environment_is_a_setting():
    """But of the plug-ins, which have no other place for one."""
    read = set()
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        reads = (r"environ(?:\.get)?[\[(]\s*(\"\w+\"|\w+)", r"getenv\((\"\w+\"|\w+)",
                 r"(\"\w+\") (?:not )?in os\.environ")  # fmt: skip
        for word in [word for pattern in reads for word in re.findall(pattern, text)]:
            constant = re.search(rf"^{word} = (\"\w+\")", text, re.MULTILINE)
            read.add((constant[1] if constant else word).strip('"'))
    assert read == {"RANK", "VLLM_PLUGINS", "SGLANG_PLUGINS", "ROTARY_EXACT", "ROTARY_CONFIG"}


def test_nothing_but_the_page_and_a_cluster_opens_a_connection():
    users = {path.relative_to(SOURCE).as_posix() for path in FILES
             for line in path.read_text(encoding="utf-8").splitlines()
             if re.match(r"\s*(import|from) (socket|http|urllib|requests|httpx|ssl|ftplib|"
                         r"huggingface_hub|aiohttp)\b", line)}  # fmt: skip
    assert users <= {"explorer/server.py", "explorer/state.py", "cli/cluster.py"}


def test_nothing_is_needed_of_the_environment(tmp_path):
    """No home, no folder for temporary files: a config is read and q is rotated."""
    code = (
        "import sys, numpy as np, rotary; spec = rotary.from_hf_config(sys.argv[1]);"
        "q = np.ones((1, 1, 4, 16), np.float32); print(rotary.apply(spec, q, q)[0].shape)"
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    bare = {"TMPDIR": "/nowhere", "PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    assert alone(code, tmp_path, env=bare) == "(1, 1, 4, 16)\n"


@pytest.mark.parametrize("command", ["identify", "doctor"])
def test_a_named_module_is_imported_and_its_function_called(command, tmp_path):
    (tmp_path / "mine.py").write_text(
        "open('imported', 'w').close()\n"
        f"def f({'x, positions' * (command == 'identify')}):\n"
        "    open('called', 'w').close()\n    raise OSError('no')\n"
    )
    more = ["--head-dim", "8"] if command == "identify" else []
    run = [sys.executable, "-m", "rotary", command, "mine:f", *more]
    assert subprocess.run(run, cwd=tmp_path, capture_output=True).returncode == 1
    assert (tmp_path / "imported").exists()
    assert (tmp_path / "called").exists()


def test_help_and_guide_say_what_is_imported_and_called(main):
    for command in ("identify", "doctor"):
        told = " ".join(main(command, "--help").out.split())
        assert "imported and called" in told, told
    assert "imported and called" in " ".join((ROOT / "docs" / "guide.md").read_text().split())
    assert "imported and called" in " ".join((ROOT / "docs" / "identify.md").read_text().split())


# What never does


class Payload:
    def __reduce__(self):
        return (open, ("unpickled", "w"))


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model with code, a pickle and a setting that asks for the code; cwd is beside it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "evil.py").write_text("open('imported', 'w').close()\n")
    (folder / "tokenizer.json").write_bytes(b'{"a":  1}\n')
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Payload(), file)
    return folder


def weights(folder):
    layer = "model.layers.0.self_attn"
    random = np.random.default_rng(0)
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    save_file(
        {f"{layer}.{name}.weight": random.standard_normal(size).astype(np.float32)
         for name, size in sizes.items()},
        folder / "model.safetensors",
    )  # fmt: skip


def test_code_beside_weights_is_copied_and_never_imported(model, tmp_path, main):
    weights(model)
    convert_checkpoint(model, tmp_path / "out", from_layout="half", to_layout="interleaved")
    for name in ("evil.py", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    rotary.from_hf_config(model)
    audit(str(model))
    for command in (("inspect",), ("freqs",), ("diff",), ("reach",), ("doctor",)):
        main(*command, str(model))
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "unpickled").exists()
    assert "evil" not in sys.modules


def test_weights_are_never_unpickled(model, tmp_path, main):
    with pytest.raises(ValueError, match=r"pytorch_model.bin; convert it to safetensors first"):
        convert_checkpoint(model, tmp_path / "out", from_layout="half", to_layout="interleaved")
    content = (model / "pytorch_model.bin").read_bytes()
    for name in ("model.safetensors", "config.json"):
        (model / name).write_bytes(content)
        assert main("inspect", str(model)).code == (name == "config.json")
        with pytest.raises(ValueError, match="model"):
            convert_checkpoint(model, tmp_path / "out", from_layout="half", to_layout="interleaved")
    assert not (tmp_path / "unpickled").exists()
    pickle.loads(content).close()
    assert (tmp_path / "unpickled").exists()  # it would have been seen
