"""The GPU kernels in Triton: `kernel` rotates, `fused` has more steps, `plan` plans a launch."""
