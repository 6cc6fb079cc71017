"""Build TensorRT engines."""
