"""Compare every form of a model with the form before it, on the same inputs."""
