"""Recommends a base to train with, or a scaling to add, so that a model reaches a context."""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from itertools import count

from .analysis.bounds import failures, first_failure
from .analysis.extension import Row, compare, stretched_further
from .analysis.search import min_base, safe_base
from .analysis.spectrum import before_scaling, whole_head, whole_number
from .configs import Config, choose
from .configs.hf import rotary_of
from .configs.hf_writing import as_model_reads, model_keys, rope_keys
from .reach import lengths, visible
from .recommendation import Plan as Plan
from .recommendation import Recommendation as Recommendation
from .recommendation import of_bases, sentences
from .spec import Rotary

MAX_CONTEXT = 2**20  # beyond it the certified search takes many minutes
_MIN_BASE_SHARE = 0.2  # of the time; the search for the safe base takes the rest
UNSEEN = 0.01  # share of angles not seen in training, above which another method is preferred


def recommend(
    context: int,
    spec: Rotary,
    trained: int,
    *,
    advertised: int | None = None,
    nope_head_dim: int = 0,
) -> Recommendation:
    """Recommend how trained weights reach `context` tokens, without the slow search for bases.

    The recommendation is that of `plan` for trained weights; so are the arguments and errors.
    nope_head_dim  channels of a head beside those of `spec`: qk_nope_head_dim of latent attention

    >>> found = recommend(32768, Rotary(head_dim=128), 4096)  # Llama 2
    >>> found.action, found.recommended.schedule, found.recommended.params["factor"]
    ('scaling', 'yarn', 8.0)
    """
    _check(context, spec)
    reached = _reached(spec, trained, advertised)
    if context <= reached:
        kept = _recommendation(context, trained, spec, spec, nope_head_dim=nope_head_dim)
        length = max(context, advertised or trained)  # LongRoPE's attention factor is from it
        return kept._replace(rope_parameters=rope_keys(spec, length))
    original = before_scaling(spec)
    if original.schedule == "custom":
        raise ValueError(
            "plan cannot stretch LongRoPE whose short_factor and long_factor are equal: the "
            "weights were trained with these factors; `rotary reach` has the numbers of this RoPE"
        )
    options: tuple[Row, ...] = ()
    if original.schedule == "default":  # no method stretches linear, ntk and proportional
        plain = dataclasses.replace(original, axes=())
        options = tuple(compare(plain, trained, context, nope_head_dim=nope_head_dim))
    recommended = _scaled(spec, context, context / reached, options)
    return _recommendation(context, trained, spec, recommended, options, nope_head_dim)


def plan(
    context: int,
    spec: Rotary,
    trained: int | None = None,
    *,
    advertised: int | None = None,
    progress: Callable[[float], None] | None = None,
    executor: Executor | None = None,
) -> Plan:
    """Recommend a base or a scaling with which `spec` reaches `context` tokens.

    trained     the trained length of the weights; None before any training
    advertised  the length the model reaches as it is; default `trained`. For a yarn spec it is at
                least factor * original_max_position_embeddings
    progress    called with the share of the search that is done, 0 .. 1
    executor    where the search runs, as in `min_base`; default threads
    Without weights it recommends a base: the smallest one of two digits above `safe_base`. For
    trained weights it recommends a scaling: the method they have, with a larger factor; or else the
    first of yarn, llama3 and linear with at most 1% unseen angles, preferably one that keeps the
    frequency of the fastest pair.
    The bases are those of a plain spectrum with this head_dim and rotary_dim (arXiv 2405.14591).
    Raises ValueError for a context outside 2 .. 2^20, for a spec of schedule axial or custom, for
    trained weights of a schedule that no config of transformers says, and for a larger context than
    that of LongRoPE whose factors for short and long sequences are equal.

    >>> found = plan(32768, Rotary(head_dim=128), trained=4096)  # Llama 2
    >>> found.action, found.recommended.schedule, found.recommended.params["factor"]
    ('scaling', 'yarn', 8.0)
    """
    _check(context, spec)
    advice = None if trained is None else recommend(context, spec, trained, advertised=advertised)
    return _with_bases(context, spec, advice, progress, executor)


def recommend_model(
    config: object, context: int, layer_type: str | None = None, *, part: str | None = None
) -> Recommendation:
    """Recommend how a trained model reaches `context` tokens, without the slow search for bases.

    The recommendation is that of `plan_model`; so are the arguments and errors.

    >>> llama = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096}
    >>> recommend_model(llama, 8192).recommended.params["factor"]
    2.0
    """
    entry = choose(config, layer_type, part)
    spec = rotary_of(entry)
    if spec is None:
        where = "this config" if layer_type is None else f"layer type {layer_type!r}"
        raise ValueError(f"{where} has no rotation")
    trained, advertised = lengths(spec, entry)
    if trained is None:
        raise ValueError("the config has no max_position_embeddings, the trained length")
    return recommend_layers(entry, spec, context, trained, advertised)


def recommend_layers(
    entry: Config, spec: Rotary, context: int, trained: int, advertised: int | None
) -> Recommendation:
    """Recommend how layers of a model, of which `entry` is the config, reach `context` tokens.

    spec, trained, advertised  as in `recommend`; they may differ from those of the config
    """
    _check(context, spec)
    seen = max(2, visible(context, entry))
    advice = recommend(
        seen, spec, trained, advertised=advertised, nope_head_dim=entry.nope_head_dim
    )
    length = context
    if advice.action == "keep" and entry.context:
        length = entry.context if spec.depends_on_length else max(context, entry.context)
    read = as_model_reads(entry, advice.recommended, length)
    reason = advice.reason
    if seen < context:
        reason += f" These layers see no farther than their window, {seen:,} tokens."
    if read.schedule != (name := advice.recommended.schedule):
        reason += f" This model does not read {name}: the keys say it as {read.schedule}."
    if advice.action != "keep" and entry.is_by_layer_type:
        reason += f" The keys go into the entry of {entry.layer_type!r} in its rope_parameters."
    elif advice.action != "keep" and entry.model_type != entry.file_type:
        reason += f" The keys go into the part with model_type {entry.model_type!r}."
    return advice._replace(rope_parameters=model_keys(entry, read, length), reason=reason)


def plan_model(
    config: object,
    context: int,
    layer_type: str | None = None,
    *,
    part: str | None = None,
    progress: Callable[[float], None] | None = None,
    executor: Executor | None = None,
) -> Plan:
    """Return the plan for a trained model, from its config; arguments as in `from_hf_config`.

    `rope_parameters` of the result keeps what else the model reads beside the schedule, and
    has head_dim only if transformers needs it and the config has none. Layers with a sliding
    window need to reach no farther than that: the result is for this `context`.
    Raises ValueError as `plan`, and if the model cannot read what would be recommended.

    >>> llama = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 512}
    >>> plan_model(llama, 1024).rope_parameters["max_position_embeddings"]
    1024
    """
    advice = recommend_model(config, context, layer_type, part=part)  # fails before the search
    return _with_bases(advice.context, advice.spec, advice, progress, executor)


def _with_bases(
    context: int, spec: Rotary, advice: Recommendation | None,
    progress: Callable[[float], None] | None, executor: Executor | None,
) -> Plan:  # fmt: skip
    """Search both bases, and return them with the advice; without weights, advise the safe one."""
    tell = progress or (lambda share: None)
    head = spec.head_dim + (advice.nope_head_dim if advice else 0)
    rotary_dim = spec.rotary_dim
    least = min_base(
        context, head, rotary_dim=rotary_dim, executor=executor,
        progress=lambda share: tell(_MIN_BASE_SHARE * share),
    )  # fmt: skip
    safe = safe_base(
        context, head, rotary_dim=rotary_dim, executor=executor, start=least.base,
        progress=lambda share: tell(_MIN_BASE_SHARE + (1 - _MIN_BASE_SHARE) * share),
    )  # fmt: skip
    if advice is None:
        advice = _recommendation(context, None, spec, _with_base(context, spec, safe.base))
    result = Plan(**advice._asdict(), min_base=least, safe_base=safe)
    if result.action == "keep":
        return result
    return result._replace(reason=f"{result.reason} {of_bases(result)}".rstrip())


def _check(context: int, spec: Rotary) -> None:
    whole_number("context", context, 2, MAX_CONTEXT)
    if spec.schedule in ("axial", "custom"):
        raise ValueError(
            f"plan works for the schedules of text models, and this spec has {spec.schedule!r}; "
            "see `rotary reach` for its numbers"
        )


def _recommendation(
    context: int, trained: int | None, spec: Rotary, recommended: Rotary,
    options: tuple[Row, ...] = (), nope_head_dim: int = 0,
) -> Recommendation:  # fmt: skip
    """Build a recommendation, with the failures of the present spec."""
    failing = failures(whole_head(spec, nope_head_dim), context, seq_len=context)
    action = "keep" if recommended == spec else "base" if trained is None else "scaling"
    first = int(failing[0]) if len(failing) else None
    keys = rope_keys(recommended, context)
    result = Recommendation(
        context, trained, spec, action, recommended, first, len(failing), options, keys, "",
        nope_head_dim,
    )  # fmt: skip
    return result._replace(reason=" ".join(sentences(result)))


def _with_base(context: int, spec: Rotary, safe: float) -> Rotary:
    """Return the spec, unscaled, if its base is safe and passes; else with the next that does."""
    failure = partial(first_failure, limit=context, seq_len=context)
    plain = dataclasses.replace(spec, schedule="default", params={})
    if spec.base >= safe and failure(plain) is None:
        return plain
    exponent = math.floor(math.log10(safe)) - 1
    raised = (
        dataclasses.replace(plain, base=float(f"{digits}e{exponent}"))
        for digits in count(math.ceil(safe / 10.0**exponent))
    )
    return next(each for each in raised if failure(each) is None)


def _reached(spec: Rotary, trained: int, advertised: int | None) -> int:
    """Return the length that trained weights reach as they are."""
    reached = whole_number("trained", trained)
    if advertised is not None:
        reached = whole_number("advertised", advertised)
    if spec.schedule != "yarn":  # the factor of llama3 is no ratio of lengths: 8 and 32 say 16
        return reached
    # a config may say the length before the scaling, as Qwen2.5's instructions for YaRN do
    covered = spec.params["factor"] * spec.params["original_max_position_embeddings"]
    return max(reached, int(covered))


def _scaled(spec: Rotary, context: int, growth: float, options: tuple[Row, ...]) -> Rotary:
    """Return the weights' own method with a larger factor; for plain ones, the best option."""
    if "factor" in spec.params and spec.schedule not in ("dynamic", "longrope"):
        return stretched_further(spec, growth)
    if spec.schedule == "proportional":
        return dataclasses.replace(spec, params={**spec.params, "factor": growth})
    by_method = {option.method: option for option in options}
    best = min(  # unseen angles count first, then a fastest pair that is slowed down
        (by_method[name] for name in ("yarn", "llama3", "linear")),
        key=lambda option: (option.unseen > UNSEEN, option.fastest_ratio < 0.99),
    )
    return dataclasses.replace(best.spec, axes=spec.axes)
