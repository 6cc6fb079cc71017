"""Sections of a recipe that stages take as they are, and the kinds of value in them."""
