"""How `rotary.identify` works: `probe` calls the function, `pairs` and `fit` explain what it does.

`forms` finds out how to call it, `lengths` tests far positions, `faults` tests for published
faults, and `examine` combines them.
"""
