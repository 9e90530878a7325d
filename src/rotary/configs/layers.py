"""The rope parameters of each layer type: nested, flat, in lists by layer, or one for all.

transformers reads a nested `rope_parameters` only if the model's code has layer types, and every
such model has its own rule for missing and for flat entries. If transformers would not read a
config as it is written, that is an error here, which says what to write.
"""

from collections.abc import Iterable, Mapping

from ..strict_json import JSON
from .values import check_shapes, length, whole_number

Model = Mapping[str, JSON]
Rope = dict[str, JSON]
Entries = dict[str | None, Rope | None]  # by layer type; None for a layer type without rotation
MOST_LAYERS = 10_000  # whose types are made or counted: more than any model has
DENSE_COUNT = "first_k_dense_replace"  # in mixture models: how many of the first have no experts
# keys of a few models that list bases or scaled layers
_LISTS = ("layer_rope_theta", "rope_scaling_layers")


def ropes(data: Mapping[str, JSON], model: Model) -> Entries:
    """Return rope parameters by layer type, None if not rotated; {None: ...} if all are alike.

    >>> ropes({"rope_theta": 5e5}, {})
    {None: {}}
    """
    written = rope_parameters(data)
    _check_filled(written, data, model)
    unread = model.get("unread_alone", ())
    rope = written or {
        key: value for key, value in model.get("rope", {}).items()
        if data.get(key) is None or key in unread
    }  # fmt: skip
    if "not_one" in model:  # `rotary_of` refuses it, whatever its other keys are
        return {None: rope}
    check_shapes(data)
    for entry in (rope, *rope.values()):
        if isinstance(entry, Mapping):
            check_shapes(entry)
    by_layer = _by_layer(rope, data, model)
    if by_layer is not None:
        return by_layer
    own = entries_of_class(data, model)
    labels = own.keys() | {*listed_layer_types(data)}
    has_entries = any(isinstance(value, Mapping) for value in rope.values())
    if labels & rope.keys() or (has_entries and all(map(_is_entry, rope.values()))):
        return _nested(rope, own, data, model)
    if model.get("nested"):
        raise ValueError(
            f"model_type {data.get('model_type')!r} needs rope_parameters with an entry for each "
            "layer type; transformers fails without one"
        )
    if not own:
        return {None: rope}
    return _flat(written, own, data, model)


def entries_of_class(data: Mapping[str, JSON], model: Model) -> Entries:
    """Return the entries of a model's class, for a file without any; {} if all layers are alike.

    >>> entries_of_class({}, {"layers": {"full_attention": {"rope_theta": 5e5}}})
    {'full_attention': {'rope_theta': 500000.0}}
    """
    unlisted, listed = model.get("unlisted_layers", {}), listed_layer_types(data)
    of_listed = {kind: unlisted[kind] for kind in unlisted if kind in listed}
    return _without({**model.get("layers", {}), **of_listed}, "head_dim")  # see `Config.get`


def rope_parameters(data: Mapping[str, JSON]) -> Rope:
    """Return what a config has under `rope_parameters` (v5) or `rope_scaling` (v4); {} if neither.

    >>> rope_parameters({"rope_scaling": {"type": "linear", "factor": 2.0}})
    {'type': 'linear', 'factor': 2.0}
    """
    new, old = data.get("rope_parameters"), data.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object, got {value!r}")
    if new and old and new != old:
        raise ValueError("rope_parameters and rope_scaling are both given and differ; keep one")
    return dict(new or old or {})


def _check_filled(written: Rope, data: Mapping[str, JSON], model: Model) -> None:
    """Refuse rope parameters without a value that transformers would not fill in.

    The model's class has a default for it, but uses it only for a config without rope parameters.
    """
    name = f"model_type {data.get('model_type')!r}"
    needed = model.get("needed", ())
    if data.get("rope_scaling") and "rope_scaling" in model.get("unread", ()):
        raise ValueError(f"rope_scaling is not read by {name}: write it under rope_parameters")
    is_nested = any(isinstance(value, Mapping) for value in written.values())
    if not written and data.get("rope_parameters") is not None and ("rope" in model or needed):
        raise ValueError(
            f"rope_parameters is empty, and transformers then uses no default of {name}; leave out "
            "the key, or write the values"
        )
    for key in needed:
        beside = None if "layers" in model else data.get(key)
        if written and not is_nested and written.get(key, beside) is None:
            raise ValueError(
                f"rope_parameters of {name} needs {key}: transformers uses the default of the "
                "model only if the config has no rope parameters"
            )


def listed_layer_types(data: Mapping[str, JSON]) -> tuple[str, ...]:
    """Return the layer type of each layer, as the config lists them; empty if it does not.

    >>> listed_layer_types({"layer_types": ["full_attention"]})
    ('full_attention',)
    """
    return tuple(data.get("layer_types") or ())


def with_layer_types(data: Mapping[str, JSON], model: Model) -> Mapping[str, JSON]:
    """Return a config without layer_types with those that its class makes.

    Only for models where they say which layers rotate, and for at most `MOST_LAYERS` layers.

    >>> model = {"weights": {"full_every": ["sliding_window_pattern", 4]}}
    >>> data = {"num_hidden_layers": 2, "sliding_window_pattern": 2}
    >>> with_layer_types(data, model)["layer_types"]
    ['sliding_attention', 'full_attention']
    """
    rules = model.get("weights", {})
    layers = length("num_hidden_layers", data.get("num_hidden_layers"))
    if layers is None or data.get("layer_types") is not None:
        return data
    if repeated := rules.get("repeated"):
        ends = {layer: rules["ends"] for layer in (0, layers - 1) if "ends" in rules}
        types = [ends.get(i, repeated[i % len(repeated)]) for i in range(min(layers, MOST_LAYERS))]
        return {**data, "layer_types": types}
    if "full_every" not in rules:
        return data
    if isinstance(data.get(rules["full_every"][0]), str):  # "LLLG": no class reads letters
        return data
    layers, types = min(layers, MOST_LAYERS), []
    if "full_every_dense" in rules:
        dense = whole_number(DENSE_COUNT, data.get(DENSE_COUNT) or 0, 0)
        types = _types(data, rules["full_every_dense"], min(dense, layers))
    return {**data, "layer_types": types + _types(data, rules["full_every"], layers - len(types))}


def with_entries(data: Mapping[str, JSON], model: Model) -> Mapping[str, JSON]:
    """Return a config of Step 3.5 with the entries of rope_parameters that its class makes.

    Those of the first layer of each type, from lists by layer; rope_scaling is of full attention.

    >>> data = {"layer_types": ["full_attention", "sliding_attention"], "rope_theta": [5e6, 1e4]}
    >>> made = with_entries(data, {"entries_from_lists": True})["rope_parameters"]
    >>> {kind: entry["rope_theta"] for kind, entry in made.items()}
    {'full_attention': 5000000.0, 'sliding_attention': 10000.0}
    """
    if "entries_from_lists" not in model or data.get("rope_parameters"):
        return data
    check_shapes({"layer_types": data.get("layer_types")})
    types = listed_layer_types(data) or ("full_attention",)
    bases, shares = data.get("rope_theta"), data.get("partial_rotary_factors")
    is_plain = {*types} == {"full_attention"} and not isinstance(bases, list) and not shares
    scaling = data.get("rope_scaling") or {}
    if is_plain or not isinstance(scaling, Mapping):
        return data
    made: Rope = {}
    for kind in dict.fromkeys(types):
        layer = types.index(kind)
        names = (("rope_theta", bases or 10_000.0), ("partial_rotary_factor", shares))
        made[kind] = {"rope_type": "default"} | {
            name: _of_layer(name, values, layer) for name, values in names if values
        }
    if "full_attention" in made:
        made["full_attention"] |= scaling
    kept = {key: value for key, value in data.items() if key not in
            ("rope_theta", "partial_rotary_factors", "rope_scaling")}  # fmt: skip
    return {**kept, "rope_parameters": made}


def _of_layer(name: str, values: JSON, layer: int) -> JSON:
    """Return the value of one layer, of a list with one for each or of a number for all."""
    if not isinstance(values, list | tuple):
        return values
    if layer >= len(values):
        raise ValueError(f"{name} has {len(values)} values, and layer_types has more layers")
    return values[layer]


def _types(data: Mapping[str, JSON], rule: tuple[str, int], count: int) -> list[str]:
    """Return the types of `count` layers, of which every so many-th has full attention."""
    key, usual = rule
    value = data.get(key)
    every = whole_number(key, usual if value is None else value, 1)
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def _by_layer(rope: Rope, data: Mapping[str, JSON], model: Model) -> Entries | None:
    """Return the entries of a config that lists bases or scaled layers; None without a list."""
    kind = data.get("model_type")
    for name in _LISTS:
        if kind and data.get(name) is not None and name not in model.get("lists", ()):
            raise ValueError(f"{name} is not read by model_type {kind!r}; remove the key")
    if thetas := data.get("layer_rope_theta"):  # Granite and Muse: a base for each layer, or 0
        bases = [{} if "one_base" in model else {"rope_theta": theta} for theta in thetas]
        if len(set(thetas)) > 1 or not thetas[0]:
            return {
                f"rope_theta={theta or 0:g}": {**rope, **base} if theta else None
                for theta, base in zip(thetas, bases, strict=True)
            }
        rope.update(bases[0])
    scaled = data.get("rope_scaling_layers")
    layers = length("num_hidden_layers", data.get("num_hidden_layers"))
    if scaled is not None and layers is not None and len(scaled) < layers:  # Molmo 2
        return {"scaled": rope, "unscaled": {key: rope[key] for key in rope if key == "rope_theta"}}
    return None


def _is_entry(value: object) -> bool:
    return value is None or isinstance(value, Mapping)


def _nested(rope: Rope, own: Entries, data: Mapping[str, JSON], model: Model) -> Entries:
    """Return the entries of a nested rope_parameters; refuse what transformers reads otherwise."""
    name = data.get("model_type")
    entries = [value for value in rope.values() if isinstance(value, Mapping)]
    flat = {key: value for key, value in rope.items() if not _is_entry(value)}
    if beside := [key for key in flat if not any(each.get(key) == flat[key] for each in entries)]:
        raise ValueError(
            f"rope_parameters is nested by layer type and has {beside[0]!r} beside the entries, "
            "which no layer reads; move it into them"
        )
    nested: Entries = {key: value and dict(value) for key, value in rope.items() if key not in flat}
    if not name:
        return {**own, **nested}
    if not own and not model.get("nested"):
        raise ValueError(
            f"rope_parameters is nested by {', '.join(map(repr, rope))}, but all layers of "
            f"model_type {name!r} have one RoPE, and transformers ignores such entries; write "
            "one object that is not nested"
        )
    # models older than nested entries: the class fills in what is missing, and reads rope_scaling
    if "scaled_layers" in model and not model.get("flat"):
        if not data.get("rope_parameters"):
            raise ValueError(
                f"rope_scaling of model_type {name!r} is nested by layer type, and transformers "
                "ignores its entries; write them under rope_parameters"
            )
        if empty := [key for key, value in nested.items() if value is None]:
            raise ValueError(
                f"rope_parameters of {empty[0]!r} is null, and transformers then uses "
                f"{own.get(empty[0])}; write the values"
            )
        _check_needed(nested, model.get("needed_nested", ()))
        return {**_without(own, "rope_theta"), **nested}
    listed = listed_layer_types(data)  # types that no layer has need no entry
    own = {kind: own[kind] for kind in own if kind in nested or kind in listed or not listed}
    if missing := [kind for kind in own if kind not in nested]:
        raise ValueError(
            f"rope_parameters has no entry for {missing[0]!r}; model_type {name!r} needs one for "
            "each layer type"
        )
    _check_needed(nested, ("rope_theta", *model.get("needed_nested", ())))
    return {**own, **nested}


def _check_needed(nested: Entries, keys: Iterable[str]) -> None:
    """Refuse an entry without a key whose default transformers does not fill in."""
    for key in keys:
        for kind, entry in nested.items():
            if entry is not None and entry.get(key) is None:
                raise ValueError(f"rope_parameters of {kind!r} needs {key}")


def _flat(written: Rope, own: Entries, data: Mapping[str, JSON], model: Model) -> Entries:
    """Return the model's own entries, for a config with one flat rope_scaling or with none."""
    scaled_layers, name = model.get("scaled_layers", ()), data.get("model_type")
    if written and not model.get("flat"):
        if data.get("rope_parameters") or not scaled_layers:
            example = ", ".join(f'"{kind}": {{...}}' for kind in own)
            raise ValueError(
                f"rope_parameters of model_type {name!r} must be nested by layer type: "
                f"{{{example}}}; transformers does not read a flat one"
            )
        if written.get("rope_type") is None:
            raise ValueError(
                f"rope_scaling of model_type {name!r} needs rope_type; transformers does not read "
                "its type here"
            )
    for key in model.get("scaled_unread", ()):
        if written.get(key) is not None:
            raise ValueError(
                f"rope_scaling of model_type {name!r} has {key}, which its code replaces by that "
                "of the model; remove the key"
            )
    kind_of = written.get("rope_type") or written.get("type")
    scaling = {**(model.get("scaled_defaults", {}) if kind_of == "yarn" else {}), **written}
    scaled_layers = scaled_layers if written else ()
    unlisted = own.keys() & model.get("unlisted_layers", {}).keys()
    return {
        kind: scaling if value and kind in scaled_layers else value
        for kind, value in (
            _without(own, "rope_theta") | {kind: own[kind] for kind in unlisted}
        ).items()
    }


def _without(own: Entries, ending: str) -> Entries:
    """Return the class's entries without some keys, which keys beside the entries may replace."""
    return {
        kind: value and {key: value[key] for key in value if not key.endswith(ending)}
        for kind, value in own.items()
    }
