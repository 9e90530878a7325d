"""The keys of a config: from a file, its folder, a dict or a PretrainedConfig."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 10 * 2**20


def load(config: Any) -> Mapping[str, Any]:
    """The keys of a config: path of a file or its folder, a dict, or a PretrainedConfig.

    Raises FileNotFoundError for a path that is not there; ValueError for what is not JSON in UTF-8,
    has a key twice, or is larger than 10 MiB.

    >>> load({"head_dim": 64})
    {'head_dim': 64}
    """
    if isinstance(config, str | Path):
        return _read_file(Path(config))
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(
            "config must be a path, a dict or a PretrainedConfig, "
            f"got {type(config).__module__}.{type(config).__qualname__}"
        )
    return config


def _read_file(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a config.json or the folder it is in")
    if path.suffix == ".gguf":
        raise ValueError(f"{path}: a GGUF file; read it with rotary.configs.from_gguf")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{path}: larger than {MAX_CONFIG_BYTES:,} bytes; is this a config.json?")
    try:
        return parsed(path.read_bytes().decode("utf-8-sig"), str(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file in UTF-8: {error}") from error


def parsed(text: str, where: str) -> Mapping[str, Any]:
    """The keys of a config that is JSON text; `where` it is from stands in the errors.

    Raises JSONDecodeError, which is a ValueError, or RecursionError for what is no JSON; ValueError
    for a number that JSON does not have, a key twice, and anything but an object.

    >>> parsed('{"head_dim": 64}', "a test")
    {'head_dim': 64}
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{where}: {constant} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            keys = Counter(key for key, _ in pairs)
            raise ValueError(f"{where}: key {keys.most_common(1)[0][0]!r} appears twice")
        return data

    data = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: must hold an object, got {type(data).__name__}")
    return data
