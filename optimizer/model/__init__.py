"""Describe architectures, and open checkpoints as torch models."""
