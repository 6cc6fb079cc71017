"""Build a TensorRT engine, and watch the build."""
