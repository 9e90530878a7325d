"""A small pre-norm transformer on bytes, whose position encoding and attention are data."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import rotary
from rotary.attention import elu_plus_one, favor_features, sinusoidal

from .data import IGNORED, VOCABULARY, Batch, seed_of

Tensor = torch.Tensor
Tables = tuple[Tensor, Tensor]  # cos and sin, (seq, head_dim / 2) float32
Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Features = Callable[[Tensor], Tensor]  # (..., seq, head_dim) to non-negative features

ENCODINGS = ("rope", "sinusoidal", "learned", "none")


@dataclasses.dataclass(frozen=True)
class Config:
    """What a model is.

    encoding   "rope", "sinusoidal" and "learned" (both added to the embedding), or "none"
    causal     whether a token sees earlier ones only
    attention  a name in ATTENTIONS
    length     most tokens a row may have where positions are learned
    base       of the frequencies of "rope"

    >>> Config(encoding="rotary")
    Traceback (most recent call last):
    ValueError: encoding must be one of rope, sinusoidal, learned, none; got 'rotary'
    """

    encoding: str = "rope"
    causal: bool = True
    attention: str = "softmax"
    layers: int = 4
    width: int = 128
    heads: int = 4
    length: int = 256
    base: float = 10_000.0
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        for name, known in (("encoding", ENCODINGS), ("attention", tuple(ATTENTIONS))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")

    @property
    def spec(self) -> rotary.Rotary:
        """The RoPE of one head."""
        return rotary.Rotary(head_dim=self.width // self.heads, base=self.base)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, turn: Turn, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v with q and k turned; all (batch, heads, seq, head_dim).

    >>> x = torch.ones(1, 1, 1, 2)
    >>> softmax_attention(x, x, 7 * x, lambda q, k: (q, k), causal=True)
    tensor([[[[7., 7.]]]])
    """
    q, k = turn(q, k)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def favor(x: Tensor) -> Tensor:
    """The positive random features of Performer, as many as x has channels, drawn from seed 0.

    >>> favor(torch.zeros(1, 4))  # exp(0) / sqrt(4)
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    found: Tensor = _favor_features(x.shape[-1])(x)
    return found


_favor_features = functools.cache(lambda width: favor_features(width, width, seed=0))


def linear_weights(
    q: Tensor,
    k: Tensor,
    turn: Turn,
    causal: bool,
    features: Features = elu_plus_one,
) -> tuple[Tensor, Tensor]:
    """Products of features, turned and not turned: (..., seq, seq), 0 where not seen.

    >>> x = torch.zeros(1, 1, 2, 2)  # features 1
    >>> [part.sum().item() for part in linear_weights(x, x, lambda q, k: (q, -k), causal=True)]
    [-6.0, 6.0]
    """
    q, k = features(q), features(k)
    turned_q, turned_k = turn(q, k)
    turned, kept = turned_q @ turned_k.mT, q @ k.mT
    return (turned.tril(), kept.tril()) if causal else (turned, kept)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, causal: bool,
    features: Features = elu_plus_one,
) -> Tensor:  # fmt: skip
    """Linear attention by all pairs: turned after the features, the denominator left as it is.

    Source: Su et al., RoFormer (arXiv 2104.09864), equation 19.

    >>> x = torch.ones(1, 1, 1, 2)
    >>> linear_attention(x, x, 7 * x, lambda q, k: (q, k), causal=True)
    tensor([[[[7., 7.]]]])
    """
    weights, norms = linear_weights(q, k, turn, causal, features)
    return weights @ v / norms.sum(-1, keepdim=True)


def linear_both(q: Tensor, k: Tensor, v: Tensor, turn: Turn, causal: bool) -> Tensor:
    """Linear attention whose denominator is turned too: weights sum to 1, and it may be near 0.

    What Su et al. (arXiv 2104.09864) avoid by equation 19.

    >>> x = torch.ones(1, 1, 1, 2)
    >>> linear_both(x, x, 7 * x, lambda q, k: (q, -k), causal=True)
    tensor([[[[7., 7.]]]])
    """
    weights, _ = linear_weights(q, k, turn, causal)
    return weights @ v / weights.sum(-1, keepdim=True)


def linear_normed(q: Tensor, k: Tensor, v: Tensor, turn: Turn, causal: bool) -> Tensor:
    """Linear attention without a denominator: every head's output is scaled to mean square 1.

    Source: Qin et al. (arXiv 2210.10340), NormAttention; here RMSNorm of each head, no weights.

    >>> x = torch.ones(1, 1, 1, 2)
    >>> linear_normed(x, x, 7 * x, lambda q, k: (q, k), causal=True)
    tensor([[[[1., 1.]]]])
    """
    weights, _ = linear_weights(q, k, turn, causal)
    return functional.rms_norm(weights @ v, v.shape[-1:])


FEATURES = {  # of each linear attention
    "linear": elu_plus_one, "linear both": elu_plus_one, "linear normed": elu_plus_one,
    "linear favor": favor,
}  # fmt: skip
ATTENTIONS = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "linear both": linear_both,
    "linear normed": linear_normed,
    "linear favor": functools.partial(linear_attention, features=favor),
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.causal = config.heads, config.causal
        self.attention = ATTENTIONS[config.attention]
        width = config.width
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wider = nn.Linear(width, 4 * width)
        self.narrower = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        """(batch, seq, width) from the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = self.attention(q, k, v, turn, self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrower(functional.gelu(self.wider(self.norms[1](x))))


class Model(nn.Module):
    """Logits of every token from tokens; `build` makes one whose weights follow from a seed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        if config.encoding == "learned":
            self.places = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def tables(self, seq: int) -> Tables:
        """cos and sin of the positions 0 .. seq - 1, exact, on the device of the model."""
        positions = torch.arange(seq, device=self.head.weight.device)
        return rotary.cos_sin(self.config.spec, positions)

    def forward(self, tokens: Tensor, tables: Tables | None = None) -> Tensor:
        """(batch, seq, vocabulary) from (batch, seq); `tables` in place of exact ones from 0 on."""
        seq, config = tokens.shape[1], self.config
        x = self.tokens(tokens) * math.sqrt(config.width)  # of unit size, as sines are
        if config.encoding == "learned":
            x = x + self.places.weight[:seq] * math.sqrt(config.width)
        elif config.encoding == "sinusoidal":
            x = x + _sines(seq, config.width).to(x)
        if config.encoding == "rope":
            cos, sin = self.tables(seq) if tables is None else tables
            spec = config.spec

            def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
                return rotary.rotate((q, k), cos, sin, spec, seq_dim=-2)
        else:

            def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
                return q, k

        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


def _deviation(name: str, config: Config) -> float:
    """Of the initial weights: GPT-2's, but embeddings so that times sqrt(width) they are of size 1.

    Learned positions start like tokens, as in BERT.
    """
    if name in ("tokens.weight", "places.weight"):
        return config.width**-0.5
    into_sum = name.endswith(("out.weight", "narrower.weight"))
    return 0.02 / math.sqrt(2 * config.layers) if into_sum else 0.02


def _sines(seq: int, width: int) -> Tensor:
    return torch.from_numpy(sinusoidal(torch.arange(seq).numpy(), width))


def build(config: Config, seed: int) -> Model:
    """A model whose weights are a function of (config, seed).

    Each is drawn from random numbers of its own name, so what two configs share starts equal.

    >>> rope, learned = (build(Config(encoding=name), seed=0) for name in ("rope", "learned"))
    >>> torch.equal(rope.head.weight, learned.head.weight)
    True
    """
    model = Model(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            chance = torch.Generator().manual_seed(seed_of(seed, zlib.crc32(name.encode())))
            nn.init.normal_(weight, std=_deviation(name, config), generator=chance)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


def bits(model: Model, batch: Batch, tables: Tables | None = None) -> float:
    """Cross-entropy of a model on what a batch asks for, in bits per byte.

    >>> batch = Batch(torch.tensor([[5, 6]]), torch.tensor([[6, 7]]))
    >>> 7.5 < bits(build(Config(layers=1), seed=0), batch) < 8.5  # before it has learned anything
    True
    """
    tokens, targets = (part.to(model.head.weight.device) for part in batch)
    logits = model(tokens, tables).flatten(0, 1).float()
    return functional.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORED
    ).item() / math.log(2)
