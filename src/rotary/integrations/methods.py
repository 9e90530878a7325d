"""Finds the rotation functions that a module's methods call, and makes copies that call others.

An attention of transformers calls a rotation function by a global name of its file:

    query, key = apply_rotary_pos_emb(query, key, cos, sin)

A copy of that method, set on one module, looks up another name in the same file:

    query, key = _rotary_apply_rotary_pos_emb(query, key, cos, sin)

That name is all that differs, so no other model is touched, later changes of the file are seen, and
torch.compile sees plain Python. docs/log.md has what the wrappers without such a copy lose. A call
through a module, `llama.apply_rotary_pos_emb(...)`, looks the other name up in that module.
"""

import copy
import dis
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

from torch import nn

ORIGINAL = "_rotary_original"  # attribute of a function set on a module: the one it replaces
_ROTATES = re.compile(r"rotate|rotary|apply.*rope|apply_rot", re.IGNORECASE)


# --- which functions a method calls ---


def rotations_called(
    method: FunctionType,
) -> Iterator[tuple[dict[str, object], Callable[..., object]]]:
    """(namespace, function) for every function named like a rotation that a method calls.

    The namespace is that of the method's file, or of a module through which it is called.

    Decorators count: what the method wraps is searched as well.
    """
    functions = [method]
    for function in functions:
        inner = [_content(cell) for cell in function.__closure__ or ()]
        functions += [f for f in inner if isinstance(f, FunctionType) and f not in functions]
        for name in sorted(_globals(function.__code__)):
            value = function.__globals__.get(name)
            if _is_rotation(value, name):
                yield function.__globals__, value
        for module, name in _through_modules(function, function.__code__):
            value = getattr(module, name, None)
            if _is_rotation(value, name):
                yield vars(module), value
        for value in _local_functions(function):
            yield function.__globals__, value


@functools.lru_cache(maxsize=256)
def _local_functions(method: FunctionType) -> tuple[FunctionType, ...]:
    """The functions named like a rotation that a method defines inside itself, as Wan does."""
    return tuple(
        FunctionType(code, method.__globals__)
        for code in _inside(method.__code__)
        if _ROTATES.search(code.co_name) and not code.co_freevars
    )


def _is_rotation(value: object, name: str) -> TypeGuard[Callable[..., object]]:
    return bool(_ROTATES.search(name)) and callable(value) and not isinstance(value, type)


def _through_modules(function: FunctionType, code: CodeType) -> Iterator[tuple[ModuleType, str]]:
    """(module, attribute) for each use of an attribute of a module that a function names."""
    for first, *others in _dotted(code):
        owner = function.__globals__.get(first)
        for name in others:
            if not isinstance(owner, ModuleType):
                break
            yield owner, name
            owner = getattr(owner, name, None)


@functools.lru_cache(maxsize=4096)  # as `_names`
def _dotted(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Each use of a dotted name that starts with a global, in a code object or one inside it."""
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
    return sum([_dotted(part) for part in _inside(code)], own)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


@functools.lru_cache(maxsize=4096)  # of a class and its base classes, for every layer
def _globals(code: CodeType) -> frozenset[str]:
    """Names that a code object, or one inside it, reads as globals."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return frozenset(names).union(*[_globals(part) for part in _inside(code)])


def _inside(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


# --- a copy that calls others ---


@functools.lru_cache(maxsize=256)
def copy_calling(
    method: FunctionType, names: tuple[tuple[Callable[..., Any], str], ...]
) -> FunctionType:
    """A copy of `method` that calls, for each (function, name), what has that name in its file.

    One copy for all layers and models, or torch.compile would compile each by itself.
    Raises ValueError if the code uses the name of such a function for an attribute as well, for
    Python stores both in one place.

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
    for cell in method.__closure__ or ():  # what a decorator wraps
        inner = _content(cell)
        called = rotations_called(inner) if isinstance(inner, FunctionType) else ()
        is_calling = any(function in dict(names) for _, function in called)
        cells.append(CellType(copy_calling(inner, names)) if is_calling else cell)
    copy = FunctionType(
        _renamed(code, renamed, local),
        method.__globals__,
        method.__name__,
        method.__defaults__,
        tuple(cells),
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    functools.update_wrapper(copy, method)
    return copy


def _count_attributes(code: CodeType, name: str) -> int:
    """How often a code object, or one inside it, uses a name for anything but a global."""
    own = sum(
        instruction.argval == name and instruction.opname != "LOAD_GLOBAL"
        for instruction in dis.get_instructions(code)
        if instruction.opcode in dis.hasname
    )
    return own + sum(_count_attributes(part, name) for part in _inside(code))


def _renamed(code: CodeType, names: Mapping[str, str], local: Mapping[CodeType, str]) -> CodeType:
    """A code object with other names, and with calls of a global in place of local functions."""
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
    """The code of a function that calls another one, a global, with its own arguments."""
    source = f"def {name}(*args, **kwargs): return {other}(*args, **kwargs)"
    return _inside(compile(source, "<rotary>", "exec"))[0]


# --- methods set on one module ---


def attribute_of(owner: object, name: str, method: Callable[..., object]) -> str:
    """The attribute to set in place of a method; ValueError if somebody has set it before."""
    hooked = f"_old_{name}"  # accelerate keeps what it wraps there
    attribute = hooked if hooked in vars(owner) else name
    own = vars(owner).get(attribute)
    if own is not None and getattr(own, "__func__", None) is not method:
        raise ValueError(f"is called by a {name} that was replaced before")
    return attribute


def set_method(
    owner: object, attribute: str, function: Callable[..., object], original: object
) -> None:
    """Let `function` be called for a method of this object alone, until `restore_methods`.

    Python looks `__call__` up in the class, so the object gets a class of its own.
    """
    setattr(function, ORIGINAL, original)
    if attribute == "__call__":
        kind = _calling_class(type(owner), function)  # type: ignore[arg-type]  # it has a hash
        object.__setattr__(owner, "__class__", kind)
    else:
        object.__setattr__(owner, attribute, MethodType(function, owner))


@functools.lru_cache(maxsize=256)  # one for all layers
def _calling_class(kind: type, function: Callable[..., object]) -> type:
    """`kind` with another `__call__`; its objects are pickled as those of `kind`."""

    def reduced(self: object, protocol: int) -> object:
        plain: object = object.__new__(kind)
        plain.__dict__.update(vars(self))
        return plain.__reduce_ex__(1)  # later protocols want the class of `self`

    def copied(self: object, memo: dict[int, object]) -> object:
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(vars(self), memo))
        return other

    members = {"__call__": function, "__reduce_ex__": reduced, "__deepcopy__": copied}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, ORIGINAL: kind})


def restore_methods(model: nn.Module) -> bool:
    """Take every `set_method` in a torch model back; whether there was one."""
    replaced = _methods_set(model)
    for owner, attribute, original in replaced:
        if attribute == "__class__":
            object.__setattr__(owner, attribute, original)
        elif attribute.startswith("_old_"):
            object.__setattr__(owner, attribute, MethodType(original, owner))
        else:
            object.__delattr__(owner, attribute)
    return bool(replaced)


def is_patched(model: Any) -> bool:
    """Whether `rotary.patch` has replaced methods of a torch model."""
    return bool(_methods_set(model))


def owners(model: nn.Module) -> Iterator[tuple[str, object]]:
    """(path, object) of what may have methods that rotate: modules, and diffusers' processors.

    A processor is no module: `attention.processor`, which the attention calls, with itself.
    """
    seen = set()
    for path, module in model.named_modules():
        yield path, module
        processor = vars(module).get("processor")
        if hasattr(processor, "__dict__") and id(processor) not in seen:
            seen.add(id(processor))
            yield f"{path}.processor".lstrip("."), processor


def _methods_set(model: nn.Module) -> list[tuple[object, str, Callable[..., object]]]:
    """(owner, attribute, original) of every method that `set_method` set."""
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
