"""Publish a finished bundle to registries, stores and hubs, and fetch it from there."""
