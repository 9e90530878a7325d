"""Reads the keys of a config from a file, its folder, a dict or a PretrainedConfig."""

import re
from collections.abc import Mapping
from pathlib import Path

from ..strict_json import JSON, parsed

MAX_CONFIG_BYTES = 10 * 2**20


def load(config: object) -> Mapping[str, JSON]:
    """Return the keys of a config: path of a file or its folder, a dict, or a PretrainedConfig.

    Raises FileNotFoundError for a path that is not there; ValueError for what is not JSON in UTF-8,
    has a key twice, or is larger than 10 MiB.

    >>> load({"head_dim": 64})
    {'head_dim': 64}
    """
    if isinstance(config, str | Path):
        path = Path(config)
        return parsed(read_config(path), str(path), infinity=True)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(
            "config must be a path, a dict or a PretrainedConfig, "
            f"got {type(config).__module__}.{type(config).__qualname__}"
        )
    return config


def read_config(path: Path) -> bytes:
    """Return the bytes of a config.json; `path` is the file or its folder.

    Raises FileNotFoundError for a path that is not there, ValueError for a pipe, a GGUF file and
    more than 10 MiB.

    >>> read_config(Path("nothing.json"))
    Traceback (most recent call last):
    FileNotFoundError: nothing.json: no such file; give a config.json or the folder it is in
    """
    path = path / "config.json" if path.is_dir() else path
    if path.exists() and not path.is_file():  # /dev/stdin, <(command)
        raise ValueError(f"{path}: not a regular file; save the config first, it is read twice")
    if not path.is_file():
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and path.suffix != ".json":
            hint = (
                f"; if it is a model of the Hugging Face hub: hf download {path} config.json "
                f"--local-dir {path.name}, then give {path.name}"
            )
        raise FileNotFoundError(
            f"{path}: no such file; give a config.json or the folder it is in{hint}"
        )
    if path.suffix.lower() == ".gguf":
        raise ValueError(f"{path}: a GGUF file; read it with rotary.configs.from_gguf")
    with open(path, "rb") as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"{path}: larger than {MAX_CONFIG_BYTES:,} bytes; is this a config.json?")
    return text
