"""Draw docs/explore/*.png again: `python -m tools.make_gallery`. Needs Chromium and playwright.

The pictures that docs/explore.md shows are screenshots of `rotary explore`. Each holds the text
that the page showed; tests/test_explorer_gallery.py fails where it says something else today.
"""

import argparse
import io
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.explore import chromium, served
from PIL import Image
from PIL.PngImagePlugin import PngInfo

if TYPE_CHECKING:
    from playwright.sync_api import Page

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "explore"
PICTURES = {  # name of the picture -> what the page is asked for
    "hands": "view=hands",
    "layouts": "view=layouts",
    "methods": "view=methods&context=131072",
    "reach": "view=reach&context=131072",
    "plan": "view=plan&context=131072",
    "models": "view=models&b.model=llama-3.1-8b&b.method=as+published",
}
SIZE = {"width": 1180, "height": 820}
TALL = {"plan": 1066}  # the height in which the config to copy is seen too
COLOURS, EXACT = 256, 8  # of a file, and how many of the commonest are those of the page


def text_of(page: "Page") -> str:
    """The words and the numbers of the view that a page shows."""
    parts = page.locator("#about, #pictures, #words-a, #tables-a").all_text_contents()
    return "\n".join(" ".join(part.split()) for part in parts)


def in_few_colours(image: Image.Image) -> Image.Image:
    """An image of `COLOURS` colours; grounds and curves keep theirs, where a tint would be seen."""
    small = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    pixels = [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]
    indices = dict(zip(pixels, np.asarray(small).ravel().tolist(), strict=True))
    palette = small.getpalette() or []
    for colour, _ in reversed(Counter(pixels).most_common(EXACT)):
        palette[3 * indices[colour] : 3 * indices[colour] + 3] = colour
    small.putpalette(palette)
    return small


def picture_of(page: "Page") -> bytes:
    """A screenshot in few colours, with the text of the page inside."""
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    small = in_few_colours(image)
    said, out = PngInfo(), io.BytesIO()
    said.add_itxt("Text", text_of(page))
    small.save(out, "PNG", optimize=True, pnginfo=said)
    return out.getvalue()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    with served() as address, chromium() as browser:
        page = browser.new_page()
        for name, query in PICTURES.items():
            page.set_viewport_size(
                {"width": SIZE["width"], "height": TALL.get(name, SIZE["height"])}
            )
            page.goto(f"{address}?{query}")
            page.wait_for_selector("#links-a a")
            (FOLDER / f"{name}.png").write_bytes(picture_of(page))


if __name__ == "__main__":
    main()
