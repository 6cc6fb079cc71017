"""ONNX Runtime: its dialect, its build and its inspection."""
