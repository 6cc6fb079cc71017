"""onnxruntime-web: its dialect and the packages for a browser."""
