"""Checkpoints: weights moved from one pair layout to the other, and nothing lost.

In the order of the work, which `convert` goes through with one record, a `plan.Conversion`:

read    `headers` one file of safetensors; `files` the folder: index, config, files beside
plan    `names` which tensors are queries and keys; `parameters` and `heads` where the rotated
        channels are in each; `plan` what moves; `layout_keys` what config.json says afterwards
write   `shards` the weights, piece by piece; `writing` whole files, the lock and the journal
verify  `verify` every byte that moved, and the scores of the layers

`measure` is apart: the layout that the norms of weights show.
"""

from .convert import convert_checkpoint as convert_checkpoint
