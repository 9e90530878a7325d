"""How far the RoPE of a model reaches: the numbers of `rotary.analysis`, and what they mean."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .analysis.bounds import survey
from .analysis.extension import unseen_share
from .analysis.precision import longest_safe_position
from .analysis.spectrum import (
    before_scaling,
    critical_dimension,
    never_turning,
    still_pairs,
    wavelengths,
    whole_head,
    whole_number,
)
from .configs import Config, choose, layer_types
from .configs.hf import rotary_of
from .spec import Rotary
from .strict_json import JSON
from .words import counted

ROUNDING = 1e-9  # a smaller share of angles is rounding
TOLERANCE = 1e-2  # rad; an angle that is off by more changes a float32 score visibly


class Reach(NamedTuple):
    """What `reach` found; lengths, distances and positions are in tokens.

    spec                the RoPE
    length              how far apart two tokens of this layer can be
    trained             the length that the frequencies were trained at, before any scaling
    first_failure       the first distance with B_m < 0, None if there is none up to `length`
    failures            how many of the distances 1 .. length have B_m < 0
    lowest_distance     where B_m is smallest
    lowest              B_m / B_0 there
    critical_dimension  channels whose pairs turned more than once in `trained` tokens
    pairs, still_pairs  how many pairs of the head are rotated, and how many are not
    never_turning       rotated pairs that made less than one turn in `trained` tokens
    unseen              share of the angles up to `length` that the training has not shown
    longest_wavelength  of the slowest pair that turns
    float32_positions   the last position up to which float32 angles are within 1e-2 rad, with the
                        frequencies that run at `length`
    verdict             the result in sentences
    nope_head_dim       channels of the head beside those of `spec`, which are not rotated
    """

    spec: Rotary
    length: int
    trained: int
    first_failure: int | None
    failures: int
    lowest_distance: int
    lowest: float
    critical_dimension: int
    pairs: int
    still_pairs: float
    never_turning: int
    unseen: float
    longest_wavelength: float
    float32_positions: int
    verdict: str
    nope_head_dim: int = 0

    @property
    def head(self) -> Rotary:
        """The RoPE of all channels of the head: that of B_m."""
        return whole_head(self.spec, self.nope_head_dim)

    def to_dict(self) -> dict[str, JSON]:
        """All fields as JSON-ready data.

        >>> reach(Rotary(head_dim=128), 4096).to_dict()["first_failure"]
        1707
        """
        return {**self._asdict(), "spec": self.spec.to_dict()}

    def rows(self) -> list[tuple[str, str]]:
        """The numbers as text, each with its name: the table of `rotary reach`.

        >>> reach(Rotary(head_dim=128), 4096).rows()[1]
        ('first B_m < 0', 'distance 1,707')
        """
        first = self.first_failure
        return [
            ("length", f"{counted(self.length, 'token')}; trained at {self.trained:,}"),
            ("first B_m < 0", "none" if first is None else f"distance {first:,}"),
            ("all B_m < 0", f"{self.failures:,} of {self.length:,} distances"),
            ("lowest B_m / B_0", f"{self.lowest:.4f} at distance {self.lowest_distance:,}"),
            ("critical dimension", f"{self.critical_dimension} of {2 * self.pairs} channels"),
            ("pairs with less than one turn in training", f"{self.never_turning} of {self.pairs}"),
            (
                "angles not seen in training",
                f"{_share(self.unseen)} up to {counted(self.length, 'token')}",
            ),
            ("longest wavelength", f"{self.longest_wavelength:,.0f} tokens"),
            ("float32 angles", f"within 1e-2 rad up to position {self.float32_positions:,}"),
        ]


def reach(
    spec: Rotary,
    length: int,
    trained: int | None = None,
    *,
    original: Rotary | None = None,
    nope_head_dim: int = 0,
) -> Reach:
    """Compute how far a RoPE reaches within `length` tokens.

    trained   the trained length of the frequencies; default `length`
    original  the RoPE of that training; default `analysis.before_scaling(spec)`, which takes linear
              and ntk as trained
    nope_head_dim  channels of a head beside those of `spec`: qk_nope_head_dim of latent attention
    Source of B_m: Men et al. (arXiv 2405.14591); of the critical dimension: Liu et al. (arXiv
    2310.05209). Raises ValueError for a length outside 1 .. 2^24.

    >>> found = reach(Rotary(head_dim=128), 4096)  # Llama 2
    >>> found.first_failure, found.critical_dimension, found.never_turning
    (1707, 92, 18)
    """
    whole_number("length", length)
    trained = length if trained is None else whole_number("trained", trained)
    original = before_scaling(spec) if original is None else original
    periods = wavelengths(spec, length)
    head = whole_head(spec, nope_head_dim)
    failing, where, least = survey(head, length, seq_len=length)
    result = Reach(
        spec=spec,
        length=length,
        trained=trained,
        first_failure=int(failing[0]) if len(failing) else None,
        failures=len(failing),
        lowest_distance=where,
        lowest=least,
        critical_dimension=critical_dimension(original, trained),
        pairs=spec.rotary_dim // 2,
        still_pairs=still_pairs(head),
        never_turning=int(never_turning(original, trained).sum()),
        unseen=unseen_share(original, trained, spec, length - 1, length),
        longest_wavelength=float(periods[periods < float("inf")].max(initial=0.0)),
        float32_positions=longest_safe_position(spec, TOLERANCE, seq_len=length),
        verdict="",
        nope_head_dim=nope_head_dim,
    )
    return result._replace(verdict=" ".join(_sentences(result)))


def reaches(
    config: object,
    layer_type: str | None = None,
    *,
    part: str | None = None,
    length: int | None = None,
) -> dict[str | None, Reach | None]:
    """Return layer type -> reach, None for layers without rotation; {None: ...} if all are alike.

    `length` replaces the config's max_position_embeddings. A layer with a sliding window or
    chunks sees no farther than these. Arguments and errors are those of `from_hf_config`.

    >>> {kind: found.length for kind, found in reaches({"model_type": "gpt_oss"}).items()}
    {None: 131072}
    """
    kinds = (layer_type,) if layer_type else layer_types(config, part=part) or (None,)
    return {kind: _of_layer(choose(config, kind, part), length) for kind in kinds}


def _of_layer(config: Config, length: int | None) -> Reach | None:
    spec = rotary_of(config)
    if spec is None:
        return None
    trained, advertised = lengths(spec, config)
    length = advertised if length is None else whole_number("length", length)
    if length is None:
        raise ValueError("the config has no max_position_embeddings; give the length, in tokens")
    return reach_of_layer(spec, length, trained, config)


def reach_of_layer(
    spec: Rotary,
    length: int,
    trained: int | None,
    config: Config,
    *,
    original: Rotary | None = None,
) -> Reach:
    """Compute `reach` of a RoPE in the layers of `config`: no farther than their window.

    `length` and `trained` are in tokens, before they are cut to the window; the rest and the errors
    are those of `reach`. The verdict names the window, and float32 angles that are off beyond it.

    >>> config = choose({"model_type": "mistral", "sliding_window": 4096})
    >>> reach_of_layer(rotary_of(config), 32768, 32768, config).length
    4096
    """
    seen = visible(length, config)
    found = reach(
        spec,
        seen,
        trained and visible(trained, config),
        original=original,
        nope_head_dim=config.nope_head_dim,
    )
    if seen == length:
        return found
    words = [of_window(seen), found.verdict]
    if seen <= found.float32_positions < length:  # positions go on beyond the window
        words.append(_of_float32(found))
    return found._replace(verdict=" ".join(words))


def distances_to(length: int) -> npt.NDArray[np.int64]:
    """1, 2, 5, 10, ... up to `length`, and `length` itself.

    >>> distances_to(30).tolist()
    [1, 2, 5, 10, 20, 30]
    """
    whole_number("length", length)
    steps = [digit * 10**power for power in range(8) for digit in (1, 2, 5)]
    return np.array([*(step for step in steps if step < length), length])


def lengths(spec: Rotary, config: Config) -> tuple[int | None, int | None]:
    """(trained, advertised): the length before any scaling, and max_position_embeddings.

    >>> scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    >>> config = {"head_dim": 8, "max_position_embeddings": 16384, "rope_parameters": scaling}
    >>> lengths(rotary_of(choose(config)), choose(config))
    (4096, 16384)
    """
    advertised = config.get("max_position_embeddings")
    original = spec.params.get("original_max_position_embeddings")
    return (original or advertised), advertised


def visible(length: int, config: Config) -> int:
    """Return `length`, or the window of the rotated layers if that is shorter.

    >>> visible(8192, choose({"model_type": "mistral", "sliding_window": 4096}))
    4096
    """
    return min(length, config.window or length)


def of_window(seen: int) -> str:
    """Say that a length is cut to the window.

    >>> of_window(4096)
    'These layers see no farther than their window, 4,096 tokens, which is the length here.'
    """
    return (
        f"These layers see no farther than their window, {seen:,} tokens, which is the length here."
    )


def _share(unseen: float) -> str:
    """Return a share of angles as text, which is 0.0% only if there is none."""
    return "less than 0.1%" if ROUNDING < unseen < 5e-4 else f"{unseen:.1%}"


def _sentences(result: Reach) -> Iterator[str]:
    """Yield the numbers in sentences, with what they do not mean."""
    length, trained = counted(result.length, "token"), counted(result.trained, "token")
    if result.first_failure is None:
        yield (
            "Attention prefers a similar key to a random one at every distance up to "
            f"{length} (B_m >= 0); least at {result.lowest_distance:,}, where "
            f"{result.lowest:.3f} of the preference at distance 0 is left."
        )
    else:
        yield (
            f"Attention does not prefer a similar key to a random one at {result.failures:,} of "
            f"{result.length:,} distances (B_m < 0), first at {result.first_failure:,} tokens. "
            "That is an average over independent channels, not a limit: many good models are "
            "trained past it and learn what RoPE alone does not give them. If retrieval over "
            "such distances is weak, suspect RoPE first."
        )
    if result.still_pairs:
        yield f"{result.still_pairs:g} pairs of channels are not rotated, at any distance."
    if not result.never_turning:
        yield f"Every pair made a whole turn in the {trained} of training."
    else:
        share, is_new = _share(result.unseen), result.unseen > ROUNDING
        new = (
            f"{share} of the angles up to {length} did not occur" if is_new else
            f"every angle up to {length} occurred"
        )  # fmt: skip
        yield (
            f"{result.never_turning} of {result.pairs} pairs made less than one turn in the "
            f"{trained} of training (critical dimension {result.critical_dimension}); "
            f"{new} in training."
        )
        if is_new:
            yield "The model can learn these only by fine-tuning at that length."
    if result.float32_positions < result.length:
        yield _of_float32(result)


def _of_float32(result: Reach) -> str:
    return (
        f"Angles computed in float32 may be off by more than {TOLERANCE:g} rad beyond position "
        f"{result.float32_positions:,}; exact angles take no more time."
    )
