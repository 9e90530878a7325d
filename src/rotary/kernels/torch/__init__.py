"""The kernel of torch tensors: `route` chooses the code that rotates them, by a table.

`launch` rotates once, `ready` and `gpu` repeat a call of a known form, `operators` are what a
compiler sees. `state`, `checks` and `private` answer questions about tensors and about torch.
"""
