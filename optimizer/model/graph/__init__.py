"""A model that is an ONNX graph: its record, its operators in torch, and the torch module."""
