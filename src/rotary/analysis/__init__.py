"""What a RoPE's numbers say: how far it reaches, and what an extension does to it.

Numbers only, in float64, of any `Rotary`; `rotary.plots` draws them.
"""
