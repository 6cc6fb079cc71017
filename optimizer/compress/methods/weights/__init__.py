"""Methods that choose the integers of a weight."""
