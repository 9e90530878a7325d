"""What JAX arrays get: plain `jax.numpy`, which XLA makes one loop of."""
