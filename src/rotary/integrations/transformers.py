"""`patch`: a loaded model of transformers rotates its queries and keys by `rotary.rotate`.

An attention of transformers calls a rotation function by a name of its file, which every model of
the family shares. Here each attention instance gets its own `forward`: the same code object but for
that one name, bound to the same globals, so that no other model is touched, torch.compile sees
plain Python, and later changes of the file are still seen. The one trace in the file is the new
name, private and unused by anything else.
"""

import dataclasses
import dis
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from ..checkpoint.measure import disagreement, seen_in_model
from . import tables
from .marks import PATCHED, marked_layouts
from .rotations import Way, replacement_of, way_of

_ROTATES = re.compile(r"rotate|rotary|apply.*rope", re.IGNORECASE)
_SHARED = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "STORE_GLOBAL")  # index the same names


@dataclasses.dataclass
class Patch:
    """What `patch` did to a model; a context manager that takes it back at the end.

    patched  (name of the module, layout of its rotation, or "exact tables"); "as the config says"
             where the model's own code has another layout than the weights
    skipped  (name of the module, why it was left as it is)

    >>> Patch(nn.Linear(2, 2), [("layers.0.attn", "half"), ("layers.1.attn", "half")], []).patched
    [('layers.0.attn', 'half'), ('layers.1.attn', 'half')]
    """

    model: nn.Module = dataclasses.field(repr=False)
    patched: list[tuple[str, str]]
    skipped: list[tuple[str, str]]

    def unpatch(self) -> None:
        """Give the model its own functions back; nothing happens the second time."""
        _restore(self.model)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *error: object) -> None:
        self.unpatch()

    def __str__(self) -> str:
        """One line for each kind of module, its layers counted.

        >>> rows = [("layers.0.attn", "half"), ("layers.1.attn", "half")]
        >>> print(Patch(nn.Linear(2, 2), rows, []))
        patched  layers.*.attn (2): half
        """
        lines = [
            f"{title:<8} {where} ({count}): {what}"
            for title, rows in (("patched", self.patched), ("skipped", self.skipped))
            for (where, what), count in _grouped(rows).items()
        ]
        return "\n".join(lines) or "nothing is patched"


def _grouped(rows: list[tuple[str, str]]) -> Counter[tuple[str, str]]:
    return Counter((re.sub(r"(?<![^.])\d+(?![^.])", "*", name), what) for name, what in rows)


def patch(model: nn.Module, *, exact: bool = False) -> Patch:
    """Let a model of transformers rotate by `rotary.rotate`; this instance alone, and reversibly.

    Each rotation function that an attention of the model calls is tried on random tensors, and is
    replaced only if ours gives the same numbers within float32 rounding; the others are left as
    they are and listed in `.skipped` with the reason.

    exact=False  the model's own tables, taken to float32: logits are equal up to rounding, and in
                 bfloat16 better, for q and k are rounded once.
    exact=True   tables from exact angles, float32, where transformers has float32 angles in the
                 dtype of the model. The float64 frequencies are those of `rotary.from_hf_config`
                 where it knows the model and agrees with the buffer, else `inv_freq` as it is; the
                 attention factor is kept. Dynamic NTK and LongRoPE keep their own tables.

    Weights that `rotary convert` wrote in another layout than the model's code has are rotated in
    theirs: `rope_traditional` of the config says which it is.

    Returns a `Patch`: a context manager with `.unpatch()`, `.patched`, `.skipped`. A deep copy of a
    patched model is patched; an unpickled one is not.
    Raises ValueError if the model is patched already, has nothing that rotates, or has weights in
    another layout and a rotation that cannot be replaced. UserWarning where the norms of its query
    and key rows look as if they had another layout than the config means.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=4, num_key_value_heads=2, vocab_size=9))
    >>> with patch(model, exact=True) as patched:
    ...     print(patched)
    patched  layers.*.self_attn (2): half
    patched  rotary_emb (1): exact tables
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__qualname__}")
    if _ours(model):
        raise ValueError("this model is patched already; call unpatch first")
    sites, skipped = _sites(model)
    if not sites and not skipped:
        raise ValueError(
            f"{type(model).__qualname__} has no module that calls a rotation with cos and sin"
        )
    forwards = _exact_forwards(model, sites, skipped) if exact else {}
    patched = [(site.path, str(site)) for site in sites]
    patched += [(name, "exact tables") for name in forwards]
    for site in sites:
        _bind(site.module, site.target, site.rebound(is_exact=site.producer in forwards))
    for name, forward in forwards.items():
        module = model.get_submodule(name)
        _bind(module, _target(module, "forward", type(module).forward), forward)
    if found := disagreement(getattr(model, "config", None), seen_in_model(model)):
        warnings.warn(f"weights {found[0]}: {found[1]}", stacklevel=2)
    return Patch(model, patched, skipped)


def unpatch(model: nn.Module) -> None:
    """Take `patch` back; ValueError if the model is not patched.

    >>> unpatch(nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: this model is not patched
    """
    if not _restore(model):
        raise ValueError("this model is not patched")


class _Site(NamedTuple):
    """A method of one module that calls rotation functions, and how to compute each of them."""

    path: str
    module: nn.Module
    target: str
    method: Any  # a function; as a FunctionType it would be taken for a method of this class
    ways: dict[Callable[..., Any], Way]
    producer: str | None

    def rebound(self, *, is_exact: bool) -> FunctionType:
        """The method, calling our functions instead."""
        names = {}
        for home, function in _called(self.method):
            if function not in self.ways:
                continue
            way = self.ways[function]
            is_other = way != way_of(function)
            kind = f"{'exact_' if is_exact else ''}{f'{way.layout}_' if is_other else ''}"
            names[function] = f"_rotary_{kind}{function.__name__}"
            if getattr(home.get(names[function]), PATCHED, None) is not function:
                ours = replacement_of(function, way, keeps_dtype=is_exact, is_other_layout=is_other)
                home[names[function]] = _marked(ours, function)
        return _shared(self.method, tuple(names.items()))

    def __str__(self) -> str:
        texts = {
            f"{way}, as the config says" if way != way_of(function) else str(way)
            for function, way in self.ways.items()
        }
        return " and ".join(sorted(texts))


@functools.lru_cache(maxsize=256)
def _shared(
    method: FunctionType, names: tuple[tuple[Callable[..., Any], str], ...]
) -> FunctionType:
    """One new method for all layers and models, or torch.compile would compile each by itself."""
    return _marked(_rebound(method, dict(names)), method)


def _sites(model: nn.Module) -> tuple[list[_Site], list[tuple[str, str]]]:
    """What can be patched, and what cannot, with the reason."""
    sites: list[_Site] = []
    skipped: list[tuple[str, str]] = []
    styles = {name: _styles(module) for name, module in tables.producers(model).items()}
    layouts = marked_layouts(model)
    for path, module in model.named_modules():
        producer = tables.nearest(styles, path)
        layout = layouts[path]
        for name, method in _methods(type(module)):
            ways: dict[Callable[..., Any], Way] = {}
            for _, function in _called(method):
                try:
                    way = way_of(function)
                    _check_tables(way, styles.get(producer or "", set()))
                    _target(module, name, method)
                    _rebound(method, {function: "_"})
                except ValueError as error:
                    if layout is not None:
                        raise ValueError(
                            f"{path}: {function.__name__} {error}, and by rope_traditional of the "
                            f"config the weights are {layout}; convert them back"
                        ) from error
                    skipped.append((path, f"{function.__name__} {error}"))
                else:
                    if layout is not None and layout != way.layout:
                        way = way._replace(layout=layout, out_layout=layout)
                    ways[function] = way
            if ways:
                target = _target(module, name, method)
                sites.append(_Site(path, module, target, method, ways, producer))
    return sites, skipped


def _styles(module: nn.Module) -> set[str]:
    try:
        return {source.style for source in tables.sources_of(module).values()}
    except ValueError:
        return set()


def _check_tables(way: Way, styles: set[str]) -> None:
    """A table that holds each pair twice is read once: that must be what the model makes."""
    if way.style not in ("halves", "repeat"):
        return
    if not styles:
        raise ValueError("gets its tables from a module that is not known")
    if styles != {way.style}:
        raise ValueError("gets tables that may turn the two channels of a pair differently")


def _exact_forwards(
    model: nn.Module, sites: list[_Site], skipped: list[tuple[str, str]]
) -> dict[str, Callable[..., Any]]:
    """A forward for each producer whose tables only our rotations read; the others to `skipped`."""
    forwards = {}
    producers = tables.producers(model)
    left = {tables.nearest(producers, path) for path, _ in skipped}
    for name in dict.fromkeys(site.producer for site in sites):
        if name is None:
            skipped += [(s.path, "makes its own tables") for s in sites if s.producer is None]
            continue
        module = producers[name]
        try:
            if name in left:
                raise ValueError("its tables are read by a module that was skipped")
            _target(module, "forward", type(module).forward)
            forwards[name] = _marked(tables.exact_forward(module), type(module).forward)
        except ValueError as error:
            skipped.append((name, f"keeps its own tables: {error}"))
    return forwards


# --- methods of one instance ---


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The methods a class adds to nn.Module; of several with one name, the one that is called."""
    names = {n: None for k in kind.__mro__ if k not in nn.Module.__mro__ for n in vars(k)}
    for name in names:
        method = getattr(kind, name)
        if isinstance(method, FunctionType):
            yield name, method


def _called(method: FunctionType) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """(globals, function) for every rotation function that a method, or what it wraps, names."""
    for function in _inside(method):
        for name in sorted(_loads(function.__code__)):
            value = function.__globals__.get(name)
            if _ROTATES.search(name) and callable(value) and not isinstance(value, type):
                yield function.__globals__, value


def _inside(function: FunctionType) -> list[FunctionType]:
    """A function and all that its closures hold: what it wraps."""
    found = [function]
    for outer in found:
        for cell in outer.__closure__ or ():
            inner = _content(cell)
            if isinstance(inner, FunctionType) and all(inner is not known for known in found):
                found.append(inner)
    return found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _loads(code: CodeType) -> set[str]:
    """Names of the globals that a code object, or one inside it, reads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return names.union(*[_loads(part) for part in code.co_consts if isinstance(part, CodeType)])


def _rebound(function: FunctionType, names: dict[Callable[..., Any], str]) -> FunctionType:
    """`function`, which reads the functions in `names` by these names, and its wrappers likewise.

    It shares the globals and all that need not change.
    """
    code = function.__code__
    loaded = {name: function.__globals__.get(name) for name in _loads(code)}
    renamed = {name: names[value] for name, value in loaded.items()
               if callable(value) and value in names}  # fmt: skip
    cells = [_rebound_cell(cell, names) for cell in function.__closure__ or ()]
    if not renamed and all(
        new is old for new, old in zip(cells, function.__closure__ or (), strict=True)
    ):
        return function
    new = FunctionType(
        _renamed(code, renamed), function.__globals__, function.__name__,
        function.__defaults__, tuple(cells),
    )  # fmt: skip
    new.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(new, function)
    del vars(new)["__wrapped__"]
    wrapped = vars(function).get("__wrapped__")
    if isinstance(wrapped, FunctionType):
        vars(new)["__wrapped__"] = _rebound(wrapped, names)
    return new


def _rebound_cell(cell: CellType, names: dict[Callable[..., Any], str]) -> CellType:
    inner = _content(cell)
    if not isinstance(inner, FunctionType):
        return cell
    new = _rebound(inner, names)
    return cell if new is inner else CellType(new)


def _renamed(code: CodeType, names: dict[str, str]) -> CodeType:
    for instruction in dis.get_instructions(code):
        if instruction.argval in names and instruction.opname in _SHARED:
            raise ValueError("is also the name of an attribute in the code that calls it")
    consts = tuple(
        _renamed(part, names) if isinstance(part, CodeType) else part for part in code.co_consts
    )
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=consts
    )


def _target(module: nn.Module, name: str, method: Callable[..., Any]) -> str:
    """The attribute to set; ValueError if somebody has set it before."""
    hooked = f"_old_{name}"  # accelerate keeps what it wraps there
    target = hooked if hooked in vars(module) else name
    own = vars(module).get(target)
    if own is not None and getattr(own, "__func__", None) is not method:
        raise ValueError(f"is called by a {name} that was replaced before")
    return target


def _marked(function: Any, original: Any) -> Any:
    setattr(function, PATCHED, original)
    return function


def _bind(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    object.__setattr__(module, name, MethodType(function, module))


def _ours(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """(module, attribute, original function) of every method that `patch` set."""
    return [
        (module, name, getattr(value.__func__, PATCHED))
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, MethodType) and hasattr(value.__func__, PATCHED)
    ]


def _restore(model: nn.Module) -> bool:
    found = _ours(model)
    for module, name, original in found:
        if name.startswith("_old_"):
            _bind(module, name, original)
        else:
            object.__delattr__(module, name)
    return bool(found)
