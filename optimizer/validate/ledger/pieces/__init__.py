"""Pieces of a graph, each judged on the tensors that torch computed."""
