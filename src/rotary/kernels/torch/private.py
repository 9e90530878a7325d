"""Reads every private name of torch that rotary uses, with a fallback for when it is gone.

With a fallback a call takes longer or, in some cases, is refused; results have the same bits:
docs/private_names.md.
"""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..private import constant as constant
from ..private import private

Result = TypeVar("Result")

# --- what is active around a call ---


class _NotInTransforms(torch.autograd.Function):
    """Raises in a transform of torch.func, since it has no `setup_context`; else does nothing."""

    @staticmethod
    def forward(context: object) -> None:
        """Return nothing."""


def _level_by_refusal() -> int | None:
    try:
        _NotInTransforms.apply()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return 1
    return None


class _Levels:
    """Replaces `torch.autograd.forward_ad` if that has no `_current_level`."""

    @property
    def _current_level(self) -> int:
        number = torch.ones(())
        try:
            forward_ad.make_dual(number, number)  # type: ignore[no-untyped-call]
        except RuntimeError:  # no level exists
            return -1
        return 0


def _has_proxy_mode() -> bool:
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")  # make_fx is there
    return module is not None and module.get_proxy_mode() is not None


_mode_of: Callable[[object], object] | None = private(torch, "_C._get_dispatch_mode", None)
_PROXY: object = private(torch, "_C._TorchDispatchModeKey.PROXY", None)
_levels = forward_ad if private(forward_ad, "_current_level", None) is not None else _Levels()

is_tracing_by_jit: Callable[[], bool] = private(
    torch,
    "_C._is_tracing",
    torch.jit.is_tracing,  # type: ignore[attr-defined]
)
# the level of torch.func; None outside its transforms
level_of_transforms: Callable[[], int | None] = private(
    torch, "_C._functorch.maybe_current_level", _level_by_refusal
)
count_of_modes: Callable[[], int] = private(
    torch,
    "_C._len_torch_dispatch_stack",
    lambda: 1,  # as if a mode were always active: torch's own operators then rotate
)


def is_exporting() -> bool:
    """Whether torch.export records this call; torch 2.8 also says so in every compiled call."""
    return torch.compiler.is_exporting() and private(torch.compiler, "_is_exporting_flag", True)


def is_in_make_fx() -> bool:
    """Whether make_fx records the operators."""
    if _mode_of is None or _PROXY is None:
        return _has_proxy_mode()
    return _mode_of(_PROXY) is not None


def is_in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is entered."""
    return _levels._current_level >= 0


def is_past_guards() -> bool:
    """Whether forward mode, make_fx or another dispatch mode is active.

    The guards of `ready.py` see the other transforms.
    """
    return _levels._current_level >= 0 or count_of_modes() > 0


_disabled_modes: Callable[[], Any] | None = private(
    torch, "utils._python_dispatch._disable_current_modes", None
)


def outside_modes(function: Callable[..., Result], *arguments: object) -> Result:
    """Return `function(*arguments)`, called outside dispatch modes, so that no graph records it.

    >>> outside_modes(torch.ones, 1)
    tensor([1.])
    """
    if _disabled_modes is not None:
        with _disabled_modes():
            return function(*arguments)
    with ThreadPoolExecutor(1) as thread:  # modes belong to a thread
        return thread.submit(function, *arguments).result()


# a mode that intercepts operators; without it, one that intercepts functions of torch
OperatorMode: type = private(torch, "utils._python_dispatch.TorchDispatchMode", TorchFunctionMode)
has_global_hook: Callable[[], bool] = private(
    torch, "nn.modules.module._has_any_global_hook", lambda: True
)

# the mode in which torch.compile decomposes operators, and its tensors
FunctionalMode: type | None = private(
    torch, "_subclasses.functional_tensor.FunctionalTensorMode", None
)
FunctionalTensor: type = private(torch, "_subclasses.functional_tensor.FunctionalTensor", Tensor)


def stays_in_place(x: Tensor) -> None:
    """Tell torch.compile that a tensor keeps its address, so that a CUDA graph need not copy it."""
    tell: Callable[[Tensor], None] = private(torch, "_dynamo.mark_static_address", lambda x: None)
    tell(x)


# --- what a tensor is ---


def _has_no_storage(x: Tensor) -> bool:
    try:
        x.data_ptr()
    except RuntimeError:
        return True
    return False


def _is_without_memory(x: Tensor) -> bool:
    return not _has_no_storage(x) and x.numel() > 0 and x.data_ptr() == 0


is_zerotensor: Callable[[Tensor], bool] = private(Tensor, "_is_zerotensor", _is_without_memory)
is_wrapped: Callable[[Tensor], bool] = private(
    torch, "_C._functorch.is_functorch_wrapped_tensor", _has_no_storage
)
is_in_old_vmap: Callable[[Tensor], bool] = private(
    torch, "_C._functorch.is_legacy_batchedtensor", _has_no_storage
)
_is_batched: Callable[[Tensor], bool] | None = private(
    torch, "_C._functorch.is_batchedtensor", None
)
_unwrapped: Callable[[Tensor], Tensor] | None = private(torch, "_C._functorch.get_unwrapped", None)
version_of: Callable[[Tensor], object] = private(
    Tensor,
    "_version.__get__",
    lambda x: object(),  # equal to no other, so nothing that is kept for a tensor is used again
)


def is_mapped(x: Tensor) -> bool:
    """Whether vmap has batched a tensor."""
    return _has_no_storage(x) if _is_batched is None else _is_batched(x)


def unmapped(x: Tensor) -> Tensor:
    """Return the tensor inside vmap, as grad and jvp around it see it; x outside vmap.

    Raises RuntimeError if torch lacks the functions for it.
    """
    while is_mapped(x):
        if _is_batched is None or _unwrapped is None:
            raise RuntimeError(
                f"out= inside vmap, grad and jvp is not possible with torch {torch.__version__}: "
                "call it without out="
            )
        x = _unwrapped(x)
    return x


def unwrapped(x: Tensor) -> Tensor | None:
    """Return the tensor inside vmap and grad, x outside them; None if torch cannot unwrap it."""
    while is_wrapped(x):
        if _unwrapped is None:
            return None
        x = _unwrapped(x)
    return x


# --- faster calls ---


EmptyStrided = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def _empty_on(device: str) -> EmptyStrided:
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


# None in a torch that has no guards: then no call is repeated
TensorGuards: Any = private(torch, "_C._dynamo.guards.TensorGuards", None)
# does not check whether it was given one tensor or many
increment_version: Callable[[Iterable[Tensor]], None] = private(
    torch, "_C._increment_version", torch.autograd.graph.increment_version
)
# Inductor's function, which does not pass the dispatcher: half of the time, and half of the code
empty_strided: EmptyStrided = private(
    torch, "_C._dynamo.guards._empty_strided_cpu", _empty_on("cpu")
)
empty_strided_on_cuda: EmptyStrided = private(  # on the current device
    torch, "_C._dynamo.guards._empty_strided_cuda", _empty_on("cuda")
)
