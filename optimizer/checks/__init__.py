"""Checks of a recipe before any work: by its model's config alone, and by its targets."""
