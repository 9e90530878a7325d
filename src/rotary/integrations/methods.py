"""Find the rotation functions that a module's methods call, and copy methods to call others.

An attention module of transformers calls a rotation function by a global name of its file:

    query, key = apply_rotary_pos_emb(query, key, cos, sin)

A copy of that method, set on one module, looks up another name in the same file:

    query, key = _rotary_apply_rotary_pos_emb(query, key, cos, sin)

Only that name differs. So no other model is affected, later changes of the file's globals take
effect, and torch.compile sees plain Python. docs/log.md says what wrappers without such a copy
lose. A call through a module, `llama.apply_rotary_pos_emb(...)`, looks up the other name in that
module, and so does an import in the method, `from ..embeddings import apply_rotary_emb`.
"""

import copy
import dis
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from importlib import util
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

from torch import nn

ORIGINAL = "_rotary_original"  # attribute of a function set on a module: the one it replaces
_ROTATES = re.compile(r"rotate|rotary|apply.*rope|apply_rot", re.IGNORECASE)


# --- which functions a method calls ---


def rotations_called(
    method: FunctionType,
) -> Iterator[tuple[dict[str, object], Callable[..., object]]]:
    """Yield (namespace, function) for every function named like a rotation that a method calls.

    The namespace is that of the method's file, or of the module through which the function is
    called. If the method is decorated, the function inside the decorator is searched as well.
    """
    for function in _with_decorated(method):
        code = function.__code__
        if any(map(_ROTATES.search, _names(code))):  # to read all instructions takes far longer
            for name in sorted(_globals(code)):
                value = function.__globals__.get(name)
                if _is_rotation(value, name):
                    yield function.__globals__, value
            for module, name in _through_modules(function, code):
                value = getattr(module, name, None) if _ROTATES.search(name) else None
                if _is_rotation(value, name):
                    yield vars(module), value
        for value in _local_functions(function):
            yield function.__globals__, value


def _with_decorated(method: FunctionType) -> Iterator[FunctionType]:
    """Yield a function and those that its closure holds, as a decorator's does."""
    functions = [method]
    for function in functions:
        yield function
        inner = [_content(cell) for cell in function.__closure__ or ()]
        functions += [f for f in inner if isinstance(f, FunctionType) and f not in functions]


@functools.lru_cache(maxsize=256)
def _local_functions(method: FunctionType) -> tuple[FunctionType, ...]:
    """Return the functions named like a rotation that a method defines locally, as in Wan."""
    return tuple(
        FunctionType(code, method.__globals__)
        for code in _nested(method.__code__)
        if _ROTATES.search(code.co_name) and not code.co_freevars
    )


def _is_rotation(value: object, name: str) -> TypeGuard[Callable[..., object]]:
    is_function = callable(value) and not isinstance(value, type)
    return bool(_ROTATES.search(name)) and is_function and isinstance(value, Hashable)


def _through_modules(function: FunctionType, code: CodeType) -> Iterator[tuple[ModuleType, str]]:
    """Yield (module, attribute) for each attribute of a module that a function uses or imports."""
    for source, name in _imported(code):
        module = _loaded(source, function.__globals__.get("__package__"))
        if module is not None:
            yield module, name
    for first, *others in _dotted(code):
        owner = function.__globals__.get(first)
        for name in others:
            if not isinstance(owner, ModuleType):
                break
            yield owner, name
            try:
                owner = getattr(owner, name, None)
            except RuntimeError:  # torch.classes has only what an extension has registered
                break


@functools.lru_cache(maxsize=4096)  # as for `_globals`
def _dotted(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return each use of a dotted name that starts with a global, also in nested code objects."""
    chains: list[list[str]] = []
    is_open = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            chains.append([instruction.argval])
            is_open = True
        elif is_open and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1].append(instruction.argval)
        else:
            is_open = False
    own = tuple(tuple(chain) for chain in chains if len(chain) > 1)
    return sum([_dotted(part) for part in _nested(code)], own)


def _loaded(source: str, package: object) -> ModuleType | None:
    """Return the module that an import in a package names, if it is loaded already."""
    try:
        name = util.resolve_name(source, package if isinstance(package, str) else "")
    except ImportError:  # a relative one outside of a package
        return None
    module = sys.modules.get(name)
    return module if isinstance(module, ModuleType) else None


@functools.lru_cache(maxsize=4096)  # as for `_globals`
def _imported(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Return each `from source import name` in a code object and in nested ones, as diffusers has.

    >>> _imported(compile("from ..embeddings import rotate", "", "exec"))
    (('..embeddings', 'rotate'),)
    """
    pairs: list[tuple[str, str]] = []
    source, values = "", [0, 0]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":  # after the level of a relative one, and the names
            source = "." * values[-2] + instruction.argval
        elif instruction.opname == "IMPORT_FROM":
            pairs.append((source, instruction.argval))
        elif instruction.opname != "EXTENDED_ARG":
            values = [values[-1], instruction.argval]
    return sum([_imported(part) for part in _nested(code)], tuple(pairs))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


@functools.lru_cache(maxsize=4096)  # every layer asks for the methods of its class and its bases
def _globals(code: CodeType) -> frozenset[str]:
    """Return the names that a code object, or one nested in it, reads as globals."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return frozenset(names).union(*[_globals(part) for part in _nested(code)])


def _nested(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


# --- which methods can be replaced ---


@functools.lru_cache(maxsize=256)
def methods_of(kind: type) -> tuple[tuple[str, FunctionType, str | None], ...]:
    """Return (name, function, obstacle) of the methods that a class adds to nn.Module.

    obstacle  why one module cannot be given another function instead; None if it can

    Of methods that another class overrides, only those are listed that it may call by `super()`.

    >>> class Traced(nn.Module):
    ...     def forward(self, x): return x
    >>> [(name, obstacle) for name, _, obstacle in methods_of(Traced)]
    [('forward', None)]
    """
    methods: list[tuple[str, FunctionType, str | None]] = []
    read: set[str] = set()  # names that the code of the classes before uses
    for base in kind.__mro__:
        if base in nn.Module.__mro__:
            continue
        own: list[FunctionType] = []
        for name, value in vars(base).items():
            is_plain = isinstance(value, FunctionType)
            function = value if is_plain else getattr(value, "__func__", None)
            if not isinstance(function, FunctionType):
                continue
            own += _with_decorated(function)
            first = next(k for k in kind.__mro__ if name in vars(k))
            if name == "__init__":
                methods.append((name, function, f"is kept by {base.__name__}.__init__"))
            elif first is not base:
                if name in read and not read.isdisjoint({"super", base.__name__}):
                    by = f"{base.__name__}.{name}, which {first.__name__}.{name} overrides"
                    methods.append((name, function, f"is called by {by}"))
            else:
                obstacle = None if is_plain else f"is called by {name}, which takes no module"
                methods.append((name, function, obstacle))
        read = read.union(*[_names(function.__code__) for function in own])
    return tuple(methods)


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a code object, or one in it, uses."""
    return {*code.co_names}.union(*[_names(part) for part in _nested(code)])


# --- a copy that calls others ---


@functools.lru_cache(maxsize=256)
def copy_calling(
    method: FunctionType, names: tuple[tuple[Callable[..., Any], str], ...]
) -> FunctionType:
    """Return a copy of `method` that calls, for each (function, name), the global `name` instead.

    All layers and models share one copy, since torch.compile compiles each copy separately.
    Raises ValueError if the code also uses the name of such a function for an attribute, because
    Python stores both names in the same place.

    >>> def rotate(x): return x
    >>> def forward(x): return rotate(x)
    >>> copy_calling(forward, ((rotate, "other"),)).__code__.co_names
    ('other',)
    """
    code = method.__code__
    new_names = {id(function): new for function, new in names}
    through = [
        (name, new)
        for module, name in _through_modules(method, code)
        if (new := new_names.get(id(getattr(module, name, None))))
    ]
    renamed = dict(through)
    local = {function.__code__: new_names[id(function)]
             for function in _local_functions(method) if id(function) in new_names}  # fmt: skip
    for name in _globals(code):
        if new := new_names.get(id(method.__globals__.get(name))):
            renamed[name] = new
    uses = Counter(name for name, _ in through)
    if any(_count_attributes(code, name) != uses[name] for name in renamed):
        raise ValueError("is also the name of an attribute in the code that calls it")
    cells = []
    for cell in method.__closure__ or ():  # a decorator keeps the function that it wraps here
        inner = _content(cell)
        called = rotations_called(inner) if isinstance(inner, FunctionType) else ()
        is_calling = any(function in dict(names) for _, function in called)
        cells.append(CellType(copy_calling(inner, names)) if is_calling else cell)
    return copy_with(method, _renamed(code, renamed, local), cells)


def copy_with(method: FunctionType, code: CodeType, cells: Iterable[CellType]) -> FunctionType:
    """Return a copy of a function with other code and another closure."""
    result = FunctionType(
        code, method.__globals__, method.__name__, method.__defaults__, tuple(cells)
    )
    result.__kwdefaults__ = method.__kwdefaults__
    functools.update_wrapper(result, method)
    return result


def redecorated(method: FunctionType, inner: FunctionType, other: FunctionType) -> FunctionType:
    """Return a copy of a decorated method that calls `other` instead of the `inner` function.

    Raises ValueError if the decorator does not keep the function in its closure.
    """
    closure = method.__closure__ or ()
    if all(_content(cell) is not inner for cell in closure):
        raise ValueError("has a decorator that keeps it elsewhere than in its closure")
    cells = [CellType(other) if _content(cell) is inner else cell for cell in closure]
    result = copy_with(method, method.__code__, cells)
    result.__wrapped__ = other  # type: ignore[attr-defined]
    return result


def _count_attributes(code: CodeType, name: str) -> int:
    """Count the uses of a name, not as a global, in a code object and those nested in it."""
    own = sum(
        instruction.argval == name and instruction.opname != "LOAD_GLOBAL"
        for instruction in dis.get_instructions(code)
        if instruction.opcode in dis.hasname
    )
    return own + sum(_count_attributes(part, name) for part in _nested(code))


def _renamed(code: CodeType, names: Mapping[str, str], local: Mapping[CodeType, str]) -> CodeType:
    """Return a code object with other names, and calls of a global for some local functions."""
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(
            part if not isinstance(part, CodeType)
            else _calling(part.co_name, local[part]) if part in local
            else _renamed(part, names, local)
            for part in code.co_consts
        ),
    )  # fmt: skip


def _calling(name: str, other: str) -> CodeType:
    """Return the code of a function that passes its arguments to a global function."""
    source = f"def {name}(*args, **kwargs): return {other}(*args, **kwargs)"
    return _nested(compile(source, "<rotary>", "exec"))[0]


# --- methods set on one module ---


def attribute_of(owner: object, name: str, method: Callable[..., object]) -> str:
    """Return the attribute to set instead of a method; ValueError if it has been set before."""
    hooked = f"_old_{name}"  # accelerate stores the method that it wraps there
    attribute = hooked if hooked in vars(owner) else name
    own = vars(owner).get(attribute)
    if own is not None and getattr(own, "__func__", None) is not method:
        raise ValueError(f"is called by a {name} that was replaced before")
    return attribute


def set_method(
    owner: object, attribute: str, function: Callable[..., object], original: object
) -> None:
    """Replace a method of this one object by `function`, until `restore_methods`.

    Python looks up `__call__` in the class, so for `__call__` the object gets another class.
    """
    setattr(function, ORIGINAL, original)
    if attribute == "__call__":
        kind = _calling_class(type(owner), function)  # type: ignore[arg-type]  # it has a hash
        object.__setattr__(owner, "__class__", kind)
    else:
        object.__setattr__(owner, attribute, MethodType(function, owner))


@functools.lru_cache(maxsize=256)  # all layers share one class
def _calling_class(kind: type, function: Callable[..., object]) -> type:
    """Return a subclass of `kind` with another `__call__`; objects are pickled as `kind`."""

    def reduced(self: object, protocol: int) -> object:
        plain: object = object.__new__(kind)
        plain.__dict__.update(vars(self))
        return plain.__reduce_ex__(1)  # later protocols need the class of `self`

    def copied(self: object, memo: dict[int, object]) -> object:
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(vars(self), memo))
        return other

    members = {"__call__": function, "__reduce_ex__": reduced, "__deepcopy__": copied}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, ORIGINAL: kind})


def restore_methods(model: nn.Module) -> bool:
    """Undo every `set_method` in a torch model; return whether there was one."""
    replaced = _methods_set(model)
    for owner, attribute, original in replaced:
        if attribute == "__class__":
            object.__setattr__(owner, attribute, original)
        elif getattr(type(owner), attribute, None) is original:
            object.__delattr__(owner, attribute)
        else:  # a wrapper keeps the method that it calls under a name of its own
            object.__setattr__(owner, attribute, MethodType(original, owner))
    return bool(replaced)


def is_patched(model: Any) -> bool:
    """Return whether `rotary.patch` has replaced methods of a torch model."""
    return bool(_methods_set(model))


def owners(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield (path, object) of all that may have methods that rotate: modules and processors.

    A processor of diffusers is not a module: an attention module calls `attention.processor`, and
    passes itself.
    """
    seen = set()
    for path, module in model.named_modules():
        yield path, module
        processor = vars(module).get("processor")
        if hasattr(processor, "__dict__") and id(processor) not in seen:
            seen.add(id(processor))
            yield f"{path}.processor".lstrip("."), processor


def _methods_set(model: nn.Module) -> list[tuple[object, str, Callable[..., object]]]:
    """Return (owner, attribute, original) of every method that `set_method` has set."""
    methods: list[tuple[object, str, Callable[..., object]]] = []
    for _, owner in owners(model):
        if ORIGINAL in vars(type(owner)):
            methods.append((owner, "__class__", vars(type(owner))[ORIGINAL]))
        methods += [
            (owner, attribute, getattr(value.__func__, ORIGINAL))
            for attribute, value in getattr(owner, "__dict__", {}).items()
            if isinstance(value, MethodType) and hasattr(value.__func__, ORIGINAL)
        ]
    return methods
