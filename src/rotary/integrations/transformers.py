"""`patch`: make a loaded model rotate its queries and keys with `rotary.rotate`.

    original                        replacement until `unpatch`, and the file here that makes it
    LlamaAttention.forward          self_attn.forward: a copy that calls another name, `methods`
    apply_rotary_pos_emb            _rotary_apply_rotary_pos_emb in the same file, `rotations`
    LlamaRotaryEmbedding.forward    rotary_emb.forward with exact=True, `tables`
    Qwen3Attention.q_norm           computed by the rotation, in one pass, `norms`
    FluxAttnProcessor.__call__      another class for this processor, `methods`
    FluxPosEmbed.forward            pos_embed.forward with exact=True, `grids`

The second one adds a private name to the Python module of the model's code. All others change only
this instance.
"""

import contextlib
import dataclasses
import inspect
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoint.layout import disagreement, marked_layout, seen_in_model
from ..checkpoint.names import LEFT, classify
from . import tables
from .conventions import Convention, of_tables
from .methods import (
    attribute_of,
    copy_calling,
    is_patched,
    methods_of,
    owners,
    restore_methods,
    rotations_called,
    set_method,
)
from .norms import CALLED, MovedNorms, move_norms, norm_or_defer, rms_norm_of
from .rotations import conventions_of, replacement_of


@dataclasses.dataclass
class Patch:
    """What `patch` did to a model; a context manager that undoes it at the end.

    patched  (name of the module, layout of its rotation, or "exact tables"); with "as the config
             says" if the model's own code has another layout than the weights; with "with q_norm
             and k_norm" if these norms may be computed in the same pass; with "checks its tables"
             if it is not known what makes them
    skipped  (name of the module, why it was not changed)

    >>> Patch(nn.Linear(2, 2), [("layers.0.attn", "half"), ("layers.1.attn", "half")], []).patched
    [('layers.0.attn', 'half'), ('layers.1.attn', 'half')]
    """

    model: nn.Module = dataclasses.field(repr=False)
    patched: list[tuple[str, str]]
    skipped: list[tuple[str, str]]

    def unpatch(self) -> None:
        """Restore the model's own functions; a second call does nothing."""
        restore_methods(self.model)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *error: object) -> None:
        self.unpatch()

    def __str__(self) -> str:
        """Return one line for each kind of module, with the number of its layers.

        >>> rows = [("layers.0.attn", "half"), ("layers.1.attn", "half")]
        >>> print(Patch(nn.Linear(2, 2), rows, []))
        patched  layers.*.attn (2): half
        """
        lines = Counter(
            (title, re.sub(r"(?<![^.])\d+(?![^.])", "*", name), what)
            for title, rows in (("patched", self.patched), ("skipped", self.skipped))
            for name, what in rows
        )
        shown = [f"{title:<8} {names} ({n}): {what}" for (title, names, what), n in lines.items()]
        return "\n".join(shown) or "nothing is patched"


def patch(model: nn.Module, *, exact: bool = False) -> Patch:
    """Make a loaded model rotate by `rotary.rotate`: only this instance, until `unpatch`.

    model  of transformers, diffusers or timm, or any other torch module whose code calls a function
           named like a rotation (rotate, rotary, apply_rope), with q, k or both, and then cos and
           sin. If these have two columns for each pair, a module of the model must make them from
           `x, position_ids`, as transformers' rotary embeddings do

    Each such function is called on random tensors, and is replaced only if `rotary.rotate` gives
    the same numbers within float32 rounding. The others are not changed; `.skipped` lists them with
    the reason.

    Most tables hold each cos and sin twice, once for each channel of a pair, and we read one of
    them. If the model does not show what makes its tables, they are compared at each call, and
    where they differ the model's own function is called; `.patched` says "checks its tables". It
    is called too if the tables are learned, while torch compiles, and while a CUDA graph is
    captured.

    exact=False  the model's own tables, converted to float32. Logits are equal up to rounding; in
                 bfloat16 q and k are rounded only once.
    exact=True   float32 tables from exact angles; transformers has float32 angles in the dtype of
                 the model. The float64 frequencies are those of `rotary.from_hf_config` if it knows
                 the model and agrees with the buffer, else `inv_freq` as it is; the attention
                 factor is kept. Dynamic NTK and LongRoPE keep their own tables. Code that reads the
                 tables without such a function gets float32. Of several rotary embeddings whose
                 tables the same layers may read, all are exact or none.

                 Image models: Flux and others that take ids, Wan and others that take a video,
                 and DINOv3, which keeps its random positions in training.

    RMS norms of q and k right before the rotation, as in Qwen3, are computed in the same pass: on
    a GPU where no gradient is wanted, on a CPU for 32,768 numbers of q or k and more. The model's
    own norm is called while torch compiles, and if it has hooks, another forward, or a weight of
    another dtype. `.patched` names such norms.

    If `rotary convert` wrote the weights in another layout than the model's code has, q and k are
    rotated in the layout of the weights, which `rope_traditional` of the config gives.

    Returns a `Patch`: a context manager with `.unpatch()`, `.patched`, `.skipped`. A deep copy of a
    patched model is patched; an unpickled one is not. A shallow copy of a module, such as those of
    nn.DataParallel, calls the methods of the patched one, with its weights.
    Raises ValueError if the model is patched already, has nothing that rotates, or has weights in
    another layout and a rotation that cannot be replaced. Warns (UserWarning) if the norms of the
    query and key rows suggest another layout than the config.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=4, num_key_value_heads=2, vocab_size=9))
    >>> with patch(model, exact=True) as patched:
    ...     print(patched)
    patched  layers.*.self_attn (2): half
    patched  rotary_emb (1): exact tables
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch module, got {type(model).__qualname__}; load it first, for "
            "example by transformers.AutoModel.from_pretrained(name)"
        )
    if is_patched(model):
        raise ValueError("this model is patched already; call unpatch first")
    with _usual_defaults():
        callers, skipped, readable = _callers(model)
        if not callers and not skipped:
            raise ValueError(
                f"found no rotation to replace in {type(model).__qualname__}: no module calls a "
                "function that is named like a rotation (rotate, rotary, apply_rope)"
            )
        forwards = _exact_forwards(model, callers, skipped, readable) if exact else {}
    patched = [(caller.path, str(caller)) for caller in callers]
    patched += [(name, "exact tables") for name in forwards]
    methods = [c.patched(is_exact=not forwards.keys().isdisjoint(c.embeddings)) for c in callers]
    for caller, method in zip(callers, methods, strict=True):
        set_method(caller.module, caller.attribute, method, caller.method)
    for name, forward in forwards.items():
        module = model.get_submodule(name)
        original = type(module).forward
        set_method(module, attribute_of(module, "forward", original), forward, original)
    if fault := disagreement(getattr(model, "config", None), seen_in_model(model)):
        warnings.warn(f"weights {fault[0]}: {fault[1]}", stacklevel=2)
    return Patch(model, patched, skipped)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`; ValueError if the model is not patched.

    Remove what has wrapped a patched method first: it would still call that method.

    >>> unpatch(nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: this model is not patched
    """
    if not restore_methods(model):
        raise ValueError("this model is not patched")


@contextlib.contextmanager
def _usual_defaults() -> Iterator[None]:
    """Let torch make float32 tensors on the CPU: functions are tried on such tensors."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


class _Caller(NamedTuple):
    """A method of one module that calls rotation functions.

    attribute    the attribute of the module to set instead of the method
    conventions  how to rotate instead of each function, in each way it can be called
    embeddings   the paths of the modules that may make its tables
    moved        the method with the norms of q and k left to the rotation, if it has such norms
    """

    path: str
    module: object
    attribute: str
    method: Any  # a function; declared as FunctionType, it would count as a method of this class
    conventions: dict[Callable[..., object], tuple[Convention, ...]]
    embeddings: tuple[str, ...]
    moved: MovedNorms | None

    def __str__(self) -> str:
        every = sum(self.conventions.values(), ())
        layouts = {str(each) for each in every}
        checked = ", checks its tables" if any(each.is_checked for each in every) else ""
        norms = f", with {' and '.join(self.moved.norms)}" if self.moved else ""
        return " and ".join(sorted(layouts)) + norms + checked

    def patched(self, *, is_exact: bool) -> FunctionType:
        """Return a copy of the method that calls our functions, and add these to its file."""
        names = {}
        for function, conventions in self.conventions.items():
            files = [file for file, called in rotations_called(self.method) if called is function]
            kind = "exact_" if is_exact else ""
            kind += "checked_" if any(each.is_checked for each in conventions) else ""
            kind += f"{conventions[0].style}_" if conventions[0].chosen else ""
            kind += f"{conventions[0].layout}_" if conventions[0].by_config else ""
            plain = f"_rotary_{kind}{_name_of(function)}"
            numbered = (f"{plain}_{number}" for number in itertools.count(2))
            names[function] = name = next(  # functions of one file may have the same name
                each for each in itertools.chain((plain,), numbered)
                if all([getattr(file.get(each), "__wrapped__", function) is function
                        for file in files])
            )  # fmt: skip
            for file in files:
                if name not in file:
                    file[name] = replacement_of(function, *conventions, keeps_dtype=is_exact)
        if self.moved is None:
            return copy_calling(self.method, tuple(names.items()))
        method, _ = self.moved
        inspect.unwrap(method).__globals__[CALLED] = norm_or_defer
        return copy_calling(method, tuple(names.items()))


def _callers(
    model: nn.Module,
) -> tuple[list[_Caller], list[tuple[str, str]], dict[str, tuple[str, ...]]]:
    """Return the modules that can be patched, (path, reason) of others, and `tables.readable`."""
    callers: list[_Caller] = []
    skipped: list[tuple[str, str]] = []
    styles = {}
    for name, embedding_module in tables.embeddings(model).items():
        if any([buffer.is_meta for buffer in embedding_module.buffers()]):
            raise ValueError(f"{name} is on the meta device and cannot be tried; load the model")
        styles[name] = tables.styles_of(embedding_module)
    layouts = _layouts_by_config(model)
    rotating = {path: o for path, o in owners(model) if path not in styles and tables.rotates(o)}
    readable = tables.readable(styles, rotating)
    for path, module in rotating.items():
        embeddings = readable[path]
        known = all([styles[each] for each in embeddings])
        made = {style for each in embeddings for style in styles[each] if known}
        layout = layouts.get(path)
        for name, method, obstacle in methods_of(type(module)):  # type: ignore[arg-type]  # it has a hash
            conventions: dict[Callable[..., object], tuple[Convention, ...]] = {}
            for _, function in rotations_called(method):
                try:
                    found = conventions_of(function)
                    if obstacle is not None:
                        raise ValueError(obstacle)
                    found = of_tables(found, made, may_check=layout is None)
                    attribute_of(module, name, method)
                    copy_calling(method, ((function, "_"),))  # raises if it cannot be copied
                except ValueError as error:
                    if name == "__init__" and str(error) != obstacle:
                        continue  # it calls much that is no rotation
                    if layout is not None:
                        raise ValueError(
                            f"{path}: {_name_of(function)} {error}, and by rope_traditional of the "
                            f"config the weights are {layout}; convert them back"
                        ) from error
                    skipped.append((path, f"{_name_of(function)} {error}"))
                    continue
                conventions[function] = tuple(
                    each if layout in (None, each.layout)
                    else each._replace(layout=layout, out_layout=layout, by_config=True)
                    for each in found
                )  # fmt: skip
            if conventions:
                attribute = attribute_of(module, name, method)
                norms = _moved_norms(module, method, conventions)
                call = _Caller(path, module, attribute, method, conventions, embeddings, norms)
                callers.append(call)
    return callers, skipped, readable


def _moved_norms(
    module: object,
    method: FunctionType,
    conventions: Mapping[Callable[..., object], tuple[Convention, ...]],
) -> MovedNorms | None:
    """Leave the norms of `method` to the rotation; None if `rotary.fused` cannot compute them."""
    by_id = {id(function): found for function, found in conventions.items()}
    inner = inspect.unwrap(method)
    called = {name: by_id.get(id(inner.__globals__.get(name))) for name in inner.__code__.co_names}
    operands = {name: found[0].operands for name, found in called.items()
                if found and not any([each.clockwise for each in found])}  # fmt: skip
    try:
        found = move_norms(method, tuple(sorted(operands.items())))
    except ValueError:
        return None
    return found if all([rms_norm_of(getattr(module, n, None)) for n in found.norms]) else None


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _layouts_by_config(model: nn.Module) -> dict[str, str | None]:
    """Return path of each module -> the layout of its weights, by `rope_traditional` of a config.

    The config is that of the module, or of the closest module around it. None if that has no
    `rope_traditional`, and for modules that a conversion does not change, such as the indexer of
    sparse attention. Raises ValueError for a value that is not true or false.
    """
    by_config: dict[int, str | None] = {}  # many modules share a config
    layouts: dict[str, str | None] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            if id(config) not in by_config:
                by_config[id(config)] = marked_layout(config)
            layouts[path] = by_config[id(config)]
        else:
            layouts[path] = layouts.get(path.rpartition(".")[0])
        name = classify(f"{path}.weight")
        if name is not None and name.kind == LEFT:
            layouts[path] = None
    return layouts


def _exact_forwards(
    model: nn.Module,
    callers: list[_Caller],
    skipped: list[tuple[str, str]],
    readable: Mapping[str, tuple[str, ...]],
) -> dict[str, Callable[..., object]]:
    """Return a forward for each rotary embedding that only our rotations read.

    The others are added to `skipped`. Of several that a rotation may read, all are exact or none.
    """
    forwards: dict[str, Callable[..., object]] = {}
    embeddings = tables.embeddings(model)
    read_by_skipped = {each for path, _ in skipped for each in readable[path]}
    unknown = "keeps its tables: rotary does not know what makes them"
    skipped += [(caller.path, unknown) for caller in callers if not caller.embeddings]
    for names in _joined(caller.embeddings for caller in callers if caller.embeddings):
        made, reasons = {}, {}
        for name, module in embeddings.items():
            if name not in names:
                continue
            try:
                if name in read_by_skipped:
                    raise ValueError("its tables are read by a module that was skipped")
                attribute_of(module, "forward", type(module).forward)
                made[name] = tables.exact_forward(module, model)
            except ValueError as error:
                reasons[name] = str(error)
        if not reasons:
            forwards |= made
            continue
        others = f"so does {next(iter(reasons))}, which the same modules may read"
        skipped += [(name, f"keeps its own tables: {reasons.get(name, others)}")
                    for name in embeddings if name in names]  # fmt: skip
    return forwards


def _joined(groups: Iterable[Collection[str]]) -> list[set[str]]:
    """Return the names of groups that have a name in common, directly or by another, as one.

    >>> [sorted(each) for each in _joined(["ab", "cd", "be"])]
    [['c', 'd'], ['a', 'b', 'e']]
    """
    joined: list[set[str]] = []
    for group in groups:
        common = [each for each in joined if not each.isdisjoint(group)]
        joined = [each for each in joined if each not in common] + [{*group}.union(*common)]
    return joined
