"""Other libraries, loaded when asked.

`transformers` patches a loaded model, `sinks` is a cache for one, `onnx` exports one.
"""
