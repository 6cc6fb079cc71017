"""ONNX Runtime, and onnxruntime-genai on the same folder of ONNX."""
