"""Computes how far a RoPE reaches, and what a method for longer contexts does to it.

Most functions take a `Rotary` and return float64 numbers; `rotary.plots` draws them. `spectrum` is
about single frequencies, `decay` about scores, `bounds` and `search` about the base bound of Men et
al., `ladders` and `fitting` about frequencies for a wanted decay, `extension` about longer
contexts, and `precision` about rounding. `simulate` draws random queries and keys.
"""

from .bounds import certify as certify
from .bounds import failures as failures
from .bounds import first_failure as first_failure
from .bounds import lowest as lowest
from .bounds import similarity as similarity
from .bounds import survey as survey
from .decay import abel_terms as abel_terms
from .decay import attention_terms as attention_terms
from .decay import decay_curve as decay_curve
from .decay import pair_terms as pair_terms
from .decay import partial_sums as partial_sums
from .decay import score as score
from .decay import score_bound as score_bound
from .decay import still_term as still_term
from .extension import compare as compare
from .extension import coverage as coverage
from .extension import methods as methods
from .extension import stretched_further as stretched_further
from .extension import unseen as unseen
from .extension import unseen_share as unseen_share
from .ladders import alternatives as alternatives
from .ladders import design as design
from .ladders import misses as misses
from .ladders import wanted_curve as wanted_curve
from .ladders import wanted_level as wanted_level
from .ladders import wanted_reach as wanted_reach
from .precision import angle_error as angle_error
from .precision import error_near as error_near
from .precision import longest_safe_position as longest_safe_position
from .precision import nearby as nearby
from .precision import table_error as table_error
from .search import comb as comb
from .search import min_base as min_base
from .search import rounded_up as rounded_up
from .search import safe_base as safe_base
from .simulate import retrieval as retrieval
from .simulate import theorem_1 as theorem_1
from .spectrum import before_scaling as before_scaling
from .spectrum import critical_dimension as critical_dimension
from .spectrum import digits as digits
from .spectrum import extrapolation_length as extrapolation_length
from .spectrum import frequencies as frequencies
from .spectrum import never_turning as never_turning
from .spectrum import pair_with_turns as pair_with_turns
from .spectrum import still_pairs as still_pairs
from .spectrum import turns_completed as turns_completed
from .spectrum import wavelengths as wavelengths
from .spectrum import whole_head as whole_head
from .spectrum import yarn_band as yarn_band
