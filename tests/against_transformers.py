"""Broken configs as we read them and as transformers does; run as a script for a count of each.

python tests/against_transformers.py 100000 0    # configs and first seed, one for each thousand
"""

import functools
import json
import random
import resource
import signal
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import mutations
from tools import make_models

import rotary
from rotary.configs import MODELS, layer_types
from rotary.configs.entries import TEXT_PARTS
from rotary.programs import diff
from rotary.schedules import FLOAT32, SCHEDULES

SECONDS, BYTES = 0.05, 50_000_000  # what one config may take
CLOSE = 2e-6  # two float32 formulas whose powers are rounded in other libraries
EQUAL = {"both read, equal", "both refuse", "both: no rotation"}
# not the same answer, and no number of ours differs: each is told in golden/DIFFERENCES.md
TOLD = {
    "we refuse", "we refuse, transformers reads", "we read, transformers refuses",
    "no class of transformers keeps frequencies", "grid of a vision tower",
    "switched off",  # test_without_rotation.py counts what these models do
}  # fmt: skip


class Numbers(NamedTuple):
    """(pairs,) float32 in rad per token, and what multiplies cos and sin."""

    inv_freq: np.ndarray
    attention_factor: float


class NoAnswerError(Exception):
    """transformers raises, or has no class for this config."""


@functools.cache
def classes() -> dict[str, type]:
    """model_type -> the class that makes its tables."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    found: dict[str, type] = {}
    for module, name in make_models.rotary_classes():
        kind = make_models.rotary_class(module, name)
        config = make_models.config_for(kind)
        if config is not None:
            found.setdefault(config.model_type, kind)
    for name, same in (make_models.SAME | make_models.owners_of_code()).items():
        if same in found:
            found.setdefault(name, found[same])
    return found


@contextmanager
def seconds(limit: int) -> Iterator[None]:
    """TimeoutError after that many seconds; gradients are then on or off as before.

    The signal may arrive in the middle of `torch.no_grad`, which is then not left.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError

    wants_gradients = torch.is_grad_enabled()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(wants_gradients)


def config_of(data: dict[str, Any]) -> Any:
    """The config object of the text, as transformers makes it from such a file."""
    name = data.get("model_type")
    kind = transformers.CONFIG_MAPPING[make_models.SAME.get(name, name)]
    # it writes the config into the log, also where nobody reads that: half of its time
    with mock.patch.object(transformers.PreTrainedConfig, "__repr__", object.__repr__):
        config = kind.from_dict(json.loads(json.dumps(data)))  # it fills its dicts in place
    while config.model_type not in classes():
        part = next((key for key in TEXT_PARTS if hasattr(config, key)), None)
        if part is None:
            raise NoAnswerError(f"no class for {config.model_type}")
        config = getattr(config, part)
    return config


def numbers(data: dict[str, Any], layer_type: str | None, length: int | None) -> Numbers:
    """What the class has after a forward over a row of `length` tokens; None: as it is made."""
    known = classes()  # its imports take longer than any config may
    try:
        with warnings.catch_warnings(), seconds(3):
            warnings.simplefilter("ignore")
            config = config_of(data)
            made = known[config.model_type](config)
            of_layer = (layer_type,) if layer_type else ()
            ids = torch.tensor([[0, length - 1 if length else 0]])
            table = made(torch.empty(0), ids, *of_layer)
            table = table[0] if isinstance(table, tuple) else table.abs()  # cos, or complex
            amplitude = float(table.flatten()[0])  # the cosine of position 0
    except NoAnswerError:
        raise
    except Exception as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
    prefix = f"{layer_type}_" if layer_type and hasattr(made, f"{layer_type}_inv_freq") else ""
    if not hasattr(made, f"{prefix}inv_freq"):
        raise NoAnswerError(
            f"no class: {type(made).__name__} keeps no frequencies for {layer_type}"
        )
    inv_freq = getattr(made, f"{prefix}inv_freq").detach().float().numpy()
    return Numbers(inv_freq, amplitude)


class Outcome(NamedTuple):
    """What became of one config: a key of the counts, and what to look at."""

    kind: str
    config: dict[str, Any]
    layer_type: str | None
    said: str
    seconds: float
    bytes: int


def outcome(config: dict[str, Any], chance: random.Random, *, asks_always: bool = False) -> Outcome:
    """One config, one of its layer types drawn by `chance`, read by us and by transformers.

    Of what we refuse transformers is asked only with `asks_always`: for a count, as both may be.
    """
    kind: str | None = None
    tracemalloc.start()
    start = time.process_time()
    try:
        kind = chance.choice(layer_types(config) or (None,))
        spec, refusal = rotary.from_hf_config(config, kind), ""
    except ValueError as error:
        spec, refusal = None, str(error)
    except Exception as error:  # any other than ValueError is what is looked for
        tracemalloc.stop()
        return Outcome("another error", config, kind, repr(error), 0.0, 0)
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    try:
        said = by_diff(config, kind, spec)
    except Exception as error:  # any other than ValueError is what is looked for
        return Outcome("another error", config, kind, f"diff: {error!r}", seconds, peak)
    if said:
        return Outcome("diff differs", config, kind, said, seconds, peak)
    if refusal and not asks_always:
        found, said = "we refuse", refusal
    else:
        found, said = compared(config, kind, spec, refusal)
    if "\n" in refusal:
        found = "not one line"
    return Outcome(found, config, kind, said, seconds, peak)


def compared(
    config: dict[str, Any], kind: str | None, spec: rotary.Rotary | None, refusal: str
) -> tuple[str, str]:
    """The key of the counts, and what to look at."""
    if spec is not None and spec.schedule == "axial":
        return "grid of a vision tower", ""
    lengths: list[int | None] = [None]
    if spec is not None and spec.depends_on_length:
        lengths.append(min(2 * spec.params["original_max_position_embeddings"] + 1, 2**40))
    try:
        theirs = [numbers(config, kind, length) for length in lengths]
    except NoAnswerError as error:
        said = str(error)
        if said.startswith("no class") and not refusal:
            no_rotation = spec is None and "no frequencies" in said
            return ("both: no rotation" if no_rotation else
                    "no class of transformers keeps frequencies"), said  # fmt: skip
        if refusal:
            return "both refuse", refusal
        return "we read, transformers refuses", said
    if refusal:
        return "we refuse, transformers reads", refusal
    if spec is None:
        is_off = "switch" in MODELS.get(config.get("model_type"), {})
        return "switched off" if is_off else "we have no rotation, transformers has", ""
    for length, wanted in zip(lengths, theirs, strict=True):
        got = ours(spec, length)
        if got.inv_freq.shape != wanted.inv_freq.shape:
            shapes = got.inv_freq.shape, wanted.inv_freq.shape
            return "both read, different", f"{shapes} of {spec}"
        is_near = np.allclose(got.inv_freq, wanted.inv_freq, rtol=CLOSE, atol=1e-37)
        if not is_near or not np.isclose(got.attention_factor, wanted.attention_factor, CLOSE):
            return "both read, different", f"at {length}: {got}, not {wanted}, of {spec}"
    return "both read, equal", ""


def ours(spec: rotary.Rotary, length: int | None) -> Numbers:
    """The same of a spec, in transformers' arithmetic."""
    row = {"seq_len": length} if spec.depends_on_length else {}
    schedule = SCHEDULES[spec.schedule]
    inv_freq, factor = schedule(spec.rotary_dim, spec.base, FLOAT32, **spec.params, **row)
    return Numbers(np.asarray(inv_freq, np.float32), float(np.float32(factor)))


def by_diff(config: dict[str, Any], kind: str | None, spec: rotary.Rotary | None) -> str:
    """What `diff` says transformers computes, where that is not what we read; else ""."""
    try:
        reading = diff(config, layer_type=kind, seq_len=1).readings[0]
    except ValueError:
        return ""
    if reading.inv_freq is None or spec is None or spec.schedule == "axial":
        return ""
    row = {"seq_len": 1} if spec.depends_on_length else {}
    wanted = SCHEDULES[spec.schedule](spec.rotary_dim, spec.base, **spec.params, **row)[0]
    is_same = reading.inv_freq.shape == wanted.shape and np.allclose(reading.inv_freq, wanted)
    return "" if is_same else f"{reading.schedule} against {spec}"


@contextmanager
def memory(limit: int) -> Iterator[None]:
    """MemoryError for more than that many bytes on top: sizes that transformers would make."""
    pages = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if pages.exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(seed: int, count: int, *, asks_always: bool = False) -> tuple[Counter[str], list[Outcome]]:
    """The counts, and every outcome that may not be."""
    classes()
    chance, counts, faults = random.Random(seed), Counter[str](), []
    with warnings.catch_warnings(), np.errstate(all="ignore"), memory(2**31):
        warnings.simplefilter("ignore")
        for _ in range(count):
            found = outcome(mutations.mutated(chance), chance, asks_always=asks_always)
            counts[found.kind] += 1
            if found.kind not in EQUAL | TOLD or found.bytes > BYTES:
                faults.append(found)
            if found.seconds > SECONDS:
                counts["slower than 50 ms"] += 1
    return counts, faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    first, totals = int(sys.argv[2]) if len(sys.argv) > 2 else 0, Counter[str]()
    for seed in range(first, first + int(sys.argv[1]) // 1000):
        counts, wrong = run(seed, 1000, asks_always=True)
        totals += counts
        sys.stdout.write(f"seed {seed}: {len(wrong)} faults\n")
        for each in wrong:
            sys.stdout.write(f"{each._replace(said=each.said[:400])}\n")
        sys.stdout.flush()
    for name, number in totals.most_common():
        sys.stdout.write(f"{number:8,} {name}\n")
