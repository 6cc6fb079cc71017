"""Benchmarks of ONNX files."""
