"""Load an ONNX file: find it, refuse what cannot be proven, and bring it into one layout."""
