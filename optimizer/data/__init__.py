"""Data sets: rows, labels, images, and checks that a model can tell them apart."""
