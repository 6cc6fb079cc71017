"""The TensorRT family: its dialect and its build."""
