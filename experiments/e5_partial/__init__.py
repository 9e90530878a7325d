"""How many of the frequencies of RoPE have to turn?"""
