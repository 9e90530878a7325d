"""The answers of the server: the page, pictures of a state, the smallest base, downloads."""

import html
import json
import string
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from ..analysis import search
from ..configs import to_hf_config
from ..plan import MAX_CONTEXT
from .figures import Picture, as_script
from .models import MAX_HEAD_DIM, MAX_PASTED, PASTED, presets
from .side import METHODS, FieldError, Look
from .state import State, from_fields, shown, to_fields, to_query
from .views import VIEWS

HERE = Path(__file__).parent
SCRIPTS = ("chart.js", "motion.js", "hands.js", "layouts.js", "methods.js")  # needed by a figure
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
    """Return the HTML of the page: `page.html` with the controls of both sides and the choices."""
    sides = string.Template(file("side.html"))
    choices = {
        "models": _options([*presets(), PASTED]),
        "methods": _options(METHODS),
        "max_pasted": MAX_PASTED,
        "max_head_dim": MAX_HEAD_DIM,
    }
    radios, options = "", ""
    for group in dict.fromkeys(view.group for view in VIEWS.values()):
        radios += f'<div class="group"><b>{group}</b>'
        options += f'<optgroup label="{group}">'
        for name, view in VIEWS.items():
            if view.group == group:
                title = html.escape(view.title)
                radios += f'<label><input type="radio" name="view" value="{name}">{title}</label>'
                options += f'<option value="{name}">{title}</option>'
        radios, options = f"{radios}</div>", f"{options}</optgroup>"
    return string.Template(file("page.html")).substitute(
        radios=radios,
        choices=options,
        side_a=sides.substitute(choices, side="a", title="A"),
        side_b=sides.substitute(choices, side="b", title="B"),
    )


def drawn(fields: Mapping[str, object], changed: str = "") -> dict[str, object]:
    """Return what the page shows after the control `changed` was moved.

    fields, query, shown  the state by its controls, as a link (None: too long), and all values
    text, group, pictures the view in words; one picture for each side that has one
    figures, controls     the sides that have a picture and controls, "a" or "ab"
    no_config             side -> why there is no config for transformers of its RoPE
    errors                name of a control -> one line; if it is the only key, nothing changes
    """
    try:
        state = from_fields(fields, changed)
    except FieldError as error:
        return {"errors": {error.field: str(error)[:400]}}
    view = VIEWS[state.view]
    figures = "ab" if state.compared and not view.is_of_two else "a"
    pictures, errors, no_config = {}, {}, {}
    for letter in figures:
        try:
            picture = _drawn(state, letter)
        except ValueError as error:
            errors[getattr(error, "field", "view")] = str(error)[:400]
        else:
            pictures[letter] = {"title": _title(state, letter), **picture.data()}
            try:
                config_json(state, letter)
            except ValueError as error:
                no_config[letter] = str(error)[:400]
    return {
        "fields": to_fields(state),
        "query": to_query(state),
        "shown": shown(state),
        "text": view.text,
        "group": view.group,
        "figures": figures,
        "controls": "ab" if view.is_of_two or state.compared else "a",
        "pictures": pictures,
        "no_config": no_config,
        "errors": errors,
    }


def _letters(state: State, letter: str) -> str:
    """Return the sides that the picture of a side shows: both, for a view of two."""
    return "ab" if VIEWS[state.view].is_of_two else letter


def _drawn(state: State, letter: str) -> Picture:
    """Return the picture of a side; FieldError names the control that is wrong."""
    looks = [state.look(each) for each in _letters(state, letter)]
    try:
        return _picture(state.view, *looks)
    except FieldError as error:
        raise error.of(letter) from error


def _title(state: State, letter: str) -> str:
    letters = _letters(state, letter)
    return "; ".join(f"{each.upper()}: {state.side(each).title()}" for each in letters)


def smallest_base(look: Look) -> str:
    """Return a sentence on the smallest base that never fails in the context, if found quickly.

    >>> from rotary.explorer.side import Side, look
    >>> smallest_base(look(Side(model="llama-2-7b"), 1024))
    'With base 4,293.4376 a similar key is preferred at every distance up to 1,024. It is the \
smallest one, rounded up: certified for a plain RoPE of head_dim 128.'
    """
    spec, context = look.head, look.context
    if spec.rotary_dim != spec.head_dim:
        return (
            "A part of the head is rotated, which takes more than a moment: run rotary plan "
            "--from with the config.json of the model."
        )
    if not 2 <= context <= MAX_CONTEXT:
        return f"The smallest base is searched for 2 .. {MAX_CONTEXT:,} tokens, got {context:,}."
    if not 8 <= spec.head_dim <= 256 or context > 2**17:
        return (
            "This takes more than a moment: run rotary plan "
            f"--context {context} --head-dim {spec.head_dim}."
        )
    least = _min_base(context, spec.head_dim).base
    base = search.rounded_up(least, context, spec.head_dim, digits=8)
    return (
        f"With base {base:,f} a similar key is preferred at every distance up to {context:,}. It "
        f"is the smallest one, rounded up: certified for a plain RoPE of head_dim {spec.head_dim}."
    )


def certified(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the smallest base for the context of a state, in words; or errors as in `drawn`."""
    try:
        return {"words": smallest_base(from_fields(fields).look("a"))}
    except FieldError as error:
        return {"errors": {error.field: str(error)[:400]}}


def numbers_csv(state: State, letter: str) -> str:
    """Return the columns of the picture of one side, as CSV."""
    return _drawn(state, letter).csv()


def figure_html(state: State, letter: str) -> str:
    """Return the picture of one side as a page of one file: figure, words, script, style."""
    picture = _drawn(state, letter)
    title = f"{VIEWS[state.view].title}: {_title(state, letter)}"
    return FIGURE.format(
        title=html.escape(title),
        words=html.escape(picture.words),
        style=file("explore.css"),
        script="".join(map(file, SCRIPTS)),
        data=as_script(picture.data()),
    )


def config_json(state: State, letter: str) -> str:
    """Return the RoPE of one side as a config for transformers; ValueError if none can hold it."""
    spec = state.look(letter).spec
    context = None if spec.schedule == "dynamic" else state.context  # that has its trained length
    return json.dumps(to_hf_config(spec, max_position_embeddings=context), indent=2) + "\n"


@cache
def file(name: str) -> str:
    """Return the text of a file of the page."""
    return (HERE / name).read_text(encoding="utf-8")


@lru_cache(maxsize=32)
def _picture(name: str, *looks: Look) -> Picture:
    """Return the picture of a view. It is cached: of two compared sides, one changes at a time."""
    return VIEWS[name].draw(*looks)


def _options(names: list[str] | tuple[str, ...]) -> str:
    return "".join(f"<option>{html.escape(name)}</option>" for name in names)
