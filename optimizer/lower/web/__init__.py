"""onnxruntime-web: its dialect and the packages that a browser needs."""
