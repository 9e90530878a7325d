"""Write the tables in docs/results: `python tools/make_results.py [NAME ...]`, all without a name.

table2, heads: the smallest bases of Men et al.; counts: their Table 4; figure2: the decay curve of
RoFormer; models: the reach of published models. All take a few minutes on two cores.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from rotary import Rotary
from rotary.analysis.bounds import failures, first_failure
from rotary.analysis.decay import decay_curve
from rotary.analysis.search import MinBase, SafeBase, min_base, rounded_up, safe_base
from rotary.reach import Reach, reaches

ROOT = Path(__file__).parent.parent / "docs"
RESULTS = ROOT / "results"
CONFIGS = ROOT.parent / "tests" / "configs"
K = 1024
MEN = "Men et al., [Base of RoPE Bounds Context Length](https://arxiv.org/abs/2405.14591)"

# thousands of tokens -> the base of Table 2 of Men et al., and of Su's post 18 (kexue.fm/10122)
PUBLISHED = {
    1: (4.3e3, 4.3e3), 2: (1.6e4, 1.2e4), 4: (2.7e4, 2.7e4), 8: (8.4e4, 8.4e4),
    16: (3.1e5, 2.3e5), 32: (6.4e5, 6.3e5), 64: (2.1e6, 2.1e6), 128: (7.8e6, 4.9e6),
    256: (3.6e7, 2.4e7), 512: (6.4e7, 5.8e7), 1024: (5.1e8, 6.5e7),
}  # fmt: skip
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
HEAD_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
FIGURE_2 = {
    "distances": (0, 1, 10, 50, 100, 250, 1000, 10_000),
    "bases": (1.0, 1e2, 1e4, 5e5, 1e6, 1e12),
}


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def found(
    context: int, head_dim: int, bar: Progress, safe: bool
) -> tuple[MinBase, SafeBase | None]:
    """The smallest and the safe base of a context, with a bar for each."""

    def searched(text: str, search: Callable[..., Any], **start: float) -> Any:
        task = bar.add_task(f"{text}, {context:,} tokens, head_dim {head_dim}", total=1.0)
        result = search(
            context, head_dim, progress=lambda share: bar.update(task, completed=share), **start
        )
        bar.update(task, completed=1.0, visible=False)
        return result

    least = searched("smallest base", min_base)
    return least, searched("safe base", safe_base, start=least.base) if safe else None


def label(thousands: int) -> str:
    """64k, 1M."""
    return f"{thousands}k" if thousands < K else f"{thousands // K}M"


def published(base: float) -> str:
    """4.3e3: a base of two digits, as its authors print it."""
    return f"{base:.1e}".replace("e+0", "e")


def passing(base: float, context: int, head_dim: int = 128, digits: int = 4) -> str:
    """6.019e3: a base that passes, rounded up, so that it passes as it is printed."""
    return f"{rounded_up(base, context, head_dim, digits=digits):e}".replace("e+", "e")


def power_law(lengths: list[int], bases: list[float]) -> str:
    """`a x^c`, fitted to logarithms by least squares."""
    slope, offset = np.polyfit(np.log(lengths), np.log(bases), 1)
    return f"{np.exp(offset):.4f} x^{slope:.3f}"


def table2(bar: Progress) -> Iterator[str]:
    """Table 2 of Men et al.: the smallest base of a context, certified."""
    rows, bases = [], []
    for thousands, (paper, su) in PUBLISHED.items():
        context = K * thousands
        best, safe = found(context, 128, bar, safe=True)
        decimal, _ = found(1000 * thousands, 128, bar, safe=False)
        bases.append(best.base)
        failing = first_failure(Rotary(head_dim=128, base=paper), context)
        rows.append(
            [
                label(thousands), published(paper), f"{failing:,}" if failing else "none",
                published(su), f"**{passing(best.base, context, digits=9)}**",
                f"{paper / best.base:.2f}", f"{best.binding:,}", f"{best.next_failing:,}",
                best.undecided, passing(safe.base, context), f"{safe.passing_share:.2f}",
                passing(decimal.base, 1000 * thousands, digits=9),
            ]
        )  # fmt: skip
    yield "# The smallest base for a context: Table 2 of Men et al."
    yield ""
    yield from (
        f"{MEN}, define it (Eq. 11) as the smallest base b at which a token that is like the query",
        "scores on average no lower than a random one at every distance m = 1 .. L:",
        "B_m(b) = sum_i cos(m b^(-2i/d)) >= 0. Here d = 128, and k = 1024; the last column has",
        "k = 1000. Su is [post 18](https://kexue.fm/archives/10122), found independently.",
        "",
        "b* is the infimum, from above: it passes, and every base below is proved to fail, but for",
        "the intervals counted as undecided, of relative width 5e-10. Just below b* the binding",
        "distance fails; the next failing distance is the first beyond L that fails at b*. b* and",
        "the safe base are rounded up at the digits shown, and pass as they are printed, with the",
        "float64 frequencies of the base. In float32, as in models, one so near b* may fail.",
        "",
    )
    heads = [
        "L", "paper", "first failure of the paper's base", "Su", "b\\*", "paper / b\\*",
        "binding m", "next failing m", "undecided", "safe base", "share passing", "b\\*, k = 1000",
    ]  # fmt: skip
    yield from table(heads, rows)
    lengths = [K * thousands for thousands in PUBLISHED]
    papers = [paper for paper, _ in PUBLISHED.values()]
    yield from (
        "",
        "- A larger base is not always better. On a grid of ln b from b* to 12 b*, and on while",
        "  its last tenth has a failing base, the safe base is the one above the largest that",
        "  fails, and the share is of those that pass. Steps are 1e-5 up to 8k tokens, 2e-4 at",
        "  128k and 2e-3 at 1M. The grid is not certified.",
        "- Two digits of Su's table are right at every length. The paper's table is a loose upper",
        "  value at 2k, 16k and from 128k on; rounded to two digits some bases fail before L,",
        "  so do not take them for valid bases.",
        "- Power laws fitted to all eleven lengths x, in tokens:",
        f"  b* = {power_law(lengths, bases)}; the paper's table",
        f"  {power_law(lengths, papers)}, printed there as 0.0424 x^1.628.",
    )


def heads(bar: Progress) -> Iterator[str]:
    """The smallest base for other head sizes."""
    results = {
        (thousands, head_dim): found(K * thousands, head_dim, bar, safe=thousands <= 32)
        for thousands in HEAD_LENGTHS
        for head_dim in HEAD_DIMS
    }

    def rows(cell: Callable[[int, int, MinBase, Any], str], upto: int) -> list[list[str]]:
        return [
            [label(k), *(cell(K * k, d, *results[k, d]) for d in HEAD_DIMS)]
            for k in HEAD_LENGTHS
            if k <= upto
        ]

    def smallest(context: int, head_dim: int, best: MinBase, _: Any) -> str:
        return passing(best.base, context, head_dim, digits=7)

    def distances(context: int, head_dim: int, best: MinBase, _: Any) -> str:
        return f"{best.binding:,}; {best.next_failing:,}"

    def safe(context: int, head_dim: int, best: MinBase, above: SafeBase) -> str:
        return f"{passing(above.base, context, head_dim)} ({above.passing_share:.2f})"

    columns = ["L", *(f"d = {head_dim}" for head_dim in HEAD_DIMS)]
    undecided = sum(best.undecided for best, _ in results.values())
    yield "# The smallest base for a context, by head_dim"
    yield ""
    yield from (
        "The certified infimum b* of [table2.md](table2.md) for other head sizes d, whole head",
        "rotated, k = 1024. A narrow head mostly needs a larger base: few pairs average less well.",
        "All bases here are rounded up at the digits shown, and pass as they are printed.",
        f"Undecided intervals in all of these searches: {undecided}.",
        "",
    )
    yield from table(columns, rows(smallest, 128))
    yield from ("", "Binding distance, and the next that fails at b*:", "")
    yield from table(columns, rows(distances, 128))
    yield from (
        "",
        "Above the largest failing base of a grid from b* to 12 b* or more, with the share that",
        "passes; not certified:",
        "",
    )
    yield from table(columns, rows(safe, 32))


def counts(bar: Progress) -> Iterator[str]:
    """Table 4 of Men et al.: how many distances fail."""
    pairs = np.arange(64)
    larger = (1e4 * 8 ** (128 / 88)) ** (-pairs / 64)
    mixed = np.where(pairs < 44, larger, 1e4 ** (-pairs / 64) / 8)
    specs = {
        "pairs below 44 of base 1e4 * 8^(128/88), the others of 1e4 interpolated by 8": Rotary(
            head_dim=128, schedule="custom", params={"inv_freq": mixed}
        ),
        "base 5e6": Rotary(head_dim=128, base=5e6),
        "base 1e4 (Llama 2)": Rotary(head_dim=128),
        "base 5e5 (Llama 3)": Rotary(head_dim=128, base=5e5),
    }
    rows = []
    for what, spec in bar.track(specs.items(), description="counts"):
        below = [len(failures(spec, thousands * K)) for thousands in (15, 30)]
        rows.append([what, *(f"{count:,}" for count in below), f"{first_failure(spec):,}"])
    yield "# How many distances fail: Table 4 of Men et al."
    yield ""
    yield from (
        f"{MEN}, compare two ways to take Llama 2 from 4k to 32k that show the model no angle it",
        "has not seen. The first keeps every frequency within the range of training and is the",
        "first row here: 97 and 2554 distances with B_m < 0. The other has none, as base 5e6 has.",
        "The header of the paper's table says B >= 0 over these counts; they are those with B < 0.",
        "",
        "Distances with B_m < 0, of 1 .. 15k and 1 .. 30k with k = 1024:",
        "",
    )
    yield from table(["frequencies, d = 128", "below 15k", "below 30k", "first failure"], rows)


def figure2(bar: Progress) -> Iterator[str]:
    """Figure 2 of RoFormer: the factor of the bound that decays with distance."""
    distances, bases = FIGURE_2["distances"], FIGURE_2["bases"]
    rows = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "base 1 gives")
        for base in bar.track(bases, description="figure 2"):
            curve = decay_curve(Rotary(head_dim=128, base=base), distances)
            rows.append([f"{base:g}", *(f"{value:.3f}" for value in curve)])
    yield "# Decay with distance: figure 2 of RoFormer"
    yield ""
    yield from (
        "[RoFormer](https://arxiv.org/abs/2104.09864), section 3.4.3, bounds the score of two",
        "tokens by a factor that depends on the distance alone, the mean of |S_j| over j = 1 .. n",
        "with S_j = sum_{i<j} e^{i m theta_i}. Its figure 2 draws that for base 10 000 and",
        "distances up to 250. Here d = 128, so all start at (n + 1) / 2 = 32.5.",
        "",
    )
    yield from table(["base", *(f"m = {distance:,}" for distance in distances)], rows)
    yield from (
        "",
        "- Base 1 has one frequency and no decay at all; a very large base decays slowly.",
        "- The curves wiggle: at base 1e6 the value at 250 is above that at 100.",
        "- It is a bound, and a loose one: a score can be large at any distance.",
    )


def models(bar: Progress) -> Iterator[str]:
    """How far the RoPE of published models reaches."""
    rows = []
    for path in bar.track(sorted(CONFIGS.glob("*.json")), description="models"):
        try:
            layers = reaches(path)
        except ValueError:  # not one rotation of a text, or a length is nowhere said
            continue
        rows += [model_row(path.stem, kind, layer) for kind, layer in layers.items() if layer]
    failing = sum(row[7] != "0" for row in rows)
    yield "# How far published models reach"
    yield ""
    yield from (
        "A diagnostic, and no verdict on a model. F is the first distance at which a token that is",
        "like the query no longer scores higher, on average over independent channels, than a",
        f"random one (B_m < 0; {MEN}).",
        f"**Many good models violate the bound**: {failing} of the {len(rows)} rows here do below",
        "their advertised length, and trained queries and keys make up for it. Where B is negative",
        "is where to look first if retrieval over such distances is weak.",
        "",
        "F, the failures and the lowest are after scaling, the critical dimension is before it.",
        "F is searched up to 2^20. The length is max_position_embeddings, or the window of a layer",
        "with a sliding window; rows that depend on it are scaled for it. Lowest is the smallest",
        "B_m / n up to that length, 1 at distance 0. Channels that are not rotated count as pairs",
        "that stand still; those of latent attention (DeepSeek, Kimi) beside the rotated part of a",
        "head count too. The critical dimension counts the channels that turn more than once in",
        "the length before any scaling. Configs are those of [models.md](../models.md).",
        "",
    )
    heads = [
        "model", "layers", "rotated channels", "base", "schedule", "length", "F",
        "failures below the length", "lowest", "critical dimension",
    ]  # fmt: skip
    yield from table(heads, rows)


def model_row(name: str, kind: str | None, layer: Reach) -> list[str]:
    """The cells of one layer type."""
    spec = layer.head
    first = first_failure(spec, 2**20, seq_len=layer.length)
    factor = spec.params.get("factor")
    return [
        name, kind or "", f"{spec.rotary_dim} of {spec.head_dim}", f"{spec.base:,.0f}",
        f"{spec.schedule} x {factor:g}" if factor else spec.schedule, f"{layer.length:,}",
        f"{first:,}" if first else "none", f"{layer.failures:,}", f"{layer.lowest:.3f}",
        str(layer.critical_dimension),
    ]  # fmt: skip


PAGES = {"table2": table2, "heads": heads, "counts": counts, "figure2": figure2, "models": models}


def main(names: list[str]) -> None:
    """Write the pages of these names, or all."""
    unknown = sorted(set(names) - set(PAGES))
    if unknown:
        sys.exit(f"no page {unknown[0]!r}; there are {', '.join(PAGES)}")
    RESULTS.mkdir(exist_ok=True)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for name in names or PAGES:
            title, *lines = PAGES[name](bar)
            command = f"Written by `python tools/make_results.py {name}`."
            text = "\n".join([title, "", command, *lines])
            (RESULTS / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PAGES)}; default: all")
    main(parser.parse_args().names)
