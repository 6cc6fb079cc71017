"""Methods for activations: their ranges, smoothing and rotation."""
