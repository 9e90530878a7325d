"""What `plan` recommends, as a record and in words."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from .analysis.extension import Row, unseen_share
from .analysis.search import MinBase, SafeBase, rounded_up
from .spec import Rotary
from .strict_json import JSON


class Plan(NamedTuple):
    """What `plan` recommends; lengths and distances are in tokens.

    context        the length to be reached
    trained        the trained length, None before any training
    spec           the present RoPE
    action         "keep", "base" (train with another base) or "scaling" (of trained weights)
    recommended    the RoPE to use
    first_failure  the first distance up to `context` with B_m < 0 under `spec`, or None
    failures       how many distances up to `context` have B_m < 0 under `spec`
    min_base       the smallest base with B_m >= 0 up to `context`
    safe_base      the base above which all bases that were tested pass
    options        every method of `analysis.extension`, compared; none for weights that were
                   trained with linear, ntk or proportional, which get a larger factor
    rope_parameters  the keys of config.json that give `recommended` in transformers: as longrope
                     if the model does not read its schedule
    reason         the reason, in sentences
    nope_head_dim  channels of a head beside those of `spec`, not rotated: they count in B_m, and so
                   in all failures and bases (qk_nope_head_dim of latent attention)
    """

    context: int
    trained: int | None
    spec: Rotary
    action: str
    recommended: Rotary
    first_failure: int | None
    failures: int
    min_base: MinBase
    safe_base: SafeBase
    options: tuple[Row, ...]
    rope_parameters: dict[str, JSON]
    reason: str
    nope_head_dim: int

    @property
    def head_dim(self) -> int:
        """Channels of a head, with those that `spec` does not have."""
        return self.spec.head_dim + self.nope_head_dim

    def shown(self, base: float) -> str:
        """Return a base as text of 6 digits or more, rounded up so that the number shown passes.

        >>> from rotary.plan import plan
        >>> found = plan(1024, Rotary(head_dim=64))
        >>> found.shown(found.min_base.base)
        '7,752.99'
        """
        rotary_dim = self.spec.rotary_dim
        return f"{rounded_up(base, self.context, self.head_dim, rotary_dim=rotary_dim):,f}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the recommendation and both bases as text: the first table of `rotary plan`.

        >>> from rotary.plan import plan
        >>> plan(1024, Rotary(head_dim=64)).rows()[1]
        ('first B_m < 0 now', 'distance 725')
        """
        first, safe, spec = self.first_failure, self.safe_base, self.recommended
        numbers = [f"{name} {value:g}" for name, value in spec.params.items()
                   if isinstance(value, int | float)]  # fmt: skip
        how = ", ".join([f"{self.action}: {spec.schedule}", f"base {spec.base:,.15g}", *numbers])
        least = self.shown(self.min_base.base)
        return [
            ("recommended", how),
            ("first B_m < 0 now", "none" if first is None else f"distance {first:,}"),
            ("smallest base", f"{least}, certified for head_dim {self.head_dim}, rounded up"),
            ("safe base", f"{self.shown(safe.base)}; of the bases tested, evenly in ln b up to "
                          f"{safe.searched_to:,.0f}, {safe.passing_share:.0%} pass"),
        ]  # fmt: skip

    def to_dict(self) -> dict[str, JSON]:
        """Return all fields as JSON-ready data, with the two bases as numbers of full precision.

        >>> from rotary.plan import plan
        >>> found = plan(1024, Rotary(head_dim=64)).to_dict()
        >>> round(found["min_base"], 1), found["recommended"]["base"] >= found["safe_base"]
        (7753.0, True)
        """
        return {
            **self._asdict(),
            "spec": self.spec.to_dict(),
            "recommended": self.recommended.to_dict(),
            "min_base": self.min_base.base,
            "min_base_certificate": self.min_base._asdict(),
            "safe_base": self.safe_base.base,
            "safe_base_search": self.safe_base._asdict(),
            "options": [{**each._asdict(), "spec": each.spec.to_dict()} for each in self.options],
        }


class Recommendation(NamedTuple):
    """What `recommend` returns for trained weights: the fields of `Plan` without the bases."""

    context: int
    trained: int | None
    spec: Rotary
    action: str
    recommended: Rotary
    first_failure: int | None
    failures: int
    options: tuple[Row, ...]
    rope_parameters: dict[str, JSON]
    reason: str
    nope_head_dim: int


def sentences(result: Recommendation) -> Iterator[str]:
    spec, context = result.spec, result.context
    as_it_is = f"With the present RoPE (base {spec.base:,.15g}, {spec.schedule})"
    if result.first_failure is None:
        yield (
            f"{as_it_is} attention prefers a similar key to a random one at every distance up to "
            f"{context:,} tokens (B_m >= 0)."
        )
    else:
        yield (
            f"{as_it_is} attention does not prefer a similar key to a random one at "
            f"{result.failures:,} of {context:,} distances (B_m < 0), first at "
            f"{result.first_failure:,} tokens."
        )
    if result.action == "scaling":
        yield from _of_scaling(result)
    elif result.trained is not None:
        is_scaled = context > result.trained
        how = "reaches this context as it is" if is_scaled else "was trained for this context"
        yield f"The model {how}: keep its RoPE."
    elif result.action == "keep":
        yield "Keep the base: it passes, and so does every larger base tested."
    if result.first_failure is not None or result.action != "keep":
        yield (
            "The bound is an average over independent channels, not a hard limit: many good models "
            "are below it, and a base above it guarantees nothing. Measure retrieval at the length "
            "you need, not perplexity."
        )


def of_bases(result: Plan) -> str:
    """Describe the bases that pass: to train with, or larger than the present one; "" for none."""
    spec, head_dim = result.spec, result.head_dim
    least, safe = result.shown(result.min_base.base), result.shown(result.safe_base.base)
    if result.action == "scaling" and spec.base >= result.safe_base.base:
        return ""  # no larger base is needed
    if result.action == "scaling":
        smallest = f"the smallest rope_theta that passes is {least} (certified, rounded up), and "
        return (
            "If you can train for long on long documents, you may raise the base instead: "
            f"{smallest * (spec.base < result.min_base.base)}every base tested from {safe} on "
            "passes."
        )
    share = "" if spec.rotary_dim == head_dim else f" of which {spec.rotary_dim} are rotated"
    return (
        f"The smallest base that passes at every distance, with head_dim {head_dim}"
        f"{share}, is {least} (certified, rounded up). Some larger bases fail again; every "
        f"base tested from {safe} on passes. Train with rope_theta "
        f"{result.recommended.base:,.15g}, which passes at every distance."
    )


def _share(unseen: float) -> str:
    """Return a share of angles as text, which is 0% only if the table of all methods says 0.0%."""
    return "less than 1%" if 5e-4 < unseen < 5e-3 else f"{unseen:.0%}"


def _of_scaling(result: Recommendation) -> Iterator[str]:
    name, factor = result.recommended.schedule, result.recommended.params["factor"]
    schedule, context, trained = result.spec.schedule, result.context, result.trained
    scaled = "" if schedule == "default" else f"; the config scales them by {schedule}"
    yield f"The weights were trained at {trained:,} tokens{scaled}."
    if schedule == "linear":  # Gemma 3 writes the length that it reaches, Vicuna the one before
        old = f"{result.spec.params['factor']:g}"
        yield (
            f"The config does not say whether that is the length before the factor {old} or the "
            f"one it reaches; the latter is assumed. If it is the former, plan for a context {old} "
            "times smaller."
        )
    plain = next((option for option in result.options if option.method == "none"), None)
    if plain is not None and trained is not None:
        # the options have the factor context / trained, and the recommended one may have another
        chosen = dataclasses.replace(result.recommended, axes=())
        unseen = unseen_share(plain.spec, trained, chosen, context - 1, context)
        yield (
            f"Without scaling, {_share(plain.unseen)} of the angles at {context:,} tokens did not "
            f"occur in training, with {name} {_share(unseen)}."
        )
        if plain.unseen < 5e-4:
            yield "No angle is new at this length, so measure the model without scaling first."
    yield (
        f"Use {name} with factor {factor:g}. If you can, fine-tune on long documents (a few "
        "hundred steps are common); without it expect some loss."
    )
    if factor > 40:
        yield "Few models use a factor above 40: consider several steps, with tuning in between."
