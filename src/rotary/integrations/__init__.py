"""Other libraries: `transformers` patches a loaded model, `onnx` exports one; loaded when asked."""
