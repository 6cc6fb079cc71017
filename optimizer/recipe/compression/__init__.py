"""The sections of a recipe about compression, and the methods that they name."""
