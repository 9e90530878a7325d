"""`export`: RoPE as a package of Hugging Face's `kernels`, which imports only torch and Triton.

Such a package may not depend on this library, so the code that it needs is copied from here as
text, definition by definition. The export itself imports neither torch nor Triton.
"""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .. import __version__
from .collect import Definition, collected, needed, read

BACKENDS = ("cpu", "cuda", "rocm")
LAYERS = (
    *("apply_rotary_transformers", "apply_rotary_partial", "apply_rotary_half_width"),
    *("apply_rotary_interleaved", "apply_rotary_conjugate"),
)
# file of the package -> the file here that it is copied from, and the names that it must define
FILES = {
    "layers.py": ("integrations/hub_layers.py", ("apply_rotary", *LAYERS)),
    "triton.py": ("kernels/triton/kernel.py", ("DTYPES", "rotate_cached")),
}
HEADER = """\
# Written by `rotary export-kernel`, rotary {version}, word for word from src/rotary of that
# library: {source} and what it needs of other files. Change it there.
# SPDX-License-Identifier: Apache-2.0
"""
INIT = '''\
"""Rotary position embedding (RoPE) of q and k in one launch, for transformers and by itself.

As a layer of a model of transformers (a function is called in place of the model's own):

    from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping

    layer = LocalLayerRepository(repo_path=DIR, layer_name="apply_rotary_transformers")
    mapping = {{"rotary_pos_emb": {{"cuda": layer, "rocm": layer, "cpu": layer}}}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)  # Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE

By itself, with q of (batch, heads, seq, head_dim) and tables of (batch, seq, pairs):

    q, k = get_local_kernel(DIR).apply_rotary(q, k, cos, sin)

Written by `rotary export-kernel`, rotary {version}. SPDX-License-Identifier: Apache-2.0
"""

from . import layers as layers
from .layers import apply_rotary as apply_rotary
'''


def export(folder: str | Path) -> list[Path]:
    """Write the package into a new or empty folder; return the paths of its files in the folder.

    For each backend of cpu, cuda and rocm there is `build/torch-BACKEND` with the same code and a
    metadata.json. `build` is written completely or not at all.
    Raises FileExistsError if the folder is not empty or is a file, FileNotFoundError if its parent
    does not exist.
    Source: https://huggingface.co/docs/kernels, the format that kernels 0.17.2 reads.

    >>> with tempfile.TemporaryDirectory() as new:
    ...     [path.as_posix() for path in export(Path(new) / "kernel")][:3]
    ['build/torch-cpu/__init__.py', 'build/torch-cpu/layers.py', 'build/torch-cpu/metadata.json']
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: name a new folder")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"{folder.absolute().parent} does not exist: make it first")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder")
    texts, is_new = sources(), not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".rotary-", dir=folder) as scratch:
            draft = Path(scratch) / "build"
            for backend in BACKENDS:
                variant = draft / f"torch-{backend}"
                variant.mkdir(parents=True)
                for name, text in {**texts, "metadata.json": _metadata(backend, texts)}.items():
                    (variant / name).write_text(text, encoding="utf-8")
            draft.rename(folder / "build")
    except BaseException:
        if is_new:
            folder.rmdir()
        raise
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())


def sources() -> dict[str, str]:
    """Return the Python files of the package: name -> text.

    >>> list(sources())
    ['__init__.py', 'layers.py', 'triton.py']
    """
    texts = {"__init__.py": INIT.format(version=__version__)}
    written: dict[Definition, str] = {}
    for name, (source, roots) in FILES.items():
        definitions = set(needed(source, roots))
        header = HEADER.format(version=__version__, source=source)
        code = collected(definitions, written)
        texts[name] = f'"""{read(source).document}"""\n\n{header}\n{code}'
        written |= dict.fromkeys(definitions, Path(name).stem)
    return texts


def _metadata(backend: str, texts: Mapping[str, str]) -> str:
    """Return the metadata.json that `kernels` reads; `kernels` loads the module under the id."""
    code = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:12]
    return f"""\
{{
  "id": "_rotary_{backend}_{code}",
  "name": "rotary",
  "version": 1,
  "license": "Apache-2.0",
  "python-depends": [],
  "backend": {{"type": "{backend}"}}
}}
"""
