"""Which position axis turns each pair: sections of text with images, grids of vision towers."""

from ..positions import interleaved_sections, sections
from .record import Config


def axes_of(config: Config, pairs: int) -> tuple[int, ...]:
    """Return the position axis of each pair; () for one axis.

    Raises ValueError for mrope_section that does not fit the pairs, and for what the code of the
    model does not read: another number of sections than 3, or mrope_interleaved that says the other
    order than its own.

    >>> axes_of(Config({"mrope_section": [1, 2, 1]}, {}, {}, None, True), 4)
    (0, 1, 1, 2)
    """
    model, rope = config.model, config.rope
    if "num_axes" in model:
        count = model["num_axes"]
        order = range(count)[::-1] if model["axes"].endswith("reversed") else range(count)
        if model["axes"].startswith("turns"):
            return tuple(order) * (pairs // count)
        return tuple(axis for axis in order for _ in range(pairs // count))
    sources = (rope, config.data, model)
    counts = next((each["mrope_section"] for each in sources if each.get("mrope_section")), ())
    if not counts:
        return ()
    if sum(counts) != pairs:
        raise ValueError(f"mrope_section {counts} must sum to the {pairs} pairs that are rotated")
    own, written = model.get("mrope"), rope.get("mrope_interleaved")
    if own and len(counts) != 3:
        raise ValueError(
            f"mrope_section {counts} must be 3 numbers: model_type {config.model_type!r} has the "
            "axes time, height and width"
        )
    if own == "alternating":  # Ernie 4.5 VL: height and width in turn, then time
        return (*((1, 2) * counts[0]), *((0,) * counts[2]))
    is_interleaved = own == "interleaved" if written is None else bool(written)
    if own and is_interleaved != (own == "interleaved"):
        raise ValueError(
            f"mrope_interleaved {written!r} is not read by model_type {config.model_type!r}, whose "
            f"axes are {'interleaved' if own == 'interleaved' else 'in sections'}; remove the key"
        )
    return interleaved_sections(*counts) if is_interleaved else sections(*counts)
