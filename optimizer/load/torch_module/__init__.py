"""A model that is a torch module: found, imported, exported, and compared with its graph."""
