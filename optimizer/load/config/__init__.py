"""Read config.json and the files next to it."""
