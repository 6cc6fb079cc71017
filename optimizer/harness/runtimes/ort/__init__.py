"""ONNX Runtime, and onnxruntime-genai on the same model folder."""
