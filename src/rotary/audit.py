"""Looks for faults in the RoPE of a config or of a loaded model, for `rotary doctor`."""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .analysis.precision import longest_safe_position
from .angles import inv_freq
from .checkpoint.files import CONFIG, MANIFEST, read_manifest
from .checkpoint.layout import Seen, disagreement, seen_in_folder, seen_in_model, unread_layout
from .configs import (
    ArgumentNeededError,
    NoRopeError,
    choose,
    from_diffusers_config,
    from_hf_config,
    layer_types,
    parts,
)
from .configs.diffusers import is_of_diffusers
from .configs.hf import LAYOUT_MARK, rotary_of
from .kernels import Numbers
from .layouts import LAYOUTS
from .spec import Rotary

# radians: an angle that is off by more changes float32 attention visibly
_TOLERANCE = 1e-2
# schedules that need the trained length; without one they take max_position_embeddings
_STRETCHED = ("yarn", "longrope", "llama3")
_UNREAD = (
    "transformers does not read this key: correct or remove it; `rotary diff` shows what other "
    "programs do"
)


class Finding(NamedTuple):
    """One line of the report.

    where    the part, the layer type or the buffer that the line is about
    found    what was found there
    advice   what to do about it; empty if there is nothing to do
    is_hint  True if it is no fault: the model was trained with these numbers, but others are better
    """

    where: str
    found: str
    advice: str = ""
    is_hint: bool = False

    @property
    def is_fault(self) -> bool:
        """Whether results are wrong: there is advice, and it is not a hint."""
        return bool(self.advice) and not self.is_hint


def audit(subject: object) -> list[Finding]:
    """Look for faults of RoPE in a config (path, folder, dict) or in a loaded torch model.

    In a config it finds keys that transformers does not read or that the model's code ignores, a
    context longer than the trained length times the factor, a schedule without the trained length,
    positions at which float32 angles are off by more than 1e-2 rad, and weights in a layout that
    transformers does not know of.
    In a folder with safetensors it also compares the layout in the config with that of the weights:
    the layout that a conversion recorded, or else the one that the norms of the weights show.
    In a model it checks `model.config` and the weights in the same ways, and finds buffers of
    frequencies that are in half precision, on the meta device, not finite, or not those of the
    config: for a schedule that depends on the length, neither those within the trained length nor
    those that a long prompt leaves. Raises ValueError for a config that cannot be read at all.

    >>> [each.where for each in audit({"model_type": "llama", "rope_thata": 1e4}) if each.advice]
    ['config']
    >>> [each.advice for each in audit({"model_type": "gptj", "rope_traditional": False})][-1]
    'transformers loads them and computes wrong results: call rotary.patch(model) after loading, \
or move them back by rotary convert'
    """
    if hasattr(subject, "named_modules"):
        config, buffers = getattr(subject, "config", None), list(_buffers(subject))
        if config is None:
            return buffers
        from .integrations.methods import is_patched  # needs torch, which a config does not

        layout = _layout_findings(config, seen_in_model(subject), is_patched(subject))
        stated = subject if is_of_diffusers(subject) else config
        return [*_configs(stated), *buffers, *layout]
    return [*_configs(subject), *_layout_of_files(subject)]


def _configs(subject: object) -> list[Finding]:
    findings: list[Finding] = []
    found = () if is_of_diffusers(subject) else parts(subject)
    for part in found or (None,):
        try:
            findings += _config(subject, part)
        except NoRopeError:
            findings.append(_rope(part or "config", None))
        except ValueError as error:
            findings.append(Finding(part or "config", "cannot be read", str(error)))
    return findings


def _config(subject: object, part: str | None) -> Iterator[Finding]:
    if is_of_diffusers(subject):
        yield _rope("config", from_diffusers_config(subject))
        return
    for kind in layer_types(subject, part=part) or (None,):
        where = " ".join(word for word in (part, kind) if word) or "config"
        config, complaints = choose(subject, kind, part), list[str]()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spec = rotary_of(config, complaints.append)
        for complaint in complaints:
            yield Finding(where, complaint, _UNREAD)
        for each in caught:  # a factor below 1
            yield Finding(where, str(each.message), "it is read as it is written", is_hint=True)
        yield _rope(where, spec)
        if spec is None:
            continue
        if spec.schedule in _STRETCHED and config.written_trained is None:
            yield Finding(
                where,
                f"no original_max_position_embeddings: {spec.schedule} takes "
                f"max_position_embeddings {config.context:,} for the trained length",
                "write the trained length; `rotary diff` shows programs that take another",
                is_hint=True,
            )
        yield from _lengths(where, spec, config.get("max_position_embeddings"))
        if config.layers_without_rotation:
            yield Finding(where, config.layers_without_rotation)


def _rope(where: str, spec: Rotary | None) -> Finding:
    if spec is None:
        return Finding(where, "no rotation")
    factor = inv_freq(spec)[1]
    written = f", writes {spec.out_layout}"
    share = f", {spec.rotary_dim} of {spec.head_dim} channels from {spec.start}"
    return Finding(
        where,
        f"{spec.schedule}, base {spec.base:.15g}, {spec.layout}"
        f"{written if spec.out_layout != spec.layout else ''}"
        f"{share if spec.rotary_dim != spec.head_dim else ''}, attention factor {factor:.6g}",
    )


def _lengths(where: str, spec: Rotary, context: int | None) -> Iterator[Finding]:
    trained = spec.params.get("original_max_position_embeddings")
    factor = spec.params.get("factor")  # longrope may have none: its lists say how far it reaches
    # llama3 is not among them: its models were trained on more than this
    is_stretch = spec.schedule in ("linear", "yarn", "longrope")
    if context and trained and factor and is_stretch and context > 1.001 * trained * factor:
        yield Finding(
            where,
            f"max_position_embeddings {context:,} is more than {trained:,} trained times "
            f"{factor:g}",
            f"positions beyond {trained * factor:,.0f} were never seen: raise factor or serve less",
            is_hint=True,
        )
    safe = longest_safe_position(spec, _TOLERANCE, seq_len=context or None)
    if context and context > safe + 1:
        yield Finding(
            where,
            f"float32 angles may be off by more than {_TOLERANCE:g} rad beyond position {safe:,}",
            "compute angles exactly: rotary.apply, or rotary.patch(model, exact=True)",
            is_hint=True,
        )


def _buffers(model: Any) -> Iterator[Finding]:
    """Yield one finding for each buffer of frequencies in the modules of a model."""
    for where, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
                path = f"{where}.{name}" if where else name
                yield Finding(path, *_buffer_state(module, name, buffer))


def _buffer_state(module: Any, name: str, buffer: Any) -> tuple[str, str]:
    """Compare a buffer of frequencies with its config; return what was found, and advice or ""."""
    if buffer.device.type == "meta":
        return "on the meta device", "it has no values: load or build it again"
    values = buffer.detach().double().cpu().numpy()
    dtype = str(buffer.dtype).removeprefix("torch.")
    if not (np.abs(values) <= 2 * math.pi).all():  # or NaN
        advice = "uninitialized memory, as after to_empty(): build the module again"
        return "values that are not frequencies", advice
    if dtype in ("bfloat16", "float16"):
        return (
            f"in {dtype}",
            "angles are wrong after some hundred tokens: cast the model without it",
        )
    count = f"{len(values)} frequencies"
    config, prefix = getattr(module, "config", None), name.removesuffix("inv_freq")
    if config is None:
        return f"{count}, float32 or better", ""
    layer_type = prefix.rstrip("_")
    try:  # without a type in its name, it may have any RoPE that the config states
        kinds = (layer_type,) if layer_type else layer_types(config) or (None,)
        specs = [from_hf_config(config, kind, strict=False) for kind in kinds]
    except ArgumentNeededError as error:
        return f"{count}, not compared: {error.reason}", ""
    except ValueError as error:
        return f"{count}, not compared: {error}", ""
    if not any(specs):  # Falcon with alibi makes the buffer as well, and does not read it
        return f"{count}, the config says no rotation", ""
    stated = [each for spec in specs if spec for each in _frequencies_in_use(spec, module, prefix)]
    alike = [each for each in stated if each.shape == values.shape]
    if not alike:
        others = " or ".join(dict.fromkeys(str(len(each)) for each in stated))
        return f"{count}, the config says {others}", "the module was built from another config"
    apart = min(
        float(np.max(np.abs(values - each) / np.maximum(np.abs(each), 1e-30))) for each in alike
    )
    if apart > 1e-4:
        advice = "loaded from a checkpoint, or changed since: build the module again"
        return f"frequencies differ from the config by {apart:.1e}", advice
    return f"{count}, as the config says", ""


def _frequencies_in_use(spec: Rotary, module: Any, prefix: str) -> Iterator[Numbers]:
    """Yield the frequencies that a sound module may have.

    Beside those of the spec: those that a long prompt left; those of one axis after another, as
    Ernie 4.5 VL has them; and those of one axis, where all have the same, as in vision towers.
    """
    whole = inv_freq(spec)[0]
    yield whole
    by_axis = [whole[np.equal(spec.axes, axis)] for axis in dict.fromkeys(spec.axes)]
    if len(by_axis) > 1:
        yield np.concatenate(by_axis)
        if all(np.array_equal(each, by_axis[0]) for each in by_axis):
            yield by_axis[0]
    if spec.schedule == "longrope":  # max_seq_len_cached does not say which list is in use
        yield inv_freq(spec, spec.params["original_max_position_embeddings"] + 1)[0]
    elif spec.depends_on_length:
        longest = getattr(module, "max_seq_len_cached", 0)
        yield inv_freq(spec, int(getattr(module, f"{prefix}max_seq_len_cached", longest)))[0]


# --- the layout of the weights ---


def _layout_of_files(subject: object) -> Iterator[Finding]:
    """Compare the layout that a config states with that of the weights in its folder."""
    folder = Path(subject) if isinstance(subject, str | Path) else None
    if folder is not None and not folder.is_dir():
        folder = folder.parent if folder.name == CONFIG else None
    if folder is None or not any(folder.glob("*.safetensors")):
        yield from _layout_findings(subject, None)
        return
    try:
        manifest = read_manifest(folder) or {}
    except ValueError as error:
        yield Finding("weights", "not whole", str(error))
        return
    written = manifest.get("to")
    if written in LAYOUTS:
        yield from _layout_findings(subject, Seen(written, f"{written} by {MANIFEST}"))
        return
    seen = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an index with another total size
            seen = seen_in_folder(folder, subject)
    except ValueError as error:
        yield Finding("weights", f"layout not measured: {error}")
    yield from _layout_findings(subject, seen)


def _layout_findings(
    config: object, seen: Seen | None, is_patched: bool = False
) -> Iterator[Finding]:
    """Compare the layout that the config states with those of the weights and of the code."""
    if fault := disagreement(config, seen):
        yield Finding("weights", *fault)
        return
    if seen is not None:
        yield Finding("weights", f"{seen.text}, as the config means")
    try:
        unread = unread_layout(config)
    except ValueError:  # `_configs` reports it
        return
    if unread is not None and not is_patched:
        yield Finding(
            "weights",
            f"{unread.weights} by {LAYOUT_MARK}; {unread.model} of transformers rotates "
            f"{unread.code}",
            "transformers loads them and computes wrong results: call rotary.patch(model) after "
            "loading, or move them back by rotary convert",
        )
