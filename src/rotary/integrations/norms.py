"""Move the RMS norms of q and k right before a rotation into the call that rotates.

    query = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
    ...
    query, key = apply_rotary_pos_emb(query, key, cos, sin)

becomes in a copy of the method:

    query = (_rotary_0 := _rotary_norm(self.q_norm, self.q_proj(x).view(shape)))[0].transpose(1, 2)
    ...
    query, key = apply_rotary_pos_emb(query, key, cos, sin, rotary_norms=(_rotary_0[1], ...))

`_rotary_norm` is `norm_or_defer`. It returns (x, norm) if `rotary.fused` is to compute both norm
and rotation; otherwise it calls the norm, and returns (result, None).
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
from ..kernels.torch.state import is_on_gpu, is_watched
from .methods import copy_with, redecorated
from .styles import REFUSALS

CALLED = "_rotary_norm"  # the global name of `norm_or_defer` in the file of a model
# in q or k, such as 16 tokens of 16 heads: from there on one pass saves time on a CPU
MIN_NUMBERS = 32_768


# --- what a norm computes ---


class RMSNorm(NamedTuple):
    """An RMS norm over the last axis: its attribute with eps, and whether 1 is added to weights."""

    eps: str
    add_one: bool


class Deferred(NamedTuple):
    """A norm that is left to the rotation, and its numbers as `rotary.Norm` takes them."""

    norm: nn.Module
    weight: Tensor
    eps: float
    add_one: bool


# module -> the forward of its class, which may be replaced, and what that computes
_known = weakref.WeakKeyDictionary[nn.Module, tuple[object, RMSNorm | None]]()


def rms_norm_of(module: object) -> RMSNorm | None:
    """Call a module to find out which RMS norm it computes; None if it computes something else.

    >>> rms_norm_of(nn.RMSNorm(8, eps=1e-6))
    RMSNorm(eps='eps', add_one=False)
    >>> rms_norm_of(nn.LayerNorm(8))
    """
    if not isinstance(module, nn.Module):
        return None
    forward = type(module).forward
    known = _known.get(module)
    if known is None or known[0] is not forward:
        known = _known[module] = forward, _tried(module)
    return known[1]


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
    scales = torch.tensor([[30.0], [1.0], [1e-2], [1e-3], [1e-4]])  # small numbers reveal eps
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


def _deferrable(norm: nn.Module) -> Deferred | None:
    """Return an RMS norm with its numbers, if calling it does nothing else.

    None if it has hooks, another forward, or a weight that is not a plain tensor.
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
        or own.get("_forward_hooks", True)
        or own.get("_forward_pre_hooks", True)
        or own.get("_backward_hooks", True)
        or own.get("_backward_pre_hooks", True)
        or has_global_hook()
    ):
        return None
    assert isinstance(weight, Tensor)
    return Deferred(norm, weight, eps, convention.add_one)


# --- when a norm is deferred ---


def norm_or_defer(norm: nn.Module, x: Tensor) -> tuple[object, Deferred | None]:
    """Return x and the norm, if that is left to the rotation; else the norm of x, and None.

    For a few tokens on a CPU the model's own operators are as fast, and under `torch.compile` the
    compiler fuses them.
    """
    if isinstance(x, Tensor) and isinstance(norm, nn.Module) and _is_quicker(x):
        left = _deferrable(norm)
        if left is not None and left.weight.dtype == x.dtype and left.weight.device == x.device:
            return x, left
    return norm(x), None


def _is_quicker(x: Tensor) -> bool:
    """Return whether one pass is faster: for many numbers on a CPU, on a GPU without gradients.

    The kernel on a GPU has no gradient.
    """
    if is_on_gpu(x):
        device, is_there = "cuda", not torch.is_grad_enabled()
    else:
        device, is_there = "cpu", x.is_cpu and x.numel() >= MIN_NUMBERS
    return (
        is_there
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not is_watched()
        and not torch.is_autocast_enabled(device)
    )


def deferred_norm(left: Deferred, x: Tensor) -> Tensor:
    """Return the norm that `norm_or_defer` left out; x is now (batch, heads, seq, head_dim)."""
    if len(left.weight) == x.shape[-1]:
        return left.norm(x)
    y = left.norm(x.transpose(1, 2).flatten(2))
    batch, heads, seq, width = x.shape
    return y.view(batch, seq, heads, width).transpose(1, 2)


# --- the copy of a method ---


class MovedNorms(NamedTuple):
    """A copy of a method, and the names of the norms that it leaves to its rotations."""

    method: FunctionType
    norms: tuple[str, ...]


@functools.lru_cache(maxsize=256)  # all layers share one copy
def move_norms(method: FunctionType, operands: tuple[tuple[str, int], ...]) -> MovedNorms:
    """Copy `method`, and leave the norms of the first arguments of rotations to the rotations.

    operands   (name of a rotation in the method's file, how many of its arguments it rotates)

    Raises ValueError if no norm comes right before a rotation, if anything but the rotation reads
    the norm's result, or if the source of the method cannot be read.
    """
    inner = getattr(method, "__wrapped__", None)
    if isinstance(inner, FunctionType):
        moved, names = move_norms(inner, operands)
        return MovedNorms(redecorated(method, inner, moved), names)
    tree, function = _parsed(method)
    counts, norms = dict(operands), list[str]()
    for block in _blocks(function):
        for index, statement in enumerate(block):
            match statement:
                case ast.Assign(value=ast.Call(func=ast.Name(id=rotation)) as call):
                    count, stored = counts.get(rotation, 0), ast.Tuple(statement.targets)
                case _:
                    continue
            sites = [_site(block[:index], x.id) for x in call.args[:count]
                     if isinstance(x, ast.Name) and _mentions(stored, x.id)]  # fmt: skip
            found = [site for site in sites if site is not None]
            if not found or len(found) != count:
                continue
            left: list[ast.expr] = []
            for site in found:
                kept, of_norm = f"_rotary_{len(norms)}", site.value
                assert isinstance(of_norm, ast.Call)
                norms.append(of_norm.func.attr)  # type: ignore[attr-defined]  # as `_site` saw
                both = ast.Call(ast.Name(CALLED, ast.Load()), [of_norm.func, *of_norm.args], [])
                site.value = _item(ast.NamedExpr(ast.Name(kept, ast.Store()), both), 0)
                left.append(_item(ast.Name(kept, ast.Load()), 1))
            call.keywords.append(ast.keyword("rotary_norms", ast.Tuple(left, ast.Load())))
    if not norms:
        raise ValueError("has no norm right before its rotation")
    ast.fix_missing_locations(tree)
    result = copy_with(method, _code(tree, method), ())
    del vars(result)["__wrapped__"]  # set by update_wrapper, but the copy wraps nothing
    return MovedNorms(result, tuple(dict.fromkeys(norms)))


def _parsed(method: FunctionType) -> tuple[ast.Module, ast.FunctionDef]:
    """Return the parsed source of a method; ValueError if it is not what the method runs."""
    if method.__closure__:
        raise ValueError("uses variables of an enclosing function")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        function = tree.body[0]
        if not isinstance(function, ast.FunctionDef):
            raise ValueError("is not defined by def")
        function.decorator_list = []  # what is compared and copied is the function inside
        ast.increment_lineno(tree, method.__code__.co_firstlineno - 1)
        code = _code(tree, method)
    except (OSError, SyntaxError, TypeError, IndexError, StopIteration) as error:
        raise ValueError("has no source that can be read") from error
    if _steps(code) != _steps(method.__code__):
        raise ValueError("has been changed since its source was read")
    return tree, function


def _steps(code: CodeType) -> list[tuple[str, object]]:
    """Return the instructions of a code object, to compare it with another one.

    The lengths of jumps and the way to look up a function are left out: they depend on the imports
    around the code, which are not compiled again here.
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
    """Return every list of statements that run one after the other."""
    names = ("body", "orelse", "finalbody")
    blocks = (getattr(node, name, None) for node in ast.walk(function) for name in names)
    return [block for block in blocks if isinstance(block, list)]


def _item(of: ast.expr, index: int) -> ast.Subscript:
    return ast.Subscript(of, ast.Constant(index), ast.Load())


def _site(before: Sequence[ast.stmt], name: str) -> ast.Assign | ast.Attribute | None:
    """Return the node that holds the call `self.norm(x)`, whose result a variable is afterwards.

    `before` are the statements up to there. The result may also have been split into heads, and its
    axes 1 and 2 exchanged. None if anything else reads or changes the variable.
    """
    moves: list[str] = []  # the last one first
    for statement in reversed(before):
        if not _mentions(statement, name):
            continue
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                site: ast.Assign | ast.Attribute = statement
            case _:
                return None
        while not isinstance(site.value, ast.Name):
            match site.value:
                case ast.Call(ast.Attribute(value=ast.Name(id="self")), args=[_], keywords=[]):
                    return site if moves in ([], ["swap"], ["swap", "split"]) else None
                case ast.Call(
                    ast.Attribute(attr="transpose") as site,
                    args=[ast.Constant(value=1), ast.Constant(value=2)],
                    keywords=[],
                ):
                    moves.append("swap")
                case ast.Call(ast.Attribute(attr="view" | "reshape") as site, args, keywords=[]):
                    if any(_mentions(each, name) for each in args):
                        return None
                    moves.append("split")
                case _:
                    return None
        if site.value.id != name:
            return None
    return None


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))
