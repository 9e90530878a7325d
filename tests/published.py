"""The RoPE of published models that many tests look at, and one that is scaled by a factor."""

from rotary import Rotary

LLAMA_2 = Rotary(head_dim=128)
LLAMA_3 = Rotary(head_dim=128, base=500_000.0)
LLAMA_3_1 = Rotary(
    head_dim=128, base=500_000.0, schedule="llama3",
    params={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192},
)  # fmt: skip


def scaled(schedule, head_dim, factor, trained, **fields):
    """A RoPE of a schedule that has a factor and a trained length alone."""
    params = {"factor": factor, "original_max_position_embeddings": trained}
    return Rotary(head_dim, schedule=schedule, params=params, **fields)
