"""Read data sets (rows, labels, images) and check that a model can tell their inputs apart."""
