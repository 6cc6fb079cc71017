"""Make a smaller checkpoint of the same architecture, with fewer neurons, heads or blocks."""
