"""Integrations with other programs; each is imported when it is used.

`transformers` patches a loaded model (also of diffusers and timm), `sinks` is a cache for such a
model, `onnx` exports one, and `hub_kernel` writes layers for the library `kernels`. `vllm`,
`sglang`, `torchtitan` and `lmcache` are plug-ins of these programs; `mlx` has the RoPE layer for
models of mlx-lm.
"""
