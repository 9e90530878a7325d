"""Configs with a plain RoPE, as numbers, for programs that take numbers and read no config.json."""

import measure

# file -> layer type, head_dim, channels that turn, base, factor, interleaved
PLAIN = {
    "command-r-v01.json": (None, 128, 128, 8e6, 1.0, True),
    "gemma-3-4b.json": ("full_attention", 256, 256, 1e6, 8.0, False),
    "gemma-7b.json": (None, 256, 256, 1e4, 1.0, False),
    "gpt-j-6b.json": (None, 256, 64, 1e4, 1.0, True),
    "gpt-neox-20b.json": (None, 96, 24, 1e4, 1.0, False),
    "llama-3-8b.json": (None, 128, 128, 5e5, 1.0, False),
    "mistral-nemo.json": (None, 128, 128, 1e6, 1.0, False),
    "phi-2.json": (None, 80, 32, 1e4, 1.0, False),
    "qwen2.5-7b.json": (None, 128, 128, 1e6, 1.0, False),
    "stablelm-2-zephyr-1.6b.json": (None, 64, 16, 1e4, 1.0, False),
}


def rows(folder, rotation_of, layouts, farthest=2**30):
    """A row for each config; `rotation_of(head_dim, rotary_dim, base, factor, is_interleaved)`.

    layouts  those that the program has
    """
    found = []
    for name, _ in measure.configs(folder):
        if name not in PLAIN:
            why = "it takes a base and a width, no config: run for ten plain ones"
            found.append(measure.row(name, skipped=why))
            continue
        layer_type, head_dim, *numbers, is_interleaved = PLAIN[name]
        layout = "interleaved" if is_interleaved else "half"
        given = is_interleaved if layout in layouts else "interleaved" in layouts
        note = {} if layout in layouts else {"note": f"it has no {layout} layout"}
        rotate = rotation_of(head_dim, *numbers, given)
        facts = measure.measured(rotate, head_dim, farthest)
        found.append(measure.row(name, layer_type, **facts, **note))
    return found
