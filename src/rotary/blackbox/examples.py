"""Makes the arguments of the forwards in which a model is watched, and the positions in them."""

import inspect
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ..kernels import Numbers as Array

TOKENS = 37  # a prime, so that no other axis of a model has this size


def examples(
    model: nn.Module, example: object, positions: object, axes: int = 1
) -> Iterator[tuple[tuple[object, ...], dict[str, object], Array]]:
    """Yield (args, kwargs, positions (seq, axes)) of forwards, to be tried until one runs.

    axes  that a position has in this model; more than one are tried first, then one for all
    """
    if example is None:
        if positions is not None:
            raise ValueError("positions= needs example=, whose tokens they belong to")
        yield from _token_examples(model, axes)
        return
    args, kwargs = (example if isinstance(example, tuple) else (example,)), {}
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    if positions is None:
        ids = [
            each
            for each in (*args, *kwargs.values())
            if isinstance(each, Tensor) and not each.is_floating_point() and each.ndim == 2
        ]
        if not ids:
            raise ValueError(
                "pass positions=, the position of each token of the example: (seq,), or (seq, axes)"
            )
        positions = range(ids[0].shape[1])
    at = np.asarray(list(positions) if isinstance(positions, range) else positions, np.float64)
    if at.ndim not in (1, 2) or len(at) < 2:
        raise ValueError(f"positions must be (seq,) or (seq, axes), got shape {at.shape}")
    yield args, kwargs, at.reshape(len(at), -1)


def _token_examples(
    model: nn.Module, axes: int
) -> Iterator[tuple[tuple[object, ...], dict[str, object], Array]]:
    """Yield random tokens: at distant positions if the model takes position_ids; then from 0."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise ValueError(
            f"{type(model).__qualname__} has no embedding of tokens: pass example=, the arguments "
            "of one forward, and positions=, those of its tokens"
        )
    words = max(embeddings, key=lambda module: module.num_embeddings)
    # also of a model inside of another one: the embedding of padding is zero, which turns nothing
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None))}
    numbers = [pair for config in configs.values() for pair in _numbers(config)]
    special = {n for name, n in numbers if name.endswith("token_id")} | {words.padding_idx}
    # the largest table may be that of positions
    sizes = [n for name, n in numbers if name == "vocab_size" and n]
    known = range(min(words.num_embeddings, 4096, *sizes))
    usable = [n for n in known if n not in special] or [0]
    random = np.random.default_rng(0)
    ids = torch.tensor(random.choice(usable, (2, TOKENS)), device=words.weight.device)
    names = inspect.signature(model.forward).parameters
    first = next(iter(names), "")
    args: tuple[object, ...] = () if "input_ids" in names and first != "input_ids" else (ids,)
    kwargs: dict[str, object] = {} if args else {"input_ids": ids}
    if "use_cache" in names:
        kwargs["use_cache"] = False
    if "position_ids" in names and axes > 1:
        at = _apart(axes)
        ids_of_positions = torch.tensor(at.T, device=ids.device)[:, None].expand(-1, 2, -1)
        yield args, {**kwargs, "position_ids": ids_of_positions}, at.astype(np.float64)
    if "position_ids" in names:
        far = [n + more for n in 2 ** np.arange(5, 11) for more in (0, 1)]
        at = np.array([*range(TOKENS - len(far)), *far])[:TOKENS]
        ids_of_positions = torch.tensor(at, device=ids.device)[None].expand(2, -1)
        yield args, {**kwargs, "position_ids": ids_of_positions}, at.astype(np.float64)[:, None]
    yield args, kwargs, np.arange(TOKENS, dtype=np.float64)[:, None]


def _apart(axes: int) -> Array:
    """Return positions (TOKENS, axes) that differ in one axis after the other, then in all.

    >>> _apart(4)[[0, 1, 9, 10, 36]].tolist()
    [[0, 0, 0, 0], [1, 0, 0, 0], [256, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 256]]
    """
    steps = 2 ** np.arange(min(11, (TOKENS - 1) // axes))
    alone = np.kron(np.eye(axes, dtype=np.int64), steps[:, None])
    alike = np.arange(1, TOKENS - len(alone))[:, None].repeat(axes, axis=1)
    return np.concatenate([np.zeros((1, axes), np.int64), alone, alike])


def _numbers(config: object) -> Iterator[tuple[str, int | None]]:
    """Yield names in a config and its parts, with their values if they are whole numbers."""
    data = config.to_dict() if hasattr(config, "to_dict") else config
    for name, value in data.items() if isinstance(data, Mapping) else ():
        yield str(name), value if isinstance(value, int) else None
        yield from _numbers(value)
