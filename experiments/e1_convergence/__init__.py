"""Does RoPE learn faster than sinusoidal, learned and no positions?"""
