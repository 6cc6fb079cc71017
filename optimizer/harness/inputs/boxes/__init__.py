"""Encode images with boxes; each box is a row of the model."""
