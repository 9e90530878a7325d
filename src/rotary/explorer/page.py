"""What the page asks for: the page itself, pictures of a state, the smallest base, files."""

import html
import json
import string
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from ..analysis import search
from ..configs import to_hf_config
from .figures import Picture, as_script
from .models import MAX_HEAD_DIM, MAX_PASTED, PASTED, presets
from .side import METHODS, FieldError, Look
from .state import State, from_fields, shown, to_fields, to_query
from .views import VIEWS

HERE = Path(__file__).parent
FIGURE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style>
<body class="file"><h1>{title}</h1><svg id="plot-a"></svg><p id="words-a">{words}</p>
<script>{script}
new Chart(document.querySelector("svg")).draw({data});</script></body></html>
"""
_min_base = lru_cache(maxsize=256)(search.min_base)


@cache
def page() -> str:
    """The HTML of the page: `page.html` with the controls of both sides and the choices."""
    sides = string.Template(file("side.html"))
    choices = {
        "models": _options([*presets(), PASTED]),
        "methods": _options(METHODS),
        "max_pasted": MAX_PASTED,
        "max_head_dim": MAX_HEAD_DIM,
    }
    views = "".join(
        f'<label><input type="radio" name="view" value="{name}">{html.escape(view.title)}</label>'
        for name, view in VIEWS.items()
    )
    return string.Template(file("page.html")).substitute(
        views=views,
        side_a=sides.substitute(choices, side="a", title="A"),
        side_b=sides.substitute(choices, side="b", title="B"),
    )


def drawn(fields: Mapping[str, object], changed: str = "") -> dict[str, object]:
    """What the page shows after the control `changed` was moved.

    fields, query, shown  the state by its controls, as a link (None: too long), and all values
    text, pictures        a sentence on the view; one picture for each side that is shown
    errors                name of a control -> one line; where it stands alone, nothing changes
    """
    try:
        state = from_fields(fields, changed)
    except FieldError as error:
        return {"errors": {error.field: str(error)[:400]}}
    pictures, errors = {}, {}
    for letter in "ab" if state.compared else "a":
        try:
            picture = _picture(state.view, state.look(letter))
        except ValueError as error:
            errors[getattr(error, "field", "view")] = str(error)[:400]
        else:
            title = f"{letter.upper()}: {getattr(state, letter).title()}"
            pictures[letter] = {"title": title, **picture.data()}
    return {
        "fields": to_fields(state),
        "query": to_query(state),
        "shown": shown(state),
        "text": VIEWS[state.view].text,
        "pictures": pictures,
        "errors": errors,
    }


def smallest_base(look: Look) -> str:
    """Words on the smallest base that never fails in the context, where that is quickly found.

    >>> from rotary.explorer.side import Side, look
    >>> smallest_base(look(Side(model="llama-2-7b"), 1024))
    'With base 4,293.4376 a similar key is preferred at every distance up to 1,024. It is the \
smallest one, rounded up: certified for a plain RoPE of head_dim 128.'
    """
    spec, context = look.spec, look.context
    if not (spec.rotary_dim == spec.head_dim <= 256 and spec.head_dim >= 8 and context <= 2**15):
        return f"This takes more than a moment: run rotary plan --context {context}."
    least = _min_base(context, spec.head_dim).base
    base = search.rounded_up(least, context, spec.head_dim, digits=8)
    return (
        f"With base {base:,f} a similar key is preferred at every distance up to {context:,}. It "
        f"is the smallest one, rounded up: certified for a plain RoPE of head_dim {spec.head_dim}."
    )


def certified(fields: Mapping[str, object]) -> dict[str, object]:
    """The smallest base for the context of a state, in words; or its error, as of `drawn`."""
    try:
        return {"words": smallest_base(from_fields(fields).look("a"))}
    except FieldError as error:
        return {"errors": {error.field: str(error)[:400]}}


def numbers_csv(state: State, letter: str) -> str:
    """The columns of the picture of one side."""
    return _picture(state.view, state.look(letter)).csv()


def figure_html(state: State, letter: str) -> str:
    """The picture of one side as a page that needs nothing else: figure, words, script, style."""
    picture = _picture(state.view, state.look(letter))
    title = f"{VIEWS[state.view].title}: {getattr(state, letter).title()}"
    return FIGURE.format(
        title=html.escape(title),
        words=html.escape(picture.words),
        style=file("explore.css"),
        script=file("chart.js") + file("hands.js"),
        data=as_script(picture.data()),
    )


def config_json(state: State, letter: str) -> str:
    """The RoPE of one side as a config for transformers; ValueError where none can say it."""
    spec = state.look(letter).spec
    return json.dumps(to_hf_config(spec, max_position_embeddings=state.context), indent=2) + "\n"


@cache
def file(name: str) -> str:
    """The text of a file of the page."""
    return (HERE / name).read_text(encoding="utf-8")


@lru_cache(maxsize=32)
def _picture(view: str, look: Look) -> Picture:
    """The picture of a view, kept: of two sides that are compared one is moved at a time."""
    return VIEWS[view].draw(look)


def _options(names: list[str] | tuple[str, ...]) -> str:
    return "".join(f"<option>{html.escape(name)}</option>" for name in names)
