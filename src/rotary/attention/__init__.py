"""Attention with RoPE and its variants from papers, as small and readable functions.

They compute in the array library of their input: NumPy, torch or JAX. torch and JAX differentiate
through them, and JAX can trace and vmap them. q, k and v are (..., seq, head_dim); k and v may have
fewer heads where several heads of q share one.

Two variants need no function, because a spec defines them: partial rotation is `Rotary(head_dim,
rotary_dim)`; p-RoPE (Barbero et al., arXiv 2410.06205), which keeps the int(p d / 2) fastest pairs
of all d / 2 and does not rotate the others, is the schedule "proportional" with
partial_rotary_factor = p.
"""

from .cumulative import cumulative_cos_sin as cumulative_cos_sin
from .cumulative import mamba3_steps as mamba3_steps
from .cumulative import selective_steps as selective_steps
from .distances import DistanceMap as DistanceMap
from .distances import distance_attention as distance_attention
from .distances import leaky_rerope as leaky_rerope
from .distances import rerope as rerope
from .distances import self_extend as self_extend
from .encodings import mixed_cos_sin as mixed_cos_sin
from .encodings import mixed_directions as mixed_directions
from .encodings import sinusoidal as sinusoidal
from .encodings import xpos as xpos
from .features import FavorFeatures as FavorFeatures
from .features import FeatureMap as FeatureMap
from .features import elu_plus_one as elu_plus_one
from .features import favor_features as favor_features
from .fourier import fourier_coefficients as fourier_coefficients
from .fourier import fourier_cos_sin as fourier_cos_sin
from .linear import LinearState as LinearState
from .linear import chunked_linear_attention as chunked_linear_attention
from .linear import linear_attention as linear_attention
from .linear import recurrent_linear_attention as recurrent_linear_attention
from .softmax import hybrid_window as hybrid_window
from .softmax import key_norm as key_norm
from .softmax import scale_by_log_n as scale_by_log_n
from .softmax import softmax_attention as softmax_attention
from .softmax import vo_rope_attention as vo_rope_attention
