"""Integrations with other programs; each is imported when it is used.

`transformers` patches a loaded model (also of diffusers and timm), `sinks` is a cache for one,
`onnx` exports one, `hub_kernel` writes a layer for the library `kernels`. `vllm`, `sglang`,
`torchtitan` and `lmcache` are plug-ins of these programs; `mlx` is the rope of a model of mlx-lm.
"""
