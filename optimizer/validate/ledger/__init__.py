"""Compare the model after every step with the model before it, on the same inputs."""
