"""Write `trained_norms.json`: norms of the query and key rows of four small trained models.

    python tests/golden/make_norms.py        # some minutes on one core

Three layers of 128 channels learn the source text of Python's standard library for 700 steps, in
the code of transformers: two models in each layout. They are what `checkpoint/layout.py` is tested
on, for weights that were never trained show no layout.
"""

import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers

TARGET = Path(__file__).with_name("trained_norms.json")
SIZES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
NEW = {
    **SIZES, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "head_dim": 32,
}  # fmt: skip
GPTJ = {**SIZES, "n_embd": 128, "n_layer": 3, "n_head": 4, "rotary_dim": 16, "n_positions": 256}
MODELS = {"llama": NEW, "qwen3": NEW, "gptj": GPTJ, "cohere": NEW}
STEPS, LENGTH, ROWS, RATE = 700, 128, 12, 2e-3


def text() -> torch.Tensor:
    """Bytes of the standard library; another version moves the norms, and not what they show."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))[:150]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def trained(family: str, data: torch.Tensor) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **MODELS[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(STEPS):
        begins = torch.randint(0, len(data) - LENGTH - 1, (ROWS,)).tolist()
        batch = torch.stack([data[begin : begin + LENGTH] for begin in begins]).long()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, step / 50) * (1 - 0.9 * step / STEPS)
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def norms_of(model: Any) -> list[list[float]]:
    """A list for each head of queries and keys: the norms of its rotated rows."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = getattr(config, "rotary_dim", None) or head_dim
    heads = [
        weight.detach().double().norm(dim=1).reshape(-1, head_dim)[:, :rotary_dim]
        for name, weight in model.named_parameters()
        if name.endswith(("q_proj.weight", "k_proj.weight"))
    ]
    return [[round(norm, 4) for norm in head] for head in torch.cat(heads).tolist()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = text()
    found = {family: norms_of(trained(family, data)) for family in MODELS}
    lines = ",\n".join(f' "{family}": {json.dumps(rows)}' for family, rows in found.items())
    TARGET.write_text(f"{{\n{lines}\n}}\n")
