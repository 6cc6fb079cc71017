"""Language models on a CPU."""
