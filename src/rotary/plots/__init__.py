"""Functions that draw the numbers of `rotary.analysis` for one or several specs, as figures.

Figures are plain `matplotlib.figure.Figure`, without pyplot or other global state; `save` writes
them, after `dark` for a dark page. A function that draws one spec takes a `Rotary`, or
{name: Rotary} to choose the heading. A curve has at most 4096 points; the docstrings say which
points of a longer curve are drawn.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ImportError as error:
    raise ValueError("plots need matplotlib: pip install matplotlib") from error

from .dark import dark as dark
from .distance import decay as decay
from .distance import scores as scores
from .distance import terms as terms
from .distance import walk as walk
from .files import rendered as rendered
from .files import save as save
from .geometry import grid as grid
from .geometry import layout as layout
from .geometry import unit_circle as unit_circle
from .models import gallery as gallery
from .models import roofline as roofline
from .reach import base_bound as base_bound
from .reach import comb as comb
from .reach import design as design
from .reach import precision as precision
from .reach import similarity as similarity
from .spectrum import angle_coverage as angle_coverage
from .spectrum import cosine_map as cosine_map
from .spectrum import frequency_ratio as frequency_ratio
from .spectrum import wavelengths as wavelengths
