"""The kernel of JAX arrays: plain `jax.numpy`, which XLA compiles to one loop."""
