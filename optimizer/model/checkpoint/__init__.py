"""Open a checkpoint on disk, and fill a torch model with it."""
