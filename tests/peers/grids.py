"""For programs that rotate images and video: the frequency and the axis of every pair, measured."""

import numpy as np


def measured(cos, sin, sizes, steps=None):
    """Frequency, axis and layout of each pair, from tables over a row-major grid of tokens.

    cos, sin  (tokens, channels), each value twice as the program applies them
    sizes     of the grid, two tokens or more along each axis
    steps     how far apart two neighbours are along each axis; 1 where left out
    """
    cos, sin = (np.asarray(each, np.float64).reshape(*sizes, -1) for each in (cos, sin))
    is_interleaved = (cos[..., ::2] == cos[..., 1::2]).all()
    half = cos.shape[-1] // 2
    if not is_interleaved and not (cos[..., :half] == cos[..., half:]).all():
        raise ValueError("neither half nor interleaved")
    pairs = slice(None, None, 2) if is_interleaved else slice(half)
    angle = np.arctan2(sin[..., pairs], cos[..., pairs])
    amplitude = float(np.median(np.hypot(cos, sin)))
    origin = (0,) * len(sizes)
    slopes = []
    for axis, step in enumerate(steps or [1.0] * len(sizes)):
        neighbour = tuple(int(i == axis) for i in range(len(sizes)))
        turned = angle[neighbour] - angle[origin]
        slopes.append(np.abs((turned + np.pi) % (2 * np.pi) - np.pi) / step)
    slopes = np.array(slopes)
    if ((slopes > 1e-7).sum(0) > 1).any():
        raise ValueError("a pair turns with more than one axis")
    return {"inv_freq": slopes.max(0).tolist(), "attention_factor": round(amplitude, 6),
            "axes": slopes.argmax(0).tolist(),
            "layout": "interleaved" if is_interleaved else "half",
            "rotary_dim": 2 * slopes.shape[1], "start": 0}  # fmt: skip
