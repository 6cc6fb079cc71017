"""Compare an ONNX file with what becomes of it, node by node."""
