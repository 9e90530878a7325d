"""The RoPE of published models that many tests look at, and one that is scaled by a factor."""

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


STEPS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of the schedule llama3
LLAMA_3_1 = scaled("llama3", 128, 8.0, 8192, STEPS, base=500_000.0)
