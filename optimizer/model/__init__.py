"""Facts about architectures, and a checkpoint as a torch model."""
