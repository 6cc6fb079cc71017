"""Load a model source into a checked checkpoint folder."""
