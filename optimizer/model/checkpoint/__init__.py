"""A checkpoint on disk, and the torch model that it fills."""
