"""Whether all ranks of a torch.distributed job turn by the same RoPE, each token by one of them."""

from .compare import Finding as Finding
from .compare import Report as Report
from .compare import compare as compare
