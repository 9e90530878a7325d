"""Rotary position embedding (RoPE) as layers for Hugging Face's `kernels`.

Each layer has the arguments of transformers' `apply_rotary_pos_emb(q, k, cos, sin,
unsqueeze_dim=1)` and rotates q and k in one launch of a Triton kernel. On a CPU, without Triton,
under torch.compile and under a transform of torch.func, torch's own operators rotate instead, which
torch can compile and differentiate. All compute in float32, or in float64 if q is float64, and
round once to the dtype of q.
"""

# mypy: disallow-untyped-calls=False

from functools import partial

from torch import Tensor, nn

from ..kernels.geometry import Geometry
from ..kernels.torch.launch import Differentiable, by_operators, gpu_kernel, is_for_gpu
from ..kernels.torch.state import is_tracing, wants_grad
from ..layouts import Layout, check

Rotated = tuple[Tensor, Tensor | None]  # q, and k unless it was None


def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    layout: Layout = "half",
    conjugate: bool = False,
) -> Rotated:
    """Rotate q, or q and k, by tables with one column for each pair of channels.

    q, k           (batch, heads, seq, head_dim), or (batch, seq, heads, head_dim) with
                   unsqueeze_dim=2; with any strides. They may differ in the number of heads. k may
                   be None
    cos, sin       (batch or 1, seq, pairs); with a new axis at `unsqueeze_dim` they must broadcast
                   to q. The first 2 * pairs channels of each head are rotated and the others copied
    layout         of the pairs: "half", channels i and i + pairs; "interleaved", 2 i and 2 i + 1
    conjugate      rotate by minus the angles

    Returns new tensors (q, k), of the dtypes of q and k; k is None if it was None. Gradients of
    every order reach q and k, and cos and sin if these require one.
    Raises ValueError for shapes that do not fit, TypeError for dtypes or devices that do not.

    >>> import torch
    >>> q, angle = torch.tensor([[[[1.0, 0.0, 7.0]]]]), torch.tensor([[[torch.pi / 2]]])
    >>> apply_rotary(q, None, angle.cos(), angle.sin())[0].round()
    tensor([[[[-0., 1., 7.]]]])
    """
    xs = (q,) if k is None else (q, k)
    cos, sin = _like_rank_of(q, cos, unsqueeze_dim), _like_rank_of(q, sin, unsqueeze_dim)
    _check(xs, cos, sin)
    check(layout)
    dims = tuple(range(q.ndim - 1))
    geometry = Geometry(0, cos.shape[-1], layout, layout, dims, conjugate)
    rotated = _rotate(xs, (cos, sin), geometry=geometry)
    return rotated[0], None if k is None else rotated[1]


class _Layer(nn.Module):
    """What `kernels` asks a layer for; it takes nothing else that a subclass of nn.Module has."""

    has_backward = True
    can_torch_compile = True


class apply_rotary_transformers(_Layer):  # noqa: N801  # its name in transformers
    """Rotate all channels of each head, or the first ones, in the half layout of transformers.

    cos and sin have one column for each rotated channel: the columns of all pairs, twice. With
    fewer columns than channels, that many channels are rotated. Half as many columns are refused,
    since they could also be one for each pair: use the layer for one of the two cases.
    """

    def forward(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        if 2 * cos.shape[-1] == q.shape[-1]:
            raise ValueError(
                f"cos has {cos.shape[-1]} columns and a head {q.shape[-1]} channels: use layer "
                "apply_rotary_half_width (gpt_oss) or apply_rotary_interleaved "
                "(openai_privacy_filter) if these are one for each pair, or apply_rotary_partial "
                "if half of the channels are rotated"
            )
        return apply_rotary(q, k, *_half_of(cos, sin), unsqueeze_dim)


class apply_rotary_partial(_Layer):  # noqa: N801
    """Rotate the first channels of each head, as many as cos has columns, in the half layout."""

    def forward(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        return apply_rotary(q, k, *_half_of(cos, sin), unsqueeze_dim)


class apply_rotary_half_width(_Layer):  # noqa: N801
    """Rotate in the half layout by tables with one column for each pair, as gpt_oss has them.

    Twice as many channels as columns are rotated.
    """

    def forward(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        return apply_rotary(q, k, cos, sin, unsqueeze_dim)


class apply_rotary_interleaved(_Layer):  # noqa: N801
    """Rotate channels 2 i and 2 i + 1 by tables with a column per pair: openai_privacy_filter.

    Twice as many channels as columns are rotated.
    """

    def forward(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        return apply_rotary(q, k, cos, sin, unsqueeze_dim, layout="interleaved")


class apply_rotary_conjugate(_Layer):  # noqa: N801
    """Rotate as `apply_rotary_partial` does, by minus the angles: nanochat."""

    def forward(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        return apply_rotary(q, k, *_half_of(cos, sin), unsqueeze_dim, conjugate=True)


def _half_of(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of the pairs, of tables with one column for each channel."""
    if cos.shape[-1] % 2:
        raise ValueError(f"cos has {cos.shape[-1]} columns; one for each channel is an even number")
    pairs = cos.shape[-1] // 2
    return cos[..., :pairs], sin[..., :pairs]


def _like_rank_of(q: Tensor, table: Tensor, unsqueeze_dim: int) -> Tensor:
    """Return a table with as many axes as q, so that the two can be multiplied."""
    table = table.unsqueeze(unsqueeze_dim)
    return table[(None,) * (q.ndim - table.ndim)]


def _check(xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> None:
    """Refuse arguments that cannot be rotated; cos and sin have as many axes as q."""
    q, k = xs[0], xs[-1]
    if not q.is_floating_point() or (k.dtype, k.device) != (q.dtype, q.device):
        raise TypeError(
            "q and k must be floating point, of one dtype and on one device; got "
            f"{q.dtype} on {q.device} and {k.dtype} on {k.device}"
        )
    if (cos.device, sin.device, sin.dtype) != (q.device, q.device, cos.dtype):
        raise TypeError(
            f"cos and sin must have one dtype and lie on {q.device}, where q is; got "
            f"{cos.dtype} on {cos.device} and {sin.dtype} on {sin.device}"
        )
    if not cos.is_floating_point():  # complex freqs_cis would lose its imaginary part
        raise TypeError(f"cos and sin must be floating point, got {cos.dtype}")
    if cos.shape != sin.shape:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape")
    pairs = cos.shape[-1]
    if pairs == 0 or 2 * pairs > q.shape[-1]:
        raise ValueError(
            f"tables of {pairs} pairs rotate {2 * pairs} channels, and a head has {q.shape[-1]}"
        )
    is_fit = q.ndim == k.ndim == cos.ndim and q.shape[-1] == k.shape[-1]
    if is_fit:
        sizes = list(zip(q.shape[:-1], k.shape[:-1], cos.shape[:-1], strict=True))
        is_fit = all([row == 1 or one == other == row for one, other, row in sizes])
        is_fit = is_fit and sum([one != other for one, other, _ in sizes]) <= 1
    if not is_fit:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and cos with an axis put in at "
            f"unsqueeze_dim, {tuple(cos.shape)}, do not fit; for (batch, heads, seq, head_dim) "
            "unsqueeze_dim is 1, for (batch, seq, heads, head_dim) 2"
        )


def _rotate(
    xs: tuple[Tensor, ...], tables: tuple[Tensor, Tensor], geometry: Geometry
) -> tuple[Tensor, ...]:
    """Call the GPU kernel if it takes these tensors and the tables need no gradient."""
    cos, sin = tables
    if is_tracing() or wants_grad(cos, sin) or not is_for_gpu((*xs, cos, sin)):
        return by_operators(xs, cos, sin, geometry)
    kernel, has_grad = gpu_kernel(xs[0].device), wants_grad(*xs)
    # the backward pass saves copies, which the model cannot overwrite
    is_read = cos.dtype in kernel.DTYPES and not has_grad
    angles = tables if is_read else (cos.float(), sin.float())

    def run(xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return kernel.rotate_cached(xs, *angles, geometry)

    if has_grad:
        back = partial(_rotate, geometry=geometry.reversed())
        return Differentiable.apply(run, back, angles, *xs)
    return run(xs)
