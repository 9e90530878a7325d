"""How `rotary.identify` works: `probe` calls the function, `pairs` and `fit` explain what it does.

`lengths` looks at far positions, `faults` at published mistakes, and `examine` asks all of them.
"""
