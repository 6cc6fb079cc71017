"""Puts a finished bundle where it is used: a file per kind of place."""
