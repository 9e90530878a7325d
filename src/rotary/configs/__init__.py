"""Makes a `Rotary` from a config.json, GGUF metadata or Megatron's arguments.

`files` reads the file, `entries` chooses the part and the layer type, `record` defines the result,
and `hf` makes a `Rotary` of it. `models.json` has the facts about each model that configs do not
state, `without_rope.json` the model types that do not rotate. Other formats: `diffusers`, `gguf`,
`megatron`, `vllm`.
"""

from .diffusers import from_diffusers_config as from_diffusers_config
from .entries import MODELS as MODELS
from .entries import ArgumentNeededError as ArgumentNeededError
from .entries import NoRopeError as NoRopeError
from .entries import UnknownModelError as UnknownModelError
from .entries import choose as choose
from .entries import layer_types as layer_types
from .entries import parts as parts
from .files import load as load
from .files import read_config as read_config
from .gguf import from_gguf as from_gguf
from .gguf import gguf_layer_types as gguf_layer_types
from .gguf_file import read_gguf as read_gguf
from .gguf_writing import to_gguf as to_gguf
from .hf import from_hf_config as from_hf_config
from .hf_writing import as_longrope as as_longrope
from .hf_writing import replace_rope as replace_rope
from .hf_writing import rope_keys as rope_keys
from .hf_writing import to_hf_config as to_hf_config
from .megatron import from_megatron as from_megatron
from .record import Config as Config
from .vllm import to_vllm as to_vllm
