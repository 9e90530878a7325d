"""Converts the weights of a checkpoint from one layout to the other.

The modules in the order of the work, through which `convert` passes a `plan.Conversion`:

read    `files` the headers of safetensors, their folder, the config and the files beside
plan    `names` which tensors are queries and keys; `channels` where the rotated channels are in
        each; `plan` what moves; `layout` what config.json says afterwards, and what norms show
write   `shards` the weights, piece by piece, each read again, and the scores of the layers;
        `writing` whole files, the lock and the journal
"""

from .convert import convert_checkpoint as convert_checkpoint
