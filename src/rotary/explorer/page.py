"""The page: controls, and one `update` from controls to pictures, words and links."""

import hashlib
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData
from plotly.io.json import to_json_plotly  # type: ignore[import-untyped]

from . import controls
from .figures import CONFIG
from .models import MAX_HEAD_DIM, MAX_PASTED, PASTED, presets
from .numbers import smallest_base
from .side import METHODS, Side, look
from .state import QUERY, State, from_query, to_query
from .views import VIEWS

HEAD = (
    "# RoPE explorer\nLook at the rotary position embedding of a model, and at what an extension "
    "of its context does. All of it is computed on this machine."
)
MAX_WAITING = 64  # moves of controls, of all open pages, that wait for their turn
Updates = dict[Any, Any]


def build() -> gr.Blocks:
    """The page, not yet served; `serve` does that, and keeps it to this machine.

    >>> build.__annotations__["return"].__name__
    'Blocks'
    """
    start, first = controls.shown(State()), drawn(State())
    with gr.Blocks(title="RoPE explorer", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(HEAD)
        parts: dict[str, Any] = {}
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                parts |= _side("a", "A", start)
                parts |= _shared(start)
                certify = gr.Button("Smallest base for this context", elem_id="certify")
                certified = gr.Markdown("", elem_id="certified")
                parts["compared"] = gr.Checkbox(start["compared"], label="Compare with B")
                with gr.Column(visible=False) as parts["b.controls"]:
                    parts |= _side("b", "B", start)
            with gr.Column(scale=3, min_width=300, elem_id="results"):
                choices = [(view.title, name) for name, view in VIEWS.items()]
                parts["view"] = gr.Radio(
                    choices, value=start["view"], label="Picture", elem_id="view"
                )
                parts["about"] = gr.Markdown(VIEWS[start["view"]].about)
                parts["error"] = gr.Markdown("", elem_id="error")
                with gr.Row():
                    for letter in ("a", "b"):
                        with gr.Column(min_width=300, visible=letter == "a") as parts[
                            f"{letter}.column"
                        ]:
                            parts[f"{letter}.title"] = gr.Markdown(first.get(f"{letter}.title", ""))
                            parts[f"{letter}.plot"] = gr.Plot(
                                first.get(f"{letter}.plot"),
                                show_label=False,
                                container=False,
                                elem_id=f"plot-{letter}",
                            )
                            parts[f"{letter}.words"] = gr.Markdown(
                                first.get(f"{letter}.words", ""), elem_id=f"words-{letter}"
                            )
                            parts[f"{letter}.links"] = gr.Markdown("", elem_id=f"links-{letter}")
        inputs = [parts[name] for name in controls.NAMES]
        for letter in ("a", "b"):
            parts[f"{letter}.read"] = gr.State(_digest(""))
        outputs = list(parts.values())
        shared: dict[str, Any] = {
            "show_progress": "hidden", "trigger_mode": "always_last", "concurrency_limit": 4,
            "concurrency_id": "update", "api_visibility": "private",
        }  # fmt: skip
        for name in controls.NAMES:
            letter, _, kind = name.rpartition(".")
            if kind == "config":  # a paste is a change to Gradio, and no input
                given = [parts[f"{letter}.read"], *inputs]
                parts[name].change(_read_config(name, parts), given, outputs, **shared)
            else:
                parts[name].input(_updated(name, parts), inputs, outputs, **shared)
        certify.click(
            lambda *given: certified_base(dict(zip(controls.NAMES, given, strict=True))),
            inputs, certified, api_visibility="private", concurrency_limit=1,
        )  # fmt: skip
        page.load(_restored(parts), None, outputs, **shared)
    page.queue(max_size=MAX_WAITING)
    return page


def update(changed: str, values: dict[str, Any]) -> Updates:
    """What the page shows after the control `changed` was moved: name of a part -> its new value.

    >>> update("context", {**controls.shown(State()), "context": "many"})["error"]
    'Not drawn: context must be a number, got &#39;many&#39;'
    """
    try:
        state = controls.read(values, changed)
    except ValueError as error:
        return {"error": _refusal(error)}
    after = controls.shown(state)
    moved = {
        name: after[name]
        for name in controls.NAMES
        if name != changed and after[name] is not None and after[name] != values[name]
    }
    return {**moved, **drawn(state)}


def drawn(state: State) -> Updates:
    """The pictures, words and links of a state; on an error of one side, that error in its place.

    >>> drawn(State())["about"] == VIEWS["wavelengths"].about
    True
    """
    view = VIEWS[state.view]
    found: Updates = {"about": view.about}
    found["b.column"] = found["b.controls"] = gr.update(visible=state.compared)
    errors = []
    for letter in ("a", "b"):
        side: Side = getattr(state, letter)
        if letter == "b" and not state.compared:
            continue
        is_pasted = side.model == PASTED
        found[f"{letter}.config"] = gr.update(visible=is_pasted)
        try:
            made = side.made()
            found[f"{letter}.layer"] = gr.update(
                choices=list(made.layers), value=made.layer if is_pasted else None,
                visible=is_pasted and bool(made.layers),
            )  # fmt: skip
            seen = look(side, state.context)
            numbers = view.numbers(seen)
            figure = view.draw(seen, numbers)
        except ValueError as error:
            errors.append(_refusal(error, letter.upper()))
            continue
        found[f"{letter}.title"] = f"### {letter.upper()}: {as_text(_name(side))}"
        drawing = {**figure.to_plotly_json(), "config": CONFIG}
        found[f"{letter}.plot"] = PlotData(type="plotly", plot=to_json_plotly(drawing))
        found[f"{letter}.words"] = as_text(numbers.words)
        found[f"{letter}.links"] = _links(state, letter)
    return {**found, "error": "  \n".join(errors)}


def certified_base(values: dict[str, Any]) -> str:
    """The smallest base for the context, in words; or what keeps it from being found.

    >>> certified_base({**controls.shown(State()), "context": 2**20})
    'This takes more than a moment: run rotary plan --context 1048576.'
    """
    try:
        state = controls.read(values, "")
        return as_text(smallest_base(look(state.a, state.context)))
    except ValueError as error:
        return _refusal(error)


def as_text(words: str) -> str:
    """Words that Markdown and HTML show as they are: every sign that could mean more is escaped.

    >>> as_text("<b>*x*")
    '&#60;b&#62;&#42;x&#42;'
    """
    return "".join(
        char if char.isalnum() or char in " ,.:;-()%=/" else f"&#{ord(char)};" for char in words
    ).replace("://", "&#58;//")


def _side(letter: str, title: str, start: dict[str, Any]) -> dict[str, Any]:
    """The controls of one side."""
    parts: dict[str, Any] = {}
    made = {name: start[f"{letter}.{name}"] for name in controls.SIDE}
    parts["model"] = gr.Dropdown(
        [*presets(), PASTED],
        value=made["model"],
        label=f"{title}: model",
        elem_id=f"{letter}-model",
    )
    parts["config"] = gr.Textbox(
        "", label=f"{title}: config.json", lines=6, max_lines=12, max_length=MAX_PASTED,
        visible=False, elem_id=f"{letter}-config", placeholder='{"model_type": "llama", ...}',
    )  # fmt: skip
    parts["layer"] = gr.Dropdown(
        [], label=f"{title}: layer type", visible=False, elem_id=f"{letter}-layer"
    )
    parts["method"] = gr.Dropdown(
        list(METHODS), value=made["method"], label=f"{title}: method", elem_id=f"{letter}-method",
        info="As published, or the plain RoPE extended to the context.",
    )  # fmt: skip
    parts |= _number(letter, f"{title}: base", "base", made, (0, 15))
    parts["head_dim"] = gr.Slider(
        2, MAX_HEAD_DIM, value=made["head_dim"], step=2, label=f"{title}: head_dim, channels",
        elem_id=f"{letter}-head_dim",
    )  # fmt: skip
    parts |= _number(letter, f"{title}: trained length, tokens", "trained", made, (0, 24))
    return {f"{letter}.{name}": parts[name] for name in controls.SIDE}


def _shared(start: dict[str, Any]) -> dict[str, Any]:
    """The controls that both sides share, but for the view and the comparison."""
    parts = _number("shared", "Context, tokens", "context", start, (0, 24))
    least, most = controls.FACTORS
    parts["factor"] = gr.Slider(
        least, most, value=start["factor"], step=0.25, elem_id="factor",
        label="Factor: context over the trained length of A",
    )  # fmt: skip
    return parts


def _number(
    letter: str, label: str, name: str, start: dict[str, Any], span: tuple[int, int]
) -> dict[str, Any]:
    """A number, and a slider for its logarithm."""
    power = {10.0: "ten", 2.0: "two"}[controls.LOGS[f"{name}_log"][1]]
    with gr.Group():
        box = gr.Number(start[name], label=label, elem_id=f"{letter}-{name}")
        slider = gr.Slider(
            *span, value=start[f"{name}_log"], step=0.01, label=f"{label}: as a power of {power}",
            elem_id=f"{letter}-{name}_log",
        )  # fmt: skip
    return {name: box, f"{name}_log": slider}


def _updated(changed: str, parts: dict[str, Any]) -> Any:
    """`update` as Gradio calls it: the values in order, and one output for each part."""

    def called(*values: Any) -> list[Any]:
        found = update(changed, dict(zip(controls.NAMES, values, strict=True)))
        return [_merged(name, found) for name in parts]

    return called


def _read_config(changed: str, parts: dict[str, Any]) -> Any:
    """The same for a config, but for the one that was read last: a link may have brought it."""

    def called(last: str, *values: Any) -> list[Any]:
        given = dict(zip(controls.NAMES, values, strict=True))
        found: Updates = {}
        if (read := _digest(given[changed])) != last:
            found = {**update(changed, given), f"{changed[0]}.read": read}
        return [_merged(name, found) for name in parts]

    return called


def _restored(parts: dict[str, Any]) -> Any:
    """The first view: what the link says."""

    def called(request: gr.Request) -> list[Any]:
        if not any(key in QUERY for key in request.query_params):
            found: Updates = {"a.links": _links(State(), "a")}  # the page was built with this view
            return [_merged(name, found) for name in parts]
        try:
            state, error = from_query(dict(request.query_params)), ""
        except ValueError as refused:
            state, error = State(), _refusal(refused, "the link")
        found = drawn(state)
        for name, value in controls.shown(state).items():
            extra = found.get(name, {})
            found[name] = gr.update(**{**extra, "value": value})
        found |= {"a.read": _digest(state.a.config), "b.read": _digest(state.b.config)}
        found["error"] = error or found["error"]
        return [_merged(name, found) for name in parts]

    return called


def _digest(config: object) -> str:
    """What is kept of a config that was read, of ten thousand open pages: not the config."""
    return hashlib.sha256(str(config).encode("utf-8", "replace")).hexdigest()


def _merged(name: str, found: Updates) -> Any:
    return found.get(name, gr.skip())


def _refusal(error: ValueError, where: str = "") -> str:
    return as_text(f"Not drawn: {where + ': ' if where else ''}{str(error)[:400]}")


def _name(side: Side) -> str:
    name = side.made().name or side.model
    return name if side.method == METHODS[0] else f"{name}, {side.method}"


def _links(state: State, letter: str) -> str:
    """Links that hold the whole state: to this view, and to its files."""
    if any(side.link_config() is None for side in (state.a, state.b)):
        return "This config is too long for a link, and so for the files that a link holds."
    query = to_query(state)
    asked = f"{query}&side={letter}" if letter == "b" else query
    files = (
        ("Numbers (CSV)", "numbers.csv"), ("Figure (HTML)", "figure.html"),
        ("Config for transformers (JSON)", "config.json"),
    )  # fmt: skip
    links = [f"[{title}](download/{file}?{asked})" for title, file in files]
    return " · ".join([f"[Link to this view](?{query})", *links])
