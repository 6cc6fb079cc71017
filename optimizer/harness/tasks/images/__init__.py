"""Tasks whose input is an image."""
