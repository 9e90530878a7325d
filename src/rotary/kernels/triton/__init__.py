"""The GPU kernel, in Triton: `kernel` rotates, `fused` has more steps, `plan` lays out a launch."""
