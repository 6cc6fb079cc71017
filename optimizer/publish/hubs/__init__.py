"""Registries that hold each version as a folder of files."""
