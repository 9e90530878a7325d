"""A small Llama in plain JAX: tensor parallel over mesh axis x, context parallel over y."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rotary

LAYERS, BATCH, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1, 2, 48, 96, 4, 2, 32, 23
SPEC = rotary.Rotary(head_dim=HEAD_DIM)
WEIGHTS = {  # shape, and what is cut by tensor parallelism; one entry for each layer comes first
    "q": ((WIDTH, HEADS, HEAD_DIM), P(None, None, "x")),
    "k": ((WIDTH, KV_HEADS, HEAD_DIM), P(None, None, "x")),
    "v": ((WIDTH, KV_HEADS, HEAD_DIM), P(None, None, "x")),
    "o": ((HEADS, HEAD_DIM, WIDTH), P(None, "x")),
    "gate": ((WIDTH, HIDDEN), P(None, None, "x")),
    "up": ((WIDTH, HIDDEN), P(None, None, "x")),
    "down": ((HIDDEN, WIDTH), P(None, "x")),
    "gain": ((2, WIDTH), P()),
    "head": ((WIDTH, VOCABULARY), P()),
}
COLLECTIVE = re.compile(
    r"= (\([^()]*\)|\S+) (all-gather|all-reduce|all-to-all|ragged-all-to-all|reduce-scatter"
    r"|collective-permute|collective-broadcast|send|recv)(?:-start)?\("
)
CUTS = {name: cut for name, (_, cut) in WEIGHTS.items()}
TURNS = {
    "rotated": lambda q, k, p: rotary.apply(SPEC, q, k, positions=p),
    "not rotated": lambda q, k, p: (q, k),
}


def collectives(text):
    shapes = re.compile(r"\w+\[[\d,]*\]")
    return sorted(f"{name} {shapes.findall(result)}" for result, name in COLLECTIVE.findall(text))


def furthest(got, want):
    return max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def same(y):
    return y


def llama(weights, x, p, all_p, turn, gathered=same, summed=same):
    """Logits (batch, seq, vocabulary) of embedded tokens x at positions p; keys are at all_p.

    gathered  keys and values of this device to those of the whole sequence
    summed    parts of a sum over heads or hidden channels to the sum
    """
    for layer in range(LAYERS):
        w = {name: weight[layer] for name, weight in weights.items()}
        h = normed(x) * w["gain"][0]
        q, k, v = (jnp.einsum("bsw,whd->bhsd", h, w[name]) for name in "qkv")
        q, k = turn(q, k, p)
        k, v = (jnp.repeat(gathered(y), HEADS // KV_HEADS, axis=1) for y in (k, v))
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / HEAD_DIM**0.5
        scores = jnp.where(p[:, None] >= all_p, scores, -jnp.inf)
        mixed = jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores), v)
        x = x + summed(jnp.einsum("bhsd,hdw->bsw", mixed, w["o"]))
        h = normed(x) * w["gain"][1]
        x = x + summed((jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])
    return normed(x) @ weights["head"][0]


def normed(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def over_devices(turn, mesh):
    """The same model as one program for each device."""

    def local(weights, x, p, all_p):
        return llama(
            weights, x, p, all_p, turn,
            gathered=lambda y: jax.lax.all_gather(y, "y", axis=2, tiled=True),
            summed=lambda y: jax.lax.psum(y, "x"),
        )  # fmt: skip

    specs = (CUTS, P(None, "y"), P("y"), P())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "y"))


def shared_model(mesh, tokens):
    """Both ways to share the model, against one device, with `tokens` in the order they stand."""
    rng = np.random.default_rng(5)
    weights = {
        name: (rng.standard_normal((LAYERS, *shape)) / 7).astype(np.float32)
        for name, (shape, _) in WEIGHTS.items()
    }
    x, pull = (
        rng.standard_normal((BATCH, len(tokens), size)).astype(np.float32)
        for size in (WIDTH, VOCABULARY)
    )

    def trained(model):
        def logits_and_gradients(weights, x, pull, *rest):
            logits, back = jax.vjp(lambda *y: model(*y, *rest), weights, x)
            return logits, *back(pull)

        return jax.jit(logits_and_gradients)

    def alone(turn):
        return lambda *arguments: llama(*arguments, turn)

    values = (weights, x[:, tokens], pull[:, tokens], tokens, tokens)
    cuts = (CUTS, P(None, "y"), P(None, "y"), P("y"), P())
    shardings = jax.tree.map(lambda cut: NamedSharding(mesh, cut), cuts)
    placed = jax.device_put(values, shardings)
    one_off = np.where(np.arange(len(tokens)) < len(tokens) // 2, tokens, tokens + 1)
    planted = (*placed[:3], jax.device_put(one_off, shardings[3]), placed[4])
    want = trained(alone(TURNS["rotated"]))(*values)
    found = {"largest": furthest(want, jax.tree.map(jnp.zeros_like, want))}
    for name, turn in TURNS.items():
        for way, model in (("automatic", alone(turn)), ("shard_map", over_devices(turn, mesh))):
            compiled = trained(model).lower(*placed).compile()
            found[f"{way}, {name}"] = {
                "furthest": furthest(compiled(*placed), want),
                "furthest_planted": furthest(compiled(*planted), want),
                "collectives": collectives(compiled.as_text()),
            }
    return found
