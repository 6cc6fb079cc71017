"""A smaller checkpoint of the same architecture: fewer neurons, fewer heads, fewer blocks."""
