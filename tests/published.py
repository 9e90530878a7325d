"""The RoPE of published models that many tests look at, and one that is scaled by a factor."""

import numpy as np

from rotary import Rotary

LLAMA_2 = Rotary(head_dim=128)
LLAMA_3 = Rotary(head_dim=128, base=500_000.0)


def scaled(schedule, head_dim, factor, trained, more=None, **fields):
    """A RoPE of a schedule that has a factor and a trained length, and `more` parameters."""
    params = {"factor": factor, "original_max_position_embeddings": trained, **(more or {})}
    return Rotary(head_dim, schedule=schedule, params=params, **fields)


def longrope(factor, trained, short_factor, long_factor):
    """A RoPE with the divisors of LongRoPE, for as many pairs as these are."""
    lists = {"short_factor": short_factor, "long_factor": long_factor}
    return scaled("longrope", 2 * len(short_factor), factor, trained, lists)


def parameters_of(rope_type, pairs, trained):
    """What a config says of a rope type: a factor, and what else the type needs."""
    length = {"original_max_position_embeddings": trained}
    return {
        "default": {},
        "linear": {"factor": 3.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 6.0, "original_max_position_embeddings": 4096},  # a ramp over many pairs
        "longrope": {
            "short_factor": np.linspace(1, 3, pairs).tolist(),
            "long_factor": np.geomspace(1, 40, pairs).tolist(), "factor": 4.0, **length,
        },
        "llama3": {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0, **length},
    }[rope_type]  # fmt: skip


STEPS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of the schedule llama3
LLAMA_3_1 = scaled("llama3", 128, 8.0, 8192, STEPS, base=500_000.0)
