"""The suite for one GPU."""
