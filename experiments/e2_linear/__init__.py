"""Does RoPE help linear attention, and what do its weights and its denominator do?"""
