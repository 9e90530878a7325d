"""What other programs compute from the same config, side by side with transformers."""

from .diff import diff as diff
from .diff import readings as readings
from .tables import PROGRAMS as PROGRAMS
from .tables import SLICED as SLICED
