"""Pictures show the numbers of the analysis, say their units, and are written whole."""

import dataclasses
import functools
import hashlib
import itertools
import os
import re
import stat
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from programs import alone
from published import LLAMA_2, LLAMA_3_1, longrope, scaled

from rotary import Rotary, analysis, inv_freq, plots, positions, schedules
from rotary.analysis import bounds, extension, precision, search, spectrum
from rotary.analysis import decay as decay_numbers
from rotary.layouts import row_permutation
from rotary.plots import files, points, reach, style
from rotary.plots.dark import night

SPECS = {
    "plain": Rotary(head_dim=16),
    "clockwise, interleaved": Rotary(head_dim=16, layout="interleaved", sign=-1),
    "llama3": LLAMA_3_1,
    "yarn": scaled("yarn", 64, 4.0, 2048),
    "longrope": longrope(4.0, 512, [1.0] * 4, [2.0, 2.0, 4.0, 4.0]),
    "partial": Rotary(head_dim=96, rotary_dim=24, start=8),
    "M-RoPE": Rotary(head_dim=16, base=1e6, axes=positions.sections(2, 3, 3)),
    "axial": Rotary(
        head_dim=32,
        base=100.0,
        schedule="axial",
        params={"num_axes": 2},
        axes=positions.sections(8, 8),
    ),
    "custom": Rotary(head_dim=8, schedule="custom", params={"inv_freq": [1.0, 0.3, 0.001, 0.0]}),
    "one pair": Rotary(head_dim=2),
    "nothing moves": Rotary(head_dim=4, schedule="custom", params={"inv_freq": [0.0, 0.0]}),
}
SEVERAL = {
    "wavelengths",
    "frequency_ratio",
    "decay",
    "similarity",
    "design",
    "base_bound",
    "gallery",
}
WANTED = analysis.wanted_curve(lambda m: 1 / m, 1000)
PICTURES = {
    "wavelengths": lambda spec: plots.wavelengths(spec, trained=512, target=4096),
    "frequency_ratio": plots.frequency_ratio,
    "angle_coverage": lambda spec: plots.angle_coverage(spec, trained=512, target=2048),
    "cosine_map": plots.cosine_map,
    "decay": lambda spec: plots.decay(spec, 1000),
    "scores": lambda spec: plots.scores(spec, 200),
    "walk": plots.walk,
    "terms": lambda spec: plots.terms(spec, *vectors(spec), 7),
    "similarity": lambda spec: plots.similarity(spec, 1000),
    "design": lambda spec: plots.design(spec, WANTED),
    "base_bound": lambda spec: plots.base_bound({128: {64: 89.0, 512: 1500.0}}, specs=spec),
    "precision": lambda spec: plots.precision(spec, 4096),
    "unit_circle": lambda spec: plots.unit_circle(spec, 100, 3),
    "layout": plots.layout,
    "grid": plots.grid,
    "gallery": lambda spec: plots.gallery(spec, 1000),
    "comb": lambda spec: plots.comb(64, [10.0, 100.0, 1000.0], marks={"now": spec.base}),
    "roofline": lambda spec: plots.roofline({str(spec): [(1e6, 1e-4), (1e8, 2e-2)]}),
}  # fmt: skip
LOG = {  # of the first panel, and of the others where they have one
    "wavelengths": ("linear", "log"),
    "frequency_ratio": ("linear", "log"),
    "decay": ("log", "linear"),
    "scores": ("log", "log"),
    "similarity": ("log", "linear"),
    "design": ("log", "linear"),
    "base_bound": ("log", "log"),
    "precision": ("log", "log"),
    "roofline": ("log", "log"),
    "comb": ("log", "linear"),
    "grid": ("linear", "log"),
}
LABELS = {
    "wavelengths": ("pair", "wavelength, tokens"),
    "frequency_ratio": ("pair", "frequency / original frequency"),
    "angle_coverage": ("pair", "share of circle", "position, tokens", "share of angles never seen"),
    "cosine_map": ("position, tokens", "pair", "cosine"),
    "decay": ("distance, tokens", "mean |S_j|, pairs"),
    "scores": ("distance, tokens", "score / sqrt(head_dim)"),
    "walk": ("real part, pairs", "imaginary part, pairs"),
    "terms": ("pair", "term of the score", "sum of the terms"),
    "similarity": ("distance, tokens", "advantage, B_m / B_0"),
    "design": ("distance, tokens", "advantage, B_m / B_0"),
    "base_bound": ("context or first failure, tokens", "base"),
    "precision": ("position, tokens", "largest error of cos or sin"),
    "layout": (
        "channel of a head, coloured by its pair",
        "row before, half",
        "row after, interleaved",
    ),
    "grid": ("pair", "wavelength, tokens", "token", "position"),
    "gallery": ("wavelength, log10 of tokens",),
    "comb": ("base",),
    "roofline": ("bytes read and written", "time, s"),
}
NAMES = ["_hidden", "$\\frac{1}{", "a$b", "x_1^2", "<b>&amp;</b>", "%d {0}", "\\LaTeX{}"]


def vectors(spec):
    return np.random.default_rng(0).standard_normal((2, spec.head_dim))


def shown(figure):
    """Every text of a figure that is not empty."""
    return [text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))]


def legend_names(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def markers(panel, marker):
    return [line for line in panel.lines if line.get_marker() == marker]


@functools.cache
def of_plain(picture):
    return PICTURES[picture](SPECS["plain"])


@pytest.mark.parametrize("picture", sorted(set(PICTURES) - {"comb", "roofline"}))
def test_every_picture_draws_every_kind_of_spec(picture):
    """A picture of several specs draws the ordinary kinds together, one of one spec bare.

    Those of longer wavelengths alone are made and not drawn; other tests have a plain one.
    """
    alone = one_pair, _ = SPECS["one pair"], SPECS["nothing moves"]
    others = {kind: spec for kind, spec in SPECS.items() if spec not in alone}
    stretched = [others["yarn"], others["longrope"]]
    if picture not in SEVERAL:
        del others["plain"], others["llama3"]
    for each in (*alone, *([others] if picture in SEVERAL else others.values())):
        figure = PICTURES[picture](each)
        assert type(figure) is Figure
        if each in stretched:
            continue
        is_bare = each not in alone and picture not in SEVERAL
        if is_bare or each is one_pair:  # spaces and ticks are most of the work
            figure.set_layout_engine("none")
        if is_bare:
            for panel in figure.axes:
                panel.set_axis_off()
        figure.draw_without_rendering()
        assert {artist.figure for artist in figure.findobj()} == {figure}


@pytest.mark.parametrize("picture", LABELS)
def test_axes_say_what_they_hold_and_in_which_unit(picture):
    figure = of_plain(picture)
    labels = {text for panel in figure.axes for text in (panel.get_xlabel(), panel.get_ylabel())}
    assert labels - {""} == set(LABELS[picture])


@pytest.mark.parametrize("picture", LOG)
def test_scales_are_logarithmic_where_the_values_span_decades(picture):
    panel = of_plain(picture).axes[0]
    assert (panel.get_xscale(), panel.get_yscale()) == LOG[picture]


@pytest.mark.parametrize("picture", PICTURES)
def test_no_text_leaves_the_picture_and_no_legend_covers_data(picture):
    spec = {"a model with a name of fifty letters, and then some": LLAMA_3_1}
    given = LLAMA_3_1 if picture in ("comb", "terms") else spec
    figure = PICTURES[picture](given)
    figure.draw_without_rendering()
    for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize")):
        if text.get_text() and text.get_visible():
            assert text.get_fontsize() >= 8
    whole = figure.get_tightbbox()
    assert whole.x0 >= -0.01
    assert whole.y0 >= -0.01
    assert whole.x1 <= figure.get_figwidth() + 0.01
    assert whole.y1 <= figure.get_figheight() + 0.01
    for legend in figure.legends:
        for panel in figure.axes:
            assert not legend.get_window_extent().overlaps(panel.get_window_extent())


OPTIONS = {
    "wavelengths": lambda spec, **given: plots.wavelengths(spec, **given),
    "frequency_ratio": lambda spec, **given: plots.frequency_ratio(
        spec, original=Rotary(head_dim=8), **given
    ),
    "angle_coverage": lambda spec, **given: plots.angle_coverage(
        spec, trained=64, target=512, original=Rotary(head_dim=8), **{"seq_len": 0, **given}
    ),
    "cosine_map": lambda spec, **given: plots.cosine_map(spec, **given),
    "unit_circle": lambda spec, **given: plots.unit_circle(spec, 50, 9, **given),
    "terms": lambda spec, **given: plots.terms(spec, *vectors(spec["x"]), 50, **given),
    "precision": lambda spec, **given: plots.precision(
        spec, 4096, arithmetics=["float64", "exact"], **given
    ),
    "decay": lambda spec, **given: plots.decay(spec, 100, **given),
    "scores": lambda spec, **given: plots.scores(spec, 100, **given),
    "walk": lambda spec, **given: plots.walk(spec, **given),
    "similarity": lambda spec, **given: plots.similarity(spec, 100, **given),
}


def drawn(figure):
    """Every number and text that a figure draws, bit for bit, without the work of drawing it."""
    parts = []
    for artist in figure.findobj():
        match artist:
            case Line2D():
                parts.append(artist.get_xydata().tobytes())
            case Text():
                parts.append(artist.get_text())
            case Patch():
                parts.append(artist.get_path().transformed(artist.get_patch_transform()).vertices)
            case Collection():
                parts.extend(path.vertices for path in artist.get_paths())
                parts.append(artist.get_array())
            case AxesImage():
                parts.append(artist.get_array().filled(np.nan))
            case Axes():
                parts.append(artist.viewLim.get_points())
    return [
        part if isinstance(part, (str, bytes)) else np.asarray(part).tobytes() for part in parts
    ]


@pytest.mark.parametrize("picture", OPTIONS)
def test_the_length_of_the_row_reaches_the_frequencies(picture):
    draw, spec = OPTIONS[picture], SPECS["longrope"]
    values, factor = inv_freq(spec, 4096)
    same = {"inv_freq": values, "attention_factor": factor}
    as_given = Rotary(head_dim=8, schedule="custom", params=same)
    long = drawn(draw({"x": spec}, seq_len=4096))
    assert long == drawn(draw({"x": as_given}))
    assert long != drawn(draw({"x": spec}))


@pytest.mark.parametrize("picture", ["decay", "scores", "walk", "similarity"])
def test_pairs_whose_axis_does_not_move_stand_still(picture):
    draw, spec = OPTIONS[picture], Rotary(head_dim=8, axes=(0, 1, 1, 2))
    halted = np.where(np.array(spec.axes) == 1, inv_freq(spec)[0], 0.0)
    as_given = Rotary(head_dim=8, schedule="custom", params={"inv_freq": halted})
    moved = drawn(draw({"x": spec}, axes=(1,)))
    assert moved == drawn(draw({"x": as_given}))
    assert moved != drawn(draw({"x": spec}))


def test_the_numbers_of_wavelengths_and_the_critical_dimension():
    figure = plots.wavelengths({"two": LLAMA_2, "custom": SPECS["custom"]}, trained=4096)
    lines = figure.axes[0].lines
    np.testing.assert_array_equal(lines[0].get_ydata(), spectrum.wavelengths(LLAMA_2))
    assert lines[0].get_ydata()[0] == pytest.approx(2 * np.pi)
    (still,) = markers(figure.axes[0], "^")
    assert still.get_xdata().tolist() == [3]
    assert legend_names(figure) == [
        "two, critical dimension 92",
        "custom: 1 pairs stand still, critical dimension 4",
        "less than one turn in 4,096 tokens",
    ]


def test_pairs_of_several_axes_are_not_joined():
    lines = plots.wavelengths([SPECS["axial"], SPECS["plain"]]).axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["None", "-"]


def test_ratios_of_every_method_are_those_of_the_analysis():
    made = extension.methods(LLAMA_2, 4096, 32768)
    figure = plots.frequency_ratio(made, trained=4096, seq_len=32768)
    old = spectrum.frequencies(LLAMA_2)
    for line, spec in zip(figure.axes[0].lines, made.values(), strict=True):
        np.testing.assert_allclose(
            line.get_ydata(), spectrum.frequencies(spec, 32768) / old, rtol=1e-14
        )
    assert figure.axes[0].lines[1].get_ydata() == pytest.approx(1 / 8)
    band = figure.axes[0].patches[0].get_extents().transformed(figure.axes[0].transData.inverted())
    assert (band.x0, band.x1) == pytest.approx(spectrum.yarn_band(LLAMA_2, 4096))
    yarn = schedules.yarn(128, 1e4, factor=8.0, original_max_position_embeddings=4096)[1]
    assert f"yarn, attention factor {yarn:.4g}" in legend_names(figure)


def test_ratio_of_another_original_and_of_pairs_that_stand_still():
    figure = plots.frequency_ratio(SPECS["custom"], original=Rotary(head_dim=8, base=1.0 + 1e-12))
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [1, 0.3, 0.001, np.nan])


def test_coverage_and_the_strips_of_unseen_angles():
    made = extension.methods(LLAMA_2, 1024, 4096)
    chosen = {name: made[name] for name in ("none", "yarn", "longrope")}
    figure = plots.angle_coverage(chosen, trained=1024, target=4096)
    top, *strips, _ = figure.axes
    np.testing.assert_array_equal(top.lines[0].get_ydata(), extension.coverage(LLAMA_2, 1024))
    at = np.linspace(0, 4096, 256).round().astype(int)
    for panel, spec in zip(strips, chosen.values(), strict=True):
        expected = extension.unseen(LLAMA_2, 1024, spec, at, 4096)
        np.testing.assert_array_equal(panel.images[0].get_array(), expected)
        assert panel.images[0].get_extent() == [-0.5, 63.5, 0, 4096]
        assert panel.images[0].origin == "lower"
        assert panel.lines[0].get_ydata()[0] == 1024
    assert strips[0].images[0].get_array().max() > 0.5
    assert [panel.get_title(loc="left") for panel in strips] == list(chosen)


@pytest.mark.parametrize("kind", ["plain", "clockwise, interleaved", "M-RoPE", "custom"])
def test_the_map_holds_cosines(kind):
    spec = SPECS[kind]
    image = plots.cosine_map(spec, 300).axes[0].images[0].get_array()
    expected = np.cos(np.outer(spectrum.frequencies(spec), np.arange(300)))
    np.testing.assert_allclose(image, expected, atol=1e-12)


def test_a_long_map_is_thinned_and_says_so():
    panel = plots.cosine_map(LLAMA_2, 5000).axes[0]
    assert panel.get_xlabel() == "position, tokens, every 5th drawn"
    assert panel.images[0].get_extent() == [-2.5, 4997.5, 63.5, -0.5]
    assert panel.images[0].origin == "upper"
    expected = np.cos(np.outer(spectrum.frequencies(LLAMA_2), np.arange(0, 5000, 5)))
    np.testing.assert_allclose(panel.images[0].get_array(), expected, atol=1e-9)


def test_the_decay_curve_is_that_of_figure_2():
    (line,) = plots.decay(LLAMA_2, 250).axes[0].lines
    assert line.get_xdata().tolist() == list(range(1, 251))
    # mean |S_j| at 1, 10, 50, 100 and 250, of the formula in 50 digits
    published = [31.538, 17.954, 12.629, 10.227, 6.548]
    np.testing.assert_allclose(line.get_ydata()[[0, 9, 49, 99, 249]], published, atol=6e-4)


def test_the_longest_decay_curve_that_has_numbers_is_drawn():
    (line,) = plots.decay(Rotary(head_dim=2), 2**24).axes[0].lines
    assert len(line.get_xdata()) > 300
    np.testing.assert_allclose(line.get_ydata(), 1)  # one pair: a sum of one term of size 1


def test_a_long_decay_curve_shows_mean_and_extremes_of_every_bin():
    panel = plots.decay(LLAMA_2, 20_000).axes[0]
    values = np.append(np.nan, decay_numbers.decay_curve(LLAMA_2, np.arange(1, 20_001)))
    line, band = panel.lines[0], panel.collections[0].get_paths()[0].vertices
    starts = line.get_xdata()
    assert len(starts) <= points.BINS
    for start, end, mean in zip(starts, [*starts[1:], 20_001], line.get_ydata(), strict=True):
        assert mean == pytest.approx(values[start:end].mean(), rel=1e-12)
        edges = band[band[:, 0] == start, 1]
        assert edges.min() == values[start:end].min()
        assert edges.max() == values[start:end].max()


def test_scores_stay_under_their_bound_and_carry_the_amplitude():
    spec = SPECS["yarn"]
    left, right = plots.scores(spec, 300, seed=3).axes
    q, k = np.random.default_rng(3).standard_normal((2, 32, 64))
    size, bound = (line.get_ydata() for line in left.lines)
    at = left.lines[0].get_xdata()
    assert len(at) <= 256
    assert (size < bound).all()
    for index in (0, 5, len(at) - 1):
        one = [decay_numbers.score(spec, q[i], k[i], at[index], route="matrix") for i in range(32)]
        assert size[index] == pytest.approx(np.sqrt(np.mean(np.square(one))) / 8)
        limit = [decay_numbers.score_bound(spec, q[i], k[i], at[index]) for i in range(32)]
        assert bound[index] == pytest.approx(np.mean(limit) / 8)
        same = [decay_numbers.score(spec, q[i], q[i], at[index], route="matrix") for i in range(32)]
        assert right.lines[0].get_ydata()[index] == pytest.approx(np.mean(same) / 8)
    assert "attention factor 1.139" in left.get_title(loc="left")


def test_the_walk_follows_the_partial_sums():
    figure = plots.walk(LLAMA_2, [1, 100])
    paths = markers(figure.axes[0], ".")
    sums = decay_numbers.partial_sums(LLAMA_2, [1, 100])
    for line, path in zip(paths, sums, strict=True):
        np.testing.assert_array_equal(line.get_xdata() + 1j * line.get_ydata(), path)
    assert figure.axes[0].get_aspect() == 1.0
    assert legend_names(figure)[1] == f"distance 100: |S| = {abs(sums[1, -1]):.1f}"


@pytest.mark.parametrize("kind", ["plain", "partial", "clockwise, interleaved", "yarn"])
def test_terms_of_a_score_end_at_the_score(kind):
    spec = SPECS[kind]
    q, k = vectors(spec)
    top, bottom = plots.terms(spec, q, k, 11).axes
    assert bottom.lines[0].get_ydata()[-1] == pytest.approx(
        float(decay_numbers.score(spec, q, k, 11, route="matrix"))
    )
    bars = np.zeros(spec.rotary_dim // 2 + 2)
    for bar in top.patches:
        bars[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    np.testing.assert_allclose(bars[:-2], decay_numbers.pair_terms(spec, q, k, 11), atol=1e-12)
    assert bars[-1] == pytest.approx(float(decay_numbers.still_term(spec, q, k)))


def test_similarity_marks_the_first_failures():
    figure = plots.similarity({"2": LLAMA_2, "3.1": LLAMA_3_1}, 131_072)
    dots = markers(figure.axes[0], "o")
    assert [dot.get_xdata()[0] for dot in dots] == [1707, 85133]
    for dot, spec in zip(dots, (LLAMA_2, LLAMA_3_1), strict=True):
        at = int(dot.get_xdata()[0])
        value = bounds.similarity(spec, [at])[0] / 64
        assert value < 0
        assert dot.get_ydata()[0] == pytest.approx(value, abs=1e-12)
    assert legend_names(figure) == ["2: first failure 1,707", "3.1: first failure 85,133"]


def test_similarity_draws_the_lowest_of_every_bin():
    panel = plots.similarity(LLAMA_2, 50_000).axes[0]
    line = panel.lines[1]
    assert len(line.get_xdata()) <= reach.LOWEST
    values = bounds.similarity(LLAMA_2, np.arange(50_001)) / 64
    np.testing.assert_array_equal(line.get_ydata(), values[line.get_xdata()])
    where, least = bounds.lowest(LLAMA_2, 50_000)
    assert where in line.get_xdata()
    assert line.get_ydata().min() == pytest.approx(least, abs=1e-12)
    starts = points.log_bins(50_000, reach.LOWEST)
    bins = zip(line.get_xdata(), starts, [*starts[1:], 50_001], strict=True)
    for at, start, end in bins:
        assert start <= at < end
        assert values[at] == values[start:end].min()


def test_a_partial_rope_that_never_fails_says_how_far_was_searched():
    figure = plots.similarity(SPECS["partial"], 2000)
    assert legend_names(figure) == ["base 10,000, 24 of 96 channels: none to 2,000"]
    assert markers(figure.axes[0], "o") == []


@pytest.mark.parametrize("length", [4097, 65_536, 2**20])
def test_a_single_failure_is_never_hidden_by_thinning(length):
    starts = points.log_bins(length)
    assert len(starts) <= points.BINS
    assert points.spaced(length).size <= points.MAX_POINTS
    assert points.spaced(length)[[0, -1]].tolist() == [1, length]
    rng = np.random.default_rng(length)
    for at in [1, 2, length, *rng.integers(1, length, 20)]:
        values = np.ones(length + 1)
        values[at] = -1.0
        low, high = points.extremes(values, starts)
        assert at in low
        values[at] = 3.0
        low, high = points.extremes(values, starts)
        assert at in high
        assert len(low) == len(high) == len(starts)


def test_specs_stand_at_their_base_and_their_first_failure():
    table = {c: search.min_base(c).base for c in (256, 1024)}
    figure = plots.base_bound(
        {128: table}, specs={"Llama 2": LLAMA_2, "NeoX": SPECS["partial"]},
        contexts={"Llama 2": 4096},
    )  # fmt: skip
    panel = figure.axes[0]
    bound, failing, reach, end, never = panel.lines
    assert bound.get_xdata().tolist() == [256, 1024]
    np.testing.assert_array_equal(bound.get_ydata(), list(table.values()))
    assert bound.get_ydata()[1] == pytest.approx(4293.4376, abs=1e-4)
    assert (failing.get_xdata()[0], failing.get_ydata()[0]) == (1707, 1e4)
    assert list(reach.get_xdata()) == [1707, 4096]
    assert end.get_xdata()[0] == 4096
    assert (never.get_marker(), never.get_xdata()[0]) == (">", 2**20)


def test_the_comb_is_coloured_by_what_passes():
    bases = np.geomspace(3000, 7000, 400)
    panel = plots.comb(1024, bases, marks={"smallest": 4293.4376}).axes[0]
    expected = search.comb(1024, bases)
    assert set(expected.tolist()) == {True, False}
    mesh = panel.collections[0]
    np.testing.assert_array_equal(mesh.get_array().ravel(), expected)
    edges = mesh.get_coordinates()[0, :, 0]
    assert ((edges[:-1] < bases) & (bases < edges[1:])).all()
    assert panel.lines[-1].get_xdata()[0] == 4293.4376


def test_rounding_shows_the_error_near_each_position():
    figure = plots.precision(LLAMA_2, 2**20, arithmetics=["float32", "exact"])
    for line, kind in zip(figure.axes[0].lines[:2], ("float32", "exact"), strict=True):
        at = line.get_xdata()
        assert at[-1] == 2**20
        for end, value in list(zip(at, line.get_ydata(), strict=True))[::-9]:
            assert value == precision.error_near(LLAMA_2, [end], kind)[0]
    # float32 angles are off by 0.06 near a million: two roundings of half a unit each
    assert 0.03 < figure.axes[0].lines[0].get_ydata()[-1] < 0.0625 + 0.0625
    assert legend_names(figure) == ["float32", "exact"]


def test_several_specs_are_compared_in_one_arithmetic():
    figure = plots.precision({"a": LLAMA_2, "b": LLAMA_3_1}, 4096, arithmetics="float32")
    assert legend_names(figure) == ["a, float32", "b, float32"]


@pytest.mark.parametrize("kind", ["plain", "clockwise, interleaved", "custom"])
def test_arrows_point_at_the_angles(kind):
    spec = SPECS[kind]
    figure = plots.unit_circle(spec, 20, 3, pairs=[0, 2])
    for panel, pair in zip(figure.axes, (0, 2), strict=True):
        for line, position in zip(panel.lines, (20, 23), strict=True):
            angle = spec.sign * spectrum.frequencies(spec)[pair] * position
            tip = line.get_xdata()[1] + 1j * line.get_ydata()[1]
            assert tip == pytest.approx(np.exp(1j * angle), abs=1e-12)
    assert legend_names(figure) == ["position 20", "position 23"]


def test_layouts_colour_the_two_members_of_a_pair_alike():
    spec = Rotary(head_dim=12, rotary_dim=8, start=2, layout="interleaved", out_layout="half")
    half, interleaved, w_q, w_k = plots.layout(spec, num_heads=3, num_key_heads=1).axes
    masked = half.images[0].get_array()[0]
    assert masked.filled(-1).tolist() == [-1, -1, 0, 1, 2, 3, 0, 1, 2, 3, -1, -1]
    masked = interleaved.images[0].get_array()[0]
    assert masked.filled(-1).tolist() == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, -1, -1]
    assert half.get_title(loc="left") == "half, written by this spec"
    assert interleaved.get_title(loc="left") == "interleaved, read by this spec"
    for panel, heads in ((w_q, 3), (w_k, 1)):
        order = row_permutation(heads, 12, "interleaved", "half", rotary_dim=8, start=2)
        assert panel.lines[0].get_xdata().tolist() == order.tolist()
        assert panel.lines[0].get_ydata().tolist() == list(range(12 * heads))


def test_the_grid_shows_sections_and_the_positions_of_text_and_image():
    spec = SPECS["M-RoPE"]
    bands, places, _ = plots.grid(spec).axes
    for axis, line in enumerate(bands.lines):
        pairs = line.get_xdata()
        assert [spec.axes[pair] for pair in pairs] == [axis] * len(pairs)
        np.testing.assert_array_equal(line.get_ydata(), spectrum.wavelengths(spec)[pairs])
    ids = positions.mrope([("text", 6), ("image", 1, 4, 6), ("text", 6)])
    for axis, line in enumerate(places.lines):
        assert line.get_ydata().tolist() == ids[:, axis].tolist()


@pytest.mark.parametrize(("tokens", "ranks"), [(32, 4), (37, 3), (64, 8), (2, 4)])
def test_head_tail_evens_out_the_work_of_causal_attention(tokens, ranks):
    figure = plots.grid(SPECS["plain"], positions=np.arange(tokens), ranks=ranks)
    contiguous, paired = np.asarray(figure.axes[2].images[0].get_array())
    assert (np.diff(contiguous) >= 0).all()
    assert set(contiguous) <= set(range(ranks))
    assert set(paired) <= set(range(ranks))
    if tokens % (2 * ranks) == 0:
        work = [np.bincount(row, np.arange(1, tokens + 1)) for row in (contiguous, paired)]
        assert set(np.bincount(paired)) == {tokens // ranks}
        assert np.ptp(work[1]) == 0
        assert np.ptp(work[0]) > 0


def test_the_gallery_compares_models_cell_by_cell():
    figure = plots.gallery({"Llama 2": LLAMA_2, "Llama 3.1": LLAMA_3_1}, 100_000)
    panel = figure.axes[0]
    assert {"10,000", "1,707", "54,410", "500,000", "llama3 x 8", "85,133"} <= set(shown(figure))
    second = {t.get_text(): t.get_color() for t in panel.texts if t.get_position()[1] == 1}
    assert second["128"] == second["half"] == style.GREY
    assert second["500,000"] == second["85,133"] == "black"
    for image, spec in zip(panel.images, (LLAMA_2, LLAMA_3_1), strict=True):
        np.testing.assert_array_equal(image.get_array()[0], np.log10(spectrum.wavelengths(spec)))


def test_a_row_of_the_gallery_is_taken_at_its_own_length():
    spec = SPECS["longrope"]
    figure = plots.gallery({"short": spec, "long": spec}, 100, seq_len={"long": 4096})
    for image, size in zip(figure.axes[0].images, (None, 4096), strict=True):
        waves = np.log10(spectrum.wavelengths(spec, size))
        np.testing.assert_array_equal(image.get_array()[0], waves)
    assert not np.array_equal(figure.axes[0].images[0].get_array(), image.get_array())
    with pytest.raises(ValueError, match="seq_len names 'other', which is not among the specs"):
        plots.gallery({"short": spec}, 100, seq_len={"other": 4096})


def test_the_cells_of_the_gallery_do_not_overlap():
    specs = {f"a model of a long name {kind}": spec for kind, spec in SPECS.items()}
    specs["large"] = dataclasses.replace(
        LLAMA_3_1, base=1.25e9, head_dim=1024, rotary_dim=512, layout="interleaved",
        out_layout="half", axes=positions.sections(*[32] * 8),
        params={**LLAMA_3_1.params, "factor": 12.5},
    )  # fmt: skip
    figure = plots.gallery(specs, 1000)
    figure.draw_without_rendering()
    panel = figure.axes[0]
    ends = panel.images[0].get_window_extent().x0
    rows = {}
    for text in panel.texts:
        rows.setdefault(text.get_position()[1], []).append(text.get_window_extent())
    assert len(rows) == len(specs) + 2
    for row, boxes in rows.items():
        boxes.sort(key=lambda box: box.x0)
        for left, right in itertools.pairwise(boxes):
            assert left.x1 < right.x0, row
        assert row < 0 or boxes[-1].x1 < ends, row


def test_no_speed_of_the_roofline_is_under_a_measured_point():
    figure = plots.roofline({"copy": [(4e4, 3e-5), (2e7, 6e-4), (1.3e9, 2.4e-2)]})
    figure.draw_without_rendering()
    (panel,) = figure.axes
    dots = panel.transData.transform(panel.lines[0].get_xydata())
    assert {"10 GB/s", "100 GB/s"} <= {text.get_text() for text in panel.texts}
    for text in panel.texts:
        assert not text.get_window_extent().padded(4).count_contains(dots), text.get_text()


def test_a_line_inside_a_heat_map_stays_dark_on_a_dark_page():
    figure = plots.dark(plots.angle_coverage(LLAMA_2, trained=4096, target=8192))
    _, strip, _ = figure.axes
    assert [line.get_color() for line in strip.lines] == ["black"]
    assert figure.legends[0].get_lines()[-1].get_color() == night("black")


def test_of_two_coinciding_designs_both_are_seen():
    head = Rotary(head_dim=32)
    specs = {f"{name}": head for name in range(7)}
    figure = plots.design(specs, analysis.wanted_reach(head, 128, 256))
    curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]
    assert [line.is_dashed() for line in curves] == [False, True] * 3 + [False]


def test_the_roofline_sorts_what_was_measured():
    figure = plots.roofline({"copy": [(1e8, 1e-2), (1e6, 1e-4)]}, bandwidth=2e10)
    panel = figure.axes[0]
    assert panel.lines[0].get_xdata().tolist() == [1e6, 1e8]
    assert panel.lines[0].get_ydata().tolist() == [1e-4, 1e-2]
    roof = panel.lines[-1]
    np.testing.assert_allclose(roof.get_xdata() / roof.get_ydata(), 2e10)
    assert legend_names(figure) == ["copy", "roof, 20 GB/s"]


@pytest.mark.parametrize(
    ("picture", "suffix"),
    [("similarity", ".png"), ("angle_coverage", ".svg"), ("gallery", ".pdf")],
)  # fmt: skip
def test_the_same_picture_gives_the_same_bytes(picture, suffix, tmp_path):
    path = tmp_path / f"picture{suffix}"
    plots.save(PICTURES[picture](SPECS["llama3"]), path)
    first = path.read_bytes()
    plots.save(PICTURES[picture](SPECS["llama3"]), path)
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == [path.name]
    head = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}[suffix]
    assert first.startswith(head)
    assert not re.search(rb"20[2-9]\d-\d\d-\d\d|CreationDate|dc:date", first)
    if suffix == ".svg":
        assert ElementTree.fromstring(first).tag.endswith("svg")
    if suffix == ".pdf":
        assert first.rstrip().endswith(b"%%EOF")


@pytest.fixture(scope="module")
def elsewhere():
    """Of a process with another seed of hashes: which modules it loads, digests of a picture."""
    code = (
        "import sys, rotary; is_light = 'matplotlib' not in sys.modules;"
        "import hashlib; from rotary import Rotary, plots; has_it = 'matplotlib' in sys.modules;"
        "figure = plots.decay(Rotary(head_dim=8), 100);"
        "print(*[hashlib.sha256(plots.rendered(figure, s)).hexdigest()"
        " for s in ('.png', '.svg', '.pdf')]);"
        "print(is_light, has_it, 'matplotlib.pyplot' in sys.modules)"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    return alone(code, env={**os.environ, "PYTHONHASHSEED": seed}).splitlines()


def test_the_bytes_do_not_depend_on_the_process(elsewhere):
    figure = plots.decay(Rotary(head_dim=8), 100)
    here = [plots.rendered(figure, suffix) for suffix in (".png", ".svg", ".pdf")]
    assert elsewhere[0].split() == [hashlib.sha256(each).hexdigest() for each in here]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "picture.svg"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        plots.save(Figure(), path)
    assert os.listdir(tmp_path) == ["picture.svg"]
    assert path.read_text() == "old"


def test_files_follow_the_umask_and_links_stay_links(tmp_path):
    path, link = tmp_path / "picture.PNG", tmp_path / "link.png"
    link.symlink_to(path)
    before = os.umask(0o027)
    try:
        plots.save(Figure(), link)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()


def test_what_cannot_be_written_is_said(tmp_path):
    figure = Figure()
    for name in ("picture", "picture.jpg", "picture.svgz", ".png"):
        with pytest.raises(ValueError, match=r"written as \.png, \.svg or \.pdf"):
            plots.save(figure, tmp_path / name)
    with pytest.raises(ValueError, match=r"no folder .*missing"):
        plots.save(figure, tmp_path / "missing" / "picture.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        plots.save(figure, tmp_path / "folder.png")
    with pytest.raises(ValueError, match="a matplotlib Figure, got NoneType"):
        plots.save(None, tmp_path / "picture.png")
    with pytest.raises(ValueError, match="written as"):
        plots.rendered(figure, ".gif")
    assert os.listdir(tmp_path) == ["folder.png"]


@pytest.mark.parametrize(
    ("picture", "suffix"),
    [("wavelengths", ".png"), ("frequency_ratio", ".svg"), ("similarity", ".pdf"),
     ("gallery", ".svg")],
)  # fmt: skip
def test_names_are_shown_as_they_are(picture, suffix):
    figure = PICTURES[picture](dict.fromkeys(NAMES, SPECS["plain"]))
    assert_plain(figure, NAMES)
    plots.rendered(figure, suffix)


def test_names_of_strips_and_measurements_are_shown_as_they_are():
    strips = PICTURES["angle_coverage"](dict.fromkeys(NAMES[:6], SPECS["plain"]))
    assert_plain(strips, NAMES[:6])
    assert_plain(plots.roofline({name: [(1.0, 1.0)] for name in NAMES}), NAMES)
    assert_plain(plots.comb(64, [10.0, 99.0], marks=dict.fromkeys(NAMES, 50.0)), NAMES)


def assert_plain(figure, names):
    texts = figure.findobj(lambda artist: hasattr(artist, "get_parse_math"))
    for name in names:
        found = [text for text in texts if text.get_text().startswith(name)]
        assert found, name
        assert not any(text.get_parse_math() for text in found)


def test_long_names_and_control_characters_become_one_short_line():
    figure = plots.decay({"first\nsecond\x1b[31m": SPECS["plain"], "n" * 500: SPECS["yarn"]}, 10)
    escaped, cut = legend_names(figure)
    assert escaped == r"first\nsecond\x1b[31m"
    assert cut == "n" * 29 + "…" + "n" * 14


def test_equal_names_and_many_curves_can_be_told_apart():
    figure = plots.decay([SPECS["plain"]] * 3, 10)
    name = "base 10,000, head_dim 16"
    assert legend_names(figure) == [name, f"{name} (2)", f"{name} (3)"]
    many = plots.decay([Rotary(head_dim=8, base=10.0 + i) for i in range(14)], 10)
    looks = {(line.get_color(), line.get_linestyle()) for line in many.axes[0].lines}
    assert len(looks) == 14


NONSENSE = {
    "no specs": (lambda: plots.decay([]), "1 to 14 specs, got 0"),
    "too many": (lambda: plots.decay([LLAMA_2] * 15), "1 to 14 specs, got 15"),
    "no spec": (lambda: plots.decay(None), "must be a Rotary, a list or a dict"),
    "a name": (lambda: plots.decay("llama"), "must be a Rotary, a list or a dict"),
    "no rotation": (lambda: plots.similarity({"NoPE": None}), "must hold Rotary, got None"),
    "a list of names": (lambda: plots.similarity(["llama"]), "must hold Rotary"),
    "a huge head": (lambda: plots.decay(Rotary(head_dim=10_000)), "heads of up to 8192"),
    "two for one": (lambda: plots.walk([LLAMA_2, LLAMA_2]), "1 to 1 specs, got 2"),
    "length 0": (lambda: plots.similarity(LLAMA_2, 0), "length must be in 1"),
    "length -1": (lambda: plots.decay(LLAMA_2, -1), "length must be in 1"),
    "length 1e15": (lambda: plots.decay(LLAMA_2, 10**15), "length must be in 1"),
    "a fraction": (lambda: plots.decay(LLAMA_2, 2.5), "length must be a whole number"),
    "True": (lambda: plots.cosine_map(LLAMA_2, True), "length must be a whole number"),
    "NaN": (lambda: plots.wavelengths(LLAMA_2, trained=np.nan), "trained must be a whole"),
    "target": (lambda: plots.wavelengths(LLAMA_2, target=0), "target must be in 1"),
    "backwards": (
        lambda: plots.angle_coverage(LLAMA_2, trained=4096, target=10), "target must be in 4,096"
    ),
    "another width": (
        lambda: plots.frequency_ratio(LLAMA_2, original=SPECS["plain"]), "same rotary_dim, 128"
    ),
    "no distances": (lambda: plots.walk(LLAMA_2, []), "distances must be"),
    "seed": (lambda: plots.scores(LLAMA_2, 10, seed=-1), "seed must be in 0"),
    "q of a wrong size": (
        lambda: plots.terms(LLAMA_2, [1.0], np.ones(128), 1), r"q must be \(head_dim,\) = \(128,\)"
    ),
    "pair 64": (lambda: plots.unit_circle(LLAMA_2, 0, 1, pairs=[64]), "pairs must be in 0 .. 63"),
    "9 pairs": (lambda: plots.unit_circle(LLAMA_2, 0, 1, pairs=range(9)), "1 to 8 pairs"),
    "rows": (lambda: plots.layout(LLAMA_2, num_heads=33), "num_heads x head_dim"),
    "no heads": (lambda: plots.layout(LLAMA_2, num_key_heads=0), "num_key_heads must be in 1"),
    "axes": (lambda: plots.grid(SPECS["axial"], positions=np.arange(4)), r"\(tokens, 2\)"),
    "infinite": (lambda: plots.grid(LLAMA_2, positions=[np.inf]), "positions must be finite"),
    "ranks": (lambda: plots.grid(LLAMA_2, ranks=0), "ranks must be in 1"),
    "no table": (lambda: plots.base_bound({}), "at least one context"),
    "a base of 0": (lambda: plots.base_bound({128: {1024: 0.0}}), "base must be finite and >= 1"),
    "an unknown name": (
        lambda: plots.base_bound({2: {1: 1.0}}, contexts={"x": 1}), "not among the specs"
    ),
    "falling bases": (lambda: plots.comb(64, [3.0, 2.0]), "rising numbers"),
    "one base": (lambda: plots.comb(64, [3.0]), "rising numbers"),
    "arithmetic": (lambda: plots.precision(LLAMA_2, arithmetics=["float8"]), "float8"),
    "two by two": (
        lambda: plots.precision([LLAMA_2, LLAMA_2], arithmetics=["float32", "tf32"]),
        "several specs in one",
    ),
    "nothing measured": (lambda: plots.roofline({}), "at least one name"),
    "no points": (lambda: plots.roofline({"copy": []}), "1 to 4096 points"),
    "NaN seconds": (lambda: plots.roofline({"copy": [(1.0, np.nan)]}), "finite numbers above 0"),
    "a number": (lambda: plots.roofline({"copy": [3.0]}), r"must hold \(bytes, seconds\)"),
    "bandwidth": (lambda: plots.roofline({"a": [(1, 1)]}, bandwidth=0), "finite numbers above 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", NONSENSE)
def test_nonsense_is_an_error_of_one_line(fault):
    call, message = NONSENSE[fault]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_import_rotary_does_not_load_matplotlib_and_pictures_do_not_load_pyplot(elsewhere):
    assert elsewhere[1] == "True True False"


def test_without_matplotlib_the_error_says_what_to_install():
    said = alone(
        "import sys; sys.modules['matplotlib'] = None\n"
        "try:\n    import rotary.plots\nexcept ValueError as error:\n    print(error)"
    )
    assert said == "plots need matplotlib: pip install matplotlib\n"


def test_settings_of_the_process_stay_as_they_are():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figure = plots.decay(SPECS["plain"], 10)
    for suffix in (".png", ".svg", ".pdf"):
        plots.rendered(figure, suffix)
    assert dict(mpl.rcParams) == before


def test_similarity_draws_each_spec_to_its_own_length():
    """A layer with a window sees no farther, so a failure beyond it is none."""
    gemma = Rotary(head_dim=256)
    figure = plots.similarity({"window": gemma, "all": gemma}, {"window": 1024, "all": 8192})
    assert legend_names(figure) == ["window: none to 1,024", "all: first failure 2,653"]
    near, far = (line.get_xdata()[-1] for line in figure.axes[0].lines[1:3])
    assert near <= 1024 < far <= 8192
    with pytest.raises(ValueError, match="length names 'other', which is not among the specs"):
        plots.similarity({"all": gemma}, {"other": 9})
