"""Feature maps of linear attention: non-negative functions of a query or a key.

Any function from (..., seq, head_dim) to (..., seq, features) in the array library of its input
can be a feature map: `numpy.exp`, `torch.relu`, `jax.nn.relu`, or your own.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..spec import check_whole
from .arrays import Array, at_least_float32, cast, namespace, positions_of

FeatureMap = Callable[[Array], Array]


def elu_plus_one(x: Array) -> Array:
    """The feature map of linear attention: x + 1 for x > 0, exp(x) below; always positive.

    Source: Katharopoulos et al. (arXiv 2006.16236), equation 7.

    >>> elu_plus_one(np.array([-1.0, 0.0, 2.0])).round(4)
    array([0.3679, 1.    , 3.    ])
    """
    xp = namespace(x)
    return xp.where(x > 0, x + 1, xp.exp(xp.clip(x, None, 0)))


@dataclasses.dataclass(frozen=True, eq=False)
class FavorFeatures:
    """Positive random features of Performer, FAVOR+: (..., head_dim) to (..., features).

        phi(x)_i = exp(w_i . y - |y|^2 / 2) / sqrt(features),   y = x / head_dim^(1/4)

    w_i are the rows of `directions`, (features, head_dim). The mean of phi(q) . phi(k) over w is
    exp(q . k / sqrt(head_dim)), so linear attention without a spec approximates softmax attention.
    Features are at least float32, and vanish for very long x: keep |y| below 10.
    The authors' code also divides by the largest feature of a row and adds 1e-6. This keeps
    features above 0, but a key then depends on later keys; so it is left out here.
    Make it with `favor_features`. Raises ValueError for x of another width.
    """

    directions: npt.NDArray[np.float64]

    def __call__(self, x: Array) -> Array:
        """Return the features of x."""
        num_features, head_dim = self.directions.shape
        if x.shape[-1] != head_dim:
            raise ValueError(f"these features are for head_dim {head_dim}, got x of {x.shape[-1]}")
        x = at_least_float32(x) / head_dim**0.25
        directions = cast(positions_of(self.directions, x), x.dtype)
        exponents = x @ directions.swapaxes(-1, -2) - (x * x).sum(axis=-1, keepdims=True) / 2
        return namespace(x).exp(exponents) / num_features**0.5


def favor_features(head_dim: int, num_features: int, *, seed: int) -> FavorFeatures:
    """Draw the FAVOR+ map of Performer, with orthogonal directions, from `seed`.

    Directions come in blocks of head_dim orthogonal vectors, each as long as a vector of head_dim
    independent normal numbers. Their error is smaller than that of independent directions.
    With RoPE the features are rotated, so the spec has head_dim = num_features.
    Raises ValueError unless both sizes are whole numbers >= 1.
    Source: Choromanski et al., Performer (arXiv 2009.14794), section 2 and lemma 1.

    >>> phi = favor_features(head_dim=4, num_features=4096, seed=0)
    >>> q, k = np.array([0.5, -1.0, 0.0, 0.3]), np.array([0.2, -0.4, 1.0, 0.0])
    >>> bool(abs(phi(q) @ phi(k) - np.exp(q @ k / 2)) < 0.15)  # 1.28
    True
    """
    check_whole("head_dim", head_dim)
    check_whole("num_features", num_features)
    random = np.random.default_rng(seed)
    blocks = []
    for _ in range(-(-num_features // head_dim)):
        q, r = np.linalg.qr(random.standard_normal((head_dim, head_dim)))
        blocks.append((q * np.sign(np.diagonal(r))).T)  # the signs make it uniformly distributed
    lengths = np.linalg.norm(random.standard_normal((num_features, head_dim)), axis=-1)
    return FavorFeatures(np.concatenate(blocks)[:num_features] * lengths[:, None])
