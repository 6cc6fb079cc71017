"""Apply the methods for activations: ranges, smoothing and rotation."""
