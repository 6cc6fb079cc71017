"""Checkpoints that are quantized already: one file per format."""
