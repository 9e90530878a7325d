"""The command `rotary`."""

from . import checkpoints as checkpoints
from . import configs as configs
from . import context as context
from . import design as design
from . import export as export
from . import machine as machine
from .app import main as main
