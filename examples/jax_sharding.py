"""RoPE on many devices of JAX: each turns its own tokens, and nothing is sent between them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rotary
from rotary import positions

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)  # this machine plays four
mesh = jax.make_mesh((2, 2), ("heads", "tokens"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
spec = rotary.Rotary(head_dim=64, base=500_000.0)
rng = np.random.default_rng(0)
q = rng.standard_normal((1, 8, 256, 64), np.float32)  # (batch, heads, seq, head_dim)
k = rng.standard_normal((1, 4, 256, 64), np.float32)
want = jax.jit(lambda q, k: rotary.apply(spec, q, k))(q, k)  # on one device


def report(name, function, *arguments, tokens=slice(None)):
    """Whether a call on four devices equals the one on one, and what it sends."""
    compiled = jax.jit(function).lower(*arguments).compile()
    sent = re.findall(r" (all-[\w-]+|collective-[\w-]+|reduce-scatter)\(", compiled.as_text())
    is_equal = all(
        np.array_equal(got, expected[:, :, tokens])
        for got, expected in zip(compiled(*arguments), want, strict=True)
    )
    print(f"{name}: equal to one device: {is_equal}, collectives compiled: {len(sent)}")


# automatic: shard the arguments, and write the call as for one device. Positions are 0 .. seq - 1
# of the whole sequence, and every device makes its own part of the tables.
sharded = P(None, "heads", "tokens")
held_q, held_k = (jax.device_put(x, NamedSharding(mesh, sharded)) for x in (q, k))
report("automatic", lambda q, k: rotary.apply(spec, q, k), held_q, held_k)


# shard_map: the function sees the tokens of one device, so it must say where they are. Without
# positions every device would count from 0.
def contiguous(q, k):
    count = q.shape[2]
    at = jnp.arange(count) + count * jax.lax.axis_index("tokens")
    return rotary.apply(spec, q, k, positions=at)


own = jax.shard_map(contiguous, mesh=mesh, in_specs=(sharded,) * 2, out_specs=(sharded,) * 2)
report("shard_map", own, held_q, held_k)


# the same where a causal mask is balanced: every device holds a piece of the head and of the tail
order = np.concatenate([positions.shard(256, rank, 2, "head_tail") for rank in range(2)])
balanced = jax.shard_map(
    lambda q, k, at: rotary.apply(spec, q, k, positions=at),
    mesh=mesh,
    in_specs=(sharded, sharded, P("tokens")),
    out_specs=(sharded, sharded),
)
report("shard_map, head and tail", balanced, q[:, :, order], k[:, :, order],
       order.astype(np.int32), tokens=order)  # fmt: skip
