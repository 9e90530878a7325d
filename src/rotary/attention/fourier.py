"""FoPE, Fourier Position Embedding: a pair turns by several frequencies, or not at all.

    cos_p(m) = sum_j a_pj cos(m theta_j),   sin_p(m) = sum_j b_pj sin(m theta_j)

over the frequencies theta_j that make a whole turn in the trained length. Training shows no whole
turn of the others, so they are left out: their pairs have cos 1 and sin 0 at every position. A
score is not a function of the distance alone, and vectors change length: these are not rotations.
Source: Hua et al. (arXiv 2412.17739), section 3 and the authors' `FourierEmbedding`, which gives
the pairs left out sin 1: turned by 45 degrees and longer by sqrt(2) at every position. vLLM's
class for Intern-S1-Pro has sin 0, as the paper and as here.
"""

import math

import numpy as np
import numpy.typing as npt

from ..angles import cos_sin, inv_freq
from ..spec import Rotary, check_spec, check_whole, is_whole
from .arrays import Array, at_least_float32, cast, check_steady, namespace, positions_of


def fourier_coefficients(
    spec: Rotary,
    trained_length: int,
    heads: int,
    *,
    seed: int,
    gain: float = 0.3,
    outputs: int | None = None,
) -> npt.NDArray[np.float64]:
    """Return initial coefficients of FoPE: (2, heads, frequencies, outputs), of cos and of sin.

    frequencies  how many of the spec make a turn in `trained_length` tokens, 2 pi / theta <= L
    outputs      how many pairs get sums of them: 1 .. frequencies; all by default, as in
                 Intern-S1-Pro; the authors' models have min(frequencies, head_dim / 4)
    Pair p starts with frequency number p (every n-th where there are n times as many frequencies as
    outputs), plus normal numbers of standard deviation gain sqrt(2 / (outputs (frequencies +
    heads))), as torch's `xavier_normal_` computes it for three dimensions. They are then learned,
    or stay fixed as in the authors' models. Raises ValueError for a spec that depends on the
    length, whose frequencies do not fall or where none makes a turn, and for sizes below 1.

    >>> fourier_coefficients(Rotary(head_dim=8), 100, heads=2, seed=0).shape
    (2, 2, 2, 2)
    """
    check_whole("trained_length", trained_length)
    check_whole("heads", heads)
    kept = int((_frequencies(spec) >= 2 * math.pi / trained_length).sum())
    if not kept:
        raise ValueError(f"no frequency makes a turn in trained_length = {trained_length} tokens")
    outputs = kept if outputs is None else outputs
    if not is_whole(outputs) or not 1 <= outputs <= kept:
        raise ValueError(
            f"outputs must be 1 .. {kept}, the frequencies with a whole turn, got {outputs!r}"
        )
    drawn = np.random.default_rng(seed).standard_normal((2, heads, kept, outputs))
    start = np.zeros((kept, outputs))
    chosen = np.arange(0, kept, -(-kept // outputs))
    start[chosen, np.arange(len(chosen))] = 1
    return start + drawn * gain * math.sqrt(2 / (outputs * (kept + heads)))


def fourier_cos_sin(
    spec: Rotary,
    coefficients: Array,
    positions: object = None,
    *,
    seq_len: int | None = None,
    allow_negative: bool = False,
) -> tuple[Array, Array]:
    """Return cos and sin of FoPE, (1 or batch, heads, seq, rotary_dim / 2), like `coefficients`.

    coefficients  (2, heads, frequencies, outputs), from `fourier_coefficients`; on torch a
                  parameter, which gets its gradient
    positions     (seq,) or (batch, seq) of whole numbers; or give seq_len for 0 .. seq_len - 1
    Pass them to `rotate((q, k), cos, sin, spec)`; for fewer key heads, make tables from the
    coefficients of these heads. Rotated keys can be cached, because a row of the tables depends on
    its own position alone.
    Raises ValueError for shapes that do not fit the spec, for a negative position unless
    `allow_negative`, and as `fourier_coefficients` does.

    >>> learned = fourier_coefficients(Rotary(head_dim=8), 100, heads=2, seed=0)
    >>> cos, sin = fourier_cos_sin(Rotary(head_dim=8), learned, seq_len=5)
    >>> cos.shape, cos[0, 0, :, 3].tolist(), sin[0, 0, :, 3].tolist()
    ((1, 2, 5, 4), [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0])
    """
    check_spec(spec)
    spec.constant(_frequencies)  # for its errors: torch.compile does not record it
    xp, pairs = namespace(coefficients), spec.rotary_dim // 2
    shape = tuple(coefficients.shape)
    if len(shape) != 4 or shape[0] != 2 or max(shape[2:]) > pairs:
        raise ValueError(
            f"coefficients must be (2, heads, frequencies, outputs) for {pairs} pairs, got {shape}"
        )
    if (positions is None) == (seq_len is None):
        given = "neither" if positions is None else "both"
        raise ValueError(f"give either positions or seq_len, got {given}")
    if seq_len is not None:
        check_whole("seq_len", seq_len, 0)
        positions = np.arange(seq_len)
    at = positions_of(positions, coefficients)
    if at.ndim not in (1, 2) or "int" not in str(at.dtype):
        raise ValueError(
            "positions must be whole numbers, (seq,) or (batch, seq), got "
            f"{str(at.dtype).removeprefix('torch.')} of shape {tuple(at.shape)}"
        )
    at = at if at.ndim == 2 else at[None]
    wide = at_least_float32(coefficients)
    tables = []
    own = cos_sin(spec, at, allow_negative=allow_negative)
    for table, weights, still in zip(own, wide, (1.0, 0.0), strict=True):
        seen = cast(xp.asarray(table[:, None, :, : shape[2]]), wide.dtype)
        mixed = seen @ weights
        rest = mixed[..., :1] * 0 + still
        blank = xp.broadcast_to(rest, (*mixed.shape[:-1], pairs - shape[3]))
        tables.append(cast(xp.concatenate((mixed, blank), axis=-1), coefficients.dtype))
    return tables[0], tables[1]


def _frequencies(spec: Rotary) -> npt.NDArray[np.float64]:
    check_spec(spec)
    check_steady("FoPE needs", spec)
    frequencies, factor = inv_freq(spec)
    if (np.diff(frequencies) > 0).any() or factor != 1:
        raise ValueError(
            "FoPE needs frequencies that fall from pair to pair, and attention factor 1"
        )
    return frequencies
