"""Read data sets: rows, labels, images, and checks that a model can distinguish them."""
