"""Commands that make a bundle from a recipe."""
