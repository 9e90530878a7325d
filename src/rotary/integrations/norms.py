"""Moves the RMS norms of q and k right before a rotation into the call that rotates.

    query = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
    ...
    query, key = apply_rotary_pos_emb(query, key, cos, sin)

becomes in a copy of the method:

    query = _rotary_norm(self.q_norm, self.q_proj(x).view(shape)).transpose(1, 2)
    ...
    query, key = apply_rotary_pos_emb(query, key, cos, sin, rotary_norms=(self.q_norm, self.k_norm))

Where `waits` is true, `_rotary_norm` returns its input, and the rotation computes norm and rotation
by `rotary.fused`. Everywhere else the norm is called where it was.
"""

import ast
import copy
import dis
import functools
import inspect
import textwrap
import weakref
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.torch.private import has_global_hook
from ..kernels.torch.state import is_watched
from .styles import REFUSALS

CALLED = "_rotary_norm"  # the name of `norm_or_wait` in the file of a model
ENOUGH = 32_768  # numbers in q or k, 16 tokens of 16 heads, from which one pass saves time
_MOVES = {"transpose", "view", "reshape"}  # methods that a normalised array may go through
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# --- what a norm computes ---


class RMSNorm(NamedTuple):
    """An RMS norm over the last axis: the attribute that holds eps, and whether 1 + weight."""

    eps: str
    add_one: bool


_known: weakref.WeakKeyDictionary[nn.Module, RMSNorm | None] = weakref.WeakKeyDictionary()


def rms_norm_of(module: object) -> RMSNorm | None:
    """Which RMS norm a module computes, by trying it; None if it computes something else.

    >>> rms_norm_of(nn.RMSNorm(8, eps=1e-6))
    RMSNorm(eps='eps', add_one=False)
    >>> rms_norm_of(nn.LayerNorm(8))
    """
    if not isinstance(module, nn.Module):
        return None
    if module not in _known:
        _known[module] = _tried(module)
    return _known[module]


def _tried(module: nn.Module) -> RMSNorm | None:
    dicts = [vars(module).get(name, {}) for name in ("_parameters", "_buffers", "_modules")]
    weight = dicts[0].get("weight")
    others = [name for names in dicts for name in names]
    if weight is None or weight.ndim != 1 or others != ["weight"] or len(weight) < 2:
        return None
    random = torch.Generator().manual_seed(11)
    gain = torch.randn(len(weight), generator=random)
    trial = copy.copy(module)
    trial.__dict__ = {**vars(module), "_parameters": {"weight": nn.Parameter(gain)}}
    scales = torch.tensor([[30.0], [1.0], [1e-2], [1e-3], [1e-4]])  # the last show eps
    x = torch.randn(5, len(weight), generator=random) * scales
    try:
        with torch.no_grad():
            theirs: object = type(module).forward(trial, x)
    except REFUSALS:
        return None
    if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
        return None
    mean = x.double().square().mean(-1, keepdim=True)
    for name, eps in vars(module).items():
        for add_one in (False, True) if isinstance(eps, float) and eps >= 0 else ():
            ours = x.double() * torch.rsqrt(mean + eps) * (gain + add_one)
            if torch.allclose(theirs.double(), ours, rtol=1e-5, atol=1e-6):
                return RMSNorm(name, add_one)
    return None


def weight_and_eps(norm: nn.Module) -> tuple[Tensor, float, bool] | None:
    """The weight, eps and `add_one` of an RMS norm, if nothing else happens when it is called.

    None for one with hooks, another forward, or a weight that is no plain tensor.
    """
    convention = rms_norm_of(norm)
    if convention is None:
        return None
    own = vars(norm)
    weight, eps = own.get("_parameters", {}).get("weight"), own.get(convention.eps)
    if (
        type(weight) not in (Tensor, nn.Parameter)
        or not isinstance(eps, float)
        or "forward" in own
        or own.get("_compiled_call_impl") is not None
        or type(norm).__call__ is not nn.Module.__call__
        or any([own.get(name, True) for name in _HOOKS])
        or has_global_hook()
    ):
        return None
    assert isinstance(weight, Tensor)
    return weight, eps, convention.add_one


# --- when it waits ---


def waits(norm: object, x: Tensor) -> bool:
    """Whether a norm is left to the rotation.

    It is asked twice, in place of the norm and by the rotation, of the same numbers in two shapes:
    so the answer depends on the size, dtype and device of x alone. For a few tokens the model's own
    operators are as fast, and under `torch.compile` the compiler fuses them.
    """
    return (
        not torch.compiler.is_compiling()
        and x.numel() >= ENOUGH
        and type(x) is Tensor
        and isinstance(norm, nn.Module)
        and _is_quicker(x)
        and (parameters := weight_and_eps(norm)) is not None
        and parameters[0].dtype == x.dtype
        and parameters[0].device == x.device
    )


def _is_quicker(x: Tensor) -> bool:
    """On the host, or on a GPU without gradients, of which the kernel there has none."""
    is_there = x.device.type == "cpu" or (x.is_cuda and not torch.is_grad_enabled())
    return is_there and not is_watched() and not torch.is_autocast_enabled(x.device.type)


def norm_or_wait(norm: nn.Module, x: Tensor) -> object:
    """The norm of x; or x itself, if the rotation that follows normalises it."""
    return x if isinstance(x, Tensor) and waits(norm, x) else norm(x)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm that `norm_or_wait` left out; x is (batch, heads, seq, head_dim) by now."""
    parameters = weight_and_eps(norm)
    if parameters is None or len(parameters[0]) == x.shape[-1]:
        whole: Tensor = norm(x)
        return whole
    flat = x.transpose(1, 2).flatten(2)
    y: Tensor = norm(flat)
    batch, heads, seq, width = x.shape
    return y.view(batch, seq, heads, width).transpose(1, 2)


# --- the copy of a method ---


class Moved(NamedTuple):
    """A copy of a method, and the names of the norms that it leaves to each rotation."""

    method: FunctionType
    norms: tuple[str, ...]


@functools.lru_cache(maxsize=256)  # one for all layers
def moved(method: FunctionType, operands: tuple[tuple[str, int], ...]) -> Moved:
    """`method` with the norms of the first arguments of rotations left to these.

    operands   (name of a rotation in the method's file, how many of its arguments it rotates)

    Raises ValueError where no norm comes right before, where what it gives is read by anything but
    the rotation, and where the source of the method cannot be had.
    """
    tree, function = _parsed(method)
    counts, norms = dict(operands), list[str]()
    for block in _blocks(function):
        for index, statement in enumerate(block):
            if not isinstance(statement, ast.Assign):
                continue
            call = statement.value
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            xs = call.args[: counts.get(call.func.id, 0)]
            stored = [node.id for target in statement.targets for node in ast.walk(target)
                      if isinstance(node, ast.Name)]  # fmt: skip
            sites = [_site(block[:index], x.id) for x in xs
                     if isinstance(x, ast.Name) and x.id in stored]  # fmt: skip
            calls = [site for site in sites if site is not None]
            if not calls or len(calls) != counts[call.func.id]:
                continue
            held = [copy.deepcopy(site.func) for site in calls]
            for site in calls:
                norms.append(site.func.attr)  # type: ignore[attr-defined]  # as `_site` saw
                site.args = [site.func, *site.args]
                site.func = ast.Name(CALLED, ast.Load())
            call.keywords.append(ast.keyword("rotary_norms", ast.Tuple(held, ast.Load())))
    if not norms:
        raise ValueError("has no norm right before its rotation")
    ast.fix_missing_locations(tree)
    result = FunctionType(
        _code(tree, method), method.__globals__, method.__name__, method.__defaults__
    )
    result.__kwdefaults__ = method.__kwdefaults__
    functools.update_wrapper(result, method)
    del vars(result)["__wrapped__"]  # it is no decorator
    return Moved(result, tuple(dict.fromkeys(norms)))


def _parsed(method: FunctionType) -> tuple[ast.Module, ast.FunctionDef]:
    """The source of a method; ValueError if it is not what the method runs."""
    if method.__closure__ or hasattr(method, "__wrapped__"):
        raise ValueError("is decorated, or uses variables of an enclosing function")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        function = tree.body[0]
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            raise ValueError("is decorated")
        ast.increment_lineno(tree, method.__code__.co_firstlineno - 1)
        code = _code(tree, method)
    except (OSError, SyntaxError, TypeError, IndexError, StopIteration) as error:
        raise ValueError("has no source that can be read") from error
    if _steps(code) != _steps(method.__code__):
        raise ValueError("has been changed since its source was read")
    return tree, function


def _steps(code: CodeType) -> list[tuple[str, object]]:
    """The instructions of a code object, without lengths of jumps and ways to look up a function.

    These depend on the imports around it, which are not compiled again here.
    """
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        ("LOAD_ATTR" if step.opname == "LOAD_METHOD" else step.opname,
         None if step.opcode in jumps or isinstance(step.argval, CodeType) else step.argval)
        for step in dis.get_instructions(code)
        if step.opname not in ("PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP")
    ]  # fmt: skip


def _code(tree: ast.Module, method: FunctionType) -> CodeType:
    whole = compile(tree, method.__code__.co_filename, "exec", dont_inherit=True)
    return next(
        part
        for part in whole.co_consts
        if isinstance(part, CodeType) and part.co_name == method.__name__
    )


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    """Every list of statements that run one after the other."""
    blocks = []
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                blocks.append(block)
    return blocks


def _site(before: Sequence[ast.stmt], name: str) -> ast.Call | None:
    """The call `self.norm(x)` whose value alone a variable holds after these statements.

    Between the norm and the end it may be split into heads and have its axes 1 and 2 exchanged.
    None if anything else reads it, or changes it.
    """
    moves: list[ast.Call] = []
    for statement in reversed(before):
        if not _mentions(statement, name):
            continue
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target, value = statement.targets[0], statement.value
        if not isinstance(target, ast.Name) or target.id != name:
            return None
        while (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in _MOVES
            and not _is_of_self(value.func)
        ):
            moves.append(value)
            value = value.func.value
        if isinstance(value, ast.Call) and _is_of_self(value.func):
            is_alone = len(value.args) == 1 and not value.keywords
            return value if is_alone and _keeps_heads(moves, name) else None
        if not isinstance(value, ast.Name) or value.id != name:
            return None
    return None


def _mentions(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement))


def _is_of_self(function: ast.expr) -> bool:
    """Whether this is `self.name`."""
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "self"
    )


def _keeps_heads(moves: list[ast.Call], name: str) -> bool:
    """Whether the normalised axis is still the last one, or was split into heads on axis 1.

    `moves` are the calls after the norm, the last one first.
    """
    names = [move.func.attr for move in moves]  # type: ignore[attr-defined]
    swaps = [move for move in moves if move.func.attr == "transpose"]  # type: ignore[attr-defined]
    is_known = names in ([], ["transpose"], ["transpose", "view"], ["transpose", "reshape"])
    is_read = any(_mentions(ast.Expr(a), name) for move in moves for a in move.args)
    return (
        is_known
        and not is_read
        and all([[ast.unparse(a) for a in swap.args] == ["1", "2"] for swap in swaps])
        and not any([move.keywords for move in moves])
    )
