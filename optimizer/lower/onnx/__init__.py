"""Passes and inspection that all lowerings to ONNX share."""
