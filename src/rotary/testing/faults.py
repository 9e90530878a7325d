"""Published faults that give another valid RoPE; only the config shows that it is wrong.

Each is the spec that a program computes in place of the right one. A function has the fault if
all its results agree with that spec.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ..angles import inv_freq
from ..kernels import Numbers as Array
from ..layouts import LAYOUTS
from ..positions import interleaved_sections, sections
from ..spec import Rotary

PLAIN: dict[str, object] = {"schedule": "default", "params": {}}


class Fault(NamedTuple):
    """A stable `code`, what a program does wrong, and the RoPE that it computes then."""

    code: str
    text: str
    spec: Rotary


def faults(spec: Rotary) -> Iterator[Fault]:
    """Yield every known fault that code for a spec can have.

    Sources are repository#number of the public threads in the comments; docs/conformance.md has
    them in a table.

    >>> [each.code for each in faults(Rotary(head_dim=4, base=5e5))][:3]
    ['other_layout', 'other_layout', 'other_layout']
    """
    listed = (*_of_pairs(spec), *_of_slice(spec), *_of_axes(spec), *_of_base(spec),
             *_of_scaling(spec), *_of_attention_factor(spec))  # fmt: skip
    for code, text, changes in listed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrong = dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
        except ValueError:  # no RoPE that a Rotary can describe
            continue
        if wrong != spec:
            yield Fault(code, text, wrong)


Row = tuple[str, str, Mapping[str, object]]  # code, text, and the fields of the spec that differ


def _of_pairs(spec: Rotary) -> Iterator[Row]:
    expected = _layout_in_words(spec.layout, spec.out_layout)
    for read, written in itertools.product(LAYOUTS, LAYOUTS):  # ik_llama.cpp#2290, vllm-metal#44
        text = f"pairs are {_layout_in_words(read, written)}, not {expected}"
        yield "other_layout", text, {"layout": read, "out_layout": written}
    text = "pairs rotate in the other direction: sin has a wrong sign"
    yield "clockwise", text, {"sign": -spec.sign}
    frequencies, factor = inv_freq(spec)
    text = "rotated twice: angles are doubled, and so is the power of the attention factor"
    yield "rotated_twice", text, _custom(2 * frequencies, factor**2)  # TensorRT-LLM#16378


def _layout_in_words(read: str, written: str) -> str:
    return read if read == written else f"read {read} and written {written}"


def _of_slice(spec: Rotary) -> Iterator[Row]:
    width, head_dim = spec.rotary_dim, spec.head_dim
    if width < head_dim:
        whole = {"rotary_dim": head_dim, "start": 0}
        text = f"the whole head is rotated, not {width} of {head_dim} channels"
        yield "partial_lost", text, whole  # vllm#37633, transformers#48682
        twice = width * width // head_dim
        text = f"{twice} channels are rotated, not {width}: the share of {width} / {head_dim} is "
        yield "partial_twice", text + "taken twice", {"rotary_dim": twice}  # vllm#30384
        for start in (0, head_dim - width):  # Liger-Kernel#1387
            text = f"the rotated slice starts at channel {start}, not {spec.start}"
            yield "other_start", text, {"start": start}
        wrong = spec.base ** (-np.arange(0, width, 2) / head_dim)
        text = f"the exponents are divided by head_dim {head_dim}, not by rotary_dim {width}"
        yield "denominator", text, _custom(wrong, inv_freq(spec)[1])
        text = "frequencies span the whole head and the slow pairs stand still (proportional), but "
        text += "a slice must be rotated"
        share = {"partial_rotary_factor": width / head_dim}
        slow = {**whole, "schedule": "proportional", "params": share}
        yield "slice_as_proportional", text, slow
    if spec.schedule == "proportional":  # coreai-models#66
        turning = inv_freq(spec)[0]
        turning = turning[turning != 0]
        text = f"the first {2 * len(turning)} channels are rotated as a slice: the pairs must span "
        text += "the whole head, with the slow ones at rest (proportional)"
        yield "proportional_as_slice", text, _custom(turning, 1.0)


def _of_axes(spec: Rotary) -> Iterator[Row]:
    if not spec.axes:
        return
    counts = [spec.axes.count(axis) for axis in range(spec.num_axes)]
    for name, order in (("in blocks", sections), ("in turn", interleaved_sections)):
        try:  # MNN#4133, ollama#12807
            text = f"the axes of the pairs follow each other {name}"
            yield "other_sections", text, {"axes": order(*counts)}
        except ValueError:
            continue
    for taken in itertools.permutations(range(spec.num_axes)):  # vllm-omni#1784
        text = f"position axes are taken in the order {', '.join(map(str, taken))}"
        yield "other_axis_order", text, {"axes": [taken[axis] for axis in spec.axes]}


def _of_base(spec: Rotary) -> Iterator[Row]:
    for base in (1e4, 5e5, 1e6):  # DeepSpeed#8345, sglang#14745
        text = f"base {base:g}, not {spec.base:g}: the base of the config is not read"
        yield "other_base", text, {"base": base}
    factor = spec.params.get("factor")
    if isinstance(factor, int | float):
        base = spec.base * factor
        text = f"base {base:g}: the base is multiplied by the factor {factor:g} alone"
        yield "base_times_factor", text, {**PLAIN, "base": base}


def _of_scaling(spec: Rotary) -> Iterator[Row]:
    if spec.schedule in ("default", "axial", "custom"):
        return
    name, params = spec.schedule, spec.params
    yield "scaling_lost", f"plain RoPE of base {spec.base:g}, without {name}", PLAIN
    # mlx-vlm#1710, CTranslate2 4.8.5
    factor, trained = params.get("factor"), params.get("original_max_position_embeddings")
    if factor:
        text = f"all frequencies are divided by {factor:g} (linear), where {name} is right"
        yield "scaling_as_linear", text, {"schedule": "linear", "params": {"factor": factor}}
        text = f"{name} by {factor * factor:g}: the factor {factor:g} is applied twice"
        yield "scaling_twice", text, {"params": {**params, "factor": factor * factor}}
        text = f"{name} by {spec.base:g}: the base is taken for the factor"
        yield "base_as_factor", text, {"params": {**params, "factor": spec.base}}  # sglang#38786
        for other, length in itertools.product((factor, 8.0), {trained or 8192, 8192}):
            llama3 = {"factor": other, "original_max_position_embeddings": length,
                      "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
            text = f"llama3 by {other:g} from {length:,} tokens: constants of Llama 3.1 or another "
            text += "type, not what the config says"  # Megatron-LM#6305, Automodel#2825
            yield "other_llama3", text, {"schedule": "llama3", "params": llama3}
    if trained and not spec.depends_on_length:
        for times in {4, round(factor or 1)}:  # vLLM's M-RoPE with YaRN takes 4 times as many
            longer = {**params, "original_max_position_embeddings": trained * times}
            text = f"{name} from {trained * times:,} tokens, not from {trained:,}"
            yield "other_trained_length", text, {"params": longer}
    if name == "yarn":  # vllm#27722, sglang#14270
        is_truncated = params.get("truncate", True)
        done = "rounded to whole pairs" if not is_truncated else "not rounded to whole pairs"
        text = f"the ends of YaRN's ramp are {done}: truncate is {str(is_truncated).lower()}"
        yield "other_truncate", text, {"params": {**params, "truncate": not is_truncated}}
    if spec.depends_on_length and trained:
        for length in {trained + 1, math.ceil(trained * (factor or 1))} - {trained}:
            text = f"every row is scaled for {length:,} tokens, however short it is"
            yield "always_long", text, _custom(*inv_freq(spec, length))  # vLLM, SGLang, mlx-lm
        text = f"rows beyond {trained:,} tokens are scaled as short ones"
        yield "always_short", text, _custom(*inv_freq(spec))


def _of_attention_factor(spec: Rotary) -> Iterator[Row]:
    frequencies, factor = inv_freq(spec)
    for code, wrong, what in (
        ("no_attention_factor", 1.0, "left out"),  # prime-rl#2802, mlx-lm#1507
        ("attention_factor_twice", factor * factor, "applied twice"),  # LMCache 0.5.6
        ("attention_factor_divides", 1 / factor, "a divisor, where it must multiply"),
    ):
        if factor != 1:
            text = f"the {factor:.6g} of cos and sin (attention factor) is {what}"
            yield code, text, _custom(frequencies, wrong)


def _custom(frequencies: Array, factor: float) -> dict[str, object]:
    """Return the fields of a spec with these frequencies and this attention factor."""
    params = {"inv_freq": frequencies.tolist(), "attention_factor": factor}
    return {"schedule": "custom", "rotary_dim": 2 * len(frequencies), "params": params}
