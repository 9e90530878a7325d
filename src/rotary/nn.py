"""RoPE as a torch module."""

from typing import overload

import torch
from torch import Tensor

from .angles import Precision, check_precision
from .kernels import kernel_of
from .rotate import apply
from .spec import Rotary, check_spec, is_whole
from .words import brief


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k; has no parameters or buffers that could be cast, saved or left empty.

    It replaces the modules that people copy from model to model:

        RotaryEmbedding(Rotary(head_dim=64, layout="interleaved"))   # the paper, GPT-J, lucidrains
        RotaryEmbedding(Rotary(head_dim=64))                         # Llama, transformers

    spec       the RoPE
    precision  as in `rotary.cos_sin`
    seq_dim    axis of the tokens, default -2; give it if you pass positions and there can be as
               many tokens as heads, see `rotary.rotate`

    `.to(bfloat16)`, `to_empty()`, autocast and state dicts do not touch its angles. A whole module
    or a spec in a file of `torch.save` is read by `torch.load(file, weights_only=True)` only within
    `torch.serialization.safe_globals([Rotary, RotaryEmbedding])`.

    >>> RotaryEmbedding(Rotary(head_dim=64, base=5e5))
    RotaryEmbedding(Rotary(head_dim=64, base=500000.0))
    """

    def __init__(
        self, spec: Rotary, *, precision: Precision = "exact", seq_dim: int | None = None
    ) -> None:
        super().__init__()
        check_spec(spec)
        check_precision(precision)
        if seq_dim is not None and (not is_whole(seq_dim) or seq_dim == -1):
            raise ValueError(
                "seq_dim must be the number of an axis before the last, such as -2 or -3, got "
                f"{brief(seq_dim)}"
            )
        kernel_of(torch.empty(0))  # loads Numba: 0.60 cannot once torch.export has replaced `max`
        self.spec = spec
        self.precision: Precision = precision
        self.seq_dim = seq_dim

    @overload
    def forward(
        self,
        q: Tensor,
        k: None = None,
        *,
        positions: object = None,
        seq_len: object = None,
        allow_negative: bool = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        positions: object = None,
        seq_len: object = None,
        allow_negative: bool = False,
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        *,
        positions: object = None,
        seq_len: object = None,
        allow_negative: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return rotated (q, k), or q if k is None; arguments and errors as in `rotary.apply`."""
        return apply(
            self.spec,
            q,
            k,
            positions=positions,
            seq_len=seq_len,
            seq_dim=self.seq_dim,
            precision=self.precision,
            allow_negative=allow_negative,
        )

    def extra_repr(self) -> str:
        """Return the spec, and the other settings that are not defaults."""
        seq_dim = "" if self.seq_dim is None else f", seq_dim={self.seq_dim}"
        precision = "" if self.precision == "exact" else f", precision={self.precision!r}"
        return f"{self.spec!r}{precision}{seq_dim}"
