"""Registries and layouts of the OCI specifications, and the stores they lie in."""
