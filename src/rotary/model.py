"""Finds the RoPE of a loaded torch model: from its config, and from what it does in one forward.

A forward on random tokens shows which arrays the model rotates, by which angles, whatever its
classes and functions are called. `blackbox.forward` watches it and `blackbox.turned` explains the
angles. Where the config is known as well, its spec must give the same numbers.
"""

import dataclasses
import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .analysis.precision import round_to
from .angles import inv_freq
from .blackbox.examples import examples
from .blackbox.forward import Rotation, forwards, of_widest_heads, unchanged, watch
from .blackbox.turned import TOLERANCES, spec_of
from .configs import MODELS, choose, layer_types
from .configs.diffusers import RULES, from_diffusers_config
from .configs.hf import rotary_of
from .kernels import Numbers as Array
from .rotate import apply
from .spec import Rotary

SWAPPED = (
    "a token at position 0 is already turned by a quarter in all pairs, as if its cos and sin were "
    "swapped"
)


class ModelRotation(NamedTuple):
    """One RoPE of a model, and where it was found.

    part        the key of its sub-config in the config ("vision_config"), or None
    layer_type  of the config, where frequencies differ by layer type, or None
    spec        the RoPE; where it was measured, the simplest one that gives those angles
    modules     paths of the modules that rotate by it; empty where only the config was read
    source      "config and forward": both agree; "forward": measured, no config states it (as
                of the indexer inside of DeepSeek V3.2's attention);
                "config": the model could not run, `note` says why
    note        what to look at: why the model could not run; modules in which one array rotates,
                so that q and k are one array, or one of them is not rotated, or a third array is
                rotated back; axes that the config alone states, where the example has one position
                for all

    >>> ModelRotation(None, None, Rotary(8), ("attn",), "forward").note
    ''
    """

    part: str | None
    layer_type: str | None
    spec: Rotary
    modules: tuple[str, ...]
    source: str
    note: str = ""


def from_model(
    model: nn.Module,
    layer_type: str | None = None,
    *,
    part: str | None = None,
    example: object = None,
    positions: object = None,
) -> Rotary:
    """Return the RoPE of a loaded torch model: of transformers, diffusers, timm, or your own.

    model       runs once, on `example`, without gradients, and is left as it was; on the meta
                device its config is read
    layer_type  which RoPE, if they differ by layer type ("full_attention", ...)
    part        which of several parts: a key of the config ("vision_config"), or the path of
                a module, as `rotations` lists them
    example     the arguments of one forward: a tensor, a tuple, or a dict of keyword arguments;
                default: 2 x 37 random tokens, for a model with an embedding of tokens
    positions   of the tokens of the example, (seq,) or (seq, axes), as the model counts them;
                default 0, 1, 2, ... if the example has token ids (batch, seq), else needed

    Rotations in the forward are found by their numbers, not by names of functions. If the config is
    known and its spec gives the same numbers, that spec is returned; angles are compared up to the
    largest position of the example (1024 if the model takes position_ids, on each axis by itself if
    its config has several; 256 on each of four). Without a known config the result is the simplest
    spec that gives the measured angles, as in `rotary.identify`; frequencies that change beyond the
    length of the example cannot be detected. What the attention makes of rotated arrays is not
    looked at: heads that it rotates and then drops count as rotated.

    Raises ValueError if config and model disagree (with both specs), if the model has several RoPEs
    and neither part nor layer_type chooses one, if nothing is rotated, and if the rotation cannot
    be described by a `Rotary`; TypeError for anything but a torch module.

    >>> class Turn(nn.Module):
    ...     def forward(self, x):  # (batch, seq, heads, 4)
    ...         angle = torch.arange(x.shape[1])[:, None, None] * torch.tensor([1.0, 0.01])
    ...         a, b = x.chunk(2, dim=-1)
    ...         return torch.cat((a * angle.cos() - b * angle.sin(),
    ...                           b * angle.cos() + a * angle.sin()), dim=-1)
    >>> from_model(Turn(), example=torch.randn(2, 16, 3, 4), positions=range(16))
    Rotary(head_dim=4)
    """
    rotated = rotations(model, example=example, positions=positions)
    chosen = [
        each
        for each in rotated
        if layer_type in (None, each.layer_type)
        if part is None or part == each.part or part in each.modules
    ]
    specs = dict.fromkeys(each.spec for each in chosen)
    if len(specs) == 1:
        return next(iter(specs))
    listed = "; ".join(
        f"{', '.join(_short(each.modules))}: part={each.part!r}, layer_type={each.layer_type!r}"
        for each in rotated
    )
    if not specs:
        raise ValueError(f"no rotation of part {part!r} and layer_type {layer_type!r}; {listed}")
    raise ValueError(
        f"{type(model).__qualname__} has {len(specs)} rotations: pass part=, a part or a module, "
        f"or layer_type=, for one of {listed}"
    )


def rotations(
    model: nn.Module, *, example: object = None, positions: object = None
) -> tuple[ModelRotation, ...]:
    """Return every RoPE of a loaded model, with the modules that use it.

    Arguments and errors as in `from_model`, which chooses one of them.

    >>> rotations(nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: Linear has no embedding of tokens: pass example=, the arguments of one forward, \
and positions=, those of its tokens
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch module, got {type(model).__qualname__}; load it first, for "
            "example by transformers.AutoModel.from_pretrained(name)"
        )
    configs = _configs(model)
    config = getattr(model, "config", None) if configs[""].config is None else configs[""].config
    if any(parameter.is_meta for parameter in model.parameters()):
        return _from_config(config, "its parameters are on the meta device")
    stated = _stated(config)
    axes = stated.num_axes if isinstance(stated, Rotary) else 1
    for args, kwargs, at in examples(model, example, positions, axes):
        with unchanged(model):
            seen, error = watch(model, args, kwargs, len(at))
            candidates = _vector_values(model)
        note = f"its forward raised {error}" if error else ""
        if not error:
            break
    if note and not seen:
        return _from_config(config, f"{note}; pass example=, the arguments of one forward")
    by_module: dict[str, list[Rotation]] = {}
    for each in seen:
        by_module.setdefault(each.path, []).append(each)
    every = {path: of_widest_heads(own) for path, own in by_module.items()}
    rotated = {path: forwards(own) for path, own in every.items()}
    kinds: dict[str, str | None] = {}
    agreeing: dict[str, Rotary] = {}
    for path, own in rotated.items():
        for kind in _layer_types(configs[path], path):
            kinds[path], read = kind, _stated(configs[path].config, kind)
            if isinstance(read, Rotary) and _gives(read, own, at):
                agreeing[path] = read
                break
    groups: dict[tuple[str | None, str | None, Rotary, str], list[str]] = {}
    for path, own in rotated.items():
        part, config, _ = configs[path]
        spec, source = agreeing.get(path), "config and forward"
        if spec is None:  # inside of an attention that agrees, the config does not speak of it
            is_inside = any(path.startswith(f"{outer}.") for outer in agreeing)
            if is_inside or "learned" in MODELS.get(getattr(config, "model_type", ""), {}):
                config = None
            source = "forward"
            if config is None:  # specs measured on modules that share a RoPE differ by noise
                others = (each for _, _, each, source_ in groups if source_ == source)
                spec = next((each for each in others if _gives(each, own, at)), None)
            spec = spec or _measured(path, own, at, config, kinds[path], candidates)
        groups.setdefault((part, kinds[path], spec, source), []).append(path)
    if not groups:
        raise ValueError(
            f"no rotation was found in {type(model).__qualname__} with {len(at)} tokens: its "
            f"config says {'nothing' if config is None else stated}; pass an example with two "
            "heads or rows, and one position for each token as positions="
        )
    result = []
    for (part, kind, spec, source), paths in groups.items():
        alone = tuple(path for path in paths if len(rotated[path]) == 1)
        back = tuple(path for path in paths if len(rotated[path]) < len(every[path]))
        notes = _notes(note, alone, back, is_measured=spec.num_axes <= at.shape[1])
        result.append(ModelRotation(part, kind, spec, tuple(paths), source, notes))
    return tuple(result)


def _notes(note: str, alone: tuple[str, ...], back: tuple[str, ...], *, is_measured: bool) -> str:
    """Return what a user of a rotation should look at, "" if nothing.

    note         why the model could not run
    alone        paths of modules in which only one array is rotated
    back         paths of modules that rotate q and k, and another array back
    is_measured  whether the example had positions on all axes
    """
    notes = [note] if note else []
    if alone:
        notes.append(f"one array is rotated, not q and k, in {', '.join(_short(alone))}")
    if back:
        notes.append(f"another array is rotated back after q and k, in {', '.join(_short(back))}")
    if not is_measured:
        notes.append(
            "which pairs belong to which axis is not measured: all axes have the same position"
        )
    return "; ".join(notes)


# --- the forward ---


def _vector_values(model: nn.Module) -> Array:
    """Return all values in 1-D tensors of the model, among which its frequencies may be."""
    tensors = [*model.buffers(), *(value for module in model.modules()
                                   for value in vars(module).values())]  # fmt: skip
    vectors = [
        tensor.detach().to("cpu", torch.float64).numpy()
        for tensor in tensors
        if isinstance(tensor, Tensor) and tensor.ndim == 1 and tensor.is_floating_point()
        if 0 < len(tensor) <= 4096 and not tensor.is_meta
    ]
    return np.unique(np.concatenate([np.zeros(0), *vectors]))


# --- the config ---


class _Nearest(NamedTuple):
    """The nearest known config of a module: its part of the model, and the module that owns it."""

    part: str | None = None
    config: object = None
    owner: str = ""


def _configs(model: nn.Module) -> dict[str, _Nearest]:
    """Return path of each module -> its nearest known config."""
    configs: dict[str, _Nearest] = {}
    whole = getattr(model, "config", None)
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        around = configs.get(path.rpartition(".")[0], _Nearest()) if path else _Nearest()
        if type(module).__name__ in RULES:
            configs[path] = _Nearest(None, module, path)
        elif config is not around.config and getattr(config, "model_type", None) in MODELS:
            names = vars(whole).items() if whole is not None else ()
            part = next((name for name, value in names if value is config), None)
            configs[path] = _Nearest(part or around.part, config, path)
        else:
            configs[path] = around
    return configs


def _stated(config: object, kind: str | None = None) -> Rotary | ValueError | None:
    """Return the RoPE that a config of transformers, or a model of diffusers, states.

    None without a config and without rotation, the error of a config that cannot be read.
    """
    try:
        if isinstance(config, nn.Module):
            return from_diffusers_config(config)
        return None if config is None else rotary_of(choose(config, kind))
    except ValueError as error:
        return error


def _layer_types(nearest: _Nearest, path: str) -> tuple[str | None, ...]:
    """Return the layer types that a module may have; (None,) if all are alike.

    It is the one that the config lists for the number in the path, or any if the list has other
    names than the rope parameters, as in DeepSeek V4.
    """
    config = nearest.config
    try:
        kinds = layer_types(config) if config is not None else ()
    except ValueError:
        return (None,)
    number = re.search(r"(?<![^.])\d+(?![^.])", path.removeprefix(nearest.owner))
    listed = getattr(config, "layer_types", None)
    if not kinds or number is None or not listed or int(number[0]) >= len(listed):
        return (None,)
    kind = str(listed[int(number[0])])
    return (kind,) if kind in kinds else (*kinds, None)


def _from_config(config: object, note: str) -> tuple[ModelRotation, ...]:
    """Return the RoPEs that a config states for text; ValueError if its model is not known."""
    is_of_diffusers = isinstance(config, nn.Module)
    if not is_of_diffusers and getattr(config, "model_type", None) not in MODELS:
        raise ValueError(f"{note}, and no config says which RoPE it has")
    kinds = (None,) if is_of_diffusers else layer_types(config) or (None,)
    result = []
    for kind in kinds:
        spec = _stated(config, kind)
        if isinstance(spec, ValueError):
            raise spec
        if spec:
            result.append(ModelRotation(None, kind, spec, (), "config", note))
    return tuple(result)


def _measured(
    path: str, seen: list[Rotation], at: Array, config: object, kind: str | None, candidates: Array
) -> Rotary:
    """Return the spec that gives what was seen in one module, whose config states no other."""
    try:
        specs = dict.fromkeys(spec_of(rotation.turned, at, candidates) for rotation in seen)
    except ValueError as error:
        reason = SWAPPED if all(_starts_at_a_quarter(rotation, at) for rotation in seen) else error
        raise ValueError(f"{path} rotates, but {reason}") from error
    measured = " and ".join(map(str, specs))
    stated = _stated(config, kind)
    if config is not None and not isinstance(stated, ValueError):
        raise ValueError(
            f"{path}: config and model disagree: the config says {stated}, but its forward "
            f"rotates as {measured}{_rounding_hint(stated, seen, at)}"
        )
    for spec in specs:  # those measured on q and on k differ by noise
        if _gives(spec, seen, at):
            return spec
    raise ValueError(f"{path} rotates q and k, or their parts, differently: {measured}")


def _starts_at_a_quarter(rotation: Rotation, at: Array) -> bool:
    """Whether all pairs of tokens at position 0 are turned by a quarter, one way or the other."""
    angles = rotation.turned.angles[(at == 0).all(axis=1)]
    off = np.abs(np.abs(angles) - np.pi / 2)
    return bool(off.size and off.max() <= max(1e-3, 40 * rotation.turned.noise))


def _gives(spec: Rotary, seen: list[Rotation], at: Array) -> bool:
    """Whether a spec reproduces all that was seen in a module."""
    return all(_reproduces(spec, each, at) for each in seen)


def _reproduces(spec: Rotary, rotation: Rotation, at: Array) -> bool:
    """Whether a spec reproduces an observed rotation at the positions `at`."""
    if spec.head_dim != rotation.x.shape[-1]:
        return False
    positions: Array = at[:, 0] if at.shape[1] == 1 else at
    if (positions == positions.round()).all():
        positions = positions.astype(np.int64)
    if spec.num_axes > 1 and at.shape[1] == 1:  # text: the same position on all axes
        positions = np.repeat(positions[:, None], spec.num_axes, axis=1)
    x, y = rotation.x.swapaxes(0, 1), rotation.y.swapaxes(0, 1)
    try:
        ours = apply(spec, x, positions=positions, seq_dim=-2, allow_negative=True)
    except ValueError:
        return False
    allowed = max(1e-3, TOLERANCES[rotation.dtype]) * np.abs(y).max()
    return bool(np.abs(ours - y).max() <= allowed)


def _rounding_hint(spec: Rotary | None, seen: list[Rotation], at: Array) -> str:
    """Return a hint if 16-bit frequencies explain why a model differs from its config; else ""."""
    if spec is None or spec.depends_on_length:
        return ""
    exact, factor = inv_freq(spec)
    for dtype in ("bfloat16", "float16"):
        params = {"inv_freq": round_to(exact, dtype), "attention_factor": factor}
        if _gives(dataclasses.replace(spec, schedule="custom", params=params), seen, at):
            return f"; its frequencies were rounded to {dtype}, as model.to({dtype}) does to them"
    return ""


def _short(paths: tuple[str, ...]) -> list[str]:
    """Replace layer numbers in paths by *, and drop duplicates."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in paths))
