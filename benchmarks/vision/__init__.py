"""Models of images on a CPU."""
