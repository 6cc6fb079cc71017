"""Models that are given as an ONNX graph: the stored graph, its operators in torch, and its torch
module."""
