"""Sections of a recipe: keys, types, bounds and defaults. Defaults are defined only here."""
