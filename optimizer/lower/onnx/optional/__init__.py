"""Inputs of a decoder's graph that a run may leave out."""
