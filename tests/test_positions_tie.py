"""RoPE-Tie: text and images on two axes, of which text sees one."""

import numpy as np
import pytest

from rotary import Rotary, apply, positions

SPACINGS = pytest.mark.parametrize("spacing", ["whole", "equal", "unit"])
SIZES = pytest.mark.parametrize(("height", "width"), [(2, 4), (1, 2), (3, 3), (5, 2), (1, 1)])


def parts(height, width, spacing, before=6, after=3, **options):
    segments = [("text", before), ("image", height, width), ("text", after)]
    places = positions.tie(segments, spacing, **options)
    patches = places[before : before + height * width].reshape(height, width, 2)
    return places[:before], patches, places[before + height * width :]


def test_the_example_of_the_post():
    # a row of w = 4 and h = 2: s = w + 1, t = h + 1, K = L + (w + 1)(h + 1), with the text from 1
    before, patches, after = parts(2, 4, "whole", offset=1)
    assert before[-1].tolist() == [6, 6]
    assert patches[:, 0, 0].tolist() == [6 + 5, 6 + 10]
    assert patches[0, :, 1].tolist() == [6 + 3, 6 + 6, 6 + 9, 6 + 12]
    assert after[0].tolist() == [6 + 15] * 2
    assert patches.dtype == np.int64


@SPACINGS
@SIZES
def test_an_image_is_as_far_from_the_text_before_as_from_the_text_behind(height, width, spacing):
    before, patches, after = parts(height, width, spacing)
    np.testing.assert_allclose(patches[0, 0] - before[-1], after[0] - patches[-1, -1], atol=1e-12)
    for text in (before, after):
        np.testing.assert_array_equal(text[:, 0], text[:, 1])
        np.testing.assert_array_equal(np.diff(text[:, 0]), 1)
    assert (patches[0, 0] > before[-1]).all()  # the order of rows and of columns is kept
    steps = np.diff(patches[..., 0], axis=0), np.diff(patches[..., 1], axis=1)
    for step in steps:
        np.testing.assert_allclose(step, step.flat[0] if step.size else 0, atol=1e-12)


@SIZES
def test_how_many_tokens_an_image_counts_as(height, width):
    counted = {
        spacing: (after[0] - before[-1] - 1).tolist()
        for spacing in ("whole", "equal", "unit")
        for before, _, after in [parts(height, width, spacing)]
    }
    patches = height * width
    assert counted["whole"] == [(height + 1) * (width + 1) - 1] * 2
    assert counted["equal"] == counted["unit"] == [patches] * 2


@SIZES
def test_patches_of_unit_spacing_are_one_apart_in_every_image(height, width):
    _, patches, _ = parts(height, width, "unit")
    assert (np.diff(patches[..., 0], axis=0) == 1).all()
    assert (np.diff(patches[..., 1], axis=1) == 1).all()
    assert (2 * patches == np.round(2 * patches)).all()  # whole numbers and halves


@SPACINGS
def test_text_alone_is_plain_rope_bit_for_bit(spacing):
    spec = Rotary(head_dim=16, axes=positions.interleaved_sections(4, 4))
    q = np.random.default_rng(0).standard_normal((9, 16))
    places = positions.tie([("text", 4), ("text", 5)], spacing, offset=7)
    turned = apply(spec, q, positions=places)
    np.testing.assert_array_equal(
        turned, apply(Rotary(head_dim=16), q, positions=np.arange(9.0) + 7 if spacing != "whole"
                      else np.arange(9) + 7)
    )  # fmt: skip


def test_several_images_and_none():
    segments = [("image", 1, 1), ("text", 1), ("image", 2, 1), ("text", 0), ("text", 2)]
    places = positions.tie(iter(segments))
    # L = -1: the patch at 1, text at 3; the image of 2 x 1 counts as 5
    assert places.tolist() == [[1, 1], [3, 3], [5, 6], [7, 6], [9, 9], [10, 10]]
    assert positions.tie([]).shape == (0, 2)
    assert positions.tie([("text", 0)], "unit").shape == (0, 2)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([("audio", 3)], r"a segment is \('text', length\) or .*, got \('audio', 3\)"),
        ([("image", 1, 2, 2)], r"got \('image', 1, 2, 2\)"),
        ([("text", 1), ("image", 0, 2)], "an image needs patches"),
        ([("image", 1, 2), ("image", 1, 2)], r"put \('text', 1\) between them"),
        ([("image", 1, 2), ("text", 0), ("image", 1, 2)], "between them"),
    ],
)  # fmt: skip
def test_segments_that_cannot_be_placed_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        positions.tie(segments)


def test_an_unknown_spacing_is_refused():
    with pytest.raises(ValueError, match="spacing must be one of whole, equal, unit, got 'even'"):
        positions.tie([("text", 1)], "even")
