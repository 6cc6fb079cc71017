"""Choose and remove blocks, neurons, heads and hidden channels of a checkpoint."""
