"""The views of the page, each one entry of `VIEWS`: a name, a title, a text and a function.

The function, `draw`, makes a `Picture` of a `Look`: numbers, their meaning in words, a figure.
`moving.py` has views that move in the browser, `curves.py` those of one number, `advice.py` those
that recommend something.
"""

from collections.abc import Callable
from typing import NamedTuple

from .advice import difference, plan, reach
from .curves import (
    coverage,
    decay_curve,
    error_of_angles,
    layout,
    scaling,
    similarity,
    wavelengths,
)
from .figures import Picture
from .moving import hands, methods, two_layouts

LEARN, MEASURE, DECIDE = "See it move", "Measure", "Decide"


class View(NamedTuple):
    """A title, a group of views, one or two sentences, and the function that draws it."""

    title: str
    group: str
    text: str
    draw: Callable[..., Picture]  # of one Look, or of those of A and B
    is_of_two: bool = False


VIEWS: dict[str, View] = {
    "hands": View(
        "Turning hands", LEARN, "RoPE turns each pair of channels of q and k by an angle that "
        "grows with the position of its token. Each circle is one pair.", hands,
    ),
    "layouts": View(
        "Two layouts", LEARN, "Which channels turn together is a convention. Both conventions "
        "give the same scores; mixing them up does not.", two_layouts,
    ),
    "methods": View(
        "Scaling methods", LEARN, "A longer context brings slow pairs to angles that training "
        "never showed. Each method slows pairs down in its own way.", methods,
    ),
    "wavelengths": View(
        "Wavelengths", MEASURE, "Tokens that each pair of channels needs for one whole turn. "
        "Fast pairs tell near tokens apart, slow ones far tokens.",
        wavelengths,
    ),
    "decay": View(
        "Decay", MEASURE, "How large a score can be at most when tokens are so far apart: the "
        "mean size of the partial sums, figure 2 of the RoFormer paper.", decay_curve,
    ),
    "similarity": View(
        "Similarity", MEASURE, "By how much attention prefers a key that is like the query to a "
        "random key, at each distance (B_m of Men et al., 2024).", similarity,
    ),
    "band": View(
        "Speed after scaling", MEASURE, "What the scaling does to the speed of each pair, and the "
        "band where YaRN blends.", scaling,
    ),
    "coverage": View(
        "Coverage", MEASURE, "How much of its circle each pair saw in training, and what is new "
        "at the context.", coverage,
    ),
    "precision": View(
        "Precision", MEASURE, "What an angle computed in 32 or 16 bits does to cos and sin.",
        error_of_angles,
    ),
    "layout": View("Layout", MEASURE, "Which channels of a head turn together.", layout),
    "reach": View(
        "Reach", DECIDE, "Which lengths this RoPE was made for, and what ends before the context "
        "that you ask for: those bars are red. The same as rotary reach.", reach,
    ),
    "plan": View(
        "Plan", DECIDE, "How to bring trained weights to the context: set the model and the "
        "context, then copy the config. The same as rotary plan, which starts from the model as "
        "published, whatever method is chosen.", plan,
    ),
    "models": View(
        "Two models", DECIDE, "What differs between the RoPE of A and of B, and what that means "
        "for weights and cached keys.", difference, is_of_two=True,
    ),
}  # fmt: skip
