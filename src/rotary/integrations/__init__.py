"""Other libraries, loaded when asked.

`transformers` patches a loaded model, `sinks` is a cache for one, `onnx` exports one; `vllm` is a
plug-in of that server.
"""
