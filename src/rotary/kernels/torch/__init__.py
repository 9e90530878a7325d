"""What torch tensors get: `route` says which code rotates them, and has the table of it.

`launch` rotates once, `ready` and `gpu` repeat a call of a known form, `operators` are what a
compiler sees. `state`, `checks` and `private` ask about tensors and about torch.
"""
