"""`fused`: norm, rotation, cast and write to the cache in one pass over memory."""

from typing import TypeVar

from .angles import Precision, cos_sin, sequence_cos_sin
from .kernels import Array, check_positions, fused_of, hint_for, kernel_of
from .kernels.geometry import seq_axis
from .kernels.stages import KVCache as KVCache
from .kernels.stages import LatentCache as LatentCache
from .kernels.stages import Norm as Norm
from .kernels.stages import Stages, dtype_name
from .rotate import check_one_axis, options_of
from .spec import Rotary, check_spec

K = TypeVar("K")  # an array of the library of `Array`, or None
V = TypeVar("V")
Scale = object  # a number, numbers for the heads, or "token"


def fused(
    q: Array,
    k: K,
    v: V,
    spec: Rotary,
    positions: object = None,
    *,
    tables: tuple[object, object] | None = None,
    norm: Norm | None = None,
    cache: KVCache | LatentCache | None = None,
    dtype: object = None,
    scale: Scale = 1.0,
    seq_dim: int | None = None,
    precision: Precision = "exact",
    allow_negative: bool = False,
    out: object = None,
) -> tuple[Array, K, V]:
    """Normalize, rotate, cast and store q, k and v between their projections and attention.

    The steps are: RMS norm -> rotation -> division by a scale and rounding -> a new array, `out`,
    or the slots of a cache. All but the rotation are optional. It computes in float32 (float64 for
    a float64 q) and rounds once, at the end; a model that also rounds after the norm differs by
    that rounding. v is not rotated.

    q, k, v    (..., seq, head_dim), or with seq_dim=-3 (..., seq, heads, head_dim); q and k may
               differ in heads, v from k in its last axis. k and v may be None
    spec       which channels make a pair, and the frequencies
    positions  as in `rotary.apply`; with `tables`, row numbers as in `rotary.rotate`
    tables     (cos, sin) as in `rotary.rotate`, made once per forward; default: exact angles
    norm       `rotary.Norm`: weights of q and k, eps
    cache      `rotary.KVCache`, which k and v are written to, or `rotary.LatentCache` for MLA:
               there k is the rotated part, with one head, (..., 1, seq, rotary_dim), and v the
               latent part, (batch, seq, channels) or (seq, channels), without heads
               (with seq_dim=0 the axes of k and v are in the order of q; `slots` stay (batch, seq))
    dtype      of what is returned, by name or as a dtype: float32, float64, float16, bfloat16,
               float8_e4m3fn, float8_e5m2 or int8; default that of q. In the last three, values
               that are too large become the largest number
    scale      divides the results before they are rounded: a number, one for each head, or
               "token", which computes one for each token and head (largest channel / largest
               number of the dtype) and returns a tuple (values, scales) for each array. A tuple of
               three scales is for q, k and v. With a cache only q is scaled by it: those of what is
               written are in the cache
    seq_dim    axis of the tokens, as in `rotary.rotate`
    precision  as in `rotary.cos_sin`, like `allow_negative`; `tables` have both in them
    out        arrays for the results that are returned, in the order q, k, v; `out=(q, k)` works in
               place
    Returns (q, k, v), with None for an array that was None or was written to a cache; v is the same
    array if no step changes it. With torch, q, k, v and the weights get gradients, but not with
    out= or cache=.

    JAX arrays are immutable: they take no out=, and with cache= the result is (q, cache.k, cache.v)
    or (q, cache.rows, None), as new arrays. If the scales of a cache are written too, a tuple
    (cache, scales) replaces it. Gradients flow through new caches. XLA writes them in place if you
    compile your function with `jax.jit(step, donate_argnums=...)` for the caches; otherwise each
    call copies them.

    | the call | the steps |
    |---|---|
    | `norm=Norm(wq, wk, eps)` | norm, then rotate: Qwen3; OLMo 2 with weights over all heads |
    | `norm=Norm(wq, wk, eps, add_one=True)` | the same with 1 + weight: Gemma 3 |
    | `cache=KVCache(k, v, slots)` | rotate, then write k and v to a paged cache |
    | `cache=LatentCache(rows, slots)` | rotate, then write the rows of MLA |
    | `cache=KVCache(k8, v8, slots, sk, sv)` | the same in float8 or int8, with scales |

    Raises TypeError and ValueError as `rotary.rotate` and `rotary.cos_sin`; ValueError for weights,
    scales, caches and slots of a shape that does not fit, and for a slot beyond the cache. Slots
    are not checked on a GPU or in a traced program; JAX then skips the token.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467), equation 4;
    Henry et al., Query-Key Normalization (arXiv 2010.04245).

    >>> import numpy as np, rotary
    >>> spec = rotary.Rotary(head_dim=4)
    >>> q, k = np.full((2, 3, 4), 5.0, np.float32), np.full((1, 3, 4), 7.0, np.float32)
    >>> norm = rotary.Norm(np.ones(4), np.ones(4), eps=0.0)
    >>> y, _, _ = rotary.fused(q, k, None, spec, norm=norm)
    >>> bool(np.allclose(y, rotary.apply(spec, np.ones((2, 3, 4), np.float32))))
    True
    >>> cache = rotary.KVCache(np.zeros((8, 1, 4)), np.zeros((8, 1, 4)), slots=[5, -1, 2])
    >>> _ = rotary.fused(q, k, k, spec, norm=norm, cache=cache)
    >>> cache.v[:, 0, 0].tolist()
    [0.0, 0.0, 7.0, 0.0, 0.0, 7.0, 0.0, 0.0]

    With JAX the new caches are returned:

    >>> import jax, jax.numpy as jnp
    >>> def step(q, k, v, keys, values, slots):
    ...     return rotary.fused(q, k, v, spec, cache=rotary.KVCache(keys, values, slots))
    >>> step = jax.jit(step, donate_argnames=("keys", "values"))
    >>> empty = [jnp.zeros((8, 1, 4)) for _ in "kv"]
    >>> y, keys, values = step(*map(jnp.array, (q, k, k)), *empty, jnp.array([5, -1, 2]))
    >>> values[:, 0, 0].tolist()
    [0.0, 0.0, 7.0, 0.0, 0.0, 7.0, 0.0, 0.0]
    """
    kernel = kernel_of(q)
    run = fused_of(kernel)
    check_spec(spec, "spec")
    for name, array in (("k", k), ("v", v)):
        if array is not None and type(array) is not type(q) and not kernel.takes(array):
            raise TypeError(
                f"q, k and v must be of one library: {name} is a {type(array).__module__}."
                f"{type(array).__qualname__}{hint_for(type(array))}"
            )
    if positions is not None:
        check_positions(positions)
    rows = None
    if tables is not None:
        (cos, sin), rows = tables, positions
    elif positions is None:
        seq_dim = -2 if seq_dim is None else seq_dim
        check_one_axis(spec)
        seq = q.shape[seq_axis(tuple(q.shape), seq_dim)]
        cos, sin = sequence_cos_sin(spec, q, seq, precision)
    else:
        at = kernel.as_positions(positions, q)
        cos, sin = cos_sin(spec, at, precision, allow_negative=allow_negative)
    options = options_of(spec, seq_dim=seq_dim)
    kind = None if dtype is None else dtype_name(dtype)
    stages = Stages(norm, cache, kind, _scales_of(scale, cache is not None))
    outs = None if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if outs is not None and any(each is None for each in outs):
        raise TypeError(
            "out holds None: leave out what is not returned, as in out=(q, k) for v=None"
        )
    return run(q, k, v, cos, sin, rows, options, stages, outs)


def _scales_of(scale: Scale, has_cache: bool) -> tuple[Scale, Scale, Scale]:
    """Return the scales of q, k and v; ValueError for one of k or v that go to a cache.

    >>> _scales_of(0.5, False), _scales_of(0.5, True)
    ((0.5, 0.5, 0.5), (0.5, 1.0, 1.0))
    """
    if not isinstance(scale, tuple):
        return (scale, 1.0, 1.0) if has_cache else (scale, scale, scale)
    if len(scale) != 3:
        raise ValueError(f"a tuple of scales must have three, for q, k and v; got {len(scale)}")
    of_q, *others = scale
    if not has_cache:
        return scale
    for name, other in zip("kv", others, strict=True):
        if not (other is None or (isinstance(other, (int, float)) and other == 1)):
            raise ValueError(
                f"scale= has a scale for {name}, which is written to the cache: give that to the "
                "cache, KVCache(k, v, slots, k_scale, v_scale) or LatentCache(rows, slots, scale)"
            )
    return of_q, 1.0, 1.0
