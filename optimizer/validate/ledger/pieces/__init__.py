"""Pieces of a graph, each judged alone on the tensors that torch computed."""
