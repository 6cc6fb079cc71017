"""Laws of answers about images."""
