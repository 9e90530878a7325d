"""Finds the tensors of a checkpoint that hold query and key channels, by rules on their names.

A name is split into what precedes the layers, the layer, the module and the parameter. A rule is a
regular expression that the whole module must match. A name that looks like a query or a key but
matches no rule is an error: to copy such a tensor unchanged could make the model wrong without any
message. If it is neither, the caller passes it in `leave`.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..configs import MODELS

# how a parameter moves with the rows of its weight, and the names of such parameters
PARAMETERS = {
    "rows": r"weight|bias|weight_packed|lora_B(?:\.\w+)??(?:\.weight|\.bias)?"
             r"|lora_magnitude_vector(?:\.\w+)??(?:\.weight)?",
    "inputs": r"lora_A(?:\.\w+)??(?:\.weight)?|(?:weight_)?g_idx"
              r"|(?:pre_quant|smooth|act|activation|in|input)_(?:\w+_)?(?:scales?|zero_point)",
    "words": r"qweight|qzeros",
    "scales": r"\w*scales?(?:_\w+)?|SCB|biases|weight_shape|weight_format|\w*zero_point",
    "unknown": r"weight\..+|zeros|perm|CB|B|s|workspace|W_q|meta|codes|codebooks"
                r"|lora_embedding_[AB].*",
}  # fmt: skip
# scales with a number for each row, or block of rows, in every format
SCALES_OF_ROWS = r"(?:q?weight_)?scales?(?:_\w+)?|SCB|biases|\w*zero_point"
LEFT = "left"  # the kind of tensors that look like a query or a key and must stay as they are


class Name(NamedTuple):
    """The parts of the name of one tensor, its kind, and the reason if it is left.

    group   the name without its parameter: weight, bias and scales of one projection share it
    before  the name up to its layer, which all tensors of the layer share
    """

    tensor: str
    group: str
    layer: int
    parameter: str
    kind: str
    reason: str = ""
    before: str = ""


_SELF = (
    r"(?:self_attn(?:\.\d)?|self_attention|attention(?:\.self)?|attn(?:\.attention)?|mixer"
    r"|temporal_block|shared_transformer\.self_attn|norm_attn_norm\.attn|text_attn)"
)
_Q = r"(?:q_proj|query|wq)"
_K = r"(?:k_proj|key|wk)"
# wqkv and query_key_value are packed in ways that shapes do not tell apart: for known models only
_QKV = r"(?:qkv_proj|Wqkv|c_attn|att_proj|W_pack)"
CACHE_SCALE = "one number for a cache"
# A kind, or LEFT and the reason, and the modules of this kind: the text between the number of the
# layer and the parameter. Rules of models.json for the model come first; then the first match here.
RULES = (
    ("left: cross-attention does not rotate",
     r"(?:.*[._])?(?:cross_attn|cross_attention|crossattention|encoder_attn)(?:[._].*)?"),
    ("left: linear attention does not rotate", r"(?:.*\.)?linear_attn\..*"),
    ("left: an indexer rotates in a layout of its own", r"(?:.*\.)?indexer\..*"),
    ("left: a latent has no channels of heads",
     rf"{_SELF}\.(?:q_a_proj|q_a_layernorm|q_a_norm|kv_a_layernorm|kv_a_norm|kv_b_proj|wkv_b)"
     r"|attn\.(?:wq_a|wkv_b|kv_norm)|attn_(?:q_a|q_a_norm|kv_a_norm|kv_b|k_b|v_b)"),
    ("left: summed up, so that no order matters", rf"{_SELF}\.lambda_[qk][12]"),
    (f"left: {CACHE_SCALE}", r"self_attn(?:\.attn)?\.[qkv]_scale"),
    ("query and key", rf"{_SELF}\.{_QKV}|attn_qkv"),
    ("latent query, with a gate", r"self_attn\.q_gate_proj"),
    ("latent query", rf"{_SELF}\.(?:q_b_proj|wq_b)|attn_q_b"),
    ("latent key", rf"{_SELF}\.(?:kv_a_proj_with_mqa|wkv_a(?:_with_mqa)?)|attn_kv_a_mqa"),
    ("query", rf"{_SELF}\.{_Q}|attn_q|{_SELF}\.linear_q_adapter_list\.\d+\.1"),
    ("key", rf"{_SELF}\.{_K}|attn_k|{_SELF}\.linear_k_adapter_list\.\d+\.1"),
    ("left: an inner half", rf"{_SELF}\.linear_[qk]_adapter_list\.\d+\.0"),
    ("query norm",
     rf"{_SELF}\.(?:q_norm|q_layernorm|query_layernorm|q_ln)(?:\.norms\.\d+)?|attn_q_norm"),
    ("key norm",
     rf"{_SELF}\.(?:k_norm|k_layernorm|key_layernorm|k_ln)(?:\.norms\.\d+)?|attn_k_norm"),
)  # fmt: skip
# code bases with tensor names of their own, and the layouts of their files whatever a config says
CODE_BASES = {
    "Meta's or Mistral's own files": (r"layers\.\d+\.attention\.w[qk]\..*", ("interleaved",)),
    "DeepSeek's own files": (r"layers\.\d+\.attn\.(?:wq_b|wkv_a)\..*", ("interleaved",)),
    "GGUF": (r"blk\.\d+\.attn_.*", ("half", "interleaved")),
}

_LAYER = re.compile(
    r"(?:.*?\.)??(?:\w+_)?(?:layers|layer|h|blocks|block|blk)\.(?P<layer>\d{1,9})\.(?P<rest>.+)"
)
_PARAMETER = re.compile(
    r"(?P<module>.+?)(?:\.(?:linear|base_layer|original_module))?\.(?P<parameter>"
    + "|".join(PARAMETERS.values())
    + ")"
)
_OTHER_PART = re.compile(
    r"(?:^|\.)(?:visual|vision|vit|siglip|image|audio|speech|codec|video|protein|semantic|vq|sam"
    r"|talker|token2wav|code2wav|qformer|perceiver|resampler|projector|connector|multi_modal|mm)\w*\."
)
_LOOKS = re.compile(
    r"(?:^|[._])(?:q|k|qk|kv|qkv)(?:[._\d]|$)|quer(?:y|ies)|(?:^|[._])keys?(?:[._]|$)|qkv"
    r"|(?:^|[._])w(?:q|k)|W_pack|(?:^|[._])c_attn|(?:att|mha)[\w.]*[._]in_proj",
    re.IGNORECASE,
)
_WIDE = re.compile(
    r"(?:\w*(?:mlp|ffn|feed_forward)\w*\.)(?:up_proj|gate_proj|gate_up_proj|fc1|fc_in|c_fc|w1|w3"
    r"|dense_h_to_4h)\.weight"
)
_ATTENTION = re.compile(r"(?:.*\.)?\w*(?:att|mha)\w*\..+", re.IGNORECASE)
# parts of names of the other tensors of an attention module, and of hyper connections around it
_NOT_ROTATED = re.compile(
    r"(?:attn_)?(?:[vogbrf](?:_[ab])?(?:_proj)?|w[vo]|values?|dense|proj|c_proj|dt_proj|experts|mlp"
    r"|(?:linear|to|dense)_\w+|out\w*|hc_\w+|\w*(?:norm|ln|gate|conv|router|compressor|bias|mask|emb|decay"
    r"|rate|_hc|hyper_connection|sink)\w*)",
    re.IGNORECASE,
)
_SCALE = re.compile(r"\w*scal\w*", re.IGNORECASE)
# a vector may scale each channel of queries (per_dim_scale of TimesFM) unless its name says more
_OTHER_SCALE = re.compile(r"\w*(?:layer|softmax|ssmax|logit)_scal\w*", re.IGNORECASE)


def widened_layer(tensor: str) -> str:
    """Return the layer's prefix of an MLP weight that widens the hidden state; "" for others."""
    match = _LAYER.fullmatch(tensor)
    return tensor[: match.start("rest")] if match and _WIDE.fullmatch(match["rest"]) else ""


def unknown_in_attention(tensor: str, is_vector: bool = False) -> bool:
    """Whether a tensor of an attention module has a name that no rule here knows."""
    match = _LAYER.fullmatch(tensor)
    if not match or not _ATTENTION.fullmatch(match["rest"]):
        return False
    is_other = _OTHER_PART.search(tensor[: match.start("layer")])
    scale, parts = _OTHER_SCALE if is_vector else _SCALE, match["rest"].split(".")
    return not is_other and not any(
        _NOT_ROTATED.fullmatch(part) or scale.fullmatch(part) for part in parts
    )


def classify(tensor: str, model: str = "") -> Name | None:
    """Classify one tensor of a model type by the rules; None if no rule applies.

    >>> name = classify("model.layers.3.self_attn.k_proj.bias")
    >>> name.group, name.layer, name.parameter, name.kind
    ('model.layers.3.self_attn.k_proj', 3, 'bias', 'key')
    >>> classify("model.layers.3.self_attn.v_proj.bias") is None
    True
    """
    match = _LAYER.fullmatch(tensor)
    if _OTHER_PART.search(tensor[: match.start("layer")] if match else tensor):
        reason = "not of the text model"
        return Name(tensor, tensor, -1, "", LEFT, reason) if _LOOKS.search(tensor) else None
    if not match:
        return None
    before, rest, layer = tensor[: match.start("rest")], match["rest"], int(match["layer"])
    named = _PARAMETER.fullmatch(rest)
    if named and (rule := rule_of(named["module"], model)):
        group, parameter = before + named["module"], named["parameter"]
    else:
        rule, group, parameter = rule_of(rest, model), tensor, ""
        if not rule.startswith(LEFT) and not rule.endswith("norm"):
            return None
    kind, _, reason = rule.partition(": ")
    return Name(tensor, group, layer, parameter, kind, reason, before)


@functools.lru_cache(maxsize=2**14)  # every layer has the same modules
def rule_of(module: str, model: str) -> str:
    """Return the kind of the first rule that a module of a model type matches; "" for none.

    >>> rule_of("attention.query_key_value", "gpt_neox")
    'query and key, per head'
    """
    inner = re.fullmatch(rf"{_SELF}\.(.+)", module)
    weights = MODELS.get(model, {}).get("weights", {})
    if inner and (kind := weights.get("modules", {}).get(inner[1])):
        return str(kind)
    return next((kind for kind, modules in RULES if re.fullmatch(modules, module)), "")


def code_base(tensors: Iterable[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return (name, layouts of its files) of a code base that tensor names show, or None.

    >>> code_base(["layers.0.attention.wq.weight"])
    ("Meta's or Mistral's own files", ('interleaved',))
    """
    names = list(tensors)
    for name, (pattern, layouts) in CODE_BASES.items():
        if any(re.fullmatch(pattern, tensor) for tensor in names):
            return name, layouts
    return None


def _holds_channels(name: Name) -> bool:
    """Whether a tensor has the channels of queries or keys, by a rule, and is no scale of them."""
    packed = f"{PARAMETERS['rows']}|{PARAMETERS['words']}"
    is_value = bool(re.fullmatch(packed, name.parameter or "weight"))
    return is_value and name.kind not in (LEFT, "output")


def recognized(
    tensors: Iterable[str], model: str = "", leave: Sequence[str] = ()
) -> tuple[Name, ...]:
    """Classify all tensors that hold or look like queries or keys, in their order.

    leave  names of tensors to leave as they are, with * for any text
    Raises ValueError for a tensor that looks like a query or key and matches no rule, for one whose
    parameter is not known, if no tensor is to be moved, and for a name in `leave` that no tensor
    has, or that is a known query or key while others of its layer move.

    >>> [name.kind for name in recognized(["layers.0.attention.wk.weight"])]
    ['key']
    >>> recognized(["layers.0.self_attn.my_q_proj.weight"])
    Traceback (most recent call last):
    ValueError: tensor 'layers.0.self_attn.my_q_proj.weight' looks like a query or a key, but \
its name is not known; if it is neither, copy it unchanged with --leave (leave=[...])
    """
    if isinstance(leave, str):
        raise TypeError(f"leave must be a list of names, got a string: pass leave=[{leave!r}]")
    tensors = list(tensors)
    if refused := MODELS.get(model, {}).get("weights", {}).get("refused"):
        raise ValueError(f"{model!r} cannot be converted: {refused}")
    asked: dict[str, Name] = {}
    for pattern in leave:
        matching = [tensor for tensor in tensors if fnmatchcase(tensor, pattern)]
        if not matching:
            raise ValueError(f"leave names {pattern!r}, but no tensor has such a name")
        asked |= {tensor: Name(tensor, tensor, -1, "", LEFT, "asked for") for tensor in matching}
    names: list[Name] = []
    for tensor in tensors:
        if name := asked.get(tensor) or classify(tensor, model):
            names.append(name)
        elif _LOOKS.search(tensor):
            owner, _, parameter = tensor.rpartition(".")
            if (known := classify(f"{owner}.weight", model)) and known.kind != LEFT:
                raise ValueError(
                    f"tensor {tensor!r} belongs to a query or a key, but it is not known how "
                    f"{parameter!r} is applied to its channels: merge it into the weight first"
                )
            raise ValueError(
                f"tensor {tensor!r} looks like a query or a key, but its name is not known; if it "
                "is neither, copy it unchanged with --leave (leave=[...])"
            )
    moving = {name.before: name for name in names if _holds_channels(name)}
    for known in filter(None, (classify(tensor, model) for tensor in asked)):
        if _holds_channels(known) and known.before in moving:
            raise ValueError(
                f"leave names {known.tensor!r}, which is known to hold channels that move with "
                f"those of {moving[known.before].tensor!r}: if one moves alone, all scores of the "
                "layer are wrong; take it out of leave (--leave)"
            )
    if all(name.kind == LEFT for name in names):
        few = ", ".join(tensors[:4]) or "none"
        raise ValueError(f"no tensor is a query or key projection; the first names are: {few}")
    return tuple(names)
